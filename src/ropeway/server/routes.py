"""The small routes: models, tokens, where a request's time went, health, version, metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ropeway.engine.supervision import since_of
from ropeway.errors import EngineDead, InvalidRequest, ModelNotFound
from ropeway.server.auth import caller_of
from ropeway.server.errors import RequestNotFound
from ropeway.server.explaining import MOST_ENDED, Record
from ropeway.server.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingsRequest,
    Health,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from ropeway.server.state import State, state_of
from ropeway.server.streaming import json_response
from ropeway.server.tooling import shown_tools
from ropeway.version import __version__


async def list_models(request: Request) -> Response:
    state = state_of(request)
    return json_response(ModelList(data=[_card(state, name) for name in state.model_names]))


async def retrieve_model(request: Request) -> Response:
    state = state_of(request)
    name = request.path_params["model"]
    if name not in state.model_names:
        raise ModelNotFound(f"there is no model {name!r:.200} here, only {', '.join(state.model_names)}", param="model")
    return json_response(_card(state, name))


async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a chat as ``/v1/chat/completions`` would see it. No limit of length but the body's,
    so that a client can find out by how much a text is too long."""
    state = state_of(request)
    body = await state.read(request, TokenizeRequest)
    state.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.messages is not None:
        tokens = await state.prompts.chat(
            body.messages,
            tools=shown_tools(body.tools),
            writing=state.writing,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            bounded=False,
        )
    else:
        (tokens,) = await state.prompts.encode(
            [body.prompt or ""], add_special_tokens=body.add_special_tokens is not False, bounded=False
        )
    text_of = state.prompts.need_tokenizer().token_text

    def answer() -> Response:
        return json_response(
            TokenizeResponse(
                count=len(tokens),
                max_model_len=state.engine.info.max_model_len,
                tokens=tokens,
                token_strs=[text_of(token) for token in tokens] if body.return_token_strs else None,
            )
        )

    return await state.prompts.run(answer, aside=True)


async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = await state.read(request, DetokenizeRequest)
    state.model_name(body.model)
    tokenizer = state.prompts.need_tokenizer()
    size = state.engine.info.vocab_size

    def answer() -> Response:
        for token in body.tokens:
            if not 0 <= token < size:
                raise InvalidRequest(f"token id {token} is not in [0, {size})", param="tokens")
        return json_response(DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False)))

    return await state.prompts.run(answer, aside=True)


async def embeddings(request: Request) -> Response:
    """Refused: the architectures that are served are trained to say what comes next, and make no embeddings."""
    state = state_of(request)
    name = state.model_name((await state.read(request, EmbeddingsRequest)).model)
    raise InvalidRequest(f"{name} generates text and makes no embeddings; ask a model made for them", param="model")


async def health(request: Request) -> Response:
    """Whether the engine lives; 503 with the reason if not. The route is open, as probes have no key: what the server
    does without is told to those who have it."""
    state = state_of(request)
    return health_of(state, details=not state.keys.needed or caller_of(request) is not None)


def health_of(state: State, *, details: bool) -> Response:
    """``details``: say what was configured and cannot be had."""
    failure = state.engine.failure
    if failure is not None:
        raise EngineDead(failure)
    if not details:
        return json_response(Health(status="ok"))
    since = int(since_of(state.engine, state.created))
    warnings, disk_failure = state.engine.info.warnings, state.engine.stats.disk_failure
    return json_response(Health(status="ok", since=since, warnings=warnings, disk_failure=disk_failure))


async def explain(request: Request) -> Response:
    """Where a request's time went, by the id of its completion or the ``X-Request-Id`` of its answer."""
    return json_response(await _record(request).explain())


async def cancel(request: Request) -> Response:
    """End a request that is under way, by the same ids; one that has ended already is left as it is."""
    record = _record(request)
    under_way = record.ended_s is None
    state_of(request).cancel(record)
    return json_response({"id": record.id, "object": "request", "cancelled": under_way})


def _record(request: Request) -> Record:
    """The caller's own. Raises ``RequestNotFound``."""
    name, caller = request.path_params["request_id"], caller_of(request)
    record = state_of(request).records.find(name, "" if caller is None else caller.name)
    if record is None:
        raise RequestNotFound(
            f"there is no request {name!r:.200} here; the last {MOST_ENDED} that have ended are remembered",
            param="request_id",
        )
    return record


async def show_version(request: Request) -> Response:
    return json_response({"version": __version__})


async def metrics(request: Request) -> Response:
    return Response(state_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


def _card(state: State, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=state.created, root=state.config.model.model, max_model_len=state.engine.info.max_model_len
    )
