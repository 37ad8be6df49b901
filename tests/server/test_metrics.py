"""/metrics"""

from __future__ import annotations

import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ropeway.engine.messages import Stats
from tests.server.asking import CHAT, COMPLETIONS, chat_body, completion_body, stream
from tests.support.served import Served

DOCUMENTED = (
    "ropeway_num_requests_running",
    "ropeway_num_requests_waiting",
    "ropeway_time_to_first_token_seconds_count",
    "ropeway_inter_token_latency_seconds_count",
    "ropeway_e2e_request_latency_seconds_count",
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
    assert difference(before, after, "ropeway_e2e_request_latency_seconds_count") == 10
    assert difference(before, after, "ropeway_time_to_first_token_seconds_count") == 10
    assert difference(before, after, "ropeway_generation_tokens_total") == 10 * 3 * 4
    assert difference(before, after, "ropeway_inter_token_latency_seconds_count") == 10 * 3 * 3


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
        count = difference(before, after, f"ropeway_{name}_seconds_count")
        return difference(before, after, f"ropeway_{name}_seconds_sum") / count

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
