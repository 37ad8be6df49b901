"""A server whose KV pool is too small for its load: it preempts, refuses what can never fit, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.test_serving import complete, ids, token_ids
from tests.support.chat_model import tiny_chat_model
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    """20 blocks of 16: 320 tokens for everybody."""
    flags = ("--kv-blocks", "20", "--max-num-seqs", "6", "--admission", "greedy")  # so that it has to preempt
    with ServerProcess(tiny_chat_model(), *flags) as server:
        yield server


@pytest.mark.report("vllm-project/vllm#16832")
@pytest.mark.report("vllm-project/vllm#11805")
@pytest.mark.report("vllm-project/vllm#5349")
@pytest.mark.report("vllm-project/vllm#41951")
def test_preempted_answers_equal_those_given_alone(small: ServerProcess) -> None:
    fields = {"max_tokens": 150, "temperature": 0, "frequency_penalty": 1.5, "extra": {"min_tokens": 100}}
    prompts = [ids(seed, 40) for seed in range(6)]
    with small.client() as client, ThreadPoolExecutor(6) as pool:
        alone = [complete(client, prompt, **fields) for prompt in prompts]
        before = small.metric("ropeway_num_preemptions_total")
        together = list(pool.map(lambda prompt: complete(client, prompt, **fields), prompts))
        preemptions = small.metric("ropeway_num_preemptions_total") - before
    assert 0 < preemptions <= 3 * 6
    assert [token_ids(answer) for answer in together] == [token_ids(answer) for answer in alone]
    for answer in together:
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (40, 150)


@pytest.mark.report("vllm-project/vllm#39734")
def test_prompt_longer_than_the_whole_pool_is_refused_and_stops_nobody(small: ServerProcess) -> None:
    with small.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, [5] * 1500, max_tokens=8)
        assert "1500" in str(refused.value)
        assert "320" in str(refused.value)
        assert complete(client, [7, 8, 9], max_tokens=4).choices[0].finish_reason == "length"
        assert client.models.list().data[0].model_extra["max_model_len"] == 320  # type: ignore[index]


@pytest.mark.report("vllm-project/vllm#45414")
def test_a_request_that_needs_the_whole_pool_runs_as_soon_as_it_is_empty(small: ServerProcess) -> None:
    with small.client() as client:
        for seed in range(4):
            with pytest.raises(openai.APITimeoutError):
                complete(client, ids(seed, 200), max_tokens=120, timeout=0.01)
        assert complete(client, ids(9, 200), max_tokens=120).choices[0].finish_reason == "length"


@pytest.mark.report("vllm-project/vllm#787")
@pytest.mark.report("vllm-project/vllm#588")
def test_a_group_larger_than_the_pool_is_served_in_turns(small: ServerProcess) -> None:
    with small.client() as client, ThreadPoolExecutor(2) as pool:
        other = pool.submit(complete, client, ids(50, 10), max_tokens=20, temperature=0)
        group = complete(client, ids(51, 100), max_tokens=100, n=8, temperature=0.8, seed=3)
        assert [len(token_ids(group, i)) for i in range(8)] == [100] * 8
        assert other.result().choices[0].finish_reason == "length"
