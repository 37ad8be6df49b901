"""``ropeway pull`` as a user runs it, against a hub on this machine whose network has its bad days."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.chat_model import tiny_chat_model
from tests.support.model_hub import ModelHub, model_hub


def ropeway(hub: ModelHub, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "ROPEWAY_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-m", "ropeway", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_model_is_pulled_over_a_broken_connection_and_then_runs(tmp_path: Path) -> None:
    with model_hub() as hub:
        hub.hf["lab/tiny"] = {file.name: file.read_bytes() for file in tiny_chat_model().iterdir()}
        hub.faults.breaks = 2
        pulled = ropeway(hub, tmp_path, "pull", "hf:lab/tiny")
        assert pulled.returncode == 0, pulled.stderr
        folder = Path(pulled.stdout.strip())
        for name in ("model.safetensors", "tokenizer.json", "config.json"):
            assert (folder / name).read_bytes() == (tiny_chat_model() / name).read_bytes()
        assert any(seen.range for seen in hub.contents), "the download was resumed, not begun again"
        asked = len(hub.contents)
        arguments = ("--prompt", "hello", "--max-tokens", "4", "--ignore-eos", "--temperature", "0", "--json")
        here = ropeway(hub, tmp_path, "generate", "lab/tiny", *arguments)
        assert json.loads(here.stdout)["usage"]["completion_tokens"] == 4, here.stderr
        assert len(hub.contents) == asked, "what was pulled is not fetched again"
        original = ropeway(hub, tmp_path, "generate", str(tiny_chat_model()), *arguments)
        assert here.stdout == original.stdout


def test_a_wrong_hash_is_one_clear_line_and_leaves_nothing_to_run(tmp_path: Path) -> None:
    with model_hub() as hub:
        hub.hf["lab/tiny"] = {file.name: file.read_bytes() for file in tiny_chat_model().iterdir()}
        hub.faults.tamper = lambda content: content[:-1] + bytes([content[-1] ^ 1])
        pulled = ropeway(hub, tmp_path, "pull", "hf:lab/tiny")
        assert pulled.returncode == 1
        assert pulled.stdout == ""
        (line,) = [line for line in pulled.stderr.splitlines() if line.startswith("error:")]
        assert "SHA-256" in line or "sha256" in line
        assert not list(tmp_path.rglob("*.safetensors"))
