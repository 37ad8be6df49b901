"""What every engine is asked, and the figures that come of it. One stopwatch for all: the time of a whole call."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.compare.engines.base import Load, Prompt, Ran, ScenarioName
from benchmarks.compare.process import EngineFailed
from ropeway.bench.workload import WorkloadRequest
from ropeway.errors import ConfigError

Ask = Callable[[Sequence[Prompt]], Ran]
SCENARIO_TIMEOUT_S = 1200.0
"""The slowest engine takes four minutes for the mixed workload on two cores."""
_PER_ROUND = 2
"""Times that prefill and decode are measured in a round; they are short."""
_WARM_UP = [WorkloadRequest(24, 6), WorkloadRequest(40, 4)]
_OTHER = 1 << 20
"""Keeps the seeds of different prompts of a round apart."""


@dataclass(frozen=True)
class Course:
    """The scenarios of a race.

    prefill: one prompt and its first token. decode: one request; what its tokens after the first take is the time of
    the request less that of another one of the same prompt length that ends with its first token. batch: all requests
    of the workload at once."""

    workload: tuple[WorkloadRequest, ...]
    prefill_tokens: int = 2048
    decode_prompt_tokens: int = 128
    decode_tokens: int = 128

    def __post_init__(self) -> None:
        if any(request.arrival_s for request in self.workload):
            raise ConfigError(
                "the race hands all requests in at once; a workload with arrival_s above 0 cannot be raced",
                param="workload",
            )
        for name, value, least in (
            ("prefill_tokens", self.prefill_tokens, 1),
            ("decode_prompt_tokens", self.decode_prompt_tokens, 1),
            ("decode_tokens", self.decode_tokens, 2),
        ):
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}", param=name)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def load(self, names: Iterable[ScenarioName]) -> Load:
        """What an engine needs room for to run these scenarios."""
        names = tuple(names)
        wanted = [request for name in names for request in self._requests(name)] + _WARM_UP
        lengths = [request.prompt_tokens + request.output_tokens for request in wanted]
        return Load(len(self.workload) if "batch" in names else 1, max(lengths))

    def warm_up(self, names: Iterable[ScenarioName], vocab_size: int) -> list[list[Prompt]]:
        """Calls to make before these scenarios are measured. Some engines compile for a length when they first meet it,
        so the prompt of the prefill is among them."""
        names = tuple(names)
        short = _WARM_UP[: self.load(names).requests]
        long = [self._requests("prefill")] if "prefill" in names else []
        return [_prompts(requests, vocab_size, _OTHER + n) for n, requests in enumerate([short, *long])]

    def measure(self, name: ScenarioName, ask: Ask, vocab_size: int, seed: int) -> Measured:
        """Run a scenario. ``seed`` chooses the token ids: the same ones for every engine in a round. Raises
        ``EngineFailed``, also when the machine is too busy for a figure."""
        match name:
            case "batch":
                ran = ask(_prompts(self.workload, vocab_size, seed))
                output_tokens = sum(request.output_tokens for request in self.workload)
                return Measured([output_tokens / ran.wall_s], [ran.wall_s], [tokens[0] for tokens in ran.tokens])
            case "prefill":
                request = self._requests(name)
                runs = [ask(_prompts(request, vocab_size, _OTHER * (2 + n) + seed)) for n in range(_PER_ROUND)]
                walls = [ran.wall_s for ran in runs]
                return Measured([self.prefill_tokens / wall for wall in walls], walls, [])
            case "decode":
                rates, walls = [], []
                for n in range(_PER_ROUND):
                    short, long = _prompts(self._requests(name), vocab_size, _OTHER * (4 + n) + seed)
                    first, whole = ask([short]).wall_s, ask([long]).wall_s
                    if whole <= first:
                        raise EngineFailed(
                            f"{self.decode_tokens} tokens took {whole:.2f} s and a single one {first:.2f} s: the "
                            "machine is too busy to measure on; end what else runs and go on with --resume"
                        )
                    walls += [first, whole]
                    rates.append((self.decode_tokens - 1) / (whole - first))
                return Measured(rates, walls, [])

    def _requests(self, name: ScenarioName) -> list[WorkloadRequest]:
        match name:
            case "batch":
                return list(self.workload)
            case "prefill":
                return [WorkloadRequest(self.prefill_tokens, 1)]
            case "decode":
                tokens = self.decode_prompt_tokens
                return [WorkloadRequest(tokens, 1), WorkloadRequest(tokens, self.decode_tokens)]


@dataclass(frozen=True)
class Measured:
    """A scenario in one round."""

    tokens_per_s: list[float]
    """prefill: prompt tokens; decode and batch: output tokens. One entry per measurement."""
    walls_s: list[float]
    """Of the calls behind it."""
    first_tokens: list[int]
    """batch: first output token of every request. Engines that run the same weights mostly agree."""


def median(rounds: Iterable[Measured]) -> float:
    return statistics.median(rate for measured in rounds for rate in measured.tokens_per_s)


def _prompts(requests: Sequence[WorkloadRequest], vocab_size: int, seed: int) -> list[Prompt]:
    return [
        Prompt(tuple(request.prompt(index, vocab_size, seed).tolist()), request.output_tokens)
        for index, request in enumerate(requests)
    ]
