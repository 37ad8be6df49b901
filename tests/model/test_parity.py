"""Models against Hugging Face transformers in float32, on every device."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from ropeway.loading.open import open_checkpoint
from ropeway.models.model import Model
from ropeway.models.registry import load_model
from ropeway.parallel.communicator import SingleProcess
from tests.support.devices import DEVICES, device
from tests.support.stepper import Stepper
from tests.support.tiny_models import SMALL, VARIANTS, tiny_checkpoint, tiny_oracle

TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit."""

IDS = random.Random(7).choices(range(3, SMALL["vocab_size"]), k=100)


@functools.cache
def tiny(variant: str, device_name: str) -> Model:
    return load_model(open_checkpoint(tiny_checkpoint(variant)), device(device_name), SingleProcess())


@functools.cache
@torch.inference_mode()
def oracle_logits(variant: str, ids: tuple[int, ...]) -> torch.Tensor:
    return tiny_oracle(variant)(torch.tensor([ids])).logits[0]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, device_name: str) -> None:
    stepper = Stepper(tiny(variant, device_name), device(device_name))
    assert error(stepper.prefill(IDS), oracle_logits(variant, tuple(IDS))) < TOLERANCE


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [7, 33])
def test_a_prompt_computed_in_chunks_has_the_logits_of_transformers(variant: str, chunk: int, device_name: str) -> None:
    stepper = Stepper(tiny(variant, device_name), device(device_name), block_size=8, seed=chunk)
    assert error(stepper.prefill(IDS, chunk=chunk), oracle_logits(variant, tuple(IDS))) < TOLERANCE


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_those_of_transformers(variant: str, device_name: str) -> None:
    prompt = IDS[:23]
    oracle = tiny_oracle(variant)
    greedy = oracle.generate(torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False)
    want = greedy[0, len(prompt) :].tolist()
    banned = SMALL["eos_token_id"]  # transformers bans it up to min_new_tokens
    stepper = Stepper(tiny(variant, device_name), device(device_name))
    assert stepper.generate(prompt, 40, chunk=10, banned=banned) == want


@pytest.mark.report("vllm-project/vllm#27034")
@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("variant", ["llama", "qwen2-sliding", "qwen3"])
def test_sequences_of_one_batch_do_not_see_each_other(variant: str, device_name: str) -> None:
    model, dev = tiny(variant, device_name), device(device_name)
    texts = [IDS[at : at + 20 + 3 * at] for at in range(6)]
    together = Stepper(model, dev, sequences=6, block_size=4)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    for chunk in (9, 1, 30):  # the rows drift apart, and some have nothing left to compute
        rows = [(i, text[together.computed[i] :][:chunk]) for i, text in enumerate(texts)]
        rows = [(i, ids) for i, ids in reversed(rows) if ids]
        logits = together.step(rows).split([len(ids) for _, ids in rows])
        for (i, _), part in zip(rows, logits, strict=True):
            parts[i].append(part)
    for text, part in zip(texts, parts, strict=True):
        got = torch.cat(part)
        assert torch.equal(got, Stepper(model, dev).prefill(text)[: len(got)])


@pytest.mark.parametrize("device_name", DEVICES)
def test_the_model_computes_up_to_its_last_position(device_name: str) -> None:
    variant = "qwen3-yarn"
    model = tiny(variant, device_name)
    ids = (IDS * 2)[: model.spec.context_length]
    logits = Stepper(model, device(device_name)).prefill(ids, chunk=50)
    assert error(logits, oracle_logits(variant, tuple(ids))) < TOLERANCE
