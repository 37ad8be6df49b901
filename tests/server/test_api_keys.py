"""Several keys: tenants, tiers, limits, and nobody sees another's requests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ropeway.errors import ConfigError
from ropeway.outcome import Refusal
from ropeway.server.keys import Allowance, KeyRing, digest_of, new_key, read_keys
from ropeway.tiers import DEFAULT_TIERS
from tests.server.asking import CHAT, chat_body, check_error
from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving

FILE = """
[[key]]
name = "alice"
sha256 = "{alice}"
tenant = "a"
tier = "standard"

[[key]]
name = "bob"
sha256 = "{bob}"
max_concurrent = 1

[[key]]
name = "carol"
sha256 = "{carol}"
requests_per_minute = 2

[[key]]
name = "dave"
sha256 = "{dave}"
tokens_per_minute = 10
share_cache = true

[[key]]
name = "root"
sha256 = "{root}"
admin = true
"""
NAMES = ("alice", "bob", "carol", "dave", "root")


def write(path: Path, text: str = FILE) -> Path:
    path.write_text(text.format(**{name: digest_of(f"key-{name}".encode()) for name in NAMES}))
    return path


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Served]:
    file = write(tmp_path / "keys.toml")
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer()), api_keys=str(file)) as served:
        yield served


def ask(served: Served, name: str, path: str = CHAT, **fields: object) -> httpx.Response:
    return httpx.post(served.url + path, json=chat_body(**fields), headers=header(name), timeout=20)


def header(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{name}"}


def test_only_known_keys_open(keyed: Served) -> None:
    assert ask(keyed, "alice").status_code == 200
    check_error(ask(keyed, "mallory"), 401, "API key")
    check_error(httpx.post(keyed.url + CHAT, json=chat_body()), 401, "API key")
    digest = digest_of(b"key-alice")
    assert httpx.get(f"{keyed.url}/v1/models", headers={"authorization": f"Bearer {digest}"}).status_code == 401


def test_a_key_has_its_tenant_and_its_cache(keyed: Served) -> None:
    salts = {}
    for name in ("alice", "bob", "dave"):
        ask(keyed, name, user="someone", cache_salt="s")
        options = keyed.engine.submitted[-1][2]
        salts[name] = options.cache_salt
        assert options.tenant == {"alice": "a"}.get(name, name)
    assert salts["alice"] != salts["bob"]
    assert salts["dave"] == "shared:s"


def test_tenants_cannot_spell_each_others_salt(tmp_path: Path) -> None:
    """Nor can a key that may share spell a tenant's."""
    file = write(tmp_path / "keys.toml", FILE.replace("tokens_per_minute = 10\n", ""))
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer()), api_keys=str(file)) as served:
        ask(served, "bob")
        bobs = served.engine.submitted[-1][2].cache_salt
        for name in ("alice", "dave"):
            for tried in (bobs, "3:bob:", "tenant:3:bob:", None):
                ask(served, name, cache_salt=tried)
                assert served.engine.submitted[-1][2].cache_salt != bobs


def test_a_key_gets_its_tier_and_none_above(keyed: Served) -> None:
    ask(keyed, "alice")
    assert keyed.engine.submitted[-1][2].tier == 1
    ask(keyed, "alice", priority="batch")
    assert keyed.engine.submitted[-1][2].tier == 2
    error = check_error(ask(keyed, "alice", priority="interactive"), 403, "standard", param="priority")
    assert error["code"] == "forbidden"


def test_a_key_has_only_so_many_requests_at_once(keyed: Served) -> None:
    keyed.engine.delay_s = 0.2
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: ask(keyed, "bob"), range(3)))
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert check_error(refused, 429, "at once")["code"] == "rate_limit_exceeded"
    keyed.engine.delay_s = 0.0
    assert ask(keyed, "bob").status_code == 200  # the place was given back
    assert ask(keyed, "bob", max_tokens=10**6).status_code == 400
    assert ask(keyed, "bob").status_code == 200  # also after a refusal


def test_a_key_has_only_so_many_requests_a_minute(keyed: Served) -> None:
    assert [ask(keyed, "carol").status_code for _ in range(3)] == [200, 200, 429]
    refused = ask(keyed, "carol")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert ask(keyed, "alice").status_code == 200


def test_tokens_are_counted_when_they_are_there(keyed: Served) -> None:
    assert ask(keyed, "dave").status_code == 200  # more than ten tokens: overdrawn from now on
    check_error(ask(keyed, "dave"), 429, "10 tokens a minute")


def test_what_is_refused_is_not_charged(keyed: Served) -> None:
    keyed.engine.refusal = Refusal("Shed", "too busy")
    for _ in range(3):
        assert ask(keyed, "dave").status_code == 429
    keyed.engine.refusal = None
    assert ask(keyed, "dave").status_code == 200


def test_allowances_come_back_with_time() -> None:
    now = [0.0]
    allowance = Allowance(60, clock=lambda: now[0])
    for _ in range(60):
        assert allowance.wait_s() == 0
        allowance.take(1)
    assert allowance.wait_s() > 0
    now[0] += 1.5
    assert allowance.wait_s() == 0
    allowance.take(100)
    assert 98 < allowance.wait_s() < 99.6
    now[0] += 10**6
    allowance.take(59)
    assert allowance.wait_s() == 0  # no more than a minute's worth is saved up


def test_nobody_sees_or_ends_anothers_request(keyed: Served) -> None:
    answer = ask(keyed, "alice")
    for name in (answer.json()["id"], answer.headers["x-request-id"]):
        path = f"{keyed.url}/v1/requests/{name}"
        assert httpx.get(path, headers=header("alice")).status_code == 200
        check_error(httpx.get(path, headers=header("bob")), 404, "there is no request")
        check_error(httpx.delete(path, headers=header("bob")), 404, "there is no request")


def test_the_same_request_id_of_two_tenants_is_two_requests(keyed: Served) -> None:
    ids = {}
    for name in ("alice", "root"):
        headers = {**header(name), "x-request-id": "mine"}
        ids[name] = httpx.post(keyed.url + CHAT, json=chat_body(), headers=headers, timeout=20).json()["id"]
    for name in ("alice", "root"):
        assert httpx.get(f"{keyed.url}/v1/requests/mine", headers=header(name)).json()["id"] == ids[name]


def test_a_request_can_be_cancelled(keyed: Served) -> None:
    keyed.engine.delay_s = 0.05
    headers = {**header("alice"), "x-request-id": "long"}
    with httpx.stream(
        "POST", keyed.url + CHAT, json=chat_body(max_tokens=900, stream=True), headers=headers, timeout=20
    ) as response:
        lines = response.iter_lines()
        next(lines)
        told = httpx.delete(f"{keyed.url}/v1/requests/long", headers=header("alice")).json()
        assert told["cancelled"] is True
        assert '"code":"cancelled"' in list(lines)[-2]
    assert keyed.idle(1.0)
    again = httpx.delete(f"{keyed.url}/v1/requests/long", headers=header("alice")).json()
    assert again["cancelled"] is False


def test_keys_are_read_again_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.toml")
    ring = KeyRing(None, file, DEFAULT_TIERS)
    alice = ring.find(b"key-alice")
    assert alice is not None
    write(file, FILE.replace('name = "bob"', 'name = "robert"'))
    assert ring.reload() == 5
    assert ring.find(b"key-alice") is alice  # with what is going on for it
    robert = ring.find(b"key-bob")
    assert robert is not None
    assert robert.name == "robert"
    file.write_text("[[key]]\nname = 7")
    with pytest.raises(ConfigError, match="key 1"):
        ring.reload()
    assert ring.find(b"key-alice") is alice
    file.write_text("")
    assert ring.reload() == 0
    assert ring.find(b"key-alice") is None
    assert ring.needed  # a file without keys opens to nobody


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[key]]\nname = 'a b'\nsha256 = '{alice}'", "name"),
        ("[[key]]\nname = 'a'\nsha256 = 'key-alice'", "64 hexadecimal"),
        ("[[key]]\nname = 'a'\nsha256 = '{alice}'\ncolour = 'red'", "colour"),
        ("[[key]]\nname = 'a'\nsha256 = '{alice}'\n[[key]]\nname = 'b'\nsha256 = '{alice}'", "that of a too"),
        ("[[key]]\nname = 'a'\nsha256 = '{alice}'\nmax_concurrent = 0", "above 0"),
        ("[[key]]\nname = 'a'\nsha256 = '{alice}'\ntier = 'gold'", "no tier 'gold'"),
        ("keys = []", "list of tables"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path / "keys.toml", text)
    with pytest.raises(ConfigError, match=words) as raised:
        KeyRing(None, file, DEFAULT_TIERS)
    assert str(file) in raised.value.message


def test_the_command_makes_entries_that_work(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ropeway", "keys", "new", "eve", "--max-concurrent", "3"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    key = made.stderr.strip().rpartition(" ")[2]
    file = tmp_path / "keys.toml"
    file.write_text(made.stdout)
    (entry,) = read_keys(file)
    assert (entry.name, entry.max_concurrent) == ("eve", 3)
    assert entry.sha256 == digest_of(key.encode())
    assert key not in made.stdout
    assert len({new_key() for _ in range(100)}) == 100


def test_no_log_line_holds_a_key(keyed: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(0):
        ask(keyed, "alice")
        ask(keyed, "mallory")
        time.sleep(0.05)
    assert "key-alice" not in caplog.text
    assert "key-mallory" not in caplog.text
