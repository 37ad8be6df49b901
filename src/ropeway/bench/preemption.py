"""What it costs to take a request's seat away and give it back: by swap, by recomputing, and as the scheduler chooses.

A long request decodes; an urgent short one takes the only seat, and when that one is done the long one goes on:

    | long decodes | short | long resumes | long decodes | short | ...
                   ^ copies out           ^ its next token is there
                           ^ copies in, or its known tokens computed again

The cost of a preemption is the device time that it adds: copies both ways, and what the steps that compute known tokens
again take beyond one decode step, which would have given the next token anyway.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from ropeway.bench.workload import WorkloadRequest
from ropeway.config import Config
from ropeway.engine.assembly import assemble
from ropeway.engine.messages import NewRequest
from ropeway.engine.submission import Submitter
from ropeway.errors import ConfigError, RopewayError
from ropeway.execution.executor import Executor, Work
from ropeway.loading.sources import resolve as resolve_source
from ropeway.outcome import Finished, StepOutput
from ropeway.plan import Masks, Plan, Result
from ropeway.request import SamplingParams
from ropeway.scheduling.scheduler import MAX_PREEMPTIONS
from ropeway.tiers import DEFAULT_TIERS

Kind = Literal["swap", "recompute", "auto"]
KINDS: tuple[Kind, ...] = ("swap", "recompute", "auto")

_GAP = 4
"""Output tokens of the long request before, between and after its preemptions."""
_SHORT = WorkloadRequest(prompt_tokens=8, output_tokens=2)
_OUTPUT = _GAP * (MAX_PREEMPTIONS + 1)
_SWAP_GIB = 1.0
"""Host memory where none is configured."""


@dataclass
class ResumeCost:
    """One way of preempting at one length. Times are seconds on the device."""

    kind: Kind
    context_tokens: int
    """Prompt of the long request."""
    samples_s: list[float] = field(default_factory=list)
    """One per preemption."""
    done: Counter[str] = field(default_factory=Counter)
    """What was done: how many of them were ``swap``, how many ``recompute``."""
    identical: bool = True
    """Whether every output was token for token that of a request left alone."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


def measure_preemption(
    config: Config,
    lengths: Sequence[int],
    *,
    kept: bool = False,
    repeat: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> list[ResumeCost]:
    """For every length and kind, ``MAX_PREEMPTIONS * repeat`` preemptions; the kinds take turns in every order.

    ``kept``: the prefix cache is on and the short request leaves the pool's other blocks alone, so that the long one
    finds its full blocks again; otherwise it finds nothing. Seats, tiers, host memory and the KV pool are set as the
    measurement needs them. Raises what loading raises, and ``ConfigError`` for a length of no tokens."""
    if not lengths or min(lengths) < 1:
        raise ConfigError(
            f"context lengths are {list(lengths)}; give at least one, of 1 token or more", param="lengths"
        )
    costs = {(kind, length): ResumeCost(kind, length) for length in lengths for kind in KINDS}
    total, done = len(costs) * repeat, 0
    orders = list(itertools.permutations(KINDS))
    for number in range(repeat):
        # Engines are made anew, since where their memory happens to lie decides how fast copies are.
        with ExitStack() as stack:
            lines = {kind: stack.enter_context(_Line(_arranged(config, kind, max(lengths), kept))) for kind in KINDS}
            for line in lines.values():  # host memory is taken from the system as it is first written
                line.run(max(lengths), seed=repeat, disturbed=True)
            for length in lengths:
                expected = lines["auto"].run(length, seed=number, disturbed=False).tokens
                for kind in orders[number % len(orders)]:
                    run = lines[kind].run(length, seed=number, disturbed=True)
                    cost = costs[kind, length]
                    cost.samples_s += run.costs_s
                    cost.done.update(run.preemptions)
                    cost.identical &= run.tokens == expected
                    done += 1
                    if progress is not None:
                        progress(done, total)
    return list(costs.values())


def report(costs: Sequence[ResumeCost]) -> dict[str, Any]:
    """Every cost, and at each length that of ``auto`` over the better of the other two."""
    medians = {(cost.kind, cost.context_tokens): cost.median_s for cost in costs}
    ratios = {
        length: medians["auto", length] / min(medians["swap", length], medians["recompute", length])
        for length in dict.fromkeys(cost.context_tokens for cost in costs)
    }
    return {
        "costs": [asdict(cost) | {"done": dict(cost.done), "median_s": cost.median_s} for cost in costs],
        "auto_over_better": {str(length): ratio for length, ratio in ratios.items()},
        "worst_auto_over_better": max(ratios.values()),
        "identical": all(cost.identical for cost in costs),
    }


def _arranged(config: Config, kind: Kind, longest: int, kept: bool) -> Config:
    """One seat, and memory for a long and a short request."""
    size = config.cache.block_size
    blocks = sum(-(-tokens // size) for tokens in (longest + _OUTPUT, _SHORT.prompt_tokens + _SHORT.output_tokens))
    cache = dataclasses.replace(
        config.cache,
        kv_blocks=blocks + 1,
        kv_memory=None,
        prefix_cache=kept,
        swap_space=config.cache.swap_space or _SWAP_GIB,
        disk_cache=None,
    )
    scheduler = dataclasses.replace(
        config.scheduler,
        max_num_seqs=1,
        policy="priority",
        batching="continuous",
        padded_rows=False,
        preemption=kind,
        tiers=None,
        shed=False,
        length_profile=None,
    )
    return dataclasses.replace(config, cache=cache, scheduler=scheduler)


@dataclass(frozen=True)
class _Disturbed:
    tokens: list[list[int]]
    """Outputs of the long request and of the short ones, in order."""
    costs_s: list[float]
    preemptions: Counter[str]


class _Line:
    """An engine with one seat. A context manager."""

    def __init__(self, config: Config) -> None:
        self._assembly = assemble(config, resolve_source(config.model.model), self._receive)
        engine = self._assembly.engine
        self._noted = _Noted(engine.executor)
        engine.executor = self._noted
        self._engine = engine
        self._submitter = Submitter(self._assembly.info)
        self._ahead = int(config.engine.async_scheduling)
        self._outputs: dict[int, list[int]] = {}
        self._finished: dict[int, Finished] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._assembly.close()

    def run(self, length: int, *, seed: int, disturbed: bool) -> _Disturbed:
        """A long request to its end; ``disturbed``: with a short one every ``_GAP`` tokens, else with them after it."""
        long = self._new(WorkloadRequest(length, _OUTPUT), 0, seed, tier=len(DEFAULT_TIERS) - 1)
        shorts = [self._new(_SHORT, number + 1, seed, tier=0) for number in range(MAX_PREEMPTIONS)]
        self._outputs = {new.id: [] for new in (long, *shorts)}
        self._finished.clear()
        self._noted.steps.clear()
        self._engine.submit([long])
        for number, short in enumerate(shorts, start=1):
            while len(self._outputs[long.id]) < (_GAP * number if disturbed else _OUTPUT):
                self._step()
            self._engine.submit([short])
            while short.id not in self._finished:
                self._step()
        while self._engine.has_work:
            self._step()
        timeline = self._finished[long.id].timeline
        assert timeline is not None
        costs = self._noted.resume_costs(long.id)
        return _Disturbed(list(self._outputs.values()), costs, Counter(timeline.preemptions))

    def _new(self, request: WorkloadRequest, index: int, seed: int, tier: int) -> NewRequest:
        prompt = request.prompt(index, self._assembly.info.vocab_size, seed)
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, seed=0)
        (new,) = self._submitter.prepare(prompt.tolist(), params, tier=tier)
        return new

    def _step(self) -> None:
        self._engine.step(self._ahead)

    def _receive(self, output: StepOutput) -> None:
        for request_id, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
            self._outputs[request_id].append(token)
        for finished in output.finished:
            if finished.refusal is not None:
                raise RopewayError(f"the engine refused a request: {finished.refusal.message}")
            self._finished[finished.id] = finished


class _Noted:
    """Implements ``Executor`` over another one: keeps every plan and its result."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[tuple[Plan, Result]] = []

    def forward(self, plan: Plan) -> Work:
        return _NotedWork(self._executor.forward(plan), self.steps)

    def close(self) -> None:
        self._executor.close()

    def resume_costs(self, request_id: int) -> list[float]:
        """Seconds on the device that each preemption of this request has added, from the step that gives its seat away
        to the one with its next token."""
        rows = [(plan.request == request_id, plan, result) for plan, result in self.steps]
        decode_s = statistics.median(
            result.elapsed_s for own, plan, result in rows if own.any() and plan.count[own][0] == 1
        )
        costs: list[float] = []
        sampled = away = False
        cost = 0.0
        for own, plan, result in rows:
            if sampled and not away and not own.any():
                away, cost = True, 0.0
            if away:
                cost += result.copy_s
            if not own.any():
                continue
            samples, again = bool(plan.samples[own][0]), int(plan.count[own][0]) > 1
            if away and again:
                cost += max(result.elapsed_s - (decode_s if samples else 0.0), 0.0)
            if samples:
                if away:
                    costs.append(cost)
                sampled, away = True, False
        return costs


class _NotedWork:
    """Implements ``Work``."""

    def __init__(self, work: Work, steps: list[tuple[Plan, Result]]) -> None:
        self.plan = work.plan
        self._work = work
        self._steps = steps

    def sample(self, masks: Masks | None = None) -> None:
        self._work.sample(masks)

    def result(self) -> Result:
        result = self._work.result()
        self._steps.append((self.plan, result))
        return result
