"""What ``ropeway top`` shows: one screen, from what the dashboard's page asks for, too."""

from __future__ import annotations

from collections import deque
from typing import Any

import httpx
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, Sparkline, Static

_KEPT = 120
_LOOKS = 12
"""Before a picture is taken."""
_BAR = 24


class TopApp(App[None]):
    """Asks a server again and again, until it is left."""

    TITLE = "ropeway top"
    BINDINGS = [Binding("q", "quit", "Quit"), Binding("p", "pause", "Pause")]  # noqa: RUF012 (declared so by textual)
    CSS = """
    #head { height: auto; padding: 0 1; background: $panel; }
    #figures { height: auto; padding: 0 1; }
    .spark { width: 1fr; height: 4; padding: 0 1; }
    .spark Sparkline { height: 3; }
    #sparks { height: 5; }
    #lower { height: 1fr; }
    #batch { width: 3fr; }
    #side { width: 2fr; }
    #tiers { height: auto; max-height: 10; }
    """

    def __init__(self, url: str, api_key: str | None, *, every_s: float, screenshot: str | None = None) -> None:
        """``screenshot``: a file for a picture (SVG), after which this ends."""
        super().__init__()
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._url = url
        self._every_s = every_s
        self._screenshot = screenshot
        self._client = httpx.AsyncClient(headers=self._headers, timeout=5.0)
        self._before: dict[str, Any] | None = None
        self._rates: deque[float] = deque(maxlen=_KEPT)
        self._running_now: deque[float] = deque(maxlen=_KEPT)
        self._paused = False
        self._looks = 0

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="figures")
        with Horizontal(id="sparks"):
            with Vertical(classes="spark"):
                yield Static("tokens/s")
                yield Sparkline(id="rate")
            with Vertical(classes="spark"):
                yield Static("requests running")
                yield Sparkline(id="running")
        with Horizontal(id="lower"):
            yield DataTable(id="batch", cursor_type="none", zebra_stripes=True)
            with Vertical(id="side"):
                yield DataTable(id="tiers", cursor_type="none")
                yield DataTable(id="queue", cursor_type="none")
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one("#batch", DataTable).add_columns("request", "tier", "prompt", "output", "blocks", "progress")
        self.query_one("#tiers", DataTable).add_columns("tier", "running", "waiting", "swapped", "refused")
        self.query_one("#queue", DataTable).add_columns("waiting", "tier", "prompt", "waits")
        self.set_interval(self._every_s, self._look)
        await self._look()

    def action_pause(self) -> None:
        self._paused = not self._paused

    async def _look(self) -> None:
        if self._paused:
            return
        try:
            answer = await self._client.get(f"{self._url}/dashboard/now")
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            message = error.response.json().get("error", {}).get("message", str(error))
            self.query_one("#head", Static).update(Text(f"{self._url}: {message}", style="bold red"))
        except httpx.HTTPError as error:
            self.query_one("#head", Static).update(
                Text(f"{self._url}: {error or type(error).__name__}", style="bold red")
            )
        else:
            self._show(answer.json())
        self._looks += 1
        if self._screenshot is not None and self._looks >= _LOOKS:
            self.save_screenshot(self._screenshot)
            self.exit()

    def _show(self, now: dict[str, Any]) -> None:
        before = self._before or now
        self._before = now
        passed_s = now["up_s"] - before["up_s"]  # the wall's clock may jump
        if passed_s > 0:
            self._rates.append((now["tokens"]["generation"] - before["tokens"]["generation"]) / passed_s)
        stats, limits = now["stats"], now["limits"]
        self._running_now.append(stats["running"])
        self.query_one("#head", Static).update(_head(now))
        self.query_one("#figures", Static).update(_figures(now, before, self._rates[-1] if self._rates else 0.0))
        self.query_one("#rate", Sparkline).data = list(self._rates)
        self.query_one("#running", Sparkline).data = list(self._running_now)
        batch = self.query_one("#batch", DataTable)
        batch.clear()
        for seat in now["seats"]:
            batch.add_row(
                *(str(seat[name]) for name in ("id", "tier", "prompt_tokens", "output_tokens", "blocks")),
                _bar(seat["prompt_tokens"], seat["computed_tokens"], seat["limit"]),
            )
        tiers = self.query_one("#tiers", DataTable)
        tiers.clear()
        for name in now["tiers"]:
            tier = stats["tiers"].get(name, {"running": 0, "waiting": 0, "swapped": 0, "refused": {}})
            refused = sum(tier["refused"].values())
            tiers.add_row(name, *(str(tier[field]) for field in ("running", "waiting", "swapped")), str(refused))
        queue = self.query_one("#queue", DataTable)
        queue.clear()
        for each in now["queue"]:
            queue.add_row(str(each["id"]), each["tier"], str(each["prompt_tokens"]), f"{each['waits_s']:.1f} s")
        self.sub_title = f"{limits['max_num_seqs']} seats"


def _head(now: dict[str, Any]) -> Text:
    state = now["failure"] or ("draining" if now["draining"] else "serving")
    text = Text.assemble((now["model"], "bold"), f"  ropeway {now['version']}  up {now['up_s'] / 60:.0f} min  ")
    return text.append(state, style="green" if state == "serving" else "bold red")


def _figures(now: dict[str, Any], before: dict[str, Any], rate: float) -> Text:
    stats, limits = now["stats"], now["limits"]
    ttft = quantile(now["latencies"]["ttft"], before["latencies"]["ttft"], 0.5)
    itl = quantile(now["latencies"]["itl"], before["latencies"]["itl"], 0.5)
    hits = stats["prefix_hits"] / stats["prefix_queries"] if stats["prefix_queries"] else 0.0
    parts = (
        f"running {stats['running']}/{limits['max_num_seqs']}",
        f"waiting {stats['waiting']}",
        f"{rate:.1f} tokens/s",
        f"TTFT {_time(ttft)}",
        f"ITL {_time(itl)}",
        f"KV {stats['blocks_live'] / limits['num_blocks']:.1%} live, "
        f"{stats['blocks_cached'] / limits['num_blocks']:.1%} cached",
        f"prefix hits {hits:.1%}",
        f"preemptions {stats['preemptions']}",
    )
    return Text("   ".join(parts))


def _bar(prompt: int, computed: int, limit: int) -> Text:
    done = round(_BAR * min(computed, limit) / limit)
    of_prompt = min(round(_BAR * prompt / limit), done)
    return Text.assemble(("█" * of_prompt, "cyan"), ("█" * (done - of_prompt), "blue"), ("░" * (_BAR - done), "dim"))


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


Buckets = list[tuple[float | None, float]]


def quantile(now: Buckets, before: Buckets, share: float) -> float | None:
    """Of what came into a histogram between two looks; None: nothing did. Within a bucket values are taken to be spread
    evenly."""
    counts = [(bound, count - earlier) for (bound, count), (_, earlier) in zip(now, before, strict=True)]
    total = counts[-1][1] if counts else 0
    if total <= 0:
        return None
    low = below = 0.0
    for bound, count in counts:
        if count >= share * total:
            if bound is None:
                return low
            return bound if count == below else low + (bound - low) * (share * total - below) / (count - below)
        low, below = bound or low, count
    return low
