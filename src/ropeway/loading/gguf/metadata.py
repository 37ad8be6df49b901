"""The key-value section of a GGUF file, with typed access: a damaged or hostile file ends in a sentence that
names the file and the field, never in a ``TypeError`` somewhere above."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ropeway.errors import LoadError

Scalar = TypeVar("Scalar", bool, int, float, str)

KIND_NAMES: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


class Metadata(UserDict[str, Any]):
    """Keys to values as the file has them: bool, int, float or str; arrays of numbers as numpy arrays, arrays of
    texts as lists of str, arrays of arrays as lists."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        super().__init__(values)
        self.path = path
        """The file they come from, for messages."""

    @overload
    def scalar(self, key: str, kind: type[Scalar]) -> Scalar | None: ...
    @overload
    def scalar(self, key: str, kind: type[Scalar], default: Scalar) -> Scalar: ...
    def scalar(self, key: str, kind: type[Scalar], default: Scalar | None = None) -> Scalar | None:
        """The value under ``key``, or ``default`` when there is none. Integers pass for numbers, and an array
        of one repeated value (heads per layer, say) for that value. Raises ``LoadError`` for another type."""
        value = self.data.get(key)
        if value is None:
            return default
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise LoadError(f"{self.path}: field '{key}' must be {KIND_NAMES[kind]}, not {describe(value)}")
        return value

    def require(self, key: str, kind: type[Scalar]) -> Scalar:
        """Like ``scalar``; raises ``LoadError`` when the field is missing."""
        value = self.scalar(key, kind)
        if value is None:
            raise LoadError(f"{self.path}: field '{key}' is missing; the file is damaged or its conversion incomplete")
        return value

    def texts(self, key: str) -> list[str] | None:
        """An array of texts, or None when there is none."""
        value = self.data.get(key)
        if value is None or (isinstance(value, list) and all(type(item) is str for item in value)):
            return value
        if isinstance(value, np.ndarray) and not value.size:
            return []
        raise LoadError(f"{self.path}: field '{key}' must be an array of texts, not {describe(value)}")

    def numbers(self, key: str) -> NDArray[Any] | None:
        """An array of numbers, or None when there is none."""
        value = self.data.get(key)
        if value is None or isinstance(value, np.ndarray):
            return value
        raise LoadError(f"{self.path}: field '{key}' must be an array of numbers, not {describe(value)}")


def describe(value: object) -> str:
    """A value as a message shows it: short, with its type when it is not a plain scalar."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} values"
    if isinstance(value, list):
        return f"an array of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
