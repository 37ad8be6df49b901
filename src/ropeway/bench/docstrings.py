"""A text that every machine has: the docstrings of Python's standard library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ropeway.errors import ConfigError

MODULES = (
    "argparse", "textwrap", "contextlib", "statistics", "threading", "subprocess", "difflib", "configparser", "heapq",
    "fractions", "inspect", "json/__init__", "logging/__init__", "random", "shutil", "string", "tarfile", "tempfile",
    "optparse", "unittest/case", "urllib/request", "zipfile", "zipfile/__init__", "functools", "collections/__init__",
    "asyncio/base_events", "concurrent/futures/_base", "email/message", "http/client", "http/cookiejar", "mailbox",
    "multiprocessing/pool", "pickletools", "smtplib", "socketserver", "traceback", "typing", "turtle", "_pydecimal",
)  # fmt: skip
"""Files whose docstrings are prose; those a version of Python doesn't have are passed over."""


def standard_library_docstrings() -> str:
    """The docstrings of ``MODULES``, cleaned of indentation, in the order of the sources, with empty lines between:
    about 150,000 tokens. The same for the same version of Python. Nothing is imported.

    Raises ``ConfigError`` where Python comes without its sources."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [text for name in MODULES for text in _docstrings(folder / f"{name}.py")]
    if not texts:
        raise ConfigError(
            f"this Python has no sources of its library in {folder}; give a text of your own", param="text"
        )
    return "\n\n".join(texts) + "\n"


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
