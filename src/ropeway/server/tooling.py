"""The tools of a request: what the model is told of them, and whether it must call one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ropeway.errors import InvalidRequest
from ropeway.grammar import Grammar
from ropeway.server.protocol import ChatCompletionRequest, NamedTool, ToolDefinition
from ropeway.text.answers.families import Writing
from ropeway.text.answers.tools import Hermes, Tool

MAX_TOOLS = 128
"""Most tools of a request (OpenAI's limit)."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class ToolUse:
    """What a request makes of its tools."""

    tools: Sequence[Tool] = ()
    """Those that may be called."""
    shown: Sequence[Mapping[str, Any]] = ()
    """What the chat template is given."""
    forced: bool = False
    named: bool = False
    """Whether the request names the one that is to be called."""
    several: bool = True
    """Whether one answer may call more than once."""

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]

    def grammar(self, writing: Writing, after: str) -> Grammar | None:
        """Of an answer that calls a tool, where one must be called; that may call one, where one is strict."""
        if writing.tools is None:
            return None
        if self.forced:
            return Grammar.lark(writing.tools.grammar(self.tools, several=self.several), after=after)
        if not any(tool.strict for tool in self.tools):
            return None
        rules = writing.tools.free_grammar(self.tools, several=self.several)
        return None if rules is None else Grammar.lark(rules, after=after)

    def instructed(self, messages: Sequence[Mapping[str, Any]], writing: Writing) -> list[Mapping[str, Any]]:
        """The messages, with a word on the tools where the chat template has none."""
        if not self.shown or writing.shows_tools or not messages:
            return list(messages)
        text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(each) for each in self.shown))
        first = messages[0]
        if first.get("role") == "system" and isinstance(first.get("content"), str):
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


_INSTRUCTIONS = """\
You may call functions to help the user. These are their signatures:
{tools}
To call one, write its name and its arguments as a JSON object between two marks:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def tool_use(request: ChatCompletionRequest, writing: Writing) -> ToolUse:
    """Raises ``InvalidRequest`` naming the field: a choice without tools or of none of them, a model that knows no
    tools, names that are no names or come twice."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return ToolUse()
    tools = _checked(request.tools)
    if choice == "none":
        return ToolUse()
    if writing.tools is None or not (writing.shows_tools or writing.tools.name == Hermes.name):
        raise InvalidRequest(
            "this model's chat template knows no tools; leave them out, or start the server with --tool-call-parser "
            "hermes to try",
            param="tools",
        )
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.name == choice.function.name]
        if not chosen:
            raise InvalidRequest(
                f"tool_choice names {choice.function.name!r:.80}, which is none of the tools: "
                f"{', '.join(tool.name for tool in tools)}",
                param="tool_choice",
            )
        return ToolUse(chosen, _shown(request.tools), forced=True, named=True, several=False)
    if choice not in (None, "auto", "required"):
        raise InvalidRequest(
            f"tool_choice is {choice!r:.40}; it must be none, auto, required or one of the tools", param="tool_choice"
        )
    return ToolUse(
        tools,
        _shown(request.tools),
        forced=choice == "required",
        several=request.parallel_tool_calls is not False,
    )


def shown_tools(given: Sequence[ToolDefinition] | None) -> ToolUse:
    """Tools that a prompt tells of, and no more. Raises ``InvalidRequest`` for one that is none."""
    return ToolUse(_checked(given), _shown(given)) if given else ToolUse()


def _checked(given: Sequence[ToolDefinition]) -> list[Tool]:
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"{len(given)} tools; the limit is {MAX_TOOLS}", param="tools")
    tools: list[Tool] = []
    for index, each in enumerate(given):
        function = each.function
        if each.type != "function":
            raise InvalidRequest(f"tools[{index}].type is {each.type!r:.40}; it must be function", param="tools")
        if not _NAME.fullmatch(function.name):
            raise InvalidRequest(
                f"tools[{index}].function.name is {function.name!r:.80}; it must be 1 to 64 letters, digits, "
                "underscores, dots or dashes",
                param="tools",
            )
        if any(tool.name == function.name for tool in tools):
            raise InvalidRequest(f"two tools have the name {function.name}", param="tools")
        tools.append(
            Tool(
                name=function.name,
                description=function.description or "",
                parameters=function.parameters or None,
                strict=bool(function.strict),
            )
        )
    return tools


def _shown(given: Sequence[ToolDefinition]) -> list[Mapping[str, Any]]:
    """As OpenAI writes them, which is what templates expect."""
    shown: list[Mapping[str, Any]] = []
    for each in given:
        function = {name: value for name, value in msgspec.to_builtins(each.function).items() if value is not None}
        function.pop("strict", None)
        shown.append({"type": "function", "function": function})
    return shown
