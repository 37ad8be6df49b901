"""Writes ``tests/data/greedy_answers.json``: 512 token ids per real model, a question and the answer that transformers
decodes greedily from the same GGUF file in float32. Tests score these positions; making them takes minutes.

    python -m tests.support.greedy_answers
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from ropeway.text.tokenizer import Tokenizer
from tests.support.gguf_files import qwen_coder, smollm2

FILE = Path(__file__).parent.parent / "data" / "greedy_answers.json"
POSITIONS = 512
QUESTION = "Write a long and detailed article about the history of mountain railways."


def greedy_answer(path: Path) -> list[int]:
    """The chat's token ids, cut to ``POSITIONS``; end tokens are not chosen."""
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    ids = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=POSITIONS - len(prompt),
        min_new_tokens=POSITIONS - len(prompt),
        do_sample=False,
        repetition_penalty=1.0,
    )
    return ids[0].tolist()


if __name__ == "__main__":
    answers = {name: greedy_answer(find()) for name, find in (("smollm2", smollm2), ("qwen-coder", qwen_coder))}
    FILE.write_text(json.dumps(answers) + "\n")
