"""Digests of weights: the same wherever a model lies, another for other weights, and quick."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropeway.errors import LoadError
from ropeway.loading.digest import HEAD_BYTES, PIECE_BYTES, PIECES, array_digest, settings_digest, weights_digest
from tests.support.tiny_models import tiny_checkpoint


def write(path: Path, size: int, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


def change(path: Path, at: int, count: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(count)
        file.seek(at)
        file.write(bytes(byte ^ 1 for byte in old))


def test_a_digest_is_the_same_after_the_folder_is_copied(tmp_path: Path) -> None:
    write(tmp_path / "a" / "model-00001-of-00002.safetensors", 3 << 20, 1)
    write(tmp_path / "a" / "model-00002-of-00002.safetensors", 100, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    digest = weights_digest(tmp_path / "a")
    assert weights_digest(tmp_path / "b") == digest
    assert len(bytes.fromhex(digest)) == 32


def test_files_beside_the_weights_have_no_part_in_it(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", 1000)
    digest = weights_digest(tmp_path)
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "README.md"):
        write(tmp_path / name, 50)
    assert weights_digest(tmp_path) == digest


def test_a_folder_with_a_gguf_file_and_the_file_itself_are_the_same_weights(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", 5000)
    assert weights_digest(tmp_path) == weights_digest(file)


def test_all_parts_of_a_split_gguf_model_count_whichever_is_named(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"m-0000{i}-of-00003.gguf", 5000, i) for i in (1, 2, 3)]
    digests = {weights_digest(part) for part in (*parts, tmp_path)}
    assert len(digests) == 1
    change(parts[2], 4000)
    assert weights_digest(parts[0]) not in digests


def test_links_to_a_files_contents_are_followed(tmp_path: Path) -> None:
    blob = write(tmp_path / "blobs" / "abc", 4000)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(blob)
    shutil.copytree(tmp_path / "linked", tmp_path / "real")
    assert weights_digest(tmp_path / "linked") == weights_digest(tmp_path / "real")
    change(blob, 10)
    assert weights_digest(tmp_path / "linked") != weights_digest(tmp_path / "real")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 3 << 20), data=st.data())
def test_every_byte_of_a_file_up_to_seventeen_mib_counts(tmp_path: Path, size: int, data: st.DataObject) -> None:
    assert HEAD_BYTES + PIECES * PIECE_BYTES == 17 << 20
    file = write(tmp_path / "model.safetensors", size)
    digest = weights_digest(tmp_path)
    change(file, data.draw(st.integers(0, size - 1)))
    assert weights_digest(tmp_path) != digest


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_change_of_more_than_a_256th_of_a_large_file_counts_wherever_it_is(
    tmp_path: Path, data: st.DataObject
) -> None:
    size = data.draw(st.integers(100 << 20, 300 << 20))
    file = sparse(tmp_path / "model.safetensors", size)
    digest = weights_digest(tmp_path)
    changed = size // 256 + 1
    change(file, data.draw(st.integers(0, size - changed)), changed)
    assert weights_digest(tmp_path) != digest


def test_names_sizes_and_the_last_byte_count(tmp_path: Path) -> None:
    file = sparse(tmp_path / "model.safetensors", 200 << 20)
    digests = {weights_digest(tmp_path)}
    change(file, (200 << 20) - 1)
    digests.add(weights_digest(tmp_path))
    sparse(file, (200 << 20) + 1)
    digests.add(weights_digest(tmp_path))
    sparse(tmp_path / "more.safetensors", 0)
    digests.add(weights_digest(tmp_path))
    (tmp_path / "more.safetensors").rename(tmp_path / "less.safetensors")
    digests.add(weights_digest(tmp_path))
    assert len(digests) == 5


def test_a_gigabyte_takes_less_than_a_fifth_of_a_second(tmp_path: Path) -> None:
    sparse(tmp_path / "model.safetensors", 1 << 30)
    times = []
    for _ in range(3):
        began = time.process_time()
        weights_digest(tmp_path)
        times.append(time.process_time() - began)
    assert min(times) < 0.2


def test_real_checkpoints_have_digests_of_their_own() -> None:
    names = ("llama", "qwen2-sliding", "qwen3")
    assert len({weights_digest(tiny_checkpoint(name)) for name in names}) == len(names)


def test_a_model_that_is_missing_or_has_no_weights_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"absent\.gguf"):
        weights_digest(tmp_path / "absent.gguf")
    with pytest.raises(LoadError, match=r"no safetensors or \.gguf files"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(LoadError, match=r"model\.safetensors: cannot be read"):
        weights_digest(tmp_path)


def test_settings_have_a_digest_that_does_not_depend_on_their_order() -> None:
    one = settings_digest({"rope_theta": 10000.0, "model_type": "llama", "rope_scaling": {"a": 1, "b": None}})
    assert one == settings_digest({"rope_scaling": {"b": None, "a": 1}, "model_type": "llama", "rope_theta": 10000.0})
    assert one != settings_digest({"rope_scaling": {"b": None, "a": 1}, "model_type": "llama", "rope_theta": 10001.0})
    assert len(bytes.fromhex(one)) == 32


def test_arrays_differ_by_type_shape_and_every_bit() -> None:
    array = np.array([[0.0, 1.0]], dtype=np.float32)
    digest = array_digest(array)
    assert array_digest(array.copy()) == digest
    for other in (-array, array.T, array.view(np.int32), np.array([[-0.0, 1.0]], dtype=np.float32)):
        assert array_digest(other) != digest
