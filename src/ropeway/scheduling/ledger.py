"""What has become of each tier's requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TierLedger:
    """One tier's. Counters never fall; ``waiting`` and ``swapped`` are numbers of the moment."""

    waiting: int = 0
    swapped: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By the code of the error."""
    preemptions: Counter[str] = field(default_factory=Counter)
    """By kind: swap or recompute; and ``admission``: how many of them were for a higher tier's sake."""
    finished: int = 0
    predicted_tokens: int = 0
    """Output lengths of the finished, as predicted when they came."""
    output_tokens: int = 0
    """And as they were."""
