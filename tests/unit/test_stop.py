import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ropeway.text.stop import StopStrings

ABC = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[start : start + size])
        start += size
    return pieces


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the stop complete first; of those, the one that began first."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


@given(text=ABC, stops=STOPS, sizes=st.lists(st.integers(0, 4), max_size=20), include=st.booleans())
@settings(max_examples=1000, deadline=None)
@example(text="abcb", stops=["abcc", "bc"], sizes=[1, 1, 1, 1], include=False)
@example(text="aab", stops=["ab"], sizes=[1, 1, 1], include=False)
def test_however_the_text_is_cut_the_first_complete_stop_ends_it(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    finder = StopStrings(stops, include)
    shown, hit = "", None
    for piece in cut(text, sizes):
        emitted, hit = finder.push(piece)
        shown += emitted
    shown += finder.finish()
    assert (shown, hit) == expected(text, stops, include)


@given(text=ABC, stops=STOPS, sizes=st.lists(st.integers(0, 4), max_size=20))
@settings(max_examples=500, deadline=None)
def test_exactly_what_may_still_become_a_stop_is_held_back(text: str, stops: list[str], sizes: list[int]) -> None:
    finder = StopStrings(stops)
    seen = shown = ""
    for piece in cut(text, sizes):
        seen += piece
        emitted, hit = finder.push(piece)
        shown += emitted
        if hit is not None:
            return
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert shown == seen[: len(seen) - held]


@pytest.mark.report("vllm-project/vllm#3574")
@pytest.mark.report("vllm-project/vllm#2577")
@pytest.mark.report("sgl-project/sglang#11446")
def test_no_part_of_a_stop_string_leaks_when_it_comes_in_several_tokens() -> None:
    finder = StopStrings([" four five six"])
    emitted = [finder.push(piece) for piece in ["one two", " three", " four", " five", " six", " seven"]]
    assert emitted[:5] == [("one two", None), (" three", None), ("", None), ("", None), ("", " four five six")]
    assert emitted[5] == ("", " four five six")
    assert finder.finish() == ""


@pytest.mark.report("vllm-project/vllm#3672")
@pytest.mark.parametrize(("include", "text"), [(False, "h"), (True, "hello w")])
def test_a_stop_inside_tokens_cuts_at_its_own_first_character(include: bool, text: str) -> None:
    finder = StopStrings(["ello w"], include)
    shown = "".join(finder.push(piece)[0] for piece in ["hel", "lo wor", "ld"])
    assert shown + finder.finish() == text


@pytest.mark.report("vllm-project/vllm#11089")
def test_a_long_stop_string_neither_delays_nor_loses_a_short_answer() -> None:
    stop = "x" * 60
    finder = StopStrings([stop])
    assert finder.push("A short answer") == ("A short answer", None)
    assert finder.push(" xx") == (" ", None)
    assert finder.finish() == "xx"


@pytest.mark.report("vllm-project/vllm#21987")
def test_no_stop_is_looked_for_or_begun_in_free_text() -> None:
    finder = StopStrings(["\n", "ab"])
    assert finder.push("one\ntwo a", free=True) == ("one\ntwo a", None)
    assert finder.push("b and\n") == ("b and", "\n")
    late = StopStrings(["ab"])
    assert late.push("a") == ("", None)
    assert late.push("b", free=True) == ("ab", None)


@pytest.mark.report("vllm-project/vllm#24174")
@pytest.mark.report("sgl-project/sglang#653")
@pytest.mark.report("lablup/mlxcel#633")
@pytest.mark.report("peonist-ai/halogen-flash-server#13")
def test_the_cost_of_a_piece_does_not_grow_with_the_text_before() -> None:
    finder = StopStrings(["a" * 29 + suffix for suffix in "xyz"])
    blocks = []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(1000):
            finder.push("aaab")
        blocks.append(time.perf_counter() - start)
    assert min(blocks[4:]) < 5 * min(blocks[:4])


def test_without_stop_strings_text_passes_through() -> None:
    finder = StopStrings([])
    assert finder.push("anything") == ("anything", None)
    assert finder.finish() == ""
