"""MindIE's ``config.json`` (version 3) as our settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropeway.errors import ConfigError
from ropeway.migration.translation import Fields, Translation

_NO_SUCH_FEATURE = "Ropeway does not do this"


def from_mindie(file: Path) -> Translation:
    """Raises ``ConfigError`` for a file that is no JSON object, and one that names no model or several."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    translation = Translation()
    top = Fields(content, "config", translation)
    top.keep(("Version",), "says nothing about serving")
    top.lose("LogConfig", "Ropeway logs to stderr; use --log-format json and what collects it")
    _server(Fields(top.take("ServerConfig"), "ServerConfig", translation), translation)
    backend = Fields(top.take("BackendConfig"), "BackendConfig", translation)
    _backend(backend)
    _model_deployment(Fields(backend.take("ModelDeployConfig"), "ModelDeployConfig", translation), translation)
    _schedule(Fields(backend.take("ScheduleConfig"), "ScheduleConfig", translation), translation)
    backend.end()
    top.end()
    return translation


def _server(fields: Fields, translation: Translation) -> None:
    for theirs, ours in (
        ("ipAddress", "host"),
        ("port", "port"),
        ("managementPort", "management_port"),
        ("maxRequestLength", "max_body_mb"),
    ):
        fields.set(theirs, ours)
    if fields.has("maxLinkNum"):
        translation.set("max_queue", 2 * int(fields.take("maxLinkNum")))
    if fields.take("httpsEnabled"):
        fields.set("tlsCert", "tls_cert")
        fields.set("tlsPk", "tls_key")
        fields.lose("tlsPkPwd", "give a key that is not encrypted, in a file that only the server may read", off=("",))
        fields.lose("tlsCaFile", "clients show API keys here, not certificates; see --api-keys", off=("", []))
        fields.lose("tlsCrlFiles", "clients show API keys here, not certificates", off=("", []))
    fields.lose("inferMode", "prefill and decode run in one engine", off=("standard",))
    fields.lose("fullTextEnabled", "a stream sends what is new, as OpenAI's does", off=(False,))
    limit = "say it per request, by the header X-Ropeway-Timeout or the field timeout"
    fields.lose("tokenTimeout", limit)
    fields.lose("e2eTimeout", limit)
    fields.keep(("openAiSupport",), "the API is OpenAI's, with vLLM's fields")
    fields.keep(("managementIpAddress", "allowAllZeroIpListening"), "management listens on loopback only")
    fields.keep(("metricsPort",), "metrics are at /metrics of both listeners")
    fields.keep(("maxJsonDepth",), "the depth of bodies and of schemas is bounded")
    unused = "not needed: the management listener is on loopback"
    fields.keep(
        (
            *("tlsCaPath", "tlsCaFile", "tlsCert", "tlsPk", "tlsPkPwd", "tlsCrlPath", "tlsCrlFiles"),
            *(f"management{name}" for name in ("TlsCaFile", "TlsCert", "TlsPk", "TlsPkPwd", "TlsCrlPath")),
            *("managementTlsCrlFiles", "metricsTlsEnabled", "metricsTlsCaFile", "metricsTlsCert", "metricsTlsPk"),
            *("metricsTlsPkPwd", "metricsTlsCrlPath", "metricsTlsCrlFiles", "kmcKsfMaster", "kmcKsfStandby"),
            *("interCommTLSEnabled", "interCommPort", "interCommTlsCaPath", "interCommTlsCaFiles", "interCommTlsCert"),
            *("interCommPk", "interCommPkPwd", "interCommTlsCrlPath", "interCommTlsCrlFiles"),
        ),
        unused,
    )
    fields.end()


def _backend(fields: Fields) -> None:
    fields.keep(("backendName", "npuDeviceIds"), "the device and its threads are found at start")
    fields.keep(("tokenizerProcessNumber",), "tokenizing runs in threads beside the server")
    fields.lose("modelInstanceNumber", "start one server for each, behind a load balancer", off=(1,))
    fields.lose("multiNodesInferEnabled", "start it on every host with --nnodes and --node-rank", off=(False,))
    fields.keep(
        (
            *("interNodeTLSEnabled", "interNodeTlsCaPath", "interNodeTlsCaFiles", "interNodeTlsCert"),
            *("interNodeTlsPk", "interNodeTlsPkPwd", "interNodeTlsCrlPath", "interNodeTlsCrlFiles"),
            *("interNodeKmcKsfMaster", "interNodeKmcKsfStandby"),
        ),
        "between hosts, cluster_secret encrypts plans",
    )
    pool = fields.take("kvPoolConfig")
    if isinstance(pool, Mapping) and pool.get("backend"):
        fields.lose("kvPoolConfig", "cached prefixes can be kept on disk: --disk-cache")


def _model_deployment(fields: Fields, translation: Translation) -> None:
    fields.set("maxSeqLen", "max_model_len")
    fields.keep(("maxInputTokenLen",), "a prompt may be as long as max_model_len leaves room for an answer")
    fields.lose("truncation", "a prompt that is too long is refused", off=(0, False))
    fields.lose("speculationGamma", _NO_SUCH_FEATURE, off=(0,))
    fields.lose("maxLoras", _NO_SUCH_FEATURE, off=(0,))
    fields.lose("LoraModules", _NO_SUCH_FEATURE, off=([],))
    models = fields.take("ModelConfig")
    if not isinstance(models, list) or len(models) != 1:
        raise ConfigError(
            f"ModelDeployConfig.ModelConfig must name one model; it names "
            f"{len(models) if isinstance(models, list) else 'none'}: start a server for each"
        )
    _model(Fields(models[0], "ModelConfig", translation), translation)
    fields.end()


def _model(fields: Fields, translation: Translation) -> None:
    fields.set("modelName", "served_model_name")
    fields.set("modelWeightPath", "model")
    fields.set("cpuMemSize", "swap_space")
    ranks = fields.take("tp") if isinstance(fields.take("tp"), int) and fields.take("tp") > 0 else None
    ranks = ranks or fields.take("worldSize")
    if isinstance(ranks, int) and ranks > 1:
        translation.set("tensor_parallel_size", ranks)
    if fields.has("npuMemSize") and fields.take("npuMemSize") not in (-1, 0):
        translation.set("kv_memory", fields.take("npuMemSize"))
    fields.keep(("modelInstanceType", "backendType"), "there is one way to run a model")
    fields.lose("trustRemoteCode", "code that comes with a model is never run", off=(False,))
    fields.lose("ignore_eos", "say it per request: ignore_eos", off=(False,))
    for name in ("dp", "cp", "sp", "moe_tp", "moe_ep"):
        fields.lose(name, _NO_SUCH_FEATURE, off=(1, -1, 0))
    fields.keep(
        ("async_scheduler_wait_time", "kv_trans_timeout", "kv_link_timeout"), "nothing waits for that long here"
    )
    _plugins(fields, translation)
    for family in (fields.take("models") or {}).values() if isinstance(fields.take("models"), Mapping) else ():
        options = Fields(family, "ModelConfig.models", translation)
        cut = options.table("stream_options").take("micro_batch", False)
        fused = options.table("ccl").take("enable_mc2", False)
        if cut:
            translation.set("micro_batch", "on")
            if fused:
                translation.lose("ModelConfig.models.ccl.enable_mc2", fused, "not together with micro_batch")
        elif fused and translation.values.get("tensor_parallel_size", 1) > 1:
            translation.set("fused_collectives", True)
        options.end()
    fields.end()


def _plugins(fields: Fields, translation: Translation) -> None:
    given = fields.take("plugin_params")
    if not given:
        return
    try:
        params = json.loads(given) if isinstance(given, str) else given
        names = [name.strip() for name in str(params.get("plugin_type", "")).split(",") if name.strip()]
    except (ValueError, AttributeError):
        translation.lose("ModelConfig.plugin_params", given, "it is no JSON object")
        return
    for name in names:
        place = f"ModelConfig.plugin_params.{name}"
        if name == "prefix_cache":
            translation.set("prefix_cache", True)
        elif name == "splitfuse":
            translation.set("chunked_prefill", True)
        else:
            translation.lose(place, name, _NO_SUCH_FEATURE)


def _schedule(fields: Fields, translation: Translation) -> None:
    fields.set("cacheBlockSize", "block_size")
    fields.set("maxBatchSize", "max_num_seqs")
    fields.set("maxPrefillTokens", "max_batched_tokens")
    if fields.has("maxPreemptCount"):
        swaps = fields.take("maxPreemptCount") > 0 and translation.values.get("swap_space", 0) > 0
        translation.set("preemption", "swap" if swaps else "recompute")
    fields.keep(("maxPreemptCount",), "a request gives way three times at most")
    if fields.take("prefillPolicyType", 0) == 0 and fields.take("decodePolicyType", 0) == 0:
        translation.set("policy", "fcfs")
    fields.lose("prefillPolicyType", "see --policy", off=(0,))
    fields.lose("decodePolicyType", "see --policy", off=(0,))
    fields.lose("maxIterTimes", "say it per request: max_tokens")
    if fields.take("dynamicBatchSizeEnable"):
        translation.set("step_budget", "tpot")
        fields.lose("prefillExpectedTime", "ttft_s of a tier, in the file of --tiers (seconds, not milliseconds)")
        fields.lose("decodeExpectedTime", "tpot_s of a tier, in the file of --tiers (seconds, not milliseconds)")
    fields.keep(("prefillExpectedTime", "decodeExpectedTime"), "unused without dynamicBatchSizeEnable")
    fields.lose("maxFirstTokenWaitTime", "ttft_s of a tier, in the file of --tiers (seconds, not milliseconds)")
    fields.keep(("templateType",), "chunks of prompts and decodes always share a step")
    fields.keep(("maxPrefillBatchSize",), "a step holds as many prompts as its tokens allow")
    fields.keep(("prefillTimeMsPerReq", "decodeTimeMsPerReq"), "step times are measured while serving")
    fields.keep(("maxQueueDelayMicroseconds", "supportSelectBatch"), "a request is seated at the next step")
    fields.keep(("stageSelectPolicy",), "prompts and decodes share every step")
    fields.keep(
        ("prefillChunkSize", "maxNumPartialPrefills", "longPrefillTokenThreshold", "maxLongPartialPrefills"),
        "prompts are cut to what max_batched_tokens leaves",
    )
    fields.end()


def environment(variables: Mapping[str, str], translation: Translation) -> None:
    """What MindIE reads from the environment."""
    values: dict[str, Any] = dict(variables)
    if "MINDIE_ASYNC_SCHEDULING_ENABLE" in values:
        translation.set("async_scheduling", values["MINDIE_ASYNC_SCHEDULING_ENABLE"] == "1")
    if "NPU_MEMORY_FRACTION" in values:
        translation.lose(
            "NPU_MEMORY_FRACTION", values["NPU_MEMORY_FRACTION"], "give the pool's size in GiB: --kv-memory"
        )
