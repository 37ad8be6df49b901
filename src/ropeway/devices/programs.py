"""Models captured by a device: what ``Device.capture`` and ``Device.prepare_step`` return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from ropeway.devices.base import AttentionPlan, Sampled, SampleInputs, Weight


@dataclass(frozen=True, slots=True)
class OperationTime:
    """One operation of a program over the replays since timing was switched on."""

    kind: str
    """The kernel, as ``Kernels`` names it; of fused ones, all of them: "rms_norm + linear"."""
    weights: tuple[Weight, ...]
    """Those it read."""
    seconds: float


class Program(Protocol):
    """A function of device kernels, recorded once and replayed for any number of rows, from no row to ``max_rows``.
    The results' bits are those of the function itself."""

    @property
    def max_rows(self) -> int: ...
    @property
    def arena_bytes(self) -> int:
        """What the program's arena takes; the memory of fewer rows is a part of it, the rest stays untouched."""
        ...

    def arena(self) -> Tensor:
        """Another arena, for a replay between the begin and the end of one (a second micro-batch)."""
        ...

    def run(self, *inputs: Tensor, plan: AttentionPlan | None = None, arena: Tensor | None = None) -> Tensor:
        """Replay on inputs as described at the capture. What is returned lies in the arena (by default the program's
        own) and stands until the next replay there. Raises ``ValueError`` for inputs that do not fit together or the
        program, and for an arena that is too small."""
        ...

    def time_operations(self, on: bool) -> None:
        """Whether replays measure every operation. Forgets what was measured."""
        ...

    def operation_times(self) -> list[OperationTime]:
        """In the order of the operations."""
        ...


class PreparedSample(Protocol):
    """``Kernels.sample`` and ``Kernels.write_tokens``, to be run on the stream."""

    @property
    def sampled(self) -> Sampled:
        """Undefined before ``run``."""
        ...

    def run(self) -> None: ...


class PreparedStep(Protocol):
    """One step of two programs, to be run on the stream, once. It keeps what it needs."""

    @property
    def logits(self) -> Tensor | None:
        """float32 [s, n], undefined before ``run`` and after that of the next step. None: no row samples."""
        ...

    def run(self) -> None: ...
    def prepare_sample(self, inputs: SampleInputs, vocab_size: int) -> PreparedSample:
        """Sampling from the first ``vocab_size`` logits, to run after the step; each row's token is appended at
        (``inputs.slots``, ``inputs.lengths``)."""
        ...

    def times(self) -> dict[str, float]:
        """Seconds of what the step did outside of its programs, by the names of ``Kernels``; after ``run``."""
        ...


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """An input of a captured function: int32 [rows], or float32 [rows, features]."""

    features: int | None = None
    """None: int32."""
