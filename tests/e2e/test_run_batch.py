"""Files of requests: answers, failures that are tried again, and files that were cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_model import tiny_chat_model

CHAT = "/v1/chat/completions"


def line(name: str, url: str = CHAT, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": f"Hi {name}"}], "max_tokens": 6, "temperature": 0, **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def run(source: Path, target: Path, *flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "ropeway",
        "run-batch",
        str(tiny_chat_model()),
        "-i",
        str(source),
        "-o",
        str(target),
    ]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, env=env, check=False)


def answers(target: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(each) for each in target.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_every_line_is_answered_also_more_choices_than_the_queue_holds(files: tuple[Path, Path]) -> None:
    source, target = files
    lines = [line(f"r{number}", n=8) for number in range(40)]
    lines += [line("text", "/v1/completions", prompt="x"), line("new", "/v1/responses", input="Hi")]
    source.write_text("\n".join(lines) + "\n")
    done = run(source, target, "--max-num-seqs", "4")
    assert done.returncode == 0, done.stderr
    told = answers(target)
    assert len(told) == 42
    assert all(each["error"] is None and each["response"]["status_code"] == 200 for each in told.values())
    assert len(told["r7"]["response"]["body"]["choices"]) == 8


def test_what_failed_is_told_and_tried_again(files: tuple[Path, Path]) -> None:
    source, target = files
    bad = [
        "{",
        line("url", "/v1/embeddings"),
        line("field", temperature=-1),
        line("twice"),
        line("stream", stream=True),
    ]
    source.write_text("\n".join([line("good"), line("twice"), *bad]) + "\n")
    done = run(source, target)
    assert done.returncode == 1
    found = [json.loads(each) for each in target.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in found if each["error"] is None) == ["good", "twice"]
    assert len(found) == 7
    assert "exists" in run(source, target).stderr
    # The run before ended in the middle of a line; and the bad ones have been mended.
    with target.open("a") as out:
        out.write('{"custom_id": "cut", "resp')
    source.write_text("\n".join([line("good"), line("twice"), line("field"), line("cut")]) + "\n")
    done = run(source, target, "--resume")
    assert done.returncode == 0, done.stderr
    assert "2 answered, 0 failed, 2 kept" in done.stderr
    assert answers(target).keys() == {"good", "twice", "field", "cut"}


def test_keys_of_a_server_do_not_concern_it(files: tuple[Path, Path]) -> None:
    import os

    source, target = files
    source.write_text(line("one") + "\n")
    done = run(source, target, env={**os.environ, "ROPEWAY_API_KEY": "k"})
    assert done.returncode == 0, done.stderr


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere.jsonl", tmp_path / "out.jsonl")
    assert done.returncode != 0
    assert "nowhere.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
