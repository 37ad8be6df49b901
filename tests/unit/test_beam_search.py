"""The search by itself, over models that are made up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ropeway.engine.beam_search import BeamSearch
from ropeway.engine.messages import EngineInfo
from ropeway.errors import ContextLengthExceeded, InvalidRequest
from ropeway.request import (
    MAX_BEAM_LOGPROBS,
    MAX_BEAM_WIDTH,
    MAX_LOGPROBS,
    BeamSearchParams,
    Completion,
    FinishReason,
    SamplingParams,
)
from ropeway.text.tokenizer import Tokenizer
from ropeway.tiers import DEFAULT_TIERS
from tests.support.reference_beams import Top, reference_beams
from tests.support.scripted_engine import EOS, scripted_tokenizer

TOKENIZER = scripted_tokenizer()
PROMPT = [7, 1, 4]
Model = Callable[[Sequence[int]], Top]
"""(token id, log-probability) of all tokens, the likeliest first."""


def info(vocab: int = 12, end_ids: Sequence[int] = (), context: int = 64) -> EngineInfo:
    return EngineInfo(
        model="m", vocab_size=vocab, max_model_len=context, num_blocks=9, block_size=16, max_num_seqs=8,
        end_ids=list(end_ids), tiers=list(DEFAULT_TIERS),
    )  # fmt: skip


def noise(seed: int, vocab: int = 12) -> Model:
    """What comes next follows from all tokens before, at random."""

    def likeliest(tokens: Sequence[int]) -> Top:
        rng = random.Random(f"{seed} {list(tokens)}")
        logits = [rng.gauss(0, 2) for _ in range(vocab)]
        total = math.log(sum(map(math.exp, logits)))
        return sorted(((token, logit - total) for token, logit in enumerate(logits)), key=lambda each: -each[1])

    return likeliest


def writer(*texts: str) -> Model:
    """After the prompt come the tokens of one of the texts, the first is the likeliest, and then the end token; other
    tokens are unlikely."""
    scripts = [[*TOKENIZER.encode(text, add_special_tokens=False), EOS] for text in texts]

    def likeliest(tokens: Sequence[int]) -> Top:
        said = list(tokens[len(PROMPT) :])
        next_tokens: dict[int, float] = {}
        for rank, script in enumerate(scripts):
            if script[: len(said)] == said and len(said) < len(script):
                next_tokens.setdefault(script[len(said)], -0.1 * (rank + 1))
        others = [(token, -9.0 - token / 400) for token in range(3, 400) if token not in next_tokens]
        return [*sorted(next_tokens.items(), key=lambda each: -each[1]), *others]

    return likeliest


def begin(where: EngineInfo, tokenizer: Tokenizer | None = None, **params: Any) -> BeamSearch:
    return BeamSearch(PROMPT, BeamSearchParams(**params), where, tokenizer)


def run(search: BeamSearch, model: Model, more: int = 0) -> tuple[list[Completion], int]:
    """(the answers, the steps it took). ``more``: tokens that are told of beside those asked for."""
    steps = 0
    while not search.over:
        most = (search.question.logprobs or 0) + more
        search.step([model(tokens)[:most] for tokens in search.prompts])
        steps += 1
    return search.answers(), steps


def told(answers: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [(each.token_ids, each.cumulative_logprob, each.score) for each in answers]


# ------------------------------------------------------------------------------ the search


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 8),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    ends=st.integers(0, 3),
    stops=st.integers(0, 2),
)
@example(seed=3, width=1, max_tokens=5, length_penalty=-1.0, ends=3, stops=2)  # an end token after the 2 likeliest
def test_the_answers_are_those_of_a_search_that_never_stops_early(
    seed: int, width: int, max_tokens: int, length_penalty: float, ends: int, stops: int
) -> None:
    end_ids, stop_ids = range(ends), range(5, 5 + stops)
    search = begin(
        info(end_ids=end_ids),
        beam_width=width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        stop_token_ids=tuple(stop_ids),
    )
    most = max(2 * width, width + ends + stops)
    answers, steps = run(search, noise(seed))
    want = reference_beams(
        PROMPT,
        lambda tokens: noise(seed)(tokens)[:most],
        width=width,
        max_tokens=max_tokens,
        end_ids={*end_ids, *stop_ids},
        length_penalty=length_penalty,
    )
    assert told(answers) == [tuple(each) for each in want]
    assert steps <= max_tokens
    for index, answer in enumerate(answers):
        ended = answer.token_ids[-1] in {*end_ids, *stop_ids}
        assert answer.index == index
        assert answer.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert answer.stop_reason == (answer.token_ids[-1] if answer.token_ids[-1] in stop_ids else None)


@pytest.mark.report("vllm-project/vllm#31081")
@pytest.mark.report("vllm-project/vllm#47126")
@pytest.mark.parametrize("seed", range(5))
def test_more_log_probabilities_than_a_search_needs_change_no_answer(seed: int) -> None:
    where = info(end_ids=[0])
    exact, *others = (run(begin(where, beam_width=3, max_tokens=20), noise(seed), more)[0] for more in (0, 1, 2, 6))
    assert all(told(other) == told(exact) for other in others)
    assert told(run(begin(where, beam_width=3, max_tokens=20, logprobs=11), noise(seed))[0]) == told(exact)
    uneven = begin(where, beam_width=3, max_tokens=20)
    while not uneven.over:
        uneven.step([noise(seed)(tokens)[: 6 + place] for place, tokens in enumerate(uneven.prompts)])
    assert told(uneven.answers()) == told(exact)


def test_an_end_token_that_is_told_of_but_not_among_the_likeliest_ends_nothing() -> None:
    def likeliest(tokens: Sequence[int]) -> Top:
        return [(5, -0.1), (6, -0.2), (0, -0.3)]

    search = begin(info(end_ids=[0]), beam_width=1, max_tokens=4, length_penalty=-2.0)
    (answer,), _ = run(search, likeliest, more=1)
    assert answer.token_ids == [5, 5, 5, 5]  # ended at once it would have the better score


@pytest.mark.parametrize("length_penalty", [-1.0, 10.0])  # short answers, long ones
@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_tokens_told_are_those_at_the_place_of_each_token(seed: int, length_penalty: float) -> None:
    fields = {"beam_width": 4, "max_tokens": 6, "logprobs": 4, "length_penalty": length_penalty}
    answers, _ = run(begin(info(end_ids=[0, 1]), **fields), noise(seed))
    for answer in answers:
        for place, each in enumerate(answer.logprobs or ()):
            assert each.top == noise(seed)([*PROMPT, *answer.token_ids[:place]])[:4]


def test_of_fewer_answers_than_beams_the_best_are_told_and_the_search_may_end_sooner() -> None:
    where = info(end_ids=[0, 1])
    for seed in range(20):
        fields = {"beam_width": 5, "max_tokens": 12, "length_penalty": 0.0}
        (all_of_them, most_steps), (best, steps) = (run(begin(where, **fields, n=n), noise(seed)) for n in (None, 2))
        assert len(all_of_them) == 5
        assert told(best) == told(all_of_them)[:2]
        assert steps <= most_steps <= 12


def test_a_search_ends_when_no_beam_can_come_to_a_better_answer() -> None:
    (answer,), steps = run(begin(info(400, [EOS]), beam_width=1, max_tokens=50, length_penalty=0.0), writer("one"))
    assert answer.token_ids[-1] == EOS
    assert steps == len(answer.token_ids)
    _, steps = run(begin(info(400, [EOS]), beam_width=1, max_tokens=50, length_penalty=10.0), writer("one"))
    assert steps == 50  # an answer of fifty tokens might still be better


def test_equal_candidates_go_by_their_parents_rank_and_their_ids() -> None:
    def flat(tokens: Sequence[int]) -> Top:
        return [(token, -1.0) for token in (9, 3, 5, 1, 0, 2)]

    answers, _ = run(begin(info(), beam_width=3, max_tokens=2), flat)
    assert [answer.token_ids for answer in answers] == [[0, 0], [0, 1], [0, 2]]


def test_an_end_token_is_in_the_sum_and_not_in_the_length() -> None:
    (answer,), _ = run(begin(info(400, [EOS]), beam_width=1, max_tokens=9, length_penalty=1.0), writer("x"))
    assert answer.token_ids == [*TOKENIZER.encode("x"), EOS]
    assert answer.cumulative_logprob == pytest.approx(-0.2)
    assert answer.score == pytest.approx(-0.2 / (len(PROMPT) + 1))


def test_end_tokens_are_ordinary_ones_under_ignore_eos_but_stop_token_ids_are_not() -> None:
    where = info(400, [EOS])
    fields = {"beam_width": 1, "max_tokens": 5, "ignore_eos": True}
    (answer,), _ = run(begin(where, **fields), writer("x"))
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(answer.token_ids) == 5
    (answer,), _ = run(begin(where, **fields, length_penalty=0.0, stop_token_ids=(EOS,)), writer("x"))
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, EOS)


# ------------------------------------------------------------------------------ text


def test_answers_have_their_text_without_the_end_token() -> None:
    texts = ("The line keeps moving", "The cabins 🚀 get on", "hello")
    search = begin(info(400, [EOS]), TOKENIZER, beam_width=3, max_tokens=30, length_penalty=0.0, logprobs=2)
    answers, _ = run(search, writer(*texts))
    assert {answer.text for answer in answers} == set(texts)
    for answer in answers:
        assert answer.finish_reason is FinishReason.STOP
        assert answer.logprobs is not None
        assert [each.token_id for each in answer.logprobs] == answer.token_ids
        assert sum(each.logprob for each in answer.logprobs) == pytest.approx(answer.cumulative_logprob)
        assert {len(each.top) for each in answer.logprobs} == {2}


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_a_beam_and_the_others_go_on(include: bool) -> None:
    search = begin(
        info(400, [EOS]),
        TOKENIZER,
        beam_width=2,
        max_tokens=40,
        length_penalty=0.0,
        stop=("keeps",),
        include_stop_str_in_output=include,
    )
    answers, _ = run(search, writer("The line keeps moving", "The cabins get on"))
    by_reason = {answer.stop_reason: answer.text for answer in answers}
    assert by_reason == {"keeps": "The line keeps" if include else "The line ", None: "The cabins get on"}


def test_a_stop_string_in_every_beginning_still_leaves_as_many_answers() -> None:
    pieces = {TOKENIZER.token_text(token) for token in range(3, 260)}
    stops = tuple(sorted(piece for piece in pieces if len(piece) == 1 and piece.isascii()))[:16]
    search = begin(info(400), TOKENIZER, beam_width=4, max_tokens=6, stop=stops)
    answers, _ = run(search, noise(3, 400))
    assert len(answers) == 4
    assert len({tuple(answer.token_ids) for answer in answers}) == 4


# ------------------------------------------------------------------------------ what is asked


@pytest.mark.report("vllm-project/vllm#10792")
def test_a_step_may_ask_for_more_log_probabilities_than_a_user() -> None:
    search = begin(info(2000), beam_width=25)
    assert search.question.logprobs == 50 > MAX_LOGPROBS
    assert (search.question.beam_step, search.question.max_tokens) == (0, 1)
    widest = BeamSearchParams(beam_width=MAX_BEAM_WIDTH, stop_token_ids=tuple(range(64)))
    question = BeamSearch(PROMPT, widest, info(2000, [70, 71]), None).question
    assert 2 * MAX_BEAM_WIDTH <= (question.logprobs or 0) <= MAX_BEAM_LOGPROBS
    with pytest.raises(InvalidRequest, match="logprobs"):
        SamplingParams(logprobs=MAX_LOGPROBS + 1)
    with pytest.raises(InvalidRequest, match="logprobs"):
        BeamSearchParams(beam_width=25, logprobs=MAX_LOGPROBS + 1)


def test_what_the_engine_can_never_serve_to_its_end_is_refused_at_once() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"64 tokens.*the prompt has 3 and 62 output"):
        begin(info(), beam_width=2, max_tokens=62)
    with pytest.raises(InvalidRequest, match="empty"):
        BeamSearch([], BeamSearchParams(beam_width=2), info(), None)
    with pytest.raises(InvalidRequest, match="stop_token_ids names token id 12"):
        begin(info(), beam_width=2, stop_token_ids=(12,))
    with pytest.raises(InvalidRequest, match=r"beam_width is 11, and 2 tokens end an answer.*12 tokens") as refused:
        begin(info(end_ids=[0, 1]), beam_width=11)
    assert refused.value.param == "beam_width"
    answers, steps = run(begin(info(end_ids=[0, 1]), beam_width=10, max_tokens=1), noise(1))
    assert (len(answers), steps) == (10, 1)


def test_without_max_tokens_a_beam_goes_on_to_the_end_of_the_context() -> None:
    answers, _ = run(begin(info(context=12), beam_width=2, max_tokens=None), noise(5))
    assert {len(answer.token_ids) for answer in answers} == {12 - len(PROMPT)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", MAX_BEAM_WIDTH + 1),
        ("beam_width", 2.0),
        ("n", 0),
        ("n", 4),
        ("max_tokens", 0),
        ("length_penalty", float("nan")),
        ("length_penalty", 10.5),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("ignore_eos", "no"),
        ("logprobs", -1),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BeamSearchParams(**{"beam_width": 3, field: value})
    assert refused.value.param == field


def test_a_single_stop_string_is_one_stop_and_lists_are_taken() -> None:
    params = BeamSearchParams(beam_width=2, stop="END", stop_token_ids=[7])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("END",), (7,))
