"""A tiny random Llama with a tokenizer and a chat template: everything a server needs, in a second."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers

from tests.support.tokenizers import write_tokenizer

VOCAB = 400
CONTEXT = 2048


@functools.cache
def tiny_chat_model(vocab: int = VOCAB) -> Path:
    """The model's folder; made once per process. ``vocab``: size of the model's head, of which the tokenizer fills
    the first ``VOCAB`` ids."""
    folder = Path(tempfile.mkdtemp(prefix="ropeway-chat-")) / "tiny-chat"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5 * 1.5)
        model.lm_head.weight[:3] *= 0.2  # control tokens are rare, as in a trained model
    model.save_pretrained(folder)
    # Greedy decoding by transformers' defaults: no sampling settings that would become the server's.
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [2]}))
    write_tokenizer(folder, vocab_size=VOCAB)
    return folder
