"""Spans of a real server under load, preempted requests among them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.test_serving import complete, ids
from tests.support.chat_model import tiny_chat_model
from tests.support.otlp_collector import Collector
from tests.support.server_process import ServerProcess


def test_spans_tell_the_phases_of_requests_that_were_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    flags = ("--kv-blocks", "20", "--max-num-seqs", "6", "--admission", "greedy")  # so that it has to preempt
    with (
        Collector() as collector,
        ServerProcess(tiny_chat_model(), *flags, "--otlp-endpoint", collector.url) as server,
        server.client() as client,
        ThreadPoolExecutor(6) as pool,
    ):
        answers = pool.map(lambda seed: complete(client, ids(seed, 40), max_tokens=100), range(6))
        usages = {answer.id: answer.usage for answer in answers}
        told = collector.requests(6)
        recomputed = server.metric("ropeway_num_preemptions_total")
    preempted = 0
    for each in told:
        attributes = each.span.attributes
        usage = usages[attributes["gen_ai.response.id"]]
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            attributes["gen_ai.usage.input_tokens"],
            attributes["gen_ai.usage.output_tokens"],
        )
        assert (each.span.name, each.span.error) == ("text_completion tiny", None)
        count = attributes.get("ropeway.preemptions.recompute", 0)
        phases = ["queued", "prefill", "decode", *(["preempted"] if count else [])]
        assert [child.name for child in each.children] == phases
        for one, next_one in zip(each.children, each.children[1:], strict=False):
            assert one.end_s == next_one.begin_s
        assert each.span.begin_s <= each.children[0].begin_s
        assert each.children[-1].end_s <= each.span.end_s
        preempted += count
    assert preempted == recomputed > 0
