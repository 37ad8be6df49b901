"""An executor without a model: a lazy device whose "attention" is a hash over everything it reads.

Nothing runs before somebody waits for a result (the worst case of an asynchronous device), and a token
depends on every key it should see, on its request's seed and on its own output so far: a stale block, a
wrong block table, a lost or doubled token, a shifted prompt border, or a copy made too early, too late or
from the wrong place changes the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ropeway.outcome import LogprobColumns
from ropeway.plan import Masks, Plan, Result, Seat
from ropeway.request import SamplingParams

VOCAB = 61
END = 0
LAYERS = 2

HostBlock = list[list[int | None]]
"""Copy of a device block: its slots, layer by layer."""


def mixes(values: Iterable[int]) -> list[int]:
    """Order-sensitive hashes of all prefixes, that of the empty one first."""
    return list(accumulate(values, lambda h, value: (h * 31 + value + 1) % 1_000_003, initial=7))


def mix(values: Iterable[int]) -> int:
    """An order-sensitive hash."""
    return mixes(values)[-1]


def choose(hidden: int, seed: int, output: Sequence[int], params: SamplingParams, end_ids: Sequence[int]) -> int:
    """The "sampler": depends on the last hidden state, the seed and the output so far."""
    token = mix([hidden, seed, len(output), *output]) % VOCAB
    while len(output) < params.min_tokens and token in end_ids:
        token = (token + 1) % VOCAB
    return token


def alone(prompt: Sequence[int], params: SamplingParams, seed: int, end_ids: Sequence[int], limit: int) -> list[int]:
    """The output of a request that has the device for itself, without any cache."""
    tokens = list(prompt)
    while len(tokens) < limit:
        hidden = list(tokens)
        for _ in range(LAYERS):
            hidden = mixes(hidden)[1:]
        tokens.append(choose(hidden[-1], seed, tokens[len(prompt) :], params, end_ids))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class _Row:
    seat: Seat
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


class FakeWork:
    def __init__(self, device: FakeDevice, plan: Plan) -> None:
        self.device = device
        self.plan = plan
        self.hidden: list[int] = []
        self.done: Result | None = None

    def sample(self, masks: Masks | None = None) -> None:
        self.device.queue.append(lambda: self.device.run_sample(self))

    def result(self) -> Result:
        while self.done is None:
            self.device.queue.popleft()()
        return self.done


class FakeDevice:
    """Implements ``Executor``. Blocks are poisoned at start, here and on the host, so reading an unwritten slot
    raises."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host_blocks: int | MutableSequence[HostBlock | None] = 0,
        *,
        step_s: Callable[[Plan], float] = lambda plan: 0.0,
        copy_s: float = 0.0,
    ) -> None:
        """``host_blocks``: how many, or the memory itself. ``step_s``: what a plan is said to take, copies not counted;
        ``copy_s``: what one copy is said to take."""
        self.block_size = block_size
        self.step_s = step_s
        self.copy_s = copy_s
        self.kv: list[list[list[int | None]]] = [
            [[None] * block_size for _ in range(num_blocks)] for _ in range(LAYERS)
        ]
        self.host: MutableSequence[HostBlock | None] = (
            [None] * host_blocks if isinstance(host_blocks, int) else host_blocks
        )
        """What each host block holds; None: nothing to be trusted. A test's store may read and set it."""
        self.copied_to_host = 0
        self.copied_to_device = 0
        self.rows: dict[int, _Row] = {}
        self.queue: deque = deque()
        self.last_seq = 0
        self.cut_rows = 0
        """Rows that were a part of a prompt, its end not included."""

    def forward(self, plan: Plan) -> FakeWork:
        assert plan.seq == self.last_seq + 1
        self.last_seq = plan.seq
        work = FakeWork(self, plan)
        self.queue.append(lambda: self.run_forward(work))
        return work

    def close(self) -> None:
        self.queue.clear()

    def run_forward(self, work: FakeWork) -> None:
        plan = work.plan
        self.run_copies(plan)
        for seat in plan.seats:
            self.rows[seat.slot] = _Row(seat, seat.token_ids.tolist(), seat.blocks.tolist())
        assert len(set(plan.slot.tolist())) == len(plan.slot), "a slot twice in one plan"
        given = iter(plan.new_blocks.tolist())
        for slot, start, count, new in zip(plan.slot, plan.start, plan.count, plan.new_block_count, strict=True):
            row = self.rows[slot]
            row.blocks += [next(given) for _ in range(new)]
            hidden = row.tokens[start : start + count]
            assert len(hidden) == count, "a token id the device does not know"
            for layer in self.kv:
                for i, value in enumerate(hidden):
                    position = start + i
                    layer[row.blocks[position // self.block_size]][position % self.block_size] = value
                seen = [layer[row.blocks[p // self.block_size]][p % self.block_size] for p in range(start + count)]
                assert None not in seen, "an unwritten slot was read"
                hidden = mixes(seen)[start + 1 :]  # type: ignore[arg-type]
            work.hidden.append(hidden[-1])

    def run_copies(self, plan: Plan) -> None:
        for to in (plan.to_host[:, 1].tolist(), plan.to_device[:, 1].tolist()):
            assert len(set(to)) == len(to), "a plan copies twice to one block"
        for block, place in plan.to_host.tolist():
            assert min(block, place) >= 0
            copy = [layer[block].copy() for layer in self.kv]
            assert any(value is not None for value in copy[0]), "an unwritten device block was copied to the host"
            self.host[place] = copy
        for place, block in plan.to_device.tolist():
            assert min(block, place) >= 0
            stored = self.host[place]
            assert stored is not None, "an unwritten host block was copied to the device"
            for layer, values in zip(self.kv, stored, strict=True):
                layer[block] = values.copy()
        self.copied_to_host += len(plan.to_host)
        self.copied_to_device += len(plan.to_device)

    def run_sample(self, work: FakeWork) -> None:
        plan, tokens, logprobs = work.plan, [], []
        for slot, start, count, samples, hidden in zip(
            plan.slot, plan.start, plan.count, plan.samples, work.hidden, strict=True
        ):
            if not samples:
                self.cut_rows += 1
                continue
            row, seat = self.rows[slot], self.rows[slot].seat
            known = row.tokens[: start + count]
            token = choose(hidden, seat.seed, known[seat.prompt_tokens :], seat.params, seat.end_ids)
            row.tokens = [*known, token]
            if seat.params.logprobs is not None:
                logprobs.append((len(tokens), token))
            tokens.append(token)
        copies = len(plan.to_host) + len(plan.to_device)
        work.done = Result(
            np.array(tokens, dtype=np.int32), _logprobs(logprobs), self.step_s(plan), self.copy_s * copies
        )


class HostArray(MutableSequence[HostBlock | None]):
    """Host blocks in an array, so that a store which knows bytes only may read and write them."""

    def __init__(self, count: int, block_size: int) -> None:
        self._values = np.full((count, LAYERS, block_size), -1, dtype=np.int32)
        self.data: NDArray[np.uint8] = self._values.reshape(count, -1).view(np.uint8)
        """uint8 [blocks, block bytes]: the same memory."""

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: int) -> HostBlock:  # type: ignore[override]
        return [[None if value < 0 else value for value in layer] for layer in self._values[place].tolist()]

    def __setitem__(self, place: int, block: HostBlock | None) -> None:  # type: ignore[override]
        assert block is not None
        self._values[place] = [[-1 if value is None else value for value in layer] for layer in block]

    def __delitem__(self, place: int) -> None:  # type: ignore[override]
        raise TypeError("host blocks stay")

    def insert(self, index: int, value: HostBlock | None) -> None:
        raise TypeError("host blocks stay")


def _logprobs(chosen: list[tuple[int, int]]) -> LogprobColumns | None:
    """A stand-in that tells whose it is: the log-probability of token t is -t."""
    if not chosen:
        return None
    ids = np.array([token for _, token in chosen], dtype=np.int32)
    return LogprobColumns(
        row=np.array([row for row, _ in chosen], dtype=np.int32),
        chosen=-ids.astype(np.float32),
        top_ids=ids[:, None],
        top=-ids.astype(np.float32)[:, None],
    )
