"""Service tiers: what a class of requests is promised, and how it stands to the others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ropeway.errors import InvalidRequest


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier. Its rank is its place in the list: the first is the highest."""

    name: str
    weight: float = 1.0
    """Under policy ``priority`` a waiting request goes before those of a tier lighter by w that came up to
    ``w * aging_s`` seconds earlier."""
    ttft_s: float | None = None
    """Target for the time from arrival to the first token; None: none, and nothing is shed."""
    tpot_s: float | None = None
    """Target for the mean time between tokens."""
    max_queue: int | None = None
    """Most requests of this tier that may wait; None: only the server's limit counts."""
    max_queue_tokens: int | None = None
    """Most prompt tokens of this tier that may wait."""
    queue_limit_s: float | None = None
    """Longest wait for the first seat; then the request is refused."""
    preemptible: bool = True
    """Whether a higher tier may take its seat on arrival. When blocks run out, anybody may have to give way."""


DEFAULT_TIERS: tuple[Tier, ...] = (
    Tier(name="interactive", weight=6.0, ttft_s=10.0, tpot_s=0.1),
    Tier(name="standard", weight=3.0, ttft_s=60.0, tpot_s=0.5),
    Tier(name="batch", weight=0.0),
)
DEFAULT_TIER = "standard"


def find_tier(tiers: Sequence[Tier], priority: str | int | None) -> int:
    """Rank of the tier that a request names. An integer counts from the default tier, lower is more urgent, as in
    vLLM; beyond the ends it means the first or the last. Raises ``InvalidRequest`` for an unknown name."""
    names = [tier.name for tier in tiers]
    default = names.index(DEFAULT_TIER) if DEFAULT_TIER in names else (len(names) - 1) // 2
    if priority is None:
        return default
    if isinstance(priority, int):
        return min(max(default + priority, 0), len(tiers) - 1)
    if priority not in names:
        raise InvalidRequest(f"there is no tier {priority!r:.100}; the tiers are {', '.join(names)}", param="priority")
    return names.index(priority)
