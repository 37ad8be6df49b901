"""A collector of spans by OTLP over HTTP, on a port of its own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Exported:
    """A span as it was received; ids in hexadecimal digits."""

    name: str
    server: bool
    """Whether it is of kind SERVER."""
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has none."""
    begin_s: float
    end_s: float
    """Seconds since 1970."""
    attributes: dict[str, Any]
    error: str | None
    """What its status says, if that is an error."""
    resource: dict[str, Any]


@dataclass(frozen=True)
class Told:
    """The span of a request, and those within it."""

    span: Exported
    children: list[Exported]


class Collector:
    """Listens from entering to leaving; takes spans at ``/v1/traces`` only."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        """Everything it was sent."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.bodies.append(body)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Into no log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[Exported]:
        """All so far, in the order in which they ended."""
        return [
            _exported(span, resource)
            for body in list(self.bodies)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans
            for resource in [_values(group.resource.attributes)]
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def requests(self, count: int, within_s: float = 5.0) -> list[Told]:
        """Those of ``count`` requests; waits until they are there, and fails when there are more."""
        deadline = time.monotonic() + within_s
        while len(told := self._told()) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(told) == count, [each.span.name for each in told]
        return told

    def _told(self) -> list[Told]:
        spans = self.spans()
        return [
            Told(span, [child for child in spans if child.parent_id == span.span_id]) for span in spans if span.server
        ]


def _exported(span: trace_pb2.Span, resource: dict[str, Any]) -> Exported:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return Exported(
        name=span.name,
        server=span.kind == trace_pb2.Span.SPAN_KIND_SERVER,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_values(span.attributes),
        error=span.status.message if failed else None,
        resource=resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind or "")
