"""Ropeway as it is in this tree: the step loop of its server in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import ropeway
from benchmarks.compare.checkpoints import ModelFiles
from benchmarks.compare.engines.base import SCENARIOS, Load, Place, Running, RunningWorker, ScenarioName, Setting
from benchmarks.compare.environments import Environment, Say, Unavailable
from ropeway.errors import ConfigError
from ropeway.settings import resolve
from ropeway.version import __version__

_SOURCE = Path(ropeway.__file__).parents[1]


class Ropeway:
    """Implements ``Engine``."""

    name = "ropeway"
    environment: Environment | None = None
    groups: tuple[tuple[ScenarioName, ...], ...] = (SCENARIOS,)

    def settings(self, files: ModelFiles) -> list[Setting]:
        # The quantised settings run the very files that llama.cpp runs. Inputs of their products are rounded to 8 bits,
        # as the other engines round theirs; docs/kernels.md shows what that costs.
        fast = {"activations": "int8"}
        found = [
            Setting("bf16", "bf16", "bf16"),
            Setting("int8", "int8", "bf16", {"file": "Q8_0", **fast}),
            Setting("int8, KV int8", "int8", "int8", {"file": "Q8_0", "kv_dtype": "int8", **fast}),
            Setting("int4", "int4", "bf16", {"file": "Q4_0", **fast}, precise=False),
        ]
        if files.shipped:
            found.append(Setting("shipped", "shipped", "bf16", {"file": "shipped", **fast}))
        return found

    def prepare(self, setting: Setting, files: ModelFiles, place: Place, say: Say) -> None:
        _model(setting, files)
        try:
            resolve(_options(setting), environ={})
        except ConfigError as error:
            raise Unavailable(f"this version of Ropeway refuses it: {error.message}") from error

    def start(self, setting: Setting, files: ModelFiles, place: Place, load: Load) -> Running:
        options = {
            **_options(setting),
            "model": str(_model(setting, files)),
            "threads": place.cores,
            "kv_memory": place.kv_bytes / 2**30,
            "max_num_seqs": max(load.requests, 1),
        }
        path = os.pathsep.join(filter(None, (str(_SOURCE), os.environ.get("PYTHONPATH"))))
        log = place.logs / f"ropeway-{setting.name}.log"
        return RunningWorker("run_ropeway.py", options, log=log, variables={"PYTHONPATH": path})

    def version(self, place: Place) -> str:
        return __version__


def _options(setting: Setting) -> dict[str, object]:
    return {"prefix_cache": False} | {name: value for name, value in setting.options.items() if name != "file"}


def _model(setting: Setting, files: ModelFiles) -> Path:
    match setting.options.get("file"):
        case None:
            return files.folder
        case "shipped":
            assert files.shipped is not None
            return files.shipped
        case kind:
            return files.gguf(kind)
