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
    weights: Literal["auto", "bf16", "int8", "int4"] = "auto"
    """What the matrices of an unquantised checkpoint become when they are loaded. auto: what dtype says; int8: 8.5 bits
    a weight; int4: 5 bits, but 8.5 in embeddings, head and two matrices of each layer that need them. docs/kernels.md
    shows what they cost in perplexity."""
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
    """GiB for the pool, on each rank; default: enough for max_num_seqs sequences of 2,048 tokens (and one of the
    longest), at most half of the available memory."""
    kv_dtype: Literal["auto", "fp32", "bf16", "int8", "int4", "int4-full"] = "auto"
    """Type of stored keys and values. auto: fp32 for float32 models, else bf16; int8: half of bf16's memory; int4: keys
    int8, values in 4 bits; int4-full: both in 4 bits, in blocks of at least 32 tokens. docs/kernels.md shows what
    they cost."""
    prefix_cache: bool = True
    """Share full blocks between requests with the same prefix."""
    swap_space: float = 0.0
    """GiB of host memory, for each rank, for copies of blocks: those of swapped requests, and of cached prefixes. On a
    CPU this is the same memory as the pool's, so by default there is none."""
    disk_cache: str | None = None
    """Folder that keeps cached prefixes over restarts; needs swap_space, through which its blocks go."""
    disk_space: float = 16.0
    """Most GiB of blocks in disk_cache; the longest unused make room."""


@dataclass(frozen=True)
class SchedulerConfig:
    """What a step may hold."""

    max_num_seqs: int = 64
    """Most sequences running at once; never above max_batched_tokens."""
    max_batched_tokens: int = 512
    """Token budget of a step."""
    chunked_prefill: bool = True
    """Cut prompts to what the budget leaves; off: a prompt is computed in one step, before any decode."""
    step_budget: Literal["constant", "tpot"] = "constant"
    """constant: max_batched_tokens every step; tpot: at most what keeps a step within the tightest TPOT target among
    the running requests, by step times measured so far."""
    policy: Literal["fcfs", "priority", "deadline", "shortest"] = "priority"
    """Who goes first. fcfs: who came first; priority: the higher tier, waiting ages; deadline: who must start first to
    meet its tier's TTFT target; shortest: who is predicted to take the least, waiting ages."""
    batching: Literal["continuous", "dynamic", "static"] = "continuous"
    """continuous: a freed seat is filled at the next step; static: whoever waits when all seats are empty forms a batch
    that runs until its last request ends; dynamic: the same, but a batch that isn't full waits for batch_window_s."""
    batch_window_s: float = 0.1
    """dynamic: how long the first of a batch waits for others."""
    padded_rows: bool = False
    """static and dynamic: go on computing the rows of finished requests until the batch ends, as engines without
    ragged batches do."""
    admission: Literal["greedy", "watermark", "profile"] = "profile"
    """When a waiting request gets blocks. greedy: its known tokens fit; watermark: and a share of the pool stays free;
    profile: and the future need of all running requests, predicted from observed output lengths, fits."""
    watermark: float = 0.05
    """Share of the pool that admission by watermark leaves free."""
    admission_quantile: float = 0.9
    """profile: share of the predicted futures that must fit into the pool."""
    length_profile: str | None = None
    """File that keeps observed output lengths over restarts."""
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    """What happens to a request that must give way. swap: its blocks are copied to swap_space (recompute when that is
    full); recompute: they are dropped; auto: whatever is predicted to cost less."""
    tiers: str | None = None
    """TOML, YAML or JSON file with the service tiers, highest first; default: interactive, standard, batch."""
    aging_s: float = 10.0
    """policy priority: seconds of waiting that make up for one unit of a tier's weight."""
    shed: bool = True
    """Refuse a request at once (429) when its tier's TTFT target is predicted to be missed by waiting."""


@dataclass(frozen=True)
class EngineConfig:
    """Where and how steps run."""

    device: Literal["cpu", "reference"] = "cpu"
    """cpu: native kernels; reference: plain PyTorch, slow and simple."""
    threads: int | None = None
    """Compute threads of each rank; default: the cores this process may use, shared among the ranks."""
    activations: Literal["int16", "int8"] = "int16"
    """Codes that inputs of products with quantised weights are rounded to. int16: as exact as unrounded inputs, to
    within the tests' bounds; int8: up to 1.8 times as fast for many rows, at a cost in perplexity that
    docs/kernels.md shows."""
    async_scheduling: bool = True
    """The host plans and settles while the device runs."""
    late_planning: bool = True
    """With async_scheduling: plan just before the running step is predicted to end, so that an arrival waits for the
    rest of one step, not of two."""
    trace: str | None = None
    """File that gets a timeline of the host, the device and the requests when the engine ends: Chrome trace events, for
    https://ui.perfetto.dev."""


@dataclass(frozen=True)
class ParallelConfig:
    """One model on several processes."""

    tensor_parallel_size: int = 1
    """Ranks that share every layer, each a process with its part of the weights and of the KV pool. Must divide the
    model's attention heads and sizes."""
    collectives: Literal["auto", "shared", "tcp", "gloo"] = "auto"
    """How ranks add up their parts. shared: through memory of the host; tcp: over connections of their own; gloo: over
    gloo's, which takes more of the processor; auto: shared on one host, tcp across hosts."""
    micro_batch: Literal["off", "auto", "on"] = "off"
    """Cut steps in two, so that one half is computed while the ranks add up the other's parts. auto: where that was
    faster when it was tried at start; on: always. Takes the memory of activations twice."""
    fused_collectives: bool = False
    """Compute products whose parts the ranks add up some rows at a time, and add these up while the next are computed.
    Not together with micro_batch."""
    nnodes: int = 1
    """Hosts that the ranks are spread over, equally many on each. The same command runs on all of them, with a
    node_rank of its own."""
    node_rank: int = 0
    """Which of the hosts this is. The first, 0, serves; the others hold ranks."""
    master_addr: str = "127.0.0.1"
    """Address of the first host, where the others find it."""
    master_port: int = 29500
    """First of three ports there."""
    network_interface: str | None = None
    """Of this host, for what ranks tell each other; default: the one with the route to master_addr."""
    cluster_secret: str | None = None
    """With several hosts: what they all know and others don't. It encrypts plans, and keeps others out of them and of
    collectives over tcp. Collectives are not encrypted: their network is to be closed to others."""
    join_timeout_s: float = 120.0
    """How long the first rank waits for the others at start."""

    @property
    def ranks_of_node(self) -> range:
        """The ranks on this host."""
        count = self.tensor_parallel_size // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)


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
    api_keys: str | None = None
    """File of several keys, each with a tenant, a tier and limits (ropeway keys new); read again on SIGHUP."""
    tls_cert: str | None = None
    """Certificate chain (PEM) to serve HTTPS with; read again when it changes."""
    tls_key: str | None = None
    """Its private key (PEM)."""
    cors_origins: str | None = None
    """Origins whose pages may call the API from a browser, separated by commas; * for all; default: none."""
    served_model_name: str | None = None
    """Name clients use; several separated by commas; default: the model's own."""
    max_queue: int = 256
    """Requests that may wait for a seat; more get 429."""
    max_body_mb: float = 8.0
    """Largest request body in MiB; more gets 413."""
    body_timeout_s: float = 60.0
    """How long a request's head, and then its body, may take to arrive; then 408. A TLS handshake has as long."""
    read_timeout_s: float = 60.0
    """How long a stream waits for a client that does not read; then its request is cancelled."""
    engine_restarts: int = 5
    """How often in a row a dead engine is started again, ten minutes of life beginning a new row; 0: the server ends
    with it."""
    drain_timeout_s: float = 30.0
    """How long SIGTERM waits for running requests."""
    sampling_defaults: str | None = None
    """Sampling fields for requests that leave them out, as JSON ({"temperature": 0.7, "presence_penalty": 1}); they go
    before what the model recommends."""
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "deepseek"] = "auto"
    """How the model writes tool calls; auto: as its chat template tells."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """Whether the model reasons between <think> and </think> before it answers; auto: as its chat template tells."""
    access_log: bool = False
    """Log a line per request: method, path, status and time; never text."""
    log_format: Literal["text", "json"] = "text"
    """How log lines are written."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector (http://127.0.0.1:4318), which gets a span per request by OTLP over HTTP, never
    text; needs the packages of ropeway[otel]."""


@dataclass(frozen=True)
class Config:
    """All sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
