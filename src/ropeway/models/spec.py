"""What a decoder-only model looks like, read once from its ``config.json`` and checked there."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ropeway.errors import LoadError, Unsupported

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]
MAX_LAYERS = 10_000
MAX_WHOLE = 2**53
"""Largest size, exact in floating point too."""
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: how fast each feature pair turns. Fields mean what they mean in
    Hugging Face's ``rope_parameters``; those of other kinds keep their defaults."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context: int = 0
    """llama3, yarn: positions of the pretraining."""
    low_freq_factor: float = 1.0
    """llama3: longer wavelengths than ``original_context / low_freq_factor`` are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: shorter ones than ``original_context / high_freq_factor`` not at all."""
    beta_fast: float = 32.0
    """yarn: feature pairs with more turns over the original context are not stretched."""
    beta_slow: float = 1.0
    """yarn: those with fewer are stretched in full."""
    truncate: bool = True
    """yarn: round the two bounds outwards to whole features."""
    attention_factor: float = 1.0
    """yarn: multiplies cos and sin."""
    factors: tuple[float, ...] = ()
    """factors: what each feature pair's frequency is divided by, as GGUF files state it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape and constants of a decoder-only transformer."""

    architecture: str
    """As ``architectures`` names it, e.g. ``LlamaForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    context_length: int
    """Most positions the model was made for; see ``read_context_length``."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the config asks for biases in the attention; some families have them regardless."""
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """Per layer: positions a token sees, itself included; None is all."""
    eos_ids: tuple[int, ...]
    """Every token that ends a text, by config and generation config together."""

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, *, architecture: str
    ) -> DecoderSpec:
        """Read ``config`` in the words of Hugging Face's ``config.json``, from version 4 or 5.

        Raises ``LoadError`` for a missing field or a bad value and ``Unsupported`` for a setting this
        version does not implement; both name the field.
        """
        fields = Fields(config)
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise Unsupported(f"config.json: hidden_act is {activation!r}; only 'silu' is supported")
        num_heads = fields.whole("num_attention_heads")
        hidden_size = fields.whole("hidden_size")
        num_layers = fields.whole("num_hidden_layers", most=MAX_LAYERS)
        spec = cls(
            architecture=architecture,
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.whole("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.whole("num_key_value_heads", default=num_heads),
            head_dim=fields.whole("head_dim", default=_default_head_dim(architecture, hidden_size, num_heads)),
            rms_norm_eps=fields.real("rms_norm_eps", default=1e-6, above=0.0),
            rope=read_rope(fields),
            context_length=read_context_length(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            windows=read_windows(fields, num_layers),
            eos_ids=read_eos_ids(config, generation_config or {}),
        )
        spec._check()
        return spec

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise LoadError(
                f"config.json: num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise LoadError(f"config.json: head_dim is {self.head_dim}; rotary embeddings need an even one")
        if self.rope.kind == "factors" and len(self.rope.factors) != self.head_dim // 2:
            raise LoadError(
                f"config.json: rope factors number {len(self.rope.factors)}; a head_dim of {self.head_dim} needs "
                f"{self.head_dim // 2}"
            )
        worst = max(self.eos_ids, default=0)
        if worst >= self.vocab_size:
            raise LoadError(f"eos_token_id {worst} is outside the vocabulary of {self.vocab_size} (vocab_size)")


def _default_head_dim(architecture: str, hidden_size: int, num_heads: int) -> int:
    """Without ``head_dim``: 128 for Qwen3, as its configuration class has it, else an even share."""
    return 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads


class Fields:
    """A JSON object read field by field; every error names file and field."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self._where = where
        """Prefix of the names of a nested object's fields."""

    def name(self, field: str) -> str:
        return f"config.json: {self._where}{field}"

    def whole(self, field: str, *, default: int | None = None, most: int = MAX_WHOLE) -> int:
        """A whole number from 1 to ``most``. Null counts as absent."""
        value = self._get(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.name(field)} is {value!r}; it must be a whole number of at least 1")
        if value > most:
            raise LoadError(f"{self.name(field)} is {value}; it must be at most {most}")
        return value

    def real(self, field: str, *, default: float | None = None, above: float = -math.inf) -> float:
        """A finite number above a bound. Null counts as absent."""
        return self._number(field, self._get(field, default), above)

    def reals(self, field: str, *, above: float = -math.inf) -> tuple[float, ...]:
        """A list of finite numbers above a bound."""
        values = self._get(field, None)
        if not isinstance(values, list):
            raise LoadError(f"{self.name(field)} is {values!r}; it must be a list of numbers")
        return tuple(self._number(field, value, above) for value in values)

    def _number(self, field: str, value: Any, above: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise LoadError(f"{self.name(field)} is {value!r}; it must be a number")
        if value <= above:
            raise LoadError(f"{self.name(field)} is {value!r}; it must be above {above:g}")
        return float(value)

    def flag(self, field: str, *, default: bool = False) -> bool:
        """True or false. Null counts as absent."""
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise LoadError(f"{self.name(field)} is {value!r}; it must be true or false")
        return value

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def _get(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise LoadError(f"{self.name(field)} is missing")
        return value


# --------------------------------------------------------------------------- rotary embeddings


def rope_fields(fields: Fields) -> Fields:
    """The object that describes the scaling: ``rope_scaling`` of older configs, else ``rope_parameters``."""
    for field in ("rope_scaling", "rope_parameters"):
        value = fields.values.get(field)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise LoadError(f"{fields.name(field)} must be an object or null, not {value!r}")
        if any(isinstance(inner, Mapping) for inner in value.values()):
            raise Unsupported(f"{fields.name(field)} differs between kinds of layers; one setting for all is supported")
        if value:
            return Fields(value, f"{field}.")
    return Fields({}, "rope_parameters.")


def rope_kind(scaling: Fields) -> RopeKind:
    """``rope_type``, or ``type`` as it was first called."""
    field = "rope_type" if scaling.has("rope_type") else "type"
    value = scaling.values.get(field)
    if value is None:
        if scaling.has("factor"):
            raise LoadError(f"{scaling.name('rope_type')} is missing, but there is a factor; name one of {ROPE_KINDS}")
        return "default"
    for kind in ROPE_KINDS:
        if value == kind:
            return kind
    raise Unsupported(f"{scaling.name(field)} is {value!r}; supported are {', '.join(ROPE_KINDS)}")


def read_rope(fields: Fields) -> RopeSpec:
    """The rotary embedding a config describes, whichever spelling it uses."""
    scaling = rope_fields(fields)
    kind = rope_kind(scaling)
    theta_fields = scaling if scaling.has("rope_theta") else fields
    theta = theta_fields.real("rope_theta", default=10_000.0, above=1.0)
    for place in (scaling, fields):
        if place.real("partial_rotary_factor", default=1.0) != 1.0:
            raise Unsupported(f"{place.name('partial_rotary_factor')}: heads that are rotated in part")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "factors":
        return RopeSpec(kind=kind, theta=theta, factors=scaling.reals("factors", above=0.0))
    factor = scaling.real("factor")
    if factor < 1:
        raise LoadError(f"{scaling.name('factor')} is {factor:g}; it must be at least 1")
    if kind == "linear":
        return RopeSpec(kind=kind, theta=theta, factor=factor)
    if kind == "llama3":
        low = scaling.real("low_freq_factor", above=0.0)
        high = scaling.real("high_freq_factor", above=0.0)
        if high <= low:
            raise LoadError(f"{scaling.name('high_freq_factor')} ({high:g}) must be above low_freq_factor ({low:g})")
        return RopeSpec(
            kind=kind,
            theta=theta,
            factor=factor,
            original_context=scaling.whole("original_max_position_embeddings"),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        original_context=_yarn_original_context(fields, scaling),
        beta_fast=scaling.real("beta_fast", default=32.0, above=0.0),
        beta_slow=scaling.real("beta_slow", default=1.0, above=0.0),
        truncate=scaling.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _yarn_original_context(fields: Fields, scaling: Fields) -> int:
    if scaling.has("original_max_position_embeddings"):
        return scaling.whole("original_max_position_embeddings")
    return fields.whole("max_position_embeddings")


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """Peng et al., "YaRN", 2023, section 3.4, with DeepSeek's two optional weights of the logarithm."""
    if scaling.has("attention_factor"):
        return scaling.real("attention_factor", above=0.0)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = scaling.real("mscale", default=0.0), scaling.real("mscale_all_dim", default=0.0)
    if not (over and under):
        return magnitude(1.0)
    above, below = magnitude(over), magnitude(under)
    if not (0 < above < math.inf and 0 < below < math.inf):
        raise LoadError(f"{scaling.name('mscale')} ({over:g}) and mscale_all_dim ({under:g}) give no usable factor")
    return above / below


def read_context_length(fields: Fields) -> int:
    """Most positions the model was made for.

    yarn: factor x original_max_position_embeddings, where a missing original is max_position_embeddings;
    so a max_position_embeddings that was already multiplied is not multiplied again. Every other kind:
    max_position_embeddings as it stands.
    """
    scaling = rope_fields(fields)
    stated = fields.whole("max_position_embeddings")
    if rope_kind(scaling) != "yarn":
        return stated
    factor, original = scaling.real("factor"), _yarn_original_context(fields, scaling)
    if factor * original > MAX_WHOLE:
        raise LoadError(f"{scaling.name('factor')} is {factor:g}; {original} positions cannot be stretched so far")
    return int(factor * original)


# --------------------------------------------------------------------------- windows and end tokens


def read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, by ``layer_types`` or else from ``max_window_layers`` on."""
    window = fields.whole("sliding_window") if fields.flag("use_sliding_window") else None
    kinds = fields.values.get("layer_types")
    if kinds is None:
        if window is None:
            return (None,) * num_layers
        full = fields.values.get("max_window_layers", 28)
        if isinstance(full, bool) or not isinstance(full, int) or full < 0:
            raise LoadError(f"{fields.name('max_window_layers')} is {full!r}; it must be a whole number")
        return tuple(window if layer >= full else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise LoadError(f"{fields.name('layer_types')} must list {num_layers} layers (num_hidden_layers): {kinds!r}")
    windows: list[int | None] = []
    for layer, kind in enumerate(kinds):
        if kind == "full_attention":
            windows.append(None)
        elif kind != "sliding_attention":
            raise Unsupported(f"{fields.name('layer_types')}: layer {layer} is {kind!r}")
        elif window is None:
            raise LoadError(
                f"{fields.name('layer_types')}: layer {layer} is {kind!r}, but use_sliding_window is off, which "
                "leaves sliding_window without effect"
            )
        else:
            windows.append(window)
    return tuple(windows)


def read_eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The union of both files' ``eos_token_id``, each of them a number, a list of numbers or null."""
    ids: set[int] = set()
    for file, source in (("config.json", config), ("generation_config.json", generation_config)):
        value = source.get("eos_token_id")
        for token in [] if value is None else value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise LoadError(f"{file}: eos_token_id is {value!r}; it must be a token id, a list of them or null")
            ids.add(token)
    return tuple(sorted(ids))
