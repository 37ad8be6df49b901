"""A schema-driven fuzzer (schemathesis) over the server's own OpenAPI document: no answer may be a 5xx that nobody
documents, and nothing may be held afterwards.

python -m benchmarks.fuzz                          # JSON with --json FILE
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.compare.environments import Environment
from benchmarks.server import Server, running
from ropeway.bench.report import reported_to
from ropeway.cli.failures import told_plainly

_SCHEMATHESIS = Environment("schemathesis", ("schemathesis==4.32.5",))
_SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503, 504]
"""
"""503 and 504 say something: a time limit of the queue or of the request is over, the engine is started again."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ropeway-clients"


@told_plainly
def _main(
    model: Annotated[str, typer.Argument()] = "smollm2-135m",
    examples: Annotated[int, typer.Option(min=1, help="For each route.")] = 200,
    cache: Annotated[Path, typer.Option(metavar="FOLDER", help="Where its environment is.")] = _CACHE,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Run it; the exit code is 1 if it finds anything."""
    console, cache = Console(), cache.resolve()
    _SCHEMATHESIS.ensure(cache, console.print)
    flags = ("--max-num-seqs", "8", "--max-model-len", "256", "--max-queue", "64")
    with reported_to(json_file) as report, running(model, *flags) as server:
        settings = cache / "schemathesis.toml"
        settings.write_text(_SETTINGS)
        command = [
            *(str(_SCHEMATHESIS.folder(cache) / "bin" / "st"), "--config-file", str(settings)),
            *("run", f"{server.url}/openapi.json"),
            *("--checks", "not_a_server_error", "--phases", "examples,fuzzing", "--max-examples", str(examples)),
            *("--seed", "7", "--exclude-path-regex", "^/dashboard/timeline"),
        ]
        environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, cwd=cache, env=environment)
        figures = {
            "model": model,
            "found": done.returncode,
            "generated": _generated(done.stdout),
            "wall_s": time.monotonic() - began,
            "leaked_blocks": _leaked(server),
            "alive": server.ready(),
        }
        report.update(figures)
    typer.echo(done.stdout[-9000:])
    typer.echo(str(figures))
    if done.returncode or figures["leaked_blocks"] or not figures["alive"]:
        raise typer.Exit(1)


def _generated(printed: str) -> int | None:
    found = re.search(r"(\d+) generated", printed)
    return None if found is None else int(found[1])


def _leaked(server: Server) -> float:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        samples = server.samples()
        if samples["ropeway_num_requests_running"] + samples["ropeway_num_requests_waiting"] == 0:
            break
        time.sleep(0.1)
    return samples['ropeway_kv_blocks{state="live"}']


if __name__ == "__main__":
    typer.run(_main)
