"""How large the KV pool becomes, and what is said when it cannot."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ropeway.config import CacheConfig, Config, ModelConfig
from ropeway.devices.base import Device
from ropeway.devices.memory import Memory
from ropeway.engine.assembly import assemble, pool_blocks, pool_sizes
from ropeway.errors import ConfigError, OutOfMemory
from ropeway.execution.part import ModelPart, kv_dtype
from ropeway.execution.sizes import Loaded, PoolSizes
from ropeway.llm import LLM
from ropeway.models.model import Model
from ropeway.request import SamplingParams
from ropeway.settings import resolve
from tests.support.chat_model import CONTEXT, tiny_chat_model
from tests.support.devices import device

GIB = 1 << 30
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class SmallDevice:
    """A device of a certain size, with blocks of one MiB."""

    available: int

    def memory(self) -> Memory:
        return Memory(total=2 * self.available, available=self.available)

    def kv_block_bytes(self, *_: Any) -> int:
        return BLOCK_BYTES


def blocks(available: int, context: int = 1000, ranks: int = 1, **fields: Any) -> int:
    part = ModelPart.__new__(ModelPart)
    part.config = resolve({"max_num_seqs": 4, **fields}, environ={}, given_as="argument").config
    part.device = cast(Device, SmallDevice(available))
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": "bf16"}
    part.model = cast(Model, SimpleNamespace(spec=SimpleNamespace(context_length=context), **sizes))
    part.local_ranks = ranks
    return pool_blocks(part.config, part, part.available())


def test_by_default_there_is_room_for_the_batch_at_the_typical_length() -> None:
    assert blocks(8 * GIB, context=1000) == 4 * 63  # shorter than typical: the whole context
    assert blocks(8 * GIB, context=4096) == 4 * 128  # two thousand tokens each
    assert blocks(32 * GIB, context=100_000, max_num_seqs=1) == 6250  # one whole context at least


@pytest.mark.report("vllm-project/vllm#1298")
def test_by_default_half_of_the_free_memory_is_left_alone() -> None:
    assert blocks(100 * BLOCK_BYTES) == 50


def test_ranks_of_one_host_share_its_memory() -> None:
    assert blocks(100 * BLOCK_BYTES, ranks=2) == 25
    with pytest.raises(OutOfMemory, match="the largest pool here is 33 blocks"):
        blocks(100 * BLOCK_BYTES, ranks=3, kv_blocks=34)


def test_keys_that_int4_full_keeps_beside_the_pool_are_counted_first() -> None:
    beside = 4 * 2 * 2 * 16 * 32 * 2  # sequences, layers, heads, features, positions, bytes
    assert blocks(100 * BLOCK_BYTES + beside, kv_dtype="int4-full") == 50
    assert blocks(100 * BLOCK_BYTES + beside - 1, kv_dtype="int4-full") == 49


def test_kv_blocks_and_kv_memory_are_taken_as_asked() -> None:
    assert blocks(8 * GIB, kv_blocks=77) == 77
    assert blocks(8 * GIB, kv_memory=0.5) == 512


def test_all_of_the_memory_may_be_asked_for_and_not_a_block_more() -> None:
    assert blocks(100 * BLOCK_BYTES, kv_blocks=100) == 100
    with pytest.raises(OutOfMemory) as refused:
        blocks(1024 * BLOCK_BYTES, kv_blocks=2048)
    for words in ("2048 blocks", "needs 2.00 GiB", "1.00 GiB are available", "--kv-blocks 1024"):
        assert words in refused.value.message
    assert refused.value.param == "kv_blocks"


def test_no_memory_for_the_pool_names_what_would_fit() -> None:
    with pytest.raises(OutOfMemory, match=r"needs 3.00 GiB, 1.00 GiB are available; the largest pool here is 1024"):
        blocks(GIB, kv_memory=3.0)
    with pytest.raises(OutOfMemory, match=r"a KV pool of 0 blocks .*largest pool here is 1 blocks"):
        blocks(BLOCK_BYTES)  # half of one block


def test_memory_for_less_than_a_block_names_the_least() -> None:
    with pytest.raises(OutOfMemory, match=r"kv_memory 0.0001 GiB is less than one block of 16 tokens .*0.0010 GiB"):
        blocks(GIB, kv_memory=0.0001)


@pytest.mark.parametrize(
    ("asked", "model", "kept"),
    [("auto", "fp32", "fp32"), ("auto", "q8_0", "bf16"), ("fp32", "bf16", "fp32"), ("int4", "bf16", "int4")],
)
def test_keys_and_values_are_kept_in_the_type_asked_for(asked: Any, model: str, kept: str) -> None:
    of_type = cast(Model, SimpleNamespace(dtype=model))
    assert kv_dtype(CacheConfig(kv_dtype=asked), of_type) == kept


@pytest.mark.parametrize(("name", "kv", "size"), [("reference", "int4-full", 16), ("cpu", "int4", 8)])
def test_a_type_that_a_device_cannot_store_is_refused_before_the_weights_are_read(
    name: str, kv: Any, size: int
) -> None:
    config = Config(model=ModelConfig(), cache=CacheConfig(kv_dtype=kv, block_size=size))
    read: list[int] = []
    with pytest.raises(ConfigError) as refused:
        assemble(config, tiny_chat_model(), print, device=device(name), progress=lambda done, _: read.append(done))
    assert refused.value.param in ("kv_dtype", "block_size")
    assert not read


@pytest.mark.report("vllm-project/vllm#2418")
@pytest.mark.parametrize("asked", [None, CONTEXT])
def test_a_context_beyond_the_pool_is_lowered_to_it_with_a_log_line(
    asked: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(
        model=ModelConfig(model=str(tiny_chat_model()), max_model_len=asked), cache=CacheConfig(kv_blocks=8)
    )
    with caplog.at_level(logging.WARNING):
        assembly = assemble(config, tiny_chat_model(), lambda _: None, device=device("reference"))
    assert (assembly.info.max_model_len, assembly.info.num_blocks) == (128, 8)
    assert "max_model_len lowered from 2048 to 128, what the KV pool of 8 blocks holds" in caplog.text


def test_a_context_within_the_pool_is_kept_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(model=ModelConfig(model=str(tiny_chat_model()), max_model_len=100), cache=CacheConfig(kv_blocks=8))
    assembly = assemble(config, tiny_chat_model(), lambda _: None, device=device("reference"))
    assert assembly.info.max_model_len == 100
    assert not caplog.records


@pytest.mark.report("vllm-project/vllm#34076")
@pytest.mark.parametrize("available", [BLOCK_BYTES, 7 * BLOCK_BYTES + 5, GIB])
def test_the_largest_pool_that_an_error_names_is_one_that_starts(available: int) -> None:
    with pytest.raises(OutOfMemory) as refused:
        blocks(available, kv_memory=50.0)
    (largest,) = re.findall(r"--kv-blocks (\d+)", refused.value.message)
    assert blocks(available, kv_blocks=int(largest)) == int(largest)
    with pytest.raises(OutOfMemory):
        blocks(available, kv_blocks=int(largest) + 1)


@pytest.mark.report("vllm-project/vllm#1298")
def test_the_longest_requests_end_as_asked_when_they_fill_batch_and_pool() -> None:
    settings = {"kv_blocks": 16, "max_num_seqs": 8, "max_batched_tokens": 64, "threads": 1, "admission": "greedy"}
    with LLM(str(tiny_chat_model()), **settings) as llm:
        longest = SamplingParams(max_tokens=llm.info.max_model_len - 20, ignore_eos=True)
        outputs = llm.generate([[i + 5] * 20 for i in range(8)], longest, progress=False)
        assert [len(output.token_ids) for output in outputs] == [236] * 8
        assert llm.engine.stats().preemptions > 0


# --------------------------------------------------------------------------- a second set of activations


def sizes(available: int, second: int, **fields: Any) -> PoolSizes:
    part = ModelPart.__new__(ModelPart)
    given = {"max_num_seqs": 4, "tensor_parallel_size": 2, "micro_batch": "auto", **fields}
    part.config = resolve(given, environ={}, given_as="argument").config
    part.device = cast(Device, SmallDevice(available))
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": "bf16", "vocab_size": 9}
    part.model = cast(Model, SimpleNamespace(spec=SimpleNamespace(context_length=1000), **shape))
    part.micro_batches = part.config.parallel.micro_batch != "off"
    mine = Loaded(available=available, second_activations=second, weight_bytes=0)
    other = Loaded(available=available + GIB, second_activations=0, weight_bytes=0)
    return pool_sizes(part.config, part, [mine, other], None)


def test_a_second_set_of_activations_is_taken_from_the_pool_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        with_second = sizes(100 * BLOCK_BYTES, 20 * BLOCK_BYTES)
    assert (with_second.num_blocks, with_second.micro_batches) == (40, True)
    assert "a second set of activations takes up to 0.02 GiB on each rank" in caplog.text
    without = sizes(100 * BLOCK_BYTES, 0, micro_batch="off")
    assert (without.num_blocks, without.micro_batches) == (50, False)


def test_auto_goes_without_micro_batches_where_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    short = sizes(100 * BLOCK_BYTES, 20 * BLOCK_BYTES, kv_blocks=90)
    assert (short.num_blocks, short.micro_batches) == (90, False)
    assert "micro_batch is off: there is no room for a second set of activations" in caplog.text


def test_memory_too_short_for_the_second_activation_set_is_an_error_that_names_it() -> None:
    with pytest.raises(OutOfMemory, match=r"micro_batch takes 0.02 GiB of it for a second set of activations"):
        sizes(100 * BLOCK_BYTES, 20 * BLOCK_BYTES, kv_blocks=90, micro_batch="on")


def test_all_ranks_get_what_the_one_with_the_least_memory_can_have() -> None:
    assert sizes(60 * BLOCK_BYTES, 0, micro_batch="off").num_blocks == 30
