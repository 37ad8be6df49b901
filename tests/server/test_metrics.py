"""/metrics"""

from __future__ import annotations

import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ropeway.engine.messages import Stats, TierStats
from tests.server.asking import CHAT, COMPLETIONS, chat_body, completion_body, stream
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served import Served, serving

DOCUMENTED = (
    "ropeway_num_requests_running",
    "ropeway_num_requests_waiting",
    *(
        f"ropeway_{name}{{tier={tier}}}"
        for tier in ("interactive", "standard", "batch")
        for name in (
            "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_count",
            "e2e_request_latency_seconds_count",
            "tier_requests_running",
            "tier_requests_waiting",
            "tier_requests_swapped",
            "finished_requests_total",
            "predicted_output_tokens_total",
            "actual_output_tokens_total",
            "admission_preemptions_total",
        )
    ),
    "ropeway_tier_preemptions_total{kind=swap,tier=batch}",
    "ropeway_tier_preemptions_total{kind=recompute,tier=batch}",
    "ropeway_refused_requests_total{code=shed,tier=batch}",
    "ropeway_refused_requests_total{code=queue_full,tier=batch}",
    "ropeway_refused_requests_total{code=queue_timeout,tier=batch}",
    "ropeway_refused_requests_total{code=deadline_exceeded,tier=batch}",
    "ropeway_host_blocks{state=pinned}",
    "ropeway_host_blocks{state=cached}",
    "ropeway_host_blocks{state=free}",
    "ropeway_swapped_blocks_total{direction=out}",
    "ropeway_swapped_blocks_total{direction=in}",
    "ropeway_host_cache_hits_total",
    "ropeway_disk_cache_hits_total",
    "ropeway_disk_blocks",
    "ropeway_disk_errors_total",
    "ropeway_disk_failed",
    "ropeway_kv_reservation",
    "ropeway_predicted_step_seconds",
    "ropeway_engine_warnings",
    "ropeway_prompt_tokens_total",
    "ropeway_generation_tokens_total",
    "ropeway_num_preemptions_total",
    "ropeway_prefix_cache_hits_total",
    "ropeway_prefix_cache_queries_total",
    "ropeway_wasted_rows_total{reason=stop_string}",
    "ropeway_kv_blocks{state=live}",
    "ropeway_kv_blocks{state=cached}",
    "ropeway_kv_blocks{state=free}",
)


def scrape(http: httpx.Client) -> dict[str, float]:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


def difference(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before.get(name, 0)


@pytest.mark.report("vllm-project/vllm#8178")
def test_all_documented_names_are_there(http: httpx.Client) -> None:
    assert set(DOCUMENTED) <= scrape(http).keys()


@pytest.mark.report("vllm-project/vllm#5250")
def test_requests_are_counted_once_whatever_n_is(http: httpx.Client) -> None:
    before = scrape(http)
    for _ in range(10):
        http.post(CHAT, json=chat_body(n=3, max_tokens=4))
    http.post(CHAT, json=chat_body(n=0))
    after = scrape(http)
    assert difference(before, after, "ropeway_request_success_total{finished_reason=length}") == 10
    assert difference(before, after, "ropeway_e2e_request_latency_seconds_count{tier=standard}") == 10
    assert difference(before, after, "ropeway_time_to_first_token_seconds_count{tier=standard}") == 10
    assert difference(before, after, "ropeway_generation_tokens_total") == 10 * 3 * 4
    assert difference(before, after, "ropeway_inter_token_latency_seconds_count{tier=standard}") == 10 * 3 * 3


def test_tokens_are_those_of_usage(http: httpx.Client) -> None:
    before = scrape(http)
    usage = http.post(COMPLETIONS, json=completion_body(prompt=["a", "b c"], n=2)).json()["usage"]
    after = scrape(http)
    assert difference(before, after, "ropeway_prompt_tokens_total") == usage["prompt_tokens"]
    assert difference(before, after, "ropeway_generation_tokens_total") == usage["completion_tokens"]


@pytest.mark.report("vllm-project/vllm#6337")
def test_latencies_are_those_of_the_client(served: Served, http: httpx.Client) -> None:
    served.engine.first_delay_s, served.engine.delay_s = 0.4, 0.1
    before = scrape(http)
    begin = time.perf_counter()
    stream(http, CHAT, chat_body(max_tokens=4))
    wall = time.perf_counter() - begin
    after = scrape(http)

    def mean(name: str) -> float:
        count = difference(before, after, f"ropeway_{name}_seconds_count{{tier=standard}}")
        return difference(before, after, f"ropeway_{name}_seconds_sum{{tier=standard}}") / count

    assert mean("time_to_first_token") == pytest.approx(wall - 3 * mean("inter_token_latency"), rel=0.2)
    assert 0.1 <= mean("inter_token_latency") < 0.3
    assert mean("e2e_request_latency") == pytest.approx(wall, rel=0.2)


@pytest.mark.report("vllm-project/vllm-omni#6547")
def test_what_waits_is_not_counted_as_running(served: Served, http: httpx.Client) -> None:
    served.engine.delay_s = 30.0
    with httpx.Client(base_url=served.url) as other, other.stream("POST", CHAT, json=chat_body(n=9, stream=True)):
        values = scrape(http)
        assert values["ropeway_num_requests_running"] == 4
        assert values["ropeway_num_requests_waiting"] == 5
        assert values["ropeway_kv_blocks{state=live}"] == 8
    assert served.idle()
    assert scrape(http)["ropeway_num_requests_running"] == 0


def test_of_a_dead_engine_the_counters_stay_and_nothing_is_under_way() -> None:
    engine = ScriptedEngine()
    engine.counters = Stats(
        steps=7, host_blocks_pinned=3, tiers={"batch": TierStats(running=2, waiting=3, swapped=1, finished=5)}
    )
    with serving(engine) as served, httpx.Client(base_url=served.url) as http:
        assert scrape(http)["ropeway_tier_requests_waiting{tier=batch}"] == 3
        engine.failure = "the engine process ended with signal 9"
        values = scrape(http)
    names = ("num_requests_", "tier_requests_", "kv_blocks{", "host_blocks{")
    gauges = {name: value for name, value in values.items() if name.startswith(tuple(f"ropeway_{n}" for n in names))}
    assert len(gauges) > 10
    assert set(gauges.values()) == {0}
    assert values["ropeway_engine_steps_total"] == 7
    assert values["ropeway_finished_requests_total{tier=batch}"] == 5


@pytest.mark.report("vllm-project/vllm#6642")
def test_counters_never_fall_even_if_the_engine_counts_anew(served: Served, http: httpx.Client) -> None:
    counters = served.engine.counters
    try:
        before = scrape(http)
        served.engine.counters = Stats(preemptions=1, wasted_rows={"stop_string": 1, "disconnect": 4})
        after = scrape(http)
    finally:
        served.engine.counters = counters
    totals = [name for name in before if "_total" in name]
    assert len(totals) > 6
    assert all(after[name] >= before[name] for name in totals)
    assert after["ropeway_wasted_rows_total{reason=disconnect}"] == 4


def test_latencies_are_counted_by_tier(http: httpx.Client) -> None:
    before = scrape(http)
    http.post(CHAT, json=chat_body(max_tokens=4, priority="batch"))
    http.post(COMPLETIONS, json=completion_body(max_tokens=4), headers={"X-Ropeway-Tier": "interactive"})
    after = scrape(http)
    for name, count in (("time_to_first_token", 1), ("inter_token_latency", 3), ("e2e_request_latency", 1)):
        risen = [
            difference(before, after, f"ropeway_{name}_seconds_count{{tier={tier}}}")
            for tier in ("interactive", "standard", "batch")
        ]
        assert risen == [count, 0, count]


def test_what_the_engine_says_of_tiers_memory_and_disk_is_shown(served: Served, http: httpx.Client) -> None:
    counters = served.engine.counters
    tier = TierStats(
        running=2,
        waiting=5,
        swapped=3,
        refused={"shed": 4, "context_length_exceeded": 1},
        preemptions={"swap": 3, "recompute": 2, "admission": 4},
        finished=6,
        predicted_tokens=600,
        output_tokens=540,
    )
    stats = Stats(
        tiers={"batch": tier},
        swaps_out=30,
        swaps_in=20,
        host_blocks_pinned=10,
        host_blocks_cached=11,
        host_blocks_free=12,
        host_hits=64,
        disk_hits=32,
        disk_blocks=7,
        disk_errors=2,
        disk_failure="the folder is read-only",
        reservation=0.125,
        step_s=0.02,
    )
    try:
        served.engine.counters = stats
        values = scrape(http)
        health = http.get("/health").json()
    finally:
        served.engine.counters = counters
    expected = {
        "tier_requests_running{tier=batch}": 2,
        "tier_requests_waiting{tier=batch}": 5,
        "tier_requests_swapped{tier=batch}": 3,
        "refused_requests_total{code=shed,tier=batch}": 4,
        "refused_requests_total{code=queue_full,tier=batch}": 0,
        "refused_requests_total{code=context_length_exceeded,tier=batch}": 1,
        "tier_preemptions_total{kind=swap,tier=batch}": 3,
        "tier_preemptions_total{kind=recompute,tier=batch}": 2,
        "admission_preemptions_total{tier=batch}": 4,
        "finished_requests_total{tier=batch}": 6,
        "predicted_output_tokens_total{tier=batch}": 600,
        "actual_output_tokens_total{tier=batch}": 540,
        "swapped_blocks_total{direction=out}": 30,
        "swapped_blocks_total{direction=in}": 20,
        "host_blocks{state=pinned}": 10,
        "host_blocks{state=cached}": 11,
        "host_blocks{state=free}": 12,
        "host_cache_hits_total": 64,
        "disk_cache_hits_total": 32,
        "disk_blocks": 7,
        "disk_errors_total": 2,
        "disk_failed": 1,
        "kv_reservation": 0.125,
        "predicted_step_seconds": 0.02,
        "engine_warnings": 1,
    }
    assert {name: values[f"ropeway_{name}"] for name in expected} == expected
    del health["since"]
    assert health == {"status": "ok", "disk_failure": "the folder is read-only"}


def test_what_was_configured_and_cannot_be_had_is_told_by_health_and_metrics() -> None:
    warning = "there is no swap_space: 400 GiB asked, 3 GiB available"
    with serving(ScriptedEngine(warnings=[warning])) as served, httpx.Client(base_url=served.url) as http:
        assert http.get("/health").json()["warnings"] == [warning]
        assert scrape(http)["ropeway_engine_warnings"] == 1
