"""Preparing prompts off the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ropeway.errors import ContextLengthExceeded, QueueFull
from ropeway.server.prompts import Prompts
from tests.support.scripted_engine import scripted_tokenizer


async def test_more_than_a_bounded_number_at_once_is_refused_and_room_is_given_back() -> None:
    prompts = Prompts(scripted_tokenizer(), max_model_len=100, most=2)
    release = threading.Event()
    blocked = [asyncio.create_task(prompts.run(release.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await prompts.encode(["Hi"])
    release.set()
    await asyncio.gather(*blocked)
    assert len(await prompts.encode(["Hi"])) == 1
    prompts.close()


async def test_work_runs_on_another_thread() -> None:
    prompts = Prompts(None, max_model_len=100, most=2)
    assert await prompts.run(threading.get_ident) != threading.get_ident()
    prompts.close()


async def test_the_bound_of_characters_never_refuses_what_fits() -> None:
    tokenizer = scripted_tokenizer()
    longest = max((tokenizer.token_text(token) for token in range(3, tokenizer.vocab_size)), key=len)
    prompts = Prompts(tokenizer, max_model_len=8, most=2)
    (ids,) = await prompts.encode([longest * 8])
    assert len(ids) == 8
    with pytest.raises(ContextLengthExceeded, match="8 tokens"):
        await prompts.encode(["x" * 10_000])
    prompts.close()
