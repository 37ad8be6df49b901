"""The engine process: ``python -m ropeway.engine.child ADDRESS``.

It loads what the parent's ``Start`` message says, answers with ``EngineInfo`` or ``Failed``, then turns the
step loop between draining its socket. It ends when told to, and when the parent is gone, however it went: its
standard input is a pipe from the parent that closes then.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import zmq

from ropeway.engine.engine import Engine
from ropeway.engine.messages import Abort, Failed, FromEngine, Shutdown, Start, Submit, decode_to_engine, encode
from ropeway.errors import RopewayError
from ropeway.outcome import StepOutput

_REPORT_S = 0.05
"""Least time between two reports of gauges while busy."""
_HEARTBEAT_S = 1.0
"""Longest silence while idle."""


class EngineLoop:
    """Receives, steps, reports."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._reported_s = 0.0

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def run(self, start: Start) -> None:
        """Load and serve; returns after ``Shutdown``. Raises what loading or the device raises."""
        from ropeway.engine.assembly import assemble

        assembly = assemble(
            start.config,
            Path(start.path),
            self._publish,
            end_ids=tuple(start.end_ids),
            vocab_size=start.vocab_size,
            progress=_progress_line(start.config.model.model),
        )
        engine = assembly.engine
        # What has been loaded lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self.send(assembly.info)
        ahead = int(start.config.engine.async_scheduling)
        try:
            while self._receive(engine):
                if engine.has_work:
                    engine.step(ahead)
                if not engine.has_work or time.monotonic() - self._reported_s >= _REPORT_S:
                    self._report(engine)
        finally:
            engine.close()

    def _publish(self, output: StepOutput) -> None:
        if len(output.ids) or output.finished:
            self.send(output)

    def _receive(self, engine: Engine) -> bool:
        """Take in what has arrived, waiting for it when there is nothing else to do. False: shut down."""
        idle = not engine.has_work
        patience_ms = int(_HEARTBEAT_S * 1000) if idle else 0
        while self._socket.poll(patience_ms):
            patience_ms = 0
            match decode_to_engine(self._socket.recv()):
                case Submit(requests):
                    engine.submit(requests)
                case Abort(ids, reason):
                    engine.abort(ids, reason)
                case Shutdown():
                    return False
        if idle and engine.has_work:
            self._report(engine)  # its first step may take long
        return True

    def _report(self, engine: Engine) -> None:
        self._reported_s = time.monotonic()
        self.send(engine.stats())


def _progress_line(model: str) -> Callable[[int, int], None] | None:
    """A one-line progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        width = 30
        filled = width * done // max(total, 1)
        end = "\n" if done >= total else ""
        bar = "#" * filled + "." * (width - filled)
        sys.stderr.write(f"\rloading {model} [{bar}] {done / 1e6:.0f} M parameters{end}")
        sys.stderr.flush()

    return show


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> int:
    # The parent decides when to end: a Ctrl-C on the terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # bounded by the number of requests, which the parent limits
    socket.connect(sys.argv[1])
    loop = EngineLoop(socket)
    status = 0
    try:
        start = decode_to_engine(socket.recv())
        assert isinstance(start, Start)
        loop.run(start)
    except RopewayError as error:
        loop.send(Failed(type(error).__name__, error.message, error.param))
        status = 1
    except Exception as error:
        traceback.print_exc()
        loop.send(Failed("EngineDead", f"the engine failed: {type(error).__name__}: {error}"))
        status = 1
    socket.close(linger=2000)
    context.term()
    return status


if __name__ == "__main__":
    sys.exit(main())
