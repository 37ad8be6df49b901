"""Any mix of arrivals, chunking, pool sizes, prefix hits, preemptions and aborts, synchronous or not: every
request gets the tokens it gets alone, and the scheduler's invariants hold after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.outcome import StepOutput
from ropeway.request import FinishReason, SamplingParams
from ropeway.scheduling.scheduler import Scheduler
from tests.support.fake_device import END, VOCAB, FakeDevice, alone

MAX_LEN = 48
WORKLOADS = 600
seen: Counter[str] = Counter()
"""What the workloads of this module have gone through."""


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    salt: bytes
    abort_after: int | None


@dataclass(frozen=True)
class Workload:
    blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    chunked: bool
    prefix_cache: bool
    aheads: tuple[int, ...]
    arrivals: tuple[Arrival, ...]


SHARED = tuple(range(1, 33))
ids = st.integers(1, VOCAB - 1)
prompts = st.one_of(
    st.lists(ids, min_size=1, max_size=12).map(tuple),
    st.tuples(st.integers(1, 32), st.lists(ids, max_size=4)).map(lambda x: (*SHARED[: x[0]], *x[1])),
)
params = st.builds(
    lambda n, most, least, logprobs, ignore, stops: SamplingParams(
        n=n, max_tokens=most, min_tokens=min(least, most), logprobs=logprobs, ignore_eos=ignore, stop_token_ids=stops
    ),
    st.sampled_from([1, 1, 1, 2, 3]),
    st.integers(1, 24),
    st.sampled_from([0, 0, 3, 20]),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.lists(ids, max_size=6, unique=True).map(tuple),
)
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=prompts,
    params=params,
    salt=st.sampled_from([b"", b"", b"a"]),
    abort_after=st.sampled_from([None, None, None, None, 0, 1, 3, 9]),
)
workloads = st.builds(
    Workload,
    blocks=st.integers(12, 40),
    block_size=st.sampled_from([1, 2, 4, 8]),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 64),
    chunked=st.booleans(),
    prefix_cache=st.sampled_from([True, True, False]),
    aheads=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4).map(tuple),
    arrivals=st.lists(arrivals, min_size=1, max_size=16).map(tuple),
)


class Client:
    """Collects what the engine says, and checks that it never speaks of a request that has ended."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}

    def receive(self, output: StepOutput) -> None:
        for started in output.started:
            assert started.id not in self.cached, "started twice"
            assert not self.tokens[started.id]
            self.cached[started.id] = started.cached_tokens
        for request, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
            assert request not in self.finished, "a token after the end"
            self.tokens[request].append(token)
        if output.logprobs is not None:
            for row, chosen in zip(output.logprobs.row.tolist(), output.logprobs.chosen.tolist(), strict=True):
                self.logprobs.setdefault(int(output.ids[row]), []).append(chosen)
        for finished in output.finished:
            assert finished.id not in self.finished, "finished twice"
            self.finished[finished.id] = finished.reason


def run(workload: Workload) -> None:
    pool = BlockPool(workload.blocks, workload.block_size)
    config = SchedulerConfig(
        max_num_seqs=min(workload.max_num_seqs, workload.budget),
        max_batched_tokens=workload.budget,
        chunked_prefill=workload.chunked,
    )
    max_len = min(MAX_LEN, workload.blocks * workload.block_size)
    scheduler = Scheduler(config, pool, max_len)
    client = Client()
    device = FakeDevice(workload.blocks, workload.block_size)
    engine = Engine(
        scheduler,
        device,
        client.receive,
        max_model_len=max_len,
        end_ids=(END,),
        prefix_cache=workload.prefix_cache,
    )
    todo = sorted(enumerate(workload.arrivals), key=lambda x: x[1].step)
    requests: dict[int, tuple[Arrival, NewRequest]] = {}
    aborts: dict[int, int] = {}
    aborted: set[int] = set()
    step = 0
    while todo or engine.has_work:
        while todo and todo[0][1].step <= step:
            index, arrival = todo.pop(0)
            group = [
                NewRequest(
                    id=index * 10 + i,
                    prompt=np.array(arrival.prompt, dtype=np.int32),
                    params=arrival.params,
                    seed=index * 7 + i,
                    salt=arrival.salt,
                    leader=None if i == 0 else index * 10,
                    group=arrival.params.n > 1,
                )
                for i in range(arrival.params.n)
            ]
            for new in group:
                requests[new.id] = (arrival, new)
                client.tokens[new.id] = []
                if arrival.abort_after is not None:
                    aborts[new.id] = step + arrival.abort_after
            engine.submit(group)
        for request in [r for r, when in aborts.items() if when <= step]:
            del aborts[request]
            if request not in client.finished:
                aborted.add(request)
                engine.abort([request], "disconnect")
        engine.step(workload.aheads[step % len(workload.aheads)])
        scheduler.check()
        assert scheduler.seats.taken <= config.max_num_seqs
        assert engine.has_work or not len(scheduler.waiting)
        step += 1
        assert step < 4000, "livelock"
    assert pool.live == 0
    assert pool.free + pool.cached == pool.num_blocks
    check_outputs(requests, client, aborted, max_len)
    seen["workloads"] += 1
    seen["preemptions"] += scheduler.preemptions
    seen["prefix hits"] += scheduler.prefixes.hits
    seen["aborts"] += len(aborted)
    seen["cut prompts"] += device.cut_rows
    seen["wasted rows"] += sum(scheduler.wasted_rows.values())


def check_outputs(
    requests: dict[int, tuple[Arrival, NewRequest]],
    client: Client,
    aborted: set[int],
    max_len: int,
) -> None:
    for request, (arrival, new) in requests.items():
        limit = min(max_len, len(arrival.prompt) + (arrival.params.max_tokens or max_len))
        end_ids = (() if arrival.params.ignore_eos else (END,)) + arrival.params.stop_token_ids
        tokens = client.tokens[request]
        if len(arrival.prompt) >= limit:
            assert client.finished[request] is FinishReason.ERROR or request in aborted
            continue
        want = alone(arrival.prompt, arrival.params, new.seed, end_ids, limit)
        if request in aborted:
            assert tokens == want[: len(tokens)]
            continue
        assert tokens == want
        assert client.finished[request] is (FinishReason.STOP if want[-1] in end_ids else FinishReason.LENGTH)
        if arrival.params.logprobs is not None:
            assert client.logprobs[request] == [-float(t) for t in want]
        assert client.cached[request] <= len(arrival.prompt) - 1


@settings(max_examples=WORKLOADS, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads)
def test_every_request_gets_the_tokens_it_gets_alone(workload: Workload) -> None:
    run(workload)


def test_the_workloads_went_through_everything() -> None:
    print(dict(seen))
    assert seen["workloads"] >= 500
    for event in ("preemptions", "prefix hits", "aborts", "wasted rows", "cut prompts"):
        assert seen[event] > 0, event
