"""On the cpu device the arithmetic of a model is done by native kernels alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ropeway.loading.open import open_checkpoint
from ropeway.models.registry import load_model
from ropeway.parallel.communicator import SingleProcess
from tests.support.devices import device
from tests.support.stepper import Stepper
from tests.support.tiny_models import tiny_checkpoint

MEMORY_ONLY = {"empty", "empty_like", "lift_fresh", "view"}
"""Operations that allocate or look at memory and compute nothing."""


class Recorder(TorchDispatchMode):
    """Names of the torch operations that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", ["llama", "llama-biased", "qwen2-sliding", "qwen3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_no_torch_operation_computes_anything_in_a_step(variant: str, dtype: Any) -> None:
    model = load_model(open_checkpoint(tiny_checkpoint(variant)), device("cpu"), SingleProcess(), dtype=dtype)
    stepper = Stepper(model, device("cpu"), sequences=2)
    with Recorder() as recorder:
        stepper.step([(0, [5, 6, 7, 8]), (1, [9])])
        stepper.step([(0, [3]), (1, [4])])
    assert recorder.names <= MEMORY_ONLY


def test_the_recorder_sees_torch_operations() -> None:
    with Recorder() as recorder:
        torch.ones(2) + 1
    assert not recorder.names <= MEMORY_ONLY
