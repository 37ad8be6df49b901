"""ropeway simulate: the production scheduler on a request trace, under a virtual clock."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ropeway.cli.bench import HtmlFile, latency_tables
from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, resolved, with_settings
from ropeway.cli.terminal import JsonFile, print_table, progress_bar
from ropeway.logs import log_to_stderr

if TYPE_CHECKING:
    from ropeway.bench.traces import Trace
    from ropeway.settings import Resolved
    from ropeway.simulation.cost_model import CostModel

_SHOWN = (
    "evictions_per_request",
    "pause_s",
    "kv_waste",
    "slot_use",
    "prefix_hit_fraction",
    "scheduler_us_per_step",
    "sim_wall_s",
)
"""Beside the latencies, on the terminal."""


@told_plainly
@with_settings("scheduler")
def simulate(
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A request trace, CSV or Mooncake's JSONL; several are parts that follow each other.",
            show_default=False,
        ),
    ] = None,
    validate: Annotated[
        Path | None,
        typer.Option(
            metavar="MEASURED.csv",
            help="Fit the cost model on the first half of this measured run and compare with the second.",
            show_default=False,
        ),
    ] = None,
    rate_scale: Annotated[
        float | None, typer.Option(metavar="X", help="The trace's requests X times as fast.", show_default=False)
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R", help="In place of the trace's times: at random, R per second on average.", show_default=False
        ),
    ] = None,
    spread: Annotated[
        bool, typer.Option("--spread", help="Move arrivals that lie on a grid to random places within its steps.")
    ] = False,
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The first N requests; the trace is repeated.", show_default=False),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Closed loop: N users per engine, each of whom sends a request when the last one was answered.",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="X,Y,...", help="Run at these multiples of the rate, too.", show_default=False),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=r"Engines of the fleet. \[default: 1]", show_default=False)
    ] = None,
    router: Annotated[
        Literal["round-robin", "least-tokens", "prefix"], typer.Option(help="Which engine a request goes to.")
    ] = "round-robin",
    cost_model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help=r"What steps take: a file that ropeway bench fit wrote, or one that is shipped. "
            r"\[default: rtx4090-llama-3.1-8b]",
            show_default=False,
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens in each KV pool; default: the cost model's.", show_default=False),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens per block; default: the cost model's.", show_default=False),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Longest sequence; default: that of the trace, at most what the pool holds.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="What every request asks for at most; default: a power of two, at least 2,048, that suffices for all.",
            show_default=False,
        ),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help=r"Share full blocks between requests with the same prefix. \[default: yes]",
            show_default=False,
        ),
    ] = None,
    swap_space: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=r"GiB of host memory of each engine for swapped requests and cached prefixes. \[default: 0]",
            show_default=False,
        ),
    ] = None,
    slo_ttft: Annotated[
        float | None,
        typer.Option(metavar="S", help="TTFT target of every tier; default: each tier's own.", show_default=False),
    ] = None,
    slo_itl: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Target of every tier for the mean time between tokens; default: each tier's own.",
            show_default=False,
        ),
    ] = None,
    tier_mix: Annotated[
        str | None,
        typer.Option(
            metavar="TIER=SHARE,...",
            help="Tiers of the requests, drawn at random, for a trace that names none.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Chooses whatever is random.")] = 0,
    json: JsonFile = None,
    html: HtmlFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Run the scheduler on a request trace, with one engine or hundreds, in virtual time; or check the simulator itself
    against a measured run."""
    log_to_stderr(logging.WARNING)
    from ropeway.errors import ConfigError
    from ropeway.simulation.cost_model import DEFAULT_COST_MODEL, read_cost_model

    for flag, value in (("--slo-ttft", slo_ttft), ("--slo-itl", slo_itl)):
        if value is not None and not value > 0:
            raise typer.BadParameter(f"{flag} must be above 0")
    if (validate is None) == (not trace):
        raise ConfigError("give either --trace with what to simulate or --validate with a measured run", param="trace")
    flags = {**flags, "block_size": block_size, "prefix_cache": prefix_cache, "swap_space": swap_space}
    if validate is not None:
        others = (
            rate_scale,
            rate,
            requests,
            concurrency,
            sweep,
            max_model_len,
            max_tokens,
            slo_ttft,
            slo_itl,
            tier_mix,
        )
        if spread or html is not None or any(value is not None for value in others):
            raise ConfigError(
                "--validate replays the measured run as it was; beside it only the measured engine can be described: "
                "--kv-tokens, --max-num-seqs, --max-batched-tokens, --block-size, --engines",
                param="validate",
            )
        _validate(validate, cost_model, {**flags, "kv_tokens": kv_tokens, "engines": engines}, json)
        return
    cost = read_cost_model(cost_model or DEFAULT_COST_MODEL)
    settings = _settings(config, flags, cost)
    assert trace is not None
    requested = _load(trace, requests, rate, rate_scale, spread, concurrency, seed)
    scales = _scales(sweep, concurrency)
    from ropeway.bench.html import write_report
    from ropeway.bench.report import check_writable, figures_table, reported_to
    from ropeway.scheduling.tiers_file import tiers_of
    from ropeway.simulation import figures
    from ropeway.simulation.replay import replay
    from ropeway.simulation.setup import parse_tier_mix, replay_settings

    how = replay_settings(
        requested,
        cost,
        settings.config.scheduler,
        tiers=tiers_of(settings.config.scheduler),
        kv_tokens=kv_tokens,
        block_size=settings.config.cache.block_size,
        max_model_len=max_model_len,
        prefix_cache=settings.config.cache.prefix_cache,
        swap_space=settings.config.cache.swap_space,
        engines=engines,
        router=router,
        concurrency=concurrency,
        max_tokens=max_tokens,
        slo_ttft=slo_ttft,
        slo_itl=slo_itl,
        tier_mix=None if tier_mix is None else parse_tier_mix(tier_mix),
        seed=seed,
    )
    if html is not None:
        check_writable(html, "html")
    with reported_to(json) as report:
        with progress_bar("requests") as progress:
            replayed = replay(requested, how, progress=progress)
        report.update(figures.report_of(replayed), trace=[str(file) for file in trace])
        if scales:
            with progress_bar("rates") as progress:
                report["sweep"] = figures.sweep(requested, how, scales, progress)
    if html is not None:
        shown = {
            name: value for name, value in report.items() if name not in ("series", "sweep", "settings", "machine")
        }
        write_report(html, "ropeway simulate", shown, figures.charts_of(replayed, report.get("sweep", ())))
    title = f"{len(requested)} requests on {how.engines} x {cost.name}"
    # With one tier its lines would be those of all.
    tables = latency_tables(title, report if len(report["tiers"]) > 1 else report | {"tiers": {}})
    for table in (*tables, figures_table("", _flat({name: report[name] for name in _SHOWN}))):
        print_table(table)
    for error, count in report["refused"].items():
        typer.echo(f"{count} refused: {error}", err=True)


def _settings(config: Path | None, flags: dict[str, Any], cost: CostModel) -> Resolved:
    """The scheduler's settings; what nobody gave is the cost model's."""
    from ropeway.settings import resolve

    first = resolve(flags, file=config)
    filled = dict(flags)
    defaulted = {name for name in ("max_num_seqs", "max_batched_tokens", "block_size") if not first.origins[name].rank}
    scheduler = first.config.scheduler
    if "block_size" in defaulted:
        filled["block_size"] = cost.block_size
    if "max_num_seqs" in defaulted:
        most = cost.max_num_seqs if "max_batched_tokens" in defaulted else scheduler.max_batched_tokens
        filled["max_num_seqs"] = min(cost.max_num_seqs, most)
    if "max_batched_tokens" in defaulted:
        least = 0 if "max_num_seqs" in defaulted else scheduler.max_num_seqs
        filled["max_batched_tokens"] = max(cost.max_batched_tokens, least)
    result = resolved(None, config, filled)
    for name, value in (
        ("length_profile", result.config.scheduler.length_profile),
        ("disk_cache", result.config.cache.disk_cache),
    ):
        if value is not None:
            logging.getLogger("ropeway").warning("%s is left out: simulated engines keep nothing over restarts", name)
    return result


def _load(
    files: list[Path],
    requests: int | None,
    rate: float | None,
    rate_scale: float | None,
    spread: bool,
    concurrency: int | None,
    seed: int,
) -> Trace:
    from ropeway.bench.traces import read_trace
    from ropeway.errors import ConfigError

    asked = {"--rate": rate, "--rate-scale": rate_scale, "--spread": spread or None, "--concurrency": concurrency}
    given = [flag for flag, value in asked.items() if value is not None]
    if len(given) > 1 and given != ["--rate-scale", "--spread"]:
        raise ConfigError(f"{' and '.join(given)} contradict: each says when requests come; give one", param="rate")
    trace = read_trace(files)
    if requests is not None:
        trace = trace.take(requests)
    if rate is not None:
        return trace.at_rate(rate, seed)
    if concurrency is not None:
        return trace
    trace = trace.from_zero()
    if spread:
        trace = trace.spread(seed).from_zero()
    return trace if rate_scale is None else trace.scaled(rate_scale)


def _scales(text: str | None, concurrency: int | None) -> list[float]:
    from ropeway.errors import ConfigError

    if text is None:
        return []
    if concurrency is not None:
        raise ConfigError(
            "--sweep varies a rate, and with --concurrency there is none; give one of them", param="sweep"
        )
    try:
        scales = [float(part) for part in text.split(",")]
    except ValueError:
        scales = [-1.0]
    if not all(0 < scale < float("inf") for scale in scales):
        raise ConfigError(f"--sweep is {text!r:.100}; give multiples of the rate above 0, as in 0.5,1,2", param="sweep")
    return scales


_ENGINE = ("kv_tokens", "engines", "max_num_seqs", "max_batched_tokens", "block_size")
"""What can be said of a measured engine."""


def _validate(file: Path, cost_model: str | None, given: Mapping[str, Any], json: Path | None) -> None:
    """Settings of the measured engine: as given, else those of the cost model, by default of a shipped one that was
    fitted from this very file, else of the default one."""
    import msgspec

    from ropeway.bench.report import reported_to
    from ropeway.bench.traces import read_trace
    from ropeway.errors import ConfigError
    from ropeway.settings import resolve
    from ropeway.simulation.cost_model import DEFAULT_COST_MODEL, read_cost_model, shipped_cost_models
    from ropeway.simulation.validate import validate

    if cost_model is None:
        shipped = [read_cost_model(name) for name in shipped_cost_models()]
        known = [each for each in shipped if each.measured == file.name]
        engine = known[0] if known else read_cost_model(DEFAULT_COST_MODEL)
    else:
        engine = read_cost_model(cost_model)
    changed = {name: value for name, value in given.items() if value is not None}
    if strangers := [name for name in changed if name not in _ENGINE]:
        raise ConfigError(
            f"{strangers[0]} can't be chosen with --validate: the scheduler does as the measured engine did",
            param=strangers[0],
        )
    resolve({name: value for name, value in changed.items() if name not in ("kv_tokens", "engines")}, environ={})
    engine = msgspec.structs.replace(
        engine, name=file.stem, measured=file.name, provenance=f"fitted to {file.name}", **changed
    )
    trace = read_trace([file])
    with reported_to(json) as report:
        with progress_bar("simulations") as progress:
            validation = validate(trace, engine, progress=progress)
        report.update(validation.to_json())
    print_table(_error_table(file.name, report))


def _error_table(title: str, report: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{title}: second half, simulated against measured", title_justify="left")
    for heading in ("", "measured mean", "simulated", "error", "measured p99", "simulated", "error"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("ttft", "tpot", "e2e"):
        row = [name]
        for each in ("mean", "p99"):
            row += [
                f"{report['measured_s'][name][each]:.4f} s",
                f"{report['simulated_s'][name][each]:.4f} s",
                f"{report[f'{name}_error'][each]:+.1%}",
            ]
        table.add_row(*row)
    return table


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics as lines of their own; what nothing gives is left out."""
    lines: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            lines.update({f"{name} {each}": number for each, number in value.items() if number is not None})
        elif value is not None:
            lines[name] = value
    return lines
