"""Items of earlier turns that are calls of other tools than functions, and their results.

Protocol: `add_past(kind, fields, out)` adds an item to a conversation, and returns whether it is of such a
kind. Tools that a client runs (custom, shell, patches) are called with an object: {"input": text} for a
custom tool. So are tools that a server runs, where the item has a result; without one it has nothing that the
model could read, and is left out (leniency.py).
"""
from __future__ import annotations

import json
from typing import Any

from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.leniency import ignore

Messages = list[dict[str, Any]]
# the field with the input, by the kind of a call that a client answers
CALLS = {"custom_tool_call": "input", "local_shell_call": "action", "shell_call": "action",
         "apply_patch_call": "operation"}
OUTPUTS = tuple(f"{kind}_output" for kind in CALLS)
# the fields with the input and the result, by the kind of a call that a server answers
SERVED = {"mcp_call": ("arguments", "output"), "web_search_call": ("action", "results"),
          "file_search_call": ("queries", "results"), "code_interpreter_call": ("code", "outputs"),
          "image_generation_call": ("", ""), "mcp_list_tools": ("", ""), "mcp_approval_request": ("", ""),
          "mcp_approval_response": ("", ""), "tool_search_call": ("", ""), "tool_search_output": ("", ""),
          "compaction": ("", "")}
FILES = ("input_image", "input_file")
TEXTS = ("input_text", "output_text", "text")


def add_past(kind: str, fields: Fields, out: Messages) -> bool:
    """See above."""
    if kind in CALLS:
        given = fields.take(CALLS[kind])
        name = fields.text("name") or kind.removesuffix("_call")
        add_call(out, _call_id(fields), name, given if isinstance(given, dict) else {"input": given})
    elif kind in OUTPUTS:
        text = _text(fields.take("output"), fields.path("output"))
        out.append({"role": "tool", "tool_call_id": _call_id(fields), "content": text})
    elif kind in SERVED: _add_served(kind, fields, out)
    else: return False
    fields.left = {}    # what else the item has is about how it ran
    return True


def add_call(out: Messages, call_id: str, name: str, arguments: Any) -> None:
    """Adds a call to the assistant's message."""
    if not out or out[-1]["role"] != "assistant": out.append({"role": "assistant", "content": ""})
    out[-1].setdefault("tool_calls", []).append(
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})


def _call_id(fields: Fields) -> str:
    """The id of a call; a result of a local shell has it as its own."""
    return fields.text("call_id") or fields.require_text("id")


def _add_served(kind: str, fields: Fields, out: Messages) -> None:
    put, got = SERVED[kind]
    given, found = fields.take(put), fields.take(got) or fields.take("error")
    if not found:
        return ignore(invalid(f"{fields.path('type')} is {kind!r}, a call of a tool that the server does not "
                              "run, and has no result; to fix: leave it out", fields.path("type"),
                              "unsupported"))
    name, call_id = fields.text("name") or kind.removesuffix("_call"), fields.text("id") or ""
    if kind != "mcp_call" and not isinstance(given, dict): given = {put: given}
    add_call(out, call_id, name, given)
    out.append({"role": "tool", "tool_call_id": call_id, "content": _text(found, fields.path(got))})


def _text(found: Any, path: str) -> str:
    """A result as a text: what is none, as JSON."""
    if found is None or isinstance(found, str): return found or ""
    parts = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    for each in parts:
        if each.get("type") in FILES:
            raise invalid(f"{path} has a part of type {each['type']!r}, expected texts: the model reads "
                          "nothing else", path, "unsupported")
    texts = [each["text"] for each in parts
             if each.get("type") in TEXTS and isinstance(each.get("text"), str)]
    if texts and len(texts) == len(found): return "\n".join(texts)
    return json.dumps(found, ensure_ascii=False)
