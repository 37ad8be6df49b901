"""What the step loop asks of whatever runs the steps."""

from __future__ import annotations

from typing import Protocol

from ropeway.plan import Masks, Plan, Result


class Work(Protocol):
    """One step under way."""

    @property
    def plan(self) -> Plan: ...

    def sample(self, masks: Masks | None = None) -> None:
        """Queue the sampling of the step, after its forward; once. Everything settled so far is taken into account."""
        ...

    def result(self) -> Result:
        """Wait for the sampled tokens; raises what the device raised."""
        ...


class Executor(Protocol):
    """Runs plans in their order. ``forward`` and ``sample`` only queue; ``Work.result`` waits."""

    def forward(self, plan: Plan) -> Work: ...
    def close(self) -> None: ...
