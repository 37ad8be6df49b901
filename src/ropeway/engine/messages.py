"""What crosses between a client and the engine: msgspec structs, the same in process and over a socket."""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np

from ropeway.config import Config
from ropeway.outcome import StepOutput
from ropeway.request import SamplingParams, Timeline
from ropeway.tiers import Tier
from ropeway.wire import decoder


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to generate. ``n`` completions are n of these, the later ones naming the first."""

    id: int
    """Internal id, chosen by the client, unique in the engine's life."""
    prompt: np.ndarray
    """int32 [n]: token ids, not empty."""
    params: SamplingParams
    seed: int
    """Key of the random stream, in [0, 2**64)."""
    salt: bytes = b""
    leader: int | None = None
    """Internal id of the sibling whose prefill this one shares, earlier in the same message."""
    group: bool = False
    """Whether it has siblings (n > 1), the leader included."""
    tier: int = 0
    """Rank of its tier in ``EngineInfo.tiers``."""
    tenant: str = ""
    """Whose request it is; tenants of one tier get equal shares."""
    arrival_s: float | None = None
    """When it arrived, by ``time.monotonic``, which is the same in all processes of a machine; None: now."""
    deadline_s: float | None = None
    """When it is to be given up, on the same clock."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to load."""

    config: Config
    path: str
    """Where the model lies."""
    end_ids: list[int] = []
    """End tokens the tokenizer knows of."""
    vocab_size: int | None = None
    """The tokenizer's."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[NewRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[int]
    reason: str
    """``cancel`` or ``stop_string``; labels the rows computed in vain."""


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Ask where the time of requests under way goes; answered by ``Explained``."""

    ids: list[int]


class Record(msgspec.Struct, frozen=True, tag=True):
    """Begin to trace what happens when, or end it; answered by ``Recorded``."""

    on: bool


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Ask what the engine looks like now; answered by ``Inspected``."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End after the current step."""


ToEngine = Start | Submit | Abort | Explain | Record | Inspect | Shutdown


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's; counters never fall."""

    running: int = 0
    waiting: int = 0
    """Without a seat, swapped ones included."""
    swapped: int = 0
    refused: dict[str, int] = {}
    """Requests refused, by the code of their error."""
    preemptions: dict[str, int] = {}
    """By kind: swap, recompute; and of these for a higher tier's sake: ``admission``."""
    finished: int = 0
    predicted_tokens: int = 0
    """Output lengths of the finished ones as predicted when they were first seated."""
    output_tokens: int = 0
    """And as they were."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gauges and counters of the engine; counters never fall."""

    running: int = 0
    waiting: int = 0
    blocks_live: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    wasted_rows: dict[str, int] = {}
    """Rows computed in vain, by reason."""
    tiers: dict[str, TierStats] = {}
    swaps_out: int = 0
    """Blocks copied to host memory for preempted requests; those that were there already are not counted."""
    swaps_in: int = 0
    """Blocks copied back for them."""
    host_blocks_pinned: int = 0
    host_blocks_cached: int = 0
    host_blocks_free: int = 0
    host_hits: int = 0
    """Prompt tokens found in host memory (those from disk included) and not on the device."""
    disk_hits: int = 0
    """Of ``host_hits``, the ones brought in from disk for the request."""
    disk_blocks: int = 0
    disk_errors: int = 0
    """Blocks that could not be written, or were damaged or foreign when read."""
    disk_failure: str | None = None
    """Why there is no disk cache though one was configured."""
    reservation: float = 0.0
    """Share of the pool that admission holds back at the moment."""
    step_s: float = 0.0
    """Predicted time of a step of one token per running request."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent once, when the engine is ready."""

    model: str
    vocab_size: int
    """Token ids the model may be given and may produce are below this."""
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    end_ids: list[int] = []
    """The model's end tokens."""
    load_s: float = 0.0
    weight_bytes: int = 0
    """Packed."""
    kv_pool_bytes: int = 0
    startup: dict[str, float] = {}
    """Seconds of the parts of the engine's start, one after the other."""
    tiers: list[Tier] = []
    """Highest first."""
    warnings: list[str] = []
    """What was configured and cannot be had."""


class Explained(msgspec.Struct, frozen=True, tag=True):
    """Timelines of those of the requests asked about that have not ended."""

    timelines: dict[int, Timeline]


class SeatView(msgspec.Struct, frozen=True, kw_only=True):
    """One request in the batch."""

    id: int
    """Internal."""
    tier: str
    prompt_tokens: int
    computed_tokens: int
    """Positions whose keys and values are computed, or planned."""
    output_tokens: int
    limit: int
    """Most tokens it may have in all."""
    blocks: int
    preemptions: int


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """One request that waits for a seat."""

    id: int
    tier: str
    prompt_tokens: int
    waits_s: float
    """Since it came."""
    swapped: bool
    gated: bool


class Inspected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine at one moment."""

    seats: list[SeatView] = []
    """In the order of ranks."""
    queue: list[QueueView] = []
    """The first of each line."""
    blocks: bytes = b""
    """A byte per block of the pool: 0 free, 1 cached, 2 live, 3 live and shared."""


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """The trace that has ended, as JSON; empty when one begins."""

    trace: bytes = b""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or ended; the last message it sends."""

    error: str
    """Name of the error class of ``ropeway.errors``."""
    message: str
    param: str | None = None
    """The config field at fault, if one is."""


FromEngine = StepOutput | Stats | EngineInfo | Explained | Recorded | Inspected | Failed


_to_engine = decoder(ToEngine)
_from_engine = decoder(FromEngine)


def decode_to_engine(data: bytes) -> ToEngine:
    return cast(ToEngine, _to_engine.decode(data))


def decode_from_engine(data: bytes) -> FromEngine:
    return cast(FromEngine, _from_engine.decode(data))
