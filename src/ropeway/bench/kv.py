"""What the KV cache costs and gives: room per type, decoding over long contexts, blocks against one piece of memory,
and slots that are held but not used.

Contexts are not computed but made up: random keys and values are written as a prefill would write them, because what a
decode step takes does not depend on what they say.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropeway.bench.driver import Driver
from ropeway.bench.traces import Trace
from ropeway.config import Config, SchedulerConfig
from ropeway.devices.base import KEY_GROUP, Device, KVDtype, StepShape
from ropeway.errors import ConfigError
from ropeway.execution.calibration import calibrate
from ropeway.execution.part import kv_dtype
from ropeway.models.model import Model
from ropeway.simulation.cost_model import CostModel
from ropeway.simulation.replay import replay
from ropeway.simulation.setup import replay_settings

BASE: KVDtype = "bf16"
"""What the other types are compared with."""
TYPES: tuple[KVDtype, ...] = (BASE, "int8", "int4", "int4-full")
_CHUNK = 512
"""Tokens of a prefill step."""
_LAYERS = 4
"""Of the caches that attention is timed over; enough to be beyond the processor's caches."""


@dataclass
class TypeFigures:
    """One type of keys and values; rates are medians."""

    dtype: KVDtype
    block_size: int
    bytes_per_token: float | None = None
    """Of all layers, scales included."""
    capacity: float | None = None
    """Tokens in the same memory, relative to bf16."""
    decode_tokens_per_s: float | None = None
    """Over the whole batch."""
    decode_over_base: float | None = None
    """Median of the ratios to bf16's rate in the same round."""
    note: str = ""
    """Why there are no figures."""


@dataclass
class KVFigures:
    context_tokens: int
    batch: int
    types: list[TypeFigures] = field(default_factory=list)
    paged_over_contiguous: dict[str, float] = field(default_factory=dict)
    """Time of attention over scattered blocks / over one piece of memory per sequence: of a decode step, and of a
    chunk of a prefill."""


def measure_kv(
    config: Config,
    *,
    context: int = 4096,
    batch: int = 4,
    steps: int = 8,
    repeat: int = 5,
    types: Sequence[KVDtype] = TYPES,
    progress: Callable[[int, int], None] | None = None,
) -> KVFigures:
    """Load the configured model and decode ``steps`` tokens of ``batch`` sequences after ``context`` tokens, ``repeat``
    times with every type in turn; then time attention over the configured type's blocks (bf16's for int4-full).

    A type that the device cannot store has a note instead of rates. ``progress`` counts rounds. Raises what loading
    raises, and ``ConfigError`` for a context that the model does not reach."""
    cache = dataclasses.replace(config.cache, kv_blocks=1, kv_memory=None, swap_space=0.0, disk_cache=None)
    kept_types = list(dict.fromkeys((BASE, *types)))
    with Driver(dataclasses.replace(config, cache=cache)) as driver:
        model, device = driver.worker.model, driver.worker.device
        limit = config.model.max_model_len or model.spec.context_length
        if context + steps * repeat + steps > limit:
            raise ConfigError(
                f"a context of {context} tokens and {steps * (repeat + 1)} more is beyond the model's {limit}; "
                "give a shorter one",
                param="context",
            )
        figures = KVFigures(context, batch)
        room = _Room(model, device, config.cache.block_size, context + steps * (repeat + 1), batch)
        figures.types = [room.figures(dtype) for dtype in kept_types]

        def measure() -> None:
            with torch.inference_mode():
                _decode(figures, room, context, steps, repeat, progress)
                kept = kv_dtype(config.cache, model)
                kept = BASE if kept == "int4-full" else kept  # whose last group is only there after it was written
                figures.paged_over_contiguous = _paged_over_contiguous(room, kept, context, repeat)

        device.stream.submit(measure).wait()
    return figures


def measure_waste(trace: Trace, cost: CostModel, block_size: int) -> float:
    """Slots held and not used, as a share of those held, over time: ``trace``'s requests all at once on a simulated
    engine, which so is saturated, with the production scheduler and no shared prefixes."""
    saturated = dataclasses.replace(trace, arrival_s=np.zeros(len(trace)), measured=None)
    scheduler = SchedulerConfig(max_num_seqs=cost.max_num_seqs, max_batched_tokens=cost.max_batched_tokens, shed=False)
    settings = replay_settings(saturated, cost, scheduler, block_size=block_size, prefix_cache=False)
    return float(replay(saturated, settings).figures()["kv_waste"])


@dataclass(frozen=True)
class _Room:
    """What caches for the measurements have in common."""

    model: Model
    device: Device
    block_size: int
    tokens: int
    """Of a sequence, at most."""
    batch: int

    def block_size_of(self, dtype: KVDtype) -> int:
        return max(self.block_size, KEY_GROUP) if dtype == "int4-full" else self.block_size

    def bytes_per_token(self, dtype: KVDtype) -> float:
        size, model = self.block_size_of(dtype), self.model
        return self.device.kv_block_bytes(model.num_layers, model.num_kv_heads, model.head_dim, size, dtype) / size

    def figures(self, dtype: KVDtype) -> TypeFigures:
        base = self.bytes_per_token(BASE)
        try:
            mine = self.bytes_per_token(dtype)
        except ConfigError as error:
            return TypeFigures(dtype, self.block_size_of(dtype), note=error.message)
        return TypeFigures(dtype, self.block_size_of(dtype), mine, base / mine)

    def filled(
        self, dtype: KVDtype, tokens: int, *, layers: int | None = None, block_size: int | None = None
    ) -> _Sequences:
        """Random keys and values of ``tokens`` positions. Raises ``ConfigError``, ``OutOfMemory``."""
        return _Sequences(self, dtype, tokens, layers or self.model.num_layers, block_size or self.block_size_of(dtype))


class _Sequences:
    """A cache of its own with ``batch`` sequences in scattered blocks."""

    def __init__(self, room: _Room, dtype: KVDtype, tokens: int, layers: int, block_size: int) -> None:
        self._room, self._device, self.layers = room, room.device, layers
        model, blocks = room.model, -(-room.tokens // block_size)
        factors = calibrate(model, self._device, dtype, room.tokens).key_factors
        factors = None if factors is None else factors[:layers].contiguous()
        self.cache = self._device.kv_cache(
            layers, blocks * room.batch, model.num_kv_heads, model.head_dim, block_size, dtype, factors
        )
        order = np.random.default_rng(0).permutation(blocks * room.batch)
        self._tables = order.astype(np.int32).reshape(room.batch, blocks)
        for start in range(0, tokens, _CHUNK):
            self._fill(start, min(_CHUNK, tokens - start))

    def step(self, start: int, count: int) -> StepShape:
        """``count`` tokens of every sequence from ``start`` on."""
        batch = self._room.batch
        return StepShape(
            positions=self._upload(np.tile(np.arange(start, start + count), batch)),
            query_start=self._upload(np.arange(batch + 1) * count),
            kv_lengths=self._upload(np.full(batch, start + count)),
            block_tables=self._upload(self._tables),
        )

    def decode(self, position: int) -> None:
        """One step of the model: a token of every sequence."""
        shape, model = self.step(position, 1), self._room.model
        plan = self._device.kernels.plan_attention(self.cache, shape)
        ids = self._upload(np.arange(self._room.batch) % model.vocab_size)
        model.logits(model.forward(ids, shape.positions, self.cache, plan))

    def attend(self, start: int, q: Tensor) -> None:
        """Attention of the model's layers for the last tokens written, q [batch * tokens, heads, head_dim]."""
        plan = self._device.kernels.plan_attention(self.cache, self.step(start, len(q) // self._room.batch))
        for layer in range(self._room.model.num_layers):
            self._device.kernels.attention(q, self.cache, layer % self.layers, plan, 0.1)

    def _fill(self, start: int, count: int) -> None:
        plan = self._device.kernels.plan_attention(self.cache, self.step(start, count))
        generator, model = torch.Generator().manual_seed(start), self._room.model
        shape = (2, self._room.batch * count, model.num_kv_heads, model.head_dim)
        k, v = torch.randn(shape, generator=generator)
        for layer in range(self.layers):
            self._device.kernels.write_kv(self.cache, layer, k, v, plan)

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        return self._device.upload(np.ascontiguousarray(array, dtype=np.int32))


def _decode(
    figures: KVFigures,
    room: _Room,
    context: int,
    steps: int,
    repeat: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    sequences: dict[KVDtype, _Sequences] = {}
    for each in figures.types:
        if not each.note:
            try:
                sequences[each.dtype] = room.filled(each.dtype, context)
            except ConfigError as error:
                each.note = error.message
    rates: dict[KVDtype, list[float]] = {dtype: [] for dtype in sequences}
    names = list(sequences)
    for number in range(repeat + 1):  # the first is a warm-up
        first = context + number * steps
        for dtype in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            for position in range(first, first + steps):
                sequences[dtype].decode(position)
            rates[dtype].append(room.batch * steps / (time.perf_counter() - began))
        if progress is not None:
            progress(number + 1, repeat + 1)
    for each in figures.types:
        if each.dtype in sequences:
            mine, base = rates[each.dtype][1:], rates[BASE][1:]
            each.decode_tokens_per_s = statistics.median(mine)
            each.decode_over_base = statistics.median(a / b for a, b in zip(mine, base, strict=True))


def _paged_over_contiguous(room: _Room, dtype: KVDtype, context: int, repeat: int) -> dict[str, float]:
    """A block as long as the context is one piece of memory per sequence, layer and head."""
    layers = min(_LAYERS, room.model.num_layers)
    whole = 1 << (room.tokens - 1).bit_length()
    pair = [room.filled(dtype, context, layers=layers, block_size=size) for size in (None, whole)]
    heads, head_dim = room.model.spec.num_heads, room.model.head_dim
    ratios: dict[str, float] = {}
    for name, count in (("decode", 1), ("prefill", min(_CHUNK, context))):
        q = torch.randn((room.batch * count, heads, head_dim), generator=torch.Generator().manual_seed(1))
        times: list[list[float]] = [[], []]
        for number in range(2 * repeat + 1):
            for which in (0, 1) if number % 2 else (1, 0):
                began = time.perf_counter()
                pair[which].attend(context - count, q)
                times[which].append(time.perf_counter() - began)
        ratios[name] = statistics.median(a / b for a, b in zip(*(each[1:] for each in times), strict=True))
    return ratios
