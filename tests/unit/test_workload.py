"""Workload files: what they say, and how they say that they are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ropeway.bench.workload import WorkloadRequest, mixed_workload, read_workload, totals, write_workload
from ropeway.errors import ConfigError

MIXED32 = Path(__file__).parents[2] / "benchmarks" / "workloads" / "mixed32.jsonl"


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "workload.jsonl"
        path.write_text(text)
        return path

    return write


def test_a_line_gives_a_prompt_by_length_or_by_ids_and_an_optional_arrival(file):
    path = file(
        '{"prompt_tokens": 5, "output_tokens": 2}\n\n{"prompt_token_ids": [3, 1], "output_tokens": 1, "arrival_s": 0.5}'
    )
    assert read_workload(path) == [
        WorkloadRequest(prompt_tokens=5, output_tokens=2),
        WorkloadRequest(prompt_tokens=2, output_tokens=1, arrival_s=0.5, prompt_token_ids=(3, 1)),
    ]


def test_what_is_written_is_read_back(tmp_path):
    requests = [
        WorkloadRequest(3, 4),
        WorkloadRequest(2, 1, 1.25, (7, 8)),
        WorkloadRequest(513, 1, tier="batch", tenant="a", hash_ids=(4, 0)),
    ]
    write_workload(tmp_path / "w.jsonl", requests)
    assert read_workload(tmp_path / "w.jsonl") == requests


GOOD = '{"prompt_tokens": 5, "output_tokens": 2}\n'


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"output_tokens": 2}', "either prompt_token_ids or prompt_tokens"),
        ('{"prompt_tokens": 1, "prompt_token_ids": [1], "output_tokens": 2}', "either prompt_token_ids or"),
        ('{"prompt_tokens": 1}', "output_tokens is missing"),
        ('{"prompt_tokens": 0, "output_tokens": 2}', "prompt_tokens is 0"),
        ('{"prompt_tokens": 1.5, "output_tokens": 2}', "prompt_tokens is 1.5"),
        ('{"prompt_tokens": true, "output_tokens": 2}', "prompt_tokens is True"),
        ('{"prompt_tokens": 1, "output_tokens": "2"}', "output_tokens is '2'"),
        ('{"prompt_tokens": 1, "output_tokens": -2}', "output_tokens is -2"),
        ('{"prompt_tokens": 1, "output_tokens": 2, "arrival_s": -1}', "arrival_s is -1"),
        ('{"prompt_tokens": 1, "output_tokens": 2, "arrival_s": NaN}', "arrival_s is nan"),
        ('{"prompt_token_ids": [], "output_tokens": 2}', "at least one token id"),
        ('{"prompt_token_ids": [1, "a"], "output_tokens": 2}', "'a'"),
        ('{"prompt_token_ids": [-1], "output_tokens": 2}', "-1"),
        ('{"prompt_tokens": 1, "output_token": 2}', "unknown field 'output_token'"),
        ('{"prompt_tokens": 1, "output_tokens": 2, "tier": ""}', "tier is ''"),
        ('{"prompt_tokens": 1, "output_tokens": 2, "tenant": 7}', "tenant is 7"),
        ('{"prompt_tokens": 513, "output_tokens": 2, "hash_ids": [1]}', "a list of 2 ids"),
        ('{"prompt_tokens": 5, "output_tokens": 2, "hash_ids": [-1]}', "hash_ids holds -1"),
        ('{"prompt_tokens": 5, "output_tokens": 2, "hash_ids": 7}', "a list of 1 ids"),
        ('{"prompt_token_ids": [1], "output_tokens": 2, "hash_ids": [1]}', "hash_ids go with prompt_tokens"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_and_field(file, line, told):
    with pytest.raises(ConfigError) as refusal:
        read_workload(file(GOOD + line + "\n"))
    assert "line 2" in refusal.value.message
    assert told in refusal.value.message


def test_an_empty_or_a_missing_file_is_refused(file, tmp_path):
    with pytest.raises(ConfigError, match="holds no request"):
        read_workload(file("\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_workload(tmp_path / "nothing.jsonl")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "w.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_workload(tmp_path / "w.jsonl")


def test_synthetic_prompts_depend_on_seed_and_index_alone_and_stay_inside_the_vocabulary():
    request = WorkloadRequest(prompt_tokens=64, output_tokens=1)
    prompt = request.prompt(3, 50, seed=1)
    assert prompt.dtype == np.int32
    assert len(prompt) == 64
    assert prompt.min() >= 0
    assert prompt.max() < 50
    assert np.array_equal(prompt, request.prompt(3, 50, seed=1))
    assert not np.array_equal(prompt, request.prompt(4, 50, seed=1))
    assert not np.array_equal(prompt, request.prompt(3, 50, seed=2))


def test_the_standard_mixed_workload_has_the_lengths_it_promises():
    requests = mixed_workload()
    assert len(requests) == 32
    assert all(32 <= request.prompt_tokens <= 512 and 16 <= request.output_tokens <= 256 for request in requests)
    prompt_tokens, output_tokens = totals(requests)
    assert abs(prompt_tokens - 9867) <= 10
    assert abs(output_tokens - 3680) <= 10


def test_the_workload_file_of_the_benchmarks_is_the_standard_mixed_workload():
    assert read_workload(MIXED32) == mixed_workload()
