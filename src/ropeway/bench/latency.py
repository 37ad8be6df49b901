"""How fast one batch of equal requests is, and how near that comes to what the machine can do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.bench.driver import Driver, Progress, Run
from ropeway.bench.limits import Limits, measure_limits
from ropeway.bench.machine import PeakMemory
from ropeway.bench.workload import WorkloadRequest
from ropeway.config import Config
from ropeway.devices.processor import available_cores
from ropeway.errors import ConfigError
from ropeway.models.model import Model
from ropeway.models.spec import DecoderSpec

_WARM_UP = [WorkloadRequest(prompt_tokens=16, output_tokens=4)]


@dataclass(frozen=True)
class Latency:
    """Medians over the repeats. What the machine can do is measured between them, since on a shared one it changes
    within minutes, and a repeat is compared with the better of the two measurements around it."""

    prefill_tokens_per_s: float
    """All prompt tokens / time until every request has its first token."""
    decode_tokens_per_s: float
    """Tokens after that / the rest of the time, over the whole batch."""
    weight_bytes_per_token: float
    """Weights that a decode step reads / batch: all but an embedding table that isn't the head, too."""
    read_bandwidth_bytes_per_s: float
    bandwidth_fraction: float
    """Bytes of weights read per second while decoding / read_bandwidth_bytes_per_s. Keys and values, which a step reads
    too, are not counted."""
    prefill_flops_per_token: float
    """Matrix products and attention (visible positions only); an addition and a multiplication are two."""
    matmul_flops_per_s: float
    matmul_fraction: float
    """Arithmetic per second of the prefill / matmul_flops_per_s."""
    ttft_s: float
    tpot_s: float
    """Seconds per token and request while decoding."""
    peak_rss_bytes: int
    load_s: float


def measure_latency(
    config: Config,
    *,
    prompt_tokens: int,
    output_tokens: int,
    batch: int = 1,
    repeat: int = 3,
    progress: Progress | None = None,
) -> Latency:
    """Load the configured model and run ``batch`` requests at once, ``repeat`` times over, with different prompts.

    ``progress`` counts repeats. Raises what loading raises, ``ConfigError`` for a batch that can't run at once, and
    ``ContextLengthExceeded``."""
    if output_tokens < 2:
        raise ConfigError(
            f"output_tokens is {output_tokens}; it must be at least 2: a prompt's computation gives the first token, "
            "decoding is measured on those after it",
            param="output_tokens",
        )
    if batch > config.scheduler.max_num_seqs:
        raise ConfigError(
            f"a batch of {batch} does not fit max_num_seqs {config.scheduler.max_num_seqs}; raise that or lower batch",
            param="batch",
        )
    memory = PeakMemory()
    workload = [WorkloadRequest(prompt_tokens, output_tokens)] * batch
    threads = config.engine.threads or available_cores()
    runs: list[Run] = []
    limits: list[Limits] = []
    with Driver(config) as driver:
        model = driver.worker.model

        def measure_machine() -> Limits:
            with memory.not_counting():
                return measure_limits(driver.worker.device, model.dtype, threads=threads)

        driver.run(_WARM_UP, seed=repeat)
        before = measure_machine()
        for seed in range(repeat):
            runs.append(driver.run(workload, seed=seed))
            after = measure_machine()
            limits.append(before.better(after))
            before = after
            if progress is not None:
                progress(seed + 1, repeat)
        load_s = driver.load_s
    prefill_s = [max(record.first_token_s for record in run.requests) for run in runs]
    decode_s = [run.wall_s - prefill for run, prefill in zip(runs, prefill_s, strict=True)]
    prefill = [batch * prompt_tokens / seconds for seconds in prefill_s]
    decode = [run.tokens_after(begin) / seconds for run, begin, seconds in zip(runs, prefill_s, decode_s, strict=True)]
    bandwidth = [limit.read_bandwidth_bytes_per_s for limit in limits]
    products = [limit.matmul_flops_per_s for limit in limits]
    weight_bytes = step_weight_bytes(model) / batch
    flops = prefill_flops(model.spec, prompt_tokens) / prompt_tokens
    return Latency(
        prefill_tokens_per_s=statistics.median(prefill),
        decode_tokens_per_s=statistics.median(decode),
        weight_bytes_per_token=weight_bytes,
        read_bandwidth_bytes_per_s=statistics.median(bandwidth),
        bandwidth_fraction=weight_bytes * _median_ratio(decode, bandwidth),
        prefill_flops_per_token=flops,
        matmul_flops_per_s=statistics.median(products),
        matmul_fraction=flops * _median_ratio(prefill, products),
        ttft_s=statistics.median(record.first_token_s for run in runs for record in run.requests),
        tpot_s=batch / statistics.median(decode),
        peak_rss_bytes=memory.bytes,
        load_s=load_s,
    )


def _median_ratio(rates: Sequence[float], limits: Sequence[float]) -> float:
    return statistics.median(rate / limit for rate, limit in zip(rates, limits, strict=True))


def step_weight_bytes(model: Model) -> int:
    """Bytes of weights that a step reads from memory, whatever its batch."""
    tied = model.head.weight is model.embedding.table
    return model.weight_bytes - (0 if tied else model.embedding.table.nbytes)


def prefill_flops(spec: DecoderSpec, tokens: int) -> int:
    """Arithmetic of a prompt of ``tokens`` tokens: products of all layers, attention over the positions that each
    token sees, and the head for its last token."""
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention_weights = spec.hidden_size * (2 * heads + 2 * kv_heads)
    mlp_weights = 3 * spec.hidden_size * spec.intermediate_size
    products = 2 * tokens * spec.num_layers * (attention_weights + mlp_weights)
    seen = sum(_positions_seen(tokens, window) for window in spec.windows)
    head = 2 * spec.hidden_size * spec.vocab_size
    return products + 4 * heads * seen + head


def _positions_seen(tokens: int, window: int | None) -> int:
    """Over all tokens of a prompt, each seeing itself and what is before it, within the window."""
    full = tokens if window is None else min(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * full
