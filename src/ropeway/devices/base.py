"""What every device offers: memory, an ordered stream, storage for keys and values, and about a dozen
kernels. ``devices.reference`` implements all of it in plain PyTorch and is the oracle of the others.

Activations are float32 at every kernel's border. A weight's layout decides how a product is computed:
``fp32`` in float32; ``bf16``/``fp16`` with inputs rounded to that type and float32 sums (fp16: inputs stay
float32); ``int8``/``int4`` with inputs quantised per row and group of 32 features, exact integer sums inside a
group of weights, each rounded to float32 once, and float32 across groups. So two devices agree up to the order
of float32 additions.

Inputs are quantised to codes of one or two base-256 digits, as the device is told (``Activations``): scale =
max |x| / limit and code = x / scale rounded to the nearest, ties to even, in [-limit, limit]; the limit is 127
for int8 and 127 * 256 for int16, whose codes are 256 * high + low with both digits in int8.

Keys and values are stored as ``KVDtype`` says. The quantised types compute in float32, one rounding per written
operation; fp16 rounds to float16, ties to even. ``devices.stored`` has these formulas in PyTorch, and every device
stores the same codes, scales and minimums, bit for bit:

- **int8**, for each token and head: k = key / factor (``KVCache.key_factors``; values have none), top = max |k|,
  scale = fp16(top / 127), or the next larger float16 where scale * 127 < top; code = k / scale rounded, ties to even.
  A token of zeros has scale 0 and codes 0. Where top is not finite or scale overflows, the scale is NaN and the codes
  are 0: the token poisons those who see it, and nobody else. Read as code * scale. A query is multiplied by the factors
  once, q * factor, before its products.
- **int4**: keys as int8. Values, for each token, head and group of 64 channels (the last group of a head may be
  shorter): minimum = fp16(min), range = max - minimum, scale = fp16(range / 15), or the next larger float16 where
  scale * 15 < range, and 0 where range <= 0; code = (value - minimum) / scale rounded, ties to even, in [0, 15], and 0
  where scale is 0. Where anything is not finite, scale and minimum are NaN and the codes 0. Read as
  code * scale + minimum (the product is exact, the sum rounded once).
- **int4-full**: values as int4. Keys are first rounded to bfloat16. When the 32 positions [32 g, 32 g + 32) of a
  sequence are all written, each channel of each head is quantised over them as a group of int4 values is. No factors.
  A query at position p reads the keys of group p // 32 in bfloat16, always, and those of earlier groups by their codes.
  So the bfloat16 keys of a group that has begun are kept beside the blocks, by the number of their block, until the
  group is full, and go wherever ``to_host`` and ``to_device`` take that block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices.memory import Memory
from ropeway.devices.programs import PreparedStep, Program, ProgramInput

Layout = Literal["fp32", "bf16", "fp16", "int8", "int4"]
KVDtype = Literal["fp32", "bf16", "int8", "int4", "int4-full"]
Activations = Literal["int16", "int8"]

ACTIVATION_DIGITS: dict[Activations, int] = {"int8": 1, "int16": 2}
ACTIVATION_GROUP = 32
"""Inputs of quantised products share one scale per this many features."""
VALUE_GROUP = 64
"""Channels of a 4-bit value that share a scale and a minimum."""
KEY_GROUP = 32
"""Positions over which a channel of 4-bit keys shares them; block_size is a multiple of it."""
FACTORED: tuple[KVDtype, ...] = ("int8", "int4")
"""Types whose keys are divided by factors."""
ROW_UNIT = 32
"""Slices of a matrix to be packed begin at multiples of so many rows."""
QUANTIZED_GROUP = 32
"""Values under one scale in matrices that ``Device.quantize`` rounds."""

# --------------------------------------------------------------------------- weights as files give them


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A tensor in float32, bfloat16 or float16; a view of the mapped file where possible."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def dequantize(self) -> Tensor:
        return self.data.float()


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A matrix quantised in groups along its rows: ``value = scale * code + minimum``, exactly (in float32,
    the product rounded once, the sum once).

    ``bits`` 4 without minimums: codes in [-8, 7]; with minimums: [0, 15]. ``bits`` 8: [-128, 127].
    """

    codes: Tensor
    """int8 [n, k]."""
    scales: Tensor
    """float16 or float32 [n, k / group]."""
    minimums: Tensor | None
    """Like ``scales``, or None."""
    group: int
    """16 or 32."""
    bits: Literal[4, 8]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def dequantize(self) -> Tensor:
        """float32 [n, k]."""
        n, k = self.codes.shape
        values = self.codes.view(n, k // self.group, self.group).float() * self.scales.float()[:, :, None]
        if self.minimums is not None:
            values = values + self.minimums.float()[:, :, None]
        return values.view(n, k)


HostTensor = DenseTensor | GroupedTensor


class Weight(Protocol):
    """A matrix [n, k] packed for a device's ``linear`` and ``gather``; opaque but for these."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def nbytes(self) -> int: ...


# --------------------------------------------------------------------------- a step, as kernels see it


@dataclass(frozen=True, slots=True)
class StepShape:
    """Positions and memory of one step's rows. Row r holds tokens [query_start[r], query_start[r + 1]).

    All int32, on the device. Entries of a block table past its row's length are undefined.
    """

    positions: Tensor
    """[tokens]: absolute position of every token."""
    query_start: Tensor
    """[rows + 1]."""
    kv_lengths: Tensor
    """[rows]: keys visible to the row's last token, that token included."""
    block_tables: Tensor
    """[rows, blocks]: block of positions [i * block_size, (i + 1) * block_size)."""
    slots: Tensor | None = None
    """[rows]: whose rows they are. One slot has one sequence at a time, so what a device keeps of a sequence beside its
    blocks (``int4-full``) can go when another's row comes; without slots it is kept until its block is used again."""


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """Parameters of every sampled row, as columns on the device, and where its token history lies.

    Row i's history is ``tokens[slots[i], :lengths[i]]``: ``prompt_lengths[i]`` prompt tokens, then output.
    """

    temperature: Tensor
    """float32 [s]; 0 is greedy (the lowest id wins a tie)."""
    top_k: Tensor
    """int32 [s]; 0 keeps all."""
    top_p: Tensor
    """float32 [s]."""
    min_p: Tensor
    """float32 [s]."""
    repetition_penalty: Tensor
    """float32 [s]; 1 is off."""
    presence_penalty: Tensor
    """float32 [s]."""
    frequency_penalty: Tensor
    """float32 [s]."""
    seeds: Tensor
    """int64 [s]: key of the random stream; the counter is ``lengths``."""
    tokens: Tensor
    """int32 [slots, positions]."""
    slots: Tensor
    """int32 [s]."""
    prompt_lengths: Tensor
    """int32 [s]."""
    lengths: Tensor
    """int32 [s]: tokens known, which is the position being sampled."""
    bias_start: Tensor
    """int32 [s + 1]: row i's biases are entries [bias_start[i], bias_start[i + 1])."""
    bias_ids: Tensor
    """int32: token ids."""
    bias_values: Tensor
    """float32: added to the logit; -inf masks it."""
    top_logprobs: Tensor
    """int32 [s]: how many of the likeliest tokens to report; -1: no log-probabilities."""
    mask_of: Tensor | None = None
    """int32 [s]: the row of ``masks`` that says what may be sampled; -1: anything. None: no row has one."""
    masks: Tensor | None = None
    """int32 [m, words]: token t is allowed where bit t % 32 of word t // 32 is set, and not beyond the words."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What ``sample`` returns, on the device."""

    token_ids: Tensor
    """int32 [s]."""
    logprobs: Tensor | None
    """float32 [s] of the chosen tokens; None when no row asked."""
    top_ids: Tensor | None
    """int32 [s, k], k = the largest ``top_logprobs``; rows that asked for fewer have them all the same."""
    top_logprobs: Tensor | None
    """float32 [s, k]."""


class AttentionPlan(Protocol):
    """Work of one step, planned once and used by every layer; opaque."""


class KVCache(Protocol):
    """Keys and values of all layers in fixed-size blocks; the layout inside is the device's own."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def key_factors(self) -> Tensor | None:
        """float32 [layers, kv_heads, head_dim], positive: what stored keys were divided by (see the module); None: by
        nothing, and always None but for ``FACTORED`` types."""
        ...

    def stored(self, layer: int, blocks: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Keys and values of these blocks' positions as attention reads them, keys divided by their factors: two of
        float32 [len(blocks) * block_size, kv_heads, head_dim]. Positions nobody wrote hold anything; so do, with
        ``int4-full``, keys of a group that is not full. For calibration and tests: not fast."""
        ...

    def to_host(self, blocks: NDArray[np.int32], host: NDArray[np.uint8], places: NDArray[np.int32]) -> None:
        """Copy device block ``blocks[i]``, all layers, to ``host[places[i]]`` (uint8 [host blocks, block bytes])."""
        ...

    def to_device(self, places: NDArray[np.int32], host: NDArray[np.uint8], blocks: NDArray[np.int32]) -> None:
        """Copy ``host[places[i]]`` to device block ``blocks[i]``: bit for bit what ``to_host`` took from one."""
        ...


class Kernels(Protocol):
    """Pure functions: they read their arguments and return new tensors; only ``write_kv`` and ``write_tokens`` write,
    to what they are given. x is float32 and contiguous, [tokens, features] unless said otherwise. Empty batches are
    allowed.
    """

    def gather(self, table: Weight, ids: Tensor, first: int | None = None) -> Tensor:
        """Rows ``ids`` (int32 [t]) of an [n, k] table of any layout -> float32 [t, k]. With ``first``, the table is the
        part of a larger one that begins with row ``first``, and rows of other parts are zeros."""
        ...

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows ``rows`` (int32 [s]) of x [t, k] -> [s, k]."""
        ...

    def read_tokens(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """``tokens[slots[i], positions[i]]`` for every i; all int32."""
        ...

    def write_tokens(self, tokens: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        """Set ``tokens[slots[i], positions[i]]`` to ``ids[i]``; all int32, each place at most once."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [t, k] times weight [n, k] transposed, plus bias (float32 [n]) -> float32 [t, n]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension (any leading ones); weight float32.

        Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Rotate x [t, heads, d] by position; table float32 [max_position, 2, r / 2]: cos, then sin, of the
        r <= d rotated features. Feature i turns with i + r / 2 (the "neox" pairing).

        Source: Su et al., "RoFormer", 2021, section 3.4."""
        ...

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        ...

    def plan_attention(self, cache: KVCache, shape: StepShape) -> AttentionPlan:
        """Work of a step over ``cache``; the same for all layers."""
        ...

    def write_kv(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Store k, v (float32 [t, kv_heads, d]) of the step's tokens at their positions' places."""
        ...

    def attention(
        self, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention of q (float32 [t, heads, d]) over the cache *as stored*, this step's own keys
        included -> float32 [t, heads, d]. With ``window`` w, position p sees keys (p - w, p]. Slots
        outside the visible positions are never read into a result, whatever they hold."""
        ...

    def sample(self, logits: Tensor, inputs: SampleInputs) -> Sampled:
        """Choose a token per row of logits (float32 [s, vocabulary], not modified).

        In this order: penalties and biases; masks; log-probabilities are taken here; temperature; top-k;
        top-p and min-p over what is left (at least one token stays); then the token whose cumulated
        probability, in id order, first passes u in [0, 1), u = philox(seed, position). Where biases leave nothing of
        what a mask allows, the lowest id that it allows is taken, likely or not."""
        ...


# --------------------------------------------------------------------------- the device itself


class Event(Protocol):
    """Completion of something submitted to a stream."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when done, False when not by then; raise what the work raised."""
        ...


class Stream(Protocol):
    """Work in order. ``submit`` returns at once; an exception in the work is raised by its event's wait."""

    def submit(self, work: Callable[[], Any]) -> Event: ...
    def close(self) -> None: ...


class Device(Protocol):
    name: str
    kernels: Kernels
    stream: Stream

    def memory(self) -> Memory: ...

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A host array as a device tensor; on a CPU the same memory."""
        ...

    def download(self, tensor: Tensor) -> NDArray[Any]:
        """A device tensor as a host array, after all work before."""
        ...

    def pack(self, tensor: HostTensor) -> Weight:
        """Pack a matrix [n, k] for ``linear`` and ``gather``."""
        ...

    def pack_slices(self, n: int, slices: Iterable[HostTensor]) -> Weight:
        """Pack a matrix [n, k] that comes in slices of its rows, all of one form and each but the last of a multiple of
        ``ROW_UNIT`` rows. A slice is done with when the next one is asked for."""
        ...

    def quantize(self, tensor: DenseTensor, layout: Literal["int8", "int4"]) -> GroupedTensor:
        """Round a matrix [n, k] to codes in groups of 32 along its rows, scales in float16: the same bits on every
        device. int8: symmetric, scale = max |x| / 127. int4: scale and minimum found by a search for the least squared
        error. Raises ``Unsupported`` for rows that are not whole groups and for values that float16 scales cannot
        hold."""
        ...

    def vector(self, tensor: HostTensor) -> Tensor:
        """A float32 vector on the device: a norm's weight, a bias."""
        ...

    def kv_block_bytes(self, layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype) -> int:
        """Bytes of one block over all layers. Raises ``ConfigError`` for what this device cannot store so."""
        ...

    def kv_cache(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: KVDtype,
        key_factors: Tensor | None = None,
    ) -> KVCache:
        """Storage for keys and values. ``key_factors``: see ``KVCache``; only for ``FACTORED`` types.

        Raises ``OutOfMemory``, and ``ConfigError`` for what this device cannot store so."""
        ...

    def capture(self, function: Callable[..., Tensor], inputs: Sequence[ProgramInput], max_rows: int) -> Program | None:
        """Record ``function`` as a program, by calling it once as ``function(*handles, plan)``: one handle per input,
        and what stands for the plan. It may call this device's kernels and a model's collectives on them, and nothing
        else. Caches and weights that it names are part of the program. None: the device records nothing, and a caller
        calls the function at every step.

        Raises ``Unsupported`` for an operation that is not recorded, ``OutOfMemory`` for the arena."""
        ...

    def prepare_step(
        self,
        forward: Program,
        logits: Program,
        cache: KVCache,
        tokens: Tensor,
        slots: Tensor,
        shape: StepShape,
        sampled: Tensor,
    ) -> PreparedStep | None:
        """Check and lay out now what the stream is to do later: read the ids of the step's tokens (``tokens[slots,
        positions]``), plan attention, replay ``forward`` (inputs: ids, positions) and, on rows ``sampled`` (int32 [s],
        increasing) of what it gives, ``logits``. None: the device can't, and a caller does it kernel by kernel.

        Raises ``ValueError`` for columns that do not fit together."""
        ...

    def host_blocks(self, count: int, block_bytes: int) -> NDArray[np.uint8]:
        """uint8 [count, block_bytes] of host memory that ``KVCache.to_host`` copies to, pinned where the device gains
        by it. Raises ``OutOfMemory``."""
        ...

    def report(self) -> dict[str, str]:
        """For ``ropeway doctor``: what was chosen on this machine and why."""
        ...

    def close(self) -> None: ...


def philox_uniform(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float32]:
    """u in [0, 1) with 24 random bits per (seed, counter): the first word of Philox4x32-10.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1 = counters & mask, counters >> shift
    c2 = np.zeros_like(c0)
    c3 = np.zeros_like(c0)
    k0, k1 = seeds & mask, seeds >> shift
    for _ in range(10):
        p0 = c0 * np.uint64(0xD2511F53)
        p1 = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & mask, (p0 >> shift) ^ c3 ^ k1, p0 & mask
        k0 = (k0 + np.uint64(0x9E3779B9)) & mask
        k1 = (k1 + np.uint64(0xBB67AE85)) & mask
    return ((c0 >> np.uint64(8)).astype(np.float32)) * np.float32(2.0**-24)
