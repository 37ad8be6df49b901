"""Where the time of a decode step goes: every kernel call under a stopwatch, on the device's own stream.

A device's kernels and stream are wrapped before the model is loaded, so the profiled run is the production loop
with two clock readings more per call (about a tenth of a microsecond each). Where the device captured the model, its
programs read the clock once per operation, and are asked after every step.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from ropeway.bench.driver import Driver
from ropeway.bench.workload import WorkloadRequest
from ropeway.config import Config
from ropeway.devices.base import (
    AttentionPlan,
    Device,
    Event,
    Kernels,
    KVCache,
    Sampled,
    SampleInputs,
    StepShape,
    Stream,
    Weight,
)
from ropeway.devices.programs import OperationTime, PreparedSample, PreparedStep, Program
from ropeway.errors import ConfigError
from ropeway.execution.part import make_device
from ropeway.models.model import Model

T = TypeVar("T")

_WARM_UP_STEPS = 3
HOST = "host"
"""The part's name for what a step spends outside kernels."""


@dataclass(frozen=True)
class Part:
    """One kind of work in a step."""

    kind: str
    calls: int
    """In a step."""
    us: float
    """Microseconds in a step, all calls together."""
    share: float
    """Of the step's time on the device."""
    weight_bytes: int = 0
    """Weights read in a step."""
    weight_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class StepProfile:
    """Times are means over the faster half of the steps: what else the machine does only makes a step slower, and
    means, unlike medians, add up."""

    batch: int
    context: int
    """Tokens in the cache per request, in the middle of the measured steps."""
    steps: int
    step_us: float
    """Device time of a step, forward and sampling."""
    idle_us: float
    """Between the begin of a step and that of the next, the device had nothing to do for so long; the median."""
    host_share: float
    """Of the time from a step's begin to the next one's, what is not spent in kernels."""
    parts: list[Part]
    """Longest first."""


@dataclass(slots=True)
class _Step:
    rows: int
    tokens: int
    began_s: float
    busy_s: float = 0.0
    asking_s: float = 0.0
    """What it took to ask the programs, which no step does unprofiled."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    weight_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, kind: str, seconds: float, weight_bytes: int) -> None:
        self.seconds[kind] += seconds
        self.calls[kind] += 1
        self.weight_bytes[kind] += weight_bytes


class _Log:
    """The steps so far. A forward opens one; the sampling that follows belongs to it."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.work_began_s = 0.0
        self.names: dict[int, str] = {}
        """id of a weight -> its place in the model."""
        self.programs: list[Program] = []

    def open(self, rows: int, tokens: int) -> None:
        self.steps.append(_Step(rows, tokens, self.work_began_s))

    def timed(self, kind: str, call: Callable[[], T], weight_bytes: int = 0) -> T:
        began = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - began
        if self.steps:
            self.steps[-1].add(kind, seconds, weight_bytes)
        return result

    def ask_programs(self) -> None:
        """Note what their operations took since this was asked before."""
        began = time.perf_counter()
        step = self.steps[-1]
        for program in self.programs:
            for operation in program.operation_times():
                if operation.seconds:
                    read = sum(weight.nbytes for weight in operation.weights)
                    step.add(self._kind(operation), operation.seconds, 0 if operation.kind == "gather" else read)
            program.time_operations(True)
        step.asking_s += time.perf_counter() - began

    def _kind(self, operation: OperationTime) -> str:
        if operation.kind in _KINDS or not operation.weights:
            return _KINDS.get(operation.kind, operation.kind)
        return f"{operation.kind} {_joined([self.names.get(id(weight), '?') for weight in operation.weights])}"


_KINDS = {
    "gather": "embedding",
    "rms_norm": "norm",
    "add_rms_norm": "add + norm",
    "silu_and_mul": "silu and mul",
    "write_kv": "write kv",
}
"""Parts of programs that have the names of the same kernels called one by one."""


def _joined(names: list[str]) -> str:
    """layers.attention.q, layers.attention.k -> layers.attention.q, k."""
    first, *others = names
    prefix = first[: first.rfind(".") + 1]
    return ", ".join((first, *(name.removeprefix(prefix) for name in others)))


class _ProfiledStream:
    """Implements ``Stream``: the time of all work submitted goes to the step at hand."""

    def __init__(self, stream: Stream, log: _Log) -> None:
        self._stream = stream
        self._log = log

    def submit(self, work: Callable[[], Any]) -> Event:
        return self._stream.submit(lambda: self._run(work))

    def close(self) -> None:
        self._stream.close()

    def _run(self, work: Callable[[], Any]) -> None:
        began = self._log.work_began_s = time.perf_counter()
        work()
        if self._log.steps:
            self._log.steps[-1].busy_s += time.perf_counter() - began
            self._log.ask_programs()


class _ProfiledKernels:
    """Implements ``Kernels``; products are told apart by their weight's place in the model."""

    def __init__(self, kernels: Kernels, log: _Log) -> None:
        self._kernels = kernels
        self._log = log

    def gather(self, table: Weight, ids: Tensor, first: int | None = None) -> Tensor:
        return self._log.timed("embedding", lambda: self._kernels.gather(table, ids, first))

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._log.timed("take", lambda: self._kernels.take(x, rows))

    def read_tokens(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return self._log.timed("read tokens", lambda: self._kernels.read_tokens(tokens, slots, positions))

    def write_tokens(self, tokens: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        self._log.timed("write tokens", lambda: self._kernels.write_tokens(tokens, slots, positions, ids))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        name = self._log.names.get(id(weight), "?")
        return self._log.timed(f"linear {name}", lambda: self._kernels.linear(x, weight, bias), weight.nbytes)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._log.timed("norm", lambda: self._kernels.rms_norm(x, weight, eps))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._log.timed("add + norm", lambda: self._kernels.add_rms_norm(x, residual, weight, eps))

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return self._log.timed("rope", lambda: self._kernels.rope(x, positions, table))

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._log.timed("silu and mul", lambda: self._kernels.silu_and_mul(gate, up))

    def plan_attention(self, cache: KVCache, shape: StepShape) -> AttentionPlan:
        self._log.open(shape.query_start.shape[0] - 1, shape.positions.shape[0])
        return self._log.timed("plan attention", lambda: self._kernels.plan_attention(cache, shape))

    def write_kv(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        self._log.timed("write kv", lambda: self._kernels.write_kv(cache, layer, k, v, plan))

    def attention(
        self, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float, window: int | None = None
    ) -> Tensor:
        return self._log.timed("attention", lambda: self._kernels.attention(q, cache, layer, plan, scale, window))

    def sample(self, logits: Tensor, inputs: SampleInputs) -> Sampled:
        return self._log.timed("sample", lambda: self._kernels.sample(logits, inputs))


class _ProfiledStep:
    """Implements ``PreparedStep``: opens a step when it runs."""

    def __init__(self, step: PreparedStep, rows: int, tokens: int, log: _Log) -> None:
        self._step = step
        self._size = rows, tokens
        self._log = log

    @property
    def logits(self) -> Tensor | None:
        return self._step.logits

    def run(self) -> None:
        self._log.open(*self._size)
        self._step.run()

    def prepare_sample(self, inputs: SampleInputs, vocab_size: int) -> PreparedSample:
        return _ProfiledSample(self._step.prepare_sample(inputs, vocab_size), self, self._log)

    def times(self) -> dict[str, float]:
        return self._step.times()


class _ProfiledSample:
    """Implements ``PreparedSample``; asks the step before it for what it did outside of its programs."""

    def __init__(self, sample: PreparedSample, step: _ProfiledStep, log: _Log) -> None:
        self._sample = sample
        self._step = step
        self._log = log

    @property
    def sampled(self) -> Sampled:
        return self._sample.sampled

    def run(self) -> None:
        self._log.timed("sample", self._sample.run)
        for kind, seconds in self._step.times().items():
            if seconds:
                self._log.steps[-1].add(kind.replace("_", " "), seconds, 0)


def profile_step(config: Config, *, batch: int, context: int, steps: int = 32) -> StepProfile:
    """Profile ``steps`` decode steps of ``batch`` requests with prompts of ``context - steps / 2`` tokens.

    Raises what loading raises, ``ConfigError`` for a batch that can't run at once, and ``ContextLengthExceeded``."""
    prompt = context - (steps + _WARM_UP_STEPS) // 2
    if batch > config.scheduler.max_num_seqs:
        raise ConfigError(f"a batch of {batch} does not fit max_num_seqs {config.scheduler.max_num_seqs}")
    if prompt < 1:
        raise ConfigError(f"a context of {context} is too short for {steps} steps around it; ask for fewer")
    log = _Log()
    device: Device = make_device(config.engine)
    device.kernels = _ProfiledKernels(device.kernels, log)
    prepare = device.prepare_step

    def prepare_step(
        forward: Program,
        logits: Program,
        cache: KVCache,
        tokens: Tensor,
        slots: Tensor,
        shape: StepShape,
        sampled: Tensor,
    ) -> PreparedStep | None:
        step = prepare(forward, logits, cache, tokens, slots, shape, sampled)
        return None if step is None else _ProfiledStep(step, len(shape.kv_lengths), len(slots), log)

    device.prepare_step = prepare_step  # type: ignore[method-assign]
    device.stream = _ProfiledStream(device.stream, log)
    # While the last prompts are computed in chunks, the first requests decode already.
    chunks = -(-batch * prompt // (config.scheduler.max_batched_tokens - batch + 1))
    output_tokens = steps + _WARM_UP_STEPS + chunks
    with Driver(config, device=device) as driver:
        log.names = _names_of(driver.worker.model)
        log.programs = driver.worker.programs
        for program in log.programs:
            program.time_operations(True)
        driver.run([WorkloadRequest(prompt, output_tokens)] * batch)
    decodes = [
        (a, b) for a, b in zip(log.steps, log.steps[1:], strict=False) if _decodes(a, batch) and _decodes(b, batch)
    ]
    pairs = decodes[_WARM_UP_STEPS:][:steps]
    if not pairs:
        raise ConfigError(f"no step had all of the {batch} requests decoding; ask for more steps")
    idle_s = statistics.median(after.began_s - step.began_s - step.busy_s - step.asking_s for step, after in pairs)
    fast = sorted((step for step, _ in pairs), key=lambda step: step.busy_s)[: -(-len(pairs) // 2)]
    step_s = statistics.fmean(step.busy_s for step in fast)
    parts = _parts(fast)
    host_us = next(part.us for part in parts if part.kind == HOST)
    return StepProfile(
        batch=batch,
        context=context,
        steps=len(pairs),
        step_us=1e6 * step_s,
        idle_us=1e6 * idle_s,
        host_share=(1e-6 * host_us + idle_s) / (step_s + idle_s),
        parts=parts,
    )


def _decodes(step: _Step, batch: int) -> bool:
    return step.rows == step.tokens == batch


def _parts(steps: list[_Step]) -> list[Part]:
    busy_s = statistics.fmean(step.busy_s for step in steps)
    calls, sizes = dict(steps[0].calls), steps[0].weight_bytes
    seconds = {kind: statistics.fmean(step.seconds[kind] for step in steps) for kind in calls}
    calls[HOST] = 1
    seconds[HOST] = busy_s - sum(seconds.values())
    parts = [
        Part(
            kind=kind,
            calls=calls[kind],
            us=taken * 1e6,
            share=taken / busy_s,
            weight_bytes=sizes.get(kind, 0),
            weight_bytes_per_s=sizes.get(kind, 0) / taken if taken > 0 else 0.0,
        )
        for kind, taken in seconds.items()
    ]
    return sorted(parts, key=lambda part: -part.us)


def _names_of(model: Model) -> dict[int, str]:
    """Every packed matrix's place in the model by its id, the layers' numbers left out: ``layers.attention.q``."""
    found: dict[int, str] = {}
    seen: set[int] = set()

    def walk(thing: Any, path: tuple[str, ...]) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, list):
            for item in thing:
                walk(item, path)
        elif hasattr(thing, "layout") and hasattr(thing, "nbytes"):
            found[id(thing)] = ".".join(path[:-1])
        elif type(thing).__module__.startswith("ropeway.models.") and hasattr(thing, "__dict__"):
            for name, part in vars(thing).items():
                walk(part, (*path, name.lstrip("_")))

    walk(model.head, ("head",))
    walk(model, ())
    return found
