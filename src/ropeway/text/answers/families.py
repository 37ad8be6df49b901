"""How a model writes, told by its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.errors import ConfigError
from ropeway.text.answers.parts import PartReader, PlainReader
from ropeway.text.answers.reasoning import ReasoningReader
from ropeway.text.answers.tools import DeepSeek, Hermes, Llama3, ToolFormat
from ropeway.text.tokenizer import Tokenizer

TOOL_FORMATS = ("auto", "none", "hermes", "llama3_json", "deepseek")
REASONING_FORMATS = ("auto", "none", "think")
END_OF_REASONING = "</think>"
BEGIN_OF_REASONING = "<think>"


@dataclass(frozen=True)
class Writing:
    """How a model calls tools and reasons."""

    tools: ToolFormat | None = None
    shows_tools: bool = False
    """Whether its chat template tells the model of tools."""
    reasons: bool = False

    def reader(self, names: Sequence[str], *, prompt_end: str) -> PartReader:
        """For an answer of a model that may call ``names``; ``prompt_end``: the last characters of its prompt."""
        content = self.tools.reader(names) if self.tools is not None and names else PlainReader()
        if not self.reasons:
            return content
        return ReasoningReader(BEGIN_OF_REASONING, END_OF_REASONING, content, inside=thinks(prompt_end))

    def answers_after(self, prompt_end: str) -> str:
        """What ends the reasoning before the answer; empty where there is none."""
        closed = prompt_end.rstrip().endswith(END_OF_REASONING)
        return "" if closed or not self.reasons else END_OF_REASONING


def thinks(prompt_end: str) -> bool:
    """Whether a prompt ends with the mark that begins the reasoning."""
    return prompt_end.rstrip().endswith(BEGIN_OF_REASONING)


def writing_of(tokenizer: Tokenizer | None, tools: str = "auto", reasoning: str = "auto") -> Writing:
    """``tools`` and ``reasoning``: one of the formats, or as the chat template tells. Raises ``ConfigError`` for a name
    that is none."""
    for setting, value, known in (
        ("tool_call_parser", tools, TOOL_FORMATS),
        ("reasoning_parser", reasoning, REASONING_FORMATS),
    ):
        if value not in known:
            raise ConfigError(f"{setting} is {value!r}; it must be one of {', '.join(known)}", param=setting)
    templates = "" if tokenizer is None else "\n".join(tokenizer.template_sources)
    return Writing(
        tools=_tool_format(templates, tools),
        shows_tools="tools" in templates,
        reasons=END_OF_REASONING in templates if reasoning == "auto" else reasoning == "think",
    )


def _tool_format(templates: str, wanted: str) -> ToolFormat | None:
    if wanted == "auto":
        if "tools" not in templates:
            return None
        if "<tool_call>" in templates:
            wanted = "hermes"
        elif "<｜tool▁calls▁begin｜>" in templates:
            wanted = "deepseek"
        elif "<|python_tag|>" in templates or '"parameters": ' in templates:
            wanted = "llama3_json"
    if wanted == "deepseek":
        return DeepSeek("v3" if "```json" in templates else "v3.1")
    formats: dict[str, ToolFormat] = {"hermes": Hermes(), "llama3_json": Llama3()}
    return formats.get(wanted)
