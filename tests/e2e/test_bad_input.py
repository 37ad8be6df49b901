"""Models that cannot be loaded and requests that cannot be served on the real line: a clear message, no more."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from typer.testing import CliRunner

from ropeway.cli.main import app
from tests.e2e.test_lifecycle import refusal
from tests.e2e.test_serving import complete, ids, token_ids
from tests.support.chat_model import CONTEXT, tiny_chat_model
from tests.support.server_process import ServerProcess

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def truncated(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def damaged(folder: Path) -> None:
    """A header that says the first matrix has one row less than its bytes."""
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["lm_head.weight"]["shape"][0] -= 1
    text = json.dumps(header).encode().ljust(length)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def missing_tensor(folder: Path) -> None:
    """A config of one layer more than there are weights for."""
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))


def broken_config(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


def of_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, **changes}))

    return change


DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "truncated weights": (truncated, [WEIGHTS, "bytes"]),
    "damaged weights": (damaged, [WEIGHTS, "lm_head.weight"]),
    "missing tensor": (missing_tensor, ["layers.2."]),
    "broken config": (broken_config, [CONFIG]),
    "unsupported architecture": (of_config(architectures=["RwkvForCausalLM"]), ["RwkvForCausalLM", "LlamaForCausalLM"]),
    "unsupported quantisation": (of_config(quantization_config={"quant_method": "awq", "bits": 4}), ["awq"]),
}


@pytest.fixture(params=DAMAGES)
def damage(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[str]]:
    """A model that cannot be loaded, and what must be said of it."""
    break_it, words = DAMAGES[request.param]
    folder = Path(shutil.copytree(tiny_chat_model(), tmp_path / "broken"))
    break_it(folder)
    return folder, words


@pytest.mark.report("vllm-project/vllm#17618")
def test_damaged_truncated_or_unsupported_weights_are_one_clear_line(damage: tuple[Path, list[str]]) -> None:
    folder, words = damage
    result = CliRunner().invoke(app, ["generate", str(folder), "--prompt-ids", "5,6"], env={"COLUMNS": "200"})
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    for word in words:
        assert word in last


def test_a_server_whose_weights_are_damaged_tells_so_in_its_last_line_and_ends(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_chat_model(), tmp_path / "broken"))
    truncated(folder)
    code, line, _ = refusal("serve", str(folder), "--port", "0")
    assert code == 1
    assert WEIGHTS in line


BAD: dict[str, tuple[bytes, int]] = {
    "prompt longer than the context": (json.dumps({"prompt": [5] * (CONTEXT + 1)}).encode(), 400),
    "max_tokens 0": (b'{"prompt": [5], "max_tokens": 0}', 400),
    "max_tokens negative": (b'{"prompt": [5], "max_tokens": -1}', 400),
    "bad type": (b'{"prompt": [5], "temperature": "hot"}', 400),
    "id outside the vocabulary": (b'{"prompt": [400]}', 400),
    "bias outside the vocabulary": (b'{"prompt": [5], "logit_bias": {"999999": 1}}', 400),
    "stop id outside the vocabulary": (b'{"prompt": [5], "stop_token_ids": [200000]}', 400),
    "lone surrogate": (rb'{"prompt": "\ud83e"}', 400),
    "NaN": (b'{"prompt": [5], "top_p": NaN}', 400),
    "invalid JSON": (b'{"prompt": [5', 400),
    "unknown model": (b'{"prompt": [5], "model": "other"}', 404),
    "50 MB": (b" " * 50_000_000, 413),
    "unknown field": (b'{"prompt": [5], "max_tokens": 1, "nonsense": 1}', 200),
}


@pytest.mark.report("vllm-project/vllm#16529")
@pytest.mark.report("vllm-project/vllm#54195")
def test_bad_requests_of_every_kind_disturb_neither_the_engine_nor_a_request_beside_them(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    fields = {"max_tokens": 600, "temperature": 0}
    alone = token_ids(complete(client, ids(1, 30), **fields))
    beside: list[openai.types.Completion] = []
    reader = threading.Thread(target=lambda: beside.append(complete(client, ids(1, 30), **fields)))
    reader.start()
    for name, (body, status) in BAD.items():
        response = httpx.post(f"{server.url}/v1/completions", content=body, timeout=20)
        assert response.status_code == status, (name, response.text)
        assert status == 200 or response.json()["error"]["message"], name
    reader.join()
    assert token_ids(beside[0]) == alone
    assert httpx.get(f"{server.url}/health").status_code == 200
