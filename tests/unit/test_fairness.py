"""Equal shares for tenants: the counters by themselves, and the bound they keep on a running line."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest

from ropeway.request import Request
from ropeway.scheduling import fairness
from ropeway.scheduling.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT, TenantShares
from tests.support.line import Line

# ---------------------------------------------------------------------- the counters


def test_the_least_served_goes_first() -> None:
    shares = TenantShares()
    shares.returns("a", [])
    shares.returns("b", ["a"])
    shares.charge("a", prompt_tokens=10)
    assert shares.order(["a", "b"]) == ["b", "a"]
    shares.charge("b", prompt_tokens=4, output_tokens=4)  # an output token costs two
    assert shares.order(["a", "b"]) == ["a", "b"]


def test_an_output_token_costs_more_than_a_prompt_token_and_what_did_not_come_is_given_back() -> None:
    shares = TenantShares()
    shares.charge("a", prompt_tokens=100, output_tokens=50)
    assert shares.served("a") == 100 * PROMPT_WEIGHT + 50 * OUTPUT_WEIGHT
    shares.charge("a", output_tokens=-30)
    assert shares.served("a") == 100 * PROMPT_WEIGHT + 20 * OUTPUT_WEIGHT


def test_a_tenant_that_comes_back_is_lifted_to_the_least_served_of_those_that_wait() -> None:
    shares = TenantShares()
    for tenant, tokens in (("a", 1000), ("b", 3000)):
        shares.returns(tenant, [])
        shares.charge(tenant, prompt_tokens=tokens)
    shares.returns("idle", ["a", "b"])
    assert shares.served("idle") == 1000


def test_a_tenant_that_was_served_more_than_others_keeps_its_debt_over_a_pause() -> None:
    shares = TenantShares()
    shares.charge("a", prompt_tokens=1000)
    shares.charge("b", prompt_tokens=5000)
    shares.returns("b", ["a"])
    assert shares.served("b") == 5000


def test_when_nobody_waits_a_tenant_is_lifted_to_whoever_was_next_last() -> None:
    shares = TenantShares()
    shares.returns("a", [])
    shares.charge("a", prompt_tokens=800)
    shares.order(["a"])
    shares.charge("a", prompt_tokens=100)
    shares.returns("new", [])
    assert shares.served("new") == 800


def test_counters_of_idle_tenants_are_bounded_in_number_and_forgetting_one_gives_nothing_away() -> None:
    shares = TenantShares()
    shares.returns("busy", [])
    for number in range(6 * fairness._MOST_IDLE):
        shares.returns(str(number), ["busy"])
        shares.charge(str(number), prompt_tokens=number)
        shares.charge("busy", prompt_tokens=1)
    assert len(shares._served) <= 3 * fairness._MOST_IDLE + 2
    floor = shares.served("busy")
    shares.returns("0", ["busy"])
    assert shares.served("0") >= floor


# ---------------------------------------------------------------------- on the line


class Market:
    """Tenants that always have more waiting than there are seats, and what each has been served."""

    def __init__(self, line: Line, *, ends: float = 0.0, seed: int = 0) -> None:
        """``ends``: how often an answer ends before its limit, per token."""
        self.line = line
        self.served: Counter[str] = Counter()
        """Prompt and output tokens computed, weighted."""
        self.most_tokens = 0
        """Most that the seated held together."""
        self.longest_prompt = 0
        self._random = random.Random(seed)
        self._ends = ends
        self._owners: dict[int, Request] = {}

    def fill(self, tenant: str, prompt: tuple[int, int], output: tuple[int, int], *, tier: str = "standard") -> None:
        waiting = sum(request.tenant == tenant for request in self.line.scheduler.waiting)
        for _ in range(3 * len(self.line.scheduler.seats.requests) - waiting):
            self.longest_prompt = max(self.longest_prompt, prompt[1])
            request = self.line.add(
                self._random.randint(*prompt), self._random.randint(*output), tenant=tenant, end_ids=(3,), tier=tier
            )
            self._owners[request.id] = request

    def step(self) -> None:
        line, seats = self.line, self.line.scheduler.seats
        plan = line.plan()
        for request_id, (start, count) in line.rows(plan).items():
            request = self._owners[request_id]
            prompt = max(min(start + count, request.prompt_tokens) - start, 0)
            self.served[request.tenant] += PROMPT_WEIGHT * prompt  # type: ignore[assignment]
            if start + count >= request.prompt_tokens:
                self.served[request.tenant] += OUTPUT_WEIGHT  # type: ignore[assignment]
        self.most_tokens = max(self.most_tokens, int(seats.length[seats.ranked].sum()))
        line.settle(plan, {i: 3 for i in line.order(plan) if self._random.random() < self._ends})

    @property
    def bound(self) -> float:
        """Theorem 4.4 of the paper, over any time in which both have requests waiting."""
        return 2 * max(PROMPT_WEIGHT * self.longest_prompt, OUTPUT_WEIGHT * self.most_tokens)


@pytest.mark.parametrize(
    ("a", "b", "ends"),
    [
        (((5, 9), (5, 9)), ((5, 9), (5, 9)), 0.0),
        (((4, 8), (10, 20)), ((90, 100), (10, 20)), 0.0),
        (((4, 8), (100, 120)), ((90, 100), (2, 4)), 0.0),
        (((200, 200), (2, 2)), ((4, 4), (2, 2)), 0.0),
        (((10, 20), (150, 150)), ((10, 20), (10, 10)), 0.05),
    ],
)
@pytest.mark.parametrize("seats", [1, 4])
def test_two_backlogged_tenants_are_served_alike_up_to_the_proven_bound(
    a: tuple[tuple[int, int], tuple[int, int]], b: tuple[tuple[int, int], tuple[int, int]], ends: float, seats: int
) -> None:
    market = Market(Line(seats=seats, budget=64, blocks=512), ends=ends, seed=seats)
    least = most = 0.0
    for _ in range(250):
        market.fill("a", *a)
        market.fill("b", *b)
        market.step()
        gap = float(market.served["a"] - market.served["b"])
        least, most = min(least, gap), max(most, gap)
    # The gap of any interval is a difference of two of these.
    assert most - least <= market.bound
    assert min(market.served.values()) > market.bound / 2, "long enough to tell"


def test_three_tenants_share_alike_and_tiers_are_accounted_apart() -> None:
    market = Market(Line(seats=4, blocks=512), seed=5)
    market.line.add(4, 2, tenant="a", tier="interactive")
    market._owners[1] = market.line.scheduler.lifecycle.requests[1]
    for _ in range(200):
        for tenant, prompt in (("a", 4), ("b", 20), ("c", 60)):
            market.fill(tenant, (prompt, prompt), (8, 8))
        market.step()
    assert max(market.served.values()) - min(market.served.values()) <= market.bound
    shares = [line.shares.served("a") for line in market.line.scheduler.waiting.lines]
    assert shares[0] < shares[1]
    assert shares[2] == 0


def test_a_tenant_that_was_idle_gains_no_credit() -> None:
    market = Market(Line(seats=4, budget=64, blocks=512))
    kind = ((10, 20), (10, 20))
    for _ in range(120):
        market.fill("busy", *kind)
        market.step()
    assert market.served["busy"] > 2 * market.bound
    before = dict(market.served)
    for _ in range(120):
        market.fill("busy", *kind)
        market.fill("idle", *kind)
        market.step()
    since = {tenant: market.served[tenant] - before.get(tenant, 0) for tenant in ("busy", "idle")}
    assert abs(since["busy"] - since["idle"]) <= market.bound
    assert since["busy"] > market.bound


@pytest.mark.parametrize("tenant", ["a", "z"])
def test_a_flood_of_one_tenant_delays_another_s_request_by_a_seat_at_most(tenant: str) -> None:
    line = Line(seats=4, blocks=512)
    for number in range(60):
        line.add(8, 10 + number % 5, tenant="flood")
    for _ in range(7):
        line.step()
    single = line.add(8, 4, tenant=tenant)
    passed = 0
    while single.slot < 0:
        prompts = [seat.token_ids[0] for seat in line.step().seats]
        first = prompts.index(single.tokens[0]) if single.slot >= 0 else len(prompts)
        passed += first
    assert passed <= 1


def test_who_is_next_is_not_found_anew_by_every_step_while_no_tenant_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Line(seats=1, blocks=512)
    line.add(4, 50, tenant="seated")
    line.step()
    for number in range(20):
        line.add(4, 2, tenant=f"{number}")
    questions: list[int] = []
    order = TenantShares.order

    def counted(shares: TenantShares, waiting: Collection[str]) -> list[str]:
        questions.append(len(waiting))
        return order(shares, waiting)

    monkeypatch.setattr(TenantShares, "order", counted)
    for _ in range(20):
        line.step()
    assert len(questions) <= 1


def test_the_order_of_turns_is_that_of_the_counters_after_whatever_happened() -> None:
    draw = random.Random(5)
    line = Line(seats=3, blocks=512, budget=64)
    requests: list[Request] = []
    for _ in range(300):
        if draw.random() < 0.7:
            requests.append(line.add(draw.randint(1, 9), draw.randint(1, 6), tenant=draw.choice("abcdefgh")))
        if draw.random() < 0.2:
            line.scheduler.abort(draw.choice(requests).id if requests else 0, "cancel", line.now)
        if draw.random() < 0.6 and line.scheduler.has_work:
            line.step()
        waiting = line.scheduler.waiting.lines[1]
        turns = list(dict.fromkeys(request.tenant for request in waiting if not request.started))
        assert turns == sorted(turns, key=lambda tenant: (waiting.shares.served(tenant), tenant))


def test_a_request_s_place_among_its_tenant_s_own_is_that_of_its_arrival() -> None:
    line = Line(seats=1, blocks=512)
    order = [line.add(4, 1, tenant=tenant).id for tenant in ("a", "a", "b", "a", "b")]
    served = [line.order(line.step())[0] for _ in order]
    for tenant in (order[:2] + order[3:4], order[2:3] + order[4:]):
        assert [i for i in served if i in tenant] == tenant
    assert served == [1, 3, 2, 5, 4]


def test_a_preempted_request_is_charged_once() -> None:
    line = Line()
    request = line.add(8, 10, tenant="a")
    line.step()
    shares = line.scheduler.waiting.lines[1].shares
    charged = shares.served("a")
    line.scheduler.preemption.preempt(request.slot, line.now)
    line.step()
    assert request.slot >= 0
    assert shares.served("a") == charged
    line.run()
    assert shares.served("a") == 8 * PROMPT_WEIGHT + 10 * OUTPUT_WEIGHT


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_one_that_is_aborted_pays_for_what_it_got(steps: int) -> None:
    line = Line()
    request = line.add(8, 100, tenant="a")
    for _ in range(steps):
        line.step()
    line.scheduler.abort(request.id, "cancel", line.now)
    expected = 8 * PROMPT_WEIGHT + steps * OUTPUT_WEIGHT if steps else 0.0
    assert line.scheduler.waiting.lines[1].shares.served("a") == expected
