"""Taking in what a step computed: tokens to their requests, events to the outside."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropeway.outcome import Finished, LogprobColumns, Started, StepOutput
from ropeway.plan import Plan, Result
from ropeway.request import Request
from ropeway.scheduling.lifecycle import Lifecycle

Ints = NDArray[np.integer[Any]]


class Settlement:
    """One plan being settled."""

    def __init__(self, lifecycle: Lifecycle, now: float, *, pad: bool) -> None:
        """``pad``: rows of requests that finish go on as padding."""
        self._lifecycle = lifecycle
        self._now = now
        self._pad = pad
        self.first_tokens: list[Request] = []
        """Requests whose first token this is."""
        self._started: list[Started] = []
        self._finished: list[Finished] = []

    def settle(self, plan: Plan, result: Result, *, intact: bool) -> StepOutput:
        """``intact``: nobody has left a seat since the plan was made."""
        lifecycle, seats = self._lifecycle, self._lifecycle.seats
        ids, tokens, logprobs = plan.request, result.token_ids, result.logprobs
        slots, end, sampled, new = plan.slot, plan.start + plan.count, plan.samples, tokens
        if len(tokens) != len(slots):
            ids = ids[sampled]
        if not intact or lifecycle.padding:
            alive = (seats.request_id[slots] == plan.request) & ~seats.padding[slots]
            if not alive.all():
                emitted = self._settle_departed(plan, result, alive)
                ids, tokens, logprobs = ids[emitted], tokens[emitted], _keep(logprobs, emitted)
                new = new[alive[sampled]]
                slots, end, sampled = slots[alive], end[alive], sampled[alive]
        if len(new) != len(slots):
            for slot, position in zip(slots[~sampled].tolist(), end[~sampled].tolist(), strict=True):
                lifecycle.prefixes.publish(lifecycle.seated(slot), seats, position)
            slots, end = slots[sampled], end[sampled]
        seats.tokens[slots, end] = new
        seats.length[slots] = end + 1
        ended = seats.ends_with(slots, new)
        watch = seats.watch[slots]
        events = np.flatnonzero((end >= watch) | ended)
        if len(events):
            self._events(slots[events], end[events], new[events], ended[events], watch[events])
        return StepOutput(
            ids=ids,
            tokens=tokens,
            finished=self._finished,
            started=self._started,
            logprobs=logprobs,
            prompt_logprobs=result.prompt_logprobs,
        )

    def _events(self, slots: Ints, positions: Ints, tokens: Ints, ended: NDArray[np.bool_], watched: Ints) -> None:
        """What ``tokens`` at ``positions`` bring, int32 [n] each."""
        seats, publish_next = self._lifecycle.seats, self._lifecycle.prefixes.publish_next
        block_size = self._lifecycle.pool.block_size
        columns = (slots, positions, tokens, ended, watched, seats.last[slots])
        for slot, position, token, met, watch, last in zip(*(column.tolist() for column in columns), strict=True):
            request = seats.requests[slot]
            assert request is not None
            if position == watch and position < last and not met:  # most of them have filled a block, and no more
                publish_next(request, seats, position)
                seats.watch[slot] = min(last, position + block_size)
            else:
                self._event(request, position, token, met)

    def _event(self, request: Request, position: int, token: int, ended: bool) -> None:
        """``token`` at ``position`` is the first one since its request was seated, or the last one."""
        lifecycle = self._lifecycle
        lifecycle.prefixes.publish(request, lifecycle.seats, position)
        lifecycle.saw_token(request, self._now)
        if position == request.prompt_tokens:
            self._start(request)
        if ended or position + 1 >= request.limit:
            self._finished.append(lifecycle.finish(request, token, self._now, pad=self._pad))
        else:
            event = request.limit - 1
            if request.keys is not None:
                event = min(event, (request.published + 1) * lifecycle.pool.block_size)
            lifecycle.seats.watch[request.slot] = event

    def _settle_departed(self, plan: Plan, result: Result, alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Rows whose request lost its seat meanwhile, or has finished. One that was preempted keeps its token; of one
        that has ended nothing is published. Returns bool [sampling rows]: whose tokens go out."""
        lifecycle = self._lifecycle
        emitted = alive[plan.samples].copy()
        place = np.cumsum(plan.samples) - 1
        for row in np.flatnonzero(~alive).tolist():
            request = lifecycle.requests[int(plan.request[row])]
            if request.slot < 0:
                request.unsettled -= 1
            if request.finish is not None:
                lifecycle.settled_in_vain(request)
            elif plan.samples[row]:
                token = result.token_ids[place[row]]
                emitted[place[row]] = True
                request.tokens = np.append(request.tokens, token)
                if request.output_tokens == 1:
                    self._start(request)
                if token in request.end_ids or len(request.tokens) >= request.limit:
                    self._finished.append(lifecycle.finish(request, int(token), self._now))
        return emitted

    def _start(self, request: Request) -> None:
        self._lifecycle.open_followers(request)
        self.first_tokens.append(request)
        self._started.append(Started(request.id, request.cached_tokens or 0))


def _keep(logprobs: LogprobColumns | None, emitted: NDArray[np.bool_]) -> LogprobColumns | None:
    """The log-probabilities of the emitted tokens, indexing those."""
    if logprobs is None:
        return None
    kept = emitted[logprobs.row]
    place = np.cumsum(emitted) - 1
    return LogprobColumns(
        row=place[logprobs.row[kept]].astype(np.int32),
        chosen=logprobs.chosen[kept],
        top_ids=logprobs.top_ids[kept],
        top=logprobs.top[kept],
    )
