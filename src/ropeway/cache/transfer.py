"""Moving published blocks between host memory and a slower store, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Transferred:
    """A transfer that is over."""

    kind: Literal["save", "load"]
    key: bytes
    host_block: int
    ok: bool
    """False: nothing was saved, or the host block holds nothing to be trusted."""


class BlockStore(Protocol):
    """Blocks under their keys, outside this process's memory. Calls return at once; the work is done elsewhere, in the
    order of the calls. A host block given to ``save`` or ``load`` is left alone until ``finished`` names it."""

    def find(self, key: bytes) -> bool:
        """Whether the store believes to hold it; ``load`` may fail all the same."""
        ...

    def save(self, key: bytes, host_block: int) -> None: ...
    def load(self, key: bytes, host_block: int) -> None: ...

    def finished(self) -> Collection[Transferred]:
        """What has been done since the last call."""
        ...

    @property
    def blocks(self) -> int:
        """How many it holds."""
        ...

    @property
    def errors(self) -> int:
        """Blocks that could not be written, or were found damaged or foreign."""
        ...

    @property
    def failure(self) -> str | None:
        """Why nothing is saved any more (a full or read-only disk); None: it works."""
        ...

    def close(self) -> None:
        """Finish what was begun; give up what was not."""
        ...
