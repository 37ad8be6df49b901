"""Same request, same bits, on a real (tiny) model and the native kernels: tokens and log-probabilities do not
depend on the batch, chunking, preemption by swap or recompute, tiers, prefixes found on the device, in host memory or
on disk, asynchronous scheduling or seats taken over; whatever keys and values are stored as.

A failure prints the command that replays it; with a seed it is

    python -m pytest tests/property/test_same_bits.py --hypothesis-seed=N
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ropeway.cache.host import HostTier
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.devices.base import KVDtype
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.execution.calibration import calibrate
from ropeway.execution.disk import DiskStore, Layout
from ropeway.execution.local import LocalExecutor
from ropeway.execution.part import step_tokens
from ropeway.execution.worker import Worker
from ropeway.loading.open import open_checkpoint
from ropeway.models.model import Model
from ropeway.models.registry import load_model
from ropeway.outcome import StepOutput
from ropeway.parallel.communicator import SingleProcess
from ropeway.request import SamplingParams
from ropeway.scheduling.scheduler import Scheduler
from ropeway.tiers import DEFAULT_TIERS
from tests.support.devices import lazy_device
from tests.support.tiny_models import tiny_checkpoint

MAX_LEN = 64
END = 2


@dataclass(frozen=True)
class Line:
    """A model, and how it and its keys and values are held."""

    checkpoint: str
    dtype: Literal["fp32", "bf16"]
    kv: KVDtype
    workloads: int
    block_sizes: tuple[int, ...] = (2, 4, 4, 16)
    blocks: tuple[int, int] = (9, 20)


LINES = {
    "llama": Line("llama", "fp32", "fp32", 110),
    "qwen2-sliding": Line("qwen2-sliding", "bf16", "bf16", 110),
    "qwen3": Line("qwen3", "bf16", "bf16", 110),
    "int8": Line("llama", "fp32", "int8", 40, (16,), (5, 9)),
    "int4": Line("qwen2-sliding", "bf16", "int4", 40, (16,), (5, 9)),
    "int4-full": Line("qwen2-sliding", "bf16", "int4-full", 40, (32,), (3, 6)),
}
ON_DISK = 5
seen: Counter[str] = Counter()

Outcome = tuple[list[int], list[float]]


@functools.cache
def load(name: str) -> Model:
    line = LINES[name]
    checkpoint = open_checkpoint(tiny_checkpoint(line.checkpoint))
    return load_model(checkpoint, lazy_device("cpu"), SingleProcess(), dtype=line.dtype, max_model_len=MAX_LEN)


@functools.cache
def factors(name: str) -> torch.Tensor | None:
    return calibrate(load(name), lazy_device("cpu"), LINES[name].kv, MAX_LEN).key_factors


class Bench:
    """An engine around a loaded model, its cache, host memory and token rows filled with poison."""

    def __init__(
        self,
        name: str,
        blocks: int,
        block_size: int,
        config: SchedulerConfig,
        prefix_cache: bool,
        host_blocks: int = 0,
        folder: Path | None = None,
    ) -> None:
        model, cpu = load(name), lazy_device("cpu")
        kv = LINES[name].kv
        sizes = model.num_layers, model.num_kv_heads, model.head_dim
        cache = cpu.kv_cache(sizes[0], blocks, *sizes[1:], block_size, kv, factors(name))
        cache.data.fill(0xFF)  # type: ignore[attr-defined]  # NaN in every type
        memory = cpu.host_blocks(host_blocks, cpu.kv_block_bytes(*sizes, block_size, kv)) if host_blocks else None
        self.store: DiskStore | None = None
        self.host: HostTier | None = None
        if memory is not None:
            memory.fill(0xFF)
            if folder is not None:
                layout = Layout("ab" * 32, kv, "cpu-1", block_size, *sizes)
                self.store = DiskStore(folder, layout, memory, 1 << 30)
            self.host = HostTier(BlockPool(host_blocks, block_size), self.store)
        max_len = min(MAX_LEN, blocks * block_size)
        worker = Worker(
            cpu,
            model,
            cache,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=step_tokens(config, max_len),
            max_model_len=max_len,
            vocab_size=160,
            host=memory,
        )
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.scheduler = Scheduler(config, BlockPool(blocks, block_size), max_len, host=self.host)
        self.engine = Engine(
            self.scheduler,
            LocalExecutor(worker),
            self.receive,
            max_model_len=max_len,
            end_ids=(END,),
            prefix_cache=prefix_cache,
        )

    def receive(self, output: StepOutput) -> None:
        for request, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
            self.tokens.setdefault(request, []).append(token)
        if output.logprobs is not None:
            for row, chosen in zip(output.logprobs.row.tolist(), output.logprobs.chosen.tolist(), strict=True):
                self.logprobs.setdefault(int(output.ids[row]), []).append(chosen)


def new_request(
    request_id: int, prompt: tuple[int, ...], params: SamplingParams, seed: int, tier: int = 0
) -> NewRequest:
    return NewRequest(id=request_id, prompt=np.array(prompt, dtype=np.int32), params=params, seed=seed, tier=tier)


@functools.cache
def alone(name: str, prompt: tuple[int, ...], params_json: bytes, seed: int, max_len: int) -> Outcome:
    """The request by itself: big blocks, one chunk, synchronous, nothing cached."""
    params = msgspec.json.decode(params_json, type=SamplingParams)
    config = SchedulerConfig(max_num_seqs=1, max_batched_tokens=MAX_LEN)
    size = max(LINES[name].block_sizes)
    bench = Bench(name, max_len // size + 1, size, config, prefix_cache=False)
    bench.engine.max_model_len = max_len
    bench.engine.submit([new_request(1, prompt, params, seed)])
    while bench.engine.has_work:
        bench.engine.step(0)
    return bench.tokens[1], bench.logprobs.get(1, [])


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    tier: int
    abort_after: int | None


@dataclass(frozen=True)
class Workload:
    blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    chunked: bool
    prefix_cache: bool
    preemption: Literal["auto", "swap", "recompute"]
    host_blocks: int
    aheads: tuple[int, ...]
    arrivals: tuple[Arrival, ...]


SHARED = tuple(range(3, 43))
ids = st.integers(3, 159)
prompts = st.one_of(
    st.lists(ids, min_size=1, max_size=30).map(tuple),
    st.tuples(st.integers(1, 40), st.lists(ids, max_size=3)).map(lambda x: (*SHARED[: x[0]], *x[1])),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.sampled_from([{}, {7: 5.0, 11: -100.0}]),
    logprobs=st.sampled_from([None, 0, 3]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1]),
)
_workloads = functools.partial(
    st.builds,
    Workload,
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 64),
    chunked=st.sampled_from([True, True, True, False]),
    prefix_cache=st.sampled_from([True, True, False]),
    preemption=st.sampled_from(["swap", "swap", "auto", "recompute"]),
    host_blocks=st.sampled_from([40, 100, 6, 0]),
    aheads=st.lists(st.sampled_from([0, 1, 1]), min_size=1, max_size=4).map(tuple),
    arrivals=st.lists(
        st.builds(
            Arrival,
            step=st.integers(0, 12),
            prompt=prompts,
            params=params,
            tier=st.integers(0, len(DEFAULT_TIERS) - 1),
            abort_after=st.sampled_from([None, None, None, None, 2, 7]),
        ),
        min_size=1,
        max_size=10,
    ).map(tuple),
)


def workloads(name: str) -> st.SearchStrategy[Workload]:
    line = LINES[name]
    return _workloads(blocks=st.integers(*line.blocks), block_size=st.sampled_from(line.block_sizes))


def crowded(name: str, preemption: Literal["swap", "recompute"]) -> Workload:
    """Sure to run out of seats and of blocks, and to find prefixes again."""
    some = functools.partial(SamplingParams, temperature=0.7, ignore_eos=True, logprobs=0)
    small = min(LINES[name].block_sizes) < 16
    blocks, size, shared, output = (9, 4, 9, 16) if small else (6, min(LINES[name].block_sizes), 17, 24)
    low = [Arrival(0, (*SHARED[:shared], last), some(max_tokens=output), 2, None) for last in (50, 51, 52)]
    high = [Arrival(4, (60 + first, *range(70, 84)), some(max_tokens=9), 0, None) for first in (0, 1)]
    again = Arrival(6, (*SHARED[:shared], 53), some(max_tokens=4), 1, None)
    gone = Arrival(0, (99, 98, 97), some(max_tokens=20), 1, 5)
    return Workload(blocks, size, 4, 32, True, True, preemption, 100, (1, 1, 0), (*low, *high, again, gone))


def run(name: str, workload: Workload, folder: Path | None = None) -> None:
    config = SchedulerConfig(
        max_num_seqs=min(workload.max_num_seqs, workload.budget),
        max_batched_tokens=workload.budget,
        chunked_prefill=workload.chunked,
        admission="greedy",
        preemption=workload.preemption,
        shed=False,
    )
    host_blocks = workload.host_blocks if folder is None else max(workload.host_blocks, 8)
    bench = Bench(name, workload.blocks, workload.block_size, config, workload.prefix_cache, host_blocks, folder)
    engine, scheduler, host = bench.engine, bench.scheduler, bench.host
    max_len = engine.max_model_len
    todo = sorted(enumerate(workload.arrivals), key=lambda x: x[1].step)
    aborted: set[int] = set()
    step = 0
    while todo or engine.has_work:
        while todo and todo[0][1].step <= step:
            index, arrival = todo.pop(0)
            engine.submit([new_request(index, arrival.prompt, arrival.params, index % 3, arrival.tier)])
        for index, arrival in enumerate(workload.arrivals):
            due = arrival.abort_after is not None and arrival.step + arrival.abort_after == step
            if due and scheduler.abort(index, "disconnect", engine.clock()):
                aborted.add(index)
        engine.step(workload.aheads[step % len(workload.aheads)])
        scheduler.check()
        if scheduler.stuck and bench.store is not None:
            time.sleep(0.0005)
        step += 1
        assert step < 2000, "livelock"
    if host is not None:
        until = time.monotonic() + 10
        while host.pool.live:
            assert time.monotonic() < until, "a host block is held"
            host.poll()
            time.sleep(0.0005)
        seen["swapped in"] += host.swaps_in
    if bench.store is not None:
        bench.store.close()
        seen["disk hits"] += scheduler.prefixes.disk_hits
    for index, arrival in enumerate(workload.arrivals):
        if len(arrival.prompt) >= min(max_len, len(arrival.prompt) + (arrival.params.max_tokens or 0)):
            assert index not in bench.tokens
            continue
        want, want_logprobs = alone(name, arrival.prompt, msgspec.json.encode(arrival.params), index % 3, max_len)
        got, got_logprobs = bench.tokens.get(index, []), bench.logprobs.get(index, [])
        if index in aborted:
            want, want_logprobs = want[: len(got)], want_logprobs[: len(got_logprobs)]
        assert got == want
        assert got_logprobs == want_logprobs
    seen["workloads"] += 1
    seen["requests"] += len(workload.arrivals)
    for ledger in scheduler.lifecycle.ledgers:
        seen["swaps"] += ledger.preemptions["swap"]
        seen["recomputations"] += ledger.preemptions["recompute"]
        seen["seats taken"] += ledger.preemptions["admission"]
    seen["prefix hits"] += scheduler.prefixes.hits
    seen["host hits"] += scheduler.prefixes.host_hits
    seen["aborts"] += len(aborted)
    seen["wasted rows"] += sum(scheduler.wasted_rows.values())


@pytest.mark.parametrize("name", LINES)
@pytest.mark.report("vllm-project/vllm#16832")
@pytest.mark.report("vllm-project/vllm#17524")
@pytest.mark.report("vllm-project/vllm#27034")
@pytest.mark.report("InternLM/lmdeploy#1744")
def test_tokens_and_logprobs_equal_those_of_the_request_alone(name: str) -> None:
    torch.manual_seed(0)

    @settings(
        max_examples=LINES[name].workloads,
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(workloads(name))
    @example(crowded(name, "swap"))
    @example(crowded(name, "recompute"))
    def check(workload: Workload) -> None:
        run(name, workload)

    check()


@pytest.mark.parametrize("name", LINES)
def test_tokens_and_logprobs_are_the_same_over_a_disk_that_an_earlier_engine_has_filled(name: str) -> None:
    torch.manual_seed(0)

    @settings(
        max_examples=ON_DISK,
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(workloads(name))
    def check(workload: Workload) -> None:
        first = Arrival(0, SHARED[:12], SamplingParams(max_tokens=2), 0, None)
        workload = replace(workload, prefix_cache=True, arrivals=(first, *workload.arrivals))
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                run(name, workload, Path(folder))

    check()


def test_the_workloads_went_through_everything() -> None:
    lazy_device("cpu")  # skips where there is none
    print(dict(seen))
    assert seen["workloads"] >= 200
    for event in (
        *("swaps", "swapped in", "recomputations", "seats taken", "prefix hits", "host hits", "disk hits"),
        *("aborts", "wasted rows"),
    ):
        assert seen[event] > 0, event
