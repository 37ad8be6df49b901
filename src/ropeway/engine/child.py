"""The engine process: ``python -m ropeway.engine.child ADDRESS``.

It imports what any engine needs, loads what the parent's ``Start`` message says, answers with ``EngineInfo`` or
``Failed``, then turns the step loop between draining its socket. Before a step it listens as long as the engine has
patience: planning late lets more arrivals into the step, and while nothing can run, there is nothing else to do. It
ends when told to, and when the parent is gone, however it went: its standard input is a pipe from the parent that
closes then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from ropeway.config import EngineConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import (
    Abort,
    Explain,
    Explained,
    Failed,
    FromEngine,
    Inspect,
    Record,
    Recorded,
    Shutdown,
    Start,
    Submit,
    decode_to_engine,
)
from ropeway.engine.startup import StartUp, process_began_s
from ropeway.errors import RopewayError
from ropeway.lifeline import hold_to_parent
from ropeway.logs import log_to_stderr
from ropeway.outcome import StepOutput
from ropeway.wire import encode

if TYPE_CHECKING:
    from ropeway.engine.assembly import Assembly

_REPORT_S = 0.05
"""Least time between two reports of gauges while busy."""
_HEARTBEAT_S = 1.0
"""Longest silence while idle."""


class EngineLoop:
    """Receives, steps, reports."""

    def __init__(self, socket: zmq.Socket[bytes], startup: StartUp | None = None) -> None:
        self._socket = socket
        self._startup = startup
        self._record: Callable[[bool], bytes] = lambda on: b""
        self._reported_s = 0.0
        self._published = False
        """Whether the engine has said anything since its last step began."""

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
            startup=self._startup,
        )
        engine = assembly.engine
        # What has been loaded lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self.send(assembly.info)
        try:
            self.turn(engine, start.config.engine, check=assembly.check, record=lambda on: _record(assembly, on))
        finally:
            assembly.close()

    def turn(
        self,
        engine: Engine,
        config: EngineConfig,
        *,
        check: Callable[[], None] = lambda: None,
        record: Callable[[bool], bytes] = lambda on: b"",
    ) -> None:
        """Receive and step until told to shut down; or until ``check`` raises, which is asked at every turn.
        ``record``: begins a trace, or ends one and returns it."""
        self._record = record
        ahead = int(config.async_scheduling)
        stalled = False
        while self._receive(engine, patient=stalled or config.late_planning, stalled=stalled):
            check()
            if engine.has_work:
                steps, self._published = engine.steps, False
                engine.step(ahead)
                stalled = engine.steps == steps and not self._published
            if not engine.has_work or time.monotonic() - self._reported_s >= _REPORT_S:
                self._report(engine)

    def _publish(self, output: StepOutput) -> None:
        self._published = True
        if len(output.ids) or output.finished or output.accepted or output.prompt_logprobs is not None:
            self.send(output)

    def _receive(self, engine: Engine, *, patient: bool, stalled: bool) -> bool:
        """Take in what has arrived until it is time for a step, or for a report. False: shut down.

        ``patient``: listen as long as the engine can wait; ``stalled``: its last step found nothing to do."""
        idle = not engine.has_work
        news = False
        until_s = time.monotonic() + _HEARTBEAT_S
        while True:
            patience_s = until_s - time.monotonic()
            if (idle or stalled) and news:
                patience_s = 0.0  # what has come may let something go on
            elif engine.has_work:
                patience_s = min(patience_s, engine.patience_s()) if patient else 0.0
            elif not idle:
                patience_s = 0.0
            if not self._poll(patience_s):
                break
            news = True
            match decode_to_engine(self._socket.recv()):
                case Submit(requests):
                    engine.submit(requests)
                case Abort(ids, reason):
                    engine.abort(ids, reason)
                case Explain(ids):
                    self.send(Explained(engine.explain(ids)))
                case Record(on):
                    self.send(Recorded(self._record(on)))
                case Inspect():
                    self.send(engine.inspect())
                case Shutdown():
                    return False
        if idle and engine.has_work:
            self._report(engine)  # its first step may take long
        return True

    def _poll(self, patience_s: float) -> bool:
        """Whether a message is there, at the latest after ``patience_s``."""
        whole_ms = int(patience_s * 1000)
        if whole_ms <= 0 < patience_s:
            time.sleep(patience_s)  # shorter than the socket can wait: never spin
        return bool(self._socket.poll(max(whole_ms, 0)))

    def _report(self, engine: Engine) -> None:
        self._reported_s = time.monotonic()
        self.send(engine.stats())


def _record(assembly: Assembly, on: bool) -> bytes:
    if not on:
        return assembly.stop_trace()
    assembly.start_trace()
    return b""


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


def main() -> int:
    hold_to_parent()
    log_to_stderr(text="%(levelname)s %(name)s: %(message)s")
    startup = StartUp(process_began_s())
    startup.ended("python")
    # Before the first message: the parent has its own imports to do meanwhile. What fails is told when it is needed.
    for module in ("ropeway.engine.assembly", "ropeway.devices.cpu.device"):
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    startup.ended("torch")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # bounded by the number of requests, which the parent limits
    socket.reconnect_ivl = 20  # ms; the parent may not be listening yet
    socket.connect(sys.argv[1])
    loop = EngineLoop(socket, startup)
    status = 0
    try:
        start = decode_to_engine(socket.recv())
        assert isinstance(start, Start)
        if start.config.server.log_format == "json":
            log_to_stderr(form="json", again=True)
        startup.ended("parent")
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
