"""Names of KV blocks: what two prefixes must share to share blocks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ropeway.cache.keys import block_key, chain, root_key

ROOT = root_key()


def tokens(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def keys(*ids: int, size: int = 2, root: bytes = ROOT) -> list[bytes]:
    return list(chain(root, tokens(*ids), size))


@pytest.mark.report("vllm-project/vllm#44701")
def test_salt_adapter_and_private_group_of_the_same_text_have_different_roots() -> None:
    roots = [ROOT, root_key(salt=b"7"), root_key(adapter=b"7"), root_key(private=7), root_key(salt=b"8")]
    assert len(set(roots)) == len(roots)


def test_fields_cannot_run_into_each_other() -> None:
    pairs = [(b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"", b"abc"), (b"a" + b"\x00" * 8, b"")]
    assert len({root_key(salt=salt, adapter=adapter) for salt, adapter in pairs}) == len(pairs)


def test_only_full_blocks_have_keys() -> None:
    assert [len(keys(*range(length))) for length in range(6)] == [0, 0, 1, 1, 2, 2]


def test_a_chain_is_its_blocks_one_after_another_and_can_be_continued() -> None:
    whole = keys(1, 2, 3, 4, 5, 6)
    assert whole[0] == block_key(ROOT, tokens(1, 2).tobytes())
    assert whole[1] == block_key(whole[0], tokens(3, 4).tobytes())
    assert [*whole[:1], *keys(3, 4, 5, 6, root=whole[0])] == whole


@pytest.mark.report("vllm-project/vllm#12621")
def test_the_same_block_after_another_prefix_has_another_key() -> None:
    first, other = keys(1, 1, 2, 2, 3, 3), keys(1, 1, 9, 9, 3, 3)
    assert first[0] == other[0]
    assert first[1] != other[1]
    assert first[2] != other[2]


def test_the_order_of_tokens_and_the_root_count() -> None:
    assert keys(1, 2) != keys(2, 1)
    assert keys(1, 2) != keys(1, 2, root=root_key(salt=b"a"))


@pytest.mark.report("openvinotoolkit/openvino.genai#3722")
def test_keys_have_256_bits_and_no_two_prompts_share_one() -> None:
    found = {keys(i, i // 7)[0] for i in range(20_000)}
    assert len(found) == 20_000
    assert {len(key) for key in found} == {32}
    for byte in range(32):  # every byte of the key depends on the tokens
        assert len({key[byte] for key in found}) == 256
