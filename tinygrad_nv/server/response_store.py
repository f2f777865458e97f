"""Responses that are kept, for GET and for previous_response_id.

Protocol: the oldest response is dropped when there are more than `MOST`, or more than `MOST_BYTES` of JSON in
all. A response that is still generated can be cancelled through its `task`.
"""
from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.server.errors import APIError

MOST, MOST_BYTES = 1024, 64 << 20


@dataclass
class Stored:
    """A response as it was answered, its input items, and the conversation up to its end (messages of
    /v1/chat/completions)."""
    response: dict[str, Any]
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    task: asyncio.Task[Any] | None = None
    size: int = 0


@dataclass
class ResponseStore:
    """Responses by id, the oldest first."""
    kept: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    bytes: int = 0

    def put(self, stored: Stored) -> None:
        """Keeps a response, in the place of one with its id."""
        name = stored.response["id"]
        if (old := self.kept.pop(name, None)) is not None:
            self.bytes -= old.size
            stored.task = old.task
        stored.size = len(json.dumps([stored.response, stored.items, stored.messages]))
        self.kept[name] = stored
        self.bytes += stored.size
        while len(self.kept) > MOST or (self.bytes > MOST_BYTES and len(self.kept) > 1):
            self.drop(next(iter(self.kept)))

    def get(self, name: str, param: str | None = None) -> Stored:
        """A response. Raises `APIError` 404."""
        if (found := self.kept.get(name)) is not None: return found
        raise APIError(404, f"there is no response {name[:100]!r}: it was not stored, was deleted, or {MOST} "
                       "newer ones are kept; to fix: send the conversation's items as input",
                       "not_found", param)

    def item(self, name: str) -> dict[str, Any] | None:
        """An input or output item of a response that is kept."""
        every = (each for stored in reversed(self.kept.values())
                 for each in (*stored.response["output"], *stored.items))
        return next((each for each in every if each["id"] == name), None)

    def drop(self, name: str) -> None:
        """Forgets a response, and ends it if it is generated in the background."""
        dropped = self.kept.pop(name)
        self.bytes -= dropped.size
        if dropped.task is not None: dropped.task.cancel()
