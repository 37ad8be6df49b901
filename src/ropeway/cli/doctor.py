"""ropeway doctor"""

from __future__ import annotations

import importlib.metadata
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.errors import RopewayError

if TYPE_CHECKING:
    from ropeway.devices.base import Device

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "uvloop", "transformers")


@told_plainly
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one object instead of a table.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Compute threads to measure with.", show_default=False)
    ] = None,
) -> None:
    """What this machine offers, what Ropeway makes of it, and why. Exit code 1 if the native kernels don't run."""
    from ropeway.bench.limits import measure_limits
    from ropeway.bench.machine import machine_facts
    from ropeway.devices.memory import host_memory
    from ropeway.devices.processor import available_cores

    device, problem = open_device(threads)
    try:
        used = threads or available_cores()
        facts: dict[str, Any] = {
            **machine_facts(),
            "cores_in_machine": os.cpu_count(),
            "memory_available_bytes": host_memory().available,
            "packages": {name: _installed(name) for name in _PACKAGES},
            "device": {"name": device.name, **device.report()},
            "problem": problem,
            "measured": {"threads": used, **asdict(measure_limits(device, "bf16", threads=used))},
        }
    finally:
        device.close()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(facts)
    raise typer.Exit(0 if problem is None else 1)


def open_device(threads: int | None) -> tuple[Device, str | None]:
    """The default device; or, if it can't be had, the portable one, and why."""
    from ropeway.config import EngineConfig
    from ropeway.engine.assembly import make_device

    try:
        return make_device(EngineConfig(threads=threads)), None
    except (ImportError, RopewayError) as error:
        problem = (
            f"the native kernels do not run ({error}); only the portable --device reference works, and it is slow. "
            "Install a C++20 compiler and install Ropeway again"
        )
        return make_device(EngineConfig(device="reference", threads=threads)), problem


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    device, measured = facts["device"], facts["measured"]
    rows = {
        "processor": facts["cpu"],
        "cores": f"{facts['cores']} of {facts['cores_in_machine']} for this process",
        "instruction sets": ", ".join(facts["cpu_flags"]) or "none that kernels choose by",
        "memory": f"{_gib(facts['memory_bytes'])}, {_gib(facts['memory_available_bytes'])} available",
        "read bandwidth": f"{measured['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s on {measured['threads']} threads",
        "matrix products": f"{measured['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s at bf16",
        "device": device["name"],
        **{name: text for name, text in device.items() if name != "name"},
        **({} if facts["problem"] is None else {"problem": f"[red]{facts['problem']}[/red]"}),
        "system": f"{facts['system']}, Python {facts['python']}, Ropeway {facts['ropeway']}",
        "packages": ", ".join(f"{name} {version or 'missing'}" for name, version in facts["packages"].items()),
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    Console().print(table, highlight=False)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
