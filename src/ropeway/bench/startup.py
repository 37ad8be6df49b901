"""Cold start to first token, as users see it: real processes from the command to what it prints or answers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from ropeway.errors import EngineDead

_PROMPT = (1, 2, 3)
"""Any ids will do: no model has fewer."""
_READY_S = 600.0
_POLL_S = 0.01
_LAST_LINES = 15
"""Of a failed process's log, in the error."""


@dataclass(frozen=True)
class Start:
    """One start. Times are seconds from the moment the command was given."""

    first_token_s: float
    cpu_s: float
    """CPU time of all its processes until they ended: what the same start takes where nobody else computes."""
    parts_s: dict[str, float]
    """Of the process that computes: what it waited for, one after the other, until it was ready."""
    weight_bytes: int
    """Packed."""
    kv_pool_bytes: int
    """The whole pool; pages that were never written are not resident."""
    resident_bytes: int | None = None
    """Of all processes together after the first token; what they share counts once."""


@dataclass(frozen=True)
class StartUpFigures:
    """Medians over alternating runs."""

    torch_import_s: float
    torch_import_cpu_s: float
    """``python -c "import torch"``: what no process that uses it can do without."""
    generate_s: float
    """From ``ropeway generate`` to the end of its first token."""
    generate_cpu_s: float
    """CPU time of all threads, its end included: whatever else the machine does adds little to it."""
    generate_beyond_torch_s: float
    """Without the import of torch in the run beside it."""
    serve_s: float
    """From ``ropeway serve`` to the end of the first token over HTTP."""
    serve_cpu_s: float
    serve_beyond_torch_s: float
    resident_bytes: int
    """Of a server and its engine after the first token; what they share counts once."""
    weight_bytes: int
    kv_pool_bytes: int
    generate_parts_s: dict[str, float]
    serve_parts_s: dict[str, float]
    """Of the engine process."""
    runs: list[dict[str, float]]
    """Each run's seconds."""


def measure_startup(
    arguments: Sequence[str],
    *,
    repeat: int = 3,
    files: Sequence[Path] = (),
    progress: Callable[[int, int], None] | None = None,
) -> StartUpFigures:
    """Start ``ropeway generate`` and ``ropeway serve`` with ``arguments`` (a model and settings' flags), and torch
    alone, in alternation. ``files`` are dropped from the page cache before each start, so that they come from disk.

    Raises ``EngineDead`` with the end of its log when a process fails."""
    runs: list[dict[str, float]] = []
    generated: list[Start] = []
    served: list[Start] = []
    for number in range(repeat):
        torch_s, torch_cpu_s = time_torch_import()
        evict(files)
        generated.append(start_generate(arguments))
        evict(files)
        served.append(start_serve(arguments))
        runs.append(
            {
                "torch_import_s": torch_s,
                "torch_import_cpu_s": torch_cpu_s,
                "generate_s": generated[-1].first_token_s,
                "generate_cpu_s": generated[-1].cpu_s,
                "serve_s": served[-1].first_token_s,
                "serve_cpu_s": served[-1].cpu_s,
            }
        )
        if progress is not None:
            progress(number + 1, repeat)

    def median(name: str, minus: str | None = None) -> float:
        return statistics.median(run[name] - (run[minus] if minus else 0.0) for run in runs)

    last = served[-1]
    return StartUpFigures(
        torch_import_s=median("torch_import_s"),
        torch_import_cpu_s=median("torch_import_cpu_s"),
        generate_s=median("generate_s"),
        generate_cpu_s=median("generate_cpu_s"),
        generate_beyond_torch_s=median("generate_s", minus="torch_import_s"),
        serve_s=median("serve_s"),
        serve_cpu_s=median("serve_cpu_s"),
        serve_beyond_torch_s=median("serve_s", minus="torch_import_s"),
        resident_bytes=max(start.resident_bytes or 0 for start in served),
        weight_bytes=last.weight_bytes,
        kv_pool_bytes=last.kv_pool_bytes,
        generate_parts_s=_medians(generated),
        serve_parts_s=_medians(served),
        runs=runs,
    )


def time_torch_import() -> tuple[float, float]:
    """Seconds of a process that only imports torch, and its CPU time."""
    began, cpu_s = time.monotonic(), _cpu_of_children_s()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began, _cpu_of_children_s() - cpu_s


def start_generate(arguments: Sequence[str]) -> Start:
    """Until its one line of output is there; the process may take its time to end."""
    prompt = ",".join(map(str, _PROMPT))
    given = ("generate", *arguments, "--prompt-ids", prompt, "--max-tokens", "1", "--ignore-eos", "--json", "--timings")
    began, cpu_s = time.monotonic(), _cpu_of_children_s()
    with _running(given, stdout=subprocess.PIPE) as (process, log):
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.monotonic() - began
        if not line:
            raise EngineDead(f"ropeway generate ended without a token:\n{_end_of(log)}")
        engine = json.loads(line)["engine"]
        process.wait()
    parts = dict(engine["startup_s"])
    parts["first_token"] = took - sum(parts.values())
    return Start(took, _cpu_of_children_s() - cpu_s, parts, engine["weight_bytes"], engine["kv_pool_bytes"])


def start_serve(arguments: Sequence[str]) -> Start:
    """Until a client that asks from the beginning has its token; then memory is counted and the server ended."""
    port, management = _free_port(), _free_port()
    given = ("serve", *arguments, "--port", str(port), "--management-port", str(management))
    request = {"model": "startup", "prompt": list(_PROMPT), "max_tokens": 1}
    began, cpu_s = time.monotonic(), _cpu_of_children_s()
    with (
        _running((*given, "--served-model-name", "startup"), stdout=subprocess.DEVNULL) as (process, log),
        httpx.Client(timeout=_READY_S, trust_env=False) as client,
    ):
        while True:
            try:
                client.post(f"http://127.0.0.1:{port}/v1/completions", json=request).raise_for_status()
                break
            except httpx.ConnectError as error:
                if process.poll() is not None or time.monotonic() - began > _READY_S:
                    raise EngineDead(f"ropeway serve did not get ready:\n{_end_of(log)}") from error
                time.sleep(_POLL_S)
        took = time.monotonic() - began
        resident = resident_bytes(process.pid)
        gauges, parts = _gauges(client.get(f"http://127.0.0.1:{management}/metrics").text)
    weights, pool = int(gauges["ropeway_weight_bytes"]), int(gauges["ropeway_kv_pool_bytes"])
    return Start(took, _cpu_of_children_s() - cpu_s, parts, weights, pool, resident)


def resident_bytes(pid: int) -> int:
    """Bytes of memory that a process and all it has started hold together. Pages that several share count once
    (proportional set size) on Linux; elsewhere the resident sets are added up."""
    process = psutil.Process(pid)
    total = 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = each.memory_full_info()
            total += int(getattr(memory, "pss", memory.rss))
    return total


def evict(files: Sequence[Path]) -> None:
    """Drop files from the page cache, where the system takes such advice."""
    for file in files:
        if hasattr(os, "posix_fadvise"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_of(model: Path) -> list[Path]:
    """The files that hold a model's weights: itself, or what its folder has."""
    return [model] if model.is_file() else sorted((*model.glob("*.safetensors"), *model.glob("*.gguf")))


@contextlib.contextmanager
def _running(arguments: Sequence[str], *, stdout: int) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A ``ropeway`` process and its log; ended at the end."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-m", "ropeway", *arguments], stdout=stdout, stderr=log)
        try:
            yield process, log
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _cpu_of_children_s() -> float:
    """CPU time of all processes that this one has started and that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_LAST_LINES:])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def _gauges(metrics: str) -> tuple[dict[str, float], dict[str, float]]:
    """Values without labels, and the parts of the engine's start."""
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    plain = {sample.name: sample.value for sample in samples if not sample.labels}
    parts = {s.labels["part"]: s.value for s in samples if s.name == "ropeway_startup_seconds"}
    return plain, parts


def _medians(starts: Sequence[Start]) -> dict[str, float]:
    names = starts[0].parts_s
    return {name: statistics.median(start.parts_s[name] for start in starts) for name in names}


def report(figures: StartUpFigures) -> dict[str, Any]:
    """Plain data, with what memory is compared with: 1.2 times the packed weights, the KV pool and 500 MB."""
    return {**asdict(figures), "resident_limit_bytes": resident_limit(figures)}


def resident_limit(figures: StartUpFigures) -> int:
    return int(1.2 * figures.weight_bytes) + figures.kv_pool_bytes + 500_000_000
