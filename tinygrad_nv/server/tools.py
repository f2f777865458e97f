"""Tools: what a request offers, and the schema-independent part of its tool choice.

Protocol: `tool_list`, `select_tools` and `tool_choice` read a request, `legacy_choice` one with the older
fields functions and function_call. Tools reach the model through its chat template alone; parsers/ finds the
calls in its answer.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.server.errors import APIError, invalid
from tinygrad_nv.server.fields import Fields, unicode
from tinygrad_nv.server.leniency import ignore

Tool = dict[str, Any]
NO_PARAMETERS = {"type": "object", "properties": {}}
MAX_TOOLS = 2048    # limit: tools of a request
MOST_LISTED = 32    # names in a message
MOST_NAME = 256     # characters; names of tools of MCP servers are long


@dataclass(frozen=True)
class ToolChoice:
    """`mode`: "none" (tools are not offered), "auto", "required" (at least one call), "named" (the tool
    `name`). `several`: more than one call is allowed."""
    mode: str
    name: str = ""
    several: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be tool calls."""
        return self.mode in ("named", "required")


def tool_list(fields: Fields) -> tuple[Tool, ...]:
    """The tools of a request, each a function with a name and parameters, which may be none. Other fields are
    left for the chat template."""
    tools = fields.objects("tools") or []
    if len(tools) > MAX_TOOLS:
        raise invalid(f"{fields.path('tools')} has {len(tools)} tools, expected at most {MAX_TOOLS}",
                      fields.path("tools"))
    made, refused = list[Tool](), list[APIError]()
    for at, tool in enumerate(tools):
        function = tool.get("function")
        path = f"tools[{at}]"
        if isinstance(kind := tool.get("type"), str) and kind != "function" and function is None:
            refused.append(other_tool(Fields(tool, path), kind, "function"))
            continue
        if (kind or "function") != "function" or not isinstance(function, dict):
            raise invalid(f"{path} is no function, expected type 'function' with a function object", path)
        name = function.get("name")
        if not isinstance(name, str) or len(name) > MOST_NAME:
            raise invalid(f"{path}.function.name is missing or has more than {MOST_NAME} characters, "
                          f"expected a text of at most {MOST_NAME}", f"{path}.function.name")
        unicode(name, f"{path}.function.name")
        function = {key: value for key, value in function.items() if value is not None}
        if not isinstance(function.setdefault("parameters", dict(NO_PARAMETERS)), dict):
            raise invalid(f"{path}.function.parameters is not a JSON schema", f"{path}.function.parameters")
        made.append({**tool, "type": "function", "function": function})
    leave_out(refused, made)
    return tuple(made)


def other_tool(fields: Fields, kind: str | None, expected: str) -> APIError:
    """The error for a tool of another type, which the server would have to run, or which has no schema."""
    return invalid(f"{fields.path('type')} is {str(kind)[:60]!r}, expected {expected!r}: a model calls "
                   "tools with a schema, and the server runs no tools of its own", fields.path("type"),
                   "unsupported")


def leave_out(refused: Sequence[APIError], made: Sequence[Tool]) -> None:
    """Leaves tools of other types out beside functions, which a model may call in their place. Raises the
    error of the first one where there is nothing else."""
    for error in refused:
        if not made: raise error
        ignore(error)


def list_names(names: Sequence[str]) -> str:
    """Lists names of tools, for a message."""
    more = ", …" if len(names) > MOST_LISTED else ""
    return ", ".join(name[:64] for name in names[:MOST_LISTED]) + more


def legacy_choice(fields: Fields, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Tools and tool choice of the fields functions and function_call: at most one call."""
    for name in ("tools", "tool_choice"):
        if tools or name in fields.left:
            raise invalid(f"{name} and functions are both given, expected one of them; to fix: leave "
                          "functions "
                          "and function_call out, which are the older names", "functions")
    functions = fields.objects("functions") or []
    made = Fields({"tools": [{"type": "function", "function": each} for each in functions]})
    value = fields.take("function_call")
    if isinstance(value, dict): value = {"type": "function", "function": value}
    if isinstance(value, str) and value not in ("none", "auto"):
        raise invalid(f"function_call is {value[:60]!r}, expected 'none', 'auto' or {{'name': …}}",
                      "function_call")
    fields.flag("parallel_tool_calls", False)
    offered = tool_list(made)
    if value == "auto" and not offered: value = None
    return offered, tool_choice(Fields({"tool_choice": value, "parallel_tool_calls": False}), offered)


def select_tools(fields: Fields, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Returns the tools that a tool choice of type "allowed_tools" keeps, whose mode is then the tool
    choice."""
    value = fields.left.get("tool_choice")
    if not isinstance(value, dict) or value.get("type") != "allowed_tools": return tools
    outer = Fields(value, "tool_choice")
    outer.text("type")
    inner = Fields(outer.object("allowed_tools") or {}, "tool_choice.allowed_tools")
    outer.finish()
    mode, allowed = inner.one_of("mode", ("auto", "required")), tool_list(inner)
    inner.finish()
    names, known = ({tool["function"]["name"]: None for tool in each} for each in (allowed, tools))
    if not names or (unknown := [name for name in names if name not in known]):
        found = f"names {unknown[0]!r}" if names else "names no tool"
        raise invalid(f"tool_choice.allowed_tools {found}, expected some of tools: {list_names([*known])}",
                      "tool_choice.allowed_tools.tools")
    fields.left["tool_choice"] = mode or "auto"
    return tuple(tool for tool in tools if tool["function"]["name"] in names)


def tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """"none", "auto", "required", or {"type": "function", "function": {"name": …}}; parallel_tool_calls."""
    value, several = fields.take("tool_choice"), fields.flag("parallel_tool_calls", True)
    if value is None: return ToolChoice("auto" if tools else "none", "", several)
    if value == "none": return ToolChoice("none")
    name = value.get("function", {}) if isinstance(value, dict) else value
    if isinstance(name, dict): name, value = name.get("name"), "named"
    if value not in ("auto", "required", "named") or not isinstance(name, str):
        raise invalid("tool_choice is not understood, expected 'none', 'auto', 'required' or a function's "
                      "name in {'type': 'function', 'function': {'name': …}}", "tool_choice")
    if value != "named" and not tools: raise invalid(f"tool_choice is {value!r} without tools", "tool_choice")
    if value == "named" and name not in (names := [tool["function"]["name"] for tool in tools]):
        raise invalid(f"tool_choice names {name[:64]!r}, which is not among tools: {list_names(names)}",
                      "tool_choice")
    return ToolChoice(value, name if value == "named" else "", several)
