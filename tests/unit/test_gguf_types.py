"""Every GGUF type is decoded exactly: ``gguf.quants.dequantize`` is the oracle, equality is of bits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ropeway.devices.base import DenseTensor, GroupedTensor
from ropeway.loading.gguf.blocks import FORMATS, decode
from ropeway.loading.gguf.checkpoint import GGUFCheckpoint
from tests.support.gguf_files import finish, random_blocks

ROWS, COLUMNS = 37, 1024
QUANTISED = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K]
DENSE = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


def bits(values: np.ndarray | torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(values, dtype=np.float32)).view(np.uint32)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_dequantize_to_the_bits_of_the_reference(kind: Type, seed: int) -> None:
    raw = random_blocks(np.random.default_rng(seed), kind, ROWS, COLUMNS)
    tensor = decode(raw, kind)
    assert tensor.shape == (ROWS, COLUMNS)
    np.testing.assert_array_equal(bits(tensor.dequantize()), bits(gguf.quants.dequantize(raw, kind)))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_codes_reach_exactly_the_range_their_layout_promises(kind: Type) -> None:
    tensor = decode(random_blocks(np.random.default_rng(0), kind, ROWS, COLUMNS), kind)
    four_bits = (0, 15) if tensor.minimums is not None else (-8, 7)
    expected = {
        Type.Q5_0: (-16, 15),
        Type.Q5_1: (0, 31),
        Type.Q5_K: (0, 31),
        Type.Q6_K: (-32, 31),
        Type.Q8_0: (-128, 127),
    }.get(kind, four_bits)
    assert (int(tensor.codes.min()), int(tensor.codes.max())) == expected
    assert tensor.bits == (4 if kind.name.startswith("Q4") else 8)
    assert tensor.group == (16 if kind is Type.Q6_K else 32)
    assert tensor.scales.dtype == (torch.float32 if kind.name.endswith("_K") else torch.float16)
    assert tensor.scales.shape == (ROWS, COLUMNS // tensor.group)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_a_tensor_larger_than_a_chunk_decodes_like_its_rows_one_by_one(
    kind: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = random_blocks(np.random.default_rng(1), kind, ROWS, COLUMNS)
    whole = decode(raw, kind)
    monkeypatch.setattr("ropeway.loading.gguf.blocks.CHUNK_VALUES", 3 * COLUMNS)
    chunked = decode(raw, kind)
    assert torch.equal(whole.codes, chunked.codes)
    assert torch.equal(whole.dequantize(), chunked.dequantize())


@pytest.mark.parametrize("kind", [*DENSE, *QUANTISED], ids=lambda kind: kind.name)
def test_a_matrix_of_each_type_comes_out_of_a_file_exactly(kind: Type, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    if kind in DENSE:
        raw = gguf.quants.quantize(rng.standard_normal((ROWS, COLUMNS), dtype=np.float32), kind)
    else:
        raw = random_blocks(rng, kind, ROWS, COLUMNS)
    checkpoint = GGUFCheckpoint(write_single_matrix(tmp_path / "one.gguf", raw, kind))
    tensor = checkpoint.get("model.embed_tokens.weight")
    assert checkpoint.shape("model.embed_tokens.weight") == tensor.shape == (ROWS, COLUMNS)
    assert isinstance(tensor, DenseTensor if kind in DENSE else GroupedTensor)
    if isinstance(tensor, DenseTensor):
        assert tensor.data.dtype == DENSE[kind]
    np.testing.assert_array_equal(bits(tensor.dequantize()), bits(gguf.quants.dequantize(raw, kind)))


def test_there_is_no_format_without_a_test() -> None:
    assert set(FORMATS) == set(QUANTISED)


def write_single_matrix(path: Path, raw: np.ndarray, kind: Type) -> Path:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(COLUMNS)
    writer.add_feed_forward_length(COLUMNS)
    writer.add_head_count(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    finish(writer)
    return path
