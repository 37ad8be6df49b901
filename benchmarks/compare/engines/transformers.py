"""transformers: static batches of 8, padded. Its own continuous batching (``generate_batch``) finished none of 32
requests in 100 s on two cores, so it does not take part."""

from __future__ import annotations

from benchmarks.compare.checkpoints import ModelFiles
from benchmarks.compare.engines.base import SCENARIOS, Load, Place, Running, RunningWorker, ScenarioName, Setting
from benchmarks.compare.environments import Environment, Say

_ENVIRONMENT = Environment("transformers", ("torch==2.13.0+cpu", "transformers==5.24.0", "accelerate==1.15.0"))


class Transformers:
    """Implements ``Engine``."""

    name = "transformers"
    environment: Environment | None = _ENVIRONMENT
    groups: tuple[tuple[ScenarioName, ...], ...] = (SCENARIOS,)

    def settings(self, files: ModelFiles) -> list[Setting]:
        return [Setting("bf16", "bf16", "bf16", {"batch": 8}, note="padded batches of 8")]

    def prepare(self, setting: Setting, files: ModelFiles, place: Place, say: Say) -> None:
        files.folder  # noqa: B018 - written on demand

    def start(self, setting: Setting, files: ModelFiles, place: Place, load: Load) -> Running:
        return RunningWorker(
            "run_transformers.py",
            {"model": str(files.folder), "threads": place.cores, **setting.options},
            log=place.logs / "transformers.log",
            python=_ENVIRONMENT.python(place.environments),
            variables={"HF_HUB_OFFLINE": "1"},
        )

    def version(self, place: Place) -> str:
        return _ENVIRONMENT.versions(place.environments).get("transformers", "")
