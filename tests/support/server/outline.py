"""Outlines of answers: which fields there are, in which order, and which of them are null.

Protocol: `outline(value)` is JSON again. Objects keep their names, lists the outlines of their members, equal
neighbours once; null, truth values and the texts that name kinds of things stay as they are, and other values
are the names of their types. A stream is the list of its events.
"""
from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

# fields whose texts are said again
BY_TOKEN = ("top_logprobs", "prompt_logprobs")     # whose objects may have tokens for names
KINDS = ("object", "type", "role", "finish_reason", "status", "stop_reason", "reason")


def outline(value: Any, name: str = "") -> Any:
    """Returns the outline of `value`, which is called `name`."""
    if isinstance(value, dict) and name in BY_TOKEN and "token" not in value:
        return {"*": outline([*value.values()])}
    if isinstance(value, dict): return {key: outline(each, key) for key, each in value.items()}
    if isinstance(value, list):
        made = [outline(each, name) for each in value]
        return [each for at, each in enumerate(made) if at == 0 or each != made[at - 1]]
    return value if value is None or isinstance(value, bool) or name in KINDS else type(value).__name__


def events(text: str) -> list[Any]:
    """The events of a stream; `[DONE]` is a text."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def in_order(value: Any, left_out: Collection[str] = ()) -> Any:
    """`value` with objects as lists of pairs, for which the order counts, without fields that are `left_out`.
    """
    if isinstance(value, dict):
        return [[key, in_order(each, left_out)] for key, each in value.items() if key not in left_out]
    return [in_order(each, left_out) for each in value] if isinstance(value, list) else value
