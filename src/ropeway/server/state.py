"""What the routes of one application share."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request

from ropeway.config import Config
from ropeway.engine.client import AsyncEngine, RequestOptions
from ropeway.errors import ModelNotFound, QueueFull, RopewayError
from ropeway.request import BeamSearchParams, SamplingParams
from ropeway.server.errors import Cancelled, Conflict
from ropeway.server.explaining import Record, Records
from ropeway.server.fields import UnknownFields, refuse_unserved
from ropeway.server.generating import Generating
from ropeway.server.keys import Caller, KeyRing
from ropeway.server.limits import convert, parse_object, read_body
from ropeway.server.metrics import Metrics
from ropeway.server.prompts import Prompts
from ropeway.server.spans import Spans
from ropeway.server.tracing import Door
from ropeway.text.answers.families import writing_of

Body = TypeVar("Body", bound=msgspec.Struct)


class State:
    def __init__(self, engine: AsyncEngine, config: Config, sampling_defaults: Mapping[str, float]) -> None:
        self.engine = engine
        self.config = config
        self.sampling_defaults = sampling_defaults
        self.created = int(time.time())
        self.began_s = time.monotonic()
        names = config.server.served_model_name or config.model.model
        self.model_names = [name.strip() for name in names.split(",")] if config.server.served_model_name else [names]
        self.most_requests = config.server.max_queue + engine.info.max_num_seqs
        """Choices that fit into the queue and the seats together."""
        self.writing = writing_of(engine.tokenizer, config.server.tool_call_parser, config.server.reasoning_parser)
        self.door = Door()
        server = config.server
        keys = None if server.api_keys is None else Path(server.api_keys)
        self.keys = KeyRing(server.api_key, keys, engine.info.tiers)
        self.metrics = Metrics(engine)
        self.records = Records()
        self.prompts = Prompts(engine.tokenizer, max_model_len=engine.info.max_model_len, most=self.most_requests)
        self.spans = None if server.otlp_endpoint is None else Spans(server.otlp_endpoint)
        self._traced = False
        self._unknown_fields = UnknownFields()
        self._generating: weakref.WeakSet[Generating] = weakref.WeakSet()

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The request's body as ``kind``. Raises ``PayloadTooLarge`` and ``InvalidRequest``."""
        server = self.config.server
        content = parse_object(await read_body(request, int(server.max_body_mb * 2**20), server.body_timeout_s))
        refuse_unserved(content, kind.__struct_fields__)
        body = convert(content, kind)
        self._unknown_fields.note(content, kind.__struct_fields__)
        return body

    def model_name(self, asked: str | None) -> str:
        """The served name a request means. Raises ``ModelNotFound``."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            raise ModelNotFound(
                f"there is no model {asked!r:.200} here, only {', '.join(self.model_names)}", param="model"
            )
        return asked

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: RequestOptions,
        *,
        completion_id: str,
        request_id: str,
        caller: Caller | None,
        beams: BeamSearchParams | None = None,
    ) -> Generating:
        """Hand prompts to the engine; raises as ``Generating`` does, ``TooManyRequests`` where the caller has had
        enough, and ``QueueFull`` for ``beams`` that there is no room for. ``options`` have a tier and an arrival; by
        either id the caller may ask where the time went."""
        assert options.tier is not None
        assert options.arrival_s is not None
        if beams is not None:
            self._check_room(len(prompts) * beams.beam_width)
        owner = "" if caller is None else caller.name
        tier = self.engine.info.tiers[options.tier].name
        record = Record(completion_id, request_id, tier, options.arrival_s, owner=owner)
        generating = Generating(
            self.engine,
            self.metrics,
            prompts,
            params,
            options,
            most=self.most_requests,
            record=record,
            records=self.records,
            lease=None if caller is None else caller.begin(),
            beams=beams,
        )
        self._generating.add(generating)
        return generating

    def _check_room(self, beams: int) -> None:
        """A search that is under way is refused nothing, so all of them together must fit, too."""
        others = sum(generating.beams for generating in self._generating)
        if beams <= self.most_requests < others + beams:
            raise QueueFull(
                f"searches with {others} beams are under way and {beams} more were asked; this server holds "
                f"{self.most_requests}: try again later"
            )

    def cancel(self, record: Record) -> None:
        """End the request that a record is of, if it is under way: its reader is told so."""
        for generating in list(self._generating):
            if generating.record is record:
                generating.cancel(Cancelled("the request was cancelled"))

    @contextlib.asynccontextmanager
    async def tracing(self) -> AsyncIterator[None]:
        """While this is entered nobody else records a trace. Raises ``Conflict`` when somebody does."""
        if self._traced or self.config.engine.trace is not None:
            raise Conflict("a trace is being recorded already; stop that one first")
        self._traced = True
        try:
            yield
        finally:
            self._traced = False

    async def start_trace(self) -> None:
        """Until ``stop_trace``. Raises ``Conflict`` when one is being recorded already."""
        async with self.tracing():
            await self.engine.record(True)
        self._traced = True

    async def stop_trace(self) -> bytes:
        """What was recorded, as JSON."""
        self._traced = False
        return await self.engine.record(False)

    def cancel_all(self, why: RopewayError) -> None:
        for generating in list(self._generating):
            generating.cancel(why)

    async def close(self) -> None:
        """Nothing more is served."""
        self.prompts.close()
        if self.spans is not None:
            await self.spans.close()


def state_of(request: Request) -> State:
    state = request.app.state.ropeway
    assert isinstance(state, State)
    return state
