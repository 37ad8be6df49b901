"""Traces: what the files say, what can be done with them, and how they say that they are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropeway.bench.traces import Trace, read_trace
from ropeway.bench.workload import HASH_BLOCK, read_workload, write_workload
from ropeway.errors import ConfigError

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
CONVERSATION = [TRACES / "mooncake_conversation_full_part1.csv", TRACES / "mooncake_conversation_full_part2.csv"]
AZURE = [TRACES / "azure2023_conv_part1.csv", TRACES / "azure2023_conv_part2.csv"]


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def read(path: Path) -> Trace:
    return read_trace([path])


def refusal(path: Path, *more: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        read_trace([path, *more])
    return refused.value.message


# ---------------------------------------------------------------------- formats


def test_a_csv_file_gives_seconds_and_lengths(file):
    trace = read(file("arrival_s,input_tokens,output_tokens\n0.5,374,44\n\n4.315,396,109\n"))
    assert trace.arrival_s.dtype == np.float64
    assert trace.input_tokens.dtype == trace.output_tokens.dtype == np.int64
    assert trace.arrival_s.tolist() == [0.5, 4.315]
    assert trace.input_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert (trace.hash_ids, trace.tier, trace.tenant, trace.measured) == (None, None, None, None)


def test_milliseconds_become_seconds_and_ranges_of_hash_ids_their_ids(file):
    trace = read(file("timestamp_ms,input_tokens,output_tokens,hash_id_ranges\n0,1025,500,0 14-15\n40,512,4,7\n"))
    assert trace.arrival_s.tolist() == [0.0, 0.04]
    assert trace.hash_ids == [(0, 14, 15), (7,)]


def test_mooncakes_jsonl_is_known_by_its_content_not_by_its_name(file):
    line = '{"timestamp": 2500, "input_length": 600, "output_length": 5, "hash_ids": [3, 9]}\n'
    trace = read(file(line, "trace.csv"))
    assert (trace.arrival_s.tolist(), trace.hash_ids) == ([2.5], [(3, 9)])


def test_a_measured_run_keeps_its_times(file):
    trace = read(
        file(
            "request_id,input_tokens,output_tokens,arrival_s,queued_s,scheduled_s,first_token_s,last_token_s\n"
            "bench-0,2358,531,1.0,1.1,1.2,1.5,17.5\n"
        )
    )
    measured = trace.measured
    times = (measured.queued_s, measured.scheduled_s, measured.first_token_s, measured.last_token_s)
    assert [column.tolist() for column in times] == [[1.1], [1.2], [1.5], [17.5]]


def test_tiers_and_tenants_are_names(file):
    trace = read(file("arrival_s,input_tokens,output_tokens,tier,tenant\n0,1,1,batch,a\n0,1,1,interactive,b\n"))
    assert trace.tier == ["batch", "interactive"]
    assert trace.tenant == ["a", "b"]


def test_lengths_alone_have_no_times_until_they_get_a_rate(file):
    trace = read(file("input_tokens,output_tokens\n3772,54\n3858,133\n"))
    assert trace.arrival_s is None
    with pytest.raises(ConfigError, match="give a rate"):
        trace.scaled(2.0)
    assert trace.at_rate(2.0).arrival_s.shape == (2,)
    assert [request.arrival_s for request in trace.workload()] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("files", "rows", "mean_input"),
    [
        (AZURE, 19366, 1155),
        ([TRACES / "azure2023_code.csv"], 8819, 2048),
        (CONVERSATION, 12031, 12035),
        ([TRACES / "mooncake_synthetic_full_part1.csv"], 3993, 15325),
        ([TRACES / "mooncake_conversation.jsonl"], 1311, 14037),
        ([TRACES / "mooncake_synthetic.jsonl"], 1457, 11648),
        ([TRACES / "arxiv_summarization_lengths.csv"], 14129, 2581),
        ([TRACES / "sharegpt300_llama-3.1-8b.csv"], 300, 857),
        ([TRACES / "sharegpt300_qwen3-32b.csv"], 300, 862),
        *(([path], 300, None) for path in sorted(TRACES.glob("measured*.csv")) if "timeseries" not in path.name),
    ],
    ids=lambda value: value[0].stem if isinstance(value, list) else None,
)
def test_every_shipped_trace_is_read(files, rows, mean_input):
    trace = read_trace(files)
    assert len(trace) == rows
    if mean_input is not None:
        assert round(trace.input_tokens.mean()) == mean_input
    assert (trace.measured is not None) == files[0].name.startswith("measured")
    assert trace.arrival_s is None or (np.diff(trace.arrival_s) >= 0).all()


@pytest.mark.parametrize(
    ("files", "share"), [(CONVERSATION, 0.3734), ([TRACES / "mooncake_synthetic_full_part1.csv"], 0.6504)]
)
def test_full_blocks_of_the_mooncake_traces_give_their_known_hit_rates(files, share):
    trace = read_trace(files)
    seen: set[int] = set()
    hit = 0
    for ids, tokens in zip(trace.hash_ids, trace.input_tokens.tolist(), strict=True):
        full = ids[: tokens // HASH_BLOCK]
        hit += HASH_BLOCK * next((place for place, each in enumerate(full) if each not in seen), len(full))
        seen.update(full)
    assert hit / trace.input_tokens.sum() == pytest.approx(share, abs=1e-4)


def test_both_forms_of_the_mooncake_trace_agree():
    short, full = read(TRACES / "mooncake_conversation.jsonl"), read_trace(CONVERSATION).take(1311)
    assert short.arrival_s.tolist() == full.arrival_s.tolist()
    assert short.input_tokens.tolist() == full.input_tokens.tolist()
    assert short.hash_ids == full.hash_ids


# ---------------------------------------------------------------------- bad input

HEAD = "arrival_s,input_tokens,output_tokens\n"
GOOD = HEAD + "1.0,10,2\n"


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("arrival_s,output_tokens", "input_tokens is missing"),
        ("arrival_s", "input_tokens, output_tokens are missing"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "it names TIMESTAMP, ContextTokens"),
        ("input_tokens,output_tokens,first_token_s", "arrival_s, queued_s, scheduled_s, last_token_s are missing"),
    ],
)
def test_missing_columns_are_named(file, header, named):
    message = refusal(file(f"{header}\n1,2,3\n"))
    assert "trace.csv line 1" in message
    assert named in message


def test_missing_fields_of_a_jsonl_line_are_named(file):
    message = refusal(file('{"timestamp": 0, "input_length": 5}\n', "t.jsonl"))
    assert "line 1" in message
    assert "output_length missing" in message
    assert "workload?" in refusal(file('{"prompt_tokens": 5, "output_tokens": 2}\n', "w.jsonl"))


def test_times_out_of_order_are_refused_with_both_lines(file):
    message = refusal(file(GOOD + "0.5,10,2\n"))
    assert "trace.csv line 3 arrives at 0.5 s, earlier than" in message
    assert "line 2, which arrives at 1.0 s" in message
    assert "sort the trace" in message


def test_parts_in_the_wrong_order_are_refused(file):
    message = refusal(*reversed(AZURE))
    assert "azure2023_conv_part1.csv line 2" in message
    assert "give its parts in order" in message


def test_negative_times_are_refused(file):
    message = refusal(file(HEAD + "-1,10,2\n"))
    assert "line 2: arrival_s is -1" in message
    assert "at least 0" in message


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("soon,10,2", "arrival_s is 'soon'"),
        (",10,2", "arrival_s is ''"),
        ("nan,10,2", "arrival_s is 'nan'"),
        ("inf,10,2", "arrival_s is 'inf'"),
        ("1e300,10,2", "arrival_s is '1e300'"),
        ("1,ten,2", "input_tokens is 'ten'"),
        ("1,10,2.5", "output_tokens is '2.5'"),
        ("1,10," + "9" * 5000, "output_tokens is '9999"),
    ],
)
def test_what_is_no_number_is_refused(file, row, told):
    message = refusal(file(f"{GOOD}{row}\n"))
    assert f"trace.csv line 3: {told}" in message
    assert "give a" in message


def test_json_values_that_are_no_numbers_are_refused(file):
    line = '{"timestamp": %s, "input_length": %s, "output_length": 5}\n'
    assert "timestamp is None" in refusal(file(line % ("null", "5")))
    assert "timestamp is True" in refusal(file(line % ("true", "5")))
    assert "timestamp is 1000" in refusal(file(line % ("1" + "0" * 400, "5")))
    assert "input_length is 5.5" in refusal(file(line % ("0", "5.5")))
    assert "input_length is [5]" in refusal(file(line % ("0", "[5]")))


@pytest.mark.parametrize("row", ["1,0,2", "1,10,0", "1,-3,2", "1,10,2147483648"])
def test_lengths_of_zero_or_out_of_range_are_refused(file, row):
    message = refusal(file(f"{HEAD}{row}\n"))
    assert "line 2" in message
    assert "must be from 1 to 2147483647" in message


@pytest.mark.parametrize("text", ["", "\n \n", HEAD, "\ufeff"])
def test_an_empty_file_is_refused(file, text):
    message = refusal(file(text))
    assert "trace.csv holds no request" in message


def test_an_empty_second_part_is_refused(file):
    message = refusal(file(GOOD), file(HEAD, "part2.csv"))
    assert "part2.csv holds no request" in message


def test_no_file_at_all_is_refused():
    with pytest.raises(ConfigError, match="no trace file was given"):
        read_trace([])


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "nothing.csv")
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(tmp_path / "t.csv")


RANGES = "timestamp_ms,input_tokens,output_tokens,hash_id_ranges\n"


@pytest.mark.parametrize(
    ("tokens", "ranges", "told"),
    [
        (1024, "0", "has 1 hash ids, but its input has 2 blocks of 512"),
        (1025, "0 1", "has 2 hash ids, but its input has 3 blocks of 512"),
        (512, "0-1", "has 2 hash ids, but its input has 1 blocks of 512"),
        (512, "", "has 0 hash ids, but"),
        (512, "0-999999999999999", "has 1000000000000000 hash ids"),
    ],
)
def test_hash_ids_that_do_not_match_the_length_are_refused(file, tokens, ranges, told):
    message = refusal(file(f"{RANGES}0,{tokens},2,{ranges}\n"))
    assert f"trace.csv line 2 {told}" in message
    assert "one id for each block" in message


def test_listed_hash_ids_that_do_not_match_the_length_are_refused(file):
    line = '{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": %s}\n'
    assert "has 1 hash ids, but its input has 2 blocks" in refusal(file(line % "[1]"))
    assert "hash_ids holds -1" in refusal(file(line % "[1, -1]"))
    assert "hash_ids is 7" in refusal(file(line % "7"))


@pytest.mark.parametrize("ranges", ["5-4", "x", "-3", "1-2-3", "1 .", "1" * 16, "٣"])
def test_a_malformed_range_of_hash_ids_is_refused(file, ranges):
    message = refusal(file(f"{RANGES}0,512,2,{ranges}\n"))
    assert "line 2: hash_id_ranges holds" in message
    assert "as in 0 14-27" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD + "2.0,10\n", "line 3 has 2 values; the first line names 3 columns"),
        (GOOD + "2.0,10,2,7\n", "line 3 has 4 values"),
        ("arrival_s,input_tokens,output_tokens,teir\n1,1,1,x\n", "unknown column 'teir'"),
        ("arrival_s,arrival_s,input_tokens,output_tokens\n1,1,1,1\n", "names a column twice"),
        ("arrival_s,timestamp_ms,input_tokens,output_tokens\n1,1,1,1\n", "both arrival_s and timestamp_ms"),
        ("arrival_s,input_tokens,output_tokens,tier\n1,1,1,\n", "tier is ''; it must be a name"),
        (GOOD + '2.0,"10,2\n', "is not valid CSV"),
        ("{", "line 1 is not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash": [1]}', "unknown field 'hash'"),
    ],
)
def test_what_is_no_line_of_a_trace_is_refused(file, text, told):
    assert told in refusal(file(text))


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ("5,5,5,4,6", "first_token_s is 4.0, before scheduled_s"),
        ("5,5,5,6,5.5", "last_token_s is 5.5, before first_token_s"),
        ("5,1,1,2,9", "first_token_s is 2.0, before arrival_s"),
    ],
)
def test_measured_times_that_contradict_each_other_are_refused(file, times, told):
    header = "input_tokens,output_tokens,arrival_s,queued_s,scheduled_s,first_token_s,last_token_s"
    assert f"line 2: {told}" in refusal(file(f"{header}\n7,7,{times}\n"))


def test_parts_with_other_columns_are_refused(file):
    message = refusal(file(GOOD), file("input_tokens,output_tokens\n1,1\n", "part2.csv"))
    assert "part2.csv line 2 gives input_tokens, output_tokens, but the first line of" in message


# ---------------------------------------------------------------------- operations


def test_parts_follow_each_other():
    trace = read_trace(AZURE)
    assert trace.arrival_s[17548:17550].tolist() == [3057.013, 3057.017]
    assert trace.duration_s == 3501.722


def test_a_scaled_trace_comes_that_much_faster():
    trace = read_trace(AZURE)
    assert np.allclose(trace.scaled(2.0).arrival_s * 2, trace.arrival_s)
    assert trace.scaled(2.0).duration_s == pytest.approx(trace.duration_s / 2)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_and_scales_must_be_above_zero(bad):
    trace = read(TRACES / "azure2023_code.csv")
    with pytest.raises(ConfigError, match="rate scale is"):
        trace.scaled(bad)
    with pytest.raises(ConfigError, match="the rate is"):
        trace.at_rate(bad)


def test_the_coefficient_of_variation_must_not_be_negative():
    with pytest.raises(ConfigError, match="coefficient of variation"):
        read(TRACES / "azure2023_code.csv").at_rate(1.0, cv=-0.5)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_at_a_rate_have_that_rate_and_that_variation(cv):
    trace = read_trace(AZURE).at_rate(5.0, seed=1, cv=cv)
    gaps = np.diff(trace.arrival_s)
    assert trace.arrival_s[0] == 0.0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_arrivals_depend_on_the_seed_alone():
    trace = read(TRACES / "azure2023_code.csv")
    assert np.array_equal(trace.at_rate(5.0, seed=1).arrival_s, trace.at_rate(5.0, seed=1).arrival_s)
    assert not np.array_equal(trace.at_rate(5.0, seed=1).arrival_s, trace.at_rate(5.0, seed=2).arrival_s)
    assert np.array_equal(trace.at_rate(5.0).input_tokens, trace.input_tokens)


def test_spreading_leaves_the_grid_but_neither_the_step_nor_the_order():
    trace = read_trace(CONVERSATION)
    spread = trace.spread(seed=1)
    moved = spread.arrival_s - trace.arrival_s
    assert len(np.unique(trace.arrival_s)) == 1180
    assert len(np.unique(spread.arrival_s)) > 12000
    assert moved.min() >= 0
    assert 2.9 < moved.max() < 3.0
    assert (np.diff(spread.arrival_s) >= 0).all()
    assert spread.hash_ids == trace.hash_ids
    assert np.array_equal(spread.arrival_s, trace.spread(seed=1).arrival_s)


def test_what_arrives_all_at_once_needs_a_step_to_be_spread(file):
    trace = read(file(HEAD + "1,1,1\n1,1,1\n"))
    with pytest.raises(ConfigError, match="how far"):
        trace.spread()
    assert ((trace.spread(step_s=0.5).arrival_s - 1) < 0.5).all()


def test_spreading_further_than_the_step_keeps_the_order_too(file):
    trace = read(file(HEAD + "".join(f"{i},1,1\n" for i in range(50))))
    assert (np.diff(trace.spread(step_s=10.0).arrival_s) >= 0).all()


def test_taking_fewer_requests_keeps_what_was_measured():
    trace = read(TRACES / "measured_vllm_RTX4090_Llama-3.1-8B.csv")
    taken = trace.take(10)
    assert len(taken) == 10
    assert np.array_equal(taken.measured.first_token_s, trace.measured.first_token_s[:10])


def test_taking_no_request_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        read(TRACES / "azure2023_code.csv").take(0)


def test_taking_more_than_there_are_repeats_the_trace_at_its_rate_without_sharing_prefixes(file):
    trace = read(file(f"{RANGES}0,1024,1,0 1\n1000,512,2,0\n3000,512,3,5\n"))
    taken = trace.take(7)
    assert taken.arrival_s.tolist() == [0.0, 1.0, 3.0, 4.5, 5.5, 7.5, 9.0]
    assert taken.output_tokens.tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert taken.hash_ids == [(0, 1), (0,), (5,), (6, 7), (6,), (11,), (12, 13)]


def test_what_was_measured_goes_when_the_arrivals_change():
    trace = read(TRACES / "measured_vllm_RTX4090_Llama-3.1-8B.csv")
    for changed in (trace.scaled(2.0), trace.at_rate(1.0), trace.spread(), trace.take(301)):
        assert changed.measured is None


def test_counting_from_zero_moves_all_times_together(file):
    header = "input_tokens,output_tokens,arrival_s,queued_s,scheduled_s,first_token_s,last_token_s"
    trace = read(file(f"{header}\n7,7,2,3,4,5,6\n")).from_zero()
    assert trace.arrival_s.tolist() == [0.0]
    assert trace.measured.last_token_s.tolist() == [4.0]


def test_a_tier_can_be_given_to_all():
    trace = read(TRACES / "azure2023_code.csv").with_tier("batch")
    assert {request.tier for request in trace.workload()} == {"batch"}


def test_a_trace_is_a_workload_and_survives_its_file(tmp_path):
    trace = read(TRACES / "mooncake_synthetic.jsonl").take(50).with_tier("interactive")
    write_workload(tmp_path / "w.jsonl", trace.workload())
    assert read_workload(tmp_path / "w.jsonl") == trace.workload()


# ---------------------------------------------------------------------- prompts


def trace_of(chains: list[list[int]], last_block: int = HASH_BLOCK) -> Trace:
    lengths = np.array([HASH_BLOCK * (len(chain) - 1) + last_block for chain in chains])
    return Trace(lengths, np.ones_like(lengths), np.zeros(len(chains)), hash_ids=[tuple(chain) for chain in chains])


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=4),
    st.integers(1, HASH_BLOCK),
    st.integers(0, 2**40),
)
def test_prompts_share_exactly_the_blocks_that_their_ids_share(chains, last_block, seed):
    trace = trace_of(chains, last_block)
    prompts = [trace.prompt_ids(i, 2**31 - 1, seed) for i in range(len(trace))]
    for a, first in enumerate(chains):
        for b, second in enumerate(chains):
            common = next((k for k, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), None)
            length = min(len(prompts[a]), len(prompts[b]))
            differ = np.flatnonzero(prompts[a][:length] != prompts[b][:length])
            if common is None:
                assert not len(differ)
            else:
                # At most a chance hit of a few tokens beyond the shared blocks.
                assert HASH_BLOCK * common <= differ[0] <= HASH_BLOCK * common + 2


def test_prompts_have_the_right_length_and_stay_inside_the_vocabulary():
    trace = read(TRACES / "mooncake_conversation.jsonl")
    prompt = trace.prompt_ids(3, 1000, seed=7)
    assert prompt.dtype == np.int32
    assert len(prompt) == trace.input_tokens[3]
    assert prompt.min() >= 0
    assert prompt.max() < 1000
    # Every token of the vocabulary is about as frequent as any other.
    counts = np.bincount(np.concatenate([trace.prompt_ids(i, 16) for i in range(40, 60)]), minlength=16)
    assert counts.std() / counts.mean() < 0.02


def test_prompts_depend_on_the_seed():
    trace = trace_of([[0, 1]])
    assert np.array_equal(trace.prompt_ids(0, 1000, 1), trace.prompt_ids(0, 1000, 1))
    assert (trace.prompt_ids(0, 1000, 1) != trace.prompt_ids(0, 1000, 2)).mean() > 0.95


def test_without_hash_ids_no_two_prompts_share_a_prefix():
    trace = read(TRACES / "azure2023_code.csv")
    firsts = {tuple(trace.prompt_ids(i, 1000)[:4].tolist()) for i in range(200)}
    assert len(firsts) == 200
