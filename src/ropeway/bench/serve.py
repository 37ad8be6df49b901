"""A load on a server that speaks OpenAI's API: requests sent over HTTP when they are due, every token timed.

In an open loop requests come at their times, whatever the server does. In a closed loop a number of users each send
their next request when the last one was answered; one that was refused waits as long as the server asks for first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from ropeway.bench.latencies import Recorder, Status, Targets, figures, summary
from ropeway.bench.traces import Trace, read_trace
from ropeway.bench.workload import WorkloadRequest, read_workload
from ropeway.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called with (requests ended, requests in all)."""

_MOST_MESSAGES = 20
_MOST_CHARACTERS = 300
"""Of an error's message: the rest is rarely the same twice."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go, and what is the same in all of them."""

    url: str
    """The server's address; ``/v1`` or ``/v1/completions`` at the end changes nothing."""
    model: str | None = None
    """None: the first one that the server names."""
    api_key: str | None = None
    timeout_s: float = 600.0
    """A request fails when nothing comes for so long."""

    @property
    def base(self) -> str:
        """Raises ``ConfigError`` for what is no HTTP address."""
        base = self.url.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        try:
            parsed = httpx.URL(base)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self.url!r} is no address: {error}", param="url") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(
                f"{self.url!r} is no address of an HTTP server; give one like http://127.0.0.1:8000", param="url"
            )
        return base


@dataclass
class Outcome:
    """What came of a load."""

    recorder: Recorder
    """Seconds since the load began, by the client's clock."""
    asked: Sequence[WorkloadRequest]
    model: str
    lag_s: list[float] = field(default_factory=list)
    """Open loop: how much later than planned each request was sent; what the client itself could not keep up with."""
    retry_after_s: list[float] = field(default_factory=list)
    """Of the requests refused with 429 that were told."""
    failures: Counter[str] = field(default_factory=Counter)
    """Message -> failed requests; of messages that differ in their numbers only, the first stands for all."""

    def figures(self, targets: Targets) -> dict[str, Any]:
        """Those of ``latencies.figures``, and what the load itself was like."""
        served = self.recorder.status == Status.OK
        asked = [request.output_tokens for request in self.asked]
        return {
            **figures(self.recorder, targets),
            "short_answers": int((served & (self.recorder.output_tokens < asked)).sum()),
            "input_tokens": sum(request.prompt_tokens for request in self.asked),
            "send_lag_s": summary(self.lag_s) if self.lag_s else None,
            "retry_after_s": summary(self.retry_after_s) if self.retry_after_s else None,
            "failures": dict(self.failures.most_common(_MOST_MESSAGES)),
        }


def read_load(
    workload: Path | None = None,
    traces: Sequence[Path] = (),
    *,
    rate: float | None = None,
    rate_scale: float | None = None,
    requests: int | None = None,
    concurrency: int | None = None,
    tier: str | None = None,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """The requests of a workload file or of a trace, the first ``requests`` of them, with the times of an open loop:
    as recorded, ``rate_scale`` times as fast, or at random, ``rate`` per second. ``concurrency`` says that times don't
    matter; ``tier`` goes before what the file says.

    Raises ``ConfigError`` for contradictions and for what is wrong with a file."""
    if (workload is None) == (not traces):
        raise ConfigError("a load is either a workload file or a trace; give one of them", param="workload")
    if sum(each is not None for each in (rate, rate_scale, concurrency)) > 1:
        raise ConfigError(
            "a rate, a rate scale and a concurrency exclude each other: the first two say when requests come, with a "
            "concurrency they come when others are answered; give one of them",
            param="rate",
        )

    def timed(trace: Trace) -> Trace:
        if concurrency is not None:
            return trace
        return trace.scaled(1.0 if rate_scale is None else rate_scale) if rate is None else trace.at_rate(rate, seed)

    if workload is None:
        trace = read_trace(traces)
        trace = timed(trace if requests is None else trace.take(requests))
        asked = (trace if concurrency is not None else trace.from_zero()).workload()
    else:
        asked = sorted(read_workload(workload), key=lambda request: request.arrival_s)
        if requests is not None and requests > len(asked):
            raise ConfigError(
                f"{requests} requests were asked of {workload}, which holds {len(asked)}; ask for fewer",
                param="requests",
            )
        asked = asked[:requests]
        lengths = np.array([(each.prompt_tokens, each.output_tokens) for each in asked], dtype=np.int64)
        trace = timed(Trace(lengths[:, 0], lengths[:, 1], np.array([each.arrival_s for each in asked])))
        asked = [dataclasses.replace(each, arrival_s=at) for each, at in zip(asked, trace.times.tolist(), strict=True)]
    return asked if tier is None else [dataclasses.replace(each, tier=tier) for each in asked]


def run_load(
    endpoint: Endpoint,
    workload: Sequence[WorkloadRequest],
    *,
    concurrency: int | None = None,
    vocab_size: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Outcome:
    """Send a workload and wait for all answers. ``concurrency``: users of a closed loop, who take the requests in
    their order; None: an open loop by arrival times. Prompts given by length get ids in [0, vocab_size).

    Raises ``ConfigError`` for a server that can't be asked for its models; what happens to a request is counted."""
    if not workload:
        raise ConfigError("the load holds no request", param="workload")
    return asyncio.run(_Load(endpoint, workload, vocab_size, seed, progress).run(concurrency))


class _Load:
    def __init__(
        self,
        endpoint: Endpoint,
        workload: Sequence[WorkloadRequest],
        vocab_size: int,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self._endpoint = endpoint
        self._base = endpoint.base
        self._workload = workload
        self._vocab_size = vocab_size
        self._seed = seed
        self._progress = progress
        tiers = [request.tier or "default" for request in workload]
        named = any(request.tier is not None for request in workload)
        self._outcome = Outcome(Recorder(len(workload), tiers if named else None), workload, model="")
        self._messages: dict[str, str] = {}
        self._ended = 0
        self._began = 0.0

    async def run(self, concurrency: int | None) -> Outcome:
        key = self._endpoint.api_key
        async with httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key is not None else {},
            timeout=httpx.Timeout(self._endpoint.timeout_s),
            # An idle connection is dropped before a server does that, which would look like a failure of its.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0),
            trust_env=False,  # a proxy would be measured, too
        ) as client:
            self._client = client
            self._outcome.model = self._endpoint.model or await self._first_model()
            self._began = time.perf_counter()
            if concurrency is None:
                await self._open_loop()
            else:
                await self._closed_loop(concurrency)
        return self._outcome

    async def _open_loop(self) -> None:
        sending: list[asyncio.Task[float]] = []
        for index, request in sorted(enumerate(self._workload), key=lambda pair: pair[1].arrival_s):
            body = self._body(index, request)  # before it is due: long prompts take their time
            await asyncio.sleep(max(request.arrival_s - self._now(), 0.0))
            self._outcome.lag_s.append(self._now() - request.arrival_s)
            sending.append(asyncio.create_task(self._send(index, request, body)))
        await asyncio.gather(*sending)

    async def _closed_loop(self, concurrency: int) -> None:
        left = deque(enumerate(self._workload))

        async def user() -> None:
            while left:
                index, request = left.popleft()
                wait_s = await self._send(index, request, self._body(index, request))
                if left:
                    await asyncio.sleep(wait_s)

        await asyncio.gather(*(user() for _ in range(min(concurrency, len(self._workload)))))

    async def _send(self, index: int, request: WorkloadRequest, body: bytes) -> float:
        """Send a request and note what comes of it. Gives the seconds to wait before the next one."""
        recorder, stream = self._outcome.recorder, _TokenStream()
        headers = {"content-type": "application/json"}
        if request.tier is not None and _rank(request.tier) is None:
            headers["x-ropeway-tier"] = request.tier
        status, wait_s, failure = Status.FAILED, 0.0, ""
        recorder.arrived(index, self._now())
        try:
            async with self._client.stream(
                "POST", f"{self._base}/v1/completions", content=body, headers=headers
            ) as response:
                if response.status_code == httpx.codes.OK:
                    async for data in response.aiter_bytes():
                        stream.feed(data, self._now())
                    failure = stream.failure
                    status = Status.FAILED if failure else Status.OK
                else:
                    failure = f"{response.status_code}: {_message(await response.aread())}"
                    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
                        status, wait_s = Status.SHED, self._retry_after(response)
        except httpx.TimeoutException:
            failure = f"nothing came for {self._endpoint.timeout_s:g} s"
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        now = self._now()
        recorder.stream(index, stream.tokens_s, stream.output_tokens)
        recorder.ended(index, status, now)
        if status is Status.FAILED:
            message = self._messages.setdefault(re.sub(r"\d+", "0", failure), failure)
            self._outcome.failures[message] += 1
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended, len(self._workload))
        return wait_s

    def _retry_after(self, response: httpx.Response) -> float:
        """Seconds; 0 when the server doesn't say (or names a date, which none of these does)."""
        value = response.headers.get("retry-after", "")
        if not value.isdecimal():
            return 0.0
        self._outcome.retry_after_s.append(float(value))
        return float(value)

    def _body(self, index: int, request: WorkloadRequest) -> bytes:
        body: dict[str, Any] = {
            "model": self._outcome.model,
            "prompt": request.prompt(index, self._vocab_size, self._seed).tolist(),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if request.tier is not None:
            rank = _rank(request.tier)
            body["priority"] = request.tier if rank is None else rank
        if request.tenant is not None:
            body["user"] = request.tenant
        return msgspec.json.encode(body)

    async def _first_model(self) -> str:
        url = f"{self._base}/v1/models"
        try:
            response = await self._client.get(url)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"{url} does not answer ({type(error).__name__}: {error}); is the server running there?", param="url"
            ) from error
        if response.status_code != httpx.codes.OK:
            hint = "give its API key" if response.status_code == httpx.codes.UNAUTHORIZED else "name the model"
            raise ConfigError(
                f"{url} answers {response.status_code}: {_message(response.content)}; {hint}", param="url"
            )
        try:
            models = msgspec.json.decode(response.content, type=_Models).data
        except msgspec.DecodeError as error:
            raise ConfigError(f"{url} does not answer with a list of models; name the model", param="model") from error
        if not models:
            raise ConfigError(f"{url} names no model; name the model", param="model")
        return models[0].id

    def _now(self) -> float:
        return time.perf_counter() - self._began


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    """What is read of a chunk; the rest is skipped without making objects of it."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class _TokenStream:
    """Reads the server-sent events of one answer and notes when each token came. Where the server doesn't give token
    ids, each piece of text counts as a token for the gaps, and the number of tokens is that of its usage."""

    def __init__(self) -> None:
        self.tokens_s: list[float] = []
        self._used: int | None = None
        self._error: str | None = None
        self._finished = False
        self._rest = b""

    @property
    def output_tokens(self) -> int:
        return len(self.tokens_s) if self._used is None else self._used

    @property
    def failure(self) -> str:
        """Why this is no whole answer; empty if it is one."""
        if self._error is not None:
            return f"the server said in its answer: {self._error}"
        return "" if self._finished else "the answer broke off"

    def feed(self, data: bytes, now_s: float) -> None:
        """Bytes that came at ``now_s``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._finished = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.DecodeError as error:
            self._error = f"what is no chunk of a completion: {error}"
            return
        if chunk.error is not None:
            self._error = chunk.error if isinstance(chunk.error, str) else chunk.error.message
        for choice in chunk.choices:
            tokens = len(choice.token_ids) if choice.token_ids is not None else int(bool(choice.text))
            self.tokens_s += [now_s] * tokens
            self._finished |= choice.finish_reason is not None
        if chunk.usage is not None:
            self._used = chunk.usage.completion_tokens


def _rank(tier: str) -> int | None:
    """A tier given as an integer, as vLLM has priorities; None for a name."""
    return int(tier) if tier.removeprefix("-").isdecimal() else None


def _message(body: bytes) -> str:
    """Of an answer that is an error."""
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except msgspec.DecodeError:
        error = None
    told = error.message if isinstance(error, _Error) else error
    return (told or body.decode(errors="replace").strip())[:_MOST_CHARACTERS]
