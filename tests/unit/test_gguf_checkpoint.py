"""GGUF checkpoints against the transformers models they were written from."""

from __future__ import annotations

import math
import resource
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropeway.devices.base import DenseTensor
from ropeway.errors import LoadError, Unsupported
from ropeway.loading.gguf.checkpoint import GGUFCheckpoint
from ropeway.models.rope import inverse_frequencies
from ropeway.models.spec import DecoderSpec
from tests.support.gguf_files import CHATML_END, finish, write_gguf, write_tokenizer
from tests.support.tiny_models import tiny_oracle
from tests.support.tokenizers import byte_level

FAMILIES = ("llama", "qwen2", "qwen3")
VARIANTS = (
    *FAMILIES,
    "llama-tied",
    "llama-biased",
    "llama-multi-head",
    "llama-multi-query",
    "llama-wide-heads",
    "qwen2-tied",
)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", tiny_oracle("qwen2"), tokenizer=byte_level())


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(folder / "tiny.gguf", tiny_oracle("llama"), max_tensors=12)
    found = sorted(folder.iterdir())
    assert [path.name for path in found] == [f"tiny-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    return found


# --------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_float32_file_gives_back_the_model_it_was_written_from(variant: str, tmp_path: Path) -> None:
    model = tiny_oracle(variant)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model))
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        found = checkpoint.get(name)
        assert isinstance(found, DenseTensor)
        assert found.data.dtype == torch.float32
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(found.data, tensor), name


@pytest.mark.report("vllm-project/vllm#10600")
@pytest.mark.report("vllm-project/vllm#12364")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1], ids=lambda kind: kind.name
)
def test_rows_are_in_the_models_order_in_every_type(family: str, kind: Type, tmp_path: Path) -> None:
    """Blocks lie within rows, so that quantising and reordering rows commute."""
    model = tiny_oracle(family)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model, kind))
    for name, tensor in model.state_dict().items():
        expected = tensor.numpy()
        if expected.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
        np.testing.assert_array_equal(checkpoint.get(name).dequantize().numpy(), expected, err_msg=name)


@pytest.mark.parametrize("kind", [Type.F32, Type.BF16, Type.Q8_0, Type.Q4_1], ids=lambda kind: kind.name)
def test_slices_of_rows_are_those_of_the_whole(kind: Type, tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), kind))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = checkpoint.get(name).dequantize()
        for rows in (slice(0, 64), slice(5, 33), slice(60, 64)):
            assert torch.equal(checkpoint.get(name, rows).dequantize(), whole[rows])


def test_reading_dense_tensors_does_not_grow_the_process_by_the_file(tmp_path: Path) -> None:
    count, size = 24, 1 << 20

    def large(writer: gguf.GGUFWriter) -> None:
        for i in range(count):
            writer.add_tensor(f"large.{i}", np.ones((1024, size // 1024), dtype=np.float32))

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), extra=large))
    before = resident_bytes()
    for i in range(count):
        assert checkpoint.get(f"large.{i}").dequantize().sum() == size
    assert resident_bytes() - before < count * size * 4 / 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_norms_and_biases_come_as_float32_whatever_the_file_holds(tmp_path: Path) -> None:
    norm = np.linspace(0.5, 1.5, 64, dtype=np.float32)

    def half_norm(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("output_norm.weight", norm.astype(np.float16))

    path = write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), without=("output_norm.weight",), extra=half_norm)
    found = GGUFCheckpoint(path).get("model.norm.weight")
    assert isinstance(found, DenseTensor)
    assert found.data.dtype == torch.float32
    np.testing.assert_array_equal(found.data.numpy(), norm.astype(np.float16).astype(np.float32))


def test_tensors_outlive_the_checkpoint_and_leave_the_file_alone(tmp_path: Path) -> None:
    model = tiny_oracle("qwen2")
    path = write_gguf(tmp_path / "m.gguf", model)
    before = path.read_bytes()
    checkpoint = GGUFCheckpoint(path)
    found = checkpoint.get("lm_head.weight")
    checkpoint.close()
    assert torch.equal(found.dequantize(), model.state_dict()["lm_head.weight"])
    assert isinstance(found, DenseTensor)
    found.data.zero_()
    assert path.read_bytes() == before


@pytest.mark.report("vllm-project/vllm#11160")
def test_an_unknown_tensor_keeps_its_name_so_that_the_model_can_refuse_it(tmp_path: Path) -> None:
    def stranger(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32))
        writer.add_tensor("vision.weight", np.ones(4, np.float32))

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), extra=stranger))
    assert {"blk.0.attn_sinks.weight", "vision.weight"} <= set(checkpoint.names())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), without=("blk.1.ffn_up.weight",))
    checkpoint = GGUFCheckpoint(path)
    with pytest.raises(LoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        checkpoint.get("model.layers.1.mlp.up_proj.weight")


# --------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_says_what_the_models_own_says(variant: str, tmp_path: Path) -> None:
    model = tiny_oracle(variant)
    found = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model)).config
    own = model.config
    assert found["architectures"] == own.architectures
    for field in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert found[field] == getattr(own, field), field
    assert found["head_dim"] == (getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads)
    assert np.float32(found["rms_norm_eps"]) == np.float32(own.rms_norm_eps)
    assert found["rope_theta"] == own.rope_parameters["rope_theta"]
    assert found["rope_scaling"] is None
    assert found["attention_bias"] == (variant == "llama-biased" or variant.startswith("qwen2"))
    assert found["mlp_bias"] == (variant == "llama-biased")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Type.F32, "float32"),
        (Type.F16, "float16"),
        (Type.BF16, "bfloat16"),
        (Type.Q8_0, "gguf-quantised"),
    ],
    ids=lambda value: str(value),
)
def test_the_dtype_is_that_of_the_matrices(kind: Type, dtype: str, tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), kind))
    assert checkpoint.config["torch_dtype"] == dtype


def config_with(tmp_path: Path, variant: str, **fields: Any) -> dict[str, Any]:
    """The config of a tiny file with more fields; numbers with a point as float32, texts, or integers."""

    def extra(writer: gguf.GGUFWriter) -> None:
        for name, value in fields.items():
            key = name.replace("__", ".")
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_uint32(key, value)

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_oracle(variant), extra=extra))
    return {**checkpoint.config, "generation_config": checkpoint.generation_config}


def test_linear_scaling_is_read_under_its_new_and_its_old_name(tmp_path: Path) -> None:
    new = config_with(tmp_path, "llama", llama__rope__scaling__type="linear", llama__rope__scaling__factor=3.0)
    old = config_with(tmp_path, "llama", llama__rope__scale_linear=3.0)
    assert new["rope_scaling"] == old["rope_scaling"] == {"rope_type": "linear", "factor": 3.0}


def test_yarn_keeps_the_length_before_scaling_apart_from_the_context(tmp_path: Path) -> None:
    config = config_with(
        tmp_path,
        "qwen2",
        qwen2__rope__scaling__type="yarn",
        qwen2__rope__scaling__factor=4.0,
        qwen2__rope__scaling__original_context_length=64,
    )
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config["max_position_embeddings"] == 256


def test_yarns_attention_factor_multiplies_the_one_that_follows_from_the_scale(tmp_path: Path) -> None:
    config = config_with(
        tmp_path,
        "qwen2",
        qwen2__rope__scaling__type="yarn",
        qwen2__rope__scaling__factor=4.0,
        qwen2__rope__scaling__attn_factor=0.5,
        qwen2__rope__scaling__yarn_beta_fast=16.0,
    )
    assert config["rope_scaling"]["attention_factor"] == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    assert config["rope_scaling"]["beta_fast"] == 16.0


def test_llama3_scaling_arrives_as_a_factor_per_frequency(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1.5, 2.25, 4, 8, 8, 8], np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_oracle("llama"),
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
    assert "rope_freqs.weight" not in set(checkpoint.names())


def test_llama3_turns_at_the_speeds_of_the_models_own_config(tmp_path: Path) -> None:
    model = tiny_oracle("llama-llama3")
    speeds = model.model.rotary_emb.inv_freq
    spec = DecoderSpec.from_config(model.config.to_dict(), architecture="LlamaForCausalLM")
    plain = inverse_frequencies(replace(spec.rope, kind="default"), spec.head_dim)
    assert not torch.allclose(plain, speeds)
    path = write_gguf(
        tmp_path / "m.gguf",
        model,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", (plain / speeds).numpy()),
    )
    found = DecoderSpec.from_config(GGUFCheckpoint(path).config, architecture="LlamaForCausalLM")
    torch.testing.assert_close(inverse_frequencies(found.rope, found.head_dim), speeds, rtol=1e-6, atol=0)


def test_rotary_factors_must_fit_the_head(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(5, np.float32))

    with pytest.raises(LoadError, match="5 rotary factors for heads of 16"):
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), extra=extra))


def test_a_sliding_window_holds_for_every_layer(tmp_path: Path) -> None:
    config = config_with(tmp_path, "llama", llama__attention__sliding_window=9)
    assert config["sliding_window"] == 9
    assert config["layer_types"] == ["sliding_attention"] * 3


def test_sampling_defaults_of_the_file_become_the_generation_config(tmp_path: Path) -> None:
    config = config_with(tmp_path, "llama", general__sampling__temp=0.5, general__sampling__top_k=20)
    assert config["generation_config"] == {"eos_token_id": [], "temperature": 0.5, "top_k": 20}


@pytest.mark.report("ggml-org/llama.cpp#6772")
@pytest.mark.report("ollama/ollama#3759")
@pytest.mark.report("EricLBuehler/mistral.rs#1012")
@pytest.mark.parametrize(
    ("eos", "eot", "expected"),
    [
        (0, None, [0, CHATML_END]),
        (CHATML_END, None, [CHATML_END, 0]),
        (7, 9, [7, 9, 0, CHATML_END]),
        (None, None, [0, CHATML_END]),
        (0xFFFFFFFF, None, [0, CHATML_END]),
    ],
    ids=["eos-is-not-the-turn's-end", "eos-is", "eot-too", "none-named", "eos-unset"],
)
def test_end_tokens_are_the_union_of_everything_the_file_knows(
    eos: int | None, eot: int | None, expected: list[int], tmp_path: Path
) -> None:
    def ids(writer: gguf.GGUFWriter) -> None:
        write_tokenizer_without_eos(writer)
        if eos is not None:
            writer.add_eos_token_id(eos)
        if eot is not None:
            writer.add_eot_token_id(eot)

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), extra=ids))
    assert checkpoint.config["eos_token_id"] == expected
    assert checkpoint.generation_config["eos_token_id"] == expected


def write_tokenizer_without_eos(writer: gguf.GGUFWriter) -> None:
    write_tokenizer(writer, byte_level(), eos=None)


# --------------------------------------------------------------------------- parts


@pytest.mark.report("vllm-project/vllm#28724")
def test_any_part_of_a_split_model_finds_all_of_it(parts: list[Path], tmp_path: Path) -> None:
    whole = GGUFCheckpoint(write_gguf(tmp_path / "whole.gguf", tiny_oracle("llama")))
    for part in parts:
        checkpoint = GGUFCheckpoint(part)
        assert list(checkpoint.names()) == list(whole.names())
        assert checkpoint.config == whole.config
        for name in whole.names():
            assert torch.equal(checkpoint.get(name).dequantize(), whole.get(name).dequantize())


@pytest.mark.report("vllm-project/vllm#28724")
def test_a_missing_part_is_named(parts: list[Path], tmp_path: Path) -> None:
    for part in (parts[0], parts[2]):
        (tmp_path / part.name).write_bytes(part.read_bytes())
    with pytest.raises(LoadError, match=r"3 parts.*tiny-00002-of-00003\.gguf"):
        GGUFCheckpoint(tmp_path / parts[0].name)


def test_a_part_under_another_name_is_refused(parts: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(parts[0].read_bytes())
    with pytest.raises(LoadError, match="3 files, 1 found"):
        GGUFCheckpoint(copy)


def test_parts_in_the_wrong_order_are_refused(parts: list[Path], tmp_path: Path) -> None:
    for name, source in zip([path.name for path in parts], (parts[0], parts[2], parts[1]), strict=True):
        (tmp_path / name).write_bytes(source.read_bytes())
    with pytest.raises(LoadError, match="calls itself part 3"):
        GGUFCheckpoint(tmp_path / parts[0].name)


def test_a_tensor_in_two_parts_is_refused(parts: list[Path], tmp_path: Path) -> None:
    for source in parts:
        content = source.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight")
        (tmp_path / source.name).write_bytes(content)
    with pytest.raises(LoadError, match=r"blk\.0\.attn_norm\.weight' (is also in|appears twice)"):
        GGUFCheckpoint(tmp_path / parts[0].name)


# --------------------------------------------------------------------------- bad files


def damaged(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", LoadError, "empty"),
        (b"GG", LoadError, "not a GGUF file"),
        (b"<!DOCTYPE html><html>404", LoadError, "starts with b'<!DO'"),
        (b"version https://git-lfs.github.com/spec/v1\n", LoadError, "starts with b'vers'"),
        (b"tjgg" + bytes(64), LoadError, "older GGML format"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), Unsupported, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), Unsupported, "version 4"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), Unsupported, "version 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), Unsupported, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), LoadError, "general.architecture' is missing"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), LoadError, "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), LoadError, "truncated or damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_file_that_is_not_gguf_of_a_known_version_is_refused(
    content: bytes, error: type[LoadError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        GGUFCheckpoint(damaged(tmp_path, content))
    assert "bad.gguf" in caught.value.message


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(Unsupported, match="big-endian"):
        GGUFCheckpoint(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.gguf", tmp_path):
        with pytest.raises(LoadError, match="no such file"):
            GGUFCheckpoint(path)


def test_a_file_cut_anywhere_is_refused(small_file: Path, tmp_path: Path) -> None:
    content = small_file.read_bytes()
    cuts = {*range(1, 4096, 37), *range(4096, len(content), 997), len(content) - 1}
    for cut in sorted(cuts):
        with pytest.raises(LoadError, match=r"bad\.gguf"):
            GGUFCheckpoint(damaged(tmp_path, content[:cut]))


def test_a_cut_in_the_data_names_the_tensor_and_both_sizes(small_file: Path, tmp_path: Path) -> None:
    content = small_file.read_bytes()
    size = len(content) - 100
    with pytest.raises(LoadError, match=rf"tensor '.+' ends at byte {len(content)}, the file at {size}"):
        GGUFCheckpoint(damaged(tmp_path, content[:size]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 12_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_bytes_end_in_a_load_error_or_in_tensors_never_in_anything_else(
    flips: list[tuple[int, int]], small_file: Path, tmp_path: Path
) -> None:
    content = bytearray(small_file.read_bytes())
    for position, value in flips:
        content[position] = value
    try:
        checkpoint = GGUFCheckpoint(damaged(tmp_path, bytes(content)))
        for name in checkpoint.names():
            assert checkpoint.get(name).shape == checkpoint.shape(name)
    except LoadError as error:
        assert "bad.gguf" in error.message  # noqa: PT017


def with_tensor(tmp_path: Path, name: str, kind: Type, values: int = 256) -> Path:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.zeros((2, values // block * block_bytes), np.uint8)

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(name, raw, raw_dtype=kind)

    return write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), extra=extra, without=(name,))


@pytest.mark.parametrize(
    "kind",
    [kind for kind in Type if kind.name.startswith(("IQ", "TQ", "Q2", "Q3", "Q8_1", "Q8_K", "MXFP", "F64", "I8"))],
    ids=lambda kind: kind.name,
)
def test_an_unsupported_type_is_refused_with_file_tensor_and_type(kind: Type, tmp_path: Path) -> None:
    path = with_tensor(tmp_path, "blk.1.ffn_down.weight", kind)
    with pytest.raises(Unsupported, match=rf"m\.gguf: tensor 'blk\.1\.ffn_down\.weight' has the type {kind.name},"):
        GGUFCheckpoint(path)


def test_an_unknown_type_number_is_refused(small_file: Path, tmp_path: Path) -> None:
    content = bytearray(small_file.read_bytes())
    name = b"token_embd.weight"
    position = content.index(name) + len(name) + 4 + 2 * 8
    content[position : position + 4] = struct.pack("<I", 999)
    with pytest.raises(Unsupported, match=r"tensor 'token_embd\.weight' has the unknown type number 999"):
        GGUFCheckpoint(damaged(tmp_path, bytes(content)))


def bare_file(path: Path, arch: str, **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for name, value in fields.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name.replace("__", "."), value)
    finish(writer)
    return path


@pytest.mark.parametrize(
    ("arch", "fields", "message"),
    [
        ("gemma3", {}, "architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3"),
        ("llama", {"general__type": "adapter"}, "type 'adapter', not a model"),
        ("llama", {"llama__expert_count": 8}, "8 experts"),
    ],
)
def test_an_unsupported_architecture_is_named(arch: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=message):
        GGUFCheckpoint(bare_file(tmp_path / "m.gguf", arch, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama__rope__scaling__type": "longrope"}, "rotary scaling 'longrope'"),
        ({"llama__rope__dimension_count": 8}, "dimension_count' is 8, the head size 16"),
    ],
)
def test_an_unsupported_setting_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=message):
        config_with(tmp_path, "llama", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "scaling.factor' must be positive"),
        ({"llama__rope__scaling__type": 4}, "scaling.type' must be a text, not 4"),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": "two"}, "must be a number"),
        ({"tokenizer__ggml__eos_token_id": "two"}, "must be an integer, not 'two'"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        config_with(tmp_path, "llama", **fields)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"field 'qwen2\.embedding_length' is missing"):
        GGUFCheckpoint(bare_file(tmp_path / "m.gguf", "qwen2"))


def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        write_tokenizer_without_eos(writer)
        writer.add_eos_token_id(100_000)

    path = write_gguf(tmp_path / "m.gguf", tiny_oracle("llama"), extra=extra)
    with pytest.raises(LoadError, match=r"eos_token_id' is 100000, the vocabulary has \d+ tokens"):
        GGUFCheckpoint(path)
