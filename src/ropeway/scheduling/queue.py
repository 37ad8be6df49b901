"""The waiting lines."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ropeway.request import Request
from ropeway.scheduling.fairness import TenantShares


def _key(request: Request) -> tuple[float, int]:
    return request.urgency, request.order


class Line:
    """The waiting requests of a tier: first those that have had a seat, by urgency; then the tenants', the least served
    tenant first, each by urgency."""

    def __init__(self) -> None:
        self.shares = TenantShares()
        self.count = 0
        self._resumed: list[Request] = []
        self._tenants: dict[str, list[Request]] = {}
        self._turns: list[str] | None = None
        """The tenants in their order; None: it has changed."""

    def __iter__(self) -> Iterator[Request]:
        """In the order of turns; the line must not change meanwhile."""
        yield from self._resumed
        if len(self._tenants) == 1:
            yield from next(iter(self._tenants.values()))
        elif self._tenants:
            # Every step asks who is next, and there may be very many tenants.
            if self._turns is None:
                self._turns = self.shares.order(self._tenants)
            for tenant in self._turns:
                yield from self._tenants[tenant]

    def oldest_s(self) -> float:
        """When the one that has waited longest came."""
        return min(request.arrival_s for request in self)

    def add(self, request: Request) -> None:
        if request.tenant not in self._tenants and not request.started:
            self.shares.returns(request.tenant, self._tenants)
            self._tenants[request.tenant] = []
            self._turns = None
        insort(self._of(request), request, key=_key)
        self.count += 1

    def remove(self, request: Request) -> None:
        requests = self._of(request)
        place = bisect_left(requests, _key(request), key=_key)
        assert requests[place] is request
        del requests[place]
        self.count -= 1
        if not requests and not request.started:
            self.shares.order(self._tenants)  # the floor rises to the last one's counter
            del self._tenants[request.tenant]
            self._turns = None

    def charge(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Note service of a tenant; see ``TenantShares.charge``."""
        self.shares.charge(tenant, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        if tenant in self._tenants:
            self._turns = None

    def _of(self, request: Request) -> list[Request]:
        return self._resumed if request.started else self._tenants[request.tenant]


class WaitingQueue:
    """All lines, the highest first."""

    def __init__(self, lines: int) -> None:
        self.lines = [Line() for _ in range(lines)]
        self.changes = 0
        """How often somebody has come or gone, or may go on."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for line in self.lines:
            yield from line

    def add(self, request: Request, line: int) -> None:
        self.lines[line].add(request)
        self._count += 1
        self.changes += 1

    def remove(self, request: Request, line: int) -> None:
        self.lines[line].remove(request)
        self._count -= 1
        self.changes += 1
