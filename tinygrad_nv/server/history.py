"""Tool calls of earlier turns: whatever their arguments are, they are data.

Protocol: `arguments_of(given)` is what a chat template gets for the arguments of a call. An object, or
the text of one, is that object; no arguments (null, "", "[]") are an empty one. A model that was cut at
max_tokens leaves others: JSON that is no object stays as it is, and so does a text that is no JSON. For
templates that read only objects, `objects_only(messages)` puts these into one: {"arguments": …}.
"""
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.fields import parse_value

SURROGATE = re.compile("[\ud800-\udfff]")


def arguments_of(given: Any) -> Any:
    """See above."""
    found = _parsed(given.strip()) if isinstance(given, str) else given
    if found is None or found in ("", [], {}): return {}
    if isinstance(found, str): return SURROGATE.sub("\ufffd", found)
    try: text = json.dumps(found, ensure_ascii=False)
    except RecursionError: return found     # the template's error says so
    # a model may write half a surrogate pair as an escape, and no prompt can have one
    return json.loads(SURROGATE.sub("\ufffd", text)) if SURROGATE.search(text) else found


def objects_only(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...] | None:
    """The messages with objects for the arguments of all calls; None where they have no others."""
    made = tuple({**message, "tool_calls": [*map(_wrapped, message["tool_calls"])]}
                 if "tool_calls" in message else message for message in messages)
    return None if made == tuple(messages) else made


def _wrapped(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], dict): return call
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def _parsed(text: str) -> Any:
    try: return parse_value(text)
    except APIError: return text
