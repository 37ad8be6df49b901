"""A whole comparison, from what a user asks to plain data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.checkpoints import ModelFiles
from benchmarks.compare.engines.base import Engine, Place, Weights
from benchmarks.compare.engines.llama_cpp import LlamaCpp
from benchmarks.compare.engines.openvino import OpenVINO
from benchmarks.compare.engines.ropeway import Ropeway
from benchmarks.compare.engines.transformers import Transformers
from benchmarks.compare.engines.vllm import VLLM
from benchmarks.compare.environments import Say
from benchmarks.compare.race import Race, ropeway_digest
from benchmarks.compare.report import report_of
from benchmarks.compare.scenarios import Course
from benchmarks.compare.store import Store
from ropeway.bench.random_model import random_model
from ropeway.bench.workload import read_workload
from ropeway.loading.sources import resolve

MIXED = Path(__file__).parents[1] / "workloads" / "mixed32.jsonl"
_ENGINES: Mapping[str, Callable[[], Engine]] = {
    "ropeway": Ropeway,
    "vllm": VLLM,
    "openvino": OpenVINO,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}
ENGINES = tuple(_ENGINES)
WEIGHTS: tuple[Weights, ...] = ("bf16", "int8", "int4", "shipped")


@dataclass(frozen=True)
class Options:
    """A race as a user asks for it."""

    cache: Path
    model: str | None = None
    shape: str | None = None
    """Instead of a model: random weights."""
    workload: Path = MIXED
    requests: int | None = None
    """Only the first of the workload."""
    engines: tuple[str, ...] = ENGINES
    weights: tuple[str, ...] = WEIGHTS
    rounds: int = 3
    resume: bool = False
    prefill_tokens: int = 2048
    decode_tokens: int = 128
    kv_bytes: int = 4 << 30

    @property
    def name(self) -> str:
        """Of the model, short."""
        return f"{self.shape}-random" if self.shape else Path(self.model or "").name.removesuffix(".gguf")


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ropeway-compare"


def files_of(options: Options) -> ModelFiles:
    """The model of a race. Raises ``ConfigError`` for a shape that is not known, and what finding a model raises."""
    source = random_model(options.shape) if options.shape else resolve(options.model or "")
    return ModelFiles(source, options.cache / "models", name=options.name)


def compare(options: Options, say: Say) -> dict[str, Any]:
    """Race, and return ``report_of`` it. Raises ``ConfigError`` for a workload that cannot be raced, and what
    ``files_of`` raises."""
    workload = tuple(read_workload(options.workload)[: options.requests])
    course = Course(workload, prefill_tokens=options.prefill_tokens, decode_tokens=options.decode_tokens)
    files = files_of(options)
    # With another Ropeway it is another race: rounds that did not run in turns are not compared.
    identity = (files.digest, course.digest, ropeway_digest(), str(options.kv_bytes))
    store = Store(options.cache / "races", files.name, *identity)
    engines = [_ENGINES[name]() for name in options.engines]
    if not options.resume:
        for engine in engines:
            store.forget(engine.name)
    place = Place(
        environments=options.cache,
        logs=options.cache / "logs",
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        kv_bytes=options.kv_bytes,
    )
    race = Race(engines, files, course, place, store, say, weights=options.weights)
    race.run(options.rounds)
    return report_of(race)
