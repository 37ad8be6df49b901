"""Replays of recorded traffic on simulated engines, as the goals need them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropeway.bench.traces import Trace, read_trace
from ropeway.config import SchedulerConfig
from ropeway.simulation.cost_model import DEFAULT_COST_MODEL, CostModel, read_cost_model
from ropeway.simulation.replay import Replayed, replay
from ropeway.simulation.setup import replay_settings

TRACES = Path(__file__).parents[1] / "traces"
CONVERSATION = ("azure2023_conv_part1.csv", "azure2023_conv_part2.csv")
CODE = ("azure2023_code.csv",)


@cache
def recorded(files: tuple[str, ...], requests: int | None = None) -> Trace:
    """A trace from its first arrival on, or its first ``requests``."""
    trace = read_trace([TRACES / file for file in files]).from_zero()
    return trace if requests is None else trace.take(requests).from_zero()


def at_rate(trace: Trace, rate: float) -> Trace:
    """The same requests with the gaps between them scaled, so that ``rate`` come per second in the mean."""
    return trace.scaled(rate * trace.duration_s / (len(trace) - 1))


def at_once(trace: Trace) -> Trace:
    """The same requests, all there from the start."""
    return dataclasses.replace(trace, arrival_s=np.zeros(len(trace)), measured=None)


def joined(*traces: Trace) -> Trace:
    """All their requests, in the order of arrival."""
    times = np.concatenate([trace.times for trace in traces])
    order = np.argsort(times, kind="stable")

    def names(column: str) -> list[str] | None:
        lists = [getattr(trace, column) for trace in traces]
        if any(each is None for each in lists):
            return None
        flat = [name for each in lists for name in each]
        return [flat[place] for place in order.tolist()]

    return Trace(
        input_tokens=np.concatenate([trace.input_tokens for trace in traces])[order],
        output_tokens=np.concatenate([trace.output_tokens for trace in traces])[order],
        arrival_s=times[order],
        tier=names("tier"),
        tenant=names("tenant"),
    )


def engine_of() -> CostModel:
    """The engine that goals are measured on: an RTX 4090 with Llama-3.1-8B, fitted from a measured run."""
    return read_cost_model(DEFAULT_COST_MODEL)


def run(trace: Trace, cost: CostModel, *, how: dict[str, Any] | None = None, **scheduler: Any) -> Replayed:
    """A replay on one engine. ``how``: keywords of ``replay_settings``; prompts share nothing unless it says so.
    ``scheduler``: fields of ``SchedulerConfig``."""
    fields = {"max_num_seqs": cost.max_num_seqs, "max_batched_tokens": cost.max_batched_tokens, **scheduler}
    settings = {"prefix_cache": False, **(how or {})}
    return replay(trace, replay_settings(trace, cost, SchedulerConfig(**fields), **settings))


def service_rate(trace: Trace, cost: CostModel, **scheduler: Any) -> Replayed:
    """The requests as fast as the engine can serve them: all are there from the start, and none is refused."""
    return run(at_once(trace), cost, **{"shed": False, **scheduler})


def pause_s(replayed: Replayed) -> NDArray[np.float64]:
    """float64 [served requests]: by how much each one's longest gap between two tokens exceeds the longest step there
    can be. That is what it stood still for while it had no seat, and not for the sake of somebody's prompt."""
    engine, recorder = replayed.settings.engine, replayed.recording.recorder
    longest = engine.cost.step_s(engine.scheduler.max_batched_tokens, engine.num_blocks * engine.block_size)
    return np.maximum(recorder.largest_gap_s[~np.isnan(recorder.tpot_s)] - longest, 0.0)


def slim(figures: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of the figures that a report keeps."""
    return {name: figures[name] for name in names}
