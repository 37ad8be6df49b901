# Signatures of the native module, family by family; `int` arguments named like tensors are addresses (0: absent).

def available_isas() -> list[str]: ...

class Context:
    def __init__(self, threads: int, isa: str = "auto") -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...

# -- linear (bindings/linear.cpp)

class PackedMatrix:
    def __init__(self, layout: str, n: int, k: int, group: int, half_scales: bool, activation_digits: int) -> None: ...
    @property
    def data_bytes(self) -> int: ...
    @property
    def scale_bytes(self) -> int: ...
    def place(self, data: int, scales: int, minimums: int) -> None: ...

def pack(context: Context, matrix: PackedMatrix, values: int, row_stride: int, scales: int, minimums: int) -> None: ...
def gather(context: Context, matrix: PackedMatrix, ids: int, count: int, out: int, /) -> None: ...
def linear(context: Context, weight: PackedMatrix, x: int, bias: int, out: int, rows: int, /) -> None: ...
def read_memory(context: Context, memory: int, size: int, /) -> int: ...
def advise_large_pages(memory: int, size: int, /) -> None: ...

# -- elementwise (bindings/elementwise.cpp)

def rms_norm(
    context: Context, x: int, residual: int, weight: int, out: int, sum: int, rows: int, size: int, eps: float, /
) -> None: ...
def rope(
    context: Context,
    x: int,
    positions: int,
    table: int,
    out: int,
    tokens: int,
    heads: int,
    size: int,
    rotated: int,
    table_positions: int,
    /,
) -> None: ...
def silu_and_mul(context: Context, gate: int, up: int, out: int, count: int, /) -> None: ...

# -- attention (bindings/attention.cpp)

class KVStorage:
    def __init__(self, data: int, layers: int, kv_heads: int, head_dim: int, block_size: int, bf16: bool) -> None: ...

class AttentionPlan:
    @property
    def tasks(self) -> int: ...
    @property
    def merges(self) -> int: ...

def plan_attention(
    context: Context,
    cache: KVStorage,
    num_blocks: int,
    positions: int,
    query_start: int,
    kv_lengths: int,
    block_table: int,
    rows: int,
    tokens: int,
    table_stride: int,
    table_blocks: int,
    /,
) -> AttentionPlan: ...
def write_kv(context: Context, cache: KVStorage, layer: int, k: int, v: int, plan: AttentionPlan, /) -> None: ...
def attention(
    context: Context,
    q: int,
    cache: KVStorage,
    layer: int,
    plan: AttentionPlan,
    out: int,
    heads: int,
    scale: float,
    window: int,
    /,
) -> None: ...

# -- sampling (bindings/sampling.cpp)

def sample(
    context: Context,
    logits: int,
    rows: int,
    vocabulary: int,
    stride: int,
    temperature: int,
    top_k: int,
    top_p: int,
    min_p: int,
    repetition_penalty: int,
    presence_penalty: int,
    frequency_penalty: int,
    seeds: int,
    tokens: int,
    positions: int,
    slots: int,
    prompt_lengths: int,
    lengths: int,
    bias_start: int,
    bias_ids: int,
    bias_values: int,
    top_logprobs: int,
    token_ids: int,
    logprobs: int,
    top_ids: int,
    top_values: int,
    top: int,
    /,
) -> None: ...

# -- quantize (bindings/quantize.cpp)

def quantize(
    context: Context,
    values: int,
    values_layout: str,
    n: int,
    k: int,
    row_stride: int,
    codes: int,
    scales: int,
    minimums: int,
    /,
) -> bool: ...
