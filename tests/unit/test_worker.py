"""The worker and its executor: copies come before the rows, and a result says what both took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ropeway.devices.base import Device, KVCache
from ropeway.execution.local import LocalExecutor
from ropeway.execution.worker import Worker
from ropeway.loading.open import open_checkpoint
from ropeway.models.registry import load_model
from ropeway.parallel.communicator import SingleProcess
from ropeway.plan import Plan, Result, Seat
from ropeway.request import SamplingParams
from ropeway.trace import COMPUTE, Trace
from tests.support.devices import DEVICES, device, lazy_device
from tests.support.tiny_models import tiny_checkpoint

BLOCKS, BLOCK_SIZE, HOST_BLOCKS = 8, 4, 6
PROMPT = [5, 9, 12, 33, 7, 8, 21, 40, 3, 14]


def pairs(copies: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(copies, dtype=np.int32).reshape(-1, 2)


def plan(
    seq: int,
    rows: Sequence[tuple[int, int, int, Sequence[int]]] = (),
    *,
    seats: Sequence[Seat] = (),
    to_host: Sequence[tuple[int, int]] = (),
    to_device: Sequence[tuple[int, int]] = (),
) -> Plan:
    """Rows are (slot, start, count, new blocks); every one samples."""
    slot, start, count, new = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Plan(
        seq=seq,
        request=np.array(slot, dtype=np.int64),
        slot=np.array(slot, dtype=np.int32),
        start=np.array(start, dtype=np.int32),
        count=np.array(count, dtype=np.int32),
        samples=np.ones(len(rows), dtype=np.bool_),
        new_blocks=np.array([block for blocks in new for block in blocks], dtype=np.int32),
        new_block_count=np.array([len(blocks) for blocks in new], dtype=np.int32),
        seats=tuple(seats),
        to_host=pairs(to_host),
        to_device=pairs(to_device),
    )


def seat(slot: int, tokens: Sequence[int], blocks: Sequence[int] = (), logprobs: int | None = None) -> Seat:
    return Seat(
        slot=slot,
        token_ids=np.array(tokens, dtype=np.int32),
        prompt_tokens=len(PROMPT),
        params=SamplingParams(temperature=0.0, logprobs=logprobs),
        seed=1,
        end_ids=(),
        blocks=np.array(blocks, dtype=np.int32),
    )


class Bench:
    def __init__(self, name: str, host_blocks: int = HOST_BLOCKS, make: Callable[[str], Device] = device) -> None:
        checkpoint = open_checkpoint(tiny_checkpoint("llama"))
        chosen = make(name)
        model = load_model(checkpoint, chosen, SingleProcess(), dtype="fp32", max_model_len=32)
        shape = (model.num_kv_heads, model.head_dim, BLOCK_SIZE)
        self.cache: KVCache = chosen.kv_cache(model.num_layers, BLOCKS, *shape, "fp32")
        block_bytes = chosen.kv_block_bytes(model.num_layers, *shape, "fp32")
        self.host = chosen.host_blocks(host_blocks, block_bytes) if host_blocks else None
        worker = Worker(
            chosen,
            model,
            self.cache,
            max_num_seqs=2,
            max_step_tokens=16,
            max_model_len=32,
            vocab_size=160,
            host=self.host,
        )
        self.executor = LocalExecutor(worker)

    def run(self, plan: Plan) -> Result:
        work = self.executor.forward(plan)
        work.sample()
        return work.result()

    def poison(self, blocks: Sequence[int]) -> None:
        assert self.host is not None
        noise = np.full((1, self.host.shape[1]), 0xFF, dtype=np.uint8)
        self.cache.to_device(np.zeros(len(blocks), np.int32), noise, np.array(blocks, dtype=np.int32))


every_device = pytest.mark.parametrize("name", DEVICES)


@every_device
def test_a_sequence_swapped_out_and_in_goes_on_with_the_same_tokens(name: str) -> None:
    first = plan(1, [(0, 0, len(PROMPT), [0, 1, 2])], seats=[seat(0, PROMPT)])
    bench = Bench(name)
    token = int(bench.run(first).token_ids[0])
    want = [int(bench.run(plan(2 + i, [(0, len(PROMPT) + i, 1, [])])).token_ids[0]) for i in range(2)]

    bench = Bench(name)
    assert int(bench.run(first).token_ids[0]) == token
    assert len(bench.run(plan(2, to_host=[(0, 4), (1, 0), (2, 5)])).token_ids) == 0
    bench.poison(range(BLOCKS))
    back = plan(
        3,
        [(1, len(PROMPT), 1, [])],
        seats=[seat(1, [*PROMPT, token], blocks=[6, 3, 7])],
        to_device=[(4, 6), (0, 3), (5, 7)],
    )
    assert bench.run(back).token_ids.tolist() == want[:1]
    assert bench.run(plan(4, [(1, len(PROMPT) + 1, 1, [])])).token_ids.tolist() == want[1:]


@every_device
def test_a_block_copied_to_the_host_may_be_overwritten_by_the_same_plan(name: str) -> None:
    bench = Bench(name)
    token = bench.run(plan(1, [(0, 0, len(PROMPT), [0, 1, 2])], seats=[seat(0, PROMPT)])).token_ids
    want = bench.run(plan(2, [(0, len(PROMPT), 1, [])])).token_ids
    other = PROMPT[::-1]
    # To the host, then from it to other blocks; slot 1 writes over what slot 0 had.
    bench.run(
        plan(
            3,
            [(1, 0, len(other), [0, 1, 2])],
            seats=[seat(1, other)],
            to_host=[(0, 0), (1, 1), (2, 2)],
            to_device=[(0, 5), (1, 6), (2, 7)],
        )
    )
    again = seat(0, [*PROMPT, *token.tolist()], blocks=[5, 6, 7])
    assert bench.run(plan(4, [(0, len(PROMPT), 1, [])], seats=[again])).token_ids.tolist() == want.tolist()


@every_device
def test_a_slot_may_change_hands_while_a_step_of_its_last_owner_is_still_queued(name: str) -> None:
    other = PROMPT[::-1]
    first = plan(1, [(0, 0, len(PROMPT), [0, 1, 2])], seats=[seat(0, PROMPT)])
    extra = plan(2, [(0, len(PROMPT), 1, [])])  # its token would land in the middle of the next owner's prompt
    second = plan(3, [(0, 0, len(other) + 2, [3, 4, 5])], seats=[seat(0, [*other, 6, 9])])
    bench = Bench(name)
    want = [bench.run(each).token_ids.tolist() for each in (first, extra, second)]

    bench = Bench(name, make=lazy_device)
    works = []
    for each in (first, extra, second):
        works.append(bench.executor.forward(each))
        works[-1].sample()
    assert [work.result().token_ids.tolist() for work in works] == want


@pytest.mark.parametrize("without", ["prepare_step", "capture"])
def test_a_step_made_ready_has_the_bits_of_one_computed_kernel_by_kernel(
    without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [*PROMPT, *PROMPT[:3]]
    first = plan(
        1,
        [(0, 0, len(PROMPT), [0, 1, 2]), (1, 0, 6, [3, 4])],
        seats=[seat(0, PROMPT, logprobs=3), seat(1, other)],
    )
    first.samples[1] = False  # the rest of its prompt comes with the next step
    steps = [
        first,
        plan(2, [(0, len(PROMPT), 1, []), (1, 6, 7, [5, 6])]),
        plan(3, [(1, 13, 1, []), (0, len(PROMPT) + 1, 1, [])]),
    ]
    ready = Bench("cpu")
    got = [ready.run(step) for step in steps]
    monkeypatch.setattr(type(device("cpu")), without, lambda *_: None)
    plain = Bench("cpu")
    want = [plain.run(step) for step in steps]
    assert [result.token_ids.tolist() for result in got] == [result.token_ids.tolist() for result in want]
    for a, b in zip(got, want, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        for name in ("row", "chosen", "top_ids", "top"):
            assert np.array_equal(getattr(a.logprobs, name), getattr(b.logprobs, name))
    assert np.array_equal(ready.cache.data, plain.cache.data)  # type: ignore[attr-defined]


def test_a_step_of_more_tokens_than_the_worker_was_made_for_is_an_error() -> None:
    bench = Bench("cpu")
    long = (PROMPT * 2)[:17]
    with pytest.raises(ValueError, match="17 rows needs an arena of"):
        bench.run(plan(1, [(0, 0, 17, [0, 1, 2, 3, 4])], seats=[seat(0, long)]))


@every_device
def test_a_failed_forward_is_told_by_its_result_and_the_next_step_is_computed(name: str) -> None:
    bench = Bench(name, host_blocks=0)
    first = plan(1, [(0, 0, len(PROMPT), [0, 1, 2])], seats=[seat(0, PROMPT)])
    want = bench.run(first).token_ids.tolist()
    with pytest.raises(RuntimeError, match="no host memory"):
        bench.run(plan(2, [(0, len(PROMPT), 1, [])], to_host=[(0, 0)]))
    assert bench.run(plan(3, [(1, 0, len(PROMPT), [3, 4, 5])], seats=[seat(1, PROMPT)])).token_ids.tolist() == want


def test_copies_without_host_memory_fail_the_step() -> None:
    bench = Bench("reference", host_blocks=0)
    with pytest.raises(RuntimeError, match="no host memory"):
        bench.run(plan(1, to_host=[(0, 0)]))
    with pytest.raises(RuntimeError, match="no host memory"):
        bench.run(plan(2, to_device=[(0, 0)]))


def test_a_plan_without_rows_and_copies_is_an_empty_result() -> None:
    bench = Bench("reference", host_blocks=0)
    result = bench.run(plan(1))
    assert (len(result.token_ids), result.logprobs, result.copy_s < 0.1) == (0, None, True)


def test_a_result_says_what_the_step_took_and_apart_from_it_what_the_copies_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench("reference")
    worker = bench.executor.worker
    slow = {"to_host": 0.02, "to_device": 0.03, "forward": 0.05, "logits": 0.04}
    for where, name in (
        (type(bench.cache), "to_host"),
        (type(bench.cache), "to_device"),
        (worker.model, "forward"),
        (worker.model, "logits"),
    ):
        real = getattr(where, name)

        def slowed(*args: object, real=real, name=name) -> object:
            time.sleep(slow[name])
            return real(*args)

        monkeypatch.setattr(where, name, slowed)
    began = time.perf_counter()
    work = bench.executor.forward(
        plan(1, [(0, 0, len(PROMPT), [0, 1, 2])], seats=[seat(0, PROMPT)], to_host=[(4, 0)], to_device=[(0, 5)])
    )
    time.sleep(0.1)  # between forward and sampling the device waits: that is not the step's time
    work.sample()
    result = work.result()
    whole = time.perf_counter() - began
    assert result.copy_s >= 0.05
    assert result.elapsed_s >= 0.09
    assert result.copy_s + result.elapsed_s <= whole - 0.1


def test_a_trace_shows_copies_of_the_plans_that_have_some() -> None:
    bench = Bench("reference")
    trace = bench.executor.worker.trace = Trace()
    bench.run(plan(1, [(0, 0, len(PROMPT), [0, 1, 2])], seats=[seat(0, PROMPT)]))
    bench.run(plan(2, [(0, len(PROMPT), 1, [])], to_host=[(0, 0)]))
    names = [name for name, *_ in trace.intervals(COMPUTE)]
    assert names == ["forward", "sample", "copies", "forward", "sample"]


def test_rows_that_sample_nothing_are_timed_too() -> None:
    bench = Bench("reference")
    step = plan(1, [(0, 0, len(PROMPT), [0, 1, 2])], seats=[seat(0, PROMPT)])
    step.samples[:] = False
    result = bench.run(step)
    assert len(result.token_ids) == 0
    assert result.elapsed_s > 0
