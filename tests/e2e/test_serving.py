"""The whole line, from the openai client to the kernels: what a client gets."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.e2e.conftest import LIVE
from tests.support.chat_model import CONTEXT, tiny_chat_model
from tests.support.server_process import ServerProcess

QUESTION = [{"role": "user", "content": "Where does the line go?"}]


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 390) for _ in range(length)]


def complete(client: openai.OpenAI, prompt: list[int] | str, **fields: object) -> openai.types.Completion:
    extra = {"ignore_eos": True, "return_token_ids": True, **fields.pop("extra", {})}  # type: ignore[dict-item]
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **fields)  # type: ignore[call-overload, no-any-return]


def token_ids(completion: openai.types.Completion, index: int = 0) -> list[int]:
    return completion.choices[index].model_extra["token_ids"]  # type: ignore[index, return-value]


def test_a_streamed_chat_is_the_unstreamed_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=40, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.report("lmstudio-ai/lmstudio-bug-tracker#2335")
@pytest.mark.report("ollama/ollama#5312")
@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_max_tokens_is_kept_to_the_token(client: openai.OpenAI, count: int) -> None:
    whole = complete(client, ids(1, 9), max_tokens=count)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == count == len(token_ids(whole))
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.report("vllm-project/vllm#16863")
def test_n_completions_are_n_different_ones_and_repeat_with_the_seed(client: openai.OpenAI) -> None:
    first, again = (complete(client, ids(2, 40), max_tokens=12, n=4, temperature=1.0, seed=7) for _ in range(2))
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    outputs = [token_ids(first, i) for i in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    assert outputs == [token_ids(again, i) for i in range(4)]
    assert first.usage is not None
    assert first.usage.completion_tokens == 48


@pytest.mark.report("vllm-project/vllm#17524")
@pytest.mark.report("vllm-project/vllm#21310")
@pytest.mark.report("vllm-project/vllm#1595")
@pytest.mark.report("tenstorrent/vllm#395")
@pytest.mark.report("huggingface/transformers#40479")
def test_sixteen_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    requests = [
        (ids(seed, 5 + 7 * seed), {"max_tokens": 30, "temperature": 0.8 * (seed % 2), "seed": seed})
        for seed in range(16)
    ]
    alone = [complete(client, prompt, **fields) for prompt, fields in requests]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda request: complete(client, request[0], **request[1]), requests))
    assert [token_ids(c) for c in together] == [token_ids(c) for c in alone]
    assert [c.choices[0].text for c in together] == [c.choices[0].text for c in alone]


@pytest.mark.report("vllm-project/vllm#3239")
@pytest.mark.report("vllm-project/vllm#11186")
@pytest.mark.report("vllm-project/vllm#53749")
@pytest.mark.report("vllm-project/vllm#5543")
@pytest.mark.report("tenstorrent/vllm#415")
@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 48, 500])
def test_a_prompt_sent_again_hits_its_full_blocks_and_gives_the_same_tokens(client: openai.OpenAI, length: int) -> None:
    answers = [complete(client, ids(100 + length, length), max_tokens=6, temperature=0) for _ in range(3)]
    assert len({tuple(token_ids(answer)) for answer in answers}) == 1
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
    assert cached == [0, (length - 1) // 16 * 16, (length - 1) // 16 * 16]


@pytest.mark.report("vllm-project/vllm#16016")
@pytest.mark.report("vllm-project/vllm#17045")
@pytest.mark.report("vllm-project/vllm#44701")
def test_tenants_with_other_salts_share_nothing(client: openai.OpenAI) -> None:
    prompt = ids(300, 200)

    def cached(salt: str | None) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        answer = complete(client, prompt, max_tokens=1, extra=extra)
        return answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr, return-value]

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") == 192
    assert cached(None) == 0
    assert cached("two") == 192


@pytest.mark.report("vllm-project/vllm#33418")
@pytest.mark.report("ollama/ollama#299")
@pytest.mark.report("vllm-project/vllm#16445")
def test_what_is_longer_than_the_context_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, ids(4, 12), max_tokens=CONTEXT)
    assert str(CONTEXT) in str(refused.value)
    assert "12" in str(refused.value)
    with pytest.raises(openai.BadRequestError):
        complete(client, ids(4, CONTEXT), max_tokens=1)
    whole = complete(client, ids(4, CONTEXT - 1), max_tokens=1)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == CONTEXT - 1


@pytest.mark.report("vllm-project/vllm#10583")
@pytest.mark.report("vllm-project/vllm#15041")
@pytest.mark.report("vllm-project/vllm#27987")
def test_two_live_requests_may_carry_the_same_id(server: ServerProcess, client: openai.OpenAI) -> None:
    prompts = [ids(5, 20), ids(6, 20)]
    alone = [complete(client, prompt, max_tokens=60, temperature=0) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        both = list(
            pool.map(
                lambda prompt: client.completions.create(
                    model="tiny",
                    prompt=prompt,
                    max_tokens=60,
                    temperature=0,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                    extra_headers={"X-Request-Id": "same"},
                ),
                prompts,
            )
        )
    assert [token_ids(answer) for answer in both] == [token_ids(answer) for answer in alone]


@pytest.mark.report("vllm-project/vllm-ascend#822")
@pytest.mark.report("vllm-project/vllm-omni#6547")
def test_never_more_run_than_there_are_seats_and_the_rest_is_seen_waiting(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    running: list[float] = []
    waiting: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            running.append(server.metric("ropeway_num_requests_running"))
            waiting.append(server.metric("ropeway_num_requests_waiting"))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(40) as pool:
        answers = list(
            pool.map(lambda seed: complete(client, ids(seed, 20), max_tokens=400, temperature=0), range(200, 240))
        )
    done.set()
    watcher.join()
    assert all(answer.usage.completion_tokens == 400 for answer in answers if answer.usage)
    assert 0 < max(running) <= 8
    assert max(waiting) > 0


@pytest.mark.report("openvinotoolkit/model_server#4428")
@pytest.mark.report("InternLM/lmdeploy#1619")
@pytest.mark.report("ROCm/ATOM#1562")
def test_two_hundred_clients_killed_five_times_leave_nothing_behind(server: ServerProcess) -> None:
    def start_and_leave(seed: int) -> None:
        body = {"prompt": ids(seed, 12), "max_tokens": 1500, "ignore_eos": True, "stream": seed % 2 == 0}
        with httpx.Client(timeout=httpx.Timeout(0.6, connect=20)) as http:
            try:
                with http.stream("POST", f"{server.url}/v1/completions", json=body) as r:
                    assert r.status_code in (200, 429)
                    next(r.iter_bytes())
            except (httpx.ReadTimeout, StopIteration):
                pass

    for round_ in range(5):
        with ThreadPoolExecutor(200) as pool:
            list(pool.map(start_and_leave, range(round_ * 200, round_ * 200 + 200)))
        server.until("ropeway_num_requests_running", 0)
        server.until("ropeway_num_requests_waiting", 0)
        server.until(LIVE, 0)
        with server.client() as client:
            assert complete(client, ids(round_, 8), max_tokens=2).choices[0].finish_reason == "length"
    cached = server.metric('ropeway_kv_blocks{state="cached"}')
    assert cached + server.metric('ropeway_kv_blocks{state="free"}') == server.metric("ropeway_kv_blocks")


def test_a_trace_of_a_running_server_shows_the_requests_that_it_served(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    management = f"http://127.0.0.1:{server.management_port}"
    assert httpx.post(f"{management}/v1/trace/start").json() == {"status": "recording"}
    complete(client, ids(1, 30), max_tokens=5)
    events = httpx.post(f"{management}/v1/trace/stop").json()["traceEvents"]
    assert {"plan", "submit", "settle", "forward", "sample"} <= {event["name"] for event in events}
    assert sum(event["name"].startswith("request ") for event in events) == 1
    assert not [e for e in httpx.post(f"{management}/v1/trace/stop").json()["traceEvents"] if e["ph"] == "X"]
    assert httpx.post(f"{server.url}/v1/trace/start").status_code == 404  # the management listener's alone


@pytest.mark.report("vllm-project/vllm#50767")
def test_sampling_fields_that_requests_leave_out_are_those_of_the_setting() -> None:
    """Penalties too; a request's own go before them, and a name that is none is told at start."""
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def ids(server: ServerProcess, **fields: float) -> list[int]:
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, **fields}, timeout=60)
        return answer.json()["choices"][0]["token_ids"]  # type: ignore[no-any-return]

    setting = json.dumps({"presence_penalty": 2, "frequency_penalty": 2})
    with ServerProcess(tiny_chat_model(), "--sampling-defaults", setting) as server:
        by_default, own = ids(server), ids(server, presence_penalty=0, frequency_penalty=0)
        assert ids(server, presence_penalty=2, frequency_penalty=2) == by_default != own
        assert len(set(by_default)) > len(set(own))
    for wrong in ('{"presence_penality": 1}', '{"temperature": -1}', "[]", "{"):
        server = ServerProcess(tiny_chat_model(), "--sampling-defaults", wrong).start()
        assert server.process.wait(30) != 0
        assert "sampling_defaults" in server.log()
        server.end()
