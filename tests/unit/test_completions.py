"""From the engine's tokens to a client's text: stop strings, hidden end tokens, usage."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from ropeway.engine.client import Delta, Usage
from ropeway.engine.completions import CompletionText, Router
from ropeway.outcome import Finished, LogprobColumns, PromptLogprobColumns, Refusal, Started, StepOutput
from ropeway.request import FinishReason, SamplingParams, Timeline, TokenLogprob
from tests.support.scripted_engine import EOS, scripted_tokenizer

TOKENIZER = scripted_tokenizer()
TEXT = "hello world, one two 🚀 three"
TOKENS = TOKENIZER.encode(TEXT)


def completion(**params: object) -> CompletionText:
    return CompletionText(0, SamplingParams(**{"max_tokens": 500, **params}), TOKENIZER)


def push_all(each: CompletionText, tokens: list[int]) -> list[Delta]:
    """Deltas of a completion whose last token meets the length limit, up to the one that ends it."""
    deltas = []
    for place, token in enumerate(tokens):
        last = Finished(1, FinishReason.LENGTH) if place == len(tokens) - 1 else None
        deltas.append(each.push(token, None, last))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def step(
    tokens: dict[int, int], finished: list[Finished] | None = None, started: list[Started] | None = None
) -> StepOutput:
    return StepOutput(
        ids=np.array(list(tokens), dtype=np.int64),
        tokens=np.array(list(tokens.values()), dtype=np.int32),
        finished=finished or [],
        started=started or [],
    )


# ---------------------------------------------------------------------- CompletionText


def test_the_deltas_together_are_the_text_and_the_tokens() -> None:
    deltas = push_all(completion(), TOKENS)
    assert text(deltas) == TEXT
    assert [token for delta in deltas for token in delta.token_ids] == TOKENS
    assert [delta.finish_reason for delta in deltas] == [*[None] * (len(TOKENS) - 1), FinishReason.LENGTH]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_is_found_and_never_shown_before(include: bool) -> None:
    stop = "ld, one t"
    begin = TEXT.index(stop)
    assert stop not in [TOKENIZER.decode([token]) for token in TOKENS]
    deltas = push_all(completion(stop=(stop,), include_stop_str_in_output=include), TOKENS)
    assert text(deltas) == TEXT[: begin + len(stop) if include else begin]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
    assert len(deltas) < len(TOKENS)
    shown = ""
    for delta in deltas[:-1]:
        shown += delta.text
        assert not shown.endswith(stop[0] * 2)
        assert TEXT.startswith(shown)
        assert len(shown) <= begin


def test_a_beginning_of_a_stop_string_at_the_end_is_text_after_all() -> None:
    assert text(push_all(completion(stop=("three times",)), TOKENS)) == TEXT


def test_where_the_time_went_comes_with_the_last_delta_unless_a_stop_string_ended_it_before() -> None:
    timeline = Timeline(decode_s=1.0)
    each = completion()
    assert each.push(TOKENS[0], None, None).timeline is None
    assert each.push(TOKENS[1], None, Finished(1, FinishReason.LENGTH, timeline=timeline)).timeline is timeline
    stopped = push_all(completion(stop=(TEXT[:3],)), TOKENS)[-1]
    assert (stopped.finish_reason, stopped.timeline) == (FinishReason.STOP, None)


def test_half_a_character_is_never_shown_not_even_at_the_end() -> None:
    whole = TOKENIZER.encode("a🚀")
    assert len(whole) > 2
    assert text(push_all(completion(), whole[:-1])) == "a"
    assert text(push_all(completion(), whole)) == "a🚀"


@pytest.mark.report("vllm-project/vllm#21987")
def test_a_stop_string_among_the_first_min_tokens_is_text() -> None:
    tokens = TOKENIZER.encode("one\ntwo\nthree\nfour")
    for least in range(len(tokens)):
        deltas = push_all(completion(stop=("\n",), min_tokens=least), tokens)
        count = sum(len(delta.token_ids) for delta in deltas)
        assert count >= least
        if deltas[-1].finish_reason is FinishReason.STOP:
            first_after = next(
                i for i, token in enumerate(tokens) if i + 1 >= least and "\n" in TOKENIZER.decode([token])
            )
            assert count == first_after + 1


def test_the_text_of_an_end_token_is_hidden_and_its_id_is_not() -> None:
    each = completion(skip_special_tokens=False)
    each.push(TOKENS[0], None, None)
    delta = each.push(EOS, None, Finished(1, FinishReason.STOP, EOS))
    assert (delta.text, delta.token_ids) == ("", [EOS])
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token_id_is_shown_only_if_asked_and_is_the_reason(include: bool) -> None:
    each = completion(stop_token_ids=(TOKENS[1],), include_stop_str_in_output=include)
    shown = each.push(TOKENS[0], None, None).text
    delta = each.push(TOKENS[1], None, Finished(1, FinishReason.STOP, TOKENS[1]))
    assert shown + delta.text == TOKENIZER.decode(TOKENS[: 2 if include else 1])
    assert delta.stop_reason == TOKENS[1]


def test_what_was_held_back_comes_with_an_end_without_a_token() -> None:
    each = completion(stop=("hello you",))
    assert each.push(TOKENIZER.encode("hello")[0], None, None).text == ""
    for token in TOKENIZER.encode("hello")[1:]:
        each.push(token, None, None)
    delta = each.end(Finished(1, FinishReason.ABORT))
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("hello", [], FinishReason.ABORT)


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    each = CompletionText(3, SamplingParams(stop=("x",)), None)
    delta = each.push(5, None, Finished(1, FinishReason.LENGTH))
    assert (delta.index, delta.text, delta.token_ids, delta.finish_reason) == (3, "", [5], FinishReason.LENGTH)


# ---------------------------------------------------------------------- Router


def routed(count: int = 1, **params: object) -> tuple[Router[str], list[Usage]]:
    router: Router[str] = Router()
    usages = [Usage(prompt_tokens=2) for _ in range(count)]
    for request_id, usage in enumerate(usages, 1):
        router.add(request_id, f"owner {request_id}", completion(**params), usage)
    return router, usages


def test_every_owner_gets_its_own_news() -> None:
    router, usages = routed(2)
    news, stopped = router.receive(step({1: TOKENS[0], 2: TOKENS[1]}, started=[Started(1, 16)]))
    assert [(owner, delta.token_ids) for owner, delta in news] == [("owner 1", TOKENS[:1]), ("owner 2", TOKENS[1:2])]
    assert stopped == []
    assert [(u.completion_tokens, u.cached_tokens) for u in usages] == [(1, 16), (1, 0)]


def test_a_stop_string_ends_a_completion_here_and_is_reported_for_the_engine() -> None:
    router, (usage,) = routed(stop=("world",))
    stopped: list[int] = []
    pushed = 0
    while not stopped:
        _, stopped = router.receive(step({1: TOKENS[pushed]}))
        pushed += 1
    assert stopped == [1]
    assert len(router) == 0
    assert usage.completion_tokens == pushed
    late = step({1: TOKENS[pushed]}, finished=[Finished(1, FinishReason.LENGTH)])
    assert router.receive(late) == ([], [])
    assert usage.completion_tokens == pushed  # rows computed meanwhile are nobody's


def test_a_stop_string_in_the_last_token_need_not_be_reported() -> None:
    router, _ = routed(stop=(TOKENIZER.decode(TOKENS[:1]),))
    ((_, delta),), stopped = router.receive(step({1: TOKENS[0]}, finished=[Finished(1, FinishReason.LENGTH)]))
    assert delta.finish_reason is FinishReason.STOP
    assert stopped == []


def test_late_messages_about_a_dropped_completion_are_ignored() -> None:
    router, usages = routed(2)
    assert router.drop(1)
    assert not router.drop(1)
    news, stopped = router.receive(
        step({1: TOKENS[0], 2: TOKENS[0]}, finished=[Finished(1, FinishReason.STOP)], started=[Started(1, 16)])
    )
    assert [owner for owner, _ in news] == ["owner 2"]
    assert stopped == []
    assert (usages[0].completion_tokens, usages[0].cached_tokens) == (0, 0)


def test_a_failure_without_a_token_reaches_its_owner() -> None:
    router, _ = routed()
    refusal, timeline = Refusal("QueueTimeout", "too long"), Timeline(queued_s=3.0)
    finished = Finished(1, FinishReason.ERROR, refusal=refusal, timeline=timeline)
    ((owner, delta),), _ = router.receive(step({}, finished=[finished]))
    assert (owner, delta.finish_reason, delta.refusal, delta.timeline) == (
        "owner 1",
        FinishReason.ERROR,
        refusal,
        timeline,
    )
    assert len(router) == 0


def test_log_probabilities_go_with_the_rows_they_are_of() -> None:
    router, _ = routed(3, logprobs=2)
    output = StepOutput(
        ids=np.array([1, 2, 3], dtype=np.int64),
        tokens=np.array([5, 6, 7], dtype=np.int32),
        logprobs=LogprobColumns(
            row=np.array([0, 2], dtype=np.int32),
            chosen=np.array([-0.5, -0.75], dtype=np.float32),
            top_ids=np.array([[5, 9], [8, 7]], dtype=np.int32),
            top=np.array([[-0.5, -1.0], [-0.25, -0.75]], dtype=np.float32),
        ),
    )
    news, _ = router.receive(output)
    found = [None if d.logprobs is None else [(p.token_id, p.logprob, p.top) for p in d.logprobs] for _, d in news]
    assert found == [[(5, -0.5, [(5, -0.5), (9, -1.0)])], None, [(7, -0.75, [(8, -0.25), (7, -0.75)])]]


def test_each_gets_as_many_alternatives_as_it_asked_for() -> None:
    router: Router[str] = Router()
    for request_id, most in ((1, 0), (2, 1), (3, 2)):
        completion = CompletionText(0, SamplingParams(logprobs=most, prompt_logprobs=most), TOKENIZER)
        router.add(request_id, str(request_id), completion, Usage(prompt_tokens=2))
    top = {"top_ids": np.array([[8, 9]] * 3, dtype=np.int32), "top": np.array([[-0.5, -1.0]] * 3, dtype=np.float32)}
    chosen = np.full(3, -2.0, dtype=np.float32)
    rows, ids = np.arange(3, dtype=np.int32), np.array([1, 2, 3], dtype=np.int64)
    prompts = PromptLogprobColumns(ids, rows * 0 + 1, rows + 5, chosen, rows + 3, **top)
    news, _ = router.receive(
        StepOutput(ids=ids, tokens=rows, logprobs=LogprobColumns(rows, chosen, **top), prompt_logprobs=prompts)
    )
    for most, (_, delta) in enumerate(news):
        want = [(8, -0.5), (9, -1.0)][:most]
        assert delta.logprobs == [TokenLogprob(most, -2.0, want)]
        assert delta.prompt_logprobs == [None, TokenLogprob(most + 5, -2.0, want, most + 3)]


def test_log_probabilities_of_a_prompt_come_once_however_often_it_is_computed() -> None:
    router: Router[str] = Router()
    for index in range(2):
        sibling_or_not = CompletionText(index, SamplingParams(n=2, prompt_logprobs=1), TOKENIZER)
        router.add(1 + index, str(index), sibling_or_not, Usage(prompt_tokens=2))

    def told(*positions: int) -> PromptLogprobColumns:
        n = len(positions)
        chosen = np.array(positions, dtype=np.float32) * -1
        tokens = np.array(positions, dtype=np.int32) + 10
        top = np.zeros((n, 1), dtype=np.int32)
        ids = np.ones(n, dtype=np.int64)
        return PromptLogprobColumns(ids, tokens - 10, tokens, chosen, tokens * 0 + 1, top, top.astype(np.float32))

    def columns(tokens: dict[int, int], *positions: int) -> list[tuple[str, Delta]]:
        return router.receive(msgspec.structs.replace(step(tokens), prompt_logprobs=told(*positions)))[0]

    assert columns({}, 1, 2) == []
    assert columns({}, 1, 2, 3) == []  # seated again
    (_, first), (_, sibling) = columns({1: 5, 2: 6}, 4)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [each.logprob for each in first.prompt_logprobs if each is not None] == [-1, -2, -3, -4]
    assert sibling.prompt_logprobs is None
    (_, later), _ = columns({1: 7, 2: 8}, 1, 2, 3, 4)  # after a preemption
    assert later.prompt_logprobs is None


def test_usage_of_n_completions_is_one_sum() -> None:
    router: Router[str] = Router()
    usage = Usage(prompt_tokens=2)
    for request_id in (1, 2):
        router.add(request_id, "owner", completion(), usage)
    router.receive(step({1: 5, 2: 6}, started=[Started(1, 16), Started(2, 16)]))
    router.receive(step({2: 6}))
    assert (usage.completion_tokens, usage.cached_tokens) == (3, 16)
