"""Responses that are kept, for GET and for previous_response_id.

Protocol: the oldest response is dropped when there are more than `MOST`, or in all more than `MOST_BYTES` of
JSON or `MOST_VALUES` in it: each of Python's collections of garbage looks through what is kept. A response
that is still generated can be cancelled through its `task`.
"""
from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.json_answer import pieces, weight

MOST = 1024             # limit: responses that are kept for GET and previous_response_id
MOST_BYTES = 64 << 20   # limit: bytes of all responses that are kept
MOST_VALUES = 1 << 18   # limit: values in all responses that are kept


@dataclass
class Stored:
    """A response as it was answered, its input items, and the conversation up to its end (messages of
    /v1/chat/completions)."""
    response: dict[str, Any]
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    task: asyncio.Task[Any] | None = None
    size: int = 0
    conversation: int = 0       # bytes of `messages`
    values: int = 0

    def measure(self) -> Stored:
        """Itself, with its sizes: slice by slice, where it is large."""
        self.conversation = size(self.messages)
        self.size = self.conversation + size(self.response) + size(self.items)
        self.values = weight([self.response, self.items, self.messages], MOST_VALUES)
        return self

    def all_items(self) -> Iterator[dict[str, Any]]:
        """The input items and the output, the last one first."""
        yield from reversed(self.items)
        yield from reversed(self.response.get("output", []))


def size(value: Any) -> int:
    """Bytes of its JSON, about: characters."""
    return sum(map(len, pieces(value)))


@dataclass
class ResponseStore:
    """Responses by id, the oldest first."""
    kept: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    bytes: int = 0
    values: int = 0
    by_id: dict[str, dict[str, Any]] = field(default_factory=dict)     # items

    def put(self, stored: Stored) -> None:
        """Keeps a response, in the place of one with its id."""
        name = stored.response["id"]
        if (old := self.kept.get(name)) is not None:
            stored.task = old.task
            self._remove(name)
        if not stored.size: stored.measure()
        self.kept[name] = stored
        self.bytes += stored.size
        self.values += stored.values
        self.by_id |= {each["id"]: each for each in stored.all_items() if isinstance(each.get("id"), str)}
        while len(self.kept) > MOST or (len(self.kept) > 1 and (
                self.bytes > MOST_BYTES or self.values > MOST_VALUES)): self.drop(next(iter(self.kept)))

    def get(self, name: str, param: str | None = None) -> Stored:
        """A response. Raises `APIError` 404."""
        if (found := self.kept.get(name)) is not None: return found
        raise APIError(404, f"there is no response {name[:100]!r}: it was not stored, was deleted, or {MOST} "
                       "newer ones are kept; to fix: send the conversation's items as input",
                       "not_found", param)

    def size(self, name: Any) -> int:
        """Bytes of a response, 0 for one that is not kept."""
        return found.size if isinstance(name, str) and (found := self.kept.get(name)) is not None else 0

    def item(self, name: str) -> dict[str, Any] | None:
        """An input or output item of a response that is kept."""
        return self.by_id.get(name)

    def drop(self, name: str) -> None:
        """Forgets a response, and ends it if it is generated in the background."""
        dropped = self._remove(name)
        if dropped.task is not None: dropped.task.cancel()

    def _remove(self, name: str) -> Stored:
        removed = self.kept.pop(name)
        self.bytes -= removed.size
        self.values -= removed.values
        for each in removed.all_items():
            if isinstance(own := each.get("id"), str) and self.by_id.get(own) is each: del self.by_id[own]
        return removed
