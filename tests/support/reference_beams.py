"""Beam search as it stands in books: every beam goes on to the end. An oracle for the real one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

Top = Sequence[tuple[int, float]]


class Answer(NamedTuple):
    token_ids: list[int]
    cumulative_logprob: float
    score: float


def reference_beams(
    prompt: Sequence[int],
    likeliest: Callable[[list[int]], Top],
    *,
    width: int,
    max_tokens: int,
    end_ids: Collection[int] = (),
    length_penalty: float = 1.0,
) -> list[Answer]:
    """The ``width`` best answers. ``likeliest``: (token id, log-probability) of what may come after some tokens."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    answers = []
    for _ in range(max_tokens):
        candidates = []
        for rank, (tokens, so_far) in enumerate(beams):
            length = len(prompt) + len(tokens)
            for token, logprob in likeliest([*prompt, *tokens]):
                together = so_far + logprob
                if token in end_ids:
                    answers.append(Answer([*tokens, token], together, together / length**length_penalty))
                else:
                    candidates.append((-together, rank, token, [*tokens, token]))
        beams = [(tokens, -negative) for negative, _, _, tokens in sorted(candidates)[:width]]
    longest = len(prompt) + max_tokens
    answers += [Answer(tokens, so_far, so_far / longest**length_penalty) for tokens, so_far in beams]
    return sorted(answers, key=lambda answer: -answer.score)[:width]
