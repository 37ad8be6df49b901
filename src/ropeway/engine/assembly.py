"""From a configuration to a running engine: tiers, checkpoint, device, model, KV pool, host memory, scheduler,
executor; and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ropeway.cache.pool import BlockPool
from ropeway.config import CacheConfig, Config, EngineConfig, SchedulerConfig
from ropeway.devices.base import KEY_GROUP, Device, KVDtype
from ropeway.engine.engine import Engine
from ropeway.engine.host_memory import GIB, make_host_memory
from ropeway.engine.messages import EngineInfo
from ropeway.engine.startup import StartUp
from ropeway.errors import OutOfMemory
from ropeway.execution.calibration import calibrate
from ropeway.execution.calibration import warning as cost_warning
from ropeway.execution.disk import DiskStore
from ropeway.execution.local import LocalExecutor
from ropeway.execution.worker import Worker
from ropeway.loading.open import open_checkpoint
from ropeway.models.model import Model
from ropeway.models.registry import load_model
from ropeway.outcome import StepOutput
from ropeway.parallel.communicator import SingleProcess
from ropeway.scheduling.lengths import LengthProfiles
from ropeway.scheduling.scheduler import Scheduler
from ropeway.scheduling.tiers_file import tiers_of

log = logging.getLogger(__name__)

_TYPICAL_SEQUENCE = 2048
"""Tokens per sequence for which the default pool has room."""


@dataclass(frozen=True)
class Assembly:
    engine: Engine
    info: EngineInfo
    worker: Worker
    store: DiskStore | None = None
    length_profile: Path | None = None
    """Where observed output lengths are kept."""

    def close(self) -> None:
        """Finish what the device is doing and give it back; keep what is to outlive the process."""
        try:
            self.engine.close()
        finally:
            if self.store is not None:
                self.store.close()
            if self.length_profile is not None:
                problem = self.engine.scheduler.lengths.save(self.length_profile, self.info.model)
                if problem is not None:
                    log.warning("%s", problem)


def make_device(config: EngineConfig) -> Device:
    """The device by name; imported only when chosen."""
    if config.device == "reference":
        from ropeway.devices.reference import ReferenceDevice

        return ReferenceDevice(threads=config.threads, activations=config.activations)
    from ropeway.devices.cpu.device import CpuDevice

    return CpuDevice(threads=config.threads, activations=config.activations)


def assemble(
    config: Config,
    path: Path,
    outbox: Callable[[StepOutput], None],
    *,
    end_ids: tuple[int, ...] = (),
    vocab_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    device: Device | None = None,
    startup: StartUp | None = None,
) -> Assembly:
    """Load the model at ``path`` and put an engine around it.

    ``end_ids`` are end tokens the tokenizer knows of, beside the checkpoint's own. ``vocab_size`` is the
    tokenizer's: ids beyond it, which pad the model's head, are never sampled. ``progress(done, total)`` counts
    parameters. ``device`` is closed with the engine; by default one is made as configured. What was configured and the
    engine can do without is no error, but one of ``EngineInfo.warnings``. ``startup`` goes on here.
    Raises ``ConfigError``, ``LoadError``, ``Unsupported``, ``OutOfMemory``."""
    began = time.monotonic()
    startup = startup or StartUp()
    tiers = tiers_of(config.scheduler)
    checkpoint = open_checkpoint(path)
    device = device or make_device(config.engine)
    try:
        if config.cache.kv_dtype != "auto":  # refused before the weights are read, if at all
            device.kv_block_bytes(1, 1, 2, config.cache.block_size, config.cache.kv_dtype)
        model = load_model(
            checkpoint,
            device,
            SingleProcess(),
            dtype=config.model.dtype,
            weights=config.model.weights,
            max_model_len=config.model.max_model_len,
            progress=progress,
        )
        checkpoint.close()
        startup.ended("weights")
        context = config.model.max_model_len or model.spec.context_length
        num_blocks = pool_blocks(config, device, model, context)
        block_size = config.cache.block_size
        if context > num_blocks * block_size:
            log.warning(
                "max_model_len lowered from %d to %d, what the KV pool of %d blocks holds",
                context,
                num_blocks * block_size,
                num_blocks,
            )
            context = num_blocks * block_size
        vocab = model.vocab_size if vocab_size is None else min(vocab_size, model.vocab_size)
        kept = kv_dtype(config.cache, model)
        calibration = calibrate(model, device, kept, context)
        sizes = (model.num_kv_heads, model.head_dim, block_size, kept)
        pool = device.kv_cache(model.num_layers, num_blocks, *sizes, calibration.key_factors)
        memory = make_host_memory(
            config,
            device,
            model,
            path=path,
            model_config=checkpoint.config,
            kv_dtype=kept,
            pool=pool,
        )
        worker = Worker(
            device,
            model,
            pool,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_step_tokens=step_tokens(config.scheduler, context),
            max_model_len=context,
            vocab_size=vocab,
            host=memory.blocks,
        )
        startup.ended("kv_pool")
    except BaseException:
        device.close()
        raise
    warnings = memory.warnings
    if (costly := cost_warning(kept, calibration.cost)) is not None:
        warnings.append(costly)
    lengths, profile = LengthProfiles(), _profile_path(config)
    if profile is not None and (problem := lengths.load(profile, config.model.model)) is not None:
        warnings.append(f"{problem}, and nothing is saved there")
        profile = None  # whatever it is, somebody may want it back
    for warning in warnings:
        log.warning("%s", warning)
    engine = Engine(
        Scheduler(
            config.scheduler,
            BlockPool(num_blocks, block_size),
            context,
            tiers=tiers,
            host=memory.tier,
            lengths=lengths,
            block_bytes=pool.nbytes // num_blocks,
        ),
        LocalExecutor(worker),
        outbox,
        max_model_len=context,
        end_ids=tuple(dict.fromkeys((*model.spec.eos_ids, *end_ids))),
        prefix_cache=config.cache.prefix_cache,
    )
    startup.ended("scheduler")
    info = EngineInfo(
        model=config.model.model,
        vocab_size=vocab,
        max_model_len=context,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        load_s=time.monotonic() - began,
        weight_bytes=model.weight_bytes,
        kv_pool_bytes=pool.nbytes,
        startup=startup.parts,
        tiers=list(tiers),
        warnings=warnings,
    )
    return Assembly(engine, info, worker, memory.store, profile)


def _profile_path(config: Config) -> Path | None:
    name = config.scheduler.length_profile
    return None if name is None else Path(name)


def kv_dtype(config: CacheConfig, model: Model) -> KVDtype:
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "fp32" if model.dtype == "fp32" else "bf16"


def step_tokens(config: SchedulerConfig, context: int) -> int:
    """The most tokens of a step. Without chunked prefill, a prompt that exceeds the budget goes whole, beside the
    others' tokens."""
    return config.max_batched_tokens + (0 if config.chunked_prefill else context)


def _beside_the_pool(config: Config, model: Model) -> int:
    """Bytes that ``int4-full`` keeps outside of blocks: in bfloat16, the keys of every sequence's last group."""
    if config.cache.kv_dtype != "int4-full":
        return 0
    return 2 * KEY_GROUP * model.num_layers * model.num_kv_heads * model.head_dim * config.scheduler.max_num_seqs


def pool_blocks(config: Config, device: Device, model: Model, context: int) -> int:
    """Blocks of the KV pool: as configured, else enough for the batch within half of the free memory.

    Raises ``OutOfMemory`` naming what is needed, what there is and what would fit."""
    cache = config.cache
    block_bytes = device.kv_block_bytes(
        model.num_layers, model.num_kv_heads, model.head_dim, cache.block_size, kv_dtype(cache, model)
    )
    available = max(device.memory().available - _beside_the_pool(config, model), 0)
    largest = available // block_bytes
    if cache.kv_blocks is not None:
        blocks = cache.kv_blocks
    elif cache.kv_memory is not None:
        blocks = int(cache.kv_memory * GIB) // block_bytes
        if blocks < 1:
            raise OutOfMemory(
                f"kv_memory {cache.kv_memory} GiB is less than one block of {cache.block_size} tokens "
                f"({block_bytes} bytes); give at least {block_bytes / GIB:.4f} GiB",
                param="kv_memory",
            )
    else:
        one = -(-context // cache.block_size)
        wanted = max(one, config.scheduler.max_num_seqs * -(-min(context, _TYPICAL_SEQUENCE) // cache.block_size))
        blocks = min(wanted, largest // 2)
    if not 0 < blocks <= largest:
        raise OutOfMemory(
            f"a KV pool of {blocks} blocks needs {blocks * block_bytes / GIB:.2f} GiB, "
            f"{available / GIB:.2f} GiB are available; the largest pool here is {largest} blocks "
            f"(--kv-blocks {largest})",
            param="kv_blocks",
        )
    return int(blocks)
