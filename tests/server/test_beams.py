"""``use_beam_search`` over HTTP: what it takes, what does not go with it, and what it is charged as."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ropeway.outcome import Refusal
from ropeway.request import MAX_BEAM_WIDTH
from tests.server.asking import CHAT, COMPLETIONS, chat_body, check_error, check_serving, completion_body
from tests.server.test_api_keys import ask, header, write
from tests.server.test_tools import CALL, WEATHER
from tests.support.chat_templates import QWEN
from tests.support.scripted_engine import SCRIPT, ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving

BEAMS: dict[str, Any] = {"use_beam_search": True}


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Served]:
    file = write(tmp_path / "keys.toml")
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer()), api_keys=str(file)) as served:
        yield served


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return (chat_body if path == CHAT else completion_body)(**{**BEAMS, **fields})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_n_best_are_answered_in_their_order(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=body_of(path, n=3)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    scores = [choice["score"] for choice in answer["choices"]]
    assert scores == sorted(scores, reverse=True)
    sums = [choice["cumulative_logprob"] for choice in answer["choices"]]
    assert sums[0] == pytest.approx(-0.25 * 5)
    assert answer["usage"]["completion_tokens"] == 15
    first = answer["choices"][0]
    text = first["message"]["content"] if path == CHAT else first["text"]
    assert SCRIPT.startswith(text)
    assert first["finish_reason"] == "length"
    (plain,) = http.post(path, json={**body_of(path), "use_beam_search": False}).json()["choices"]
    assert not {"score", "cumulative_logprob"} & plain.keys()


def test_best_of_is_the_width_of_text_completions(served: Served, http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json=body_of(COMPLETIONS, n=2, best_of=4, max_tokens=3)).json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] == 6
    questions = [params for _, params, _ in served.engine.submitted]
    assert [params.beam_step for params in questions] == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert {params.logprobs for params in questions} == {8}
    check_error(http.post(COMPLETIONS, json=body_of(COMPLETIONS, n=2, best_of=1)), 400, "at least n", param="best_of")
    check_error(http.post(COMPLETIONS, json=body_of(COMPLETIONS, best_of=129)), 400, "128", param="best_of")
    check_error(http.post(CHAT, json=body_of(CHAT, best_of=4)), 400, param="best_of")


def test_a_model_s_recommendations_for_sampling_do_not_count() -> None:
    engine = ScriptedEngine(tokenizer=scripted_tokenizer())
    with serving(engine, {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}) as served:
        assert httpx.post(served.url + CHAT, json=body_of(CHAT, n=2), timeout=20).status_code == 200
        for _, params, _ in engine.submitted:
            assert (params.temperature, params.top_p, params.repetition_penalty) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("stream", True, False),
        ("temperature", 0.5, 0),
        ("temperature", 1.0, 0.0),
        ("top_p", 0.9, 1),
        ("top_k", 5, -1),
        ("min_p", 0.1, 0),
        ("repetition_penalty", 1.1, 1.0),
        ("presence_penalty", 0.5, 0),
        ("frequency_penalty", -0.5, 0),
        ("logit_bias", {"5": 1.0}, {}),
        ("seed", 7, None),
        ("min_tokens", 2, 0),
        ("bad_words", ["x"], []),
        ("allowed_token_ids", [5, 6], None),
        ("prompt_logprobs", 0, None),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("structured_outputs", {"regex": "a+"}, None),
        ("guided_choice", ["a", "b"], None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_field_that_does_not_go_with_beams_is_refused_by_name_unless_it_is_off(
    served: Served, http: httpx.Client, path: str, name: str, on: object, off: object
) -> None:
    check_error(http.post(path, json=body_of(path, n=2, **{name: on})), 400, name, param=name)
    assert not served.engine.submitted
    assert http.post(path, json=body_of(path, n=2, **{name: off})).status_code == 200


def test_fields_of_one_route_that_do_not_go_with_beams_are_refused_by_name(http: httpx.Client) -> None:
    check_error(http.post(COMPLETIONS, json=body_of(COMPLETIONS, echo=True)), 400, param="echo")
    for path in (CHAT, COMPLETIONS):
        check_error(http.post(path, json=body_of(path, stream_options={})), 400, param="stream_options")
        plain = {**body_of(path, length_penalty=2.0), "use_beam_search": False}
        check_error(http.post(path, json=plain), 400, "use_beam_search", param="length_penalty")
        assert http.post(path, json={**plain, "length_penalty": 1}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 0), ("n", MAX_BEAM_WIDTH + 1), ("length_penalty", 11), ("max_tokens", 0), ("stop", [""]), ("n", "2")],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_value_out_of_range_is_refused_by_the_name_that_the_request_has_for_it(
    http: httpx.Client, path: str, name: str, value: object
) -> None:
    check_error(http.post(path, json=body_of(path, **{name: value})), 400, name.split("_")[0], param=name)


def test_chats_have_their_own_names_for_fields(http: httpx.Client) -> None:
    check_error(http.post(CHAT, json=body_of(CHAT, max_completion_tokens=0)), 400, param="max_completion_tokens")
    check_error(http.post(CHAT, json=body_of(CHAT, logprobs=True, top_logprobs=21)), 400, "20", param="top_logprobs")
    check_error(http.post(CHAT, json=body_of(CHAT, top_logprobs=2)), 400, param="top_logprobs")
    choice = http.post(CHAT, json=body_of(CHAT, logprobs=True, top_logprobs=2)).json()["choices"][0]
    assert [len(each["top_logprobs"]) for each in choice["logprobs"]["content"]] == [2] * 5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stop_strings_and_stop_token_ids_end_beams(served: Served, http: httpx.Client, path: str) -> None:
    body = body_of(path, max_tokens=20, length_penalty=0, stop=["keeps"])
    (choice,) = http.post(path, json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "keeps")
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == "The line "
    stop = served.engine.script[2]
    body = body_of(path, max_tokens=20, length_penalty=0, stop_token_ids=[stop], return_token_ids=True)
    (choice,) = http.post(path, json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == served.engine.script[:3]


def test_the_end_token_ends_the_search(served: Served, http: httpx.Client) -> None:
    served.engine.reset("hello")
    (choice,) = http.post(COMPLETIONS, json=body_of(COMPLETIONS, max_tokens=60, length_penalty=0)).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", None)
    assert len(served.engine.submitted) == len(served.engine.script) + 1


def test_calls_of_tools_are_read_in_every_beam_and_cannot_be_forced() -> None:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer(QWEN), script=CALL)) as served:
        body = body_of(CHAT, n=2, max_tokens=200, length_penalty=0, tools=[WEATHER])
        first, second = httpx.post(served.url + CHAT, json=body, timeout=60).json()["choices"]
        (call,) = first["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
        assert first["finish_reason"] == "tool_calls"
        assert second["score"] < first["score"]
        for forced in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            refused = httpx.post(served.url + CHAT, json={**body, "tool_choice": forced}, timeout=20)
            check_error(refused, 400, "use_beam_search", param="tool_choice")
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
        refused = httpx.post(served.url + CHAT, json={**body, "tools": [strict]}, timeout=20)
        check_error(refused, 400, "strict", param="tools")


# ------------------------------------------------------------------------------ room and charges


def test_more_beams_than_can_ever_be_held_are_refused(served: Served, http: httpx.Client) -> None:
    most = served.app.state.ropeway.most_requests
    assert most > MAX_BEAM_WIDTH
    prompts = ["Hi"] * (most // 10 + 1)
    check_error(http.post(COMPLETIONS, json=body_of(COMPLETIONS, prompt=prompts, n=10)), 400, str(most), param="prompt")
    check_error(
        http.post(COMPLETIONS, json=body_of(COMPLETIONS, prompt=prompts, best_of=10)), 400, str(most), param="prompt"
    )
    assert not served.engine.submitted


def test_searches_that_do_not_fit_together_are_refused_before_they_begin_and_one_under_way_is_not() -> None:
    engine = ScriptedEngine(tokenizer=scripted_tokenizer(), max_num_seqs=4)
    with serving(engine, max_queue=8) as served, ThreadPoolExecutor(2) as pool:
        assert served.app.state.ropeway.most_requests == 12
        engine.first_delay_s = 0.02
        asked = pool.submit(httpx.post, served.url + CHAT, json=body_of(CHAT, n=8, max_tokens=30), timeout=60)
        while not engine.submitted:
            time.sleep(0.005)
        check_error(httpx.post(served.url + CHAT, json=body_of(CHAT, n=5), timeout=20), 429, "8 beams are under way")
        assert httpx.post(served.url + CHAT, json=body_of(CHAT, n=4), timeout=60).status_code == 200
        answer = asked.result()
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == 8
        assert httpx.post(served.url + CHAT, json=body_of(CHAT, n=12), timeout=60).status_code == 200
        assert served.idle()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_the_engine_refuses_or_fails_at_ends_the_search_with_its_status(
    served: Served, http: httpx.Client, path: str
) -> None:
    served.engine.refusal = Refusal("Shed", "the queue predicts 9 s", retry_after_s=7.2)
    assert check_error(http.post(path, json=body_of(path, n=3)), 429, "predicts")["code"] == "shed"
    served.engine.accepts = 2  # of the second step's three
    check_error(http.post(path, json=body_of(path, n=3)), 429, "predicts")
    assert served.idle()
    served.engine.reset()
    served.engine.fail_after = 0
    check_error(http.post(path, json=body_of(path, n=3)), 500, "scripted failure")
    served.engine.reset()
    check_serving(http)


def test_a_key_is_charged_with_the_answers_and_has_one_request_under_way(keyed: Served) -> None:
    keyed.engine.first_delay_s = 0.02
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(keyed, "bob", n=4, **BEAMS), range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 429]
    keyed.engine.first_delay_s = 0.0
    assert ask(keyed, "bob", n=4, **BEAMS).status_code == 200
    assert ask(keyed, "bob", n=4, **BEAMS, max_tokens=10**6).status_code == 400
    assert ask(keyed, "bob", n=4, **BEAMS).status_code == 200
    assert ask(keyed, "dave", n=2, **BEAMS).status_code == 200
    check_error(ask(keyed, "dave", n=2, **BEAMS), 429, "10 tokens a minute")


def test_a_search_can_be_cancelled(keyed: Served) -> None:
    keyed.engine.first_delay_s = 0.05
    headers = {**header("alice"), "x-request-id": "wide"}
    body = body_of(CHAT, n=4, max_tokens=900)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, keyed.url + CHAT, json=body, headers=headers, timeout=20)
        while len(keyed.engine.submitted) < 10:
            time.sleep(0.005)
        under_way = httpx.get(f"{keyed.url}/v1/requests/wide", headers=header("alice")).json()
        assert under_way["phase"] in ("queued", "prefill", "decode")
        told = httpx.delete(f"{keyed.url}/v1/requests/wide", headers=header("alice")).json()
        assert told["cancelled"] is True
        assert check_error(asked.result(), 499)["code"] == "cancelled"
    assert keyed.idle(1.0)
    submitted = len(keyed.engine.submitted)
    told = httpx.get(f"{keyed.url}/v1/requests/wide", headers=header("alice")).json()
    assert told["error"] == "cancelled"
    assert len(keyed.engine.submitted) == submitted
