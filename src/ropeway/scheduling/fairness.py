"""Equal shares for the tenants of a tier, by virtual token counters.

Source: Sheng et al., "Fairness in serving large language models", OSDI 2024: whoever has been served least goes next;
a tenant that comes back is lifted to the least counter of those that wait, so idling earns no credit. The output is
charged as predicted when a request is seated, and corrected when it leaves (section 4.3 there). Two tenants that both
have requests waiting are served alike up to ``2 * max(largest prompt, OUTPUT_WEIGHT * tokens of the batch)``.
"""

from __future__ import annotations

from collections.abc import Collection

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""An output token costs about twice a prompt token: it takes a row of a step of its own."""
_MOST_IDLE = 1024
"""Tenants without waiting requests whose counters are kept."""


class TenantShares:
    """The counters of one tier."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._floor = 0.0
        """The counter of whoever was next, at the last time somebody waited."""

    def returns(self, tenant: str, waiting: Collection[str]) -> None:
        """A tenant without waiting requests has one again; ``waiting`` are the others that have."""
        floor = min((self._served[other] for other in waiting), default=self._floor)
        self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        if len(self._served) > len(waiting) + 2 * _MOST_IDLE:
            self._forget({*waiting, tenant})

    def charge(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Note service; a negative number takes back what was predicted and did not come."""
        cost = PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._served[tenant] = self._served.get(tenant, self._floor) + cost

    def order(self, waiting: Collection[str]) -> list[str]:
        """Tenants with waiting requests, the least served first."""
        ordered = sorted(waiting, key=lambda tenant: (self._served.get(tenant, self._floor), tenant))
        self._floor = max(self._floor, self._served.get(ordered[0], self._floor))
        return ordered

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, self._floor)

    def _forget(self, kept: Collection[str]) -> None:
        """Drop the least served of the idle: they would be lifted on return anyway."""
        idle = sorted((t for t in self._served if t not in kept), key=self._served.__getitem__)
        for tenant in idle[:-_MOST_IDLE]:
            del self._served[tenant]
