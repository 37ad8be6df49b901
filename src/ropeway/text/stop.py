"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Looks for stop strings in one completion, across the borders of its pieces.

    The stop that is *complete first* ends the text; among several complete at the same character the one that began
    first. So the outcome depends on the text alone, not on how it was cut into pieces. The text is cut before the
    stop's first character (with ``include``, after its last). Only what may still become a stop is held back. One
    automaton (Aho and Corasick, "Efficient string matching", 1975) reads every character once, whatever the number
    and length of the stops and of the text before.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``stops`` must not be empty strings."""
        self._include = include
        self._automaton = _automaton(tuple(stops))
        self._state = 0
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str, *, free: bool = False) -> tuple[str, str | None]:
        """Take the next piece. Returns the text that may be shown now, and the stop string that ended the completion,
        if one did; after that nothing is shown any more.

        ``free``: this piece is not searched, and no stop begins in it (tokens below ``min_tokens``).
        """
        automaton, first = self._automaton, self._automaton.first
        if self._hit is not None or first is None:
            return ("", self._hit) if self._hit is not None else (text, None)
        if free:
            held, self._held, self._state = self._held, "", 0
            return held + text, None
        buffer = self._held + text
        position = len(self._held)
        state = self._state
        while position < len(buffer):
            if state == 0:
                found = first.search(buffer, position)
                if found is None:
                    break
                position = found.start()
            state = automaton.step(state, buffer[position])
            position += 1
            stop = automaton.stop[state]
            if stop is not None:
                self._held, self._hit = "", stop
                return buffer[: position if self._include else position - len(stop)], stop
        self._state = state
        shown = len(buffer) - automaton.depth[state]
        self._held = buffer[shown:]
        return buffer[:shown], None

    def finish(self) -> str:
        """The text held back, which is no stop after all now that the completion has ended."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """The prefixes of some stop strings as states, 0 the empty one. Not to be changed once made."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        """State of the longest proper suffix that is a prefix of some stop."""
        self.depth: list[int] = [0]
        """Length of the state's prefix."""
        self.stop: list[str | None] = [None]
        """The longest stop that the state's prefix ends with."""
        for stop in stops:
            self._insert(stop)
        self._link()
        self.first = re.compile("[" + "".join(map(re.escape, self.next[0])) + "]") if stops else None
        """What the stops begin with."""

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.next[state].get(character)
            if following is None:
                following = len(self.next)
                self.next[state][character] = following
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.stop.append(None)
            state = following
        self.stop[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first: to the longest proper suffix that is a prefix of some stop."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self.next[state].items():
                self.fail[following] = self.step(self.fail[state], character)
                if self.stop[following] is None:
                    self.stop[following] = self.stop[self.fail[following]]
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        while character not in self.next[state]:
            if state == 0:
                return 0
            state = self.fail[state]
        return self.next[state][character]


@functools.lru_cache(maxsize=8)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """The n completions of a request share one, as do requests with the same stops that follow each other."""
    return _Automaton(stops)
