"""``SampleInputs`` from one dictionary per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ropeway.devices.base import SampleInputs


@dataclass(frozen=True)
class RowParams:
    """A row's parameters; the defaults change nothing and report nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    top_logprobs: int = -1
    allowed: frozenset[int] | None = None
    """What its mask allows; None: it has no mask."""


def sample_inputs(rows: Sequence[RowParams], mask_words: int = 2) -> SampleInputs:
    """Columns of the rows. Histories lie in slots in reverse order, with ids that would show after their ends."""

    def floats(name: str) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=torch.float32)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    lengths = [len(row.prompt) + len(row.output) for row in rows]
    slots = list(reversed(range(len(rows))))
    tokens = torch.full((max(len(rows), 1), max(lengths, default=0) + 4), 1, dtype=torch.int32)
    for row, slot, length in zip(rows, slots, lengths, strict=True):
        tokens[slot, :length] = ints([*row.prompt, *row.output])
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.bias))
    masked = [row for row in rows if row.allowed is not None]
    masks = torch.tensor([_words(row.allowed or frozenset(), mask_words) for row in masked], dtype=torch.int32)
    places = iter(range(len(masked)))
    mask_of = ints([-1 if row.allowed is None else next(places) for row in rows])
    return SampleInputs(
        temperature=floats("temperature"),
        top_k=ints([row.top_k for row in rows]),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        repetition_penalty=floats("repetition_penalty"),
        presence_penalty=floats("presence_penalty"),
        frequency_penalty=floats("frequency_penalty"),
        seeds=torch.tensor([row.seed for row in rows], dtype=torch.int64),
        tokens=tokens,
        slots=ints(slots),
        prompt_lengths=ints([len(row.prompt) for row in rows]),
        lengths=ints(lengths),
        bias_start=ints(starts),
        bias_ids=ints([token for row in rows for token in row.bias]),
        bias_values=torch.tensor([value for row in rows for value in row.bias.values()], dtype=torch.float32),
        top_logprobs=ints([row.top_logprobs for row in rows]),
        mask_of=mask_of if masked else None,
        masks=masks.reshape(-1, mask_words) if masked else None,
    )


def _words(allowed: frozenset[int], count: int) -> list[int]:
    words = [0] * count
    for token in allowed:
        if token < 32 * count:
            words[token // 32] |= 1 << token % 32
    return [word - 2**32 if word >= 2**31 else word for word in words]
