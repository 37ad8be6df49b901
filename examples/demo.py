"""Eight chats at once with a real server: start it, ask, watch, and stop it.

python examples/demo.py [MODEL]          # default: the built-in smollm2-135m, fetched on first use
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ropeway.errors import RopewayError
from ropeway.loading.sources import resolve

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Give me three ideas for a rainy Sunday.",
    "How do I boil an egg?",
    "Tell me a story about a cable car in the mountains.",
    "What is the difference between a list and a tuple in Python?",
    "Write a polite e-mail asking for a day off.",
)
MAX_TOKENS = 128
START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0


class DemoError(Exception):
    """What went wrong, for people."""


@dataclass
class Chat:
    """One question and its answer so far; times are seconds on ``time.perf_counter``."""

    question: str
    answer: str = ""
    sent_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return (self.first_token_s or float("nan")) - self.sent_s


@dataclass
class Seen:
    """What the server's own metrics showed while it worked."""

    batches: list[int] = field(default_factory=list)


def main(model: str = "smollm2-135m") -> int:
    console = Console()
    try:
        fetch(model, console)
        with served(model, console) as url:
            chats, seen = asyncio.run(ask_all(url, console))
            summarize(chats, seen, console)
    except (DemoError, RopewayError) as error:
        Console(stderr=True).print(f"[red]demo failed:[/red] {escape(str(error))}", highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


# ---------------------------------------------------------------------- the model and the server


def fetch(model: str, console: Console) -> None:
    """Have the model on this machine, with a progress bar if it must be downloaded."""
    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
                if not console.is_terminal:
                    console.print(f"fetching {name}", highlight=False)
            bars.update(tasks[name], completed=done, total=total)

        resolve(model, progress=show)


@contextlib.contextmanager
def served(model: str, console: Console) -> Iterator[str]:
    """The URL of a server that is ready; it is told to stop at the end, and must do so properly."""
    port, management_port = free_ports(2)
    command = [sys.executable, "-m", "ropeway", "serve", model]
    command += ["--port", str(port), "--management-port", str(management_port)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            began = time.perf_counter()
            with console.status(f"starting ropeway serve {model}"):
                wait_until_ready(f"http://127.0.0.1:{management_port}/ready", process, log)
            console.print(f"{model} is served on {url}, ready after {time.perf_counter() - began:.1f} s\n")
            yield url
            stop(process, log)
            console.print("the server has shut down cleanly")
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
                process.kill()
                process.wait()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 on which nobody listens at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: IO[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"the server ended with code {process.returncode} while starting\n{tail(log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    raise DemoError(f"the server was not ready within {START_TIMEOUT_S:.0f} s\n{tail(log)}")


def stop(process: subprocess.Popen[bytes], log: IO[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"the server did not stop within {STOP_TIMEOUT_S:.0f} s of SIGTERM\n{tail(log)}") from error
    if code:
        raise DemoError(f"the server ended with code {code}\n{tail(log)}")


def tail(log: IO[str]) -> str:
    """The end of the server's log."""
    log.flush()
    log.seek(0)
    return "".join(log.readlines()[-15:])


# ---------------------------------------------------------------------- the chats


async def ask_all(url: str, console: Console) -> tuple[list[Chat], Seen]:
    """Ask all questions at the same time and follow the answers as they stream in."""
    chats = [Chat(question) for question in QUESTIONS]
    seen = Seen()
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(10, read=ANSWER_TIMEOUT_S)) as client:
        with shown(chats, console) as refresh:
            watcher = asyncio.create_task(watch(client, seen))
            try:
                async with asyncio.TaskGroup() as group:
                    for number, chat in enumerate(chats, start=1):
                        group.create_task(ask(client, chat, functools.partial(refresh, number)))
            except ExceptionGroup as errors:
                first = errors.exceptions[0]
                raise DemoError(f"a chat failed: {str(first) or type(first).__name__}") from errors
            finally:
                watcher.cancel()
    return chats, seen


async def ask(client: httpx.AsyncClient, chat: Chat, refresh: Callable[[str], None]) -> None:
    """Send one question and read its answer, event by event."""
    body = {
        "messages": [{"role": "user", "content": chat.question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.2,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chat.sent_s = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise DemoError(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise DemoError(event["error"]["message"])
            take(chat, event, refresh)
    if chat.finished_s is None:
        raise DemoError(f"the answer to {chat.question!r} broke off")


def take(chat: Chat, event: dict[str, Any], refresh: Callable[[str], None]) -> None:
    """Add what one event of the stream brings."""
    if event.get("usage"):
        chat.tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        text = choice["delta"].get("content") or ""
        if text and chat.first_token_s is None:
            chat.first_token_s = time.perf_counter()
            refresh("first token")
        chat.tokens += bool(text)
        chat.answer += text
        if choice["finish_reason"]:
            chat.finished_s = time.perf_counter()
            refresh("finished")


async def watch(client: httpx.AsyncClient, seen: Seen) -> None:
    """Read the batch size from the server's metrics, again and again."""
    while True:
        with contextlib.suppress(httpx.HTTPError):
            metrics = (await client.get("/metrics")).text
            for line in metrics.splitlines():
                if line.startswith("ropeway_num_requests_running "):
                    seen.batches.append(int(float(line.split()[1])))
        await asyncio.sleep(0.05)


# ---------------------------------------------------------------------- what people see


@contextlib.contextmanager
def shown(chats: list[Chat], console: Console) -> Iterator[Callable[[int, str], None]]:
    """A table that follows the answers on a terminal; elsewhere a line when something begins or ends."""
    if not console.is_terminal:
        began = time.perf_counter()
        yield lambda number, what: console.print(
            f"{time.perf_counter() - began:6.2f} s  chat {number}: {what}", highlight=False
        )
        return
    with Live(get_renderable=lambda: progress_table(chats, console.width), console=console, refresh_per_second=12):
        yield lambda number, what: None


def progress_table(chats: list[Chat], width: int) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=2)
    table.add_column(width=12)
    table.add_column(no_wrap=True, ratio=1)
    for chat in chats:
        mark = "[green]✓[/green]" if chat.finished_s else "[yellow]▸[/yellow]" if chat.first_token_s else "·"
        flat = " ".join(chat.answer.split())
        room = max(width - 20, 10)
        table.add_row(mark, f"{chat.tokens:3} tokens", Text(flat[-room:] if flat else chat.question, style="dim"))
    return table


def summarize(chats: list[Chat], seen: Seen, console: Console) -> None:
    """The answers, then what they cost."""
    for chat in chats:
        console.print(Group(Text(f"\n{chat.question}", style="bold"), Text(chat.answer.strip())))
    console.print()
    table = Table(title="eight chats, one batch", title_justify="left")
    for heading in ("chat", "first token", "tokens", "tokens/s"):
        table.add_column(heading, justify="right")
    for number, chat in enumerate(chats, start=1):
        assert chat.finished_s is not None
        seconds = chat.finished_s - chat.sent_s
        table.add_row(str(number), f"{chat.ttft_s * 1000:.0f} ms", str(chat.tokens), f"{chat.tokens / seconds:.1f}")
    console.print(table)
    began = min(chat.sent_s for chat in chats)
    seconds = max(chat.finished_s or began for chat in chats) - began
    tokens = sum(chat.tokens for chat in chats)
    busy = [size for size in seen.batches if size] or [0]
    console.print(
        f"{tokens} tokens in {seconds:.1f} s: [bold]{tokens / seconds:.1f} tokens/s[/bold]; "
        f"median time to the first token {statistics.median(chat.ttft_s for chat in chats) * 1000:.0f} ms; "
        f"up to {max(busy)} requests in the batch, {statistics.fmean(busy):.1f} on average",
        highlight=False,
    )


if __name__ == "__main__":
    # A closed pipe (| head) is no reason for a traceback.
    try:
        code = main(*sys.argv[1:2])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
