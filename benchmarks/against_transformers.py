"""Ropeway against transformers on the same requests, in alternation, each run in a process of its own.

python -m benchmarks.against_transformers                  # the 0.6B shape: about ten minutes on two cores
python -m benchmarks.against_transformers --model smollm2-135m --requests 8
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.random_model import SHAPES, random_model
from ropeway.bench.machine import machine_facts
from ropeway.bench.workload import read_workload, totals, write_workload

_HERE = Path(__file__).parent
_ROOT = _HERE.parent
WORKLOAD = _HERE / "workloads" / "mixed32.jsonl"
RESULT = _HERE / "results" / "against_transformers.json"


def command_of(engine: str, model: Path, workload: Path, result: Path, batch: int) -> list[str]:
    """What runs one engine once."""
    files = [str(model), "--workload", str(workload), "--json", str(result)]
    if engine == "transformers":
        return [sys.executable, "-m", "benchmarks.transformers_static", *files, "--batch", str(batch)]
    return [sys.executable, "-m", "ropeway", "bench", "throughput", *files]


def alternate(engines: Sequence[str], repeat: int, model: Path, workload: Path, batch: int) -> dict[str, list[Any]]:
    """Every engine's reports. Each round turns the order around, so that a drift of the machine hits both."""
    reports: dict[str, list[Any]] = {engine: [] for engine in engines}
    with tempfile.TemporaryDirectory(prefix="ropeway-bench-") as folder:
        result = Path(folder) / "result.json"
        for number in range(repeat):
            for engine in engines if number % 2 == 0 else engines[::-1]:
                command = command_of(engine, model, workload, result, batch)
                subprocess.run(command, check=True, cwd=_ROOT, stdout=subprocess.DEVNULL)
                report = json.loads(result.read_text())
                reports[engine].append(report)
                typer.echo(
                    f"{engine:>12}: {report['output_tokens_per_s']:7.1f} output tokens/s, {report['wall_s']:.1f} s, "
                    f"{report['machine']['stolen_time_fraction']:.1%} of the time stolen by the host"
                )
    return reports


def _main(
    model: Annotated[str, typer.Option(help=f"A model folder, or a random one: {', '.join(SHAPES)}.")] = "qwen3-0.6b",
    workload: Annotated[Path, typer.Option(metavar="FILE.jsonl")] = WORKLOAD,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first N of the workload.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each engine.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Requests in a batch of transformers.")] = 8,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE")] = RESULT,
) -> None:
    """Run both engines in turns; print and write medians and their ratio."""
    folder = random_model(model) if model in SHAPES else Path(model)
    chosen = read_workload(workload)[:requests]
    prompt_tokens, output_tokens = totals(chosen)
    typer.echo(f"{folder.name}: {len(chosen)} requests, {prompt_tokens} prompt and {output_tokens} output tokens")
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        write_workload(Path(file.name), chosen)
        reports = alternate(("transformers", "ropeway"), repeat, folder, Path(file.name), batch)
    medians = {
        engine: statistics.median(report["output_tokens_per_s"] for report in runs) for engine, runs in reports.items()
    }
    ratio = medians["ropeway"] / medians["transformers"]
    summary = {
        "command": f"python -m benchmarks.against_transformers --model {model} --repeat {repeat} --batch {batch}"
        + (f" --requests {requests}" if requests else "")
        + (f" --workload {workload}" if workload != WORKLOAD else ""),
        "model": model,
        "requests": len(chosen),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": medians,
        "ratio": ratio,
        "machine": machine_facts(),
        "runs": reports,
    }
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(summary, indent=2) + "\n")
    typer.echo(f"medians: {', '.join(f'{name} {value:.1f}' for name, value in medians.items())}; ratio {ratio:.2f}")


if __name__ == "__main__":
    typer.run(_main)
