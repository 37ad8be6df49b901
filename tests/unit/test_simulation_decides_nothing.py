"""The simulator runs the production scheduler and cache code and takes no scheduling decision of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ropeway.simulation
from ropeway.bench.traces import Trace
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.outcome import StepOutput
from ropeway.plan import Masks, Plan, Result
from ropeway.request import SamplingParams
from ropeway.scheduling.scheduler import Scheduler
from ropeway.simulation.cost_model import CostModel
from ropeway.simulation.engine import SimulatedEngine
from ropeway.simulation.executor import SimulatedExecutor
from ropeway.simulation.replay import ReplaySettings, replay
from ropeway.simulation.setup import replay_settings

FOLDER = Path(ropeway.simulation.__file__).parent
SOURCES = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.py"))}

MAY_BE_IMPORTED = {
    "ropeway.scheduling.scheduler": {"Scheduler"},
    "ropeway.cache.pool": {"BlockPool"},
    "ropeway.cache.host": {"HostTier"},
    "ropeway.cache.keys": {"chain", "root_key"},
    "ropeway.engine.engine": {"Engine"},
    "ropeway.plan": {"Masks", "Plan", "Result"},
    "ropeway.request": {"SamplingParams", "FinishReason", "Timeline"},
}
"""From rooms where decisions are taken or carried out, what the simulator may know."""
NEVER_MADE = {
    "Plan",
    "Seat",
    "Seats",
    "PlanRows",
    "Request",
    "StepOutput",
    "Finished",
    "Started",
    "Refusal",
    "Lifecycle",
}
OWNED = {"scheduler", "pool", "seats", "waiting", "lifecycle", "prefixes", "host", "admission", "intake", "policy"}
"""Names under which parts of a scheduler are reached."""


def walk(kind: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    for name, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield f"{name}:{getattr(node, 'lineno', 0)}", node


def names_in(node: ast.expr) -> list[str]:
    """``self.scheduler.seats.ranked`` -> scheduler, seats, ranked (and self)."""
    names = []
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        names.append(node.id)
    return names


def called(node: ast.Call) -> str:
    return (
        node.func.id
        if isinstance(node.func, ast.Name)
        else node.func.attr
        if isinstance(node.func, ast.Attribute)
        else ""
    )


# ---------------------------------------------------------------------- what the source may not say


def test_only_finished_parts_are_imported_from_where_decisions_are_taken():
    strangers = [
        f"{where}: {alias.name} of {node.module}"
        for where, node in walk(ast.ImportFrom)
        if node.module in MAY_BE_IMPORTED or (node.module or "").startswith(("ropeway.scheduling", "ropeway.cache"))
        for alias in node.names
        if alias.name not in MAY_BE_IMPORTED.get(node.module, set())
    ]
    assert strangers == []
    assert [where for where, node in walk(ast.Import) if any("ropeway" in a.name for a in node.names)] == []


def test_no_plan_seat_or_output_is_made():
    assert [f"{where}: {called(node)}" for where, node in walk(ast.Call) if called(node) in NEVER_MADE] == []


def test_block_pools_are_made_only_to_be_handed_to_a_scheduler_or_its_host_tier():
    handed = {
        id(argument)
        for _, node in walk(ast.Call)
        if called(node) in ("Scheduler", "HostTier")
        for argument in node.args
    }
    made = [(where, node) for where, node in walk(ast.Call) if called(node) == "BlockPool"]
    assert made
    assert [where for where, node in made if id(node) not in handed] == []


def test_nothing_of_a_scheduler_is_called_but_sums_over_its_columns():
    calls = [
        f"{where}: {'.'.join(reversed(names))}"
        for where, node in walk(ast.Call)
        if isinstance(node.func, ast.Attribute)
        and OWNED & set((names := names_in(node.func))[1:])
        and names[0] != "sum"
    ]
    assert calls == []


def test_nothing_of_a_scheduler_is_changed_or_deleted():
    changed = [
        f"{where}: {ast.unparse(target)}"
        for kind in (ast.Assign, ast.AugAssign, ast.Delete)
        for where, node in walk(kind)
        for target in (node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target])
        for part in ast.walk(target)
        if isinstance(part, ast.Attribute | ast.Subscript) and OWNED & set(names_in(part)[1:])
    ]
    assert changed == []


def test_nobody_else_s_private_names_are_used():
    private = [
        f"{where}: {ast.unparse(node)}"
        for where, node in walk(ast.Attribute)
        if node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    assert private == []


def test_no_class_is_a_scheduler_or_an_engine_with_changes():
    bases = {base for _, node in walk(ast.ClassDef) for each in node.bases for base in names_in(each)}
    assert (
        bases & {"Scheduler", "Engine", "BlockPool", "HostTier", "Lifecycle", "Admission", "Intake", "Policy"} == set()
    )


@pytest.mark.parametrize("name", ["setattr", "patch", "monkeypatch", "exec", "eval", "type"])
def test_nothing_is_patched(name: str):
    calls = [(where, node) for where, node in walk(ast.Call) if called(node) == name]
    # Usage sums its own fields up.
    assert [where for where, node in calls if ast.unparse(node.args[0]) != "total"] == []


# ---------------------------------------------------------------------- what a run does


COST = CostModel(
    name="test",
    a_s=0.01,
    b_s_per_token=2e-4,
    c_s_per_kv_token=1e-6,
    kv_tokens=1024,
    max_num_seqs=8,
    max_batched_tokens=64,
    kv_bytes_per_token=1 << 14,
)
TIERS = ("interactive", "standard", "batch")


def a_trace(n: int = 60) -> Trace:
    rng = np.random.default_rng(5)
    return Trace(
        rng.integers(5, 150, n),
        rng.integers(1, 60, n),
        np.cumsum(rng.exponential(0.05, n)),
        tier=[TIERS[k] for k in rng.integers(0, 3, n)],
        tenant=[f"t{k}" for k in rng.integers(0, 2, n)],
    )


def a_setting(trace: Trace, **scheduler: Any) -> ReplaySettings:
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_batched_tokens": 64, **scheduler})
    return replay_settings(trace, COST, config, swap_space=0.01)


Rows = tuple[int, list[int], list[int], list[int], list[bool], list[tuple[int, int]]]


def rows(plan: Plan) -> Rows:
    return (
        plan.seq,
        plan.request.tolist(),
        plan.start.tolist(),
        plan.count.tolist(),
        plan.samples.tolist(),
        [(seat.slot, seat.prompt_tokens) for seat in plan.seats],
    )


class Device:
    """What a hand-turned engine runs on: notes the plans, and gives each its time by the same formula."""

    def __init__(self, trace: Trace) -> None:
        self.now_s = 0.0
        self.ends_s = 0.0
        self.plans: list[Rows] = []
        self._last = trace.input_tokens + trace.output_tokens - 1

    def forward(self, plan: Plan) -> DeviceStep:
        self.plans.append(rows(plan))
        end = plan.start + plan.count
        copies = len(plan.to_host) + len(plan.to_device)
        copy_s = copies * 16 * COST.kv_bytes_per_token / COST.copy_bytes_per_s
        step_s = 0.01 + 2e-4 * int(plan.count.sum()) + 1e-6 * int(end.sum()) if len(plan.slot) else 0.0
        self.ends_s = self.now_s + copy_s + step_s
        tokens = (end < self._last[plan.request]).astype(np.int32)[plan.samples]
        return DeviceStep(plan, Result(tokens, elapsed_s=self.ends_s - self.now_s - copy_s, copy_s=copy_s))

    def close(self) -> None:
        """Nothing to give back."""


class DeviceStep:
    def __init__(self, plan: Plan, result: Result) -> None:
        self.plan = plan
        self._result = result

    def sample(self, masks: Masks | None = None) -> None:
        """Done."""

    def result(self) -> Result:
        return self._result


def by_hand(trace: Trace, settings: ReplaySettings) -> list[Rows]:
    """The plans of a production engine whose ``submit`` and ``step`` are called when it is time."""
    from ropeway.cache.host import HostTier

    device, how = Device(trace), settings.engine
    engine = Engine(
        Scheduler(
            how.scheduler,
            BlockPool(how.num_blocks, how.block_size),
            how.max_model_len,
            tiers=how.tiers,
            host=HostTier(BlockPool(how.host_blocks, how.block_size)),
            block_bytes=how.block_size * COST.kv_bytes_per_token,
        ),
        device,
        lambda output: None,
        max_model_len=how.max_model_len,
        end_ids=(0,),
        clock=lambda: device.now_s,
    )
    assert trace.tier is not None
    assert trace.tenant is not None
    arriving = list(range(len(trace)))
    running = False
    while arriving or engine.has_work:
        arrival_s = trace.times[arriving[0]] if arriving else np.inf
        turn_s = np.inf
        if running:
            turn_s = device.ends_s
        elif engine.has_work:
            turn_s = device.now_s
        if arrival_s <= turn_s:
            row = arriving.pop(0)
            device.now_s = arrival_s
            engine.submit(
                [
                    NewRequest(
                        id=row,
                        prompt=trace.prompt_ids(row, 32_000, settings.seed),
                        params=SamplingParams(max_tokens=settings.max_tokens),
                        seed=row,
                        tier=TIERS.index(trace.tier[row]),
                        tenant=trace.tenant[row],
                        arrival_s=arrival_s,
                    )
                ]
            )
            continue
        device.now_s = turn_s
        made = len(device.plans)
        engine.step(0)
        running = len(device.plans) > made
        if not running and engine.has_work:
            device.now_s += max(engine.patience_s(), 0.001)
    return device.plans


@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        {"admission": "greedy", "preemption": "swap"},
        {"admission": "greedy", "preemption": "recompute", "policy": "fcfs"},
        {"admission": "watermark", "policy": "deadline", "step_budget": "tpot"},
        {"policy": "shortest", "chunked_prefill": False},
        {"batching": "static"},
        {"batching": "dynamic", "batch_window_s": 0.2},
        {"shed": False, "max_num_seqs": 3},
    ],
    ids=lambda scheduler: ",".join(map(str, scheduler.values())) or "default",
)
def test_an_engine_turned_by_hand_makes_the_same_plans(scheduler: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    simulated: list[Rows] = []
    forward = SimulatedExecutor.forward

    def noted(self: SimulatedExecutor, plan: Plan) -> Any:
        simulated.append(rows(plan))
        return forward(self, plan)

    monkeypatch.setattr(SimulatedExecutor, "forward", noted)
    trace = a_trace()
    settings = a_setting(trace, **scheduler)
    replayed = replay(trace, settings)
    assert simulated == by_hand(trace, settings)
    assert len(simulated) > 100
    if scheduler.get("preemption") == "swap":
        assert replayed.stats[0].swaps_out > 0
    if scheduler.get("preemption") == "recompute":
        assert replayed.stats[0].preemptions > 0


def test_engines_are_made_of_the_production_classes_unchanged():
    trace = a_trace(3)
    outputs: list[StepOutput] = []
    simulated = SimulatedEngine(
        a_setting(trace).engine, trace.input_tokens + trace.output_tokens, lambda output, now_s: outputs.append(output)
    )
    for thing, kind in ((simulated.engine, Engine), (simulated.scheduler, Scheduler)):
        assert type(thing) is kind
        for name, member in vars(kind).items():
            if callable(member) and not isinstance(member, staticmethod | classmethod):
                assert getattr(thing, name).__func__ is member
    assert simulated.engine.scheduler is simulated.scheduler
    assert type(simulated.scheduler.pool) is BlockPool
