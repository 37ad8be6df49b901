"""``examples/demo.py`` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.chat_model import tiny_chat_model
from tests.support.tiny_models import tiny_checkpoint

ROOT = Path(__file__).parents[2]


def demo(model: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), model]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)


@pytest.mark.slow
def test_the_demo_streams_eight_chats_at_once_and_stops_its_server():
    result = demo(str(tiny_chat_model()))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": first token") == 8
    assert result.stdout.count(": finished") == 8
    assert "tokens/s" in result.stdout
    assert "requests in the batch" in result.stdout
    assert "the server has shut down cleanly" in result.stdout


def test_the_demo_says_in_one_line_that_there_is_no_such_model():
    result = demo("no-such-model")
    assert result.returncode == 1
    assert "demo failed: no model 'no-such-model'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_the_demo_says_why_a_chat_failed_and_stops_its_server():
    result = demo(str(tiny_checkpoint("llama")))
    assert result.returncode == 1
    assert "a chat failed" in result.stderr
    assert "no tokenizer" in result.stderr
    assert "Traceback" not in result.stderr
