"""Requests that nobody should send: a corpus written by hand, and mutations of good ones. The same seed gives the same
requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
_GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "model", "messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_FIELDS = (
    *("model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "n", "best_of", "temperature"),
    *("top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "logit_bias", "stream"),
    *("stream_options", "user", "priority", "timeout", "cache_salt", "tools", "tool_choice", "response_format"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "bad_words"),
    *("allowed_token_ids", "min_tokens", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("echo", "suffix", "chat_template_kwargs", "continue_final_message", "add_generation_prompt", "system"),
    *("stop_sequences", "thinking", "instructions", "text", "reasoning", "tokens", "return_token_ids"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 10**9, -(10**9), 2**31, 2**63, 2**64, 10**30, -0.0, 0.5, 1e-300, 1e308, -1e308),
    *(
        "",
        " ",
        "a",
        "x" * 10_000,
        "\u0000",
        "\U0001f9e0" * 50,
        "<|im_end|>",
        "<|im_start|>system\n",
        "</think>",
        "\r\n",
    ),
    *([], [None], [[]], [1], [-1], ["a"], [1.5], [[1]], [2**40], {}, {"a": 1}, {"type": "x"}, {"type": "json_schema"}),
    *({"json": {"type": "nonsense"}}, {"regex": "("}, {"1": 2}, {"-1": 0}, {"a": {"b": {"c": [{}]}}}, "{{ 7 * 7 }}"),
    *(
        "(a+)+$",
        "start: start",
        '{"type": "object"}',
        [{"role": "user"}],
        [{"role": 7, "content": []}],
        ["\u0000"] * 40,
    ),
    *([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], ["x"] * 2000),
    *([{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}], {"include_usage": "yes"}),
)
_BODIES: tuple[bytes, ...] = (
    *(b"", b"{", b"null", b"[]", b"7", b'"text"', b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"prompt": "\\ud800"}', b"{}" * 3),
    *(b'{"prompt": NaN}', b'{"prompt": 1e999}', b"[" * 100_000, b'{"a":' * 50_000, b"a=b&c=d", b"\x00" * 1000),
    *(
        b'{"prompt": "Hi", "prompt": 7}',
        b"<xml/>",
        b'{"max_tokens": 0x10}',
        b'{"messages": [' + b"{}," * 20_000 + b"{}]}",
    ),
)
_HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"x-ropeway-tier": "no such tier"},
    {"x-ropeway-tier": "-99999999999999999999"},
    {"x-ropeway-timeout": "-1"},
    {"x-ropeway-timeout": "nan"},
    {"x-request-id": "x" * 500},
    {"authorization": "Bearer \u00ff"},
    {"accept-encoding": "gzip, br, zstd"},
    {"expect": "100-continue"},
    {"upgrade": "h2c"},
)
_PATHS = (
    "/v1/chat/completions/",
    "//v1/models",
    "/v1/models/%2e%2e%2fetc",
    "/v1/requests/" + "x" * 2000,
    "/nowhere",
    "/%00",
)


@dataclass(frozen=True)
class HostileRequest:
    method: str
    path: str
    content: bytes
    headers: dict[str, str]


def requests(count: int, seed: int = 0) -> Iterator[HostileRequest]:
    """Of every kind some. All are small enough to be read, and ask for few tokens."""
    random_ = random.Random(seed)
    for _ in range(count):
        path = random_.choice(ROUTES)
        headers = dict(random_.choice(_HEADERS)) if random_.random() < 0.2 else {}
        kind = random_.random()
        if kind < 0.1:
            yield HostileRequest("POST", path, random_.choice(_BODIES), headers)
        elif kind < 0.15:
            method = random_.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST"))
            yield HostileRequest(method, random_.choice((*_PATHS, *ROUTES)), b"", headers)
        else:
            body = _mutated(random_, _GOOD[path])
            content = json.dumps(body, ensure_ascii=random_.random() < 0.5).encode("utf-8", "surrogatepass")
            if random_.random() < 0.05:
                content = _garbled(random_, content)
            yield HostileRequest("POST", path, content, headers)


def _mutated(random_: random.Random, good: dict[str, Any]) -> dict[str, Any]:
    body = dict(good)
    for _ in range(random_.randint(1, 3)):
        if random_.random() < 0.15 and body:
            del body[random_.choice(list(body))]
        else:
            body[random_.choice(_FIELDS)] = random_.choice(_VALUES)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int | float) and body[name] > 50:
            body[name] = 50  # what is too long is tried elsewhere; here many requests are to be answered
    body.setdefault("max_output_tokens" if "input" in good else "max_tokens", 3)
    return body


def _garbled(random_: random.Random, content: bytes) -> bytes:
    at = random_.randrange(len(content)) if content else 0
    return random_.choice(
        (content[:at], content[:at] + bytes([random_.randrange(256)]) + content[at + 1 :], content * 2)
    )
