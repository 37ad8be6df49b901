"""The command line: flags come from the settings, answers are plain, mistakes are one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ropeway.cli.chat import _stop_on_interrupt
from ropeway.cli.main import app
from ropeway.config import Config
from ropeway.settings import settings
from tests.support.chat_model import tiny_chat_model

SMALL = ("--kv-blocks", "64", "--threads", "1")


def ropeway(*arguments: str | Path, input: str | None = None, **environ: str) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input, env={"COLUMNS": "200", **environ})


def plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    "command", [(), ("serve",), ("generate",), ("chat",), ("pull",), ("doctor",), ("bench", "latency")]
)
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom ropeway.cli.main import app\n"
        f"try: app({[*command, '--help']!r})\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'tokenizers', 'zmq'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    source = Path(__file__).parents[2] / "src"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout


def test_without_a_command_help_is_shown() -> None:
    output = plain(ropeway().output)
    for command in ("serve", "chat", "generate", "pull", "doctor", "bench"):
        assert command in output


def test_version() -> None:
    result = ropeway("--version")
    assert result.exit_code == 0
    assert result.output.startswith("ropeway ")


@pytest.mark.parametrize(
    ("command", "sections"),
    [
        ("serve", {"model", "cache", "scheduler", "engine", "parallel", "server"}),
        ("generate", {"model", "cache", "scheduler", "engine", "parallel"}),
        ("chat", {"model", "cache", "scheduler", "engine", "parallel"}),
    ],
)
def test_a_command_has_a_described_flag_for_every_setting_of_its_sections(command: str, sections: set[str]) -> None:
    output = plain(ropeway(command, "--help").output)
    words = " ".join(output.split())
    for setting in settings().values():
        if setting.name == "model":
            continue
        assert (re.search(rf"{setting.flag}\b", output) is not None) == (setting.section in sections)
        if setting.section in sections:
            assert setting.doc.split(";")[0].split()[0] in words
            if setting.kind is bool:
                assert setting.flag.replace("--", "--no-", 1) in output


# --------------------------------------------------------------------------- serve


def test_show_config_prints_values_and_origins_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "ropeway.toml"
    file.write_text("[scheduler]\nmax_num_seqs = 3\n[server]\nmax_queue = 7\n")
    flags = ("--config", file, "--show-config", "--port", "9001", "--no-prefix-cache", "--api-key", "hush")
    result = ropeway("serve", "some/model", *flags, ROPEWAY_MAX_NUM_SEQS="4")
    assert result.exit_code == 0, result.output
    lines = {line.split(" = ")[0]: line for line in result.stdout.splitlines() if " = " in line}
    assert re.fullmatch(r'model = "some/model" +# argument model', lines["model"])
    assert re.fullmatch(r"port = 9001 +# --port", lines["port"])
    assert re.fullmatch(r"prefix_cache = false +# --prefix-cache", lines["prefix_cache"])
    assert re.fullmatch(r"max_num_seqs = 4 +# environment variable ROPEWAY_MAX_NUM_SEQS", lines["max_num_seqs"])
    assert lines["max_queue"].endswith(f"# server.max_queue in {file}")
    assert lines["block_size"].endswith("# default")
    assert "hush" not in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("serve", "--port", "70000"), 1, ["error: port 70000", "--port", "at most 65535"]),
        (("serve", "--block-size", "24"), 1, ["error: block_size 24", "power of two"]),
        (("serve", "--kv-blocks", "5", "--kv-memory", "1"), 1, ["error: kv_blocks 5", "--kv-memory"]),
        (("serve", "--max-num-seqs", "9", "--max-batched-tokens", "8"), 1, ["error: max_num_seqs 9"]),
        (("serve", "--config", "/no/such.toml"), 1, ["error: /no/such.toml cannot be read"]),
        (("serve", "--port", "abc"), 2, ["--port"]),
        (("serve", "--dtype", "fp8"), 2, ["--dtype", "fp8", "fp16"]),
        (("serve", "--nonsense"), 2, ["--nonsense"]),
        (("nonsense",), 2, ["nonsense"]),
        (("generate",), 2, ["either --prompt or --prompt-ids"]),
        (("generate", "--prompt", "a", "--prompt-ids", "1"), 2, ["either --prompt or --prompt-ids"]),
        (("generate", "--prompt-ids", "1,x"), 2, ["1,x", "whole numbers"]),
        (("generate", "/no/such/model", "--prompt", "a"), 1, ["error: no model '/no/such/model'"]),
        (("chat", "/no/such/model"), 1, ["error: no model '/no/such/model'"]),
        (("pull", "nonsense:x"), 1, ["error: no model 'nonsense:x'"]),
    ],
)
def test_a_mistake_is_one_clear_line_and_no_traceback(arguments: tuple[str, ...], code: int, words: list[str]) -> None:
    result = ropeway(*arguments)
    assert result.exit_code == code, result.output
    said = plain(result.stderr)
    for word in words:
        assert word in said
    assert "Traceback" not in result.output
    if code == 1:
        assert len(said.strip().splitlines()) == 1


# --------------------------------------------------------------------------- generate and chat


def generate(*arguments: str) -> dict[str, Any]:
    result = ropeway("generate", tiny_chat_model(), *arguments, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_generate_prints_one_json_object() -> None:
    body = generate("--prompt", "Hello", "--max-tokens", "5", "--temperature", "0", "--ignore-eos")
    assert body.keys() == {"text", "token_ids", "finish_reason", "usage"}
    assert len(body["token_ids"]) == 5
    assert body["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "cached_tokens": 0}


def test_generate_with_a_seed_repeats_itself_and_another_seed_does_not() -> None:
    asked = ("--prompt-ids", "5,6,7", "--max-tokens", "8", "--ignore-eos", "--seed")
    assert generate(*asked, "1") == generate(*asked, "1")
    assert generate(*asked, "1") != generate(*asked, "2")


def test_generate_prints_the_text_alone() -> None:
    asked = ("--prompt", "Hello", "--max-tokens", "4", "--temperature", "0")
    result = ropeway("generate", tiny_chat_model(), *asked, *SMALL)
    assert result.stdout == generate(*asked)["text"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "Hello", "--max-tokens", "0"), ["max_tokens is 0"]),
        (("--prompt", "Hello", "--temperature", "nan"), ["temperature"]),
        (("--prompt", ""), ["empty"]),
        (("--prompt-ids", "1,400"), ["400", "399"]),
        (("--prompt", "Hello", "--max-tokens", "5000"), ["1024", "5000"]),
    ],
)
def test_a_wrong_request_is_one_clear_line(arguments: tuple[str, ...], words: list[str]) -> None:
    result = ropeway("generate", tiny_chat_model(), *arguments, *SMALL, "--max-model-len", "1024")
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    for word in words:
        assert word in last


def test_chat_answers_until_quit_and_starts_over() -> None:
    said = "Hello\n\n/nonsense\n/new\nHello\n/quit\nnever read\n"
    flags = ("--max-tokens", "6", "--temperature", "0", "--system", "Be brief.")
    result = ropeway("chat", tiny_chat_model(), *flags, *SMALL, input=said)
    assert result.exit_code == 0, result.output
    assert result.output.count("tokens, first after") == 2
    assert "/new starts over" in result.output


def test_chat_ends_with_its_input_and_survives_a_message_too_long() -> None:
    said = "x " * 3000 + "\nHello\n"
    result = ropeway("chat", tiny_chat_model(), "--max-tokens", "3", *SMALL, input=said)
    assert result.exit_code == 0, result.output
    assert "1024" in plain(result.output).replace("\n", " ")
    assert result.output.count("tokens, first after") == 1


def test_ctrl_c_stops_an_answer_first_and_interrupts_second() -> None:
    with _stop_on_interrupt() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --------------------------------------------------------------------------- doctor


def test_doctor_tells_what_there_is_and_what_was_chosen() -> None:
    result = ropeway("doctor", "--json", "--threads", "1")
    facts = json.loads(result.stdout)
    assert result.exit_code == (0 if facts["problem"] is None else 1)
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] >= facts["memory_available_bytes"] > 0
    assert facts["measured"]["read_bandwidth_bytes_per_s"] > 1e8
    assert facts["device"]["name"] == Config().engine.device
    assert "kernels" in facts["device"]


def test_doctor_measures_every_layout_on_more_and_more_threads_and_gives_advice() -> None:
    threads = 2 * (os.cpu_count() or 1)
    facts = json.loads(ropeway("doctor", "--json", "--threads", str(threads)).stdout)
    rates = facts["measured"]["rates"]
    assert [rate["threads"] for rate in rates][:2] == [1, 2]
    assert rates[-1]["threads"] == threads
    assert set(rates[0]["products_per_s"]) == {"bf16", "int8", "int4"}
    assert set(rates[0]["onednn_per_s"]) == {"bf16", "int8"}
    assert min(rates[0]["products_per_s"].values()) > 1e8
    assert "threads" in [advice["topic"] for advice in facts["advice"]]
    assert all(advice["found"] and advice["change"] for advice in facts["advice"])


def test_doctor_prints_advice_and_rates() -> None:
    result = ropeway("doctor", "--threads", "1")
    for words in ("other processes", "large pages", "oneDNN bf16", "for more speed"):
        assert words in result.stdout


def test_doctor_names_the_fallback_when_the_native_kernels_do_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from ropeway.cli import doctor
    from ropeway.execution import part

    def make_device(config: Any) -> Any:
        if config.device == "cpu":
            raise ImportError("no native module")
        return real(config)

    real = part.make_device
    monkeypatch.setattr(part, "make_device", make_device)
    device, problem = doctor.open_device(1)
    device.close()
    assert device.name == "reference"
    assert problem is not None
    assert "no native module" in problem
    assert "compiler" in problem
