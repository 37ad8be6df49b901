"""Perplexity on the engine's own path: that of transformers, the same in all chunkings, and what a setting costs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from ropeway.bench.docstrings import standard_library_docstrings
from ropeway.bench.perplexity import Scores, Text, compare, measure_perplexity, read_text, score
from ropeway.cli.bench import app
from ropeway.config import Config
from ropeway.errors import ConfigError, LoadError
from ropeway.settings import resolve
from ropeway.text.tokenizer import Tokenizer
from tests.support.chat_model import tiny_chat_model
from tests.support.tiny_models import SMALL, tiny_checkpoint, tiny_oracle
from tests.support.tokenizers import byte_fallback

CONTEXT = 40
CHUNKS = np.random.default_rng(0).integers(3, SMALL["vocab_size"], (3, CONTEXT)).astype(np.int32)
TEXT = Text(CHUNKS, 1)


def tiny_config(**fields: Any) -> Config:
    defaults = {"model": str(tiny_checkpoint("llama")), "device": "reference", "max_batched_tokens": 16}
    return resolve({**defaults, **fields}, environ={}, given_as="argument").config


def scores(logprobs: list[list[float]], choices: list[list[int]], gaps: list[list[float]]) -> Scores:
    return Scores(np.array(logprobs), np.array(choices, dtype=np.int32), np.array(gaps, dtype=np.float32), 8)


# --------------------------------------------------------------------------- the figures


def test_log_probabilities_are_those_of_transformers() -> None:
    with torch.inference_mode():
        logits = tiny_oracle("llama")(torch.from_numpy(CHUNKS).long()).logits[:, :-1].double()
    want = logits.log_softmax(-1).gather(-1, torch.from_numpy(CHUNKS[:, 1:, None]).long())[..., 0]
    got = score(tiny_config(), TEXT, lambda done: None)
    np.testing.assert_allclose(got.logprobs, want.numpy(), atol=2e-4)
    best = logits.topk(2)
    np.testing.assert_array_equal(got.choices, best.indices[..., 0].numpy())
    np.testing.assert_allclose(got.gaps, (best.values[..., 0] - best.values[..., 1]).numpy(), atol=1e-3)
    assert got.perplexity == pytest.approx(math.exp(-want.mean()), rel=1e-4)


@pytest.mark.parametrize("fields", [{"max_batched_tokens": 64}, {"max_batched_tokens": 7}, {"block_size": 4}])
def test_chunks_and_blocks_change_no_bit(fields: dict[str, Any]) -> None:
    want = score(tiny_config(), TEXT, lambda done: None)
    got = score(tiny_config(max_num_seqs=1, **fields), TEXT, lambda done: None)
    np.testing.assert_array_equal(got.logprobs, want.logprobs)


def test_every_position_is_counted_once_by_progress() -> None:
    seen: list[tuple[int, int]] = []
    baseline = tiny_config(kv_dtype="bf16")
    measure_perplexity(tiny_config(), baseline, TEXT, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (2 * CHUNKS.size, 2 * CHUNKS.size)


def test_a_configuration_costs_nothing_beside_itself_and_is_computed_once() -> None:
    seen: list[tuple[int, int]] = []
    cost, chunks = measure_perplexity(tiny_config(), tiny_config(), TEXT, progress=lambda *counts: seen.append(counts))
    assert (cost.change_percent, cost.change_error_percent, cost.other_choices, cost.largest_gap) == (0, 0, 0, 0)
    assert seen[-1] == (CHUNKS.size, CHUNKS.size)
    assert cost.scored_tokens == TEXT.scored == 3 * (CONTEXT - 1)
    assert len(chunks) == cost.chunks == 3


def test_coarser_weights_change_more_and_take_less() -> None:
    fine, *coarse = (tiny_config(device="cpu", weights=weights) for weights in ("auto", "bf16", "int8", "int4"))
    baseline = score(fine, TEXT, lambda done: None)
    others = [score(config, TEXT, lambda done: None) for config in coarse]
    sizes = [scored.weight_bytes for scored in (baseline, *others)]
    assert sizes == sorted(sizes, reverse=True)
    bf16, int8, int4 = (float(np.abs(other.logprobs - baseline.logprobs).mean()) for other in others)
    assert 0 < bf16 < int4
    assert 0 < int8 < int4


def test_a_comparison_counts_other_choices_and_their_largest_gap() -> None:
    before = scores([[-1.0, -2.0], [-1.0, -1.0]], [[1, 2], [3, 4]], [[0.5, 3.0], [0.25, 9.0]])
    after = scores([[-1.0, -2.2], [-1.0, -1.0]], [[1, 7], [8, 4]], [[0.0, 0.0], [0.0, 0.0]])
    cost = compare(before, after)
    assert cost.baseline_perplexity == pytest.approx(math.exp(1.25))
    assert cost.perplexity == pytest.approx(math.exp(1.3))
    assert cost.change_percent == pytest.approx(100 * math.expm1(0.05))
    assert (cost.other_choices, cost.largest_gap) == (2, 3.0)
    assert cost.lowest_chunk_change_percent == 0
    assert cost.highest_chunk_change_percent == pytest.approx(100 * math.expm1(0.1))
    assert cost.change_error_percent > 0


def test_a_context_beyond_the_models_is_refused_with_the_limit() -> None:
    text = Text(np.full((1, 300), 5, dtype=np.int32), 1)
    with pytest.raises(ConfigError, match=r"context is 300, which is too long: .* allows 1 to 256"):
        score(tiny_config(), text, lambda done: None)


# --------------------------------------------------------------------------- the text


def chat_config() -> Config:
    return resolve({"model": str(tiny_chat_model())}, environ={}, given_as="argument").config


def test_the_docstrings_are_long_prose_and_the_same_every_time() -> None:
    text = standard_library_docstrings()
    assert len(text) > 200_000
    assert text == standard_library_docstrings()
    assert text.startswith("Command-line parsing library")


def test_a_text_is_cut_into_whole_chunks_of_the_tokens_asked_for() -> None:
    config, text = chat_config(), "the quick brown fox " * 200
    cut = read_text(config, text, tokens=105, context=20)
    assert cut.chunks.shape == (5, 20)
    assert cut.scored == 5 * 19
    assert cut.chunks.flatten().tolist() == Tokenizer.from_path(config.model.model).encode(text)[:100]


def test_every_chunk_begins_as_the_model_wants_a_text_to_begin(tmp_path: Path) -> None:
    backend = byte_fallback()
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    config = resolve({"model": str(tmp_path)}, environ={}, given_as="argument").config
    cut = read_text(config, "the line keeps moving " * 50, tokens=60, context=21)
    bos = backend.encode("the").ids[0]
    assert cut.chunks.shape == (3, 21)
    assert set(cut.chunks[:, 0].tolist()) == {bos}
    assert bos not in cut.chunks[:, 1:]
    assert cut.scored == 60


@pytest.mark.parametrize(("tokens", "context"), [(5000, 20), (None, 1000), (10, 20)])
def test_a_text_that_is_too_short_is_an_error_that_says_how_long_it_is(tokens: int | None, context: int) -> None:
    with pytest.raises(ConfigError, match=r"the text has \d+ tokens.* chunks of \d+; give a longer text"):
        read_text(chat_config(), "the quick brown fox " * 10, tokens=tokens, context=context)


def test_a_context_without_anything_to_predict_is_refused() -> None:
    with pytest.raises(ConfigError, match="context is 1; it must be at least 2"):
        read_text(chat_config(), "text", context=1)


def test_a_model_without_a_tokenizer_cannot_read_a_text() -> None:
    with pytest.raises(LoadError, match="no tokenizer"):
        read_text(tiny_config(), "text")


# --------------------------------------------------------------------------- the command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["perplexity", str(tiny_chat_model()), *map(str, arguments)])


SMALL_RUN = ("--device", "reference", "--tokens", 150, "--context", 50)


def test_the_command_writes_every_promised_figure(tmp_path: Path) -> None:
    result = run(*SMALL_RUN, "--kv-dtype", "bf16", "--json", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "p.json").read_text())
    assert report.keys() >= {"baseline_perplexity", "perplexity", "change_percent", "largest_gap", "text_sha256"}
    assert len(report["by_chunk"]) == report["chunks"] == 3
    assert report["settings"]["kv_dtype"] == "bf16"
    assert report["baseline_settings"]["kv_dtype"] == "fp32"
    assert "change_percent" in result.output


def test_a_text_of_ones_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("hello world, " * 100)
    result = run(*SMALL_RUN, "--text", tmp_path / "t.txt", "--json", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "p.json").read_text())["text"] == str(tmp_path / "t.txt")


def test_a_text_that_is_missing_or_not_utf8_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"caf\xe9")
    for name, problem in (("none.txt", "cannot be read"), ("t.txt", "is not UTF-8 at byte 3")):
        result = run(*SMALL_RUN, "--text", tmp_path / name)
        assert result.exit_code == 1
        assert problem in result.output.replace("\n", " ")


def test_an_unknown_word_for_the_baseline_names_the_known_ones() -> None:
    result = run(*SMALL_RUN, "--baseline-weights", "int3")
    assert result.exit_code == 1
    assert "auto, bf16, int8, int4" in result.output.replace("\n", " ")


def test_only_settings_that_change_the_figures_are_flags() -> None:
    assert run(*SMALL_RUN, "--kv-blocks", 8).exit_code == 2
