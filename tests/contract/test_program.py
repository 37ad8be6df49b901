"""A captured model against the same model called kernel by kernel, bit for bit; and what a recording refuses."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropeway.devices.base import DenseTensor, Device, GroupedTensor, HostTensor, KVCache
from ropeway.devices.programs import Program, ProgramInput
from ropeway.errors import OutOfMemory, Unsupported
from ropeway.loading.checkpoint import Checkpoint
from ropeway.loading.open import open_checkpoint
from ropeway.models.model import Model
from ropeway.models.registry import load_model
from ropeway.parallel.communicator import Collectives, SingleProcess
from tests.support.devices import device
from tests.support.native import CONTEXTS
from tests.support.paged import Rows, scattered_blocks
from tests.support.ranks import run_ranks
from tests.support.tiny_models import SMALL, tiny_checkpoint

MAX_ROWS = 96
BLOCK_SIZE = 4
VOCAB: int = SMALL["vocab_size"]


class Quantised:
    """A checkpoint whose matrices are held in groups of 32."""

    def __init__(self, base: Checkpoint, bits: int, minimums: bool) -> None:
        self.path, self.config, self.generation_config = base.path, base.config, base.generation_config
        self._base, self._bits, self._minimums = base, bits, minimums

    def names(self) -> Iterable[str]:
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def get(self, name: str, rows: slice | None = None) -> HostTensor:
        tensor = self._base.get(name, rows)
        if len(tensor.shape) != 2:
            return tensor
        groups = tensor.dequantize().view(tensor.shape[0], -1, 32)
        half = 2 ** (self._bits - 1)
        scales = (groups.abs().amax(-1) / (half - 1)).half()
        codes = (groups / scales.float()[:, :, None]).round().clamp(1 - half, half - 1).to(torch.int8)
        minimums = None
        if self._minimums:
            codes = codes.clamp(min=0)
            minimums = (0.1 * groups.amin(-1)).half()
        return GroupedTensor(codes.view(*tensor.shape), scales, minimums, 32, self._bits)  # type: ignore[arg-type]

    def close(self) -> None:
        self._base.close()


FORMATS: dict[str, Callable[[Checkpoint], tuple[Checkpoint, Any]]] = {
    "fp32": lambda checkpoint: (checkpoint, "fp32"),
    "bf16": lambda checkpoint: (checkpoint, "bf16"),
    "fp16": lambda checkpoint: (checkpoint, "fp16"),
    "int8": lambda checkpoint: (Quantised(checkpoint, 8, False), "auto"),
    "int8 with minimums": lambda checkpoint: (Quantised(checkpoint, 8, True), "auto"),
    "int4": lambda checkpoint: (Quantised(checkpoint, 4, False), "auto"),
    "int4 with minimums": lambda checkpoint: (Quantised(checkpoint, 4, True), "auto"),
}


@functools.cache
def on_isa(isa: str) -> Device:
    from ropeway.devices.cpu.device import CpuDevice
    from ropeway.devices.stream import InlineStream

    return device("cpu") if isa == "auto" else CpuDevice(2, isa, stream=InlineStream())


@functools.cache
def load(variant: str, kind: str = "fp32", isa: str = "auto") -> Model:
    checkpoint, dtype = FORMATS[kind](open_checkpoint(tiny_checkpoint(variant)))
    return load_model(checkpoint, on_isa(isa), SingleProcess(), dtype=dtype)


def new_cache(model: Model, dev: Device, blocks: int = 80) -> KVCache:
    """Filled with NaN."""
    kind: Any = "fp32" if model.dtype == "fp32" else "bf16"
    cache = dev.kv_cache(model.num_layers, blocks, model.num_kv_heads, model.head_dim, BLOCK_SIZE, kind)
    cache.data.fill(0xFF)  # type: ignore[attr-defined]
    return cache


def capture(model: Model, dev: Device, cache: KVCache, max_rows: int = MAX_ROWS) -> Program:
    program = dev.capture(
        lambda ids, positions, plan: model.forward(ids, positions, cache, plan),
        (ProgramInput(), ProgramInput()),
        max_rows,
    )
    assert program is not None
    return program


class Twins:
    """The same steps by a program and by the model's own Python, each over a cache of its own."""

    def __init__(self, model: Model, dev: Device, lengths: Sequence[int]) -> None:
        self.model, self.device = model, dev
        self.caches = [new_cache(model, dev), new_cache(model, dev)]
        self.program = capture(model, dev, self.caches[0])
        self.logits = dev.capture(
            lambda hidden, _: model.logits(hidden), (ProgramInput(model.spec.hidden_size),), MAX_ROWS
        )
        self.blocks = scattered_blocks(lengths, BLOCK_SIZE)
        self.done = [0] * len(lengths)

    def step(self, counts: Sequence[int], arena: Tensor | None = None) -> None:
        self.done = [done + count for done, count in zip(self.done, counts, strict=True)]
        shape = Rows(counts, self.done, self.blocks).step()
        ids = torch.tensor(
            [
                (7 * row + 3 * position) % VOCAB
                for row, count in enumerate(counts)
                for position in range(self.done[row] - count, self.done[row])
            ],
            dtype=torch.int32,
        )
        kernels = self.device.kernels
        got = self.program.run(
            ids, shape.positions, plan=kernels.plan_attention(self.caches[0], shape), arena=arena
        ).clone()
        want = self.model.forward(ids, shape.positions, self.caches[1], kernels.plan_attention(self.caches[1], shape))
        assert torch.equal(got, want)
        assert got.isfinite().all()
        assert self.logits is not None
        assert torch.equal(self.logits.run(got), self.model.logits(want))
        first, second = (cache.data for cache in self.caches)  # type: ignore[attr-defined]
        assert np.array_equal(first, second)


STEPS = [[9, 0, 17, 30], [1, 40, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [12, 1, 1, 1]]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("variant", ["llama-biased", "llama-tied", "qwen2-sliding", "qwen3"])
def test_a_program_computes_the_bits_of_the_model_in_every_layout_of_weights(variant: str, kind: str) -> None:
    twins = Twins(load(variant, kind), device("cpu"), [48, 48, 48, 48])
    for counts in STEPS:
        twins.step(counts)


@pytest.mark.parametrize("isa", CONTEXTS)
def test_a_program_computes_the_bits_of_the_model_on_every_instruction_set(isa: str) -> None:
    twins = Twins(load("qwen3", "bf16", isa), on_isa(isa), [48, 48, 48, 48])
    for counts in STEPS:
        twins.step(counts)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=1, max_size=3))
def test_one_program_serves_every_number_of_rows(steps: list[list[int]]) -> None:
    twins = Twins(load("llama"), device("cpu"), [60, 60, 60, 60])
    for counts in steps:
        twins.step(counts)


def test_a_program_that_is_replayed_in_two_arenas_at_once_mixes_nothing_up() -> None:
    model, dev = load("qwen2"), device("cpu")
    cache = new_cache(model, dev)
    program = capture(model, dev, cache)
    other = program.arena()
    blocks = scattered_blocks([20, 20], BLOCK_SIZE)
    kernels = dev.kernels

    def one(row: int, arena: Tensor | None) -> Tensor:
        shape = Rows([20], [20], [blocks[row]]).step()
        ids = torch.arange(20, dtype=torch.int32) + 30 * row
        return program.run(ids, shape.positions, plan=kernels.plan_attention(cache, shape), arena=arena)

    first = one(0, None)
    kept = first.clone()
    second = one(1, other)
    assert torch.equal(first, kept)
    assert torch.equal(second.clone(), one(1, None))
    assert not torch.equal(second, kept)


def test_an_arena_that_is_too_small_is_an_error_and_nothing_is_written_past_its_end() -> None:
    model, dev = load("llama"), device("cpu")
    cache = new_cache(model, dev)
    program = capture(model, dev, cache, max_rows=4)
    shape = Rows([5], [5], scattered_blocks([5], BLOCK_SIZE)).step()
    ids = torch.arange(5, dtype=torch.int32)
    plan = dev.kernels.plan_attention(cache, shape)
    memory = torch.full((program.arena_bytes + 4096,), 0xA5, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"5 rows needs an arena of \d+ bytes; this one has \d+"):
        program.run(ids, shape.positions, plan=plan)
    with pytest.raises(ValueError, match="needs an arena"):
        program.run(ids, shape.positions, plan=plan, arena=memory[: program.arena_bytes])
    assert (memory == 0xA5).all()
    shape = Rows([4], [4], scattered_blocks([4], BLOCK_SIZE)).step()
    plan = dev.kernels.plan_attention(cache, shape)
    program.run(ids[:4], shape.positions, plan=plan, arena=memory[: program.arena_bytes])
    assert (memory[program.arena_bytes :] == 0xA5).all()


def test_inputs_and_plans_of_another_step_are_refused() -> None:
    model, dev = load("llama"), device("cpu")
    cache = new_cache(model, dev)
    program = capture(model, dev, cache)
    shape = Rows([3], [3], scattered_blocks([3], BLOCK_SIZE)).step()
    plan = dev.kernels.plan_attention(cache, shape)
    ids = torch.arange(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="needs the attention plan of its step of 3 rows"):
        program.run(ids, shape.positions)
    with pytest.raises(ValueError, match="step of 2 rows"):
        program.run(ids[:2], shape.positions[:2], plan=plan)
    with pytest.raises(ValueError, match=r"must be contiguous torch\.int32"):
        program.run(ids, shape.positions.long(), plan=plan)
    with pytest.raises(ValueError, match=r"must be contiguous torch\.int32"):
        program.run(ids, shape.positions[:2], plan=plan)
    with pytest.raises(ValueError):
        program.run(ids, plan=plan)
    with pytest.raises(IndexError, match="row 160 of a table of 160"):
        program.run(torch.full((3,), VOCAB, dtype=torch.int32), shape.positions, plan=plan)
    with pytest.raises(IndexError, match="position 256 of token 0"):
        program.run(ids, shape.positions + 256, plan=plan)


def test_the_arena_is_freed_with_its_program() -> None:
    model, dev = load("llama"), device("cpu")
    program = capture(model, dev, new_cache(model, dev))
    arena = weakref.ref(program._arena)  # type: ignore[attr-defined]
    held = weakref.ref(program)
    del program
    gc.collect()
    assert held() is None
    assert arena() is None


def test_activations_that_do_not_fit_into_memory_are_an_error_that_says_what_to_lower() -> None:
    model, dev = load("llama"), device("cpu")
    with pytest.raises(OutOfMemory, match=r"activations of \d+ rows need .*; lower max_batched_tokens"):
        capture(model, dev, new_cache(model, dev), max_rows=1 << 40)


def test_the_parts_of_a_layer_are_fused() -> None:
    model, dev = load("llama-biased"), device("cpu")
    program = capture(model, dev, new_cache(model, dev))
    layer = [
        "rms_norm + linear",
        "rope",
        "rope",
        "write_kv",
        "attention",
        "linear + residual",
        "rms_norm + linear + silu_and_mul",
        "linear + residual",
    ]
    times = program.operation_times()
    assert [time.kind for time in times] == ["gather", *(layer * model.num_layers)]
    assert [len(time.weights) for time in times[1:9]] == [3, 0, 0, 0, 0, 1, 2, 1]


def test_operations_are_timed_when_asked() -> None:
    model, dev = load("llama"), device("cpu")
    cache = new_cache(model, dev)
    program = capture(model, dev, cache)
    shape = Rows([8], [8], scattered_blocks([8], BLOCK_SIZE)).step()
    ids, plan = torch.arange(8, dtype=torch.int32), dev.kernels.plan_attention(cache, shape)
    program.run(ids, shape.positions, plan=plan)
    assert all(time.seconds == 0 for time in program.operation_times())
    program.time_operations(True)
    program.run(ids, shape.positions, plan=plan)
    assert all(time.seconds > 0 for time in program.operation_times())
    program.time_operations(False)
    assert all(time.seconds == 0 for time in program.operation_times())


def test_a_torch_operation_in_a_model_is_an_error_while_it_is_recorded() -> None:
    features, ids = ProgramInput(8), ProgramInput()
    wrong: dict[str, Callable[..., Any]] = {
        "operator add": lambda x, ids, plan: x + 1,
        "operator rmul": lambda x, ids, plan: 2.0 * x,
        "operator bool": lambda x, ids, plan: x and ids,
        "operator eq": lambda x, ids, plan: ids == 3,
        "operator getitem": lambda x, ids, plan: x[0],
        "operator len": lambda x, ids, plan: len(x),
        "operator index": lambda x, ids, plan: range(x.shape[0]),
        "torch's relu": lambda x, ids, plan: torch.relu(x),
        "torch's add": lambda x, ids, plan: torch.ones(8) + x,
        "torch's embedding": lambda x, ids, plan: torch.nn.functional.embedding(ids, torch.zeros(4, 4)),
        "attribute float": lambda x, ids, plan: x.float(),
        "attribute tokens": lambda x, ids, plan: plan.tokens,
    }
    for what, function in wrong.items():
        with pytest.raises(Unsupported, match=f"{what} was used while a model was recorded"):
            device("cpu").capture(function, (features, ids), 4)


def test_a_tensor_from_outside_the_recording_is_refused_where_a_result_is_expected() -> None:
    kernels = device("cpu").kernels
    other: list[Tensor] = []

    def keep(x: Tensor, plan: Any) -> Tensor:
        other.append(x)
        return kernels.silu_and_mul(x, x)

    device("cpu").capture(keep, (ProgramInput(8),), 4)
    for stranger in (torch.ones(4, 8), other[0]):
        with pytest.raises(Unsupported, match="no result of the forward that is being recorded"):
            device("cpu").capture(lambda x, plan: kernels.silu_and_mul(x, stranger), (ProgramInput(8),), 4)  # noqa: B023
    with pytest.raises(Unsupported, match="must return one handle"):
        device("cpu").capture(lambda x, plan: torch.ones(4, 8), (ProgramInput(8),), 4)
    with pytest.raises(Unsupported, match="returned its input"):
        device("cpu").capture(lambda x, plan: x, (ProgramInput(8),), 4)


def test_shapes_that_do_not_fit_are_refused_while_recording() -> None:
    dev = device("cpu")
    kernels = dev.kernels
    weight = dev.pack(DenseTensor(torch.ones(4, 8)))
    wrong: dict[str, Callable[..., Any]] = {
        r"x must be float32 \[rows, 8\], not \[rows, 6\]": lambda x, ids, plan: kernels.linear(x, weight),
        r"bias must be a float32 tensor \[4\]": lambda x, ids, plan: kernels.linear(x, weight, torch.ones(5)),
        r"weight must be a float32 tensor \[6\]": lambda x, ids, plan: kernels.rms_norm(x, torch.ones(8), 1e-5),
        r"x must be float32 \[rows, 8\], not \[rows, \]": lambda x, ids, plan: kernels.linear(ids, weight),
        r"ids must be int32 \[rows\], not \[rows, 6\]": lambda x, ids, plan: kernels.gather(weight, x),
        r"cannot be viewed as \[rows, 4, 2\]": lambda x, ids, plan: x.view(x.shape[0], 4, 2),
        r"\[rows, 6\] cannot be viewed as \[rows, 6\]": lambda x, ids, plan: x.view(3, 6),
    }
    for message, function in wrong.items():
        with pytest.raises(ValueError, match=message):
            dev.capture(function, (ProgramInput(6), ProgramInput()), 4)


@pytest.mark.parametrize("variant", ["llama", "qwen3-tied-biased"])
def test_ranks_replay_their_parts_up_to_each_collective(variant: str) -> None:
    shape = Rows([7, 1], [7, 1], scattered_blocks([7, 1], BLOCK_SIZE)).step()
    ids = torch.arange(3, 11, dtype=torch.int32)
    path = tiny_checkpoint(variant)

    def work(communicator: Collectives) -> tuple[Tensor, Tensor, int]:
        from ropeway.devices.cpu.device import CpuDevice
        from ropeway.devices.stream import InlineStream

        dev = CpuDevice(1, stream=InlineStream())
        model = load_model(open_checkpoint(path), dev, communicator)
        caches = [new_cache(model, dev), new_cache(model, dev)]
        program = capture(model, dev, caches[0])
        logits = dev.capture(lambda hidden, _: model.logits(hidden), (ProgramInput(model.spec.hidden_size),), MAX_ROWS)
        plans = [dev.kernels.plan_attention(cache, shape) for cache in caches]
        hidden = program.run(ids, shape.positions, plan=plans[0])
        got = logits.run(hidden).clone()
        want = model.logits(model.forward(ids, shape.positions, caches[1], plans[1]))
        assert program.num_segments == 1 + 1 + 2 * model.num_layers  # type: ignore[attr-defined]
        return got, want, model.vocab_size

    results, _ = run_ranks(2, work)
    for got, want, vocabulary in results:
        assert got.shape == (8, vocabulary)
        assert torch.equal(got, want)
        assert torch.equal(got, results[0][0])


def test_the_reference_device_captures_nothing() -> None:
    assert device("reference").capture(lambda x, plan: x, (ProgramInput(8),), 4) is None
