"""Tools: what a request offers, and the tool calls in a model's text.

Protocol: `tool_list` and `tool_choice` read a request. Tools reach the model through its chat template alone.
A `CallParser` takes the text as it is generated, and returns content that is certain and calls that are
complete; `flush()` ends it. The format of calls is detected from the chat template (`call_style`):

    hermes  <tool_call>{"name": …, "arguments": {…}}</tool_call>, anywhere (Hermes, Qwen)
    llama   the whole answer is {"name": …, "parameters": {…}}, several separated by ";" (Llama 3)

Text in neither format stays text.
"""
from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.engine.text.detokenizer import overlap
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.fields import Fields, unicode

Tool = dict[str, Any]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
# the start of a call of `structured_output.call_schema` , up to its arguments
CUT_CALL = re.compile(r'\{"name": ?("(?:[^"\\]|\\.)*"), ?"parameters": ?')


@dataclass(frozen=True)
class ToolChoice:
    """`mode`: "none" (tools are not offered), "auto", "required" (at least one call), "named" (the tool
    `name`). `several`: more than one call is allowed."""
    mode: str
    name: str = ""
    several: bool = True

    @property
    def forced(self) -> bool:
        """Whether the answer must be tool calls."""
        return self.mode in ("named", "required")


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is a JSON object as text, truncated where the answer was."""
    name: str
    arguments: str

    def to_json(self, index: int | None = None) -> dict[str, Any]:
        """As in a response; with `index` in a stream."""
        out = {"id": f"call_{secrets.token_hex(12)}", "type": "function",
               "function": {"name": self.name, "arguments": self.arguments}}
        return out if index is None else {"index": index, **out}


def tool_list(fields: Fields) -> tuple[Tool, ...]:
    """The tools of a request, each a function with a name."""
    tools = fields.objects("tools") or []
    for at, tool in enumerate(tools):
        function = tool.get("function")
        path = f"tools[{at}]"
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise invalid(f"{path} is no function, expected type 'function' with a function object", path)
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= 64:
            raise invalid(f"{path}.function.name is missing or has more than 64 characters",
                          f"{path}.function.name")
        unicode(name, f"{path}.function.name")
        if not isinstance(function.get("parameters", {}), dict):
            raise invalid(f"{path}.function.parameters is not a JSON schema", f"{path}.function.parameters")
    return tuple(tools)


def tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """"none", "auto", "required", or {"type": "function", "function": {"name": …}}; parallel_tool_calls."""
    value, several = fields.take("tool_choice"), fields.flag("parallel_tool_calls", True)
    if value is None: return ToolChoice("auto" if tools else "none", "", several)
    if value == "none" or (value == "auto" and not tools): return ToolChoice("none")
    name = value.get("function", {}) if isinstance(value, dict) else value
    if isinstance(name, dict): name, value = name.get("name"), "named"
    if value not in ("auto", "required", "named") or not isinstance(name, str):
        raise invalid("tool_choice is not understood, expected 'none', 'auto', 'required' or a function's "
                      "name in {'type': 'function', 'function': {'name': …}}", "tool_choice")
    if value != "named" and not tools: raise invalid(f"tool_choice is {value!r} without tools", "tool_choice")
    if value == "named" and name not in (names := [tool["function"]["name"] for tool in tools]):
        raise invalid(f"tool_choice names {name[:64]!r}, which is not among tools: {', '.join(names)}",
                      "tool_choice")
    return ToolChoice(value, name if value == "named" else "", several)


def call_style(template: str | None) -> str:
    """The format of tool calls of a model with this chat template: "hermes", "llama" or "" for unknown."""
    if template is None: return ""
    if OPEN in template: return "hermes"
    return "llama" if "python_tag" in template or "ipython" in template else ""


class CallParser:
    """Splits a growing text into content and tool calls."""

    def __init__(self, style: str) -> None:
        self.style, self.held, self.inside = style, "", False

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Content that is certain, and calls that are complete."""
        self.held += piece
        if self.style == "hermes": return self._hermes()
        start = self.held.lstrip()[:1]
        if self.style == "llama" and start in ("", "{"): return "", []
        self.style, text, self.held = "", self.held, ""
        return text, []

    def flush(self) -> tuple[str, list[Call]]:
        """The content and calls left at the end."""
        text, self.held = self.held, ""
        if self.style == "llama" and (calls := _calls(text.split(";"), "parameters")): return "", calls
        if self.inside:
            # the answer ended, or was truncated, without the closing tag
            if calls := _calls([text], "arguments"): return "", calls
            return OPEN + text, []
        return text, []

    def _hermes(self) -> tuple[str, list[Call]]:
        content, calls = "", []
        while True:
            before, found, after = self.held.partition(CLOSE if self.inside else OPEN)
            if not found: break
            self.held = after
            if not self.inside: content += before
            elif made := _calls([before], "arguments"): calls += made
            else: content += OPEN + before + CLOSE
            self.inside = not self.inside
        if not self.inside:
            keep = overlap(self.held, OPEN)
            cut = len(self.held) - keep
            content, self.held = content + self.held[:cut], self.held[cut:]
        if calls and not content.strip(): content = ""
        return content, calls


def _calls(texts: list[str], key: str) -> list[Call]:
    """The calls, or none when one of the texts is not one."""
    out = []
    for text in texts:
        try: data = json.loads(text)
        except (ValueError, RecursionError): return []
        if not isinstance(data, dict) or not isinstance(data.get("name"), str): return []
        arguments = data.get(key, data.get("arguments", data.get("parameters", {})))
        if not isinstance(arguments, dict): return []
        out.append(Call(data["name"].encode("utf-8", "backslashreplace").decode(), _json(arguments)))
    return out


def forced_calls(text: str, choice: ToolChoice) -> list[Call]:
    """The calls in the answer of a request with tool choice "named" (the text is the arguments) or "required"
    (a list of calls). If the text was truncated, so are the last call's arguments; a call without a name is
    dropped."""
    if choice.mode == "named": return [Call(choice.name, text)]
    calls, left = [], text[1:]
    while left:
        try: item, end = json.JSONDecoder().raw_decode(left)
        except (ValueError, RecursionError): break
        calls.append(Call(item["name"], _json(item["parameters"])))
        left = left[end:].lstrip(", ")
    if cut := CUT_CALL.match(left): calls.append(Call(json.loads(cut[1]), left[cut.end():]))
    return calls


def _json(value: Any) -> str:
    """JSON as a model would write it; a lone surrogate, which no response can carry, stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if any("\ud800" <= letter <= "\udfff" for letter in text) else text
