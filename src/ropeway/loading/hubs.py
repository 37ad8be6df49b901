"""What a repository on Hugging Face or ModelScope offers, and which of its files make up the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ropeway.errors import LoadError, Unsupported
from ropeway.loading.download import RemoteFile, Retries, get
from ropeway.loading.store import safe_name

if TYPE_CHECKING:
    import httpx

_SMALL = (".json", ".jinja", ".txt")
_VOCABULARIES = ("tokenizer.model", "spiece.model")
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class Repository:
    revision: str
    """The commit, where the hub tells it; else the branch or tag."""
    files: tuple[RemoteFile, ...]


def hugging_face(client: httpx.Client, base: str, repository: str, revision: str, retries: Retries) -> Repository:
    """Raises ``ModelNotFound``, ``LoadError``."""
    answer = _json(
        get(client, f"{base}/api/models/{repository}/revision/{quote(revision, safe='')}?blobs=true", retries)
    )
    commit = str(answer.get("sha") or revision)
    files = []
    for entry in _listed(answer.get("siblings"), repository):
        name = safe_name(entry.get("rfilename"), repository)
        large = _object(entry.get("lfs"))
        files.append(
            RemoteFile(
                name,
                f"{base}/{repository}/resolve/{quote(commit, safe='')}/{quote(name)}",
                size=large.get("size", entry.get("size")),
                sha256=large.get("sha256"),
            )
        )
    return Repository(commit, tuple(files))


def modelscope(client: httpx.Client, base: str, repository: str, revision: str, retries: Retries) -> Repository:
    """Raises ``ModelNotFound``, ``LoadError``."""
    query = f"Revision={quote(revision, safe='')}"
    answer = _json(get(client, f"{base}/api/v1/models/{repository}/repo/files?{query}&Recursive=true", retries))
    files = []
    for entry in _listed(_object(answer.get("Data")).get("Files"), repository):
        if entry.get("Type") == "tree":
            continue
        name = safe_name(entry.get("Path"), repository)
        files.append(
            RemoteFile(
                name,
                f"{base}/api/v1/models/{repository}/repo?{query}&FilePath={quote(name, safe='')}",
                size=entry.get("Size"),
                sha256=entry.get("Sha256") or None,
            )
        )
    return Repository(revision, tuple(files))


def select(files: Sequence[RemoteFile], wanted: str | None, source: str) -> tuple[list[RemoteFile], str]:
    """The files to fetch and what to open: ``wanted`` (a ``.gguf`` file; all parts of it), else the safetensors with
    everything around them, else the only GGUF there is. Never pickles, never code.

    Raises ``LoadError`` when the choice is not clear, ``Unsupported`` when there is nothing to choose.
    """
    ggufs = [file for file in files if file.name.endswith(".gguf")]
    if wanted is not None:
        parts = _parts(ggufs, wanted)
        if not parts:
            raise LoadError(f"{source}: no such file; its .gguf files: {_names(ggufs)}")
        return parts, parts[0].name
    weights = [file for file in files if _top_level(file) and file.name.endswith(".safetensors")]
    if weights:
        # Some repositories hold the same weights a second time, under the names of the maker's own code.
        named = [file for file in weights if file.name.startswith("model")]
        return [*_around(files), *(named or weights)], ""
    if not ggufs:
        raise Unsupported(f"{source} holds neither safetensors nor GGUF weights; other formats are not supported")
    first = _parts(ggufs, ggufs[0].name)
    if len(first) < len(ggufs):
        raise LoadError(f"{source} holds several models; name one, as in {source}:{ggufs[0].name} ({_names(ggufs)})")
    return first, first[0].name


def _around(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Configuration, tokenizer and templates."""
    return [
        file
        for file in files
        if (_top_level(file) and (file.name.endswith(_SMALL) or file.name in _VOCABULARIES))
        or (file.name.startswith("additional_chat_templates/") and file.name.endswith(".jinja"))
    ]


def _parts(ggufs: Sequence[RemoteFile], name: str) -> list[RemoteFile]:
    """The file of that name with, if it is one part of a split model, all the others, in order."""
    split = _SPLIT.fullmatch(name)
    if split is None:
        return [file for file in ggufs if file.name == name]
    parts = [
        file
        for file in ggufs
        if (other := _SPLIT.fullmatch(file.name))
        and other["stem"] == split["stem"]
        and other["count"] == split["count"]
    ]
    return sorted(parts, key=lambda file: file.name)


def _top_level(file: RemoteFile) -> bool:
    return len(PurePosixPath(file.name).parts) == 1


def _names(files: Sequence[RemoteFile]) -> str:
    return ", ".join(sorted(file.name for file in files)) or "none"


def _listed(files: Any, repository: str) -> list[dict[str, Any]]:
    if not isinstance(files, list) or not all(isinstance(entry, dict) for entry in files):
        raise LoadError(f"the hub does not list the files of {repository}; is this a model hub?")
    return files


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{response.url} does not answer in JSON; is this a model hub?") from error
    if not isinstance(answer, dict):
        raise LoadError(f"{response.url} answers something else than a model; is this a model hub?")
    return answer
