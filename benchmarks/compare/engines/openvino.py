"""OpenVINO GenAI: ``ContinuousBatchingPipeline`` over a model that optimum-intel has converted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.compare.checkpoints import ModelFiles
from benchmarks.compare.engines.base import (
    SCENARIOS,
    WORKERS,
    Load,
    Place,
    Running,
    RunningWorker,
    ScenarioName,
    Setting,
)
from benchmarks.compare.environments import Environment, Say, Unavailable

_ENVIRONMENT = Environment(
    "openvino",
    (
        "torch==2.13.0+cpu",
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
    ),
    # optimum-intel asks for it, and pip finds a CUDA build, which a CPU torch cannot load.
    unwanted=("torchvision",),
)
_GROUP = 128
"""Values under one scale of 4-bit weights: its fastest."""


class OpenVINO:
    """Implements ``Engine``."""

    name = "openvino"
    environment: Environment | None = _ENVIRONMENT
    groups: tuple[tuple[ScenarioName, ...], ...] = (SCENARIOS,)

    def __init__(self) -> None:
        self._models: dict[str, Path] = {}
        """By setting, once it is prepared."""

    def settings(self, files: ModelFiles) -> list[Setting]:
        # The widest group that divides the rows: SmolLM2's have 576 values.
        group = _GROUP if int(files.config["hidden_size"]) % _GROUP == 0 else _GROUP // 2
        return [
            # Without the hints it may compute in float32 and store keys and values in 8 bits.
            Setting("bf16", "bf16", "bf16", {"quantisation": None, "kv": "bf16"}),
            Setting("int8", "int8", "u8", {"quantisation": {"bits": 8, "sym": False}, "kv": "u8"}),
            Setting(
                "int4",
                "int4",
                "u8",
                {"quantisation": {"bits": 4, "sym": False, "group_size": group, "ratio": 1.0}, "kv": "u8"},
                # More than 1 % on real weights; it may race all the same, since nobody is to be beaten by a rule.
            ),
        ]

    def prepare(self, setting: Setting, files: ModelFiles, place: Place, say: Say) -> None:
        def export(target: Path) -> None:
            say(f"converting {files.name} for OpenVINO ({setting.name})")
            wanted = {
                "model": str(files.folder),
                "target": str(target),
                "quantisation": setting.options["quantisation"],
            }
            command = [_ENVIRONMENT.python(place.environments), WORKERS / "export_openvino.py", json.dumps(wanted)]
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode != 0:
                raise Unavailable(f"the model cannot be converted: {' / '.join(done.stderr.splitlines()[-3:])}")

        self._models[setting.name] = files.exported(f"openvino-{setting.name}", export)

    def start(self, setting: Setting, files: ModelFiles, place: Place, load: Load) -> Running:
        return RunningWorker(
            "run_openvino.py",
            {
                "model": str(self._models[setting.name]),
                "scheduler": {
                    "cache_size": max(place.kv_bytes >> 30, 1),
                    "max_num_batched_tokens": 2048,
                    "max_num_seqs": max(load.requests, 1),
                    "dynamic_split_fuse": True,
                    "enable_prefix_caching": False,
                },
                "properties": {
                    "INFERENCE_PRECISION_HINT": "bf16",
                    "KV_CACHE_PRECISION": setting.options["kv"],
                    "INFERENCE_NUM_THREADS": place.cores,
                },
            },
            log=place.logs / f"openvino-{setting.name}.log",
            python=_ENVIRONMENT.python(place.environments),
        )

    def version(self, place: Place) -> str:
        return _ENVIRONMENT.versions(place.environments).get("openvino-genai", "")
