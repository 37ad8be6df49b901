"""The Python API over a tiny model: what goes in, what comes out, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from ropeway import LLM, AsyncLLM, FinishReason, SamplingParams
from ropeway.devices.memory import Memory
from ropeway.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    QueueTimeout,
)
from ropeway.execution.local import LocalWork
from ropeway.plan import Plan, Result
from tests.support.chat_model import tiny_chat_model
from tests.support.llms import GREEDY, idle, model_copy, one, tiny_llm, tokens

PROMPTS = [[5, 6, 7], list(range(30, 70)), [9], list(range(100, 120))]
QUESTION = [{"role": "user", "content": "Where does the line go?"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with tiny_llm() as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert idle(shared)


def test_prompts_are_answered_in_their_order_as_each_is_alone(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [output.token_ids for output in outputs] == [tokens(llm, prompt)[0] for prompt in PROMPTS]
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}


def test_one_prompt_may_come_without_a_list_and_gives_a_list(llm: LLM) -> None:
    assert tokens(llm, [5, 6, 7]) == tokens(llm, [[5, 6, 7]])
    assert tokens(llm, "hello world") == tokens(llm, ["hello world"])
    assert llm.generate([], GREEDY) == []


def test_text_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "The line keeps moving"
    by_text = one(llm, text, max_tokens=8)
    by_ids = one(llm, llm.tokenizer.encode(text), max_tokens=8)
    assert (by_text.prompt, by_ids.prompt) == (text, None)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == llm.tokenizer.decode(by_text.token_ids).rstrip("�")


def test_text_and_token_ids_may_be_mixed_and_arrays_are_token_ids(llm: LLM) -> None:
    mixed = tokens(llm, ["hello", [5, 6, 7], np.array([5, 6, 7])])
    assert mixed[0] == tokens(llm, "hello")[0]
    assert mixed[1] == mixed[2] == tokens(llm, np.array([5, 6, 7], dtype=np.int32))[0]


def test_parameters_are_one_for_all_or_one_per_prompt(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3, 9)]
    assert [len(ids) for ids in tokens(llm, PROMPTS, each)] == [1, 5, 3, 9]
    assert [len(ids) for ids in tokens(llm, PROMPTS, each[1])] == [5] * 4
    with pytest.raises(InvalidRequest, match="2 params for 4 prompts"):
        llm.generate(PROMPTS, each[:2])


def test_without_parameters_sixteen_tokens_are_sampled(llm: LLM) -> None:
    (output,) = llm.generate([5, 6], progress=False)
    assert 0 < len(output.token_ids) <= 16


@pytest.mark.report("vllm-project/vllm#16863")
def test_n_completions_have_indexes_and_tokens_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=10, ignore_eos=True)
    first, again = (llm.generate([5, 6, 7], params, progress=False)[0] for _ in range(2))
    assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in first.outputs}) == 4
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]


def test_log_probabilities_are_of_the_chosen_and_of_the_likeliest(llm: LLM) -> None:
    output = one(llm, [5, 6, 7], max_tokens=6, logprobs=3, ignore_eos=True)
    assert output.logprobs is not None
    assert [logprob.token_id for logprob in output.logprobs] == output.token_ids
    for logprob in output.logprobs:
        values = [value for _, value in logprob.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert logprob.top[0] == (logprob.token_id, logprob.logprob)  # greedy takes the likeliest
        assert -math.log(400) <= logprob.logprob <= 0
    assert one(llm, [5, 6, 7], max_tokens=6).logprobs is None


def test_cached_tokens_are_those_of_an_earlier_prompt() -> None:
    prompt = list(range(200, 240))
    with tiny_llm() as llm:
        assert [one(llm, prompt, max_tokens=1).cached_tokens for _ in range(2)] == [0, 32]
    with tiny_llm(prefix_cache=False) as llm:
        assert [one(llm, prompt, max_tokens=1).cached_tokens for _ in range(2)] == [0, 0]


def test_a_chat_is_its_rendered_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=10)
    (answer,) = llm.chat(QUESTION, params, progress=False)
    assert answer.token_ids == one(llm, llm.tokenizer.encode_chat(QUESTION), max_tokens=10).token_ids
    several = llm.chat([QUESTION, [{"role": "user", "content": "Hi"}]], params, progress=False)
    assert len(several) == 2
    assert several[0].token_ids == answer.token_ids


def test_a_streamed_chat_is_the_whole_one_in_pieces(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    (whole,) = llm.chat(QUESTION, params, progress=False)
    deltas = list(llm.stream_chat(QUESTION, params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [d.finish_reason for d in deltas if d.finish_reason] == [whole.finish_reason]
    assert len(deltas) == len(whole.token_ids)


def test_a_stream_left_early_gives_everything_back(llm: LLM) -> None:
    for taken in (1, 5):
        stream = llm.stream_chat(QUESTION, SamplingParams(max_tokens=1000, ignore_eos=True))
        for _ in range(taken):
            next(stream)
        assert llm.engine.has_work
        stream.close()  # what leaving a for loop does
        assert idle(llm)
    assert llm.engine.scheduler.wasted_rows["cancel"] >= 2
    assert len(tokens(llm, [5])[0]) == 12


@pytest.mark.parametrize(
    "bad", [[], [5, 400], [-1], [5] * 2048, [1.5], [True], ["a"], [None], [[5]], ""], ids=lambda bad: str(bad)[:12]
)
def test_a_bad_prompt_is_refused_before_any_runs(llm: LLM, bad: object) -> None:
    before = llm.engine.steps
    with pytest.raises(InvalidRequest):
        llm.generate([[5, 6], bad], GREEDY)  # type: ignore[list-item]
    assert llm.engine.steps == before


def test_prompt_longer_than_the_whole_pool_is_refused_naming_the_numbers() -> None:
    with tiny_llm(kv_blocks=4) as llm:
        with pytest.raises(ContextLengthExceeded, match=r"64 tokens \(KV pool: 4 blocks of 16\); the prompt has 70"):
            one(llm, [5] * 70, max_tokens=1)
        assert len(one(llm, [5] * 60, max_tokens=4, ignore_eos=True).token_ids) == 4


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_max_tokens_zero_or_negative_or_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        SamplingParams(max_tokens=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_parameters_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must be a finite number"):
        SamplingParams(**{field: value})


def test_a_lone_surrogate_in_a_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.generate("hi \ud83e", GREEDY)
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.chat([{"role": "user", "content": "hi \ud83e"}])


def test_unknown_model_and_unknown_setting_are_refused_by_name() -> None:
    with pytest.raises(ModelNotFound, match="/no/such/model"):
        LLM("/no/such/model")
    with pytest.raises(ConfigError, match=r"max_num_seq.*max_num_seqs"):
        tiny_llm(max_num_seq=3)


@pytest.mark.report("vllm-project/vllm#17385")
def test_generate_works_any_number_of_times(llm: LLM) -> None:
    first = tokens(llm, PROMPTS)
    for _ in range(9):
        assert tokens(llm, PROMPTS) == first


def test_offline_requests_are_of_the_lowest_tier(llm: LLM) -> None:
    before = llm.engine.stats().tiers
    tokens(llm, PROMPTS)
    list(llm.stream_chat(QUESTION, SamplingParams(max_tokens=3, ignore_eos=True)))
    after = llm.engine.stats().tiers
    assert {name: after[name].finished - before[name].finished for name in after} == {
        "interactive": 0,
        "standard": 0,
        "batch": len(PROMPTS) + 1,
    }


def test_what_the_lowest_tier_refuses_is_raised_by_name_and_leaves_nothing_behind(tmp_path: Path) -> None:
    tiers = tmp_path / "tiers.toml"
    tiers.write_text('[[tier]]\nname = "only"\nmax_queue = 2\n')
    with tiny_llm(tiers=str(tiers), max_num_seqs=1) as llm:
        assert [tier.name for tier in llm.info.tiers] == ["only"]
        with pytest.raises(QueueFull, match="tier only"):
            llm.generate([[5], [6], [7], [8]], GREEDY, progress=False)
        assert idle(llm)
        assert len(tokens(llm, [[5], [6]])) == 2


def test_contradictory_targets_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    tiers = tmp_path / "tiers.toml"
    tiers.write_text('[[tier]]\nname = "only"\nttft_s = 3\nqueue_limit_s = 2\n')
    with pytest.raises(ConfigError, match=r"tiers\.toml.*'only'.*contradict"):
        tiny_llm(tiers=str(tiers))


def test_observed_lengths_are_kept_over_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = tmp_path / "lengths.json"
    means = []
    for _ in range(2):
        with tiny_llm(length_profile=str(profile)) as llm:
            lengths = llm.engine.scheduler.lengths
            means.append(lengths.mean(lengths.handle("batch", "")))
            tokens(llm, [[5 + place] for place in range(20)])
            assert llm.info.warnings == []
    assert means[1] < 0.8 * means[0]  # answers had 12 tokens
    profile.write_text("{")
    with tiny_llm(length_profile=str(profile)) as llm:
        assert "damaged" in llm.info.warnings[0]
        assert "damaged" in caplog.text
    with tiny_llm(length_profile=str(tmp_path / "file" / "lengths.json")):
        (tmp_path / "file").touch()
    assert "could not be written" in caplog.text


def test_a_file_that_is_no_length_profile_of_this_model_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text('[[tier]]\nname = "only"\n')
    before = file.read_bytes()
    with tiny_llm(length_profile=str(file)) as llm:
        tokens(llm, [[5], [6]])
        (warning,) = llm.info.warnings
        assert warning.endswith("it is ignored, and nothing is saved there")
    assert file.read_bytes() == before


@pytest.mark.parametrize("swap_space", [1e5, 1e-9])
def test_swap_space_larger_than_memory_or_less_than_a_block_is_a_warning(
    swap_space: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_llm(swap_space=swap_space, disk_cache=str(tmp_path / "kv")) as llm:
        (warning,) = llm.info.warnings
        assert warning.startswith("there is no swap_space, and so no disk_cache: swap_space ")
        assert warning in caplog.text
        assert len(tokens(llm, [5])[0]) == 12
    assert not (tmp_path / "kv").exists()


def test_swap_space_leaves_room_for_what_int4_full_keeps_beside_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropeway.engine.host_memory.host_memory", lambda: Memory(2 << 30, 1 << 30))
    rooms = []
    for seats in (8, 64):
        with tiny_llm(kv_dtype="int4-full", block_size=32, max_num_seqs=seats, swap_space=1e5) as llm:
            warning, *_ = llm.info.warnings
            rooms.append(int(warning.partition("there is room for ")[2].split()[0]))
            model, pool = llm.worker.model, llm.worker.cache
    more = 56 * 2 * 32 * model.num_layers * model.num_kv_heads * model.head_dim
    assert rooms[0] - rooms[1] == pytest.approx(more / (pool.nbytes / pool.num_blocks), abs=1)


def test_a_read_only_disk_cache_is_told_and_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with tiny_llm(swap_space=0.01, disk_cache=str(tmp_path / "file" / "kv")) as llm:
        for _ in range(2):
            assert len(tokens(llm, list(range(3, 90)))[0]) == 12
        assert llm.engine.stats().disk_failure is not None
        assert idle(llm)


@pytest.mark.report("llm-d/llm-d-kv-cache#514")
def test_a_prefix_on_disk_is_found_by_the_next_one_unless_it_is_damaged_or_foreign(tmp_path: Path) -> None:
    prompt = list(range(3, 103))
    fields = {"swap_space": 0.01, "disk_cache": str(tmp_path / "kv")}
    with tiny_llm(**fields) as llm:
        want = one(llm, prompt, max_tokens=12)
        while llm.engine.stats().disk_blocks < 6:
            tokens(llm, [5])
    with tiny_llm(**fields) as llm:
        again = one(llm, prompt, max_tokens=12)
        assert (again.token_ids, again.cached_tokens) == (want.token_ids, 96)
        assert llm.engine.stats().disk_hits == 96
    foreign = ({"kv_dtype": "bf16"}, {"dtype": "bf16"}, {"weights": "int8", "kv_dtype": "fp32"})
    for other in foreign:
        with tiny_llm(**fields, **other) as llm:
            assert one(llm, prompt, max_tokens=12).cached_tokens == 0
            assert llm.engine.stats().disk_hits == 0
    blocks = [file for file in (tmp_path / "kv").rglob("*") if file.is_file() and file.suffix != ".json"]
    assert len(blocks) > 6
    for block in blocks:
        data = bytearray(block.read_bytes())
        data[len(data) // 2] ^= 1
        block.write_bytes(data)
    with tiny_llm(**fields) as llm:
        damaged = one(llm, prompt, max_tokens=12)
        assert (damaged.token_ids, damaged.cached_tokens) == (want.token_ids, 0)
        assert llm.engine.stats().disk_errors > 0


def test_closing_twice_is_fine_and_the_context_manager_closes() -> None:
    with tiny_llm() as llm:
        assert len(tokens(llm, [5])[0]) == 12
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([5], GREEDY)


def test_a_model_without_a_tokenizer_works_by_token_ids(tmp_path: Path, llm: LLM) -> None:
    with tiny_llm(model_copy(tmp_path, without="tokenizer")) as bare:
        assert bare.tokenizer is None
        (output,) = bare.generate([PROMPTS[0]], GREEDY)
        assert output.token_ids == tokens(llm, PROMPTS[0])[0]
        assert output.text == ""
        with pytest.raises(InvalidRequest, match="no tokenizer; give the prompt as token ids"):
            bare.generate("hello")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            bare.chat(QUESTION)


@pytest.mark.report("vllm-project/vllm#17385")
async def test_many_asynchronous_calls_share_an_engine_process_and_a_stream_can_be_left(llm: LLM) -> None:
    want = tokens(llm, PROMPTS)
    fields = {"threads": 1, "max_num_seqs": 8, "max_batched_tokens": 64, "kv_blocks": 512}
    async with await AsyncLLM.start(str(tiny_chat_model()), **fields) as asynchronous:
        for _ in range(10):
            calls = [asynchronous.generate(prompt, GREEDY) for prompt in PROMPTS]
            outputs = await asyncio.wait_for(asyncio.gather(*calls), 20)
            assert [output.token_ids for output in outputs] == want
        deltas = [delta async for delta in asynchronous.stream(PROMPTS[0], GREEDY)]
        assert [token for delta in deltas for token in delta.token_ids] == want[0]
        endless = SamplingParams(max_tokens=2000, ignore_eos=True)
        stream = asynchronous.stream([5], endless)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(asynchronous.generate([6], endless))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            await asyncio.sleep(0.05)
            if not asynchronous.engine.stats.running:
                break
        assert (asynchronous.engine.stats.running, asynchronous.engine.stats.blocks_live) == (0, 0)
        with pytest.raises(InvalidRequest, match="empty"):
            await asynchronous.generate([])
        assert (await asynchronous.generate("hello", GREEDY)).token_ids == tokens(llm, "hello")[0]
    await asynchronous.close()


async def test_asynchronous_calls_name_their_tier_and_get_its_refusals(tmp_path: Path) -> None:
    tiers = tmp_path / "tiers.toml"
    tiers.write_text('[[tier]]\nname = "high"\npreemptible = false\n[[tier]]\nname = "low"\nqueue_limit_s = 0.1\n')
    long = SamplingParams(max_tokens=1500, ignore_eos=True)
    fields = {"threads": 1, "max_num_seqs": 1, "kv_blocks": 512, "tiers": str(tiers)}
    async with await AsyncLLM.start(str(tiny_chat_model()), **fields) as llm:
        with pytest.raises(InvalidRequest, match=r"'batch'.*high, low"):
            await llm.generate([5], priority="batch")
        assert (await llm.generate([5], GREEDY, priority=5)).token_ids
        first = llm.stream([5], long, priority="high")
        await anext(first)
        with pytest.raises(QueueTimeout, match="low"):
            await llm.generate([6], GREEDY, priority="low")
        with pytest.raises(QueueTimeout, match="low"):
            await anext(llm.stream([7], GREEDY, priority="low"))
        await first.aclose()  # type: ignore[attr-defined]
        assert (await llm.generate([8], GREEDY, priority="low")).token_ids


async def test_where_the_time_goes_is_told_under_way_after_the_end_and_after_a_stop_string() -> None:
    async with await _start() as llm:
        assert llm.engine.tokenizer is not None
        params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        generation = llm.engine.submit([5, 6], params)
        await asyncio.wait_for(generation.accepted(), 5)
        deltas = aiter(generation)
        text = ""
        while len(text) < 40:
            text += (await anext(deltas)).text
        under_way = (await generation.timelines.ask())[0]
        assert (under_way.phase, under_way.tier) == ("decode", "standard")
        assert under_way.output_tokens > 0
        generation.cancel()
        generation.cancel()
        assert [delta.finish_reason async for delta in deltas][-1] is FinishReason.ABORT
        told = await generation.timelines.ask()
        assert told[0].phase == "finished"
        assert told[0].decode_s >= under_way.decode_s > 0

        stopped = llm.engine.submit([5, 6], SamplingParams(temperature=0, max_tokens=1500, stop=(text[20:26],)))
        last = [delta async for delta in stopped][-1]
        assert (last.finish_reason, last.timeline) == (FinishReason.STOP, None)
        assert (await stopped.timelines.ask())[0].phase == "finished"

        whole = llm.engine.submit([5, 6], SamplingParams(temperature=0, n=2, max_tokens=5, ignore_eos=True))
        ends = {delta.index: delta.timeline async for delta in whole if delta.finish_reason is not None}
        assert whole.timelines.ended == ends == await whole.timelines.ask()
        assert {0, 1} == ends.keys()


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_interrupted_call_leaves_an_engine_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, after: int, async_scheduling: bool
) -> None:
    with tiny_llm(async_scheduling=async_scheduling) as llm:
        want = tokens(llm, [5, 6])
        wait, calls = LocalWork.result, [0]

        def interrupted(work: LocalWork) -> Result:
            calls[0] += 1
            if calls[0] == after:
                raise KeyboardInterrupt
            return wait(work)

        with monkeypatch.context() as patch:
            patch.setattr(LocalWork, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[5, 6, 7]] * 8, GREEDY, progress=False)
        assert idle(llm)
        assert tokens(llm, [5, 6]) == want


def test_a_failing_device_is_told_to_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_llm() as llm:

        def lost(plan: Plan) -> None:
            raise RuntimeError("device lost")

        monkeypatch.setattr(llm.worker, "copy", lost)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="device lost"):
                llm.generate([5, 6, 7], GREEDY, progress=False)


def test_closing_one_stream_does_not_run_the_other_to_its_end() -> None:
    with tiny_llm() as llm:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        first, second = (llm.stream_chat(QUESTION, params) for _ in range(2))
        next(first), next(second)
        before = llm.engine.steps
        first.close()  # type: ignore[attr-defined]
        assert llm.engine.steps == before
        assert sum(len(delta.token_ids) for delta in second) == 399
        assert idle(llm)


async def _start() -> AsyncLLM:
    return await AsyncLLM.start(str(tiny_chat_model()), threads=1, max_num_seqs=8, kv_blocks=512)


def _engine_processes() -> list[psutil.Process]:
    """Of this process itself; servers under test have their own."""
    return [child for child in psutil.Process().children() if "ropeway.engine.child" in child.cmdline()]


async def test_a_cancelled_start_leaves_no_process_behind() -> None:
    task = asyncio.create_task(_start())
    while not _engine_processes():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not _engine_processes()


async def test_a_killed_engine_is_an_error_for_those_who_wait_and_those_who_come() -> None:
    async with await _start() as llm:
        task = asyncio.create_task(llm.generate([5], SamplingParams(max_tokens=2000, ignore_eos=True)))
        await asyncio.sleep(0.2)
        (process,) = _engine_processes()
        process.kill()
        with pytest.raises(EngineDead):
            await asyncio.wait_for(task, 5)
        with pytest.raises(EngineDead):
            await llm.generate([5])


async def test_messages_that_cannot_be_read_end_the_readers_and_leave_nothing_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await _start() as llm:

        def broken(output: object) -> None:
            raise ValueError("no such message")

        monkeypatch.setattr(llm.engine, "_deliver", broken)
        with pytest.raises(EngineDead, match="no such message"):
            await asyncio.wait_for(llm.generate([5]), 5)
        with pytest.raises(EngineDead):
            await llm.generate([5])


async def test_waiting_for_the_engine_leaves_nothing_behind_per_message() -> None:
    async with await _start() as llm:
        tasks = len(asyncio.all_tasks())
        await llm.generate([5], SamplingParams(max_tokens=100, ignore_eos=True))
        gc.collect()
        assert len(asyncio.all_tasks()) <= tasks + 2
        futures = [each for each in gc.get_objects() if type(each).__name__ == "Future"]
        assert len(futures) < 20
