"""Opaque handles on which a model is run once to record it (``Device.capture``).

A handle stands for rows whose number is not known yet. It has a shape and can be viewed; kernels and collectives take
it and note what they would do. Anything else raises: an operation that was done while recording, rather than recorded,
would be missing from every replay.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NoReturn, Protocol, cast

from torch import Tensor

from ropeway.errors import Unsupported

Collective = Callable[[Tensor], Tensor]


def _refuse(what: str) -> NoReturn:
    raise Unsupported(
        f"{what} was used while a model was recorded; a model's forward may call device kernels, collectives and view, "
        "nothing else: make it a kernel of the device, or compute it when the model is loaded"
    )


class _Opaque:
    """Refuses what Python and PyTorch offer for tensors and numbers."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(f"torch's {getattr(function, '__name__', function)}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python asks of any object
            raise AttributeError(name)
        _refuse(f"attribute {name}")

    __hash__ = object.__hash__


def _refused(name: str) -> Callable[..., NoReturn]:
    def operator(*_: object) -> NoReturn:
        _refuse(f"operator {name}")

    return operator


_ARITHMETIC = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
"""Each with a reflected and an in-place form."""
_OTHERS = "neg pos abs invert eq ne lt le gt ge bool int float complex index len iter contains getitem setitem array"
for _name in (*(form + name for name in _ARITHMETIC.split() for form in ("", "r", "i")), *_OTHERS.split()):
    setattr(_Opaque, f"__{_name}__", _refused(_name))


class RowCount(_Opaque):
    """The number of rows of a recording: a dimension of its handles that only ``view`` takes."""

    __slots__ = ()


class PlanHandle(_Opaque):
    """Stands for the attention plan of the step to be replayed."""

    __slots__ = ()


class Value:
    """What an operation writes and others read: ``features`` elements of four bytes for every row."""

    __slots__ = ("features",)

    def __init__(self, features: int) -> None:
        self.features = features


class Recorder(Protocol):
    """Where handles come from: takes down what is done with them."""

    def collective(self, run: Collective, x: Value, out: Value) -> None:
        """Everything before is done when ``run`` is called at replay, and nothing after."""
        ...


class Handle(_Opaque):
    """A tensor [rows, ...] of a recording: float32, or int32 for a column that is an input."""

    __slots__ = ("recorder", "shape", "value")

    def __init__(self, recorder: Recorder, value: Value, shape: tuple[Any, ...]) -> None:
        self.recorder = recorder
        self.value = value
        self.shape = shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape without the rows."""
        return self.shape[1:]

    def view(self, *shape: Any) -> Tensor:
        """The same memory in another shape, its rows unchanged."""
        rows, *sizes = shape
        if rows is not self.shape[0] or any(type(size) is not int for size in sizes) or prod(sizes) != prod(self.sizes):
            wanted, mine = ", ".join(map(str, sizes)), ", ".join(map(str, self.sizes))
            raise ValueError(f"a handle [rows, {mine}] cannot be viewed as [rows, {wanted}]")
        return as_tensor(Handle(self.recorder, self.value, shape))

    def collective(self, run: Collective, features: int) -> Tensor:
        """The result [rows, features] of a collective over ranks on this handle."""
        out = Value(features)
        self.recorder.collective(run, self.value, out)
        return as_tensor(Handle(self.recorder, out, (self.shape[0], features)))


def as_tensor(handle: Handle) -> Tensor:
    """What a model, which knows nothing of handles, takes for a tensor."""
    return cast(Tensor, handle)
