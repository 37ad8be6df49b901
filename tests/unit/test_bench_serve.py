"""The load generator, against servers over HTTP: what it sends, when, and how it counts what comes back."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from ropeway.bench.latencies import Status, Targets
from ropeway.bench.serve import Endpoint, Outcome, read_load, run_load
from ropeway.bench.workload import WorkloadRequest, write_workload
from ropeway.cli.bench import app
from ropeway.errors import ConfigError
from ropeway.outcome import Refusal
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served import Served, serving
from tests.support.server_process import free_port

VOCABULARY = 400
TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with serving(ScriptedEngine(max_num_seqs=8, max_queue=8)) as served:
        yield served


@pytest.fixture
def server(shared: Served) -> Iterator[Served]:
    shared.engine.reset()
    yield shared
    assert shared.idle()


def load(server: Served, requests: Sequence[WorkloadRequest], **how) -> Outcome:
    return run_load(Endpoint(url=server.url), requests, vocab_size=VOCABULARY, **how)


def together(outcome: Outcome) -> int:
    """Most requests under way at once."""
    recorder = outcome.recorder
    events = sorted([*((at, 1) for at in recorder.arrival_s), *((at, -1) for at in recorder.ended_s)])
    return int(np.cumsum([change for _, change in events]).max())


# ---------------------------------------------------------------------- what is sent


def test_prompts_go_as_token_ids_with_exactly_the_output_asked_for(server):
    requests = [WorkloadRequest(5, 4), WorkloadRequest(3, 200), WorkloadRequest(2, 1, prompt_token_ids=(7, 8))]
    outcome = load(server, requests, seed=3)
    sent = {len(prompt): (prompt, params) for prompt, params, _ in server.engine.submitted}
    assert sent[5][0] == requests[0].prompt(0, VOCABULARY, 3).tolist()
    assert sent[2][0] == [7, 8]
    assert [sent[length][1].max_tokens for length in (5, 3, 2)] == [4, 200, 1]
    assert all(params.ignore_eos and params.temperature == 0 for _, params in sent.values())
    # The script ends after some 80 tokens; the answers go on.
    assert outcome.recorder.output_tokens.tolist() == [4, 200, 1]
    assert (outcome.recorder.status == Status.OK).all()
    assert outcome.figures(Targets())["short_answers"] == 0


def test_prompts_of_a_trace_share_the_blocks_of_their_hash_ids():
    requests = [WorkloadRequest(600, 1, hash_ids=(1, 2)), WorkloadRequest(700, 1, hash_ids=(1, 3))]
    with serving(ScriptedEngine()) as server:
        load(server, requests)
        first, second = sorted((prompt for prompt, _, _ in server.engine.submitted), key=len)
    assert (len(first), len(second)) == (600, 700)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]


def test_tier_and_tenant_are_told_to_the_server(server):
    requests = [
        WorkloadRequest(1, 1, tier="interactive", tenant="alice"),
        WorkloadRequest(2, 1, tier="batch"),
        WorkloadRequest(3, 1, tier="-1"),
        WorkloadRequest(4, 1),
    ]
    outcome = load(server, requests)
    told = {len(prompt): options for prompt, _, options in server.engine.submitted}
    assert [told[length].tier for length in (1, 2, 3, 4)] == [0, 2, 0, 1]
    assert [told[length].tenant for length in (1, 2)] == ["alice", ""]
    assert set(outcome.figures(Targets())["tiers"]) == {"interactive", "batch", "-1", "default"}


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/v1/completions"])
def test_an_address_may_end_as_other_clients_want_it(server, ending):
    outcome = run_load(Endpoint(url=server.url + ending), [WorkloadRequest(1, 1)], vocab_size=VOCABULARY)
    assert outcome.model == "scripted"
    assert outcome.recorder.output_tokens.tolist() == [1]


# ---------------------------------------------------------------------- when it is sent


def test_an_open_loop_sends_at_the_arrival_times_whatever_the_server_does(server):
    server.engine.first_delay_s = 0.8
    arrivals = np.array([0.2, 0.0, 0.1])
    outcome = load(server, [WorkloadRequest(1, 1, at) for at in arrivals])
    late = outcome.recorder.arrival_s - arrivals
    assert late.min() >= 0
    assert late.max() < 0.4
    assert together(outcome) == 3
    assert len(outcome.lag_s) == 3
    assert 0 <= outcome.figures(Targets())["send_lag_s"]["p99"] <= late.max()


def test_a_closed_loop_keeps_its_number_of_users_busy(server):
    server.engine.first_delay_s = 0.02
    outcome = load(server, [WorkloadRequest(1, 2, arrival_s=100.0)] * 12, concurrency=3)
    assert together(outcome) == 3
    assert (outcome.recorder.status == Status.OK).all()
    assert outcome.figures(Targets())["send_lag_s"] is None


def test_a_refused_user_waits_as_long_as_the_server_asks(server):
    server.engine.refusal = Refusal("Shed", "too busy", retry_after_s=1.0)
    outcome = load(server, [WorkloadRequest(1, 1)] * 2, concurrency=1)
    first, second = outcome.recorder.arrival_s
    assert second - first >= 1.0


# ---------------------------------------------------------------------- what is counted


def test_first_tokens_and_gaps_are_those_of_the_server(server):
    server.engine.first_delay_s, server.engine.delay_s = 0.15, 0.03
    outcome = load(server, [WorkloadRequest(4, 11)] * 3)
    result = outcome.figures(Targets(ttft_s=1.0, tpot_s=0.01))
    # Sleeps on a busy machine are longer than asked for, never shorter.
    assert 0.15 <= result["ttft_s"]["p50"] < 0.8
    assert 0.03 <= result["tpot_s"]["p50"] < 0.15
    assert 0.03 <= result["itl_s"]["mean"] < 0.15
    assert result["e2e_s"]["mean"] == pytest.approx(result["ttft_s"]["mean"] + 10 * result["tpot_s"]["mean"])
    assert (result["completed"], result["met"]) == (3, 0)
    assert result["input_tokens"] == 12


def test_429_is_shed_with_its_retry_after_and_stays_in_the_denominator(server):
    server.engine.refusal = Refusal("Shed", "too busy", retry_after_s=2.5)
    server.engine.accepts = 1
    outcome = load(server, [WorkloadRequest(1, 1)] * 4)
    result = outcome.figures(Targets())
    assert (result["completed"], result["shed"], result["failed"]) == (1, 3, 0)
    assert result["attainment"] == 0.25
    assert result["retry_after_s"]["mean"] == 3.0
    assert result["failures"] == {}


def test_a_full_queue_sheds_too(server):
    server.engine.first_delay_s = 1.0
    outcome = load(server, [WorkloadRequest(1, 1)] * 20)
    assert (outcome.recorder.status == Status.SHED).sum() == 4
    assert (outcome.recorder.status == Status.OK).sum() == 16


def test_failures_are_counted_by_message_numbers_aside(server):
    outcome = load(server, [WorkloadRequest(2000 + i, 1) for i in range(3)] + [WorkloadRequest(1, 1, tier="gold")])
    result = outcome.figures(Targets())
    assert (result["failed"], sorted(result["failures"].values())) == (4, [1, 3])
    messages = sorted(result["failures"])
    assert messages[0].startswith("400: ")
    assert any("1024 tokens" in message for message in messages)
    assert any("no tier 'gold'" in message for message in messages)


def test_an_answer_that_fails_on_its_way_is_a_failure_with_the_tokens_it_had(server):
    server.engine.fail_after = 2
    outcome = load(server, [WorkloadRequest(1, 5)])
    assert outcome.recorder.status.tolist() == [Status.FAILED]
    assert outcome.recorder.output_tokens.tolist() == [2]
    ((message, _),) = outcome.failures.items()
    assert "the server said in its answer: " in message
    assert "scripted failure" in message


def test_a_server_that_says_nothing_for_too_long_is_a_failure(server):
    server.engine.first_delay_s = 5.0
    outcome = run_load(Endpoint(url=server.url, timeout_s=0.2), [WorkloadRequest(1, 1)], vocab_size=VOCABULARY)
    assert dict(outcome.failures) == {"nothing came for 0.2 s": 1}
    assert outcome.recorder.ended_s[0] < 4.0


# ---------------------------------------------------------------------- other servers


@contextlib.contextmanager
def canned(answer: bytes, *, models: bytes = b'{"data": [{"id": "canned"}]}') -> Iterator[str]:
    """A server that gives the same answer to everything posted, in pieces of 7 bytes, then closes the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._send(answer)

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            for at in range(0, len(body), 7):
                self.wfile.write(body[at : at + 7])
                self.wfile.flush()

        def log_message(self, *what: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chunk(text: str | None, finish: str | None = None, **more) -> bytes:
    body = {"choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}], **more}
    return b"data: " + json.dumps(body).encode() + b"\r\n\r\n"


def answered(answer: bytes) -> Outcome:
    with canned(answer) as url:
        return run_load(Endpoint(url=url), [WorkloadRequest(1, 5)])


def test_without_token_ids_pieces_are_timed_and_the_usage_counts_the_tokens():
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 5}}\n\n'
    outcome = answered(
        chunk("a") + b": ping\n\n" + chunk("b\u00fc") + chunk("", "length") + usage + b"data: [DONE]\n\n"
    )
    assert outcome.model == "canned"
    assert outcome.recorder.status.tolist() == [Status.OK]
    assert outcome.recorder.output_tokens.tolist() == [5]
    assert outcome.recorder.gaps[0].count == 1


def test_a_short_answer_is_told():
    outcome = answered(chunk("a") + chunk("b", "stop") + b"data: [DONE]\n\n")
    assert outcome.recorder.output_tokens.tolist() == [2]
    assert outcome.figures(Targets())["short_answers"] == 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (chunk("a") + chunk("b"), "the answer broke off"),
        (b'{"choices": [{"text": "not streamed"}]}', "the answer broke off"),
        (b"", "the answer broke off"),
        (chunk("a") + b"data: {oops\n\n", "what is no chunk of a completion"),
        (chunk("a") + b'data: {"error": {"message": "out of luck"}}\n\ndata: [DONE]\n\n', "answer: out of luck"),
        (b'data: {"error": "out of luck"}\n\n', "answer: out of luck"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure(answer, told):
    outcome = answered(answer)
    assert outcome.recorder.status.tolist() == [Status.FAILED]
    ((message, _),) = outcome.failures.items()
    assert told in message


@pytest.mark.parametrize(
    ("models", "told"), [(b"[]", "does not answer with a list of models"), (b'{"data": []}', "names no model")]
)
def test_a_server_without_a_model_list_needs_the_name(models, told):
    with canned(chunk("a", "stop"), models=models) as url:
        with pytest.raises(ConfigError, match=f"{told}.*name the model"):
            run_load(Endpoint(url=url), [WorkloadRequest(1, 1)])
        assert run_load(Endpoint(url=url, model="m"), [WorkloadRequest(1, 1)]).recorder.status.tolist() == [Status.OK]


def test_no_server_at_the_address_is_an_error_and_with_a_named_model_a_failure_of_each_request():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=r"does not answer \(ConnectError.*is the server running"):
        run_load(Endpoint(url=url), [WorkloadRequest(1, 1)])
    outcome = run_load(Endpoint(url=url, model="m"), [WorkloadRequest(1, 1)] * 2)
    ((message, count),) = outcome.failures.items()
    assert message.startswith("ConnectError")
    assert count == 2


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://[::1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="is no address"):
        run_load(Endpoint(url=url), [WorkloadRequest(1, 1)])


def test_a_load_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="holds no request"):
        run_load(Endpoint(url="http://127.0.0.1:1"), [])


def test_an_api_key_is_sent_and_a_missing_one_is_told():
    with serving(ScriptedEngine(), api_key="secret") as server:
        with pytest.raises(ConfigError, match=r"answers 401.*give its API key"):
            load(server, [WorkloadRequest(1, 1)])
        outcome = run_load(Endpoint(url=server.url, api_key="secret"), [WorkloadRequest(1, 1)], vocab_size=VOCABULARY)
        assert outcome.recorder.status.tolist() == [Status.OK]


# ---------------------------------------------------------------------- reading a load

CODE = TRACES / "azure2023_code.csv"


@pytest.fixture
def workload(tmp_path) -> Path:
    path = tmp_path / "w.jsonl"
    write_workload(
        path, [WorkloadRequest(2, 1, 6.0), WorkloadRequest(1, 1, 2.0), WorkloadRequest(3, 1, 4.0, (1, 2, 3))]
    )
    return path


def test_a_trace_comes_as_recorded_from_its_first_request_on():
    recorded = read_load(None, [TRACES / "azure2023_conv_part2.csv"])
    assert recorded[0].arrival_s == 0.0
    assert recorded[-1].arrival_s == pytest.approx(3501.722 - 3057.017)
    faster = read_load(None, [TRACES / "azure2023_conv_part2.csv"], rate_scale=2.0, requests=100)
    assert len(faster) == 100
    assert faster[99].arrival_s == pytest.approx(recorded[99].arrival_s / 2)


def test_a_workload_keeps_its_prompts_whatever_becomes_of_its_times(workload):
    assert [each.prompt_tokens for each in read_load(workload)] == [1, 3, 2]
    assert [each.arrival_s for each in read_load(workload)] == [2.0, 4.0, 6.0]
    assert [each.arrival_s for each in read_load(workload, rate_scale=2.0)] == [1.0, 2.0, 3.0]
    at_rate = read_load(workload, rate=10.0, seed=1)
    assert at_rate[1].prompt_token_ids == (1, 2, 3)
    assert at_rate[0].arrival_s == 0.0
    assert at_rate == read_load(workload, rate=10.0, seed=1)


def test_lengths_alone_need_a_rate_or_a_concurrency():
    lengths = [TRACES / "arxiv_summarization_lengths.csv"]
    with pytest.raises(ConfigError, match="give a rate in requests per second, or a concurrency"):
        read_load(None, lengths)
    assert len(read_load(None, lengths, rate=5.0)) == len(read_load(None, lengths, concurrency=2)) == 14129


def test_a_tier_for_all_goes_before_what_the_file_says(tmp_path):
    write_workload(tmp_path / "w.jsonl", [WorkloadRequest(1, 1, tier="batch"), WorkloadRequest(1, 1)])
    assert {each.tier for each in read_load(tmp_path / "w.jsonl", tier="interactive")} == {"interactive"}


@pytest.mark.parametrize("both", [("rate", "rate_scale"), ("rate", "concurrency"), ("rate_scale", "concurrency")])
def test_what_says_when_requests_come_is_said_once(both):
    with pytest.raises(ConfigError, match="exclude each other"):
        read_load(None, [CODE], **dict.fromkeys(both, 1))


def test_a_load_is_a_workload_or_a_trace(workload):
    for files in ((None, []), (workload, [CODE])):
        with pytest.raises(ConfigError, match="give one of them"):
            read_load(*files)


@pytest.mark.parametrize("shape", [{"rate": 0.0}, {"rate_scale": 0.0}, {"rate_scale": -1.0}])
def test_rates_must_be_above_zero(shape):
    with pytest.raises(ConfigError, match="must be above 0"):
        read_load(None, [CODE], **shape)


def test_more_requests_than_a_workload_holds_are_refused(workload):
    with pytest.raises(ConfigError, match=r"4 requests were asked of .* which holds 3"):
        read_load(workload, requests=4)


# ---------------------------------------------------------------------- the command


def bench_serve(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_prints_figures_and_writes_both_reports(server, workload, tmp_path):
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    result = bench_serve(
        *(server.url, "--workload", workload, "--rate", "50", "--vocab-size", VOCABULARY, "--tier", "batch"),
        *("--slo-ttft", "5", "--slo-itl", "1", "--json", report, "--html", page),
    )
    assert result.exit_code == 0, result.output
    assert "scripted at" in result.output
    assert "100.0%" in result.output
    figures = json.loads(report.read_text())
    assert (figures["requests"], figures["completed"], figures["attainment"]) == (3, 3, 1.0)
    assert figures["tiers"]["batch"]["ttft_s"].keys() == {"mean", "p50", "p90", "p99"}
    assert {name: figures["load"][name] for name in ("model", "rate", "tier", "slo_ttft", "slo_itl", "seed")} == {
        "model": "scripted",
        "rate": 50.0,
        "tier": "batch",
        "slo_ttft": 5.0,
        "slo_itl": 1.0,
        "seed": 0,
    }
    assert "cores" in figures["machine"]
    assert "Requests under way" in page.read_text()


def test_the_command_fails_when_no_request_was_answered(server, workload):
    result = bench_serve(server.url, "--workload", workload, "--concurrency", "1", "--tier", "gold")
    assert result.exit_code == 1
    assert "3 failed: 400: " in result.output


def test_the_command_refuses_bad_input_in_one_line_before_anything_is_sent(server, workload, tmp_path):
    for arguments, told in (
        (("--workload", workload, "--trace", CODE), "give one of them"),
        (("--trace", tmp_path / "none.csv"), "cannot be read"),
        (("--workload", workload, "--html", tmp_path), "cannot write to"),
        (("--workload", workload, "--slo-ttft", "0"), "--slo-ttft must be above 0"),
    ):
        result = bench_serve(server.url, *arguments)
        assert result.exit_code in (1, 2)
        assert told in result.output
        assert "Traceback" not in result.output
    assert server.engine.submitted == []
