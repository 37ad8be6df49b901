"""Small tokenizers trained on the spot, and model folders that hold them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = [
    "The line keeps moving while the cabins get on and off at every step.",
    "hello world, this is a small corpus: one two three four five six",
    "Grüße aus München, déjà vu, naïve café; 你好世界 こんにちは 안녕하세요 🚀🧠",
    "def step(self, ahead: int) -> None:\n    if not ahead:\n        return  # two  blanks   here\n",
] * 4
CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_LEVEL_MIN = 256 + len(CHATML_SPECIALS) + 2
"""Fewest ids a byte-level tokenizer with these special tokens can have."""


@cache
def _byte_level_json(vocab_size: int) -> str:
    if vocab_size < BYTE_LEVEL_MIN:
        raise ValueError(f"a byte-level vocabulary needs at least {BYTE_LEVEL_MIN} ids, not {vocab_size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        special_tokens=list(CHATML_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer.to_str()


def byte_level(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen) with ChatML's special tokens (ids 0 to 2) and two ordinary added ones."""
    return tokenizers.Tokenizer.from_str(_byte_level_json(vocab_size))


@cache
def _byte_fallback_json(vocab_size: int) -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 256, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    state = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    shifted = {token: id_ if id_ < 3 else id_ + 256 for token, id_ in vocab.items()}
    state["model"]["vocab"] = {**shifted, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    state["model"]["byte_fallback"] = True
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer.to_str()


def byte_fallback(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """SentencePiece-like BPE as Llama 2's: ``▁`` for blanks, one blank put before a text, byte tokens (ids 3 to 258)
    for what the vocabulary lacks, a BOS token."""
    return tokenizers.Tokenizer.from_str(_byte_fallback_json(vocab_size))


def metaspace(vocab_size: int = 200) -> tokenizers.Tokenizer:
    """BPE with Metaspace for pre-tokenizing and decoding (T5, early Mistral conversions)."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece(vocab_size: int = 200) -> tokenizers.Tokenizer:
    """WordPiece, whose decoder joins words by looking at neighbours."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(folder: Path, vocab_size: int = 400, *, chat_template: str | None = CHATML) -> tokenizers.Tokenizer:
    """Write the byte-level tokenizer of at most ``vocab_size`` ids (at least ``BYTE_LEVEL_MIN``) into a model folder,
    complete: end token ``<|im_end|>`` (id 2), no BOS, a ChatML template. Other files of the folder stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level(vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
        **({"chat_template": chat_template} if chat_template is not None else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=2))
    return tokenizer
