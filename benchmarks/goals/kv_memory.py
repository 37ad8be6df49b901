"""Goal 5: what it costs to keep keys and values in blocks: unused slots, and time."""

from __future__ import annotations

from benchmarks.goals.models import small_model
from benchmarks.goals.simulated import CONVERSATION, engine_of, recorded
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.kv import measure_kv, measure_waste
from ropeway.settings import resolve

BLOCK_SIZE = 16
CONTEXT = 2048


def measure(*, requests: int | None = 4000, context: int = CONTEXT, repeat: int = 15) -> Outcome:
    """``requests``: the first so many of the trace; None: all."""
    waste = measure_waste(recorded(CONVERSATION, requests), engine_of(), BLOCK_SIZE)
    model, name = small_model()
    config = resolve({"model": model, "block_size": BLOCK_SIZE}, environ={}, given_as="argument").config
    paged = measure_kv(config, context=context, steps=1, repeat=repeat, types=()).paged_over_contiguous
    outcome = Outcome(
        [
            Check(f"slots held and not used, Azure conversations, blocks of {BLOCK_SIZE}", waste, 0.02, "at most", "%"),
            *(
                Check(f"attention over blocks / over one piece of memory, {step}, {name}", ratio, 1.03, "at most", "x")
                for step, ratio in paged.items()
            ),
        ],
        {"kv_waste": waste, "paged_over_contiguous": paged, "context_tokens": context, "model": name},
    )
    outcome.tables = [
        table_of(
            f"attention over blocks of {BLOCK_SIZE} / over one piece of memory, {context} tokens",
            ["step", "ratio"],
            [[step, ratio] for step, ratio in paged.items()],
        )
    ]
    return outcome
