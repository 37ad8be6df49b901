"""What may not grow: memory with the number of requests, time with the length of an answer or the way to it."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from benchmarks.through_http import measure
from ropeway import SamplingParams
from ropeway.engine.completions import CompletionText
from tests.support.gguf_files import smollm2
from tests.support.llms import idle, tiny_llm
from tests.support.scripted_engine import SCRIPT, scripted_tokenizer


@pytest.mark.report("vllm-project/vllm#44490")
def test_requests_that_have_ended_leave_no_memory_behind() -> None:
    params = SamplingParams(max_tokens=1, temperature=0)
    with tiny_llm(max_num_seqs=32, max_batched_tokens=512, kv_blocks=128) as llm:

        def serve(first: int, count: int) -> None:
            for begin in range(first, first + count, 100):
                prompts = [[i % 390 + 3, i // 390 + 3, *range(3, 21)] for i in range(begin, begin + 100)]
                llm.generate(prompts, params, progress=False)

        serve(0, 300)  # fills the pool and every cache of the process
        tracemalloc.start()
        try:
            serve(300, 300)
            before = tracemalloc.get_traced_memory()[0]
            serve(600, 1500)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert llm.engine.steps > 50
        assert idle(llm)
    assert grown / 1500 < 100  # bytes a request


@pytest.mark.report("vllm-project/vllm#24174")
def test_a_token_costs_the_same_at_the_end_of_a_long_answer_as_at_its_beginning() -> None:
    tokenizer = scripted_tokenizer()
    script = tokenizer.encode(SCRIPT)
    answer = [script[i % len(script)] for i in range(8000)]
    stop = tuple(f"one two three four five {word} xx" for word in ("six", "seven", "eight"))
    early, late = [], []
    for _ in range(3):
        completion = CompletionText(0, SamplingParams(max_tokens=8000, stop=stop), tokenizer)
        times = [time.perf_counter()]
        for token in answer:
            completion.push(token, None, None)
            times.append(time.perf_counter())
        early.append(times[1100] - times[100])
        late.append(times[-1] - times[-1001])
    assert min(late) < 2 * min(early)


@pytest.mark.report("vllm-project/vllm#580")
@pytest.mark.report("vllm-project/vllm#1707")
@pytest.mark.report("vllm-project/vllm#4806")
@pytest.mark.report("vllm-project/vllm#9113")
@pytest.mark.report("vllm-project/vllm#14538")
def test_the_server_is_not_half_as_fast_as_the_engine() -> None:
    ratios = measure(str(smollm2()), requests=64, turns=1)
    assert ratios["whole"] > 0.6
    assert ratios["streamed"] > 0.5
