"""One rank's part of a model on its device: loaded first, and given a pool when all ranks have said what they have
room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ropeway.config import CacheConfig, Config, EngineConfig, SchedulerConfig
from ropeway.devices.base import KEY_GROUP, Device, KVCache, KVDtype
from ropeway.devices.processor import available_cores
from ropeway.devices.stream import ThreadStream
from ropeway.execution.calibration import calibrate
from ropeway.execution.sizes import Loaded, PoolSizes
from ropeway.execution.worker import Worker, capture_forward
from ropeway.loading.digest import settings_digest, weights_digest
from ropeway.loading.open import open_checkpoint
from ropeway.models.model import Model
from ropeway.models.registry import load_model
from ropeway.parallel.communicator import Communicator
from ropeway.parallel.overlap import Overlapping
from ropeway.version import __version__

FUSED_BLOCKS = 4
"""Of rows: three of them are added up while the next is computed."""


class ModelPart:
    """A model's part, and in the end the worker that runs it."""

    def __init__(
        self,
        config: Config,
        path: Path,
        communicator: Communicator,
        *,
        device: Device | None = None,
        local_ranks: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """``device``: by default one is made as configured; it is closed where this raises. ``local_ranks``: how many
        share this host's memory and cores. Raises what loading raises."""
        self.config = config
        several = communicator.size > 1
        fused = several and config.parallel.fused_collectives
        self.micro_batches = several and config.parallel.micro_batch != "off"
        """Whether steps may be cut in two, for all that was configured."""
        self.communicator = communicator
        if self.micro_batches or fused:
            self.communicator = Overlapping(communicator, ThreadStream("communication"))
            self.communicator.fused_blocks = FUSED_BLOCKS if fused else 0
        self.local_ranks = local_ranks
        checkpoint = open_checkpoint(path)
        self.model_config = checkpoint.config
        self.device = device or make_device(config.engine, local_ranks)
        try:
            if config.cache.kv_dtype != "auto":  # refused before the weights are read, if at all
                self.device.kv_block_bytes(1, 1, 2, config.cache.block_size, config.cache.kv_dtype)
            self.model = load_model(
                checkpoint,
                self.device,
                self.communicator,
                dtype=config.model.dtype,
                weights=config.model.weights,
                max_model_len=config.model.max_model_len,
                fused=fused,
                progress=progress,
            )
        except BaseException:
            self.device.close()
            raise
        checkpoint.close()

    @property
    def context(self) -> int:
        """Positions that the model can compute."""
        return self.config.model.max_model_len or self.model.spec.context_length

    @property
    def kv_dtype(self) -> KVDtype:
        return kv_dtype(self.config.cache, self.model)

    @property
    def block_bytes(self) -> int:
        """Of a block of the pool, on this rank."""
        model = self.model
        return self.device.kv_block_bytes(
            model.num_layers, model.num_kv_heads, model.head_dim, self.config.cache.block_size, self.kv_dtype
        )

    def available(self) -> int:
        """Bytes that there are for a pool of this rank."""
        free = self.device.memory().available // self.local_ranks
        return max(free - beside_the_pool(self.config, self.model), 0)

    def loaded(self, digest: str = "") -> Loaded:
        """What is to be known of this part."""
        return Loaded(
            digest=digest,
            available=self.available(),
            second_activations=self.second_activations(),
            weight_bytes=self.model.weight_bytes,
        )

    def second_activations(self) -> int:
        """Bytes that a second micro-batch takes; 0 where there is none."""
        if not self.micro_batches:
            return 0
        model = self.model
        cache = self.device.kv_cache(model.num_layers, 1, model.num_kv_heads, model.head_dim, KEY_GROUP, "bf16")
        program = capture_forward(self.device, model, cache, step_tokens(self.config.scheduler, self.context))
        return 0 if program is None else program.arena_bytes

    def digest(self, path: Path) -> str:
        """The same on all ranks that compute parts of one model alike. Raises ``LoadError``."""
        settings = {
            "weights": weights_digest(path),
            "model": dict(self.model_config),
            "config": [asdict(self.config.model), asdict(self.config.cache)],
            "activations": self.config.engine.activations,
            "kernels": self.device.report().get("kernels"),
            "version": __version__,
        }
        return settings_digest(settings)

    def make_pool(self, sizes: PoolSizes) -> tuple[KVCache, float]:
        """The pool, and what its type costs this model (``Calibration.cost``). All ranks do this together.

        Raises ``OutOfMemory``."""
        model, kept = self.model, self.kv_dtype
        calibration = calibrate(model, self.device, kept, sizes.max_model_len)
        shape = (model.num_kv_heads, model.head_dim, self.config.cache.block_size, kept)
        pool = self.device.kv_cache(model.num_layers, sizes.num_blocks, *shape, calibration.key_factors)
        return pool, calibration.cost

    def make_worker(self, sizes: PoolSizes, pool: KVCache, host: NDArray[np.uint8] | None) -> Worker:
        """``host``: see ``Worker``. Raises ``OutOfMemory``."""
        scheduler = self.config.scheduler
        return Worker(
            self.device,
            self.model,
            pool,
            max_num_seqs=scheduler.max_num_seqs,
            max_step_tokens=step_tokens(scheduler, sizes.max_model_len),
            max_model_len=sizes.max_model_len,
            vocab_size=sizes.vocab_size,
            host=host,
            communicator=self.communicator,
            micro_batches=sizes.micro_batches,
        )


def make_device(config: EngineConfig, local_ranks: int = 1) -> Device:
    """The device by name; imported only when chosen. ``local_ranks`` share the cores."""
    if config.device == "reference":
        from ropeway.devices.reference import ReferenceDevice

        return ReferenceDevice(threads=_threads(config, local_ranks), activations=config.activations)
    from ropeway.devices.cpu.device import CpuDevice

    return CpuDevice(threads=_threads(config, local_ranks), activations=config.activations)


def _threads(config: EngineConfig, local_ranks: int) -> int | None:
    if config.threads is not None or local_ranks == 1:
        return config.threads
    return max(available_cores() // local_ranks, 1)


def kv_dtype(config: CacheConfig, model: Model) -> KVDtype:
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "fp32" if model.dtype == "fp32" else "bf16"


def step_tokens(config: SchedulerConfig, context: int) -> int:
    """The most tokens of a step. Without chunked prefill, a prompt that exceeds the budget goes whole, beside the
    others' tokens."""
    return config.max_batched_tokens + (0 if config.chunked_prefill else context)


def beside_the_pool(config: Config, model: Model) -> int:
    """Bytes that ``int4-full`` keeps outside of blocks: in bfloat16, the keys of every sequence's last group."""
    if config.cache.kv_dtype != "int4-full":
        return 0
    return 2 * KEY_GROUP * model.num_layers * model.num_kv_heads * model.head_dim * config.scheduler.max_num_seqs
