import itertools
import re
import time

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ropeway.text.detokenizer import IncrementalDetokenizer
from ropeway.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_fallback, byte_level, metaspace, word_piece

BYTE_LEVEL = Tokenizer(byte_level())
BYTE_FALLBACK = Tokenizer(byte_fallback())
METASPACE = Tokenizer(metaspace())
WORD_PIECE = Tokenizer(word_piece())


def pieces_of(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    """What comes out when ``ids`` arrive in pieces of the given sizes (the last one repeated)."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    pieces, start = [], 0
    for cut in [*cuts, *[max(cuts[-1], 1)] * len(ids)]:
        pieces.append(detokenizer.push(ids[start : start + cut]))
        start += cut
    pieces.append(detokenizer.finish())
    return pieces


def bytes_of(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bytes:
    return b"".join(tokenizer.token_bytes(id_) for id_ in ids if not (skip and id_ in tokenizer.special_ids))


def without_incomplete_end(data: bytes) -> str:
    """Python's incremental decoder would hold half a surrogate, too, which nothing can make a character."""
    for size in (3, 2, 1):
        if len(data) >= size and _may_become_a_character(data[-size:]):
            return data[:-size].decode(errors="replace")
    return data.decode(errors="replace")


def _may_become_a_character(data: bytes) -> bool:
    ends = [bytes(end) for count in (1, 2, 3) for end in itertools.product((0x80, 0x90, 0xA0, 0xBF), repeat=count)]
    decoded = [(data + end).decode(errors="replace") for end in ends]
    return any(len(text) == 1 and text != "\ufffd" for text in decoded)


def ids_of(tokenizer: Tokenizer, beyond: int = 5) -> st.SearchStrategy[list[int]]:
    """Any ids: mostly of the vocabulary, special ones and a few beyond it included."""
    return st.lists(st.integers(0, tokenizer.vocab_size - 1 + beyond), max_size=40)


CUTS = st.lists(st.integers(0, 5), min_size=1, max_size=10)
TEXT = st.text(
    st.one_of(st.sampled_from(" aeiou\n.你好🚀🧠é𠮷"), st.characters(exclude_categories=["Cs"])), max_size=40
)


@given(ids=ids_of(BYTE_LEVEL), cuts=CUTS, skip=st.booleans())
@settings(max_examples=500, deadline=None)
@example(ids=[2, 220, 0], cuts=[1], skip=True)
def test_byte_level_pieces_add_up_to_decode_but_for_an_incomplete_end(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    data = bytes_of(BYTE_LEVEL, ids, skip)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == data.decode(errors="replace")
    assert "".join(pieces_of(BYTE_LEVEL, ids, cuts, skip)) == without_incomplete_end(data)


@pytest.mark.report("vllm-project/vllm#29953")
@pytest.mark.report("ml-explore/mlx-lm#1754")
@pytest.mark.report("triton-inference-server/tensorrtllm_backend#332")
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, METASPACE], ids=["bytes", "fallback", "metaspace"])
@given(text=TEXT, cuts=CUTS, skip=st.booleans(), lead=st.sampled_from(["", " ", "  "]))
@settings(max_examples=200, deadline=None)
@example(text="one two", cuts=[1], skip=True, lead=" ")
@example(text="two  blanks", cuts=[1], skip=False, lead="  ")
def test_any_text_streams_as_it_decodes_leading_blanks_included(
    tokenizer: Tokenizer, text: str, cuts: list[int], skip: bool, lead: str
) -> None:
    ids = tokenizer.encode(lead + text)
    assert "".join(pieces_of(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=ids_of(BYTE_FALLBACK), cuts=CUTS, skip=st.booleans())
@settings(max_examples=500, deadline=None)
@example(ids=[240, 163], cuts=[0], skip=False)
def test_byte_fallback_pieces_add_up_to_decode_unless_a_run_of_byte_tokens_is_invalid_after_a_character(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    text = "".join(pieces_of(BYTE_FALLBACK, ids, cuts, skip))
    data = bytes_of(BYTE_FALLBACK, ids, skip)
    try:
        data.decode()
        assert text == BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)
    except UnicodeDecodeError:
        runs = re.compile("\ufffd+")
        assert runs.sub("\ufffd", text) == runs.sub("\ufffd", without_incomplete_end(data.removeprefix(b" ")))


@given(ids=ids_of(METASPACE), cuts=CUTS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_metaspace_pieces_add_up_to_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    assert "".join(pieces_of(METASPACE, ids, cuts, skip)) == METASPACE.decode(ids, skip_special_tokens=skip)


@given(ids=ids_of(WORD_PIECE), cuts=CUTS, skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_vocabulary_whose_tokens_depend_on_neighbours_streams_as_it_decodes(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    assert "".join(pieces_of(WORD_PIECE, ids, cuts, skip)) == WORD_PIECE.decode(ids, skip_special_tokens=skip)


@pytest.mark.report("antonellof/ferrox#124")
@pytest.mark.report("Luce-Org/lucebox#641")
@pytest.mark.report("mlc-ai/mlc-llm#1142")
@pytest.mark.report("Blaizzy/mlx-vlm#1076")
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
def test_characters_cut_over_several_tokens_come_out_whole(tokenizer: Tokenizer) -> None:
    text = "repeat: 🧠🚀你好𠮷 end"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    pieces = pieces_of(tokenizer, ids, [1], True)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.report("kekzl/imp#1310")
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
def test_a_cut_inside_a_character_drops_the_incomplete_tail_streaming_or_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🚀c你")
    for n in range(len(ids) + 1):
        streamed = "".join(pieces_of(tokenizer, ids[:n], [1], True))
        at_once = "".join(pieces_of(tokenizer, ids[:n], [max(n, 1)], True))
        assert streamed == at_once
        assert "ab🚀c你".startswith(streamed)


@pytest.mark.report("penta2himajin/qwisp#134")
def test_after_split_and_invalid_characters_the_stream_goes_on() -> None:
    good = BYTE_LEVEL.encode("長い答え")
    (lone,) = (id_ for id_ in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(id_) == b"\xff")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert detokenizer.push(good[:1]) == ""
    assert detokenizer.push([lone]) == "\ufffd\ufffd"
    assert "".join(detokenizer.push([id_]) for id_ in good * 20) == "長い答え" * 20


@pytest.mark.report("vllm-project/vllm#24174")
def test_the_cost_of_a_token_does_not_grow_with_the_history() -> None:
    class Counting:
        """Stands for the library's tokenizer and counts the ids it is asked to decode."""

        def __init__(self, backend: tokenizers.Tokenizer) -> None:
            self.backend = backend
            self.decoded = 0

        def __getattr__(self, name: str) -> object:
            return getattr(self.backend, name)

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            self.decoded += len(ids)
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    counting = Counting(word_piece())
    detokenizer = IncrementalDetokenizer(Tokenizer(counting))  # type: ignore[arg-type]
    ids = Tokenizer(word_piece()).encode("one two three four") * 500
    for id_ in ids:
        detokenizer.push([id_])
    assert counting.decoded < 6 * len(ids)

    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    token = BYTE_LEVEL.encode("你")
    blocks = []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(2000):
            detokenizer.push(token)
        blocks.append(time.perf_counter() - start)
    assert min(blocks[4:]) < 5 * min(blocks[:4])


def test_ids_beyond_the_vocabulary_show_nothing_and_do_not_count_as_the_beginning() -> None:
    ids = [METASPACE.vocab_size + 7, *METASPACE.encode("one two")]
    assert "".join(pieces_of(METASPACE, ids, [1], True)) == "one two"
