"""Merging of settings: who wins, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ropeway.config import Config
from ropeway.errors import ConfigError
from ropeway.settings import convert, render, resolve, settings


def merged(given: dict[str, Any] | None = None, *, file: Path | None = None, environ: dict[str, str] | None = None):
    return resolve(given, file=file, environ=environ or {})


@pytest.fixture
def toml(tmp_path):
    def write(text: str, suffix: str = ".toml") -> Path:
        path = tmp_path / f"ropeway{suffix}"
        path.write_text(text)
        return path

    return write


def test_field_names_are_unique_over_sections():
    names = [f.name for s in dataclasses.fields(Config) for f in dataclasses.fields(getattr(Config(), s.name))]
    assert len(names) == len(set(names)) == len(settings())


def test_every_field_has_a_docstring_and_a_flag_and_a_variable():
    for name, setting in settings().items():
        assert setting.doc, f"{name} has no docstring in config.py"
        assert setting.flag == "--" + name.replace("_", "-")
        assert setting.variable == "ROPEWAY_" + name.upper()


def test_with_no_source_everything_is_default():
    resolved = merged()
    assert resolved.config == Config()
    assert {str(origin) for origin in resolved.origins.values()} == {"default"}
    assert resolved.notes == []


def test_flags_win_over_the_environment_over_the_file_over_defaults(toml):
    file = toml("[scheduler]\nmax_num_seqs = 5\nmax_batched_tokens = 300\nchunked_prefill = false\n")
    environ = {"ROPEWAY_MAX_NUM_SEQS": "6", "ROPEWAY_MAX_BATCHED_TOKENS": "301"}
    resolved = merged({"max_num_seqs": 7, "max_batched_tokens": None}, file=file, environ=environ)
    scheduler = resolved.config.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_batched_tokens, scheduler.chunked_prefill) == (7, 301, False)
    assert str(resolved.origins["max_num_seqs"]) == "--max-num-seqs"
    assert str(resolved.origins["max_batched_tokens"]) == "environment variable ROPEWAY_MAX_BATCHED_TOKENS"
    assert str(resolved.origins["chunked_prefill"]) == f"scheduler.chunked_prefill in {file}"
    assert str(resolved.origins["block_size"]) == "default"


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".toml", '[server]\nport = 9000\napi_key = "k"\n[cache]\nkv_memory = 2\n'),
        (".yaml", "server:\n  port: 9000\n  api_key: k\ncache:\n  kv_memory: 2\nengine:\n"),
        (".json", '{"server": {"port": 9000, "api_key": "k"}, "cache": {"kv_memory": 2}}'),
    ],
)
def test_a_file_may_be_toml_yaml_or_json(toml, suffix, text):
    config = merged(file=toml(text, suffix)).config
    assert (config.server.port, config.server.api_key, config.cache.kv_memory) == (9000, "k", 2.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[shceduler]\nmax_num_seqs = 1", ["shceduler", "did you mean 'scheduler'"]),
        ("[scheduler]\nmax_num_seq = 1", ["max_num_seq'", "did you mean 'max_num_seqs'"]),
        ("[cache]\nmax_num_seqs = 1", ["max_num_seqs", "belongs into section scheduler"]),
        ("port = 1", ["port", "belongs into section server"]),
        ('[server]\nport = "abc"', ["port", "'abc'", "whole number", "server.port in"]),
        ("[server]\nport = 1.5", ["port", "1.5", "whole number"]),
        ("[server]\nport = true", ["port", "True", "whole number"]),
        ("[model]\nmodel = 5", ["model", "5", "text"]),
        ('[cache]\nprefix_cache = "perhaps"', ["prefix_cache", "true or false"]),
        ('[model]\ndtype = "fp8"', ["dtype", "fp8", "auto, fp32, bf16, fp16"]),
        ("[server\n", ["not valid TOML"]),
        ("server = 5", ["section server must be a table"]),
    ],
)
def test_a_wrong_file_is_refused_naming_field_value_place_and_what_is_allowed(toml, text, words):
    with pytest.raises(ConfigError) as error:
        merged(file=toml(text))
    for word in words:
        assert word in error.value.message


def test_a_missing_file_and_an_unknown_suffix_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        merged(file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="must end in"):
        merged(file=tmp_path / "none.ini")


def test_an_unknown_keyword_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"max_num_sequences.*did you mean 'max_num_seqs'"):
        merged({"max_num_sequences": 3})


def test_an_unknown_variable_is_noted_not_refused():
    resolved = merged(environ={"ROPEWAY_PROT": "1", "HOME": "/"})
    assert len(resolved.notes) == 1
    assert "ROPEWAY_PROT" in resolved.notes[0]
    assert "ROPEWAY_PORT" in resolved.notes[0]


@pytest.mark.parametrize("word", ["1", "true", "Yes", "ON"])
def test_truth_in_the_environment(word):
    assert merged(environ={"ROPEWAY_ACCESS_LOG": word}).config.server.access_log is True


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_num_seqs", 0, "at least 1"),
        ("max_batched_tokens", -4, "at least 1"),
        ("kv_blocks", 0, "at least 1"),
        ("kv_memory", 0.0, "above 0"),
        ("kv_memory", float("nan"), "a number"),
        ("block_size", 24, "power of two"),
        ("port", 65536, "at most 65535"),
        ("port", -1, "at least 0"),
        ("management_port", 70000, "at most 65535"),
        ("threads", 0, "at least 1"),
        ("max_queue", -1, "at least 0"),
        ("drain_timeout_s", -1.0, "at least 0"),
        ("max_body_mb", 0, "above 0"),
        ("model", " ", "not be empty"),
        ("served_model_name", "a,,b", "empty name"),
        ("max_model_len", 0, "at least 1"),
        ("swap_space", -0.5, "at least 0"),
        ("swap_space", float("inf"), "a number"),
        ("disk_cache", "", "not be empty"),
        ("disk_space", 0, "above 0"),
        ("watermark", -0.1, "at least 0"),
        ("watermark", 0.95, "at most 0.9"),
        ("admission_quantile", 0, "above 0"),
        ("admission_quantile", 1.5, "at most 1"),
        ("aging_s", 0, "above 0"),
        ("batch_window_s", -1, "at least 0"),
        ("length_profile", " ", "not be empty"),
        ("tiers", "", "not be empty"),
        ("otlp_endpoint", "", "URL of a collector"),
        ("otlp_endpoint", "127.0.0.1:4318", "URL of a collector"),
        ("otlp_endpoint", "grpc://127.0.0.1:4317", "URL of a collector"),
        ("otlp_endpoint", "http://127.0.0.1:99999", "URL of a collector"),
        ("otlp_endpoint", "http:///v1/traces", "URL of a collector"),
        ("policy", "lifo", "fcfs, priority, deadline, shortest"),
        ("batching", "continuos", "continuous, dynamic, static"),
        ("admission", "optimistic", "greedy, watermark, profile"),
        ("preemption", "kill", "auto, swap, recompute"),
        ("step_budget", "variable", "constant, tpot"),
    ],
)
def test_values_out_of_range_are_refused_naming_the_flag(name, value, rule):
    with pytest.raises(ConfigError) as error:
        merged({name: value})
    assert rule in error.value.message
    assert ("argument model" if name == "model" else settings()[name].flag) in error.value.message
    assert error.value.param == name


def test_more_sequences_than_tokens_is_refused_when_both_were_given(toml):
    with pytest.raises(ConfigError, match=r"max_num_seqs 9 .*max_batched_tokens 8"):
        merged({"max_num_seqs": 9}, file=toml("[scheduler]\nmax_batched_tokens = 8"))


def test_of_sequences_and_tokens_the_defaulted_one_gives_way_with_a_note():
    few_tokens = merged({"max_batched_tokens": 8})
    assert few_tokens.config.scheduler.max_num_seqs == 8
    assert "max_num_seqs changed from 64 to 8" in few_tokens.notes[0]
    many_seqs = merged({"max_num_seqs": 4096})
    assert many_seqs.config.scheduler.max_batched_tokens == 4096
    assert "max_batched_tokens" in many_seqs.notes[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"preemption": "swap"}, ["preemption swap", "--preemption", "swap_space 0.0", "give swap_space"]),
        ({"preemption": "swap", "swap_space": 0}, ["preemption swap", "--swap-space"]),
        ({"disk_cache": "/kv"}, ["disk_cache /kv", "swap_space 0.0", "give swap_space"]),
        ({"disk_cache": "/kv", "swap_space": 1, "prefix_cache": False}, ["disk_cache /kv", "prefix_cache False"]),
        ({"padded_rows": True}, ["padded_rows True", "batching continuous", "static and dynamic"]),
        ({"padded_rows": True, "batching": "continuous"}, ["padded_rows True", "--batching"]),
    ],
)
def test_what_needs_something_that_is_off_is_refused_naming_both(given, words):
    with pytest.raises(ConfigError) as error:
        merged(given)
    for word in words:
        assert word in error.value.message
    assert error.value.param == next(iter(given))


@pytest.mark.parametrize(
    ("text", "flags", "name", "value"),
    [
        ('[scheduler]\npreemption = "swap"\n[cache]\nswap_space = 2', {"swap_space": 0}, "preemption", "recompute"),
        ('[cache]\ndisk_cache = "/kv"\nswap_space = 2', {"swap_space": 0}, "disk_cache", None),
        ('[cache]\ndisk_cache = "/kv"\nswap_space = 2', {"prefix_cache": False}, "disk_cache", None),
        ('[scheduler]\npadded_rows = true\nbatching = "static"', {"batching": "continuous"}, "padded_rows", False),
    ],
)
def test_what_needs_something_gives_way_when_that_was_switched_off_with_more_authority(toml, text, flags, name, value):
    resolved = merged(flags, file=toml(text))
    section = getattr(resolved.config, settings()[name].section)
    assert getattr(section, name) == value
    assert any(note.startswith(f"{name} changed from") and next(iter(flags)) in note for note in resolved.notes)
    assert next(iter(flags)) in str(resolved.origins[name])


def test_swap_disk_and_padding_are_taken_with_what_they_need():
    given = {"preemption": "swap", "swap_space": 0.5, "disk_cache": "/kv", "batching": "static", "padded_rows": True}
    resolved = merged(given)
    assert resolved.notes == []
    assert resolved.config.cache.disk_cache == "/kv"
    assert resolved.config.scheduler.padded_rows


def test_int4_full_needs_blocks_of_32_tokens_and_a_default_gives_way_with_a_note(toml):
    resolved = merged({"kv_dtype": "int4-full"})
    assert resolved.config.cache.block_size == 32
    assert "block_size changed from 16 to 32 to go with kv_dtype int4-full" in resolved.notes[0]
    assert merged({"kv_dtype": "int4-full", "block_size": 64}).config.cache.block_size == 64
    with pytest.raises(
        ConfigError, match=r"kv_dtype int4-full .*block_size 16 .*groups of 32 tokens; give block_size 32"
    ):
        merged({"kv_dtype": "int4-full", "block_size": 16})
    weaker = merged({"block_size": 16}, file=toml('[cache]\nkv_dtype = "int4-full"'))
    assert weaker.config.cache.kv_dtype == "auto"


def test_two_sizes_of_the_pool_contradict_unless_one_has_more_authority(toml):
    with pytest.raises(ConfigError, match="same pool"):
        merged({"kv_blocks": 10, "kv_memory": 1.0})
    resolved = merged({"kv_blocks": 10}, file=toml("[cache]\nkv_memory = 1.0"))
    assert (resolved.config.cache.kv_blocks, resolved.config.cache.kv_memory) == (10, None)
    assert "kv_memory" in resolved.notes[0]


def test_dtype_and_weights_that_disagree_contradict_unless_one_has_more_authority(toml):
    with pytest.raises(
        ConfigError, match=r"dtype fp32 .*weights int4 .* contradict: both say what the weights are held"
    ):
        merged({"dtype": "fp32", "weights": "int4"})
    resolved = merged({"weights": "int8"}, file=toml('[model]\ndtype = "fp16"'))
    assert (resolved.config.model.dtype, resolved.config.model.weights) == ("auto", "int8")
    assert "dtype" in resolved.notes[0]
    agreed = merged({"dtype": "bf16", "weights": "bf16"})
    assert agreed.notes == []


def test_the_two_listeners_need_two_ports():
    with pytest.raises(ConfigError, match="ports of their own"):
        merged({"port": 8000, "management_port": 8000})
    with pytest.raises(ConfigError, match="management_port"):
        merged({"port": 65535})
    assert merged({"port": 0, "management_port": 0}).config.server.management_port == 0


def test_render_reads_back_as_the_same_configuration_and_hides_secrets(toml):
    given = {"port": 9001, "model": 'a "quoted" \\ näme', "prefix_cache": False, "kv_memory": 1.5, "api_key": "hush"}
    resolved = merged(given)
    text = render(resolved)
    assert "hush" not in text
    assert "--port" in text
    again = merged({"api_key": "hush"}, file=toml(text)).config
    assert again == resolved.config


def test_a_secret_of_the_wrong_type_is_not_repeated_in_the_error(toml):
    with pytest.raises(ConfigError) as error:
        merged(file=toml(json.dumps({"server": {"api_key": 12345}}), ".json"))
    assert "12345" not in error.value.message


def test_a_keyword_argument_is_named_as_such():
    with pytest.raises(ConfigError, match="from argument max_num_seqs"):
        resolve({"max_num_seqs": "many"}, environ={}, given_as="argument")


def test_whole_floats_are_whole_numbers():
    resolved = merged()
    assert convert(settings()["port"], 8001.0, resolved.origins["port"]) == 8001


def test_a_service_link_of_kubernetes_is_not_taken_for_the_port() -> None:
    resolved = resolve({}, environ={"ROPEWAY_PORT": "tcp://10.0.0.1:8000"})
    assert resolved.config.server.port == 8000
    assert any("ROPEWAY_PORT" in note and "service link" in note for note in resolved.notes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"tensor_parallel_size": 2, "micro_batch": "on", "fused_collectives": True},
            r"micro_batch on .*fused_collectives True .*contradict: both overlap the same communication",
        ),
        ({"micro_batch": "auto", "tensor_parallel_size": 1}, "one rank has nobody to communicate with"),
        ({"fused_collectives": True, "tensor_parallel_size": 1}, "one rank has nobody to communicate with"),
        ({"tensor_parallel_size": 3, "nnodes": 2}, "every host must have the same number of ranks"),
        ({"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 2, "cluster_secret": "x"}, "numbered from 0"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, r"nnodes 2 .* needs cluster_secret"),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "cluster_secret": "x", "collectives": "shared"},
            "hosts share no memory",
        ),
        ({"tensor_parallel_size": 65}, "must be at most 64"),
    ],
)
def test_settings_of_ranks_that_cannot_be_together_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        merged(given)


def test_micro_batches_are_off_unless_asked_for():
    parallel = merged({"tensor_parallel_size": 2}).config.parallel
    assert (parallel.micro_batch, parallel.fused_collectives) == ("off", False)


def test_a_rank_setting_gives_way_to_one_rank_said_with_more_authority(toml):
    resolved = merged({"tensor_parallel_size": 1}, file=toml('[parallel]\nmicro_batch = "on"\n'))
    assert resolved.config.parallel.micro_batch == "off"
    assert "micro_batch changed from on" in resolved.notes[0]


def test_the_ranks_of_a_host():
    several = {"tensor_parallel_size": 6, "nnodes": 3, "cluster_secret": "x"}
    ranks = [merged(several | {"node_rank": node}).config.parallel.ranks_of_node for node in range(3)]
    assert ranks == [range(2), range(2, 4), range(4, 6)]
