"""Tenants of a tier that both have requests waiting are served alike, whatever they ask for and whenever they come."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropeway.request import SamplingParams
from ropeway.scheduling.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT
from ropeway.tiers import Tier
from tests.support.world import Arrival, Setup, World

LAST = 40
"""Step before which the last ones come."""
ENOUGH = 800.0
"""Service that every tenant asks for: several times the bound."""


@dataclass(frozen=True)
class Tenant:
    name: str
    prompt: int
    output: int
    comes_at: int
    """The step before which its requests come."""
    ends_early: bool
    """Whether answers may be shorter than what they are allowed."""

    def arrivals(self) -> list[Arrival]:
        each = PROMPT_WEIGHT * self.prompt + OUTPUT_WEIGHT * self.output
        params = SamplingParams(max_tokens=self.output, ignore_eos=not self.ends_early)
        return [
            Arrival(tuple(range(1 + i % 40, 1 + i % 40 + self.prompt)), params, tenant=self.name)
            for i in range(int(ENOUGH / each) + 1)
        ]


def tenants(name: str) -> st.SearchStrategy[Tenant]:
    return st.builds(
        Tenant,
        name=st.just(name),
        prompt=st.integers(1, 12),
        output=st.integers(4, 16),
        comes_at=st.sampled_from([0, 0, 7, LAST]),
        ends_early=st.booleans(),
    )


@settings(max_examples=30, deadline=None, derandomize=False, print_blob=True, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(*map(tenants, "abc")),
    st.sampled_from(["fcfs", "priority", "deadline", "shortest"]),
    st.integers(1, 2),
    st.integers(0, 1),
)
def test_the_service_gap_of_two_backlogged_tenants_stays_within_the_bound(
    all_tenants: tuple[Tenant, ...], policy: str, seats: int, ahead: int
) -> None:
    only = Tier(name="only")
    world = World(Setup(max_num_seqs=seats, budget=24, policy=policy, prefix_cache=False, tiers=(only,)))
    batch_tokens = seats * max(tenant.prompt + tenant.output for tenant in all_tenants)
    bound = 2 * max(PROMPT_WEIGHT * 12, OUTPUT_WEIGHT * batch_tokens)
    since: dict[tuple[str, str], float] = {}
    """For two tenants: the gap at the beginning of the time in which both are backlogged."""
    compared = step = 0
    backlogged: set[str] = set()
    while step <= LAST or backlogged:
        for tenant in all_tenants:
            if tenant.comes_at == step:
                for arrival in tenant.arrivals():
                    world.submit(arrival)
        world.clock.advance(0.01)
        world.engine.step(ahead)
        step += 1
        served, backlogged = service(world)
        for pair in combinations(sorted(served), 2):
            if not backlogged.issuperset(pair):
                since.pop(pair, None)
                continue
            gap = served[pair[0]] - served[pair[1]]
            assert abs(gap - since.setdefault(pair, gap)) <= bound
            compared += 1
    world.finish()
    world.check_end()
    assert compared > 20


def service(world: World) -> tuple[dict[str, float], set[str]]:
    """(what each tenant has got, the tenants with requests waiting)."""
    served: dict[str, float] = {}
    backlogged = set()
    for record in world.records.values():
        tenant = record.arrival.tenant
        assert record.request is not None
        got = OUTPUT_WEIGHT * len(record.tokens)
        if record.request.started:
            got += PROMPT_WEIGHT * len(record.arrival.prompt)
        else:
            backlogged.add(tenant)
        served[tenant] = served.get(tenant, 0.0) + got
    return served, backlogged
