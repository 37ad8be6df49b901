"""An executor without a model: a lazy device whose "attention" is a hash over everything it reads.

Nothing runs before somebody waits for a result (the worst case of an asynchronous device), and a token
depends on every key it should see, on its request's seed and on its own output so far: a stale block, a
wrong block table, a lost or doubled token, or a shifted prompt border changes the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ropeway.outcome import LogprobColumns
from ropeway.plan import Plan, Result, Seat
from ropeway.request import SamplingParams

VOCAB = 61
END = 0
LAYERS = 2


def mix(values: Sequence[int]) -> int:
    """An order-sensitive hash."""
    h = 7
    for value in values:
        h = (h * 31 + value + 1) % 1_000_003
    return h


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
            hidden = [mix(hidden[: i + 1]) for i in range(len(hidden))]
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

    def sample(self) -> None:
        self.device.queue.append(lambda: self.device.run_sample(self))

    def result(self) -> Result:
        while self.done is None:
            self.device.queue.popleft()()
        return self.done


class FakeDevice:
    """Implements ``Executor``. Blocks are poisoned at start, so reading an unwritten slot raises."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv: list[list[list[int | None]]] = [
            [[None] * block_size for _ in range(num_blocks)] for _ in range(LAYERS)
        ]
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
                hidden = [mix(seen[: start + i + 1]) for i in range(count)]  # type: ignore[arg-type]
            work.hidden.append(hidden[-1])

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
        work.done = Result(np.array(tokens, dtype=np.int32), _logprobs(logprobs))


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
