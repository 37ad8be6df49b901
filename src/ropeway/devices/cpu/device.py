"""The CPU device: native kernels on a pool of threads, memory shared with the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices import pages
from ropeway.devices.base import (
    ACTIVATION_DIGITS,
    Activations,
    DenseTensor,
    GroupedTensor,
    HostTensor,
    Kernels,
    KVCache,
    KVDtype,
    StepShape,
    Stream,
    Weight,
)
from ropeway.devices.cpu import _native, kv, program, quantization, weights
from ropeway.devices.cpu.kernels import CpuKernels
from ropeway.devices.cpu.step import CpuStep, unsegmented
from ropeway.devices.memory import Memory, host_memory
from ropeway.devices.processor import available_cores
from ropeway.devices.programs import PreparedStep, Program, ProgramInput
from ropeway.devices.stream import ThreadStream
from ropeway.errors import ConfigError

_READ_BYTES = 256 << 20
_READ_LOOPS = [(streams, ahead) for streams in (1, 2, 4) for ahead in (0, 2048)]
"""(streams, bytes asked for ahead)."""


class CpuDevice:
    """See ``devices.base.Device``. A process that forks must not use the device in the child."""

    name = "cpu"

    def __init__(
        self,
        threads: int | None = None,
        isa: str = "auto",
        *,
        stream: Stream | None = None,
        activations: Activations = "int16",
    ) -> None:
        """``threads``: one per core this process may use by default. ``isa``: "auto", or one of
        ``_native.available_isas()`` by name. ``stream``: a thread of its own by default; an ``InlineStream``
        makes the device synchronous. ``activations``: what inputs of products with quantised weights are
        quantised to. Raises ``ConfigError``."""
        threads = available_cores() if threads is None else threads
        try:
            self._context = _native.Context(threads, isa)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        except RuntimeError as error:
            raise ConfigError(
                f"{threads} threads cannot be started ({error}); ask for fewer", param="threads"
            ) from error
        self.kernels: Kernels = CpuKernels(self._context)
        self.stream: Stream = ThreadStream("cpu-stream") if stream is None else stream
        self._activations = activations
        self._arena = pages.Arena()

    def memory(self) -> Memory:
        return host_memory()

    def upload(self, array: NDArray[Any]) -> Tensor:
        array = np.ascontiguousarray(array)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def download(self, tensor: Tensor) -> NDArray[Any]:
        array: NDArray[Any] = tensor.numpy()
        return array

    def pack(self, tensor: HostTensor) -> Weight:
        return weights.pack(self._context, tensor, ACTIVATION_DIGITS[self._activations], self._arena)

    def pack_slices(self, n: int, slices: Iterable[HostTensor]) -> Weight:
        digits = ACTIVATION_DIGITS[self._activations]
        return weights.pack_slices(self._context, n, slices, digits, self._arena)

    def quantize(self, tensor: DenseTensor, layout: Literal["int8", "int4"]) -> GroupedTensor:
        return quantization.quantize(self._context, tensor, layout)

    def vector(self, tensor: HostTensor) -> Tensor:
        return tensor.dequantize().clone(memory_format=torch.contiguous_format)

    def kv_block_bytes(self, layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype) -> int:
        # bytes of its products are signed, those of the cache are not
        if dtype in kv.QUANTISED and self._context.isa == "neon_dotprod":
            raise ConfigError(
                f"kv_dtype {dtype} has no kernels for neon_dotprod yet; use bf16 or fp32", param="kv_dtype"
            )
        return kv.block_bytes(layers, kv_heads, head_dim, block_size, dtype)

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
        return kv.CpuKVCache(layers, num_blocks, kv_heads, head_dim, block_size, dtype, key_factors)

    def capture(self, function: Callable[..., Tensor], inputs: Sequence[ProgramInput], max_rows: int) -> Program:
        return program.capture(self._context, function, inputs, max_rows)

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
        if not unsegmented(forward, logits):
            return None
        return CpuStep(self._context, forward, logits, cache, tokens, slots, shape, sampled)

    def host_blocks(self, count: int, block_bytes: int) -> NDArray[np.uint8]:
        return pages.host_blocks(count, block_bytes)

    def bandwidth(self) -> float:
        """Bytes per second that all threads read from memory together, far beyond the caches: the best of several
        loops, several runs each (about 0.2 s), because whatever else the machine does only makes one slower."""
        memory = torch.empty(_READ_BYTES, dtype=torch.uint8)
        _native.advise_large_pages(memory.data_ptr(), memory.nbytes)
        memory.fill_(1)
        best = float("inf")
        for streams, ahead in _READ_LOOPS * 4:
            began = time.perf_counter()
            _native.read_memory(self._context, memory.data_ptr(), memory.nbytes, streams, ahead)
            best = min(best, time.perf_counter() - began)
        return _READ_BYTES / best

    def report(self) -> dict[str, str]:
        isas = _native.available_isas()
        return {
            "kernels": f"native, {self._context.isa} (usable here: {', '.join(isas)})",
            "threads": f"{self._context.threads} (cores this process may use: {available_cores()})",
            "activations": f"{self._activations} in products with quantised weights",
            "fallbacks": "none",
        }

    def close(self) -> None:
        self.stream.close()
