"""From what a user names to what a replay needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ropeway.bench.traces import Trace
from ropeway.config import SchedulerConfig
from ropeway.errors import ConfigError
from ropeway.simulation.cost_model import CostModel
from ropeway.simulation.engine import EngineSettings
from ropeway.simulation.replay import ReplaySettings, default_max_tokens
from ropeway.simulation.router import RouterName
from ropeway.tiers import DEFAULT_TIERS, Tier

_GIB = 1 << 30


def replay_settings(
    trace: Trace,
    cost: CostModel,
    scheduler: SchedulerConfig,
    *,
    tiers: Sequence[Tier] = DEFAULT_TIERS,
    kv_tokens: int | None = None,
    block_size: int | None = None,
    max_model_len: int | None = None,
    prefix_cache: bool = True,
    swap_space: float = 0.0,
    engines: int | None = None,
    router: RouterName = "round-robin",
    concurrency: int | None = None,
    max_tokens: int | None = None,
    slo_ttft: float | None = None,
    slo_itl: float | None = None,
    tier_mix: Mapping[str, float] | None = None,
    seed: int = 0,
) -> ReplaySettings:
    """What is None comes from the cost model, ``max_tokens`` and ``max_model_len`` (the longest prompt and answer of
    the trace, as far as the pool holds them) from the trace. ``slo_ttft`` and ``slo_itl`` take the place of every
    tier's targets, for the scheduler, too. ``swap_space`` is GiB for each engine.

    Raises ``ConfigError`` for what can't be."""
    block_size = block_size or cost.block_size
    kv_tokens = kv_tokens or cost.kv_tokens
    num_blocks = kv_tokens // block_size
    if num_blocks < 1:
        raise ConfigError(
            f"a KV pool of {kv_tokens} tokens holds no block of {block_size}; give more kv_tokens or smaller blocks",
            param="kv_tokens",
        )
    room = num_blocks * block_size
    if max_model_len is not None and max_model_len > room:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the KV pool of {room} tokens; lower it or give more kv_tokens",
            param="max_model_len",
        )
    engines = engines or cost.group_size
    if engines % cost.group_size:
        raise ConfigError(
            f"with cost model {cost.name}, {cost.group_size} engines step together; {engines} is no multiple of that",
            param="engines",
        )
    max_tokens = max_tokens or default_max_tokens(trace)
    return ReplaySettings(
        engine=EngineSettings(
            cost=cost,
            scheduler=scheduler,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len or min(room, int(trace.input_tokens.max()) + max_tokens),
            prefix_cache=prefix_cache,
            host_blocks=_host_blocks(swap_space, block_size * cost.kv_bytes_per_token),
            tiers=tuple(_with_targets(tier, slo_ttft, slo_itl) for tier in tiers),
        ),
        engines=engines,
        router=router,
        group_size=cost.group_size,
        concurrency=concurrency,
        max_tokens=max_tokens,
        tier_mix=tier_mix,
        seed=seed,
    )


def parse_tier_mix(text: str) -> dict[str, float]:
    """``interactive=0.2,batch=0.8`` as shares by tier, which sum to 1. Raises ``ConfigError``."""

    def refuse(problem: str) -> ConfigError:
        return ConfigError(
            f"tier_mix {text!r:.200}: {problem}; give shares as in interactive=0.2,batch=0.8", param="tier_mix"
        )

    mix: dict[str, float] = {}
    for part in text.split(","):
        name, equals, share = (piece.strip() for piece in part.partition("="))
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not name or not equals or not 0.0 <= value <= 1.0:
            raise refuse(f"{part.strip()!r} is no share from 0 to 1 of a tier")
        if name in mix:
            raise refuse(f"{name} is named twice")
        mix[name] = value
    if abs(sum(mix.values()) - 1.0) > 1e-6:
        raise refuse(f"the shares sum to {sum(mix.values()):g}, not to 1")
    return mix


def _host_blocks(swap_space: float, block_bytes: int) -> int:
    blocks = int(swap_space * _GIB / block_bytes)
    if swap_space and not blocks:
        raise ConfigError(
            f"swap_space {swap_space:g} GiB holds no KV block of {block_bytes} bytes; give more, or 0 for none",
            param="swap_space",
        )
    return blocks


def _with_targets(tier: Tier, ttft_s: float | None, tpot_s: float | None) -> Tier:
    return msgspec.structs.replace(
        tier,
        ttft_s=tier.ttft_s if ttft_s is None else ttft_s,
        tpot_s=tier.tpot_s if tpot_s is None else tpot_s,
    )
