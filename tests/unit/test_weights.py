"""Checkpoints that do not fit their model, and what loading does to those that do."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ropeway.devices.base import DenseTensor, GroupedTensor, HostTensor
from ropeway.errors import ConfigError, LoadError
from ropeway.loading.open import open_checkpoint
from ropeway.models.model import Model
from ropeway.models.registry import load_model
from ropeway.models.weights import Shard, Weights
from ropeway.parallel.communicator import SingleProcess
from tests.support.devices import device
from tests.support.stepper import Stepper
from tests.support.tiny_models import tiny_checkpoint

IDS = list(range(5, 40))


def load(folder: Path, **options: Any) -> Model:
    return load_model(open_checkpoint(folder), device("reference"), SingleProcess(), **options)


def logits(model: Model) -> Tensor:
    return Stepper(model, device("reference")).prefill(IDS)


def changed(tmp_path: Path, variant: str, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a variant's checkpoint whose tensors ``change`` has altered."""
    folder = tmp_path / variant
    shutil.copytree(tiny_checkpoint(variant), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


# --------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_a_missing_tensor_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(LoadError, match=f"tensor {name} is missing"):
        load(changed(tmp_path, "llama", lambda tensors: tensors.pop(name)))


def test_tensors_nobody_asked_for_are_an_error_that_names_them(tmp_path: Path) -> None:
    extra = {"model.layers.0.adapter.weight": torch.ones(2), "model.layers.3.input_layernorm.weight": torch.ones(64)}
    with pytest.raises(LoadError, match=r"2 tensors .*layers\.0\.adapter\.weight, model\.layers\.3\.input_layernorm"):
        load(changed(tmp_path, "llama", lambda tensors: tensors.update(extra)))


def test_biases_the_architecture_has_no_place_for_are_an_error(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.bias"
    with pytest.raises(LoadError, match=name):
        load(changed(tmp_path, "qwen2", lambda tensors: tensors.update({name: torch.ones(64)})))


def test_a_tensor_of_another_shape_is_an_error_that_names_both(tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    with pytest.raises(LoadError, match=rf"{name} has shape \[16, 64\]; config\.json asks for \[32, 64\]"):
        load(changed(tmp_path, "llama", lambda tensors: tensors.update({name: torch.ones(16, 64)})))


@pytest.mark.parametrize("length", [0, -3, 257])
def test_a_length_beyond_the_context_is_refused_with_the_limit(length: int) -> None:
    with pytest.raises(ConfigError, match=f"max_model_len is {length}; this model's context allows 1 to 256"):
        load(tiny_checkpoint("llama"), max_model_len=length)


def test_a_shorter_length_computes_the_same(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen2-yarn")
    assert torch.equal(logits(load(folder, max_model_len=len(IDS))), logits(load(folder)))


# --------------------------------------------------------------------------- what is forgiven


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = changed(tmp_path, "llama", lambda tensors: tensors.update({name: torch.ones(8)}))
    assert torch.equal(logits(load(folder)), logits(load(tiny_checkpoint("llama"))))


def test_a_copy_of_the_embedding_as_head_of_a_tied_model_is_ignored(tmp_path: Path) -> None:
    def add_copy(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    tied = load(tiny_checkpoint("llama-tied"))
    copied = load(changed(tmp_path, "llama-tied", add_copy))
    assert copied.weight_bytes == tied.weight_bytes
    assert torch.equal(logits(copied), logits(tied))


def test_a_head_that_differs_although_the_config_ties_it_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def untie(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].neg()

    with caplog.at_level(logging.WARNING):
        model = load(changed(tmp_path, "llama-tied", untie))
    assert torch.equal(logits(model), logits(load(tiny_checkpoint("llama-tied"))).neg())
    assert "lm_head.weight differs" in caplog.text


# --------------------------------------------------------------------------- dtypes and progress


@pytest.mark.parametrize(("dtype", "bytes_each"), [("auto", 4), ("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_dtype_converts_matrices_and_leaves_vectors_in_float32(dtype: str, bytes_each: int) -> None:
    tensors = load_file(tiny_checkpoint("llama-biased") / "model.safetensors").values()
    model = load(tiny_checkpoint("llama-biased"), dtype=dtype)
    assert model.dtype == {"auto": "fp32"}.get(dtype, dtype)
    assert model.weight_bytes == sum(t.numel() * (bytes_each if t.dim() == 2 else 4) for t in tensors)


def test_dtype_auto_keeps_what_the_file_has(tmp_path: Path) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    folder = changed(tmp_path, "llama", halve)
    assert load(folder).dtype == "bf16"
    assert torch.equal(logits(load(folder)), logits(load(folder, dtype="bf16")))


def test_values_that_fp16_cannot_hold_are_refused_instead_of_becoming_infinite(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = changed(tmp_path, "llama", lambda tensors: tensors[name][0, 0].fill_(1e5))
    with pytest.raises(ConfigError, match=f"{name} has values that fp16 cannot hold"):
        load(folder, dtype="fp16")


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-sharded"])
def test_progress_grows_to_all_parameters(variant: str) -> None:
    seen: list[tuple[int, int]] = []
    load(tiny_checkpoint(variant), progress=lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert {total for _, total in seen} == {done[-1]}


# --------------------------------------------------------------------------- quantised on load


def bits_of(model: Model) -> dict[str, Any]:
    layer = model.layers[0]  # type: ignore[attr-defined]
    return {
        "embedding": model.embedding.table.layout,
        "head": model.head.weight.layout,
        "values": layer.attention._v._weight.layout,
        "attention": layer.attention._out._weight.layout,
        "gate": layer.mlp._gate._weight.layout,
        "down": layer.mlp._down._weight.layout,
    }


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_weights_int8_and_int4_hold_the_matrices_in_groups(name: str) -> None:
    layouts = {
        weights: bits_of(
            load_model(open_checkpoint(tiny_checkpoint("llama")), device(name), SingleProcess(), weights=weights)
        )
        for weights in ("int8", "int4")
    }
    assert set(layouts["int8"].values()) == {"int8"}
    fine = dict.fromkeys(("embedding", "head", "values", "down"), "int8")
    assert layouts["int4"] == {**fine, "attention": "int4", "gate": "int4"}


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8.5), ("int4", 5.0)])
def test_weights_take_the_bits_that_are_promised(weights: str, bits: float) -> None:
    tensors = load_file(tiny_checkpoint("llama-biased") / "model.safetensors").items()
    checkpoint = open_checkpoint(tiny_checkpoint("llama-biased"))
    model = load_model(checkpoint, device("cpu"), SingleProcess(), weights=weights)  # type: ignore[arg-type]

    def size(name: str, tensor: Tensor) -> float:
        if tensor.dim() != 2:
            return 32 * tensor.numel()
        return (
            8.5 if any(part in name for part in ("embed", "lm_head", "v_proj", "down_proj")) else bits
        ) * tensor.numel()

    assert model.weight_bytes == sum(size(*item) for item in tensors) / 8


def test_weights_bf16_is_dtype_bf16() -> None:
    bf16 = load(tiny_checkpoint("llama"), weights="bf16")
    assert torch.equal(logits(bf16), logits(load(tiny_checkpoint("llama"), dtype="bf16")))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_is_quantised_on_load_is_the_same_from_every_16_bit_copy_and_on_every_device(
    tmp_path: Path, weights: str
) -> None:
    """bfloat16 values, stored as such and as float32."""

    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    narrow = changed(tmp_path, "llama", halve)
    wide = changed(tmp_path / "wide", "llama", lambda tensors: None)
    tensors = load_file(narrow / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in tensors.items()}, wide / "model.safetensors")
    assert torch.equal(logits(load(narrow, weights=weights)), logits(load(wide, weights=weights)))
    ids = torch.arange(96, dtype=torch.int32)
    rows = []
    for name in ("reference", "cpu"):
        model = load_model(open_checkpoint(narrow), device(name), SingleProcess(), weights=weights)
        gate = model.layers[1].mlp._gate._weight  # type: ignore[attr-defined]
        rows.append(device(name).kernels.gather(gate, ids))
    assert torch.equal(*rows)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_tied_table_is_quantised_once(tmp_path: Path, weights: str) -> None:
    model = load(tiny_checkpoint("llama-tied"), weights=weights)
    assert model.head.weight is model.embedding.table


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_a_checkpoint_that_is_quantised_is_not_quantised_again(weights: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"quantised already \(tensor x\), and weights {weights} would .*leave weights at"
    ):
        matrix(None, on_load=weights)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rows_that_are_not_whole_groups_cannot_be_quantised(weights: str) -> None:
    checkpoint = OneMatrix()
    checkpoint.tensor = DenseTensor(torch.ones(4, 40))
    source = Weights(checkpoint, device("reference"), SingleProcess(), on_load=weights)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"tensor x cannot be held as weights {weights}: .*groups of 32 values"):
        source.matrix("x", 4, 40)


def test_values_that_cannot_be_quantised_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = changed(tmp_path, "llama", lambda tensors: tensors[name][0, 0].fill_(float("nan")))
    with pytest.raises(ConfigError, match=f"tensor {name} cannot be held as weights int4: a value is not finite"):
        load(folder, weights="int4")


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(("dim", "count"), [(0, 2), (0, 4), (1, 2)])
def test_parts_quantised_on_load_are_the_parts_of_the_whole(weights: str, dim: int, count: int) -> None:
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))

    def rows(shard: Shard | None) -> Tensor:
        checkpoint = OneMatrix()
        checkpoint.tensor = DenseTensor(values)
        source = Weights(checkpoint, device("reference"), SingleProcess(), on_load=weights)  # type: ignore[arg-type]
        weight = source.matrix("x", 8, 64, shard)
        return device("reference").kernels.gather(weight, torch.arange(weight.shape[0]))

    assert torch.equal(torch.cat([rows(Shard(dim, index, count)) for index in range(count)], dim), rows(None))


def test_a_group_to_be_quantised_is_never_cut() -> None:
    checkpoint = OneMatrix()
    checkpoint.tensor = DenseTensor(torch.ones(4, 64))
    source = Weights(checkpoint, device("reference"), SingleProcess(), on_load="int8")
    with pytest.raises(ConfigError, match="quantised groups of 32 cannot be split over 4 ranks"):
        source.matrix("x", 4, 64, Shard(1, 0, 4))


# --------------------------------------------------------------------------- quantised matrices


class OneMatrix:
    """A checkpoint of a single quantised matrix [4, 64]."""

    def __init__(self) -> None:
        self.path = Path("quantised")
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        random = torch.Generator().manual_seed(0)
        self.tensor: HostTensor = GroupedTensor(
            codes=torch.randint(0, 16, (4, 64), generator=random, dtype=torch.int8),
            scales=torch.rand(4, 2, generator=random).half(),
            minimums=torch.rand(4, 2, generator=random).half(),
            group=32,
            bits=4,
        )

    def names(self) -> list[str]:
        return ["x"]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensor.shape

    def get(self, name: str, rows: slice | None = None) -> HostTensor:
        rows = rows or slice(None)
        match self.tensor:
            case DenseTensor(data):
                return DenseTensor(data[rows])
            case GroupedTensor(codes, scales, minimums, group, bits):
                lowest = None if minimums is None else minimums[rows]
                return GroupedTensor(codes[rows], scales[rows], lowest, group, bits)

    def close(self) -> None:
        """Nothing is open."""


def matrix(shard: Shard | None, **options: Any) -> Tensor:
    weight = Weights(OneMatrix(), device("reference"), SingleProcess(), **options).matrix("x", 4, 64, shard)
    return device("reference").kernels.gather(weight, torch.arange(weight.shape[0]))


@pytest.mark.parametrize("rows", [100, 128, 1])
@pytest.mark.parametrize("form", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_matrix_that_is_loaded_in_slices_is_the_matrix(
    monkeypatch: pytest.MonkeyPatch, name: str, form: str, rows: int
) -> None:
    monkeypatch.setattr("ropeway.models.weights._SLICE_VALUES", 64 * 32)
    chosen, checkpoint = device(name), OneMatrix()
    values = DenseTensor(torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)))
    quantised = form in ("int8", "int4")
    checkpoint.tensor = chosen.quantize(values, form) if quantised else values  # type: ignore[arg-type]
    if form == "bf16":
        checkpoint.tensor = DenseTensor(values.data.bfloat16())
    seen: list[slice | None] = []
    get = checkpoint.get
    monkeypatch.setattr(checkpoint, "get", lambda name, part=None: seen.append(part) or get(name, part))
    weight = Weights(checkpoint, chosen, SingleProcess()).matrix("x", rows, 64)
    assert [(part.start, part.stop) for part in seen if part] == [
        (start, min(start + 32, rows)) for start in range(0, rows, 32)
    ]
    found = chosen.kernels.gather(weight, torch.arange(rows, dtype=torch.int32))
    assert torch.equal(found, checkpoint.tensor.dequantize())
    assert weight.nbytes == chosen.pack(checkpoint.tensor).nbytes
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    whole = chosen.kernels.linear(x, chosen.pack(checkpoint.tensor))
    assert torch.equal(chosen.kernels.linear(x, weight), whole)


@pytest.mark.parametrize(("dim", "count"), [(0, 2), (0, 4), (1, 2)])
def test_parts_of_a_quantised_matrix_are_the_parts_of_its_values(dim: int, count: int) -> None:
    parts = [matrix(Shard(dim, index, count)) for index in range(count)]
    assert torch.equal(torch.cat(parts, dim), OneMatrix().tensor.dequantize())


def test_a_quantised_group_is_never_cut() -> None:
    with pytest.raises(ConfigError, match="quantised groups of 32 cannot be split over 4 ranks"):
        matrix(Shard(1, 0, 4))


def test_dtype_leaves_quantised_matrices_alone() -> None:
    assert torch.equal(matrix(None, dtype="bf16"), OneMatrix().tensor.dequantize())


def test_the_file_at_fault_is_in_the_message(tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(LoadError, match=str(folder)):
        load(folder)


def test_a_config_of_another_model_is_found_by_its_shapes(tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    with pytest.raises(LoadError, match="embed_tokens"):
        load(folder)


def test_dense_parts_are_contiguous_once_packed() -> None:
    tensor = DenseTensor(torch.arange(12.0).view(3, 4))
    weight = device("reference").pack(DenseTensor(tensor.data[:, 2:]))
    assert weight.nbytes == 24
    assert torch.equal(device("reference").kernels.gather(weight, torch.tensor([2])), torch.tensor([[10.0, 11.0]]))
