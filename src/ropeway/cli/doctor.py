"""ropeway doctor"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.errors import RopewayError

if TYPE_CHECKING:
    from ropeway.bench.limits import Rates
    from ropeway.devices.base import Device

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "uvloop", "transformers")


@told_plainly
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one object instead of a table.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Compute threads to measure with.", show_default=False)
    ] = None,
) -> None:
    """What this machine offers, what Ropeway makes of it, and what to change for more speed. Exit code 1 if the native
    kernels don't run."""
    from ropeway.bench.advice import advise
    from ropeway.bench.machine import machine_facts
    from ropeway.bench.surroundings import look_around
    from ropeway.devices.processor import available_cores

    around = look_around()
    used = threads or available_cores()
    device, problem = open_device(threads)
    with closing(device):
        facts: dict[str, Any] = {
            **machine_facts(),
            "cores_in_machine": os.cpu_count(),
            "memory_available_bytes": around.memory.available,
            "packages": {name: _installed(name) for name in _PACKAGES},
            "device": {"name": device.name, **device.report()},
            "problem": problem,
            "large_pages": around.large_pages,
            "load": asdict(around.load),
        }
        isa, built = _instruction_sets(device)
    rates = measure_all(used if problem is None else available_cores())
    best = rates[-1]
    facts["measured"] = {
        "threads": best.threads,
        "read_bandwidth_bytes_per_s": max(each.read_bytes_per_s for each in rates),
        "matmul_flops_per_s": max(best.products_per_s["bf16"], best.onednn_per_s["bf16"]),
        "rates": [asdict(each) for each in rates],
    }
    advice = advise(around, threads=used, isa=isa, built=built)
    facts["advice"] = [asdict(each) for each in advice]
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(facts, rates)
    raise typer.Exit(0 if problem is None else 1)


def open_device(threads: int | None) -> tuple[Device, str | None]:
    """The default device; or, if it can't be had, the portable one, and why."""
    from ropeway.config import EngineConfig
    from ropeway.execution.part import make_device

    try:
        return make_device(EngineConfig(threads=threads)), None
    except (ImportError, RopewayError) as error:
        problem = (
            f"the native kernels do not run ({error}); only the portable --device reference works, and it is slow. "
            "Install a C++20 compiler and install Ropeway again"
        )
        return make_device(EngineConfig(device="reference", threads=threads)), problem


def measure_all(threads: int) -> list[Rates]:
    """With 1, 2, 4, ... up to ``threads`` threads; the last entry is that of ``threads``."""
    from ropeway.bench.limits import measure_rates, thread_counts

    rates = []
    for count in thread_counts(threads):
        device, _ = open_device(count)
        with closing(device):
            rates.append(measure_rates(device, threads=count))
    return rates


def _instruction_sets(device: Device) -> tuple[str | None, tuple[str, ...]]:
    """The one its kernels use, and those that could be; none of a device without native kernels."""
    if device.name != "cpu":
        return None, ()
    from ropeway.devices.cpu import _native

    return _native.Context(1).isa, tuple(_native.available_isas())


def _print(facts: dict[str, Any], rates: Sequence[Rates]) -> None:
    from rich.console import Console
    from rich.table import Table

    device = facts["device"]
    rows = {
        "processor": facts["cpu"],
        "cores": f"{facts['cores']} of {facts['cores_in_machine']} for this process",
        "instruction sets": ", ".join(facts["cpu_flags"]) or "none that kernels choose by",
        "memory": f"{_gib(facts['memory_bytes'])}, {_gib(facts['memory_available_bytes'])} available",
        "large pages": facts["large_pages"] or "unknown",
        "other processes": f"{facts['load']['others']:.1f} processors busy",
        "device": device["name"],
        **{name: text for name, text in device.items() if name != "name"},
        **({} if facts["problem"] is None else {"problem": f"[red]{facts['problem']}[/red]"}),
        "system": f"{facts['system']}, Python {facts['python']}, Ropeway {facts['ropeway']}",
        "packages": ", ".join(f"{name} {version or 'missing'}" for name, version in facts["packages"].items()),
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    console = Console()
    console.print(table, highlight=False)
    console.print(_rates_table(rates))
    if not facts["advice"]:
        console.print("[bold]for more speed[/bold]: nothing to change was found", highlight=False)
        return
    advice = Table(title="for more speed", title_justify="left")
    for heading in ("", "found", "change"):
        advice.add_column(heading)
    for each in facts["advice"]:
        advice.add_row(each["topic"], each["found"], each["change"])
    console.print(advice, markup=False)


def _rates_table(rates: Sequence[Rates]) -> Any:
    from rich.table import Table

    table = Table(title="measured: GB/s read, then operations of matrix products in G/s", title_justify="left")
    for heading in ("threads", "read", *rates[0].products_per_s, *(f"oneDNN {name}" for name in rates[0].onednn_per_s)):
        table.add_column(heading, justify="right")
    for each in rates:
        products = (*each.products_per_s.values(), *each.onednn_per_s.values())
        table.add_row(
            str(each.threads), f"{each.read_bytes_per_s / 1e9:.1f}", *(f"{rate / 1e9:.0f}" for rate in products)
        )
    return table


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
