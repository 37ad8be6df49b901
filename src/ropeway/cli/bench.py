"""ropeway bench latency | throughput | overhead | serve, and those of modules of their own"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ropeway.cli import bench_kv, bench_memory
from ropeway.cli.bench_fit import fit
from ropeway.cli.bench_overlap import overlap
from ropeway.cli.bench_perplexity import perplexity
from ropeway.cli.bench_startup import startup
from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.cli.terminal import JsonFile, print_table, progress_bar
from ropeway.logs import log_to_stderr

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure: one batch, a workload, the host's own cost, or a server under load.",
)

_SEQUENCES = (64, 256, 1024)
_STATISTICS = ("mean", "p50", "p90", "p99")

HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a report with plots here, too.", show_default=False),
]


@app.command()
@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel")
def latency(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens to generate for each.")] = 128,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Requests at once.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Runs; the medians are reported.")] = 3,
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Prefill and decode rates of one batch, beside what this machine can do at best."""
    log_to_stderr(logging.WARNING)
    settings = resolved(model, config, flags).config
    from ropeway.bench.latency import measure_latency
    from ropeway.bench.report import figures_table, reported_to, settings_of

    asked = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "batch": batch, "repeat": repeat}
    with reported_to(json) as report, progress_bar("runs") as progress:
        figures = asdict(measure_latency(settings, **asked, progress=progress))
        report.update(figures, **asked, settings=settings_of(settings))
    print_table(figures_table(f"{settings.model.model}: {batch} x ({prompt_tokens} + {output_tokens}) tokens", figures))


@app.command()
@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel")
def throughput(
    model: Model = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="A request per line: prompt_tokens or prompt_token_ids, output_tokens, arrival_s; "
            "default: 32 requests of mixed lengths, all at once.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Chooses the ids of prompts given by length.")] = 0,
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """How fast a workload gets done."""
    log_to_stderr(logging.WARNING)
    settings = resolved(model, config, flags).config
    from ropeway.bench.workload import mixed_workload, read_workload

    requests = mixed_workload() if workload is None else read_workload(workload)
    from ropeway.bench.report import figures_table, reported_to, settings_of
    from ropeway.bench.throughput import measure_throughput

    with reported_to(json) as report, progress_bar("output tokens") as progress:
        figures = asdict(measure_throughput(settings, requests, seed=seed, progress=progress))
        report.update(figures, workload=None if workload is None else str(workload), settings=settings_of(settings))
    print_table(figures_table(f"{settings.model.model}: {workload or 'mixed lengths'}", figures))


@app.command()
@told_plainly
def overhead(
    sequences: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N ...", min=1, help="Requests running at once; default: 64 256 1024.", show_default=False
        ),
    ] = None,
    more: Annotated[list[int] | None, typer.Argument(hidden=True, min=1)] = None,
    step_ms: Annotated[
        float, typer.Option(metavar="X", help="What a step takes on the device; 0: steps run back to back.")
    ] = 5.0,
    features: Annotated[
        Literal["plain", "all", "contested"],
        typer.Option(
            help="all: tiers, tenants, deadlines, admission by profile, host memory; contested: and too few blocks."
        ),
    ] = "plain",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a timeline of host and device here, one run after the other, for https://ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """What the host costs per step: the production loop over a device that only takes time."""
    if not step_ms >= 0:
        raise typer.BadParameter("--step-ms must be 0 or more")
    from ropeway.bench.overhead import report as measure_overhead
    from ropeway.bench.report import check_writable, reported_to
    from ropeway.trace import Trace

    # "--sequences 64 256": an option takes one value, the rest are left over.
    counts = [*(sequences or []), *(more or [])] or list(_SEQUENCES)
    recorded = Trace()
    if trace is not None:
        check_writable(trace, "trace")
    with reported_to(json) as report:
        report.update(measure_overhead(counts, step_ms, features, None if trace is None else recorded))
    if trace is not None:
        trace.write_bytes(recorded.json())
    print_table(_overhead_table(report["runs"]))


@app.command()
@told_plainly
def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a server that speaks OpenAI's API.")],
    workload: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Requests, one per line.", show_default=False)
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A trace; give its parts one after the other.", show_default=False),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", help="Random arrivals, R per second, in place of recorded ones.", show_default=False),
    ] = None,
    rate_scale: Annotated[
        float | None, typer.Option(metavar="X", help="Recorded arrivals, X times as fast.", show_default=False)
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The first N requests; a trace with fewer is repeated.", show_default=False
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="A closed loop: N users in place of arrival times.", show_default=False),
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(metavar="T", help="Tier of all requests, or their priority as an integer.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: the server's first.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="ROPEWAY_API_KEY", help="Sent as a bearer token.", show_default=False),
    ] = None,
    slo_ttft: Annotated[
        float | None,
        typer.Option(metavar="S", help="Target: seconds to the first token.", show_default=False),
    ] = None,
    slo_itl: Annotated[
        float | None,
        typer.Option(metavar="S", help="Target: mean seconds between the tokens of a request.", show_default=False),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=2, metavar="N", help="Made-up prompts hold token ids below this.")
    ] = 1000,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="A request fails when nothing comes for so long.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Chooses made-up prompts and arrivals.")] = 0,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """What users of a server wait for under load, and what it refuses."""
    for flag, target in (("--slo-ttft", slo_ttft), ("--slo-itl", slo_itl)):
        if target is not None and not target > 0:
            raise typer.BadParameter(f"{flag} must be above 0")
    from ropeway.bench.html import latency_charts, write_report
    from ropeway.bench.latencies import Targets
    from ropeway.bench.report import check_writable, reported_to
    from ropeway.bench.serve import Endpoint, read_load, run_load

    shape: dict[str, Any] = {
        "rate": rate,
        "rate_scale": rate_scale,
        "requests": requests,
        "concurrency": concurrency,
        "tier": tier,
        "seed": seed,
    }
    load = read_load(workload, trace or (), **shape)
    endpoint = Endpoint(url=url, model=model, api_key=api_key, timeout_s=timeout)
    if html is not None:
        check_writable(html, "html")
    with reported_to(json) as report, progress_bar("requests") as progress:
        outcome = run_load(endpoint, load, concurrency=concurrency, vocab_size=vocab_size, seed=seed, progress=progress)
        figures = outcome.figures(Targets(slo_ttft, slo_itl))
        files = [str(file) for file in (workload, *(trace or ())) if file is not None]
        asked = shape | {"slo_ttft": slo_ttft, "slo_itl": slo_itl, "vocab_size": vocab_size}
        report.update(figures, load={"url": url, "model": outcome.model, "files": files, **asked})
    title = f"{outcome.model} at {url}"
    for table in latency_tables(title, figures):
        print_table(table)
    for message, count in figures["failures"].items():
        typer.echo(f"{count} failed: {message}", err=True)
    if html is not None:
        write_report(html, title, report, latency_charts(outcome.recorder))
    if not figures["completed"] and not figures["shed"]:
        raise typer.Exit(1)


def latency_tables(title: str, figures: Mapping[str, Any]) -> list[Any]:
    """The figures of ``ropeway.bench.latencies`` as two tables, how many requests did well and how long they took,
    with lines for all requests and for each tier."""
    from rich.table import Table

    from ropeway.bench.report import readable

    def shown(name: str, value: Any) -> str:
        return "-" if value is None else readable(name, value)

    done = Table("", title=title, title_justify="left")
    took = Table("", "")
    for heading in ("requests", "completed", "shed", "failed", "good", "good per s"):
        done.add_column(heading, justify="right")
    for heading in _STATISTICS:
        took.add_column(heading, justify="right")
    for who, mine in {"all": figures, **figures.get("tiers", {})}.items():
        counts = [str(mine[name]) for name in ("requests", "completed", "shed", "failed")]
        done.add_row(who, *counts, shown("good_fraction", mine["attainment"]), shown("", mine["goodput_per_s"]))
        for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
            statistics = [shown(name, mine[name][statistic]) for statistic in _STATISTICS]
            took.add_row(who, name.removesuffix("_s").upper(), *statistics)
    return [done, took]


def _overhead_table(runs: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="host cost per step: microseconds of CPU time, p50 / p99", title_justify="left")
    for heading in ("sequences", "async", "bubble", "plan", "settle", "both"):
        table.add_column(heading, justify="right")
    for run in runs:
        costs = [run[name] for name in ("plan_us", "settle_us", "host_us_per_step")]
        table.add_row(
            str(run["sequences"]),
            "on" if run["async_scheduling"] else "off",
            f"{run['bubble']:.2%}",
            *(f"{cost['p50']:.0f} / {cost['p99']:.0f}" for cost in costs),
        )
    return table


for command in (fit, perplexity, bench_kv.kv, bench_memory.preemption, bench_memory.prefix, startup, overlap):
    app.command()(command)
