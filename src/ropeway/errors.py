"""The error family. Every error a user can cause names what was asked, the limit, and what to do;
each knows its HTTP status, so the server needs no table of its own."""

from __future__ import annotations


class RopewayError(Exception):
    """Base of all errors raised on purpose. ``status`` is the HTTP status a client sees."""

    status = 500
    kind = "server_error"
    """OpenAI's ``error.type``."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The request or config field at fault, if one is."""
        self.code = code if code is not None else self.default_code

    default_code: str | None = None


class InvalidRequest(RopewayError):
    """A request that can never be served as asked."""

    status = 400
    kind = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt (plus requested output) longer than the context or than the whole KV pool."""

    default_code = "context_length_exceeded"


class Unauthorized(RopewayError):
    """No API key, or a wrong one."""

    status = 401
    kind = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(RopewayError):
    """Something that the caller's key does not allow."""

    status = 403
    kind = "permission_error"
    default_code = "forbidden"


class RequestTimeout(RopewayError):
    """The request did not arrive in time."""

    status = 408
    kind = "invalid_request_error"
    default_code = "request_timeout"


class ModelNotFound(RopewayError):
    """A model name this server does not serve, or a source that does not exist."""

    status = 404
    kind = "invalid_request_error"
    default_code = "model_not_found"


class PayloadTooLarge(RopewayError):
    """A request body beyond the limit."""

    status = 413
    kind = "invalid_request_error"
    default_code = "payload_too_large"


class QueueFull(RopewayError):
    """The bounded queue is full; the request was not accepted and may be sent again later."""

    status = 429
    kind = "rate_limit_error"
    default_code = "queue_full"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class Shed(QueueFull):
    """Waiting would have made the request miss its tier's target; nothing of it was computed."""

    default_code = "shed"


class QueueTimeout(QueueFull):
    """The request waited for its first seat as long as its tier allows."""

    status = 503
    kind = "service_unavailable_error"
    default_code = "queue_timeout"


class DeadlineExceeded(RopewayError):
    """The request's own deadline passed before it was done."""

    status = 504
    kind = "timeout_error"
    default_code = "deadline_exceeded"


class Draining(RopewayError):
    """The server is shutting down and takes no new requests."""

    status = 503
    kind = "service_unavailable_error"
    default_code = "draining"


class EngineDead(RopewayError):
    """The engine process ended or stopped answering."""

    status = 503
    kind = "service_unavailable_error"
    default_code = "engine_dead"


class ConfigError(RopewayError):
    """A configuration that cannot work; raised before anything is loaded where possible."""

    status = 400
    kind = "config_error"


class LoadError(RopewayError):
    """A checkpoint that is missing, damaged or truncated; the message names the file and the field."""

    kind = "load_error"


class Unsupported(LoadError):
    """An architecture, quantisation or setting this version does not implement, by name."""

    status = 400


class OutOfMemory(RopewayError):
    """Not enough memory for what was asked; names needed, available and the largest that would work."""

    kind = "out_of_memory"
