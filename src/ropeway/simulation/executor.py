"""An executor that computes nothing: steps take the time that a cost model gives them, on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ropeway.plan import Masks, Plan, Result
from ropeway.simulation.clock import VirtualClock
from ropeway.simulation.cost_model import CostModel

END_TOKEN = 0
OTHER_TOKEN = 1

Observer = Callable[[Plan, float], None]
"""Called with every plan and the seconds it keeps the device busy."""


class SimulatedWork:
    """A step under way. Waiting for its result takes the clock to its end."""

    __slots__ = ("_compute_s", "_copy_s", "_executor", "_token_ids", "begins_s", "ends_s", "plan")

    def __init__(
        self,
        plan: Plan,
        token_ids: NDArray[np.int32],
        executor: SimulatedExecutor,
        *,
        begins_s: float,
        copy_s: float,
        compute_s: float,
    ) -> None:
        self.plan = plan
        self.begins_s = begins_s
        self.ends_s = begins_s + copy_s + compute_s
        """May be put off as long as nobody has asked for the result."""
        self._token_ids = token_ids
        self._executor = executor
        self._copy_s = copy_s
        self._compute_s = compute_s

    def sample(self, masks: Masks | None = None) -> None:
        """Its time is in the step's."""

    def result(self) -> Result:
        self._executor.ended(self)
        elapsed_s = self.ends_s - self.begins_s - self._copy_s if self._compute_s else 0.0
        return Result(self._token_ids, elapsed_s=elapsed_s, copy_s=self._copy_s)


class SimulatedExecutor:
    """Implements ``Executor``. Steps run one after the other; a step's copies run before it.

    An answer ends where the trace says it did: the token at that position is the end token, all others are not. Only
    the device knows these positions, as with a real model.
    """

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        last_position: NDArray[np.int64],
        block_size: int,
        observe: Observer,
    ) -> None:
        """``last_position``: int64 [requests], by internal id: where the request's last token stands."""
        self.clock = clock
        self.pending: deque[SimulatedWork] = deque()
        """Steps whose results nobody has asked for yet."""
        self.ends_s = 0.0
        """When the last step that was submitted ends."""
        self._cost = cost
        self._last_position = last_position
        self._block_size = block_size
        self._observe = observe

    def forward(self, plan: Plan) -> SimulatedWork:
        end = plan.start + plan.count
        tokens = int(plan.count.sum())
        compute_s = self._cost.step_s(tokens, int(end.sum())) if tokens else 0.0
        copies = len(plan.to_host) + len(plan.to_device)
        copy_s = self._cost.copy_s(copies, self._block_size) if copies else 0.0
        request = plan.request
        if not plan.samples.all():
            request, end = request[plan.samples], end[plan.samples]
        token_ids = np.where(end >= self._last_position[request], END_TOKEN, OTHER_TOKEN).astype(np.int32)
        begins_s = max(self.ends_s, self.clock.now_s + self._cost.host_s)
        work = SimulatedWork(plan, token_ids, self, begins_s=begins_s, copy_s=copy_s, compute_s=compute_s)
        self.ends_s = work.ends_s
        self.pending.append(work)
        self._observe(plan, copy_s + compute_s)
        return work

    def put_off(self, ends_s: float) -> None:
        """The last step that was submitted does not end before this moment."""
        if self.pending and self.ends_s < ends_s:
            self.pending[-1].ends_s = self.ends_s = ends_s

    def ended(self, work: SimulatedWork) -> None:
        """Somebody waits for this step, the oldest one pending: its end has come."""
        oldest = self.pending.popleft()
        assert oldest is work, "steps run in the order of their submission"
        self.clock.advance_to(work.ends_s)

    def close(self) -> None:
        """Nothing to give back."""
