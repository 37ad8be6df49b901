"""What a configuration costs in exactness: perplexity of a text, each token predicted from those before it in the text,
on the kernels, the paged cache and the chunks that requests are computed with."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ropeway.config import Config
from ropeway.engine.assembly import assemble
from ropeway.errors import ConfigError, LoadError
from ropeway.execution.worker import Worker
from ropeway.loading.sources import resolve as resolve_source
from ropeway.plan import Ints, Plan, Seat
from ropeway.request import SamplingParams
from ropeway.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
"""Called with (positions computed, positions in all)."""

_HEAD_ROWS = 64
"""Positions whose logits are held at a time."""
_DEFAULT_TOKENS = 8192


@dataclass(frozen=True)
class Text:
    """A text cut into chunks, each of which is predicted from its own beginning."""

    chunks: Ints
    """int32 [chunks, context]: a BOS token first, where the model wants one."""
    scored_from: int
    """The first position of a chunk that is predicted."""

    @property
    def scored(self) -> int:
        """Predicted tokens of all chunks."""
        chunks, context = self.chunks.shape
        return int(chunks * (context - self.scored_from))


@dataclass(frozen=True)
class Scores:
    """One configuration's predictions; columns are [chunks, scored positions of one]."""

    logprobs: NDArray[np.float64]
    """Of the text's own tokens."""
    choices: Ints
    """int32: the tokens with the largest logits."""
    gaps: NDArray[np.float32]
    """float32: between the two largest logits."""
    weight_bytes: int
    """Packed size of the model."""

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs.mean()))


@dataclass(frozen=True)
class Perplexity:
    """A configuration beside the baseline. Changes are in percent of the baseline's perplexity."""

    scored_tokens: int
    baseline_perplexity: float
    perplexity: float
    change_percent: float
    change_error_percent: float
    """Standard error of the change, from its spread over the tokens."""
    chunks: int
    lowest_chunk_change_percent: float
    highest_chunk_change_percent: float
    chunk_change_deviation_percent: float
    """Standard deviation of the chunks' changes; 0 for a single one."""
    other_choices: int
    """Positions where the largest logit is another token's than in the baseline."""
    largest_gap: float
    """Between the baseline's two largest logits at such a position; 0 if there is none."""
    baseline_weight_bytes: int
    weight_bytes: int


def read_text(config: Config, text: str, *, tokens: int | None = None, context: int = 1024) -> Text:
    """The first ``tokens`` tokens (default: 8,192, or all there are) of ``text`` as the configured model sees it, in
    chunks of ``context``; what does not fill a chunk at the end is left out.

    Raises what finding the model raises, ``LoadError`` for one without a tokenizer, and ``ConfigError`` for a text that
    is too short, or a context of less than two tokens."""
    if context < 2:
        raise ConfigError(f"context is {context}; it must be at least 2, for a token to be predicted", param="context")
    tokenizer = Tokenizer.from_path(resolve_source(config.model.model))
    if tokenizer is None:
        raise LoadError(f"{config.model.model} has no tokenizer, which makes tokens of a text")
    ids = tokenizer.encode(text, add_special_tokens=False)
    before = list(itertools.takewhile(lambda token: token in tokenizer.special_ids, tokenizer.encode("a")))
    size = context - len(before)
    wanted = min(len(ids), _DEFAULT_TOKENS) if tokens is None else tokens
    if not 1 <= size <= wanted <= len(ids):
        raise ConfigError(
            f"the text has {len(ids)} tokens, of which {wanted} are to be cut into chunks of {size}; give a longer "
            "text, fewer tokens or a shorter context",
            param="text" if len(ids) < wanted else "context",
        )
    count = wanted // size
    chunks = np.empty((count, context), dtype=np.int32)
    chunks[:, : len(before)] = before
    chunks[:, len(before) :] = np.array(ids[: count * size], dtype=np.int32).reshape(count, size)
    return Text(chunks, max(len(before), 1))


def measure_perplexity(
    config: Config, baseline: Config, text: Text, *, progress: Progress | None = None
) -> tuple[Perplexity, list[dict[str, float]]]:
    """``config`` beside ``baseline``, one after the other, and the perplexities of the single chunks.

    Of both configurations only what decides a model's values is used; steps hold ``max_batched_tokens``. Raises what
    loading raises."""
    passes = 1 if config == baseline else 2
    total = passes * text.chunks.size

    def told(done: int) -> None:
        if progress is not None:
            progress(done, total)

    before = score(baseline, text, told)
    after = before if passes == 1 else score(config, text, lambda done: told(text.chunks.size + done))
    return compare(before, after), [
        {"baseline_perplexity": math.exp(-one), "perplexity": math.exp(-other)}
        for one, other in zip(before.logprobs.mean(1).tolist(), after.logprobs.mean(1).tolist(), strict=True)
    ]


def compare(before: Scores, after: Scores) -> Perplexity:
    """What ``after`` costs, of the same text."""
    worse = before.logprobs - after.logprobs
    ratio = math.exp(float(worse.mean()))
    by_chunk = 100 * np.expm1(worse.mean(1))
    others = before.choices != after.choices
    return Perplexity(
        scored_tokens=worse.size,
        baseline_perplexity=before.perplexity,
        perplexity=after.perplexity,
        change_percent=100 * (ratio - 1),
        change_error_percent=100 * ratio * float(worse.std()) / math.sqrt(worse.size),
        chunks=len(by_chunk),
        lowest_chunk_change_percent=float(by_chunk.min()),
        highest_chunk_change_percent=float(by_chunk.max()),
        chunk_change_deviation_percent=float(by_chunk.std(ddof=1)) if len(by_chunk) > 1 else 0.0,
        other_choices=int(others.sum()),
        largest_gap=float(before.gaps[others].max(initial=0.0)),
        baseline_weight_bytes=before.weight_bytes,
        weight_bytes=after.weight_bytes,
    )


def score(config: Config, text: Text, progress: Callable[[int], None]) -> Scores:
    """Load the configured model and predict the text; ``progress`` counts positions computed."""
    context = text.chunks.shape[1]
    try:
        assembly = assemble(_alone(config, context), resolve_source(config.model.model), lambda output: None)
    except ConfigError as error:
        if error.param != "max_model_len":
            raise
        raise ConfigError(f"context is {context}, which is too long: {error.message}", param="context") from error
    columns = []
    try:
        worker = assembly.worker
        for index, chunk in enumerate(text.chunks):

            def work(chunk: Ints = chunk, done: int = index * context) -> None:
                columns.append(_score_chunk(worker, chunk, config.scheduler.max_batched_tokens, progress, done))

            worker.device.stream.submit(work).wait()
        logprobs, choices, gaps = (np.stack(parts)[:, text.scored_from - 1 :] for parts in zip(*columns, strict=True))
        return Scores(logprobs, choices, gaps, worker.model.weight_bytes)
    finally:
        assembly.close()


def _alone(config: Config, context: int) -> Config:
    """An engine for one sequence of ``context`` tokens, without whatever else it keeps."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_model_len=context),
        cache=dataclasses.replace(
            config.cache,
            kv_blocks=-(-context // config.cache.block_size),
            kv_memory=None,
            swap_space=0.0,
            disk_cache=None,
        ),
        scheduler=dataclasses.replace(config.scheduler, max_num_seqs=1, length_profile=None),
    )


@torch.inference_mode()
def _score_chunk(
    worker: Worker, chunk: Ints, step: int, progress: Callable[[int], None], done: int
) -> tuple[NDArray[np.float64], Ints, NDArray[np.float32]]:
    """(log-probabilities, choices, gaps) for the tokens after the first, in steps of at most ``step`` tokens."""
    targets = torch.from_numpy(chunk).long()
    columns = []
    for plan in _plans(chunk, step, worker.cache.block_size):
        hidden, start = worker.hidden_states(plan), int(plan.start[0])
        for at in range(0, len(hidden), _HEAD_ROWS):
            next_token = start + at + 1
            mine = targets[next_token : next_token + min(_HEAD_ROWS, len(hidden) - at)]
            if len(mine):
                logits = worker.model.logits(hidden[at : at + len(mine)].contiguous())
                best = logits.topk(2)
                own_logits = logits.gather(1, mine[:, None])[:, 0]
                logprobs = own_logits.double() - logits.logsumexp(1).double()
                columns.append((logprobs, best.indices[:, 0].int(), best.values[:, 0] - best.values[:, 1]))
        progress(done + start + len(hidden))
    own, choices, gaps = (torch.cat(parts).numpy() for parts in zip(*columns, strict=True))
    return own, choices, gaps


def _plans(chunk: Ints, step: int, block_size: int) -> list[Plan]:
    """One row, seated by the first plan, computed ``step`` tokens at a time."""
    none = np.empty(0, dtype=np.int32)
    seat = Seat(0, chunk, len(chunk), SamplingParams(), 0, (), none)
    plans = []
    for seq, start in enumerate(range(0, len(chunk), step)):
        end = min(start + step, len(chunk))
        held, needed = -(-start // block_size), -(-end // block_size)
        plans.append(
            Plan(
                seq=seq,
                request=np.zeros(1, dtype=np.int64),
                slot=np.zeros(1, dtype=np.int32),
                start=np.array([start], dtype=np.int32),
                count=np.array([end - start], dtype=np.int32),
                samples=np.zeros(1, dtype=np.bool_),
                new_blocks=np.arange(held, needed, dtype=np.int32),
                new_block_count=np.array([needed - held], dtype=np.int32),
                seats=() if start else (seat,),
            )
        )
    return plans
