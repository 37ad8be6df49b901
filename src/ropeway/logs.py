"""How a process logs: lines of text, or of JSON for what collects them. Never a prompt, never an answer."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

TEXT = "%(asctime)s %(levelname)-7s %(message)s"


class JsonFormatter(logging.Formatter):
    """One object per line: when, how grave, who says it, what; and how it came about, of an error."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        for field in ("request_id", "status", "method"):
            if (value := getattr(record, field, None)) is not None:
                body[field] = value
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False)


def log_to_stderr(
    level: int = logging.INFO, form: Literal["text", "json"] = "text", *, text: str = TEXT, again: bool = False
) -> None:
    """From here on. Whoever has set up logging before stays with that, but for ``again``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level, handlers=[handler], force=again)
