"""On the cpu device the arithmetic of a model is done by native kernels alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ropeway.execution.local import LocalExecutor
from ropeway.execution.worker import Worker
from ropeway.loading.open import open_checkpoint
from ropeway.models.registry import load_model
from ropeway.parallel.communicator import SingleProcess
from ropeway.plan import Plan, Seat
from ropeway.request import SamplingParams
from tests.support.devices import device
from tests.support.stepper import Stepper
from tests.support.tiny_models import tiny_checkpoint

MEMORY_ONLY = {"empty", "empty_like", "lift_fresh", "view"}
"""Operations that allocate or look at memory and compute nothing."""

STEP_ONLY = {
    *("detach", "select", "slice", "copy_"),  # views of the arena; prompts of new seats, copied into their rows
    *("resolve_conj", "resolve_neg", "to"),  # a tensor becomes an array
    *("max", "item", "_local_scalar_dense"),  # how many log-probabilities are wanted at most
}


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


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_no_torch_operation_computes_anything_in_a_step_of_the_engine(variant: str) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(variant))
    dev = device("cpu")
    model = load_model(checkpoint, dev, SingleProcess(), dtype="bf16")
    cache = dev.kv_cache(model.num_layers, 8, model.num_kv_heads, model.head_dim, 16, "bf16")
    worker = Worker(dev, model, cache, max_num_seqs=2, max_step_tokens=16, max_model_len=64, vocab_size=150)
    executor = LocalExecutor(worker)
    seats = tuple(
        Seat(slot, np.arange(3, 8, dtype=np.int32), 5, SamplingParams(temperature=0.5, logprobs=2), 1, (), blocks)
        for slot, blocks in ((0, np.array([0], dtype=np.int32)), (1, np.array([1], dtype=np.int32)))
    )
    with Recorder() as recorder:
        for seq, (start, count) in enumerate([([0, 0], [5, 4]), ([5, 4], [1, 1]), ([6, 5], [1, 1])]):
            work = executor.forward(
                Plan(
                    seq=seq + 1,
                    request=np.arange(2),
                    slot=np.arange(2, dtype=np.int32),
                    start=np.array(start, dtype=np.int32),
                    count=np.array(count, dtype=np.int32),
                    samples=np.array([True, seq > 0]),
                    new_blocks=np.empty(0, dtype=np.int32),
                    new_block_count=np.zeros(2, dtype=np.int32),
                    seats=() if seq else seats,
                )
            )
            work.sample()
            assert len(work.result().token_ids) == 1 + (seq > 0)
    assert recorder.names <= MEMORY_ONLY | STEP_ONLY


def test_the_recorder_sees_torch_operations() -> None:
    with Recorder() as recorder:
        torch.ones(2) + 1
    assert not recorder.names <= MEMORY_ONLY
