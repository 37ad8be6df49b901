"""The two applications: the API, and the management listener's."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ropeway.config import Config
from ropeway.engine.client import AsyncEngine
from ropeway.errors import Draining, EngineDead
from ropeway.server import errors, routes
from ropeway.server.auth import RefuseStrangers, RequireKey
from ropeway.server.chat import create_chat_completion
from ropeway.server.completions import create_completion
from ropeway.server.dashboard import routes as dashboard
from ropeway.server.messages import CountTokensRequest, MessagesRequest, count_tokens, create_message
from ropeway.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
)
from ropeway.server.responses import ResponsesRequest, create_response
from ropeway.server.spans import SpanPerRequest
from ropeway.server.state import State
from ropeway.server.streaming import json_response
from ropeway.server.tracing import Doorkeeper, RequestId
from ropeway.version import __version__

_POSTS: tuple[tuple[str, Any, type[msgspec.Struct]], ...] = (
    ("/v1/chat/completions", create_chat_completion, ChatCompletionRequest),
    ("/v1/completions", create_completion, CompletionRequest),
    ("/v1/responses", create_response, ResponsesRequest),
    ("/v1/messages", create_message, MessagesRequest),
    ("/v1/messages/count_tokens", count_tokens, CountTokensRequest),
    ("/v1/embeddings", routes.embeddings, EmbeddingsRequest),
    ("/tokenize", routes.tokenize, TokenizeRequest),
    ("/detokenize", routes.detokenize, DetokenizeRequest),
)
_GETS = (
    ("/v1/models", routes.list_models),
    ("/v1/models/{model:path}", routes.retrieve_model),
    ("/v1/requests/{request_id:path}", routes.explain),
    ("/dashboard", dashboard.page),
    ("/dashboard/now", dashboard.now),
    ("/dashboard/timeline", dashboard.timeline),
    ("/dashboard/requests/{request_id:path}", dashboard.story),
    ("/dashboard/{name}", dashboard.part),
    ("/health", routes.health),
    ("/version", routes.show_version),
    ("/metrics", routes.metrics),
)


def create_app(engine: AsyncEngine, config: Config, *, sampling_defaults: Mapping[str, float] | None = None) -> FastAPI:
    """The API over a running engine. ``app.state.ropeway`` is its ``State``.

    ``sampling_defaults``: what the model recommends for fields a request leaves out."""
    app = _bare_app("Ropeway")
    app.state.ropeway = State(engine, config, sampling_defaults or {})
    for path, handler, body in _POSTS:
        described = _body_schema(body, app.state.ropeway.model_names)
        app.add_api_route(path, handler, methods=["POST"], response_model=None, openapi_extra=described)
    for path, handler in _GETS:
        _add_get(app, path, handler)
    request = "/v1/requests/{request_id:path}"
    extra = _path_parameters(request)
    app.add_api_route(request, routes.cancel, methods=["DELETE"], response_model=None, openapi_extra=extra)
    # Added last is outermost.
    state: State = app.state.ropeway
    app.add_middleware(Doorkeeper, door=state.door)
    if state.spans is not None:
        app.add_middleware(SpanPerRequest, spans=state.spans)
    origins = [origin.strip() for origin in (config.server.cors_origins or "").split(",") if origin.strip()]
    if state.keys.needed:
        app.add_middleware(RequireKey, keys=state.keys)
    else:
        app.add_middleware(RefuseStrangers, origins=origins)
    app.add_middleware(RequestId, access_log=config.server.access_log)
    if origins:  # before the keys: a browser asks first without one
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def create_management_app() -> FastAPI:
    """Health, readiness, metrics, and traces of what the engine does when. It runs before there is an engine: until
    somebody sets ``app.state.ropeway`` to the ``State`` of the API, the process is healthy and not ready."""
    app = _bare_app("Ropeway management")
    app.add_middleware(RefuseStrangers)
    app.state.ropeway = None

    async def health(request: Request) -> Response:
        if app.state.ropeway is None:
            return json_response({"status": "loading"})
        return routes.health_of(app.state.ropeway, details=True)

    async def ready(request: Request) -> Response:
        _raise_unless_loaded(app)
        if app.state.ropeway.door.closed:
            raise Draining("shutting down")
        return routes.health_of(app.state.ropeway, details=True)

    async def metrics(request: Request) -> Response:
        _raise_unless_loaded(app)
        return await routes.metrics(request)

    async def start_trace(request: Request) -> Response:
        _raise_unless_loaded(app)
        await app.state.ropeway.start_trace()
        return json_response({"status": "recording"})

    async def stop_trace(request: Request) -> Response:
        _raise_unless_loaded(app)
        trace = await app.state.ropeway.stop_trace()
        return Response(trace, media_type="application/json")

    for path, handler in (("/health", health), ("/ready", ready), ("/metrics", metrics)):
        _add_get(app, path, handler)

    async def reload_keys(request: Request) -> Response:
        _raise_unless_loaded(app)
        return json_response({"keys": app.state.ropeway.keys.reload()})

    for path, handler in (
        ("/v1/trace/start", start_trace),
        ("/v1/trace/stop", stop_trace),
        ("/v1/keys/reload", reload_keys),
    ):
        app.add_api_route(path, handler, methods=["POST"], response_model=None)
    return app


def _add_get(app: FastAPI, path: str, handler: Callable[[Request], Awaitable[Response]]) -> None:
    """Load balancers probe with HEAD."""
    extra = _path_parameters(path)
    app.add_api_route(path, handler, methods=["GET"], response_model=None, openapi_extra=extra)
    app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)


def _raise_unless_loaded(app: FastAPI) -> None:
    if app.state.ropeway is None:
        raise EngineDead("the model is being loaded", code="loading")


def _bare_app(title: str) -> FastAPI:
    app = FastAPI(title=title, version=__version__, redirect_slashes=False)
    errors.install(app)
    return app


def _path_parameters(path: str) -> dict[str, Any]:
    """OpenAPI's description of what stands in braces."""
    names = re.findall(r"\{(\w+)", path)
    return {"parameters": [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]}


def _body_schema(body: type[msgspec.Struct], model_names: Sequence[str]) -> dict[str, Any]:
    """OpenAPI's description of a JSON body, written out in place, with the models that are served."""
    (schema,), components = msgspec.json.schema_components([body], ref_template="{name}")

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            return inline(components[node["$ref"]]) if "$ref" in node else {k: inline(v) for k, v in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    described = inline(schema)
    if "model" in described.get("properties", {}):
        required = "model" in described.get("required", [])
        described["properties"]["model"] = {"enum": [*model_names, *([] if required else [None])]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}
