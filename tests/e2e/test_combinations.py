"""Every two options that may be used together are, in one engine or another, and no answer changes by a bit."""

from __future__ import annotations

import functools
import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ropeway import SamplingParams
from ropeway.compatibility import (
    HOSTS,
    KV_INT4,
    KV_INT4_FULL,
    KV_INT8,
    OPTIONS,
    RANKS,
    WEIGHTS_INT4,
    WEIGHTS_INT8,
    Option,
    conflict_of,
)
from tests.support.llms import idle, tiny_llm
from tests.support.other_host import other_host, three_ports

NUMBERS = (KV_INT8, KV_INT4, KV_INT4_FULL, WEIGHTS_INT8, WEIGHTS_INT4, RANKS)
"""Options that change numbers; all others must not."""
PREFIX = list(range(10, 74))
PROMPTS = [[*PREFIX, 80 + i, *range(5 + i, 5 + 9 * i)] for i in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
SCORED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=7, n=2, max_tokens=12, ignore_eos=True)


def engines() -> list[tuple[Option, ...]]:
    """Sets of options that work together, so that every pair that does is in one of them."""
    options = OPTIONS
    missing = {pair for pair in itertools.combinations(options, 2) if conflict_of(*pair) is None}
    found = []
    while missing:
        chosen: list[Option] = list(next(pair for pair in itertools.combinations(options, 2) if pair in missing))
        for option in sorted(options, key=lambda one: -sum(one in pair for pair in missing)):
            if option not in chosen and all(conflict_of(option, other) is None for other in chosen):
                chosen.append(option)
        together = tuple(option for option in options if option in chosen)
        missing -= set(itertools.combinations(together, 2))
        found.append(together)
    return found


ENGINES = engines()


def answers(folder: Path, options: tuple[Option, ...]) -> list[Any]:
    fields = {name: value for option in options for name, value in option.example.items()}
    fields = {name: str(folder) if value == "FOLDER" else value for name, value in fields.items()}
    # Seats and blocks for three or four: requests wait, and give way.
    blocks = 640 // fields.get("block_size", 16)
    fields = {"max_num_seqs": 6, "kv_blocks": blocks, "shed": False, "admission": "greedy", **fields}
    with ExitStack() as stack:
        if HOSTS in options:
            fields["master_port"] = three_ports()
            stack.enter_context(other_host(fields))
        llm = stack.enter_context(tiny_llm(**fields))
        outputs = [*llm.generate(PROMPTS, GREEDY, progress=False), *llm.generate(PROMPTS, DRAWN, progress=False)]
        scored = llm.generate(PROMPTS[:3], SCORED, progress=False)
        assert idle(llm)
    told = [(each.token_ids, each.logprobs) for output in outputs for each in output.outputs]
    return [*told, *(output.prompt_logprobs for output in scored)]


@functools.cache
def plain(options: tuple[Option, ...]) -> list[Any]:
    return answers(Path(), options)


@pytest.mark.parametrize("options", ENGINES, ids=lambda options: ", ".join(option.label for option in options))
def test_options_that_work_together_change_no_answer(options: tuple[Option, ...], tmp_path: Path) -> None:
    numbers = tuple(option for option in options if option in NUMBERS)
    # What needs ranks brings them.
    if RANKS not in numbers and any("tensor_parallel_size" in option.example for option in options):
        numbers = (*numbers, RANKS)
    assert answers(tmp_path, options) == plain(numbers)


def test_every_pair_is_covered() -> None:
    covered = {pair for options in ENGINES for pair in itertools.combinations(options, 2)}
    for pair in itertools.combinations(OPTIONS, 2):
        assert (pair in covered) == (conflict_of(*pair) is None)
