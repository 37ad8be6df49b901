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
def gather(
    context: Context, matrix: PackedMatrix, ids: int, count: int, out: int, first: int, part: bool, /
) -> None: ...
def linear(
    context: Context,
    x: int,
    rows: int,
    parts: list[tuple[PackedMatrix, int, int]],
    residual: int,
    gated: bool,
    norm_weight: int,
    norm_eps: float,
    /,
) -> None: ...
def read_memory(context: Context, memory: int, size: int, streams: int, ahead: int, /) -> int: ...
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

class BegunKeys:
    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None: ...
    def to_host(self, block: int, place: int, /) -> None: ...
    def to_device(self, place: int, block: int, /) -> None: ...
    @property
    def nbytes(self) -> int: ...

class KVStorage:
    def __init__(
        self,
        data: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        key_factors: int,
        begun: BegunKeys | None,
    ) -> None: ...
    @property
    def block_bytes(self) -> int: ...

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
    slots: int,
    rows: int,
    tokens: int,
    table_stride: int,
    table_blocks: int,
    /,
) -> AttentionPlan: ...
def write_kv(context: Context, cache: KVStorage, layer: int, k: int, v: int, plan: AttentionPlan, /) -> None: ...
def read_kv(context: Context, cache: KVStorage, layer: int, blocks: int, count: int, k: int, v: int, /) -> None: ...
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
    mask_of: int,
    masks: int,
    mask_words: int,
    token_ids: int,
    logprobs: int,
    top_ids: int,
    top_values: int,
    top: int,
    /,
) -> None: ...

# -- rows (bindings/rows.cpp)

def read_tokens(
    tokens: int, slots: int, positions: int, stride: int, slot: int, position: int, count: int, out: int, /
) -> None: ...
def write_tokens(
    tokens: int, slots: int, positions: int, stride: int, slot: int, position: int, count: int, values: int, /
) -> None: ...
def take(x: int, rows: int, size: int, index: int, count: int, out: int, /) -> None: ...

# -- program (bindings/program.cpp); x, out, ... are bytes per row in the arena, or -1 - i for input i

class Program:
    def __init__(self, context: Context, row_bytes: int, inputs: int, /) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def nanoseconds(self) -> list[int]: ...
    def gather(self, table: PackedMatrix, ids: int, out: int, first: int, part: bool, /) -> None: ...
    def linear(
        self,
        x: int,
        parts: list[tuple[PackedMatrix, int, int]],
        residual: int | None,
        gated: bool,
        norm_weight: int,
        norm_eps: float,
    ) -> None: ...
    def rms_norm(
        self,
        x: int,
        residual: int | None,
        weight: int,
        out: int,
        total: int | None,
        heads: int,
        size: int,
        eps: float,
    ) -> None: ...
    def rope(
        self,
        x: int,
        positions: int,
        table: int,
        out: int,
        heads: int,
        size: int,
        rotated: int,
        table_positions: int,
        /,
    ) -> None: ...
    def silu_and_mul(self, gate: int, up: int, out: int, size: int, /) -> None: ...
    def write_kv(self, cache: KVStorage, layer: int, k: int, v: int, /) -> None: ...
    def attention(
        self, cache: KVStorage, layer: int, q: int, out: int, heads: int, scale: float, window: int, /
    ) -> None: ...
    def run(
        self,
        begin: int,
        end: int,
        arena: int,
        arena_bytes: int,
        rows: int,
        inputs: list[int],
        plan: AttentionPlan | None,
    ) -> None: ...
    def set_timed(self, timed: bool, /) -> None: ...

class Step:
    def __init__(
        self,
        context: Context,
        cache: KVStorage,
        num_blocks: int,
        tokens: int,
        slots: int,
        positions: int,
        stride: int,
        slot_of_token: int,
        position_of_token: int,
        query_start: int,
        kv_lengths: int,
        block_table: int,
        slot_of_row: int,
        rows: int,
        count: int,
        table_stride: int,
        table_blocks: int,
        forward: tuple[Program, int, int, int, int],
        logits: tuple[Program, int, int, int, int],
        sampled: int,
        samples: int,
    ) -> None: ...
    @property
    def nanoseconds(self) -> list[int]: ...
    def run(self) -> None: ...

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

# -- collectives between processes of one host (bindings/shared_group.cpp)

class SharedGroup:
    def __init__(self, memory: int, rank: int, size: int) -> None: ...
    @staticmethod
    def bytes(size: int) -> int: ...
    def all_reduce(self, x: int, count: int, /) -> None: ...
    def all_gather(self, x: int, size: int, out: int, /) -> None: ...
    def broadcast(self, x: int, size: int, /) -> None: ...
    def fail(self) -> None: ...
