"""Reading config.json: old and new spellings, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from ropeway.errors import LoadError, Unsupported
from ropeway.models.registry import architecture_of
from ropeway.models.spec import DecoderSpec

BASE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(
    changes: dict[str, Any] | None = None,
    *,
    generation_config: dict[str, Any] | None = None,
    architecture: str = "Qwen2ForCausalLM",
) -> DecoderSpec:
    return DecoderSpec.from_config({**BASE, **(changes or {})}, generation_config, architecture=architecture)


def refusal(changes: dict[str, Any], kind: type[LoadError] = LoadError) -> str:
    with pytest.raises(kind) as caught:
        read(changes)
    assert type(caught.value) is kind
    return str(caught.value)


# --------------------------------------------------------------------------- shape


def test_what_a_config_leaves_out_has_the_defaults_of_the_family() -> None:
    spec = read({"num_key_value_heads": None})
    assert (spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps) == (8, 8, 1e-6)
    assert (spec.rope.kind, spec.rope.theta, spec.context_length) == ("default", 10_000.0, 32768)
    assert (spec.tie_word_embeddings, spec.attention_bias, spec.windows, spec.eos_ids) == (
        False,
        False,
        (None,) * 4,
        (),
    )


def test_an_explicit_head_size_wins_over_the_even_share() -> None:
    assert read({"head_dim": 32}).head_dim == 32
    assert read(architecture="Qwen3ForCausalLM").head_dim == 128


@pytest.mark.parametrize("field", sorted(set(BASE) - {"num_key_value_heads"}))
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "64", True, [64], float("nan")])
def test_a_missing_or_bad_size_is_an_error_that_names_the_field(field: str, value: object) -> None:
    assert field in refusal({field: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be at most 10000"),
        ({"max_position_embeddings": 1e300}, "max_position_embeddings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": 1000}, "eos_token_id 1000"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(changes)


def test_another_activation_is_unsupported_by_name() -> None:
    assert "'gelu'" in refusal({"hidden_act": "gelu"}, Unsupported)


# --------------------------------------------------------------------------- architectures


def test_an_unknown_architecture_is_named_together_with_the_supported_ones() -> None:
    with pytest.raises(Unsupported, match=r"MambaForCausalLM is not supported.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        architecture_of({"architectures": ["MambaForCausalLM"]})


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", {}])
def test_architectures_must_be_a_list_of_names(value: object) -> None:
    with pytest.raises(LoadError, match="architectures"):
        architecture_of({"architectures": value})


def test_the_first_supported_architecture_is_taken() -> None:
    assert architecture_of({"architectures": ["Other", "Qwen2ForCausalLM"]}) == "Qwen2ForCausalLM"


# --------------------------------------------------------------------------- rotary embeddings


@pytest.mark.report("vllm-project/vllm#10293")
@pytest.mark.report("sgl-project/sglang#2943")
@pytest.mark.report("InternLM/lmdeploy#3013")
@pytest.mark.report("xorbitsai/inference#3571")
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": None}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, **YARN}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "yarn", **YARN}},
    ],
)
def test_every_spelling_of_yarn_is_the_same_model(changes: dict[str, Any]) -> None:
    spec = read(changes)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_context) == ("yarn", 4.0, 32768)
    assert spec.context_length == 131072


@pytest.mark.report("vllm-project/vllm#56446")
def test_a_length_that_yarn_has_already_multiplied_is_not_multiplied_again() -> None:
    spec = read({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", **YARN}})
    assert spec.context_length == 131072


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default", "factor": 2.0}])
def test_no_scaling_leaves_the_context_as_stated(scaling: object) -> None:
    spec = read({"rope_scaling": scaling, "rope_theta": 5e5})
    assert (spec.rope.kind, spec.rope.theta, spec.context_length) == ("default", 5e5, 32768)


@pytest.mark.parametrize("scaling", [LLAMA3, {"type": "linear", "factor": 8}])
def test_kinds_other_than_yarn_state_their_final_context(scaling: dict[str, Any]) -> None:
    assert read({"rope_scaling": scaling}).context_length == 32768


def test_theta_inside_the_rope_parameters_wins() -> None:
    assert read({"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}, "rope_theta": 1e4}).rope.theta == 7e5


@pytest.mark.report("vllm-project/vllm#10293")
@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ([{"type": "yarn", **YARN}], "rope_scaling must be an object"),
        ("yarn", "rope_scaling must be an object"),
        ({"type": "yarn", "factor": "4.0"}, "rope_scaling.factor is '4.0'"),
        ({"type": "yarn", "factor": None}, "rope_scaling.factor is missing"),
        ({"type": "yarn", "factor": 0.5}, "rope_scaling.factor is 0.5"),
        ({"type": "yarn", "factor": float("inf")}, "rope_scaling.factor"),
        ({"type": "yarn", **YARN, "factor": 1e308}, "rope_scaling.factor is 1e+308"),
        ({"type": "yarn", **YARN, "factor": 10**400}, "rope_scaling.factor"),
        ({"type": "yarn", **YARN, "original_max_position_embeddings": 10**400}, "original_max_position_embeddings"),
        ({"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": -100}, "rope_scaling.mscale"),
        ({"type": "yarn", **YARN, "original_max_position_embeddings": "32k"}, "original_max_position_embeddings"),
        ({"type": "yarn", **YARN, "beta_fast": 0}, "rope_scaling.beta_fast"),
        ({"type": "yarn", **YARN, "truncate": 1}, "rope_scaling.truncate"),
        ({"factor": 4.0}, "rope_scaling.rope_type is missing"),
        ({**LLAMA3, "low_freq_factor": None}, "rope_scaling.low_freq_factor is missing"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "rope_scaling.high_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": None}, "rope_scaling.original_max_position_embeddings"),
        ({"type": "factors", "factors": [1.0, 2.0]}, "rope factors number 2"),
        ({"type": "factors", "factors": 2.0}, "rope_scaling.factors"),
        ({"type": "factors", "factors": [1.0, 0.0, 1.0, 1.0]}, "rope_scaling.factors"),
    ],
)
def test_a_malformed_rope_scaling_is_an_error_that_names_the_field(scaling: object, named: str) -> None:
    assert named in refusal({"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"type": ["yarn"], **YARN}}, "['yarn']"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters differs"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rotary_settings_that_are_not_implemented_are_named(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(changes, Unsupported)


# --------------------------------------------------------------------------- windows and end tokens


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 16}, (None, None, None, None)),
        ({"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}, (None, None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, (None, None, None, 16)),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, (16, 16, 16, 16)),
        ({"use_sliding_window": True, "sliding_window": 16}, (None, None, None, None)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "max_window_layers": 0,
            },
            (16, None, 16, None),
        ),
        ({"layer_types": ["full_attention"] * 4}, (None, None, None, None)),
    ],
)
def test_windows_are_where_the_config_asks_for_them(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": -1}, "max_window_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: layer 0"),
    ],
)
def test_windows_without_sense_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(changes)


def test_a_layer_of_another_kind_is_unsupported_by_name() -> None:
    changes = {"layer_types": ["full_attention", "linear_attention"] * 2}
    assert "layer 1 is 'linear_attention'" in refusal(changes, Unsupported)


@pytest.mark.report("ggml-org/llama.cpp#6772")
@pytest.mark.report("ollama/ollama#3759")
@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (None, [7, 2], (2, 7)),
        (2, 7, (2, 7)),
        (2, [2, 7, 9], (2, 7, 9)),
        (None, None, ()),
        ([], [], ()),
    ],
)
def test_end_tokens_are_the_union_of_both_files(config: object, generation: object, ids: tuple[int, ...]) -> None:
    assert read({"eos_token_id": config}, generation_config={"eos_token_id": generation}).eos_ids == ids


@pytest.mark.parametrize("value", ["</s>", -1, [1, "x"], True, 1.0, {"id": 1}])
def test_a_bad_end_token_is_an_error_that_names_file_and_field(value: object) -> None:
    with pytest.raises(LoadError, match=r"generation_config\.json: eos_token_id"):
        read(generation_config={"eos_token_id": value})
