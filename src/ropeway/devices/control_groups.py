"""Control groups this process is in, as Linux tells them (cgroups(7)): where the limits of a container or a service
are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A folder with the files of one controller, as version 1 or 2 names them."""

    folder: Path
    version: Literal[1, 2]

    def text(self, file: str) -> str:
        """What a file holds; empty where there is none."""
        try:
            return (self.folder / file).read_text()
        except OSError:
            return ""

    def number(self, file: str) -> int | None:
        """The number in a file; None for a missing file or the word "max"."""
        try:
            return int(self.text(file))
        except ValueError:
            return None

    def statistics(self, file: str) -> dict[str, int]:
        """The lines "name number" of a file."""
        pairs = [line.split() for line in self.text(file).splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def control_groups(controller: str, membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[ControlGroup]:
    """Groups of this process that ``controller`` ("memory", "cpu") may limit, ancestors included.

    ``membership`` holds a line "number:controllers:path" per hierarchy; version 2 is the one numbered 0. Inside a
    container the path often lies outside what is mounted; the walk up then ends at the mounted root, whose limit is
    the container's. Folders that don't exist are among those given."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            top, version = root, 2
        elif controller in controllers.split(","):
            # Controllers that share a hierarchy have a link each.
            top, version = root / controller, 1
        else:
            continue
        relative = Path(path.lstrip("/"))
        for group in (relative, *relative.parents):
            yield ControlGroup(top / group, 1 if version == 1 else 2)
