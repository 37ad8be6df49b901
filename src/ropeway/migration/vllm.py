"""The arguments of ``vllm serve`` as our settings."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from ropeway.errors import ConfigError
from ropeway.migration.translation import Translation

_GIB = 2**30
_SIZES = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_GRPC_PORT = 4317
"""Of OTLP."""
_NO_SUCH_FEATURE = "Ropeway does not do this"


def from_vllm(arguments: str | Sequence[str]) -> Translation:
    """What follows ``vllm serve``, or all of it. Raises ``ConfigError`` for what cannot be taken apart."""
    words = shlex.split(arguments) if isinstance(arguments, str) else list(arguments)
    for word in ("vllm", "serve"):
        if words and words[0] == word:
            words = words[1:]
    translation = Translation()
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("-"):
            if "model" in translation.values:
                raise ConfigError(f"{word!r} stands where an option was expected")
            translation.set("model", word)
            continue
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        while not equals and place < len(words) and not re.match(r"--?[A-Za-z]", words[place]):
            values.append(words[place])
            place += 1
        flag = _ALIASES.get(name, name.lstrip("-").replace("_", "-"))
        if flag in _SAME and len(values) > 1:  # one value: what follows is the model
            place -= len(values) - 1
            values = values[:1]
        if flag in _SWITCHES and values and not equals:  # a switch takes no value: the model comes after it
            place -= len(values)
            values = []
        _translate(flag, values, translation)
    return translation


def _translate(flag: str, values: list[str], translation: Translation) -> None:
    value = values[0] if values else None
    if flag in _SAME:
        setting, convert = _SAME[flag]
        if value is None:
            raise ConfigError(f"--{flag} needs a value")
        try:
            translation.set(setting, convert(value))
        except (ValueError, KeyError) as error:
            translation.lose(f"--{flag}", value, f"{_NO_SUCH_FEATURE} ({error})" if str(error) else _NO_SUCH_FEATURE)
    elif flag in _SWITCHES:
        ours, wanted = _SWITCHES[flag]
        if ours is None:
            translation.keep(f"--{flag}", str(wanted))
        else:
            translation.set(ours, wanted)
    elif flag == "served-model-name":
        translation.set("served_model_name", ",".join(values))
    elif flag in _KEPT:
        translation.keep(f"--{flag}", _KEPT[flag])
    elif flag in _LOST:
        off, why = _LOST[flag]
        if value is not None and value in off:
            translation.keep(f"--{flag}", "off, as it is here")
        else:
            translation.lose(f"--{flag}", " ".join(values) or True, why)
    else:
        translation.lose(f"--{flag}", " ".join(values) or True, "an unknown option")


def _size(text: str) -> int:
    """``4096``, ``4k`` or ``4K`` (1,000 and 1,024)."""
    if text and text[-1] in _SIZES:
        return int(float(text[:-1]) * _SIZES[text[-1]])
    return int(text)


def _one_of(words: dict[str, str]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in words:
            raise ValueError(f"only {', '.join(words)}")
        return words[text]

    return convert


def _over_http(url: str) -> str:
    """vLLM speaks gRPC unless told otherwise, which collectors take at another port."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.port == _GRPC_PORT:
        raise ValueError("spans go over HTTP, as a rule to port 4318: --otlp-endpoint")
    return url


def _origins(text: str) -> str:
    given = json.loads(text)
    return ",".join(given) if isinstance(given, list) else str(given)


_ALIASES = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
    "-q": "quantization",
    "-O": "compilation-config",
}
_SAME: dict[str, tuple[str, Callable[[str], Any]]] = {
    "model": ("model", str),
    "host": ("host", str),
    "port": ("port", int),
    "api-key": ("api_key", str),
    "max-model-len": ("max_model_len", _size),
    "max-num-seqs": ("max_num_seqs", int),
    "max-num-batched-tokens": ("max_batched_tokens", _size),
    "block-size": ("block_size", int),
    "swap-space": ("swap_space", float),
    "num-gpu-blocks-override": ("kv_blocks", int),
    "kv-cache-memory-bytes": ("kv_memory", lambda text: _size(text) / _GIB),
    "kv-cache-dtype": ("kv_dtype", _one_of({"auto": "auto", "bfloat16": "bf16", "int8": "int8"})),
    "dtype": (
        "dtype",
        _one_of(
            {"auto": "auto", "half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}
        ),
    ),
    "tensor-parallel-size": ("tensor_parallel_size", int),
    "nnodes": ("nnodes", int),
    "node-rank": ("node_rank", int),
    "master-addr": ("master_addr", str),
    "master-port": ("master_port", int),
    "scheduling-policy": ("policy", _one_of({"fcfs": "fcfs", "priority": "priority"})),
    "ssl-certfile": ("tls_cert", str),
    "ssl-keyfile": ("tls_key", str),
    "allowed-origins": ("cors_origins", _origins),
    "otlp-traces-endpoint": ("otlp_endpoint", _over_http),
    "override-generation-config": ("sampling_defaults", str),
    "tool-call-parser": (
        "tool_call_parser",
        _one_of(
            {"hermes": "hermes", "llama3_json": "llama3_json", "deepseek_v3": "deepseek", "deepseek_v31": "deepseek"}
        ),
    ),
    "reasoning-parser": ("reasoning_parser", _one_of({"deepseek_r1": "think", "qwen3": "think"})),
}
"""Option -> our setting, and its value there."""
_SWITCHES: dict[str, tuple[str | None, Any]] = {
    "enable-prefix-caching": ("prefix_cache", True),
    "no-enable-prefix-caching": ("prefix_cache", False),
    "enable-chunked-prefill": ("chunked_prefill", True),
    "no-enable-chunked-prefill": ("chunked_prefill", False),
    "async-scheduling": ("async_scheduling", True),
    "no-async-scheduling": ("async_scheduling", False),
    "enable-log-requests": ("access_log", True),
    "enable-auto-tool-choice": (None, "tools work without it"),
    "disable-log-requests": (None, "prompts are never logged"),
    "no-enable-log-requests": (None, "prompts are never logged"),
    "disable-log-stats": (None, "statistics are at /metrics"),
    "enforce-eager": (None, "there is one way to run a model"),
    "disable-custom-all-reduce": (None, "see --collectives"),
    "enable-request-id-headers": (None, "every answer has its X-Request-Id"),
    "headless": (None, "a host with --node-rank above 0 serves nothing"),
}
_KEPT = {
    "generation-config": "the model's generation_config.json is read",
    "load-format": "safetensors and GGUF are told apart",
    "device": "the device is found at start",
    "uvicorn-log-level": "see --access-log and --log-format",
    "max-log-len": "prompts are never logged",
    "seed": "requests have seeds of their own; drawn where they name none",
    "compilation-config": "there is one way to run a model",
    "attention-backend": "kernels are chosen at start; ropeway doctor shows which",
    "distributed-executor-backend": "ranks are processes of their own",
    "tokenizer-mode": "there is one way to tokenize",
    "max-logprobs": "up to 20, as OpenAI has it",
}
_LOST: dict[str, tuple[tuple[str, ...], str]] = {
    "pipeline-parallel-size": (("1",), _NO_SUCH_FEATURE),
    "data-parallel-size": (("1",), "start one server for each, behind a load balancer"),
    "api-server-count": (("1",), "start one server for each, behind a load balancer"),
    "gpu-memory-utilization": ((), "give the pool's size in GiB: --kv-memory"),
    "cpu-offload-gb": (("0",), _NO_SUCH_FEATURE),
    "quantization": ((), "see --weights int8 and int4, or give a GGUF file"),
    "speculative-config": ((), _NO_SUCH_FEATURE),
    "enable-lora": ((), _NO_SUCH_FEATURE),
    "lora-modules": ((), _NO_SUCH_FEATURE),
    "trust-remote-code": ((), "code that comes with a model is never run"),
    "chat-template": ((), "the model's own template is used"),
    "tokenizer": ((), "the model's own tokenizer is used"),
    "hf-overrides": ((), "the model's own configuration is used"),
    "kv-transfer-config": ((), _NO_SUCH_FEATURE),
    "limit-mm-per-prompt": ((), "prompts are text"),
    "ssl-ca-certs": ((), "clients show API keys here, not certificates; see --api-keys"),
    "root-path": ((), "let the proxy take the prefix off"),
    "enable-expert-parallel": ((), _NO_SUCH_FEATURE),
}
"""Option -> values that mean "off", and what to do otherwise."""
