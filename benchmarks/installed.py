"""Install as users do, and see it serve: the wheel in a bare environment, and the systemd unit.

python -m benchmarks.installed        # builds the wheel, fetches what it depends on; JSON with --json FILE

The unit needs root and a systemd, which need not be the machine's init: one of its own is started in namespaces, over
an /etc, /opt, /run and /var that are thrown away.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from benchmarks.server import free_port, running
from ropeway.bench.report import reported_to
from ropeway.cli.failures import told_plainly
from ropeway.loading.sources import resolve

ROOT = Path(__file__).parents[1]
_MODEL = "smollm2-135m"
_WAIT_S = 120.0
_SYSTEMD = Path("/lib/systemd/systemd")
_TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user", "umount")
_BOOT = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for each in etc var; do
    mkdir "$FOLDER/$each" "$FOLDER/work-$each"
    mount -t overlay overlay -o "lowerdir=/$each,upperdir=$FOLDER/$each,workdir=$FOLDER/work-$each" "/$each"
done
mkdir -p /etc/ropeway
cp "$FOLDER/ropeway.toml" "$FOLDER/keys.toml" /etc/ropeway/
mount --bind "$FOLDER/opt" /opt
mount -t tmpfs tmpfs /run
exec env -i PATH="$PATH" container=other SYSTEMD_UNIT_PATH="$FOLDER/units" SYSTEMD_GENERATOR_PATH="$FOLDER/none" \
    /lib/systemd/systemd --system --log-target=console --unit=ropeway.service
"""
"""For new namespaces of processes, mounts and control groups."""

Control = Callable[..., str]
"""Runs a command where the unit is; what it prints."""


@told_plainly
def _main(json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None) -> None:
    """Build, install, serve."""
    with reported_to(json_file) as report, tempfile.TemporaryDirectory(prefix="ropeway-installed-") as name:
        folder = Path(name)
        environment = folder / "opt" / "ropeway"
        _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", name, str(ROOT))
        (wheel,) = folder.glob("ropeway-*.whl")
        _run(_python() or sys.executable, "-m", "venv", "--without-pip", str(environment))
        _run(sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet", str(wheel))
        figures = {"wheel": wheel.name, "bare environment": _serve_bare(environment)}
        typer.echo(f"{wheel.name} serves in a bare environment")
        if reason := _why_not():
            figures["systemd unit"] = {"skipped": reason}
        else:
            figures["systemd unit"] = _serve_unit(folder)
        typer.echo(f"systemd unit: {figures['systemd unit']}")
        report.update(figures)


def _serve_bare(environment: Path) -> dict[str, Any]:
    with running(_MODEL, python=environment / "bin" / "python", bare=True) as server:
        return _ask(server.url)


def _serve_unit(folder: Path) -> dict[str, Any]:
    """Started, reloaded, killed and stopped by systemd. Raises ``RuntimeError`` naming what it does not do."""
    ports = free_port(), free_port()
    url, ready = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}/ready"
    first, entry = _new_key(folder, "first")
    _write_files(folder, ports, entry)
    with _booted(folder) as control:
        figures: dict[str, Any] = {"ready_s": _until(lambda: _is_ready(ready))}
        figures["answers"] = _ask(url, first)
        main = _listener(ports[0])
        if main.uids().real == 0:
            raise RuntimeError("the server runs as root")
        second, entry = _new_key(folder, "second")
        control("sh", "-c", 'printf "%s" "$1" >> /etc/ropeway/keys.toml', "-", entry)
        if _status(url, second) != 401:
            raise RuntimeError("a key counts before it is read")
        control("systemctl", "reload", "ropeway")
        _until(lambda: _status(url, second) == 200, 5)
        main.kill()
        main.wait(10)
        figures["back_s"] = _until(lambda: _is_ready(ready))
        figures["restarts"] = int(control("systemctl", "show", "ropeway", "--value", "-p", "NRestarts"))
        with _streaming(url, first) as lines:
            control("systemctl", "stop", "ropeway")
        if lines[-1] != "data: [DONE]":
            raise RuntimeError("a stream was cut off by systemctl stop")
        figures["result"] = control("systemctl", "show", "ropeway", "--value", "-p", "Result").strip()
        return figures


def _python() -> str | None:
    """A Python of this version that other users can run too: one in a home folder is hidden from the unit."""
    own = Path(sys.executable).resolve()
    if not own.is_relative_to("/root") and not own.is_relative_to("/home"):
        return str(own)
    return shutil.which(f"python3.{sys.version_info.minor}", path="/usr/local/bin:/usr/bin")


def _why_not() -> str | None:
    """Why the unit cannot be tried here."""
    if _python() is None:
        return "Python is in a home folder, which the unit must not see"
    if os.geteuid() != 0:
        return "only root may start one"
    if not _SYSTEMD.exists() or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "there is no systemd here"
    return None


def _new_key(folder: Path, name: str) -> tuple[str, str]:
    """(a key, its entry for the file)"""
    command = [str(folder / "opt" / "ropeway" / "bin" / "python"), "-m", "ropeway", "keys", "new", name]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = re.search(r"once: (\S+)", made.stderr)
    if found is None:
        raise RuntimeError(f"no key was shown: {made.stderr}")
    return found[1], made.stdout


def _write_files(folder: Path, ports: tuple[int, int], entry: str) -> None:
    folder.chmod(0o755)
    units = folder / "units"
    for each in (units, folder / "none"):
        each.mkdir()
    shutil.copy(ROOT / "packaging" / "ropeway.service", units)
    for name in _TARGETS:  # of those that the unit waits for there is nothing to do
        (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\n")
    model = shutil.copy(resolve(_MODEL), folder / "opt")
    # Scripts of an environment know where it was made.
    for script in (folder / "opt" / "ropeway" / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and script.read_bytes().startswith(b"#!"):
            script.write_text(script.read_text().replace(str(folder / "opt"), "/opt"))
    (folder / "keys.toml").write_text(entry)
    (folder / "ropeway.toml").write_text(
        f'[model]\nmodel = "/opt/{Path(model).name}"\n\n[server]\nport = {ports[0]}\nmanagement_port = {ports[1]}\n'
        'api_keys = "/etc/ropeway/keys.toml"\n'
    )


@contextlib.contextmanager
def _booted(folder: Path) -> Iterator[Control]:
    """A systemd with the unit, ended with everything it started on leaving."""
    command = ["unshare", "--fork", "--pid", "--mount", "--cgroup", "--kill-child", "sh", "-c", _BOOT]
    log = folder / "systemd.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "FOLDER": str(folder)}) as outside,
    ):
        _until(lambda: bool(psutil.Process(outside.pid).children()), 10)
        (init,) = psutil.Process(outside.pid).children()

        def control(*words: str) -> str:
            inside = ["nsenter", "--target", str(init.pid), "--pid", "--mount", *words]
            done = subprocess.run(inside, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(words)} failed: {done.stderr}")
            return done.stdout

        try:
            yield control
        except RuntimeError as error:
            status = control("sh", "-c", "systemctl status ropeway || true")
            raise RuntimeError(f"{error}\n{status}\n{log.read_text(errors='replace')[-2000:]}") from error
        finally:
            init.kill()  # and with it all of its namespace


@contextlib.contextmanager
def _streaming(url: str, key: str) -> Iterator[list[str]]:
    """A stream that has begun; its lines, complete on leaving."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, **_as(key)) as response:
            for line in response.iter_lines():
                if line:
                    lines.append(line)
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        if not begun.wait(30):
            raise RuntimeError("a stream does not begin")
        yield lines
    finally:
        reader.join()


def _ask(url: str, key: str = "") -> dict[str, int]:
    """Statuses of the routes that need most of what is installed."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    body = {
        "messages": [{"role": "user", "content": "A number?"}],
        "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, **_as(key))
    statuses = {"/v1/chat/completions": answer.status_code}
    for path in ("/dashboard", "/metrics", "/health"):
        statuses[path] = httpx.get(f"{url}{path}", **_as(key)).status_code
    if set(statuses.values()) != {200}:
        raise RuntimeError(f"not every route answers: {statuses} {answer.text}")
    return statuses


def _status(url: str, key: str) -> int:
    return httpx.get(f"{url}/v1/models", **_as(key)).status_code


def _as(key: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {key}"} if key else {}, "timeout": 60.0, "trust_env": False}


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _until(true: Callable[[], bool], within_s: float = _WAIT_S) -> float:
    """Seconds until it is. Raises ``RuntimeError``."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > within_s:
            raise RuntimeError(f"waited for {within_s:g} s in vain")
        time.sleep(0.1)
    return time.monotonic() - began


def _listener(port: int) -> psutil.Process:
    """The process that listens on a port here."""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
            return psutil.Process(connection.pid)
    raise RuntimeError(f"nobody listens on port {port}")


def _run(*command: str) -> None:
    """Raises ``RuntimeError`` with what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    typer.run(_main)
