"""Goal 12: how much of two ranks' communication micro-batches hide, over links of three rates."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.goals.verdict import Check, Outcome, table_of
from benchmarks.random_model import random_model
from ropeway.bench.network import NoNetwork
from ropeway.bench.overlap import OverlapRun, measure_auto, measure_overlap
from ropeway.settings import resolve

SHAPE = "qwen3-0.6b"
FRACTIONS = (0.2, 0.35, 0.5)
"""Of the serial step that communication takes."""
TOKENS = 512
AUTO_TOKENS = (32, 64, 128, 256, 512)


def measure(*, tokens: int = TOKENS, repeat: int = 20) -> Outcome:
    fields = {
        "model": str(random_model(SHAPE)),
        "tensor_parallel_size": 2,
        "kv_blocks": 256,
        "max_model_len": 2048,
        "max_batched_tokens": tokens,
    }
    config = resolve(fields, environ={}, given_as="argument").config
    try:
        runs = measure_overlap(config, tokens=[tokens], fractions=FRACTIONS, fused=False, repeat=repeat)
        overlapped = [run for run in runs if run.mode != "serial"]
        middle = overlapped[len(overlapped) // 2].link_rate
        assert middle is not None
        sizes = [size for size in AUTO_TOKENS if size <= tokens]
        table, chosen = measure_auto(config, rate=middle, tokens=sizes, repeat=max(repeat, 20))
    except NoNetwork as error:
        return Outcome([Check("micro-batches over a link of limited rate", None, 0.95, note=error.message)])
    outcome = Outcome([check for run in overlapped for check in _checks(run)])
    slowest = max((run.slowest for run in chosen), default=1.0)
    outcome.checks.append(
        Check(
            f"auto / off at {middle}, upper 95 % bound of the slowest of {len(sizes)} sizes",
            slowest,
            1.01,
            "at most",
            "x",
        )
    )
    outcome.figures = {
        "runs": [asdict(run) for run in runs],
        "auto": {"link_rate": middle, "table": asdict(table), "cut": [asdict(run) for run in chosen]},
        "shape": SHAPE,
        "tokens": tokens,
        "repeat": repeat,
    }
    columns = ["step", "link", "comm. share", "serial, ms", "overlapped, ms", "kernel", "effective", "speed-up"]
    serial = [run for run in runs if run.mode == "serial"]
    outcome.tables = [
        table_of(
            f"{SHAPE}, {tokens} tokens, two ranks with a core each, medians of {repeat} turns",
            columns,
            [
                [
                    run.what,
                    run.link_rate,
                    run.comm_fraction,
                    1e3 * whole.wall_s,
                    1e3 * run.wall_s,
                    run.kernel_overlap,
                    run.effective_overlap,
                    run.speedup,
                ]
                for whole, run in zip(serial, overlapped, strict=True)
            ],
        )
    ]
    return outcome


def _checks(run: OverlapRun) -> list[Check]:
    case = f"{run.what}, communication {run.comm_fraction:.0%} of the serial step"
    return [
        Check(f"kernel overlap, {case}", run.kernel_overlap, 0.95, unit="%"),
        Check(f"effective overlap, {case}", run.effective_overlap, 0.80, unit="%"),
        Check(f"speed-up, {case}", run.speedup, 1 / (1 - 0.8 * run.comm_fraction), unit="x"),
    ]
