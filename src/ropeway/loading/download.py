"""One file over HTTP: resumed after broken connections, verified, and never half there under its final name."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from ropeway.errors import LoadError, ModelNotFound

if TYPE_CHECKING:
    import httpx

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes of it that are there, and its size if that is known."""

CHUNK = 1 << 20
_T = TypeVar("_T")
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    name: str
    """Path in the model's folder, with ``/``."""
    url: str
    size: int | None = None
    sha256: str | None = None
    """What its source says the content is, in lower-case hex; None: it doesn't say."""

    def __post_init__(self) -> None:
        """Sources are not trusted: raises ``LoadError`` naming the URL for a field that is not what it should be. The
        hash becomes part of paths in the store."""
        if not isinstance(self.name, str):
            raise LoadError(f"{self.url} is listed with {self.name!r} for a file name")
        if self.size is not None and (type(self.size) is not int or self.size < 0):
            raise LoadError(f"{self.url} is listed with {self.size!r} for a size in bytes")
        if self.sha256 is not None:
            sha256 = str(self.sha256).lower()
            if not _SHA256.fullmatch(sha256):
                raise LoadError(f"{self.url} is listed with {self.sha256!r} for a SHA-256, which has 64 hex digits")
            object.__setattr__(self, "sha256", sha256)


@dataclass(frozen=True)
class Retries:
    """How broken connections are met. An attempt that brought bytes starts the count anew."""

    attempts: int = 4
    first_wait_s: float = 0.5
    """Doubled for every further attempt, up to 8 s."""


class _Broken(Exception):
    """Worth another attempt."""


def http_client(token: str | None = None) -> httpx.Client:
    """A client for ``get`` and ``download``. ``token`` is sent as a bearer token, but not to hosts redirected to."""
    import httpx  # at first use: whoever has the model already need not wait for it

    headers = {"User-Agent": "ropeway", "Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.Client(headers=headers, follow_redirects=True, timeout=httpx.Timeout(60.0, connect=15.0))


def get(client: httpx.Client, url: str, retries: Retries, *, accept: str = "*/*") -> httpx.Response:
    """A small document. Raises ``ModelNotFound`` (404), ``LoadError`` (anything else)."""

    def attempt() -> httpx.Response:
        response = client.get(url, headers={"Accept": accept})
        _check_status(response)
        return response

    return _retried(attempt, url, retries, lambda: 0)


def download(client: httpx.Client, file: RemoteFile, part: Path, *, progress: Progress, retries: Retries) -> str:
    """Fetch ``file`` into ``part`` and return its SHA-256 in hex.

    What ``part`` holds from an earlier run is kept when the content is pinned by a hash. Raises ``LoadError``: with
    both hashes when the content is not what its source promised (``part`` is removed then), or when the connection
    broke too often (``part`` stays, to be resumed); ``ModelNotFound`` when there is no such file.
    """
    transfer = _Transfer(client, file, part, progress)
    _retried(transfer.attempt, file.url, retries, lambda: transfer.done)
    found = transfer.digest.hexdigest()
    if transfer.expected is not None and found != transfer.expected:
        part.unlink()
        raise LoadError(
            f"{file.name} from {file.url} is not what was expected: its SHA-256 is {found}, not {transfer.expected}; "
            "the download was removed"
        )
    return found


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class _Transfer:
    """The state of one download over its attempts."""

    def __init__(self, client: httpx.Client, file: RemoteFile, part: Path, progress: Progress) -> None:
        self._client = client
        self._file = file
        self._part = part
        self._progress = progress
        self._etag: str | None = None
        self.expected = file.sha256
        self.digest = hashlib.sha256()
        self.done = 0
        if file.sha256 is not None and part.exists():
            with part.open("rb") as stream:
                while chunk := stream.read(CHUNK):
                    self._take(chunk)

    def attempt(self) -> None:
        with self._part.open("ab") as stream:
            if self._file.size is not None and self.done == self._file.size:
                return
            if self.done and self.expected is None and self._etag is None:
                self._restart(stream)  # nothing would tell whether the rest belongs to the same content
            headers = {"Range": f"bytes={self.done}-"} if self.done else {}
            if self.done and self._etag is not None:
                headers["If-Range"] = self._etag
            with self._client.stream("GET", self._file.url, headers=headers) as response:
                if response.status_code == 416:
                    self._restart(stream)
                    raise _Broken("the server has no bytes beyond those already here")
                _check_status(response)
                self._note_identity(response)
                if not (response.status_code == 206 and _first_byte(response) == self.done):
                    self._restart(stream)
                total = self._total(response)
                stream.truncate(self.done)
                for chunk in response.iter_bytes():
                    stream.write(chunk)
                    self._take(chunk)
                    self._progress(self._file.name, self.done, total)
            if total is not None and self.done != total:
                if self.done > total:
                    self._restart(stream)
                raise _Broken(f"{self.done} of {total} bytes came")

    def _take(self, chunk: bytes) -> None:
        self.digest.update(chunk)
        self.done += len(chunk)

    def _restart(self, stream: IO[bytes]) -> None:
        stream.truncate(0)
        self.digest = hashlib.sha256()
        self.done = 0

    def _note_identity(self, response: httpx.Response) -> None:
        """Remember what names the content: the ETag, and Hugging Face's SHA-256 on the redirect to its storage."""
        etag = response.headers.get("ETag")
        self._etag = etag if etag and not etag.startswith("W/") else None
        for hop in (*response.history, response):
            linked = hop.headers.get("X-Linked-ETag", "").strip('"').lower()
            if self.expected is None and _SHA256.fullmatch(linked):
                self.expected = linked

    def _total(self, response: httpx.Response) -> int | None:
        if self._file.size is not None:
            return self._file.size
        length = response.headers.get("Content-Length")
        return self.done + int(length) if length is not None and "Content-Encoding" not in response.headers else None


def _first_byte(response: httpx.Response) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _check_status(response: httpx.Response) -> None:
    if response.is_success:
        return
    if response.status_code in _RETRIED:
        raise _Broken(f"status {response.status_code}")
    url = response.request.url
    if response.status_code in (404, 410):
        raise ModelNotFound(f"{url} does not exist")
    if response.status_code == 401:  # Hugging Face says so of what does not exist, too
        raise ModelNotFound(f"{url} does not exist, or is private; for a private one set HF_TOKEN")
    if response.status_code == 403:
        raise LoadError(f"{url} refuses access; for a gated model accept its terms there and set HF_TOKEN")
    raise LoadError(f"{url} answers with status {response.status_code}")


def _retried(attempt: Callable[[], _T], url: str, retries: Retries, done: Callable[[], int]) -> _T:
    import httpx

    failures = 0
    while True:
        before = done()
        try:
            return attempt()
        except (_Broken, httpx.TransportError) as error:
            failures = 1 if done() > before else failures + 1
            if failures >= retries.attempts:
                raise LoadError(
                    f"cannot fetch {url}: {error or type(error).__name__} (after {failures} attempts); check the "
                    "network, or name a local folder or .gguf file"
                ) from error
        except (httpx.InvalidURL, httpx.TooManyRedirects, httpx.DecodingError) as error:
            raise LoadError(f"cannot fetch {url}: {error}") from error
        time.sleep(min(retries.first_wait_s * 2 ** (failures - 1), 8.0))
