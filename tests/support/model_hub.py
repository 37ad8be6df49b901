"""Model hubs and a package index on 127.0.0.1, with the faults of real networks on demand."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wheel(members: Mapping[str, bytes]) -> bytes:
    """A wheel's bytes. Names are taken as they are, unsafe ones too."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@dataclass
class Faults:
    """What goes wrong."""

    breaks: int = 0
    """How many more times a connection breaks in the middle of a content."""
    ignore_range: bool = False
    """Answer every request with the whole content."""
    busy: int = 0
    """How many more requests are answered with status 503."""
    tamper: Callable[[bytes], bytes] = field(default=lambda content: content)
    """What arrives in place of the content."""
    relist: Callable[[Any], Any] = field(default=lambda listing: listing)
    """What arrives in place of a listing in JSON."""


@dataclass
class Seen:
    """A request for a content."""

    path: str
    range: str | None
    authorization: str | None


class ModelHub:
    """Serves ``hf`` and ``modelscope`` repositories and ``packages``. Contents of repositories are behind a redirect to
    another host name, as hubs have it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.storage = f"http://localhost:{port}/storage"
        self.hf: dict[str, dict[str, bytes]] = {}
        """Repository -> file -> content."""
        self.listed_hashes = True
        """Whether Hugging Face's listing has SHA-256 (else they come with the redirect)."""
        self.revision = "c0ffee"
        self.modelscope: dict[str, dict[str, bytes]] = {}
        self.packages: dict[str, dict[str, bytes]] = {}
        """Package -> file name -> content."""
        self.html_index = False
        self.faults = Faults()
        self.contents: list[Seen] = []
        """Requests for contents, in order."""
        self.listings = 0


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = ModelHub(server.server_port)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> ModelHub:
        hub: ModelHub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), {name: values[0] for name, values in parse_qs(url.query).items()}
        for pattern, answer in _ROUTES:
            if match := re.fullmatch(pattern, path):
                answer(self, match.groupdict(), query)
                return
        self._send(404, b"not found")

    def _hf_listing(self, part: dict[str, str], query: dict[str, str]) -> None:
        self.hub.listings += 1
        repository = self.hub.hf.get(part["repository"])
        if repository is None:
            self._send(401, b'{"error": "Repository not found"}')
            return
        siblings = [
            {"rfilename": name, "size": len(content)}
            | ({"lfs": {"sha256": sha256(content), "size": len(content)}} if self.hub.listed_hashes else {})
            for name, content in repository.items()
        ]
        self._send_json({"sha": self.hub.revision, "siblings": siblings})

    def _hf_content(self, part: dict[str, str], query: dict[str, str]) -> None:
        content = self.hub.hf.get(part["repository"], {}).get(part["name"])
        if content is None:
            self._send(404, b"Entry not found")
            return
        location = f"{self.hub.storage}/{part['repository']}/{part['name']}"
        self._send(302, b"", {"Location": location, "X-Linked-ETag": f'"{sha256(content)}"'})

    def _storage(self, part: dict[str, str], query: dict[str, str]) -> None:
        self._send_content(self.hub.hf[part["repository"]][part["name"]])

    def _ms_listing(self, part: dict[str, str], query: dict[str, str]) -> None:
        self.hub.listings += 1
        repository = self.hub.modelscope.get(part["repository"])
        if repository is None:
            self._send(404, b'{"Code": 10010205001}')
            return
        files = [
            {"Path": name, "Size": len(content), "Sha256": sha256(content), "Type": "blob"}
            for name, content in repository.items()
        ]
        self._send_json({"Code": 200, "Data": {"Files": [{"Path": "folder", "Type": "tree"}, *files]}})

    def _ms_content(self, part: dict[str, str], query: dict[str, str]) -> None:
        self._send_content(self.hub.modelscope[part["repository"]][query["FilePath"]])

    def _index(self, part: dict[str, str], query: dict[str, str]) -> None:
        self.hub.listings += 1
        files = self.hub.packages.get(part["package"])
        if files is None:
            self._send(404, b"no such package")
        elif self.hub.html_index:
            anchors = [f'<a href="../../files/{n}#sha256={sha256(c)}">{n}</a>' for n, c in files.items()]
            self._send(200, "<br>\n".join(anchors).encode(), {"Content-Type": "text/html"})
        else:
            listed = [
                {"filename": name, "url": f"{self.hub.url}/files/{name}", "hashes": {"sha256": sha256(content)}}
                for name, content in files.items()
            ]
            self._send_json({"files": listed}, "application/vnd.pypi.simple.v1+json")

    def _package_file(self, part: dict[str, str], query: dict[str, str]) -> None:
        contents = {name: content for files in self.hub.packages.values() for name, content in files.items()}
        self._send_content(contents[part["name"]])

    def _send_content(self, content: bytes) -> None:
        faults = self.hub.faults
        wanted = self.headers.get("Range")
        self.hub.contents.append(Seen(self.path, wanted, self.headers.get("Authorization")))
        content = faults.tamper(content)
        if faults.busy:
            faults.busy -= 1
            self._send(503, b"busy")
            return
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and not faults.ignore_range else None
        if first is not None and first >= len(content):
            self._send(416, b"")
            return
        rest = content[first or 0 :]
        self.send_response(200 if first is None else 206)
        self.send_header("Content-Length", str(len(rest)))
        if first is not None:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if faults.breaks:
            faults.breaks -= 1
            self.wfile.write(rest[: (len(rest) + 1) // 2])
            self.close_connection = True
            return
        self.wfile.write(rest)

    def _send_json(self, value: object, content_type: str = "application/json") -> None:
        self._send(200, json.dumps(self.hub.faults.relist(value)).encode(), {"Content-Type": content_type})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


_REPOSITORY = "(?P<repository>[^/]+/[^/]+)"
_ROUTES: list[tuple[str, Callable[[_Handler, dict[str, str], dict[str, str]], None]]] = [
    (f"/api/models/{_REPOSITORY}/revision/.+", _Handler._hf_listing),
    (f"/api/v1/models/{_REPOSITORY}/repo/files", _Handler._ms_listing),
    (f"/api/v1/models/{_REPOSITORY}/repo", _Handler._ms_content),
    (f"/storage/{_REPOSITORY}/(?P<name>.+)", _Handler._storage),
    (f"/{_REPOSITORY}/resolve/[^/]+/(?P<name>.+)", _Handler._hf_content),
    ("/simple/(?P<package>[^/]+)/", _Handler._index),
    ("/files/(?P<name>.+)", _Handler._package_file),
]
