"""Goal 10: the prefix cache costs nothing where it does not hit, hits whatever can be hit, and saves what it hits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from benchmarks.goals.models import small_model
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.prefix import measure_prefix, measure_zero_hits
from ropeway.bench.report import readable
from ropeway.bench.traces import Trace, read_trace
from ropeway.bench.workload import HASH_BLOCK, mixed_workload
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.execution.timer import TimerExecutor
from ropeway.request import SamplingParams
from ropeway.scheduling.scheduler import Scheduler
from ropeway.settings import resolve

TRACES = Path(__file__).parents[1] / "traces"
MOONCAKE = {
    "conversation": ("mooncake_conversation_full_part1.csv", "mooncake_conversation_full_part2.csv"),
    "synthetic": ("mooncake_synthetic_full_part1.csv",),
}
EXPECTED = {"conversation": 0.3734, "synthetic": 0.6504}
"""Shares of input tokens that can be found at all."""
_VOCABULARY = 32_000


def counted_hits(trace: Trace) -> int:
    """Input tokens that a prefix cache of unbounded size finds if each request ends before the next begins: of each
    prompt the leading whole blocks whose ids were in an earlier prompt, but never all of its tokens, since the last one
    must be computed. Ids name a block together with all before it."""
    assert trace.hash_ids is not None
    seen: set[int] = set()
    hits = 0
    for tokens, ids in zip(trace.input_tokens.tolist(), trace.hash_ids, strict=True):
        whole = ids[: tokens // HASH_BLOCK]
        for number in whole[: (tokens - 1) // HASH_BLOCK]:
            if number not in seen:
                break
            hits += HASH_BLOCK
        seen.update(whole)
    return hits


def engine_hits(trace: Trace) -> int:
    """The same from the production scheduler and cache: prompts made up to share what the ids say, in blocks of 512
    tokens, one request after the other through the step loop, one token of output each."""
    assert trace.hash_ids is not None
    longest = int(trace.input_tokens.max()) + 1
    # The blocks of all prompts, and those of the request that runs.
    blocks = sum(len(ids) for ids in trace.hash_ids) + -(-longest // HASH_BLOCK)
    config = SchedulerConfig(max_num_seqs=1, max_batched_tokens=longest, shed=False)
    scheduler = Scheduler(config, BlockPool(blocks, HASH_BLOCK), longest)
    engine = Engine(scheduler, TimerExecutor(lambda plan: 0.0), lambda output: None, max_model_len=longest)
    for row in range(len(trace)):
        prompt = trace.prompt_ids(row, _VOCABULARY)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        engine.submit([NewRequest(id=row + 1, prompt=prompt, params=params, seed=0)])
        while engine.has_work:
            engine.step(ahead=0)
    scheduler.check()
    return scheduler.prefixes.hits


def measure(
    *,
    requests: int | None = None,
    prompt_tokens: int = 1280,
    repeat: int = 9,
    workload: int = 8,
    pairs: int = 15,
    sequences: int = 64,
) -> Outcome:
    """``requests``: only so many of each trace. ``repeat``: pairs of prompts with a shared prefix; ``pairs``: runs of
    ``workload`` requests with the cache and without."""
    outcome = Outcome()
    shares = []
    for name, parts in MOONCAKE.items():
        trace = _first(read_trace([TRACES / part for part in parts]), requests)
        tokens = int(trace.input_tokens.sum())
        counted, found = counted_hits(trace), engine_hits(trace)
        shares.append([name, len(trace), tokens, f"{counted / tokens:.2%}", f"{found / tokens:.2%}"])
        outcome.figures[name] = {
            "requests": len(trace),
            "input_tokens": tokens,
            "counted_hit_tokens": counted,
            "found_hit_tokens": found,
            "hit_fraction": found / tokens,
        }
        outcome.checks += [
            Check(
                f"Mooncake {name}: tokens hit beyond or short of a straight count", abs(found - counted), 0, "at most"
            ),
            Check(f"Mooncake {name}: input tokens hit", round(found / tokens, 4), EXPECTED[name], unit="%"),
        ]
    model, label = small_model()
    config = resolve({"model": model}, environ={}, given_as="argument").config
    gain = measure_prefix(config, prompt_tokens=prompt_tokens, repeat=repeat)
    cost = measure_zero_hits(config, workload=mixed_workload(workload), repeat=pairs, sequences=sequences)
    outcome.figures |= {"model": label, "shared_prefix": asdict(gain), "zero_hits": asdict(cost)}
    outcome.checks += [
        Check(f"{label}: prefill time that a shared prefix of 95 % cuts", gain.cut_fraction, 0.92, unit="%"),
        Check("time lost at zero hits, device and host", cost.throughput_cost_fraction, 0.01, "at most", "%"),
    ]
    outcome.tables = [
        table_of("Mooncake traces, unbounded cache", ["trace", "requests", "input tokens", "counted", "found"], shares),
        _figures(f"{label}: prompts of {gain.prompt_tokens} tokens", asdict(gain).items()),
        _figures(f"{label}: no hits", asdict(cost).items()),
    ]
    return outcome


def _first(trace: Trace, requests: int | None) -> Trace:
    return trace if requests is None else trace.take(min(requests, len(trace)))


def _figures(title: str, figures: Iterable[tuple[str, object]]) -> Table:
    rows = [[name, readable(name, value)] for name, value in figures if not isinstance(value, list)]
    return table_of(title, ["", ""], rows)
