"""Unmodified clients and load generators against a running server, each in an environment of its own.

python -m benchmarks.clients                       # all of them; JSON under benchmarks/results
python -m benchmarks.clients openai litellm
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.compare.environments import Environment, Unavailable
from benchmarks.server import Server, running
from ropeway.bench.report import reported_to
from ropeway.cli.failures import told_plainly

_SUITES = Path(__file__).parent / "suites"
_RESULTS = Path(__file__).parents[1] / "results"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ropeway-clients"
_LIMIT_S = 900.0


@dataclass(frozen=True)
class Client:
    environment: Environment
    suite: str | None = None
    """A script of checks."""
    command: Callable[[Path, Server], list[str]] | None = None
    """Of a load generator: (its environment's folder, the server) -> what to run."""
    succeeded: Callable[[str], dict[str, Any]] | None = None
    """From what it prints -> figures. Raises when that shows no success."""


def _guidellm(folder: Path, server: Server) -> list[str]:
    return [
        *(str(folder / "bin" / "guidellm"), "benchmark", "run", "--target", server.url, "--model", server.name),
        *("--profile", "concurrent", "--rate", "8", "--max-requests", "40"),
        *("--data", "prompt_tokens=64,output_tokens=32", "--processor", _tokenizer(), "--output-dir", str(folder)),
    ]


def _aiperf(folder: Path, server: Server) -> list[str]:
    return [
        *(str(folder / "bin" / "aiperf"), "profile", "--model", server.name, "--url", server.url),
        *("--endpoint-type", "chat", "--streaming", "--concurrency", "8", "--request-count", "40"),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "32", "--tokenizer", _tokenizer()),
        *("--artifact-dir", str(folder / "artifacts"), "--ui", "simple"),
    ]


def _tokenizer() -> str:
    """A folder with a tokenizer, for generators that make prompts of so many tokens."""
    from benchmarks.random_model import random_model

    return str(random_model("smollm2-135m"))


def _finished(marks: tuple[str, ...]) -> Callable[[str], dict[str, Any]]:
    def check(printed: str) -> dict[str, Any]:
        missing = [mark for mark in marks if mark not in printed]
        if missing:
            raise ValueError(f"its output has no {missing[0]!r}: {printed[-1500:]}")
        return {"printed": printed[-3000:]}

    return check


CLIENTS: dict[str, Client] = {
    "openai": Client(Environment("openai", ("openai==3.51.0",)), "openai_suite.py"),
    "anthropic": Client(Environment("anthropic", ("anthropic==2.10.0",)), "anthropic_suite.py"),
    "litellm": Client(Environment("litellm", ("litellm",)), "litellm_suite.py"),
    "langchain": Client(Environment("langchain", ("langchain-openai==1.7.4",)), "langchain_suite.py"),
    "guidellm": Client(
        Environment("guidellm", ("guidellm==0.8.1",)), command=_guidellm, succeeded=_finished(("TTFT",))
    ),
    "aiperf": Client(
        Environment("aiperf", ("aiperf==0.13.0",)), command=_aiperf, succeeded=_finished(("Time to First",))
    ),
    "ais-bench": Client(Environment("ais-bench", ("ais-bench-benchmark==3.1.20260630",))),
}


@told_plainly
def _main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[CLIENT ...]", help="Which; default: all.")] = None,
    model: Annotated[str, typer.Option(help="What is served.")] = "qwen2.5-coder-0.5b",
    cache: Annotated[Path, typer.Option(metavar="FOLDER", help="Environments.")] = _CACHE,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE")] = _RESULTS / "clients.json",
) -> None:
    """Run the suites; the exit code is 1 if a check fails."""
    strangers = [name for name in names or [] if name not in CLIENTS]
    if strangers:
        raise typer.BadParameter(f"{strangers[0]} is none of {', '.join(CLIENTS)}")
    console = Console()
    with reported_to(json_file) as report, running(model, "--max-num-seqs", "16", "--max-model-len", "2048") as server:
        outcomes = {name: _run(CLIENTS[name], server, cache, console) for name in names or CLIENTS}
        report.update({"command": "python -m benchmarks.clients", "model": model, "clients": outcomes})
    table = Table("client", "versions", "checks", "failed", title="clients")
    for name, outcome in outcomes.items():
        failed = [check["check"] for check in outcome["checks"] if not check["ok"]]
        table.add_row(
            name,
            outcome["version"] or "-",
            str(len(outcome["checks"])),
            ", ".join(failed) or outcome["skipped"] or "none",
        )
    console.print(table)
    if any(not check["ok"] for outcome in outcomes.values() for check in outcome["checks"]):
        raise typer.Exit(1)


def _run(client: Client, server: Server, cache: Path, console: Console) -> dict[str, Any]:
    environment = client.environment
    outcome: dict[str, Any] = {"version": None, "checks": [], "skipped": None}
    try:
        environment.ensure(cache, console.print)
    except Unavailable as error:
        outcome["skipped"] = str(error)
        return outcome
    package = environment.requirements[0].partition("==")[0]
    outcome["version"] = f"{package} {environment.versions(cache).get(package, '?')}"
    variables = {**os.environ, "ROPEWAY_URL": server.url, "ROPEWAY_MODEL": server.name, "NO_PROXY": "127.0.0.1"}
    variables |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    python = environment.python(cache)
    if client.suite is not None:
        command = [str(python), str(_SUITES / client.suite)]
    elif client.command is not None:
        command = client.command(environment.folder(cache), server)
    else:
        command = [str(python), "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    console.print(" ".join(command)[:200])
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=_LIMIT_S)
    if client.suite is not None:
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        outcome["checks"] = [json.loads(line) for line in lines]
        if not lines:
            outcome["checks"] = [{"check": client.suite, "ok": False, "problem": done.stderr[-2000:]}]
        return outcome
    check: dict[str, Any] = {"check": environment.name, "ok": done.returncode == 0, "problem": None}
    try:
        if done.returncode != 0:
            raise ValueError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        if client.succeeded is not None:
            check["figures"] = client.succeeded(done.stdout + done.stderr)
    except ValueError as error:
        check |= {"ok": False, "problem": str(error)}
    outcome["checks"] = [check]
    return outcome


if __name__ == "__main__":
    typer.run(_main)
