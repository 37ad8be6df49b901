"""Tensor names: GGUF's (``blk.3.attn_q.weight``) and Hugging Face's (``model.layers.3.self_attn.q_proj.weight``)."""

from __future__ import annotations

import re

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; part of the configuration, not of the model's tensors."""

MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def hugging_face_name(name: str) -> str:
    """The name above this floor. A name that is not known stays as it is, for the model to refuse."""
    match = NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{MODEL_NAMES[part]}.{kind}" if part in MODEL_NAMES else name
    return f"model.layers.{int(layer)}.{LAYER_NAMES[part]}.{kind}" if part in LAYER_NAMES else name


def rotary_heads(name: str) -> str | None:
    """ "query" or "key" when the rows of this (GGUF) tensor are features that the rotary embedding turns."""
    match = NAME.fullmatch(name)
    return {"attn_q": "query", "attn_k": "key"}.get(match["part"]) if match and match["layer"] else None
