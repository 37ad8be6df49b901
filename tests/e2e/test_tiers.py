"""Tiers, preemption, host memory and disk on the whole line: real servers over a tiny model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.test_lifecycle import refusal
from tests.e2e.test_serving import complete, ids, token_ids
from tests.support.chat_model import tiny_chat_model
from tests.support.server_process import ServerProcess

TIERS = """\
[[tier]]
name = "gold"
weight = 6
preemptible = false

[[tier]]
name = "rush"
weight = 3
ttft_s = 0.002

[[tier]]
name = "bulk"
weight = 0
max_queue = 3
queue_limit_s = 0.1
"""


def explain(server: ServerProcess, name: str) -> dict[str, Any]:
    response = httpx.get(f"{server.url}/v1/requests/{name}", timeout=10)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    assert sum(body["parts"].values()) == pytest.approx(body["e2e_s"], rel=0.01)
    return body


def of_tier(tier: str, **extra: Any) -> dict[str, Any]:
    return {"extra": {"priority": tier, **extra}, "temperature": 0}


# --------------------------------------------------------------------------- a small pool with host memory below it


@pytest.fixture(scope="module")
def swapping() -> Iterator[ServerProcess]:
    """20 blocks of 16 for everybody, and room for every copy."""
    flags = ("--kv-blocks", "20", "--max-num-seqs", "6", "--admission", "greedy", "--swap-space", "0.05")
    with ServerProcess(tiny_chat_model(), *flags, "--preemption", "swap") as server:
        yield server


@pytest.mark.report("vllm-project/vllm#15996")
@pytest.mark.report("vllm-project/vllm#31210")
@pytest.mark.report("vllm-project/vllm#23347")
def test_swapped_answers_equal_those_given_alone_and_tell_how_long_they_were_away(swapping: ServerProcess) -> None:
    fields = {"max_tokens": 150, "temperature": 0, "frequency_penalty": 1.5}
    prompts = [ids(seed, 40) for seed in range(12)]
    tiers = ["batch", "standard", "interactive"] * 4
    with swapping.client() as client, ThreadPoolExecutor(12) as pool:
        alone = [complete(client, prompt, **fields) for prompt in prompts]

        def ask(place: int, apart_s: float) -> openai.types.Completion:
            time.sleep(apart_s * place)
            return complete(client, prompts[place], extra={"priority": tiers[place]}, **fields)

        for apart_s in (0.02, 0.01, 0.005, 0.002):  # until those of higher tiers come while lower ones still run
            together = list(pool.map(ask, range(12), [apart_s] * 12))
            assert [token_ids(answer) for answer in together] == [token_ids(answer) for answer in alone]
            if (swaps := swapping.metric("ropeway_tier_preemptions_total")) > 0:
                break
    assert swaps > 0
    told = [explain(swapping, answer.id) for answer in together]
    assert sum(sum(each["preemptions"].values()) for each in told) == swaps
    swapped = [each for each in told if each["preemptions"].get("swap")]
    assert swapped
    for each in told:
        assert (each["parts"]["swapped_s"] > 0) == bool(each["preemptions"].get("swap"))
    assert swapping.metric('ropeway_swapped_blocks_total{direction="in"}') > 0
    swapping.until('ropeway_host_blocks{state="pinned"}', 0)
    swapping.until('ropeway_kv_blocks{state="live"}', 0)


def test_the_parts_of_a_real_request_sum_to_what_its_client_measured_within_one_percent(
    swapping: ServerProcess,
) -> None:
    def ask(client: httpx.Client) -> tuple[float, float]:
        body = {"model": "tiny", "prompt": ids(77, 60), "max_tokens": 250, "ignore_eos": True}
        began = time.monotonic()
        response = client.post(f"{swapping.url}/v1/completions", json=body)
        wall_s = time.monotonic() - began
        told = explain(swapping, response.json()["id"])
        assert (told["output_tokens"], told["phase"]) == (250, "finished")
        named = [part.split(";dur=") for part in response.headers["server-timing"].split(", ")]
        assert {name: float(ms) / 1000 for name, ms in named} == pytest.approx(
            {name.removesuffix("_s"): seconds for name, seconds in told["parts"].items()}, abs=1e-5
        )
        return sum(told["parts"].values()), wall_s

    # Four at once are too many for the blocks, so that a request takes long beside the way to the engine and back; and
    # the client may lose the processor before it looks at the clock.
    with httpx.Client(timeout=30) as client, ThreadPoolExecutor(4) as pool:
        tries = list(pool.map(ask, [client] * 12))
    assert any(told == pytest.approx(wall, rel=0.01) for told, wall in tries), tries


def test_answers_that_a_stop_string_or_their_client_ended_are_explained_too(swapping: ServerProcess) -> None:
    with swapping.client() as client:
        text = complete(client, ids(3, 20), max_tokens=60, temperature=0).choices[0].text
        stop = text[len(text) // 2 :][:4]
        stopped = complete(client, ids(3, 20), max_tokens=60, temperature=0, stop=[stop])
        assert stopped.choices[0].finish_reason == "stop"
        told = explain(swapping, stopped.id)
        assert told["phase"] == "finished"
        assert told["parts"]["decode_s"] > 0
        headers = {"X-Request-Id": "left"}
        body = {"model": "tiny", "prompt": ids(4, 20), "max_tokens": 250, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{swapping.url}/v1/completions", json=body, headers=headers) as response:
            next(response.iter_lines())
            under_way = explain(swapping, "left")
    assert under_way["phase"] in ("decode", "finished")
    swapping.until("ropeway_num_requests_running", 0)
    left = explain(swapping, "left")
    assert left["phase"] == "finished"
    assert left["e2e_s"] < 5


# --------------------------------------------------------------------------- two seats and tiers of one's own


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("tiers") / "tiers.toml"
    path.write_text(TIERS)
    with ServerProcess(tiny_chat_model(), "--max-num-seqs", "2", "--tiers", str(path)) as server:
        yield server


def keep_busy(server: ServerProcess, tier: str, into: list[openai.types.Completion]) -> list[threading.Thread]:
    """Two long requests of a tier that take both seats."""

    def ask(seed: int) -> None:
        with server.client() as client:
            into.append(complete(client, ids(seed, 20), max_tokens=1500, **of_tier(tier)))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    server.until("ropeway_num_requests_running", 2)
    return threads


@pytest.mark.report("vllm-project/vllm#45561")
def test_a_higher_tier_takes_the_seat_of_a_lower_one_which_loses_no_token(tiered: ServerProcess) -> None:
    with tiered.client() as client:
        alone = {seed: token_ids(complete(client, ids(seed, 20), max_tokens=1500, temperature=0)) for seed in (1, 2)}
        answers: list[openai.types.Completion] = []
        threads = keep_busy(tiered, "bulk", answers)
        urgent = complete(client, ids(9, 10), max_tokens=3, **of_tier("gold"))
        assert any(thread.is_alive() for thread in threads), "both had ended before"
        for thread in threads:
            thread.join()
    assert tiered.metric('ropeway_admission_preemptions_total{tier="bulk"}') >= 1
    assert sorted(map(token_ids, answers)) == sorted(alone.values())
    told = explain(tiered, urgent.id)
    assert told["tier"] == "gold"
    assert told["preemptions"] == {}
    assert sum(sum(explain(tiered, answer.id)["preemptions"].values()) for answer in answers) >= 1


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_would_miss_its_target_is_shed_with_a_time_to_come_back(
    tiered: ServerProcess, streamed: bool
) -> None:
    shed = 'ropeway_refused_requests_total{code="shed",tier="rush"}'
    before = tiered.metric(shed)
    body = {"model": "tiny", "prompt": ids(5, 40), "max_tokens": 3, "priority": "rush", "stream": streamed}
    for _ in range(5):  # a seat may be free again before it comes
        threads = keep_busy(tiered, "gold", [])
        response = httpx.post(f"{tiered.url}/v1/completions", json=body, headers={"X-Request-Id": "shed"}, timeout=10)
        for thread in threads:
            thread.join()
        if response.status_code != 200:
            break
    assert response.status_code == 429, response.text
    assert response.json()["error"]["code"] == "shed"
    assert int(response.headers["retry-after"]) >= 1
    assert explain(tiered, "shed")["error"] == "shed"
    tiered.until(shed, before + 1)


def test_queue_bounds_queue_limits_and_deadlines_have_statuses_of_their_own(tiered: ServerProcess) -> None:
    def ask(number: int, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": ids(number, 10), "max_tokens": 3, "priority": "bulk", **fields}
        return httpx.post(f"{tiered.url}/v1/completions", json=body, timeout=20)

    threads = keep_busy(tiered, "gold", [])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(6)))
    for thread in threads:
        thread.join()
    codes = [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200]
    assert codes.count("queue_full") == 3
    assert codes.count("queue_timeout") >= 1
    assert {answer.status_code for answer in answers} <= {429, 503, 200}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code != 200)
    late = ask(9, max_tokens=1900, ignore_eos=True, timeout=0.1)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    with httpx.stream(
        "POST",
        f"{tiered.url}/v1/completions",
        json={"model": "tiny", "prompt": [5], "max_tokens": 1900, "ignore_eos": True, "stream": True},
        headers={"X-Ropeway-Timeout": "0.1"},
    ) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert '"deadline_exceeded"' in lines[-1]
    tiered.until('ropeway_kv_blocks{state="live"}', 0)


@pytest.mark.parametrize("header", [False, True])
def test_an_unknown_tier_is_refused_naming_those_there_are(tiered: ServerProcess, header: bool) -> None:
    body = {"model": "tiny", "prompt": [5], **({} if header else {"priority": "interactive"})}
    headers = {"X-Ropeway-Tier": "interactive"} if header else {}
    response = httpx.post(f"{tiered.url}/v1/completions", json=body, headers=headers)
    assert response.status_code == 400
    for word in ("interactive", "gold, rush, bulk"):
        assert word in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TIERS.replace("queue_limit_s = 0.1", "queue_limit_s = 0.1\nttft_s = 2"), ["bulk", "ttft_s 2", "contradict"]),
        (TIERS.replace("ttft_s = 0.002", "ttft_s = 0"), ["rush", "ttft_s", "above 0"]),
        (TIERS.replace('"bulk"', '"gold"'), ["tier 3", "'gold'", "twice"]),
    ],
)
def test_contradictory_targets_are_told_in_the_last_line_before_the_model_is_loaded(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(text)
    code, line, _ = refusal("serve", "/no/such/model", "--port", "0", "--tiers", str(path))
    assert code == 1
    for word in (str(path), *words):
        assert word in line


# --------------------------------------------------------------------------- below the device


def test_swap_space_larger_than_memory_is_told_and_the_server_serves_without() -> None:
    with ServerProcess(tiny_chat_model(), "--swap-space", "100000", "--kv-blocks", "64") as server:
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 200
        (warning,) = health.json()["warnings"]
        assert "swap_space 100000" in warning
        assert server.metric("ropeway_engine_warnings") == 1
        assert server.metric("ropeway_host_blocks") == 0
        assert warning in server.log()
        with server.client() as client:
            assert complete(client, [5, 6], max_tokens=4).choices[0].finish_reason == "length"


def cached_tokens(answer: openai.types.Completion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_prefix_on_disk_outlives_the_server(tmp_path: Path) -> None:
    flags = ("--disk-cache", str(tmp_path / "kv"), "--swap-space", "0.05", "--kv-blocks", "128")

    def run() -> tuple[list[int], int, float]:
        """(tokens, cached tokens, tokens found on disk) of a prompt on a fresh server that ends when all is kept."""
        with ServerProcess(tiny_chat_model(), *flags) as server, server.client() as client:
            answer = complete(client, ids(1, 100), max_tokens=20, temperature=0)
            server.until("ropeway_disk_blocks", 7, within_s=10)
            hits = server.metric("ropeway_disk_cache_hits_total")
            server.terminate()
            assert server.process.wait(20) == 0
            return token_ids(answer), cached_tokens(answer), hits

    first = run()
    assert first[1:] == (0, 0)
    assert run() == (first[0], 96, 96)


def test_a_disk_cache_that_cannot_be_used_is_told_and_the_server_serves_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    folder = tmp_path / "file" / "kv"
    flags = ("--disk-cache", str(folder), "--swap-space", "0.05", "--kv-blocks", "128")
    with ServerProcess(tiny_chat_model(), *flags) as server, server.client() as client:
        for _ in range(2):
            assert complete(client, ids(1, 100), max_tokens=4).choices[0].finish_reason == "length"
        server.until("ropeway_disk_failed", 1)
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 200
        assert str(folder) in health.json()["disk_failure"]
        assert server.metric("ropeway_engine_warnings") == 1
        assert str(folder) in server.log()
