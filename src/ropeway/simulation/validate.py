"""Against a measured run: fit the cost model on its first half, compare the simulation with the second.

What is known of a real run is when requests came, began and ended, not what each step took. So the three coefficients
are looked for by simulating: those with which the first half's requests come out as they were measured. The second
half's arrivals and lengths are part of the load all the while, its times of nothing. The engine of a measured run is
another one (vLLM), so the production scheduler is set to do as that does: first come first served, admission of
whatever fits now, recomputation of whoever must give way, no shedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ropeway.bench.traces import Trace
from ropeway.config import SchedulerConfig
from ropeway.engine.messages import NewRequest
from ropeway.errors import ConfigError
from ropeway.outcome import StepOutput
from ropeway.request import SamplingParams
from ropeway.simulation.cost_model import CostModel
from ropeway.simulation.engine import EngineSettings
from ropeway.simulation.fleet import Fleet
from ropeway.simulation.load import OpenLoad
from ropeway.simulation.replay import default_max_tokens, last_positions
from ropeway.simulation.router import RoundRobin
from ropeway.simulation.search import nelder_mead
from ropeway.tiers import Tier

LEAST_REQUESTS = 40
_STATISTICS = ("ttft", "tpot", "e2e")
_MEAN_WEIGHT = 4.0
_SERVICE_WEIGHT = 0.25
_STEP = 0.2
_TOLERANCE = 0.02
_ROUNDS = 2
_MOST_SIMULATIONS = 120
_TIERS = (Tier(name="all"),)

Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called with (simulations made, most that there will be)."""


@dataclass(frozen=True)
class Times:
    """Of some requests; float64 [n] each, seconds."""

    arrival_s: Floats
    seated_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    output_tokens: NDArray[np.int64]

    def of(self, part: slice) -> Times:
        return Times(
            self.arrival_s[part],
            self.seated_s[part],
            self.first_token_s[part],
            self.last_token_s[part],
            self.output_tokens[part],
        )

    @property
    def ttft(self) -> Floats:
        return self.first_token_s - self.arrival_s

    @property
    def tpot(self) -> Floats:
        """Of requests with more than one token."""
        several = self.output_tokens > 1
        return (self.last_token_s - self.first_token_s)[several] / (self.output_tokens[several] - 1)

    @property
    def e2e(self) -> Floats:
        return self.last_token_s - self.arrival_s

    @property
    def service(self) -> Floats:
        """From the first seat to the first token."""
        return self.first_token_s - self.seated_s


@dataclass(frozen=True)
class Validation:
    """Coefficients fitted on the first half, and how far off the simulation then is."""

    cost: CostModel
    errors: dict[str, dict[str, float]]
    """ttft, tpot, e2e -> mean, p99 of the second half: simulated / measured - 1."""
    fit_errors: dict[str, dict[str, float]]
    """The same of the first half."""
    measured: dict[str, dict[str, float]]
    """ttft, tpot, e2e -> mean, p99 of the second half in seconds."""
    simulated: dict[str, dict[str, float]]
    preemptions: int
    """In the simulation of the whole trace."""

    def to_json(self) -> dict[str, Any]:
        """As the command writes it."""
        return {
            **{f"{name}_error": values for name, values in self.errors.items()},
            "fit_errors": self.fit_errors,
            "measured_s": self.measured,
            "simulated_s": self.simulated,
            "preemptions": self.preemptions,
            "cost_model": msgspec.to_builtins(self.cost),
        }


def validate(trace: Trace, engine: CostModel, *, progress: Progress | None = None) -> Validation:
    """Fit and compare. ``engine`` says what the measured engine was like; its coefficients are ignored.

    Raises ``ConfigError`` for a trace without measured times, or of fewer than ``LEAST_REQUESTS`` requests."""
    real = measured_times(trace)
    half = len(trace) // 2
    cost = fit(trace, engine, half, progress=progress)
    simulated, fleet = simulate(trace, cost)
    first, second = slice(0, half), slice(half, None)
    return Validation(
        cost=cost,
        errors=_errors(simulated.of(second), real.of(second)),
        fit_errors=_errors(simulated.of(first), real.of(first)),
        measured=_statistics(real.of(second)),
        simulated=_statistics(simulated.of(second)),
        preemptions=sum(each.scheduler.preemptions for each in fleet.engines),
    )


def measured_times(trace: Trace) -> Times:
    """What was measured. Raises as ``validate`` does."""
    measured = trace.measured
    if measured is None:
        raise ConfigError(
            "the trace to validate with holds no measured times; it needs the columns queued_s, scheduled_s, "
            "first_token_s and last_token_s",
            param="validate",
        )
    if len(trace) < LEAST_REQUESTS:
        raise ConfigError(
            f"the trace to validate with holds {len(trace)} requests; half of them is to be fitted, so it needs at "
            f"least {LEAST_REQUESTS}",
            param="validate",
        )
    several = trace.output_tokens > 1
    if not (several.any() and (measured.last_token_s > measured.first_token_s)[several].all()):
        raise ConfigError(
            "the trace to validate with holds answers of several tokens that took no time; last_token_s must be after "
            "first_token_s",
            param="validate",
        )
    return Times(trace.times, measured.scheduled_s, measured.first_token_s, measured.last_token_s, trace.output_tokens)


def fit(trace: Trace, engine: CostModel, requests: int, *, progress: Progress | None = None) -> CostModel:
    """``engine`` with the coefficients that fit the first ``requests`` of a measured trace best."""
    real = measured_times(trace).of(slice(0, requests))
    made = 0

    def misfit(logarithms: Floats) -> float:
        nonlocal made
        made += 1
        if progress is not None:
            progress(min(made, _MOST_SIMULATIONS), _MOST_SIMULATIONS)
        return _misfit(simulate(trace, _with(engine, np.exp(logarithms)), requests)[0].of(slice(0, requests)), real)

    best = np.log(_first_guess(trace, engine, real))
    for _ in range(_ROUNDS):  # the misfit has many small dents, from which a fresh simplex gets out
        best, _ = nelder_mead(
            misfit, best.tolist(), step=_STEP, tolerance=_TOLERANCE, most_evaluations=_MOST_SIMULATIONS // _ROUNDS
        )
    return _with(engine, np.exp(best))


def simulate(trace: Trace, cost: CostModel, until: int | None = None) -> tuple[Times, Fleet]:
    """Replay a trace on the engine that ``cost`` describes, set to do as vLLM does. ``until``: stop when this many
    requests from the start of the trace have ended; the times of others may be missing (NaN)."""
    max_tokens = default_max_tokens(trace)
    longest = int(trace.input_tokens.max()) + max_tokens
    settings = EngineSettings(
        cost=cost,
        scheduler=SchedulerConfig(
            max_num_seqs=cost.max_num_seqs,
            max_batched_tokens=cost.max_batched_tokens,
            policy="fcfs",
            admission="greedy",
            preemption="recompute",
            shed=False,
        ),
        block_size=cost.block_size,
        num_blocks=cost.kv_tokens // cost.block_size,
        max_model_len=min(cost.kv_tokens // cost.block_size * cost.block_size, longest),
        prefix_cache=False,
        tiers=_TIERS,
        ahead=cost.ahead,
    )
    lengths = trace.input_tokens.tolist()
    blank = np.ones(max(lengths), dtype=np.int32)
    params = SamplingParams(max_tokens=max_tokens)

    def request(row: int, now_s: float) -> NewRequest:
        return NewRequest(id=row, prompt=blank[: lengths[row]], params=params, seed=0, arrival_s=now_s)

    events = _Events(len(trace), len(trace) if until is None else until)
    fleet = Fleet(
        settings,
        cost.engines,
        RoundRobin(cost.engines),
        OpenLoad(trace.times),
        request,
        last_positions(trace),
        events,
        group_size=cost.group_size,
    )
    fleet.run(until=events.complete)
    return events.times(trace), fleet


class _Events:
    """Implements ``Listener``: the first and the last token of each request."""

    def __init__(self, requests: int, wanted: int) -> None:
        self._seated_s = np.full(requests, np.nan)
        self._first_s = np.full(requests, np.nan)
        self._last_s = np.full(requests, np.nan)
        self._wanted = self._left = wanted

    def arrived(self, row: int, now_s: float) -> None:
        """The trace says so itself."""

    def output(self, output: StepOutput, now_s: float) -> None:
        for started in output.started:
            self._first_s[started.id] = now_s
        for finished in output.finished:
            if finished.refusal is not None:
                raise ConfigError(
                    f"the engine to validate with refuses request {finished.id + 1} of the trace, which the measured "
                    f"one served: {finished.refusal.message}",
                    param="validate",
                )
            assert finished.timeline is not None
            timeline = finished.timeline
            self._last_s[finished.id] = now_s
            self._seated_s[finished.id] = now_s - timeline.total_s + timeline.queued_s
            self._left -= finished.id < self._wanted

    def complete(self) -> bool:
        return self._left == 0

    def times(self, trace: Trace) -> Times:
        return Times(trace.times, self._seated_s, self._first_s, self._last_s, trace.output_tokens)


def _with(engine: CostModel, coefficients: Floats) -> CostModel:
    a, b, c = coefficients.tolist()
    return msgspec.structs.replace(engine, a_s=a, b_s_per_token=b, c_s_per_kv_token=c)


def _first_guess(trace: Trace, engine: CostModel, real: Times) -> list[float]:
    """Half of the shortest TPOT for the constant; a full step of prompts for the tokens; a quarter of the usual TPOT
    for what a full batch has cached."""
    part = slice(0, len(real.arrival_s))
    usual = float(np.median(real.tpot))
    length = float(np.median((trace.input_tokens + trace.output_tokens / 2)[part]))
    cached = min(length * engine.max_num_seqs, engine.kv_tokens)
    # Its first steps began one step after it was seated, when the engine plans ahead.
    steps = 1 + engine.ahead
    prefill = float(np.median(real.service)) / (steps * engine.max_batched_tokens)
    return [0.5 * float(real.tpot.min()), max(prefill, 1e-9), 0.25 * usual / cached]


def _misfit(simulated: Times, real: Times) -> float:
    """Squared logarithms of simulated / measured: of means and P99 of each statistic, of every request's TPOT and E2E,
    and of the mean time from seat to first token, without which prompts and answers are hard to tell apart."""
    total = _SERVICE_WEIGHT * _squared(simulated.service.mean(), real.service.mean())
    for name in _STATISTICS:
        ours, theirs = getattr(simulated, name), getattr(real, name)
        total += _MEAN_WEIGHT * _squared(ours.mean(), theirs.mean())
        total += _squared(np.percentile(ours, 99), np.percentile(theirs, 99))
        if name != "ttft":
            total += float(np.mean(np.log(ours / theirs) ** 2))
    return total


def _squared(ours: float, theirs: float) -> float:
    return float(np.log(ours / theirs) ** 2)


def _statistics(times: Times) -> dict[str, dict[str, float]]:
    found = {name: getattr(times, name) for name in _STATISTICS}
    return {
        name: {"mean": float(values.mean()), "p99": float(np.percentile(values, 99))} for name, values in found.items()
    }


def _errors(simulated: Times, real: Times) -> dict[str, dict[str, float]]:
    ours, theirs = _statistics(simulated), _statistics(real)
    return {name: {each: ours[name][each] / theirs[name][each] - 1 for each in ours[name]} for name in ours}
