"""For how much of the time a device has nothing to do between steps, with asynchronous scheduling and without, as the
engine's own trace tells.

    synchronous    host     | settle | plan |                    | settle | plan |
                   device                   |------- step -------|--- bubble ----|------- step -------|
"""

from __future__ import annotations

import dataclasses
import gc
from contextlib import ExitStack
from dataclasses import dataclass

from ropeway.bench.driver import Driver
from ropeway.bench.workload import WorkloadRequest
from ropeway.config import Config
from ropeway.trace import COMPUTE, Trace

_PROMPT_TOKENS = 16
_SKIPPED = 3
"""Steps at either end of a turn that do not count: the first compute prompts, and no step follows the last."""


@dataclass(frozen=True)
class Decoding:
    """Some requests that decode together."""

    sequences: int
    async_scheduling: bool
    steps: int
    bubble: float
    """Share of the time in which the device had nothing to do."""
    step_ms: float
    """From a step's begin to the next one's, in the mean."""


@dataclass(frozen=True)
class Comparison:
    """Without asynchronous scheduling, and with it."""

    runs: tuple[Decoding, Decoding]
    """The turns with the median bubble."""
    traces: tuple[Trace, Trace]
    """Theirs."""
    same_tokens: float
    """Share of all turns' answers that have exactly the tokens of the first turn's."""


def measure_bubbles(config: Config, *, sequences: int, steps: int, turns: int = 5) -> Comparison:
    """Decode ``steps`` steps of ``sequences`` requests, ``turns`` times synchronously and asynchronously in turns.

    Of ``config``, sizes are those that this takes, and there is no prefix cache. Raises what loading raises."""
    outputs = steps + 1 + 2 * _SKIPPED
    config = _sized(config, sequences, _PROMPT_TOKENS + outputs)
    workload = [WorkloadRequest(_PROMPT_TOKENS, outputs)] * sequences
    found: dict[bool, list[tuple[Decoding, Trace]]] = {False: [], True: []}
    answers: list[list[int]] = []
    with ExitStack() as stack:
        drivers = {mode: stack.enter_context(Driver(_scheduled(config, mode))) for mode in found}
        gc.collect()
        gc.freeze()  # as an engine's process does
        stack.callback(gc.unfreeze)
        for turn in range(turns + 1):
            for mode in (False, True) if turn % 2 else (True, False):
                driver, trace = drivers[mode], Trace()
                driver.engine.trace = driver.worker.trace = trace
                answers += [request.token_ids for request in driver.run(workload).requests]
                if turn:  # the first touches memory
                    found[mode].append((decoding_of(trace, sequences, mode), trace))
    off, on = (sorted(each, key=lambda pair: pair[0].bubble)[turns // 2] for each in found.values())
    same = sum(answer == answers[number % sequences] for number, answer in enumerate(answers)) / len(answers)
    return Comparison((off[0], on[0]), (off[1], on[1]), same)


def decoding_of(trace: Trace, sequences: int, async_scheduling: bool) -> Decoding:
    """What the trace of a turn tells, of all steps but a few at either end."""
    begins = step_begins(trace)[_SKIPPED:-_SKIPPED]
    begin, end, steps = begins[0], begins[-1], len(begins) - 1
    busy = sum(until - since for _, since, until in trace.intervals(COMPUTE) if begin <= since < end)
    return Decoding(
        sequences=sequences,
        async_scheduling=async_scheduling,
        steps=steps,
        bubble=1 - busy / (end - begin),
        step_ms=1e3 * (end - begin) / steps,
    )


def step_begins(trace: Trace) -> list[float]:
    """When the device began with each step, in seconds."""
    return [begin for name, begin, _ in trace.intervals(COMPUTE) if name == "forward"]


def _sized(config: Config, sequences: int, tokens: int) -> Config:
    """With room for so many requests of so many tokens at once."""
    blocks = 4 * sequences * -(-tokens // config.cache.block_size)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_model_len=tokens),
        cache=dataclasses.replace(config.cache, kv_blocks=blocks, prefix_cache=False),
        scheduler=dataclasses.replace(
            config.scheduler, max_num_seqs=sequences, max_batched_tokens=sequences * _PROMPT_TOKENS
        ),
    )


def _scheduled(config: Config, asynchronous: bool) -> Config:
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, async_scheduling=asynchronous))
