"""The real GGUF files, where they have been downloaded, against transformers' own reading of them."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from ropeway.loading.gguf.checkpoint import GGUFCheckpoint
from ropeway.loading.gguf.names import hugging_face_name
from ropeway.loading.gguf.reader import GGUFFile, read_metadata
from ropeway.text.gguf_tokenizer import TokenizerSettings, tokenizer_from_gguf
from tests.support.gguf_files import qwen_coder, smollm2

TEXTS = [
    "The quick brown fox; it's the dog's turn, they'VE said I'LL go.",
    "  leading blanks, trailing ones   ",
    "\n\n\nruns\n \n\t\n\r\n\r\n of newlines\n",
    "def f(x):\n    return x**2  # comment\n\n\nclass A(object):\n\tpass\n",
    "😀👩‍👩‍👧‍👦 🇩🇪 done ✔",
    "日本語のテキスト、中文字符。한국어 नमस्ते عربي",
    "1234567890 3.14159 1,000,000 0x1F",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|fim_prefix|>a<|fim_suffix|>b <tool_call>{}</tool_call>",
    "\x00\x01\x7f x\u00a0y\u3000z",
    "a" * 300,
    "",
]


@pytest.fixture(params=[smollm2, qwen_coder], ids=["smollm2", "qwen-coder"], scope="module")
def model_file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param()
    return path


def test_token_ids_are_those_of_transformers_and_decode_to_the_text(model_file: Path) -> None:
    oracle = transformers.AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    tokenizer, _ = tokenizer_from_gguf(read_metadata(model_file))
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == oracle(text)["input_ids"], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_both_ends_of_chatml_are_known(model_file: Path) -> None:
    metadata = read_metadata(model_file)
    tokenizer, settings = tokenizer_from_gguf(metadata)
    ends = [tokenizer.id_to_token(token) for token in settings.eos_ids]
    assert ends == ["<|im_end|>", "<|endoftext|>"]
    assert GGUFCheckpoint(model_file).generation_config["eos_token_id"] == list(settings.eos_ids)
    assert_templates(settings)


def assert_templates(settings: TokenizerSettings) -> None:
    assert settings.chat_template is not None
    assert "<|im_start|>" in settings.chat_template
    assert settings.named_tokens["eos_token"] == "<|im_end|>"


def test_starting_takes_well_under_a_second_of_cpu(model_file: Path) -> None:
    """Header, metadata, directory and configuration; then the tokenizer."""
    start = time.process_time()
    checkpoint = GGUFCheckpoint(model_file)
    opened = time.process_time()
    tokenizer_from_gguf(checkpoint.metadata)
    assert opened - start < 0.5
    assert time.process_time() - opened < 2.0


def test_all_tensors_of_smollm2_are_those_transformers_reads() -> None:
    path = smollm2()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    expected = model.state_dict()
    checkpoint = GGUFCheckpoint(path)
    assert set(checkpoint.names()) == set(expected) - {"lm_head.weight"}
    assert checkpoint.config["tie_word_embeddings"]
    for name in checkpoint.names():
        assert torch.equal(checkpoint.get(name).dequantize(), expected[name]), name


def test_tensors_of_qwen_coder_have_the_bits_of_the_file() -> None:
    """One of each type and shape but the large ones; its rows are in the model's order already."""
    path = qwen_coder()
    checkpoint, file = GGUFCheckpoint(path), GGUFFile(path)
    samples = {(entry.type, entry.shape): entry for entry in file.tensors.values() if entry.shape[0] < 100_000}
    assert {kind.name for kind, _ in samples} == {"F32", "Q5_0", "Q8_0", "Q6_K", "Q4_K"}
    for entry in samples.values():
        rows = file.raw(entry).reshape(*entry.shape[:-1], -1)
        expected = gguf.quants.dequantize(rows, entry.type)
        found = checkpoint.get(hugging_face_name(entry.name)).dequantize().numpy()
        np.testing.assert_array_equal(found, expected, err_msg=entry.name)
