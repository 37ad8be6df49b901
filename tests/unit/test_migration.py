"""Other engines' configurations, translated: what can be is, what cannot is listed, nothing is dropped silently."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ropeway.errors import ConfigError
from ropeway.migration.mindie import environment, from_mindie
from ropeway.migration.translation import Translation
from ropeway.migration.vllm import from_vllm
from ropeway.settings import resolve

MINDIE: dict[str, Any] = {
    "Version": "1.0.0",
    "ServerConfig": {
        "ipAddress": "127.0.0.1",
        "managementIpAddress": "127.0.0.2",
        "port": 1025,
        "managementPort": 1026,
        "metricsPort": 1027,
        "maxLinkNum": 1000,
        "httpsEnabled": True,
        "tlsCert": "security/server.pem",
        "tlsPk": "security/server.key.pem",
        "tlsCaFile": ["ca.pem"],
        "fullTextEnabled": False,
        "inferMode": "standard",
        "openAiSupport": "vllm",
        "tokenTimeout": 600,
        "maxRequestLength": 40,
    },
    "BackendConfig": {
        "npuDeviceIds": [[0, 1]],
        "tokenizerProcessNumber": 8,
        "multiNodesInferEnabled": False,
        "ModelDeployConfig": {
            "maxSeqLen": 2560,
            "maxInputTokenLen": 2048,
            "truncation": 0,
            "ModelConfig": [
                {
                    "modelName": "qwen",
                    "modelWeightPath": "/data/qwen",
                    "worldSize": 2,
                    "cpuMemSize": 5,
                    "npuMemSize": -1,
                    "backendType": "atb",
                    "trustRemoteCode": False,
                    "plugin_params": '{"plugin_type": "prefix_cache,splitfuse,la"}',
                    "models": {"qwen": {"stream_options": {"micro_batch": True}, "ccl": {"enable_mc2": False}}},
                }
            ],
        },
        "ScheduleConfig": {
            "templateType": "Standard",
            "cacheBlockSize": 128,
            "maxPrefillTokens": 8192,
            "maxBatchSize": 200,
            "maxIterTimes": 512,
            "maxPreemptCount": 1,
            "prefillPolicyType": 0,
            "decodePolicyType": 0,
            "supportSelectBatch": False,
            "dynamicBatchSizeEnable": True,
            "decodeExpectedTime": 50,
        },
    },
}


def mindie(tmp_path: Path, content: Any) -> Translation:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    return from_mindie(file)


def test_mindies_settings_become_ours(tmp_path: Path) -> None:
    translation = mindie(tmp_path, MINDIE)
    environment({"MINDIE_ASYNC_SCHEDULING_ENABLE": "1"}, translation)
    assert translation.values == {
        "host": "127.0.0.1",
        "port": 1025,
        "management_port": 1026,
        "max_body_mb": 40,
        "max_queue": 2000,
        "tls_cert": "security/server.pem",
        "tls_key": "security/server.key.pem",
        "max_model_len": 2560,
        "served_model_name": "qwen",
        "model": "/data/qwen",
        "swap_space": 5,
        "tensor_parallel_size": 2,
        "prefix_cache": True,
        "chunked_prefill": True,
        "micro_batch": "on",
        "block_size": 128,
        "max_num_seqs": 200,
        "max_batched_tokens": 8192,
        "preemption": "swap",
        "policy": "fcfs",
        "step_budget": "tpot",
        "async_scheduling": True,
    }
    lost = "\n".join(translation.lost)
    for name in ("tokenTimeout", "tlsCaFile", "plugin_params.la", "maxIterTimes", "decodeExpectedTime"):
        assert name in lost
    assert "unknown" not in lost


def test_every_field_of_mindie_is_told_of(tmp_path: Path) -> None:
    """Change every leaf to something else: it shows in one of the three lists, or in the settings."""
    plain = mindie(tmp_path, MINDIE)
    for path in _leaves(MINDIE):
        changed = json.loads(json.dumps(MINDIE))
        _set(changed, path, _other(_get(changed, path)))
        try:
            translation = mindie(tmp_path, changed)
        except (ConfigError, ValueError, TypeError):
            continue  # told as well
        told = (translation.values, translation.kept, translation.lost)
        named = any(str(path[-1]) in line for line in (*translation.kept, *translation.lost))
        assert named or told != (plain.values, plain.kept, plain.lost), path


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return [path]
    return [leaf for key, inner in items for leaf in _leaves(inner, (*path, key))]


def _get(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _set(value: Any, path: tuple[Any, ...], new: Any) -> None:
    _get(value, path[:-1])[path[-1]] = new


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 7 if isinstance(value, int) else f"{value}x" if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("ServerConfig", "inferMode"), "dmi", "inferMode"),
        (("ServerConfig", "fullTextEnabled"), True, "fullTextEnabled"),
        (("ServerConfig", "colour"), "red", "unknown"),
        (("BackendConfig", "multiNodesInferEnabled"), True, "--nnodes"),
        (("BackendConfig", "modelInstanceNumber"), 2, "load balancer"),
        (("BackendConfig", "kvPoolConfig"), {"backend": "mooncake"}, "--disk-cache"),
        (("BackendConfig", "ModelDeployConfig", "truncation"), -1, "truncation"),
        (("BackendConfig", "ModelDeployConfig", "ModelConfig", 0, "trustRemoteCode"), True, "never run"),
        (("BackendConfig", "ModelDeployConfig", "ModelConfig", 0, "dp"), 2, "dp"),
        (("BackendConfig", "ScheduleConfig", "prefillPolicyType"), 2, "--policy"),
    ],
)
def test_what_mindie_has_and_we_have_not_is_listed(
    tmp_path: Path, path: tuple[Any, ...], value: Any, word: str
) -> None:
    changed = json.loads(json.dumps(MINDIE))
    _set(changed, path, value)
    assert any(word in line for line in mindie(tmp_path, changed).lost)


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        from_mindie(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="object"):
        mindie(tmp_path, [1])
    with pytest.raises(ConfigError, match="one model"):
        mindie(tmp_path, {})
    two = json.loads(json.dumps(MINDIE))
    models = two["BackendConfig"]["ModelDeployConfig"]["ModelConfig"]
    models.append(models[0])
    with pytest.raises(ConfigError, match="2"):
        mindie(tmp_path, two)


VLLM = (
    "vllm serve Qwen/Qwen3-0.6B --host 0.0.0.0 --port 8100 --served-model-name a b --max-model-len 8k "
    "--max_num_seqs=32 --max-num-batched-tokens 2K -tp 2 --dtype bfloat16 --enable-prefix-caching "
    "--no-enable-chunked-prefill --kv-cache-memory-bytes 2G --enable-auto-tool-choice --tool-call-parser hermes "
    "--reasoning-parser qwen3 --ssl-certfile c.pem --ssl-keyfile k.pem --allowed-origins '[\"https://a.example\"]' "
    "--otlp-traces-endpoint http://127.0.0.1:4318/v1/traces "
    "--gpu-memory-utilization 0.9 --enforce-eager --pipeline-parallel-size 1 --trust-remote-code --frobnicate 3"
)


def test_vllms_arguments_become_ours() -> None:
    translation = from_vllm(VLLM)
    assert translation.values == {
        "model": "Qwen/Qwen3-0.6B",
        "host": "0.0.0.0",
        "port": 8100,
        "served_model_name": "a,b",
        "max_model_len": 8000,
        "max_num_seqs": 32,
        "max_batched_tokens": 2048,
        "tensor_parallel_size": 2,
        "dtype": "bf16",
        "prefix_cache": True,
        "chunked_prefill": False,
        "kv_memory": 2.0,
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
        "tls_cert": "c.pem",
        "tls_key": "k.pem",
        "cors_origins": "https://a.example",
        "otlp_endpoint": "http://127.0.0.1:4318/v1/traces",
    }
    lost = "\n".join(translation.lost)
    for word in ("gpu-memory-utilization", "trust-remote-code", 'frobnicate = "3": an unknown option'):
        assert word in lost
    kept = "\n".join(translation.kept)
    for word in ("enforce-eager", "enable-auto-tool-choice", "pipeline-parallel-size"):
        assert word in kept


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("--enable-prefix-caching some/model", {"prefix_cache": True, "model": "some/model"}),
        ("--model x --kv-cache-dtype auto", {"model": "x", "kv_dtype": "auto"}),
        ("serve x", {"model": "x"}),
        ("--port 8100 some/model", {"port": 8100, "model": "some/model"}),
        ("", {}),
    ],
)
def test_switches_take_no_value(arguments: str, values: dict[str, Any]) -> None:
    assert from_vllm(arguments).values == values


def test_values_that_we_do_not_have_are_listed() -> None:
    translation = from_vllm("x --kv-cache-dtype fp8 --max-num-seqs many --dtype int3")
    assert translation.values == {"model": "x"}
    assert len(translation.lost) == 3
    with pytest.raises(ConfigError, match="'y'"):
        from_vllm("x --enforce-eager y")
    with pytest.raises(ConfigError, match="needs a value"):
        from_vllm("x --port")


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:4317", "http://127.0.0.1:4317", "127.0.0.1:4317", "http://[x"])
def test_a_collector_that_takes_spans_over_grpc_is_listed(url: str) -> None:
    translation = from_vllm(f"x --otlp-traces-endpoint {url}")
    assert translation.values == {"model": "x"}
    assert "otlp-traces-endpoint" in translation.lost[0]


def test_the_file_that_is_written_can_be_served_with(tmp_path: Path) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(MINDIE))
    out = tmp_path / "ropeway.toml"
    command = [sys.executable, "-m", "ropeway", "config", "import"]
    run = subprocess.run([*command, "mindie", str(source), "-o", str(out)], capture_output=True, text=True, check=True)
    assert "Not translated:" in run.stderr
    config = resolve({}, file=out, environ={}).config
    assert config.scheduler.max_num_seqs == 200
    assert config.parallel.micro_batch == "on"
    run = subprocess.run([*command, "vllm", VLLM], capture_output=True, text=True, check=True)
    out.write_text(run.stdout)
    assert resolve({}, file=out, environ={}).config.server.port == 8100
