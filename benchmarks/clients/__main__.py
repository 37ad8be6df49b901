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
        *(str(folder / "bin" / "guidellm"), "run", "--disable-console-interactive"),
        *("--backend", json.dumps({"kind": "openai_http", "target": server.url, "model": server.name})),
        *("--profile", json.dumps({"kind": "concurrent", "streams": 8})),
        *("--constraint", json.dumps({"kind": "max_requests", "count": 40})),
        *("--data", json.dumps({"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": 32})),
        *("--tokenizer", json.dumps({"kind": "hf_auto", "model": _tokenizer()})),
        *("--output", json.dumps({"kind": "console"})),
    ]


_AISBENCH = """
from mmengine.config import read_base
from ais_bench.benchmark.models import VLLMCustomAPIChat
with read_base():
    from ais_bench.benchmark.configs.datasets.synthetic.synthetic_gen_string import synthetic_datasets as datasets
    from ais_bench.benchmark.configs.summarizers.perf.default_perf import summarizer
models = [
    dict(attr="service", type=VLLMCustomAPIChat, abbr="ropeway", path={tokenizer!r}, model={model!r}, stream=True,
         request_rate=0, retry=2, host_ip="127.0.0.1", host_port={port}, max_out_len=32, batch_size=8,
         trust_remote_code=False, generation_kwargs=dict(temperature=0.5, ignore_eos=True)),
]
"""


def _aisbench(folder: Path, server: Server) -> list[str]:
    config = folder / "ropeway_config.py"
    config.write_text(_AISBENCH.format(tokenizer=_tokenizer(), model=server.name, port=server.port))
    return [
        *(str(folder / "bin" / "ais_bench"), str(config), "--mode", "perf", "--debug"),
        *("--work-dir", str(folder / "outputs"), "--num-prompts", "40"),
    ]


def _tokenizer() -> str:
    """A folder with a tokenizer, for generators that make prompts of so many tokens."""
    from benchmarks.unquantised_model import unquantised_model

    return str(unquantised_model("smollm2-135m"))


def _finished(marks: tuple[str, ...]) -> Callable[[str], dict[str, Any]]:
    def check(printed: str) -> dict[str, Any]:
        missing = [mark for mark in marks if mark not in printed]
        if missing:
            raise ValueError(f"its output has no {missing[0]!r}: {printed[-1500:]}")
        return {"printed": list(marks)}

    return check


CLIENTS: dict[str, Client] = {
    "openai": Client(Environment("openai", ("openai==3.51.0",)), "openai_suite.py"),
    "anthropic": Client(Environment("anthropic", ("anthropic==2.10.0",)), "anthropic_suite.py"),
    "litellm": Client(Environment("litellm", ("litellm",)), "litellm_suite.py"),
    "langchain": Client(Environment("langchain", ("langchain-openai==1.7.4",)), "langchain_suite.py"),
    "guidellm": Client(
        Environment("guidellm", ("guidellm==0.8.1",)),
        command=_guidellm,
        succeeded=_finished(("successful=40 errored=0",)),
    ),
    "ais-bench": Client(
        # What it wants of numpy is older than what the newest of its other packages want.
        Environment(
            "ais-bench",
            ("ais-bench-benchmark==3.1.20260630", "torch==2.13.0", "pyarrow<21", "pandas<3", "setuptools<81"),
        ),
        command=_aisbench,
        succeeded=_finished(("FAIL=0", "FINISH=10")),
    ),
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
    versions = {name.replace("_", "-"): version for name, version in environment.versions(cache).items()}
    outcome["version"] = f"{package} {versions.get(package, '?')}"
    variables = {**os.environ, "ROPEWAY_URL": server.url, "ROPEWAY_MODEL": server.name, "NO_PROXY": "127.0.0.1"}
    variables |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    python = environment.python(cache)
    if client.suite is not None:
        command = [str(python), str(_SUITES / client.suite)]
    elif client.command is not None:
        command = client.command(environment.folder(cache), server)
    else:
        raise AssertionError("a client has a suite or a command")
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
