"""A scheduler's figures as the messages that report them."""

from __future__ import annotations

from itertools import islice

import numpy as np

from ropeway.engine.messages import Inspected, QueueView, SeatView, Stats, TierStats
from ropeway.scheduling.scheduler import Scheduler


def stats_of(scheduler: Scheduler, steps: int) -> Stats:
    """Gauges of this moment, and counters."""
    pool, host, seats = scheduler.pool, scheduler.host, scheduler.seats
    store = None if host is None else host.store
    return Stats(
        running=seats.taken,
        waiting=len(scheduler.waiting),
        blocks_live=pool.live,
        blocks_cached=pool.cached,
        blocks_free=pool.free,
        steps=steps,
        preemptions=scheduler.preemptions,
        prefix_queries=scheduler.prefixes.queries,
        prefix_hits=scheduler.prefixes.hits,
        wasted_rows=dict(scheduler.wasted_rows),
        tiers=_tiers(scheduler),
        swaps_out=0 if host is None else host.swaps_out,
        swaps_in=0 if host is None else host.swaps_in,
        host_blocks_pinned=0 if host is None else host.pool.live,
        host_blocks_cached=0 if host is None else host.pool.cached,
        host_blocks_free=0 if host is None else host.pool.free,
        host_hits=scheduler.prefixes.host_hits,
        disk_hits=scheduler.prefixes.disk_hits,
        disk_blocks=0 if store is None else store.blocks,
        disk_errors=0 if store is None else store.errors,
        disk_failure=None if store is None else store.failure,
        reservation=scheduler.admission.reservation.share,
        step_s=scheduler.cost.predict(seats.taken, int(seats.computed[seats.ranked].sum())),
    )


_SHOWN = 50
"""Requests of each waiting line that are told of."""


def inspected(scheduler: Scheduler, now: float) -> Inspected:
    """The batch, the heads of the queues and the pool, at this moment."""
    seats = scheduler.seats
    return Inspected(
        seats=[
            SeatView(
                id=int(seats.request_id[slot]),
                tier=scheduler.tiers[int(seats.tier[slot])].name,
                prompt_tokens=int(seats.prompt[slot]),
                computed_tokens=int(seats.computed[slot]),
                output_tokens=int(max(seats.length[slot] - seats.prompt[slot], 0)),
                limit=int(seats.limit[slot]),
                blocks=int(seats.blocks_held[slot]),
                preemptions=0 if (request := seats.requests[slot]) is None else request.preemptions,
            )
            for slot in seats.ranked.tolist()
        ],
        queue=[
            QueueView(
                id=request.id,
                tier=scheduler.tiers[request.tier].name,
                prompt_tokens=request.prompt_tokens,
                waits_s=max(now - request.arrival_s, 0.0),
                swapped=request.swapped is not None,
                gated=request.gated,
            )
            for line in scheduler.waiting.lines
            for request in islice(line, _SHOWN)
        ],
        blocks=scheduler.pool.states(),
    )


def _tiers(scheduler: Scheduler) -> dict[str, TierStats]:
    seats = scheduler.seats
    running = np.bincount(seats.tier[seats.ranked], minlength=len(scheduler.tiers)).tolist()
    return {
        tier.name: TierStats(
            running=count,
            waiting=ledger.waiting,
            swapped=ledger.swapped,
            refused=dict(ledger.refused),
            preemptions=dict(ledger.preemptions),
            finished=ledger.finished,
            predicted_tokens=ledger.predicted_tokens,
            output_tokens=ledger.output_tokens,
        )
        for tier, count, ledger in zip(scheduler.tiers, running, scheduler.lifecycle.ledgers, strict=True)
    }
