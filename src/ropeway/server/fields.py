"""Fields of the API that are not served: which are refused, and which are let pass.

The rule. A field that would change the answer and is not served is refused by name (400), unless its value means
"off". A field that changes nothing in the answer is ignored. Any other name is unknown: it is ignored, too, as the
OpenAI API does, and logged once. Fields of a message are the chat template's business.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ropeway.errors import InvalidRequest

_OFF: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "audio": (),
    "web_search_options": (),
    "prompt_logprobs": (),
    "suffix": ("",),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "kv_transfer_params": (),
    "conversation": (),
    "top_logprobs": (0,),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "container": (),
    "context_management": (),
}
"""Field -> values that mean "off"; null always does. Some of them are fields of other routes."""

_INERT = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "request_id",
    }
)
"""Fields that change nothing in an answer."""

_MOST_NAMES = 1000


def refuse_unserved(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``InvalidRequest`` if the request asks for something that is not served. ``known``: the route's fields."""
    for name, off in _OFF.items():
        value = None if name in known else body.get(name)
        # 0 == False in Python, so types are compared, too.
        if value is not None and not any(value == word and type(value) is type(word) for word in off):
            raise InvalidRequest(f"{name} is not supported here; leave it out", param=name)


class UnknownFields:
    """Logs every unknown field once in the life of a server, and a bounded number of them."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._logger = logging.getLogger(__name__)

    def note(self, body: Iterable[str], known: Iterable[str]) -> None:
        for name in set(body) - set(known) - _OFF.keys() - _INERT - self._seen:
            if len(self._seen) < _MOST_NAMES:
                self._seen.add(name)
                self._logger.info("requests carry the unknown field %.64r; it is ignored", name)
