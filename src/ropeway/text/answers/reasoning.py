"""Reasoning models think aloud before they answer: ``<think> ... </think>`` and then the answer."""

from __future__ import annotations

from ropeway.text.answers.parts import Part, PartReader, Reasoning, split_at


class ReasoningReader:
    """What stands between two marks is reasoning; the rest is read by another reader. Blanks next to the marks belong
    to neither.

    Only at the beginning of a text does the first mark mean anything. It may stand in the prompt already, and an answer
    that comes to its end within the reasoning has no content."""

    def __init__(self, begin: str, end: str, after: PartReader, *, inside: bool) -> None:
        """``inside``: the prompt has the first mark."""
        self._begin, self._end = begin, end
        self._after = after
        self._state = "inside" if inside else "before"
        self._held = ""
        self._said = False
        """Whether any reasoning has been shown."""

    def push(self, text: str) -> list[Part]:
        if self._state == "after":
            return self._after.push(text)
        self._held += text
        if self._state == "before" and not self._find_begin():
            return []
        if self._state == "inside":
            return self._reason()
        rest, self._held = self._held, ""
        return self._answer(rest)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == "inside":
            return [Reasoning(held.rstrip())] if held.strip() else []
        parts = self._after.push(held) if held else []
        return [*parts, *self._after.finish()]

    def _find_begin(self) -> bool:
        """Whether it is known how the text begins."""
        text = self._held.lstrip()
        if text.startswith(self._begin):
            self._held = text[len(self._begin) :]
            self._state = "inside"
            return True
        if self._begin.startswith(text):
            return False
        self._state = "after"
        return True

    def _reason(self) -> list[Part]:
        shown, found, rest = split_at(self._held, [self._end])
        if not self._said:
            shown = shown.lstrip()
        if found is None:
            # Blanks may be the last ones.
            kept = shown.rstrip()
            self._held = shown[len(kept) :] + rest
            self._said = self._said or bool(kept)
            return [Reasoning(kept)] if kept else []
        self._state, self._held = "gap", ""
        parts: list[Part] = [Reasoning(shown.rstrip())] if shown.strip() else []
        return [*parts, *self._answer(rest)]

    def _answer(self, text: str) -> list[Part]:
        """The text after the reasoning."""
        if self._state == "gap":
            text = text.lstrip()
            if not text:
                return []
            self._state = "after"
        return self._after.push(text)
