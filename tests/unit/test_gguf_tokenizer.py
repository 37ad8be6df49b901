"""Tokenizers built from GGUF metadata, against the tokenizers the metadata was taken from."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from ropeway.errors import LoadError, Unsupported
from ropeway.loading.gguf.metadata import Metadata
from ropeway.loading.gguf.reader import read_metadata
from ropeway.loading.gguf.vocabulary import TokenKind
from ropeway.text.gguf_tokenizer import SPLIT_RULES, tokenizer_from_gguf
from tests.support.gguf_files import finish, write_tokenizer
from tests.support.tokenizers import CHATML, byte_fallback, byte_level

TEXTS = [
    "Hello world, it's the line's turn; they'VE moved",
    "  leading blanks and   inner   runs  ",
    "\n\n\nnewlines\n \n\t\n\r\n\r\n x",
    "def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass\n",
    "😀👩‍👩‍👧‍👦 🇩🇪 你好世界 こんにちは 안녕하세요",
    "1234567890 3.14159 1,000,000 ½ ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}</tool_call><|endoftext|>",
    "\x00\x01\x7f\u00a0\u3000",
    "",
    " ",
]


def file_metadata(path: Path, **options: Any) -> Metadata:
    """What a converter writes for the small byte-level tokenizer, read back."""
    writer = gguf.GGUFWriter(path, "llama")
    write_tokenizer(writer, byte_level(), **options)
    finish(writer)
    return read_metadata(path)


def byte_level_metadata(**changes: Any) -> Metadata:
    """The same, without a file; a change to None takes a field away."""
    original = byte_level()
    state = json.loads(original.to_str())
    pieces = [original.id_to_token(index) for index in range(original.get_vocab_size())]
    kinds = np.full(len(pieces), TokenKind.NORMAL)
    for token in state["added_tokens"]:
        kinds[token["id"]] = TokenKind.CONTROL if token["special"] else TokenKind.USER_DEFINED
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": pieces,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "eos_token_id": 2,
        **changes,
    }
    return Metadata({f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}, Path("m"))


def sentencepiece_metadata(**changes: Any) -> Metadata:
    """The small SentencePiece-like tokenizer: the score of a piece is minus the place of its merge."""
    state = json.loads(byte_fallback().to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    pieces = sorted(vocab, key=vocab.__getitem__)
    places = {left + right: place for place, (left, right) in reversed(list(enumerate(state["model"]["merges"])))}
    kinds = np.full(len(pieces), TokenKind.NORMAL)
    kinds[0], kinds[1:3], kinds[3:259] = TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.BYTE
    fields = {
        "model": "llama",
        "tokens": pieces,
        "token_type": kinds,
        "scores": np.array([-float(places.get(piece, 10_000)) for piece in pieces], np.float32),
        **changes,
    }
    return Metadata({f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}, Path("m"))


# --------------------------------------------------------------------------- byte-level


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_tokenizer_comes_back_from_its_file(text: str, tmp_path: Path) -> None:
    original = byte_level()
    tokenizer, _ = tokenizer_from_gguf(file_metadata(tmp_path / "m.gguf"))
    ids = tokenizer.encode(text).ids
    assert ids == original.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@cache
def byte_level_tokenizer() -> tokenizers.Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata())[0]


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def words(pre: str, text: str) -> list[str]:
    """How a rule cuts a text, with the bytes spelled as characters again."""
    tokenizer, _ = tokenizer_from_gguf(byte_level_metadata(pre=pre))
    decoder = tokenizers.decoders.ByteLevel()
    return [decoder.decode([word]) for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["it", "'s", " 12345", "\n\n ", " x", "'", "LL"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "5", "\n\n ", " x", "'", "LL"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "5", "\n\n", " ", " x", "'LL"]),
        ("llama-bpe", ["it", "'s", " ", "123", "45", "\n\n", " ", " x", "'LL"]),
    ],
)
def test_text_is_cut_by_the_rule_the_file_names(pre: str, expected: list[str]) -> None:
    found = words(pre, "it's 12345\n\n  x'LL")
    assert found == expected


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [("qwen2", PRETOKENIZE_REGEX), ("llama-bpe", TikTokenConverter(vocab_file="").pattern)],
)
@pytest.mark.parametrize("text", TEXTS)
def test_the_rules_cut_like_the_models_own_tokenizers(pre: str, pattern: str, text: str) -> None:
    own = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    assert "".join(words(pre, text)) == text
    assert words(pre, text) == [word for word, _ in own.pre_tokenize_str(text)]


def test_qwen_composes_characters_first() -> None:
    tokenizer, _ = tokenizer_from_gguf(byte_level_metadata(pre="qwen2"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_llama3_takes_a_word_that_is_a_token_without_merging() -> None:
    metadata = byte_level_metadata()
    pieces = [*metadata["tokenizer.ggml.tokens"], "zqz"]
    changes = {"tokens": pieces, "token_type": np.append(metadata["tokenizer.ggml.token_type"], TokenKind.NORMAL)}
    whole, _ = tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe", **changes))
    merged, _ = tokenizer_from_gguf(byte_level_metadata(pre="gpt-2", **changes))
    assert whole.encode("zqz").ids == [len(pieces) - 1]
    assert len(merged.encode("zqz").ids) == 3


# --------------------------------------------------------------------------- SentencePiece


@cache
def scored_tokenizer() -> tuple[tokenizers.Tokenizer, dict[str, float]]:
    metadata = sentencepiece_metadata()
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"].tolist(), strict=True))
    return tokenizer_from_gguf(metadata)[0], scores


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its paper tells it: join the neighbours with the best score, leftmost first."""
    pieces = list(text)
    while True:
        joined = [(scores.get(a + b, -np.inf), -place) for place, (a, b) in enumerate(itertools.pairwise(pieces))]
        if not joined or max(joined)[0] == -np.inf:
            return pieces
        place = -max(joined)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="the linecabsdo ", min_size=1, max_size=40))
def test_pieces_are_merged_in_the_order_of_their_scores(text: str) -> None:
    tokenizer, scores = scored_tokenizer()
    found = tokenizer.encode(text, add_special_tokens=False).tokens
    assert found == merge_by_score("▁" + text.replace(" ", "▁"), scores)


@pytest.mark.parametrize("text", [text for text in TEXTS if "<" not in text])
def test_a_sentencepiece_tokenizer_decodes_to_the_same_text(text: str) -> None:
    tokenizer, settings = tokenizer_from_gguf(sentencepiece_metadata())
    ids = tokenizer.encode(text).ids
    assert settings.bos_id == 1
    assert ids[0] == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[1:]) == byte_fallback().decode(ids[1:])


def test_characters_the_vocabulary_lacks_become_their_bytes() -> None:
    tokenizer, _ = tokenizer_from_gguf(sentencepiece_metadata())
    assert tokenizer.encode("🚠", add_special_tokens=False).tokens[1:] == ["<0xF0>", "<0x9F>", "<0x9A>", "<0xA0>"]


def test_no_blank_is_put_before_a_text_when_the_file_says_so() -> None:
    tokenizer, _ = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
    ids = tokenizer.encode("the line", add_special_tokens=False).ids
    assert not tokenizer.id_to_token(ids[0]).startswith("▁")
    assert tokenizer.decode(ids) == "the line"
    assert tokenizer.decode(tokenizer.encode(" a", add_special_tokens=False).ids) == " a"


# --------------------------------------------------------------------------- special tokens and settings


def test_control_tokens_are_found_in_text_and_hidden_when_decoding_user_defined_ones_shown() -> None:
    tokenizer, settings = tokenizer_from_gguf(byte_level_metadata())
    ids = tokenizer.encode("<|im_start|>a<tool_call>b</tool_call><|im_end|>").ids
    assert ids[0] == 1
    assert ids[-1] == 2
    assert settings.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool_call>b</tool_call>"


@pytest.mark.report("ggml-org/llama.cpp#6903")
@pytest.mark.report("ggml-org/llama.cpp#6772")
def test_an_end_token_the_file_calls_ordinary_still_ends_and_is_hidden() -> None:
    metadata = byte_level_metadata(eos_token_id=0)
    metadata["tokenizer.ggml.token_type"][2] = TokenKind.NORMAL
    tokenizer, settings = tokenizer_from_gguf(metadata)
    assert settings.eos_ids == (0, 2)
    assert 2 in settings.special_ids
    assert tokenizer.encode("a<|im_end|>").ids[-1] == 2
    assert tokenizer.decode([*tokenizer.encode("a").ids, 2], skip_special_tokens=True) == "a"


def test_without_any_end_token_there_is_none() -> None:
    metadata = byte_level_metadata(eos_token_id=None)
    pieces = metadata["tokenizer.ggml.tokens"]
    pieces[0], pieces[2] = "<|zero|>", "<|two|>"
    assert tokenizer_from_gguf(metadata)[1].eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({"pre": "gpt-2", "bos_token_id": 1}, [], []),
        ({"pre": "llama-bpe", "bos_token_id": 1}, [1], []),
        ({"pre": "llama-bpe", "bos_token_id": 1, "add_bos_token": False}, [], []),
        ({"pre": "llama-bpe"}, [], []),
        ({"add_bos_token": True, "add_eos_token": True, "bos_token_id": 1}, [1], [2]),
    ],
    ids=["gpt-2", "llama-3", "switched-off", "no-bos", "both"],
)
def test_what_is_put_around_a_text_follows_the_file_and_else_the_kind_of_vocabulary(
    changes: dict[str, Any], first: list[int], last: list[int]
) -> None:
    tokenizer, settings = tokenizer_from_gguf(byte_level_metadata(**changes))
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello").ids == first + plain + last
    assert (settings.add_bos, settings.add_eos) == (bool(first), bool(last))


def test_chat_templates_come_by_name(tmp_path: Path) -> None:
    one = file_metadata(tmp_path / "one.gguf", chat_template=CHATML)
    several = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "tools"}]
    many = file_metadata(tmp_path / "many.gguf", chat_template=several)
    assert tokenizer_from_gguf(one)[1].chat_templates == {"default": CHATML}
    assert tokenizer_from_gguf(many)[1].chat_templates == {"default": CHATML, "tool_use": "tools"}
    assert tokenizer_from_gguf(many)[1].chat_template == CHATML
    assert tokenizer_from_gguf(byte_level_metadata())[1].chat_template is None


def test_templates_see_the_named_tokens() -> None:
    _, settings = tokenizer_from_gguf(byte_level_metadata(bos_token_id=1, padding_token_id=0))
    assert settings.named_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "tekken"}, Unsupported, "pre-tokenizer 'tekken' is not supported; supported: default, gpt-2, smollm"),
        ({"model": "bert"}, Unsupported, "tokenizer 'bert' is not supported; supported: gpt2, llama"),
        ({"model": "no_vocab"}, Unsupported, "holds no tokenizer; send token ids"),
        ({"tokens": None, "token_type": None, "eos_token_id": None}, Unsupported, "holds no tokenizer"),
        ({"merges": ["ab"]}, LoadError, "merge 'ab' has no two parts"),
        ({"merges": ["no such"]}, LoadError, "merges do not fit the vocabulary"),
        ({"merges": 4}, LoadError, "'tokenizer.ggml.merges' must be an array of texts, not 4"),
        ({"token_type": np.ones(3)}, LoadError, r"3 values in 'tokenizer\.ggml\.token_type' for \d+ tokens"),
        ({"bos_token_id": 100_000}, LoadError, "bos_token_id' is 100000"),
    ],
    ids=["pre", "model", "no-vocab", "no-tokens", "merge", "merge-unknown", "merges-type", "kinds", "id"],
)
def test_what_cannot_be_built_is_refused_by_name(changes: dict[str, Any], error: type[LoadError], message: str) -> None:
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(byte_level_metadata(**changes))


def test_scores_must_fit_the_vocabulary() -> None:
    for scores, found in ((None, "no"), (np.zeros(3, np.float32), "3")):
        with pytest.raises(LoadError, match=rf"{found} values in 'tokenizer\.ggml\.scores'"):
            tokenizer_from_gguf(sentencepiece_metadata(scores=scores))


def test_every_rule_builds_a_tokenizer() -> None:
    for pre in (None, *SPLIT_RULES):
        tokenizer, _ = tokenizer_from_gguf(byte_level_metadata(pre=pre))
        assert tokenizer.decode(tokenizer.encode("a b  c\n1").ids) == "a b  c\n1"


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    file_metadata(tmp_path / "m.gguf")
    script = (
        "import sys; from pathlib import Path\n"
        "from ropeway.loading.gguf.reader import read_metadata\n"
        "from ropeway.text.gguf_tokenizer import tokenizer_from_gguf\n"
        f"tokenizer_from_gguf(read_metadata(Path({str(tmp_path / 'm.gguf')!r})))\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
