"""How a request is to be treated: its tier, its tenant, its deadline, its share of the prefix cache."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ropeway.engine.client import RequestOptions
from ropeway.errors import Forbidden, InvalidRequest
from ropeway.server.keys import Caller
from ropeway.server.protocol import GenerationRequest
from ropeway.tiers import Tier, find_tier

TIER_HEADER = "X-Ropeway-Tier"
TIMEOUT_HEADER = "X-Ropeway-Timeout"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def request_options(
    body: GenerationRequest,
    headers: Mapping[str, str],
    tiers: Sequence[Tier],
    arrival_s: float,
    caller: Caller | None = None,
) -> RequestOptions:
    """What body and headers say; the body wins, but for what the caller's key says. ``arrival_s`` on the clock of
    ``time.monotonic``.

    Raises ``InvalidRequest`` naming the field or header: an unknown tier (with those there are), a timeout that is no
    positive number of seconds, an empty cache salt; ``Forbidden`` for a tier above the key's."""
    timeout_s = _timeout(body.timeout, headers.get(TIMEOUT_HEADER))
    if body.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty; leave it out to share the cache", param="cache_salt")
    named = headers.get(TIER_HEADER)
    rank = _tier(body.priority, named, tiers)
    if caller is not None and caller.rank is not None:
        if body.priority is None and named is None:
            rank = caller.rank
        elif rank < caller.rank:
            raise Forbidden(
                f"this key may ask for tier {tiers[caller.rank].name} at the highest, not for {tiers[rank].name}",
                param="priority" if named is None else TIER_HEADER,
            )
    return RequestOptions(
        tier=rank,
        tenant=_tenant(body.user, caller),
        arrival_s=arrival_s,
        deadline_s=None if timeout_s is None else arrival_s + timeout_s,
        cache_salt=body.cache_salt if caller is None else caller.salt(body.cache_salt),
    )


def _tenant(user: str | None, caller: Caller | None) -> str:
    """Keys with a tenant share as one, whatever users they name."""
    return caller.tenant if caller is not None and caller.tenant else user or ""


def _tier(priority: str | int | None, header: str | None, tiers: Sequence[Tier]) -> int:
    if priority is not None or header is None:
        return find_tier(tiers, priority)
    named = header.strip()
    try:
        return find_tier(tiers, int(named) if _WHOLE_NUMBER.fullmatch(named) else named)
    except InvalidRequest as error:
        raise InvalidRequest(f"{TIER_HEADER}: {error.message}", param=TIER_HEADER) from error


def _timeout(given: float | None, header: str | None) -> float | None:
    if given is not None:
        return _positive("timeout", given, repr(given))
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    return _positive(TIMEOUT_HEADER, seconds, f"{header!r:.40}")


def _positive(field: str, seconds: float, shown: str) -> float:
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{field} is {shown}; it must be a number of seconds above 0", param=field)
    return seconds
