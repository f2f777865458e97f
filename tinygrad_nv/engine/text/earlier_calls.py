"""Tool calls of earlier turns: whatever their arguments are, they are data.

Protocol: `arguments_of(given)` is what a chat template gets for the arguments of a call. An object, or
the text of one, is that object; no arguments (null, "", "[]") are an empty one. A model that was cut at
max_tokens leaves others: JSON that is no object stays as it is, and so does a text that is no JSON.
`with_arguments(message)` has them so. For templates that read only objects, `render` puts the others into
one: {"arguments": …}.

`strict_json(text)` rejects what json.loads accepts: duplicate names, NaN and Infinity, numbers beyond
float64.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import NVError

SURROGATE = re.compile("[\ud800-\udfff]")

LONG = 64 << 10     # characters of JSON
Message = Mapping[str, Any]


def arguments_of(given: Any) -> Any:
    """See above."""
    found = _parse(given.strip()) if isinstance(given, str) else given
    if found is None or found in ("", [], {}): return {}
    if isinstance(found, str): return SURROGATE.sub("\ufffd", found)
    try: text = json.dumps(found, ensure_ascii=False)
    except (RecursionError, TypeError, ValueError): return found    # the template's error says so
    # a model may write half a surrogate pair as an escape, and no prompt can have one
    return json.loads(SURROGATE.sub("\ufffd", text)) if SURROGATE.search(text) else found


def with_arguments(message: Message) -> Message:
    """A message whose calls have the arguments that templates read."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)): return message
    return {**message, "tool_calls": [_with(call, arguments_of(call["function"].get("arguments")))
                                      for call in calls]}


def render(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), /,
           **extra: Any) -> str:
    """`tokenizer.render`, and with objects for all arguments where the template fails for others."""
    try: return tokenizer.render(messages, tools, **extra)
    except NVError:
        if (other := [*map(_objects_only, messages)]) == [*messages]: raise
        return tokenizer.render(other, tools, **extra)


def strict_json(text: str) -> Any:
    """See above. Raises `ValueError`, and `RecursionError` for what is nested too deeply."""
    # a function of Python, which lets other threads go on among a million numbers
    whole = _int if len(text) > LONG else None
    return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float,
                      parse_int=whole)


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _with(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _objects_only(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)): return message
    return {**message, "tool_calls": [
        call if isinstance(given := call["function"].get("arguments"), Mapping)
        else _with(call, {"arguments": given}) for call in calls]}


def _parse(text: str) -> Any:
    try: return strict_json(text)
    except (ValueError, RecursionError): return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out: raise ValueError(f"{name[:100]!r} is given twice in one object")
        out[name] = value
    return out


def _constant(word: str) -> float: raise ValueError(f"{word} is not a JSON number")


def _int(text: str) -> int: return int(text)


def _float(text: str) -> float:
    if math.isfinite(value := float(text)): return value
    raise ValueError(f"{text[:40]} is beyond every 64-bit float")
