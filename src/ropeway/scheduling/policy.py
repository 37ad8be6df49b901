"""Who goes before whom. Both orders are fixed when a request arrives, so they can be kept sorted:

urgency   waiting requests, for free seats: waiting ages by time, which moves all of them alike
rank      seated requests, for blocks and for the budget: the tier alone comes before the urgency
"""

from __future__ import annotations

from collections.abc import Sequence

from ropeway.config import SchedulerConfig
from ropeway.request import Request
from ropeway.scheduling.cost import StepCost
from ropeway.tiers import Tier

Rank = tuple[int, float, int]
"""(tier, urgency, order of arrival); lower goes first."""

_NO_TARGET_S = 300.0
"""policy deadline: what a tier without a TTFT target is taken to promise."""
_TOKENS_PER_AGING = 128
"""policy shortest: this many predicted tokens weigh as much as ``aging_s`` seconds of waiting."""


class Policy:
    """The orders of one scheduler."""

    def __init__(self, config: SchedulerConfig, tiers: Sequence[Tier], cost: StepCost) -> None:
        self.name = config.policy
        self._aging_s = config.aging_s
        self._tiers = tiers
        self._cost = cost

    @property
    def tiered(self) -> bool:
        """Whether a higher tier goes before a lower one, and may preempt it."""
        return self.name == "priority"

    def urgency(self, request: Request) -> float:
        """The key of a waiting request, in seconds; lower goes first.

        priority: starvation is bounded, since of two requests the one that came ``aging_s`` times the difference of
        their tiers' weights before the other goes first. deadline: least laxity first, which is the latest start that
        meets the TTFT target (Mok, "Fundamental design problems of distributed systems", 1983)."""
        tier = self._tiers[request.tier]
        match self.name:
            case "fcfs":
                return 0.0
            case "priority":
                return request.arrival_s - tier.weight * self._aging_s
            case "deadline":
                target = _NO_TARGET_S if tier.ttft_s is None else tier.ttft_s
                return request.arrival_s + target - self._cost.predict(request.prompt_tokens, request.prompt_tokens)
            case "shortest":
                tokens = request.predicted_tokens + request.prompt_tokens / 16
                return request.arrival_s + tokens / _TOKENS_PER_AGING * self._aging_s

    def gives_precedence_s(self, tier: int) -> float:
        """For how long a seated request's prompt lets those of higher tiers go first: as long as for the seat, at least
        for a unit of weight."""
        lighter = max(each.weight for each in self._tiers) - self._tiers[tier].weight
        return max(lighter, 1.0) * self._aging_s

    def line(self, request: Request) -> int:
        """The waiting line it stands in: lines are those among which a higher one may pass a lower one."""
        return request.tier if self.tiered else 0

    def rank(self, request: Request) -> Rank:
        return self.line(request), request.urgency, request.order
