"""One model on several processes: the same answers however its steps are run, and a clean end when one is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from ropeway import LLM, RequestOutput, SamplingParams
from ropeway.bench.random_model import random_model
from ropeway.errors import ConfigError, EngineDead
from ropeway.execution.ranks import leader as leader_of
from ropeway.execution.ranks.cutting import Cutter
from ropeway.execution.ranks.executor import RanksExecutor
from ropeway.execution.ranks.links import Links
from ropeway.execution.ranks.messages import Meeting, RankFailed, decode_sign
from ropeway.parallel.overlap import Overlapping
from tests.e2e.test_lifecycle import stream
from tests.support.chat_model import tiny_chat_model
from tests.support.gguf_files import qwen_coder, smollm2
from tests.support.llms import idle, tiny_llm
from tests.support.other_host import other_host, three_ports
from tests.support.server_process import ServerProcess

PROMPTS = [[5 + i % 300 for i in range(length)] for length in (3, 40, 150, 64, 17)]
"""A step has 64 tokens: prompts are cut into chunks, and chunks into micro-batches."""
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
DRAWN = [SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(5)]
NEAR = 1e-3
"""Between rank counts sums are rounded differently: with two tokens as close as this, either may be chosen."""


def ranked(size: int, **fields: Any) -> LLM:
    fields = {"dtype": "fp32", "prefix_cache": False, "tensor_parallel_size": size, "micro_batch": "on", **fields}
    return tiny_llm(**fields)


def executor_of(llm: LLM) -> RanksExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, RanksExecutor)
    return executor


def processes(llm: LLM) -> dict[int, Any]:
    ranks = llm._assembly.ranks
    assert isinstance(ranks, leader_of.Leader)
    return ranks.processes


def check_for(seconds: float, llm: LLM) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        llm._assembly.check()
        time.sleep(0.05)


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[RequestOutput]:
    with tiny_llm(dtype="fp32", prefix_cache=False) as llm:
        return llm.generate(PROMPTS, GREEDY, progress=False)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with ranked(request.param) as llm:
        yield llm


@pytest.mark.report("vllm-project/vllm#19022")
def test_greedy_answers_are_those_of_one_rank_but_for_near_ties(ranks: LLM, alone: list[RequestOutput]) -> None:
    agree(ranks.generate(PROMPTS, GREEDY, progress=False), alone)


def agree(got: list[RequestOutput], want: list[RequestOutput]) -> None:
    """Greedy answers of other numbers of ranks, to the first two tokens that are nearly tied."""
    for ours, theirs in ((a.logprobs, b.logprobs) for a, b in zip(got, want, strict=True)):
        assert ours is not None
        assert theirs is not None
        for mine, other in zip(ours, theirs, strict=True):
            (_, best), (_, second) = other.top[:2]
            if mine.token_id != other.token_id:
                assert best - second < NEAR
                break
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.parametrize(("find", "size"), [(smollm2, 3), (qwen_coder, 2)], ids=["smollm2 on 3", "qwen-coder on 2"])
def test_real_models_answer_the_same_on_several_ranks(find: Callable[[], Path], size: int) -> None:
    fields = {"dtype": "auto", "kv_dtype": "fp32", "kv_blocks": 64, "max_model_len": 256}
    text = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time there was a little"]
    with tiny_llm(find(), **fields) as llm:
        alone = llm.generate(text, GREEDY, progress=False)
    with ranked(size, model=find(), **fields) as llm:
        cut = llm.generate(text, GREEDY, progress=False)
        executor_of(llm).cutter = None
        assert bits(llm.generate(text, GREEDY, progress=False)) == bits(cut)
    agree(cut, alone)


def test_the_same_bits_with_and_without_micro_batches_and_running_ahead_or_not(ranks: LLM) -> None:
    same_bits_however_run(ranks, [GREEDY] * len(PROMPTS) + DRAWN)


def same_bits_however_run(ranks: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    """The answers to the prompts, repeated for as many ``params``: with micro-batches or not, running ahead or not."""
    executor = executor_of(ranks)
    cutter = executor.cutter
    assert cutter is not None
    prompts = PROMPTS * (len(params) // len(PROMPTS))
    seen = []
    try:
        for executor.cutter in (cutter, None):
            for ranks._ahead in (1, 0):
                seen.append(ranks.generate(prompts, params, progress=False))
    finally:
        executor.cutter, ranks._ahead = cutter, 1
    assert all(bits(each) == bits(seen[0]) for each in seen)
    assert idle(ranks)
    return seen[0]


@pytest.mark.slow
def test_a_model_of_real_size_answers_the_same_on_one_two_and_four_ranks(tmp_path: Path) -> None:
    fields = {"model": random_model("qwen3-0.6b", tmp_path), "kv_blocks": 64, "max_model_len": 512}
    params = [msgspec.structs.replace(each, max_tokens=8) for each in (*[GREEDY] * len(PROMPTS), *DRAWN)]
    with tiny_llm(dtype="fp32", prefix_cache=False, **fields) as llm:
        alone = llm.generate(PROMPTS, params[: len(PROMPTS)], progress=False)
    for size in (2, 4):
        with ranked(size, **fields) as llm:
            agree(same_bits_however_run(llm, params)[: len(PROMPTS)], alone)


def test_the_same_bits_alone_and_in_a_batch(ranks: LLM) -> None:
    together = bits(ranks.generate(PROMPTS, GREEDY, progress=False))
    assert [bits(ranks.generate(prompt, GREEDY, progress=False))[0] for prompt in PROMPTS] == together


@pytest.mark.parametrize("collectives", ["tcp", "gloo"])
def test_the_same_bits_over_a_network_and_by_shared_memory(ranks: LLM, collectives: str) -> None:
    size = ranks.config.parallel.tensor_parallel_size
    if size == 4:
        pytest.skip("the sums of three and four ranks are compared in test_communicators")
    shared = bits(ranks.generate(PROMPTS, GREEDY, progress=False))
    with ranked(size, collectives=collectives) as llm:
        assert bits(llm.generate(PROMPTS, GREEDY, progress=False)) == shared


@pytest.mark.parametrize("collectives", ["auto", "gloo"])
def test_the_same_bits_on_two_hosts_and_a_clean_end_of_both(ranks: LLM, collectives: str) -> None:
    """The first host's word counts for how all of them talk."""
    if ranks.config.parallel.tensor_parallel_size == 4:
        pytest.skip("two ranks tell as much")
    hosts = {"nnodes": 2, "cluster_secret": "of both", "master_port": three_ports()}
    with other_host(hosts | {"tensor_parallel_size": 2}) as node:
        with ranked(2, **hosts, collectives=collectives) as llm:
            assert bits(llm.generate(PROMPTS, GREEDY, progress=False)) == bits(
                ranks.generate(PROMPTS, GREEDY, progress=False)
            )
        assert node.wait(10) == 0


def test_a_host_that_does_not_know_the_secret_does_not_get_in() -> None:
    fields = {"nnodes": 2, "tensor_parallel_size": 2, "cluster_secret": "ours", "master_port": three_ports()}
    with (
        other_host(fields | {"cluster_secret": "guessed"}),
        pytest.raises(EngineDead, match="rank 1 has not joined within 4 s"),
    ):
        tiny_llm(**fields, join_timeout_s=4)


def test_the_same_bits_with_fused_collectives(ranks: LLM) -> None:
    size = ranks.config.parallel.tensor_parallel_size
    if size == 4:
        pytest.skip("two ranks tell as much")
    with ranked(size, micro_batch="off", fused_collectives=True) as llm:
        assert bits(llm.generate(PROMPTS, GREEDY, progress=False)) == bits(
            ranks.generate(PROMPTS, GREEDY, progress=False)
        )
        communicator = llm.worker.communicator
        assert isinstance(communicator, Overlapping)
        assert communicator.take().exposed_s > 0


def test_swapped_and_shared_blocks_work_on_all_ranks() -> None:
    """Too small a pool: requests give way, and their blocks are copied on every rank."""
    fields = {"kv_blocks": 16, "swap_space": 0.01, "preemption": "swap", "prefix_cache": True, "admission": "greedy"}
    with ranked(2, **fields) as llm:
        want = [bits(llm.generate(prompt, GREEDY, progress=False))[0] for prompt in PROMPTS[:4]]
        got = bits(llm.generate(PROMPTS[:4], GREEDY, progress=False))
        assert llm.engine.stats().swaps_out > 0
        assert got == want
        assert idle(llm)


def test_quantised_keys_and_values_are_calibrated_together() -> None:
    with ranked(2, kv_dtype="int8") as llm:
        outputs = llm.generate(PROMPTS, GREEDY, progress=False)
        cutter, executor_of(llm).cutter = executor_of(llm).cutter, None
        assert isinstance(cutter, Cutter)
        assert bits(llm.generate(PROMPTS, GREEDY, progress=False)) == bits(outputs)


# --------------------------------------------------------------------------- bad input


def test_head_counts_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"2 key-value heads cannot be split over 3 ranks"):
        ranked(3)


def test_a_rank_that_does_not_join_in_time_is_named() -> None:
    with pytest.raises(EngineDead, match=r"rank 1, 2, 3 has not joined within 0.01 s"):
        ranked(4, join_timeout_s=0.01)


def test_a_rank_with_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_chat_model(), tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    real = leader_of.Load
    monkeypatch.setattr(leader_of, "Load", lambda config, path, ranks: real(config, str(other), ranks))
    with pytest.raises(ConfigError, match="rank 1 has loaded other weights"):
        ranked(2)


def test_what_a_rank_cannot_load_is_told_with_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = leader_of.Load
    monkeypatch.setattr(leader_of, "Load", lambda config, path, ranks: real(config, str(tmp_path), ranks))
    with pytest.raises(Exception, match=r"rank 1: .*config.json"):
        ranked(2)


LAST_WORDS = """
import sys

import msgspec

from ropeway.execution.ranks.follower import Signs, fail
from ropeway.execution.ranks.messages import Meeting
fail(Signs(msgspec.json.decode(sys.argv[1], type=Meeting)), ValueError("why it ended " * 100_000))
"""


def test_a_rank_ends_only_when_why_is_on_its_way(tmp_path: Path) -> None:
    meeting = Meeting(rank=1, size=2, control="", signs=f"ipc://{tmp_path}/signs", timeout_s=30)
    links = Links()
    signs = links.listen(meeting.signs)
    for _ in range(5):
        rank = subprocess.run(
            [sys.executable, "-c", LAST_WORDS, msgspec.json.encode(meeting)], stderr=subprocess.DEVNULL
        )
        assert rank.returncode == 1
        said = []
        while signs.poll(1000) and not (said and isinstance(said[-1], RankFailed)):
            said.append(decode_sign(signs.recv_multipart()[1]))
        assert "why it ended" in said[-1].message
    links.close()


@pytest.mark.parametrize(("how", "said"), [("SIGKILL", r"rank \d"), ("SIGSTOP", "rank 1 has not been heard of")])
@pytest.mark.parametrize("collectives", ["shared", "tcp", "gloo"])
def test_a_rank_killed_or_cut_off_in_the_middle_of_a_step_is_an_error_within_five_seconds(
    how: str, said: str, collectives: str
) -> None:
    llm = ranked(2, collectives=collectives, max_model_len=2048)
    lost = processes(llm)[1]
    at: list[float] = []

    def lose() -> None:
        at.append(time.monotonic())
        os.kill(lost.pid, getattr(signal, how))

    timer = threading.Timer(0.3, lose)
    timer.start()
    long = SamplingParams(temperature=0, max_tokens=1800, ignore_eos=True)
    with pytest.raises(EngineDead, match=said):
        llm.generate(PROMPTS * 4, long, progress=False)
    assert time.monotonic() - at[0] < 5
    llm.close()
    assert lost.poll() is not None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_clients_hear_of_a_lost_rank_within_five_seconds_and_the_server_ends(how: signal.Signals) -> None:
    flags = ("--tensor-parallel-size", "2", "--threads", "1", "--engine-restarts", "0")
    with ServerProcess(tiny_chat_model(), *flags) as server:
        events: list[list[str]] = [[], []]
        readers = [threading.Thread(target=stream, args=(server, 1900, each)) for each in events]
        for reader in readers:
            reader.start()
        server.until("ropeway_num_requests_running", 2)
        (rank,) = (child for child in server.children() if "ropeway.execution.ranks.follower" in child.cmdline())
        rank.send_signal(how)
        for reader in readers:
            reader.join(5)
            assert not reader.is_alive(), "a stream hangs"
        assert all(any('"error"' in line and "rank 1" in line for line in each) for each in events)
        assert server.process.wait(8) == 1
        assert not rank.is_running()


def test_a_rank_lost_while_nothing_runs_is_known_too() -> None:
    with ranked(2) as llm:
        processes(llm)[1].kill()
        with pytest.raises(EngineDead, match=r"the process of rank 1 ended unexpectedly \(signal 9\)"):
            check_for(5.0, llm)


def test_ranks_end_with_the_engine() -> None:
    llm = ranked(2)
    children = processes(llm)
    llm.close()
    assert [child.returncode for child in children.values()] == [0]


def test_rank_0_alone_holds_a_part_of_the_weights() -> None:
    with tiny_llm(dtype="fp32") as whole, ranked(2) as halves:
        assert halves.worker.model.weight_bytes < 0.6 * whole.info.weight_bytes
        assert whole.info.weight_bytes <= halves.info.weight_bytes < 1.1 * whole.info.weight_bytes
        assert halves.worker.model.num_kv_heads == 1
