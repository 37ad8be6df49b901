"""ropeway chat"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.cli.sampling import MaxTokens, Seed, Temperature, sampling_params
from ropeway.errors import InvalidRequest
from ropeway.logs import log_to_stderr
from ropeway.request import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from ropeway.llm import LLM

_HELP = "/quit ends, /new starts over, Ctrl-C stops an answer"


@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel")
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.", show_default=False)] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Talk to a model in the terminal. /quit ends, /new starts over, Ctrl-C stops an answer."""
    log_to_stderr(logging.WARNING)
    settings = resolved(model, config, flags).config
    params = sampling_params(settings, max_tokens=max_tokens, temperature=temperature, seed=seed)
    from rich.console import Console

    from ropeway.llm import LLM

    console = Console()
    with console.status("loading the model"):
        llm = LLM.from_config(settings)
    with llm:
        console.print(f"[bold]{settings.model.model}[/bold] ({_HELP})", highlight=False)
        Conversation(llm, console, params, system).run()


class Conversation:
    """Reads what the user says, streams what the model says, until ``/quit`` or the end of the input."""

    def __init__(self, llm: LLM, console: Console, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._console = console
        self._params = params
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._beginning)

    def run(self) -> None:
        while (said := self._listen()) is not None:
            match said.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/new":
                    self._messages = list(self._beginning)
                case _ if said.startswith("/"):
                    self._note(_HELP)
                case _:
                    self._answer(said)

    def _listen(self) -> str | None:
        try:
            return self._console.input("[bold green]>[/bold green] ")
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None

    def _answer(self, said: str) -> None:
        messages = [*self._messages, {"role": "user", "content": said}]
        text, tokens = "", 0
        begin = first = time.perf_counter()
        try:
            with _stop_on_interrupt() as stop, contextlib.closing(self._stream(messages)) as deltas:
                for delta in deltas:
                    if not tokens:
                        first = time.perf_counter()
                    text += delta.text
                    tokens += len(delta.token_ids)
                    self._console.out(delta.text, end="", highlight=False)
                    if stop.is_set():
                        break
        except InvalidRequest as error:
            self._note(f"{error.message} (/new starts over)")
            return
        end = time.perf_counter()
        self._console.print()
        rate = f", {(tokens - 1) / (end - first):.1f} tokens/s" if tokens > 1 else ""
        self._note(f"{tokens} tokens, first after {first - begin:.2f} s{rate}")
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def _stream(self, messages: list[dict[str, str]]) -> Any:
        return self._llm.stream_chat(messages, self._params)

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """Within this block the first Ctrl-C sets an event, so that it never interrupts a step halfway; the second one
    is an ordinary ``KeyboardInterrupt``."""
    stop = threading.Event()

    def heard(number: int, frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, heard)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
