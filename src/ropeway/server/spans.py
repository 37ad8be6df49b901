"""A span of OpenTelemetry per generating request, with the setting ``otlp_endpoint``.

A span is made when its request is over, of what is known by then; nothing is done for it while tokens come. It has
names, numbers and times, and no text: neither prompts nor answers, nor what an error says, which may quote them.

Attributes are named as the semantic conventions for generative AI have it; ``gen_ai.request.id`` and
``gen_ai.latency.*``, which these do not know, are vLLM's, and ``ropeway.*`` our own. Latencies are in seconds.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ropeway.errors import ConfigError, RopewayError
from ropeway.request import FinishReason, SamplingParams
from ropeway.server.errors import told_error
from ropeway.server.generating import Generating
from ropeway.server.protocol import RequestTiming, TimeParts
from ropeway.server.tracing import request_id_of
from ropeway.version import __version__

logger = logging.getLogger(__name__)

Attribute = str | float | list[str]

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
_PHASES = ("queued", "prefill", "decode", "preempted", "swapped")
_CARRIED = ("traceparent", "tracestate")
_TRACES = "/v1/traces"
"""Where collectors take spans."""
_PACKAGES = ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_STATE = "span"
_TOLD_S = 1.0
"""How long the engine has to account for a request that was ended on this side."""
_LAST_S = 2.0
"""Time for what waits at the end."""
_COMPLAIN_S = 60.0
_UNKNOWN = "_OTHER"
"""The conventions' word for an error without a name."""


def check_packages() -> None:
    """Raise ``ConfigError`` where the packages of the extra ``otel`` are missing."""
    try:
        for name in _PACKAGES:
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs packages that are not installed ({error}); install them with: "
            "pip install 'ropeway[otel]'",
            param="otlp_endpoint",
        ) from error


class PendingSpan:
    """What the span of one request will tell."""

    def __init__(self, operation: str, request: Request) -> None:
        self.begin_s = self.end_s = time.monotonic()
        self.operation = operation
        self.carrier = {name: request.headers[name] for name in _CARRIED if name in request.headers}
        self.model: str | None = None
        """None: the request was refused before anybody looked."""
        self.attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "ropeway",
            "gen_ai.request.id": request_id_of(request),
            "http.request.method": request.method,
            "http.route": request.scope["path"],
        }
        self.generating: Generating | None = None
        self.error: str | None = None
        """Code of what it ended with."""
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def asks(self, model: str, params: SamplingParams, *, stream: bool) -> None:
        self.model = model
        self.attributes |= {
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.stream": stream,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
        if params.max_tokens is not None:
            self.attributes["gen_ai.request.max_tokens"] = params.max_tokens

    def over(self, error: str | None, status: int | None) -> None:
        """Its answer is out. ``status``: of HTTP, if any was sent."""
        self.end_s = time.monotonic()
        self.error = error
        if status is not None:
            self.attributes["http.response.status_code"] = status

    def at_ns(self, at_s: float) -> int:
        """A moment on the clock of ``time.monotonic``, in nanoseconds since 1970."""
        return int(at_s * 1e9) + self._epoch_ns


def span_of(request: Request) -> PendingSpan | None:
    """None: nobody wants one."""
    pending = request.scope.get("state", {}).get(_STATE)
    return pending if isinstance(pending, PendingSpan) else None


class SpanPerRequest:
    """ASGI middleware: what generates gets a span, from its first line to the last byte of its answer."""

    def __init__(self, app: ASGIApp, spans: Spans) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        operation = _OPERATIONS.get(scope["path"]) if posted else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        pending = PendingSpan(operation, Request(scope))
        scope["state"][_STATE] = pending
        try:
            await self._app(scope, receive, send)
        except BaseException as error:
            pending.over(type(error).__name__, None)
            raise
        else:
            pending.over(*_outcome(told_error(scope)))
        finally:
            self._spans.end(pending)


class Spans:
    """Makes spans and exports them in the background. Belongs to the loop that serves.

    What the environment tells the SDK (``OTEL_SERVICE_NAME``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_TRACES_SAMPLER``
    and others) holds."""

    def __init__(self, endpoint: str) -> None:
        """``endpoint``: URL of a collector; without a path, of its usual one. Raises ``ConfigError`` where the packages
        are missing, and for what they refuse of the environment."""
        check_packages()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        parts = urlsplit(endpoint)
        url = endpoint if parts.path.strip("/") else parts._replace(path=_TRACES).geturl()
        self._complaints = _Complaints(parts.netloc.rpartition("@")[2])
        sdk = logging.getLogger("opentelemetry")
        sdk.addHandler(self._complaints)
        sdk.propagate = False  # nobody else hears it
        resource = Resource.create({"service.name": "ropeway", "service.version": __version__})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        try:
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        except ValueError as error:
            raise ConfigError(
                f"the OpenTelemetry SDK refuses what its environment variables (OTEL_...) say: {error}",
                param="otlp_endpoint",
            ) from error
        self._tracer = self._provider.get_tracer("ropeway", __version__)
        self._telling: set[asyncio.Task[None]] = set()

    def end(self, pending: PendingSpan) -> None:
        """Make the span of a request that is over, as soon as the engine has accounted for it."""
        task = asyncio.get_running_loop().create_task(self._tell(pending))
        self._telling.add(task)
        task.add_done_callback(self._told)

    async def close(self) -> None:
        """Export what there is, for two seconds at most."""
        begin_s = time.monotonic()
        if self._telling:
            await asyncio.wait(self._telling, timeout=_LAST_S)
        ending = threading.Thread(target=self._end, name="last spans", daemon=True)  # it may take as long as it likes
        ending.start()
        left_s = begin_s + _LAST_S - time.monotonic()
        await asyncio.to_thread(ending.join, max(left_s, 0.0))
        self._complaints.mute()

    def _told(self, task: asyncio.Task[None]) -> None:
        self._telling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._complaints.tell(f"one could not be made: {type(error).__name__}")

    def _end(self) -> None:
        self._provider.shutdown()
        logging.getLogger("opentelemetry").removeHandler(self._complaints)

    async def _tell(self, pending: PendingSpan) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name, attributes, error = pending.operation, pending.attributes, pending.error
        if pending.model is not None:
            name = f"{name} {pending.model}"
        phases: list[tuple[str, float, float]] = []
        if pending.generating is not None and pending.model is not None:
            record = pending.generating.record
            timing = await record.explain(_TOLD_S)
            attributes = attributes | _answered(pending.model, pending.generating, timing)
            error = error or timing.error or (None if _finished(timing) else _UNKNOWN)
            if _accounted(timing):
                phases = list(_phases(timing.parts, record.arrival_s))
        if error is not None:
            attributes = attributes | {"error.type": error}
        begin_ns = pending.at_ns(pending.begin_s)
        outside = TraceContextTextMapPropagator().extract(pending.carrier)
        span = self._tracer.start_span(name, outside, SpanKind.SERVER, attributes, start_time=begin_ns)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        if span.is_recording():
            inside = set_span_in_context(span, outside)
            for phase, begin_s, end_s in phases:
                child = self._tracer.start_span(phase, inside, start_time=pending.at_ns(begin_s))
                child.end(pending.at_ns(end_s))
        span.end(pending.at_ns(pending.end_s))


def _outcome(error: RopewayError | None) -> tuple[str | None, int]:
    """(code of the error, status of HTTP)"""
    return (None, 200) if error is None else (error.code or error.kind, error.status)


def _answered(model: str, generating: Generating, timing: RequestTiming) -> dict[str, Attribute]:
    """What is known of a request once the engine has had it."""
    attributes: dict[str, Attribute] = {
        "gen_ai.response.id": timing.id,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": timing.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": timing.cached_tokens,
        "gen_ai.usage.output_tokens": timing.output_tokens,
        "gen_ai.latency.e2e": timing.e2e_s,
        "ropeway.tier": timing.tier,
    }
    reasons = [choice.finish_reason.value for choice in timing.choices if choice.finish_reason is not None]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if generating.ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = generating.ttft_s
    if _accounted(timing):
        parts = timing.parts
        attributes |= {
            "gen_ai.latency.time_in_queue": parts.queued_s,
            "gen_ai.latency.time_in_model_prefill": parts.prefill_s,
            "gen_ai.latency.time_in_model_decode": parts.decode_s,
            "gen_ai.latency.time_in_model_inference": parts.prefill_s + parts.decode_s,
        }
        attributes |= {f"ropeway.waits.{why}": seconds for why, seconds in timing.waits_s.items()}
        attributes |= {f"ropeway.preemptions.{kind}": count for kind, count in timing.preemptions.items()}
    return attributes


def _accounted(timing: RequestTiming) -> bool:
    """Whether the engine has said where the time went."""
    return timing.phase != "unknown"


def _finished(timing: RequestTiming) -> bool:
    return all(choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for choice in timing.choices)


def _phases(parts: TimeParts, begin_s: float) -> Iterator[tuple[str, float, float]]:
    """(phase, its begin, its end) of those that took time, one after the other. The engine accounts for sums: of a
    request that was preempted, each stands for all its parts."""
    for phase in _PHASES:
        end_s = begin_s + getattr(parts, f"{phase}_s")
        if end_s > begin_s:
            yield phase, begin_s, end_s
        begin_s = end_s


class _Complaints(logging.Handler):
    """Passes on what the SDK logs, once a minute at most: while a collector is away, it has a lot to say."""

    def __init__(self, collector: str) -> None:
        super().__init__(logging.WARNING)
        self._collector = collector
        self._next_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(record.getMessage())

    def mute(self) -> None:
        """What is said from here on is of no use to anybody."""
        self.setLevel(logging.CRITICAL + 1)

    def tell(self, what: str) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _COMPLAIN_S
            logger.warning("spans for %s: %s", self._collector, what)
