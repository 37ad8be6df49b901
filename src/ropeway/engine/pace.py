"""Late planning: when the running step will end, and so how long the next plan can wait for arrivals.

device   |------- n -------|------ n+1 ------|
host          | waits ... plan n+1 |
                           ^ an arrival before this moment is in step n+1
"""

from __future__ import annotations

from ropeway.plan import Plan
from ropeway.scheduling.cost import StepCost

_MARGIN = 0.1
"""Share of a step by which the plan is early, since predictions are not exact."""
_FORGETS = 0.98
"""How much of the longest recent host time is kept from step to step."""


class Pace:
    """Predicts the end of what is in flight. Times are seconds on one clock."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._ends_s = 0.0
        """When the last submitted step is predicted to end."""
        self._step_s = 0.0
        self._host_s = 0.0
        """About the longest time that planning took lately."""

    def planned(self, plan: Plan | None, began_s: float, now: float) -> None:
        """A plan was made from ``began_s`` to ``now`` and submitted."""
        self._host_s = max(now - began_s, self._host_s * _FORGETS)
        if plan is not None and self._cost.known:
            self._step_s = self._cost.predict(plan.num_tokens, plan.kv_tokens)
            self._ends_s = max(self._ends_s, now) + self._step_s

    def settled(self, now: float) -> None:
        """A step has ended, and so the one after it, if there is one, has just begun."""
        self._ends_s = min(self._ends_s, now + self._step_s)

    def patience_s(self, now: float) -> float:
        """Time left until the next plan must be begun; 0 where nothing can be told."""
        if not self._cost.known:
            return 0.0
        return max(self._ends_s - self._step_s * _MARGIN - 2 * self._host_s - now, 0.0)
