"""From a configuration to a running engine: tiers, ranks, rank 0's part of the model, KV pool, host memory, scheduler,
executor; and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ropeway.cache.pool import BlockPool
from ropeway.config import Config
from ropeway.devices.base import Device
from ropeway.engine.engine import Engine
from ropeway.engine.host_memory import GIB, make_host_memory
from ropeway.engine.masking import Masking
from ropeway.engine.messages import EngineInfo
from ropeway.engine.startup import StartUp
from ropeway.errors import OutOfMemory
from ropeway.execution.calibration import warning as cost_warning
from ropeway.execution.disk import DiskStore
from ropeway.execution.part import ModelPart
from ropeway.execution.ranks.leader import Alone, Leader
from ropeway.execution.sizes import Loaded, PoolSizes
from ropeway.execution.worker import Worker
from ropeway.outcome import StepOutput
from ropeway.scheduling.lengths import LengthProfiles
from ropeway.scheduling.scheduler import Scheduler
from ropeway.scheduling.tiers_file import tiers_of
from ropeway.text.constraints import ConstraintCompiler
from ropeway.text.tokenizer import Tokenizer
from ropeway.trace import Trace

log = logging.getLogger(__name__)

_TYPICAL_SEQUENCE = 2048
"""Tokens per sequence for which the default pool has room."""


@dataclass(frozen=True)
class Assembly:
    engine: Engine
    info: EngineInfo
    worker: Worker
    """Rank 0's."""
    ranks: Leader | Alone
    store: DiskStore | None = None
    length_profile: Path | None = None
    """Where observed output lengths are kept."""

    trace_file: Path | None = None
    """Where the engine's trace is written in the end."""

    def start_trace(self) -> None:
        """From here on, note what happens when."""
        self.engine.trace = self.worker.trace = Trace()

    def stop_trace(self) -> bytes:
        """What happened since the start, as JSON; nothing, if there was none."""
        trace, self.engine.trace, self.worker.trace = self.engine.trace, None, None
        return (trace or Trace()).json()

    def check(self) -> None:
        """Raise why the engine cannot go on, if it can't; to be asked while nothing runs, too."""
        self.ranks.check()

    def close(self) -> None:
        """Finish what the device is doing and give it back; keep what is to outlive the process."""
        try:
            self.engine.close()
        finally:
            if self.trace_file is not None:
                try:
                    self.trace_file.write_bytes(self.stop_trace())
                except OSError as error:
                    log.warning("the trace cannot be written: %s", error)
            if self.store is not None:
                self.store.close()
            if self.length_profile is not None:
                problem = self.engine.scheduler.lengths.save(self.length_profile, self.info.model)
                if problem is not None:
                    log.warning("%s", problem)


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
    with ExitStack() as undo:
        ranks = Leader(config, path) if config.parallel.tensor_parallel_size > 1 else Alone()
        undo.callback(ranks.close)
        part = ModelPart(config, path, ranks.gather(), device=device, local_ranks=ranks.local_ranks, progress=progress)
        undo.pop_all()
        undo.callback(part.device.close)
        undo.callback(ranks.close)  # first: the device may wait for another rank
        parts = ranks.loaded(part)
        startup.ended("weights")
        sizes = pool_sizes(config, part, parts, vocab_size)
        ranks.make_pools(sizes)
        pool, cost = part.make_pool(sizes)
        memory = make_host_memory(
            config,
            part.device,
            part.model,
            path=path,
            model_config=part.model_config,
            kv_dtype=part.kv_dtype,
            pool=pool,
            local_ranks=ranks.local_ranks,
        )
        ranks.make_workers(0 if memory.blocks is None else len(memory.blocks))
        worker = part.make_worker(sizes, pool, memory.blocks)
        executor = ranks.executor(worker, sizes)
        startup.ended("kv_pool")
        undo.pop_all()
    warnings = memory.warnings
    if (costly := cost_warning(part.kv_dtype, cost)) is not None:
        warnings.append(costly)
    lengths, profile = LengthProfiles(), _profile_path(config)
    if profile is not None and (problem := lengths.load(profile, config.model.model)) is not None:
        warnings.append(f"{problem}, and nothing is saved there")
        profile = None  # whatever it is, somebody may want it back
    for warning in warnings:
        log.warning("%s", warning)
    all_end_ids = tuple(dict.fromkeys((*part.model.spec.eos_ids, *end_ids)))
    constraints = ConstraintCompiler(lambda: Tokenizer.from_path(path), sizes.vocab_size, all_end_ids)
    engine = Engine(
        Scheduler(
            config.scheduler,
            BlockPool(sizes.num_blocks, config.cache.block_size),
            sizes.max_model_len,
            tiers=tiers,
            host=memory.tier,
            lengths=lengths,
            block_bytes=pool.nbytes // sizes.num_blocks,
        ),
        executor,
        outbox,
        max_model_len=sizes.max_model_len,
        end_ids=all_end_ids,
        prefix_cache=config.cache.prefix_cache,
        masking=Masking(constraints),
    )
    startup.ended("scheduler")
    info = EngineInfo(
        model=config.model.model,
        vocab_size=sizes.vocab_size,
        max_model_len=sizes.max_model_len,
        num_blocks=sizes.num_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        end_ids=list(all_end_ids),
        load_s=time.monotonic() - began,
        weight_bytes=sum(each.weight_bytes for each in parts),
        kv_pool_bytes=pool.nbytes * ranks.size,
        startup=startup.parts,
        tiers=list(tiers),
        warnings=warnings,
    )
    trace_file = None if config.engine.trace is None else Path(config.engine.trace)
    assembly = Assembly(engine, info, worker, ranks, memory.store, profile, trace_file)
    if trace_file is not None:
        assembly.start_trace()
    return assembly


def _profile_path(config: Config) -> Path | None:
    name = config.scheduler.length_profile
    return None if name is None else Path(name)


def pool_sizes(config: Config, part: ModelPart, parts: Sequence[Loaded], vocab_size: int | None) -> PoolSizes:
    """For all ranks: what the one with the least memory can have. Raises ``OutOfMemory``."""
    available = min(each.available for each in parts)
    second = max(each.second_activations for each in parts)
    micro_batches = part.micro_batches
    try:
        num_blocks = pool_blocks(config, part, available - second)
    except OutOfMemory as error:
        if not micro_batches:
            raise
        if config.parallel.micro_batch == "on":
            raise OutOfMemory(
                f"{error.message}; micro_batch takes {second / GIB:.2f} GiB of it for a second set of activations",
                param=error.param,
            ) from error
        micro_batches = False
        num_blocks = pool_blocks(config, part, available)
    if micro_batches:
        log.info("micro-batches: a second set of activations takes up to %.2f GiB on each rank", second / GIB)
    elif part.micro_batches:
        log.warning("micro_batch is off: there is no room for a second set of activations (%.2f GiB)", second / GIB)
    block_size, context = config.cache.block_size, part.context
    if context > num_blocks * block_size:
        log.warning(
            "max_model_len lowered from %d to %d, what the KV pool of %d blocks holds",
            context,
            num_blocks * block_size,
            num_blocks,
        )
        context = num_blocks * block_size
    vocab = part.model.vocab_size
    return PoolSizes(
        num_blocks=num_blocks,
        max_model_len=context,
        vocab_size=vocab if vocab_size is None else min(vocab_size, vocab),
        micro_batches=micro_batches,
    )


def pool_blocks(config: Config, part: ModelPart, available: int) -> int:
    """Blocks of every rank's KV pool: as configured, else enough for the batch within half of the ``available`` bytes.

    Raises ``OutOfMemory`` naming what is needed, what there is and what would fit."""
    cache = config.cache
    block_bytes, context = part.block_bytes, part.context
    available = max(available, 0)
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
