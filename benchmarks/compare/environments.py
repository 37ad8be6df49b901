"""Virtual environments of the other engines, made when they are first needed.

None shares a package with this project's own: each engine pins its own torch and transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_READY = "ready.json"
_TAIL = 3
"""Lines of pip's output that a failure tells."""

Say = Callable[[str], None]


class Unavailable(Exception):
    """Why an engine, or one of its settings, cannot take part. The race goes on without it."""


@dataclass(frozen=True)
class Environment:
    """What pip installs for one engine. Equal values share a folder; another value replaces what is there."""

    name: str
    requirements: tuple[str, ...]
    """Pinned; of torch, the builds for the CPU, whose versions end in ``+cpu``."""
    unwanted: tuple[str, ...] = ()
    """Taken out after the installation."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of pip's process: how packages are compiled."""
    jobs_variable: str | None = None
    """Another such variable, for how many compilers run at once."""

    def folder(self, root: Path) -> Path:
        return root / self.name

    def python(self, root: Path) -> Path:
        return self.folder(root) / "bin" / "python"

    def library(self, root: Path, pattern: str) -> Path | None:
        """A file below the folder."""
        return next(iter(sorted(self.folder(root).rglob(pattern))), None)

    def versions(self, root: Path) -> dict[str, str]:
        """Version of every package installed, by its name in lower case; empty when there is no environment."""
        ready = _read(self.folder(root) / _READY)
        return {package["name"].lower(): package["version"] for package in ready["installed"]} if ready else {}

    def ensure(self, root: Path, say: Say) -> None:
        """Make it unless it is there. What pip prints goes to ``NAME.log`` beside the folder. Raises ``Unavailable``
        with the end of that."""
        folder, log = self.folder(root), root / f"{self.name}.log"
        wanted = self._as_data()
        if (ready := _read(folder / _READY)) and {**ready, "installed": None} == {**wanted, "installed": None}:
            return
        say(f"installing {' '.join(self.requirements)} into {folder}; pip's output is in {log}")
        shutil.rmtree(folder, ignore_errors=True)
        root.mkdir(parents=True, exist_ok=True)
        # This interpreter's pip works on the other environment, which so needs none of its own.
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python(root))]
        with log.open("w") as out:
            self._call([sys.executable, "-m", "venv", "--without-pip", str(folder)], out, log)
            # No cache: several gigabytes that nobody needs twice.
            self._call([*pip, "install", "--no-cache-dir", *self.requirements], out, log)
            if self.unwanted:
                self._call([*pip, "uninstall", "--yes", *self.unwanted], out, log)
        listed = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True, text=True).stdout
        (folder / _READY).write_text(json.dumps({**wanted, "installed": json.loads(listed)}, indent=2) + "\n")

    def _as_data(self) -> dict[str, Any]:
        return {
            "requirements": list(self.requirements),
            "unwanted": list(self.unwanted),
            "variables": dict(self.variables),
        }

    def _call(self, command: list[str], out: Any, log: Path) -> None:
        jobs = {self.jobs_variable: str(os.cpu_count() or 1)} if self.jobs_variable else {}
        variables = {**os.environ, **self.variables, **jobs}
        try:
            code = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables
            ).returncode
        except OSError as error:
            raise Unavailable(f"{command[0]} cannot be run: {error.strerror}") from error
        if code != 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise Unavailable(f"{self.name} cannot be installed (see {log}): {' / '.join(lines[-_TAIL:])}")


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
