"""What the race wants of an engine. One module per engine implements ``Engine``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.compare.checkpoints import ModelFiles
from benchmarks.compare.environments import Environment, Say
from benchmarks.compare.process import EngineFailed, EngineProcess, Worker

WORKERS = Path(__file__).parents[1] / "workers"
LOAD_TIMEOUT_S = 1800.0
"""vLLM compiles for two minutes on two cores with nothing else on them."""

Weights = Literal["bf16", "int8", "int4", "shipped"]
"""Precision of the weights. shipped: whatever the model's GGUF file holds."""
ScenarioName = Literal["prefill", "decode", "batch"]
SCENARIOS: tuple[ScenarioName, ...] = ("prefill", "decode", "batch")


@dataclass(frozen=True)
class Prompt:
    """One request; its output is greedy and exactly as long as asked, end tokens or not."""

    token_ids: tuple[int, ...]
    output_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {"prompt": list(self.token_ids), "output_tokens": self.output_tokens}


@dataclass(frozen=True)
class Setting:
    """One way to run an engine on a model."""

    name: str
    """Unique among the engine's settings."""
    weights: Weights
    kv: str
    """Type of the stored keys and values, for the report."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the engine's adapter alone; plain data, since a changed one makes earlier rounds worthless."""
    precise: bool = True
    """Whether its perplexity is at most 1 % above bf16's on real weights."""
    note: str = ""


@dataclass(frozen=True)
class Load:
    """What a start must have room for."""

    requests: int
    """That run at once."""
    longest: int
    """Prompt and output tokens of the longest of them."""


@dataclass(frozen=True)
class Ran:
    wall_s: float
    """From handing the requests in to having the last token."""
    tokens: list[list[int]]
    """Output tokens in the order of the requests."""


class Running(Protocol):
    """An engine that takes requests."""

    @property
    def load_s(self) -> float:
        """From the start of its process, imports included."""
        ...

    @property
    def process(self) -> EngineProcess: ...

    def run(self, prompts: Sequence[Prompt], timeout_s: float) -> Ran:
        """Complete prompts that all come at once. Raises ``EngineFailed``."""
        ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where a race keeps things."""

    environments: Path
    logs: Path
    cpus: tuple[int, ...]
    """Numbers of the processors that engines may use."""
    kv_bytes: int
    """Room for keys and values that every engine with a pool gets; allocated or not, it is the same for all."""

    @property
    def cores(self) -> int:
        return len(self.cpus)


class Engine(Protocol):
    name: str
    environment: Environment | None
    """None: it runs in this one."""
    groups: tuple[tuple[ScenarioName, ...], ...]
    """Scenarios that one start serves; an engine whose best configuration depends on the scenario has several."""

    def settings(self, files: ModelFiles) -> list[Setting]:
        """All settings worth racing on this model."""
        ...

    def prepare(self, setting: Setting, files: ModelFiles, place: Place, say: Say) -> None:
        """Write the model in the engine's format. The environment is there. Raises ``Unavailable``."""
        ...

    def start(self, setting: Setting, files: ModelFiles, place: Place, load: Load) -> Running:
        """Raises ``EngineFailed``."""
        ...

    def version(self, place: Place) -> str: ...


class RunningWorker:
    """Implements ``Running`` over one of the scripts in ``workers``."""

    def __init__(
        self,
        script: str,
        settings: Mapping[str, Any],
        *,
        log: Path,
        python: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """``python``: the environment's; None: this one's. Raises ``EngineFailed``."""
        command = [str(python or sys.executable), str(WORKERS / script), json.dumps(dict(settings))]
        self.process: Worker = Worker(command, log=log, variables=variables)
        try:
            self.process.answer(LOAD_TIMEOUT_S)
        except BaseException:
            self.process.stop()
            raise
        self.load_s = self.process.age_s

    def run(self, prompts: Sequence[Prompt], timeout_s: float) -> Ran:
        answer = self.process.ask({"requests": [prompt.as_json() for prompt in prompts]}, timeout_s)
        return Ran(answer["wall_s"], answer["tokens"])

    def stop(self) -> None:
        self.process.stop()


def checked(ran: Ran, prompts: Sequence[Prompt]) -> Ran:
    """``ran``, unless the engine produced another number of tokens than asked: raises ``EngineFailed``."""
    if len(ran.tokens) != len(prompts):
        raise EngineFailed(f"{len(prompts)} requests were sent and {len(ran.tokens)} answered")
    for number, (tokens, prompt) in enumerate(zip(ran.tokens, prompts, strict=True), start=1):
        if len(tokens) != prompt.output_tokens:
            raise EngineFailed(f"request {number}: {prompt.output_tokens} tokens were asked and {len(tokens)} came")
    return ran
