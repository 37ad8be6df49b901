"""Safetensors folders: good ones in every shape, and all the ways to be damaged."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ropeway.devices.base import DenseTensor
from ropeway.errors import LoadError, Unsupported
from ropeway.loading.open import open_checkpoint
from ropeway.loading.safetensors import INDEX, SINGLE, SafetensorsCheckpoint, SafetensorsFile

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(6).to(torch.bfloat16).view(2, 3),
    "c": torch.arange(5).to(torch.float16),
    "scalar": torch.tensor(7.0),
    "none": torch.empty(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in one file."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file(TENSORS, tmp_path / SINGLE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint in two files with an index."""
    (tmp_path / "config.json").write_text("{}")
    shards = {"one.safetensors": ["a", "b"], "two.safetensors": ["c"]}
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / shard)
    write_index(tmp_path, {name: shard for shard, names in shards.items() for name in names})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def value(checkpoint: SafetensorsCheckpoint, name: str) -> torch.Tensor:
    tensor = checkpoint.get(name)
    assert isinstance(tensor, DenseTensor)
    return tensor.data


# --------------------------------------------------------------------------- good ones


def test_tensors_come_back_with_their_shapes_types_and_values(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    assert set(checkpoint.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert value(checkpoint, name).dtype == tensor.dtype
        assert torch.equal(value(checkpoint, name), tensor)


def test_slices_of_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    values = torch.arange(60.0).view(12, 5).bfloat16()
    save_file({"x": values, "y": values.float()}, tmp_path / SINGLE)
    file = SafetensorsFile(tmp_path / SINGLE)
    for rows in (slice(0, 12), slice(3, 7), slice(11, 12), slice(4, 4), slice(8, 40)):
        assert torch.equal(file.get("x", rows).data, values[rows])
        assert torch.equal(file.get("y", rows).data, values[rows].float())


def test_tensors_stay_valid_when_others_are_read_and_after_close(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    kept = {name: value(checkpoint, name) for name in TENSORS}
    checkpoint.close()
    assert all(torch.equal(kept[name], tensor) for name, tensor in TENSORS.items())


def test_a_sharded_checkpoint_is_one_set_of_tensors(sharded: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded)
    assert set(checkpoint.names()) == {"a", "b", "c"}
    assert torch.equal(value(checkpoint, "c"), TENSORS["c"])


def test_a_tensor_at_an_odd_offset_is_read(tmp_path: Path) -> None:
    data = torch.tensor([1.5, -2.5]).numpy().tobytes()
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    padding = b" " * (len(header) % 2 == 0)
    write_raw(tmp_path / "odd.safetensors", header + padding, data)
    assert torch.equal(SafetensorsFile(tmp_path / "odd.safetensors").get("x").data, torch.tensor([1.5, -2.5]))


def test_reading_tensor_by_tensor_does_not_grow_the_process_by_the_file(tmp_path: Path) -> None:
    count, size = 24, 1 << 20
    save_file({f"t{i}": torch.ones(size) for i in range(count)}, tmp_path / SINGLE)
    file = SafetensorsFile(tmp_path / SINGLE)
    assert file.get("t0").data.sum() == size
    before = resident_bytes()
    for i in range(count):
        file.get(f"t{i}").data.sum()
    assert resident_bytes() - before < count * size * 4 / 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_generation_config_is_read_and_may_be_absent(folder: Path) -> None:
    assert SafetensorsCheckpoint(folder).generation_config == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert SafetensorsCheckpoint(folder).generation_config == {"eos_token_id": [1, 2]}


@pytest.mark.report("Blaizzy/mlx-vlm#1464")
@pytest.mark.report("Blaizzy/mlx-vlm#1329")
@pytest.mark.report("Blaizzy/mlx-vlm#1827")
def test_a_stray_file_beside_the_index_is_not_read_and_warned_of(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"a": torch.zeros(9, 9), "stray": torch.zeros(1)}, sharded / SINGLE)
    with caplog.at_level(logging.WARNING):
        checkpoint = SafetensorsCheckpoint(sharded)
    assert set(checkpoint.names()) == {"a", "b", "c"}
    assert torch.equal(value(checkpoint, "a"), TENSORS["a"])
    assert SINGLE in caplog.text


# --------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, -1])
def test_a_truncated_file_is_an_error_that_names_it(folder: Path, keep: int) -> None:
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LoadError, match=SINGLE):
        SafetensorsCheckpoint(folder)


def test_bytes_after_the_last_tensor_are_an_error(folder: Path) -> None:
    path = folder / SINGLE
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(LoadError, match=r"4 bytes follow"):
        SafetensorsCheckpoint(folder)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b"[" * 100_000,
        [],
        {"x": None},
        {"x": {**ENTRY, "shape": 2}},
        {"x": {**ENTRY, "shape": [2, -1]}},
        {"x": {**ENTRY, "shape": [3]}},
        {"x": {**ENTRY, "shape": [True, 2]}},
        {"x": {**ENTRY, "dtype": None}},
        {"x": {**ENTRY, "dtype": "BF16"}},
        {"x": {**ENTRY, "data_offsets": [8, 0]}},
        {"x": {**ENTRY, "data_offsets": [0]}},
        {"x": {**ENTRY, "data_offsets": [0, 8, 9]}},
        {"x": {**ENTRY, "data_offsets": [4, 12]}},
        {"x": {"dtype": "F32", "shape": [2]}},
        {"x": ENTRY, "y": {**ENTRY, "data_offsets": [4, 12]}},
        {"x": {**ENTRY, "shape": [2**62], "data_offsets": [0, 2**64]}},
    ],
    ids=lambda header: str(header)[:50],
)
def test_a_corrupt_header_is_an_error_that_names_the_file(tmp_path: Path, header: object) -> None:
    write_raw(tmp_path / "bad.safetensors", header, bytes(8))
    with pytest.raises(LoadError, match=r"bad\.safetensors: (damaged|truncated)"):
        SafetensorsFile(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_an_absurd_header_length_is_an_error(tmp_path: Path, length: int) -> None:
    (tmp_path / "bad.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(LoadError, match=rf"header of {length} bytes"):
        SafetensorsFile(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(("dtype", "size"), [("F64", 8), ("I8", 1), ("F8_E4M3", 1), ("BOOL", 1)])
def test_another_dtype_is_unsupported_by_name(tmp_path: Path, dtype: str, size: int) -> None:
    write_raw(
        tmp_path / "q.safetensors",
        {"x": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4 * size]}},
        bytes(4 * size),
    )
    with pytest.raises(Unsupported, match=rf"tensor x is {dtype}.*F32, F16, BF16"):
        SafetensorsFile(tmp_path / "q.safetensors").get("x")


# --------------------------------------------------------------------------- indexes


def test_a_missing_shard_is_an_error_that_names_it(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(LoadError, match=r"two\.safetensors: the file is missing"):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "weight_map"),
        ({}, "weight_map"),
        ([], "weight_map"),
        ({"a": 1}, "weight_map"),
        ({"a": "../one.safetensors"}, "not a file of this folder"),
        ({"a": "one.safetensors", "b": "one.safetensors", "d": "one.safetensors"}, "tensor d .* is not"),
        ({"a": "one.safetensors"}, "tensor b of one.safetensors is not in weight_map"),
        ({"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"}, "tensor c"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_an_error(sharded: Path, weight_map: object, message: str) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(LoadError, match=message):
        SafetensorsCheckpoint(sharded)


# --------------------------------------------------------------------------- config files


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000])
def test_a_broken_config_is_an_error_that_names_the_file(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text)
    with pytest.raises(LoadError, match=rf"/{file}: "):
        SafetensorsCheckpoint(folder)


def test_a_config_that_is_not_text_is_an_error_that_names_the_file(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\x80\x81")
    with pytest.raises(LoadError, match=r"config\.json"):
        SafetensorsCheckpoint(folder)


def test_a_missing_config_is_an_error_that_names_the_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(LoadError, match=r"config\.json: the file is missing"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    ("setting", "named"), [({"quant_method": "awq"}, "'awq'"), ({"bits": 4}, "None"), ("gptq", "'gptq'")]
)
def test_a_quantised_checkpoint_is_refused_by_method(folder: Path, setting: Any, named: str) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": setting}))
    with pytest.raises(Unsupported, match=f"quantization_config: method {named}"):
        SafetensorsCheckpoint(folder)


# --------------------------------------------------------------------------- which reader


def test_a_folder_with_safetensors_opens_as_such(folder: Path) -> None:
    assert isinstance(open_checkpoint(folder), SafetensorsCheckpoint)


def _pickle(folder: Path) -> Path:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    return folder


def _pickle_file(folder: Path) -> Path:
    return _pickle(folder) / "pytorch_model.bin"


def _weights_file(folder: Path) -> Path:
    save_file(TENSORS, folder / SINGLE)
    return folder / SINGLE


def _text_file(folder: Path) -> Path:
    (folder / "notes.txt").write_text("x")
    return folder / "notes.txt"


def _two_ggufs(folder: Path) -> Path:
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"GGUF")
    return folder


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (_pickle, Unsupported, r"pytorch_model\.bin: pickled weights can run any code"),
        (_pickle_file, Unsupported, r"pytorch_model\.bin: pickled weights can run any code"),
        (_weights_file, LoadError, "name the folder"),
        (_text_file, Unsupported, r"notes\.txt: a folder with safetensors files or a \.gguf file"),
        (_two_ggufs, LoadError, r"several \.gguf files; name one: a\.gguf, b\.gguf"),
        (lambda folder: folder / "absent", LoadError, "absent: no such file or folder"),
        (lambda folder: folder, LoadError, r"config\.json: the file is missing"),
    ],
    ids=["pickle", "pickle file", "bare file", "other file", "two ggufs", "absent", "empty"],
)
def test_what_cannot_be_opened_says_why(
    tmp_path: Path, make: Callable[[Path], Path], kind: type[LoadError], message: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(kind, match=message):
        open_checkpoint(path)
