"""A process that ends when the one that started it is gone, however that went: its standard input is a pipe from there,
and closes then."""

from __future__ import annotations

import os
import signal
import threading


def hold_to_parent() -> None:
    """From now on, end with the parent, and at its word alone: a Ctrl-C on the terminal reaches the whole process
    group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
