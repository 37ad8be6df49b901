"""Which tokens the requests under way may sample: constraints, compiled off the loop and followed step by step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from ropeway.errors import InvalidRequest, RopewayError
from ropeway.outcome import Refusal, StepOutput
from ropeway.plan import Ints, Masks, Plan
from ropeway.request import Request, SamplingParams

_REMEMBERED = 64
"""Compiled constraints that are kept for other requests with the same."""
_THREADS = 2
_STACK = 256 << 20
"""Of their threads: rules that lead to rules are followed by recursion. Untouched, it takes no memory."""


class Constraint(Protocol):
    """One completion's; see ``text/constraints.py``."""

    @property
    def failure(self) -> str | None: ...
    def fork(self) -> Constraint: ...
    def consume(self, token: int) -> None: ...


class Compiler(Protocol):
    """Makes constraints, in several threads at once."""

    def compile(self, params: SamplingParams) -> Constraint: ...
    def fill(self, constraints: Sequence[Any]) -> Ints:
        """int32 [m, words]: what each of them allows next; see ``Masks``."""
        ...


class Masking:
    """Owned by the engine, which calls it on one thread."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._pool: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[tuple[object, ...], Future[Constraint]] = OrderedDict()
        self._pending: dict[int, Future[Constraint]] = {}
        """Requests that wait for theirs."""
        self._live: dict[int, Constraint] = {}

    @property
    def compiling(self) -> bool:
        """Whether somebody waits for a constraint."""
        return bool(self._pending)

    @property
    def remembered(self) -> int:
        """Constraints that are kept for whoever comes with the same."""
        return len(self._compiled)

    @property
    def live(self) -> int:
        """Requests with a constraint."""
        return len(self._live)

    def begin(self, request: Request) -> None:
        """Compile the request's constraint; ``ready`` tells when that is done."""
        self._pending[request.id] = self._compile(request.params)

    def ready(self) -> list[tuple[int, Refusal | None]]:
        """Requests whose constraint is there since the last call, and why one cannot be had."""
        told: list[tuple[int, Refusal | None]] = []
        for request_id, future in list(self._pending.items()):
            if not future.done():
                continue
            del self._pending[request_id]
            error = future.exception()
            if error is None:
                self._live[request_id] = future.result().fork()
                told.append((request_id, None))
            else:
                told.append((request_id, _refusal(error)))
        return told

    def masks(self, plan: Plan) -> Masks | None:
        """Of the plan's sampling rows; every token before them has been ``settled``."""
        if not self._live:
            return None
        ids = plan.request[plan.samples].tolist()
        rows = [row for row, request_id in enumerate(ids) if request_id in self._live]
        if not rows:
            return None
        bits = self._compiler.fill([self._live[ids[row]] for row in rows])
        return Masks(np.array(rows, dtype=np.int32), bits)

    def settled(self, output: StepOutput) -> None:
        """Take in the tokens of a step, and forget who has ended."""
        if self._live:
            for request_id, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
                constraint = self._live.get(request_id)
                if constraint is not None:
                    constraint.consume(token)
        self.drop(finished.id for finished in output.finished)

    def failed(self) -> list[tuple[int, Refusal]]:
        """Requests whose constraint cannot go on."""
        failures = [(request_id, each.failure) for request_id, each in self._live.items()]
        return [
            (request_id, Refusal("InvalidRequest", f"the grammar cannot be followed any further: {why}"))
            for request_id, why in failures
            if why is not None
        ]

    def drop(self, ids: Iterable[int]) -> None:
        """These have ended."""
        if self._live or self._pending:
            for request_id in ids:
                self._live.pop(request_id, None)
                self._pending.pop(request_id, None)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: SamplingParams) -> Future[Constraint]:
        limits = (params.grammar, params.bad_words, params.allowed_token_ids)
        key = (*limits, params.thinking_budget, params.thinking)
        known = self._compiled.get(key)
        if known is None:
            known = self._compiled[key] = self._submit(params)
            if len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return known

    def _submit(self, params: SamplingParams) -> Future[Constraint]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ropeway-grammar")
        before = threading.stack_size(_STACK)  # of the thread that this may make
        try:
            return self._pool.submit(self._compiler.compile, params)
        finally:
            threading.stack_size(before)


def _refusal(error: BaseException) -> Refusal:
    """As the sender is told."""
    kind = type(error).__name__ if isinstance(error, RopewayError) else InvalidRequest.__name__
    message = error.message if isinstance(error, RopewayError) else f"the grammar cannot be compiled: {error}"
    return Refusal(kind, message)
