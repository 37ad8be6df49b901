"""Every setting of Ropeway: one frozen dataclass per concern, a docstring per field.

Field names are unique over all sections. A field ``max_num_seqs`` of section ``scheduler`` is the flag
``--max-num-seqs``, the environment variable ``ROPEWAY_MAX_NUM_SEQS``, the keyword ``max_num_seqs`` of
``LLM``, and ``scheduler.max_num_seqs`` in a TOML, YAML or JSON file. Flags win over the environment, the
environment over the file, the file over the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is held."""

    model: str = "smollm2-135m"
    """A hub id (hf:ORG/NAME, modelscope:ORG/NAME or ORG/NAME), a folder, a .gguf file, or a built-in name."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Layout of unquantised weights; auto: the checkpoint's."""
    max_model_len: int | None = None
    """Longest sequence in tokens (prompt and output); default: the model's, lowered to what the pool holds."""


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens per block; a power of two."""
    kv_blocks: int | None = None
    """Blocks in the pool; overrides kv_memory."""
    kv_memory: float | None = None
    """GiB for the pool; default: enough for max_num_seqs sequences of 2,048 tokens (and one of the longest), at most
    half of the available memory."""
    kv_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of stored keys and values; auto: fp32 for float32 models, else bf16."""
    prefix_cache: bool = True
    """Share full blocks between requests with the same prefix."""


@dataclass(frozen=True)
class SchedulerConfig:
    """What a step may hold."""

    max_num_seqs: int = 64
    """Most sequences running at once; never above max_batched_tokens."""
    max_batched_tokens: int = 512
    """Token budget of a step."""
    chunked_prefill: bool = True
    """Cut prompts to what the budget leaves; off: a prompt is computed in one step, before any decode."""


@dataclass(frozen=True)
class EngineConfig:
    """Where and how steps run."""

    device: Literal["cpu", "reference"] = "cpu"
    """cpu: native kernels; reference: plain PyTorch, slow and simple."""
    threads: int | None = None
    """Compute threads; default: the cores this process may use."""
    activations: Literal["int16", "int8"] = "int16"
    """Codes that inputs of products with quantised weights are rounded to. int16: as exact as unrounded inputs, to
    within the tests' bounds; int8: up to 1.8 times as fast for many rows, at a cost in perplexity that
    docs/kernels.md shows."""
    async_scheduling: bool = True
    """The host plans and settles while the device runs."""


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""
    management_port: int | None = None
    """Port of the loopback listener for health, readiness and metrics; default: port + 1."""
    api_key: str | None = None
    """Clients must send it as a bearer token."""
    served_model_name: str | None = None
    """Name clients use; several separated by commas; default: the model's own."""
    max_queue: int = 256
    """Requests that may wait for a seat; more get 429."""
    max_body_mb: float = 8.0
    """Largest request body in MiB; more gets 413."""
    drain_timeout_s: float = 30.0
    """How long SIGTERM waits for running requests."""
    access_log: bool = False
    """Log a line per request: method, path, status and time; never text."""


@dataclass(frozen=True)
class Config:
    """All sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
