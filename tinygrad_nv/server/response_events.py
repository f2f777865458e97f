"""A response as it grows, and the events of its stream.

Protocol: `ResponseBuilder.push(update)` adds what an update brings to the output items and returns the events
of the stream; `finish(...)` ends it. Reasoning, content and each tool call are items of their own, in the
order in which the model writes them. `response` is the response so far.
"""
from __future__ import annotations

import secrets
import time
from typing import Any

from tinygrad_nv.server.chat import logprob
from tinygrad_nv.server.conversation import Conversation, Update
from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.parsers.parser import CallDelta, Content, Event, Reasoning
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.responses_request import ResponseRequest

StreamEvent = dict[str, Any]


class ResponseBuilder:
    """The response to `request`."""

    def __init__(self, name: str, conversation: Conversation, request: ResponseRequest) -> None:
        self.call_id = conversation.call_id
        self.response: dict[str, Any] = {
            "id": name, "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "error": None, "incomplete_details": None, "model": conversation.model, "output": [],
            "usage": None,
            "service_tier": "default", **request.shown}
        self.count, self.call = 0, -1       # events so far; the index of the call that is written
        self.with_logprobs = request.chat.params.logprobs is not None

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items so far."""
        return self.response["output"]

    def begin(self) -> list[StreamEvent]:
        """The first events."""
        return [self._event(f"response.{name}", response=self._copy()) for name in ("created", "in_progress")]

    def push(self, update: Update) -> list[StreamEvent]:
        """The events of an update."""
        told = [logprob(each) for each in update.delta.logprobs] if self.with_logprobs else []
        return [made for event in update.events for made in self._push(event, told)]

    def finish(self, reason: str | None, record: Record) -> list[StreamEvent]:
        """The last events. `reason`: the finish reason of the answer."""
        status = "incomplete" if reason == "length" else "completed"
        events = self._close(status)
        if reason == "length": self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response |= {"status": status, "usage": usage(record)}
        return [*events, self._event(f"response.{status}", response=self._copy())]

    def fail(self, error: APIError) -> StreamEvent:
        """Returns the event of an error, after which the stream ends."""
        self._close("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=self._copy())

    # **** items ****

    def _push(self, event: Event, logprobs: list[dict[str, Any]]) -> list[StreamEvent]:
        if isinstance(event, CallDelta): return self._push_call(event)
        kind = "reasoning" if isinstance(event, Reasoning) else "message"
        events = [] if self._open(kind) else self._begin_text(kind)
        part = self.output[-1]["content"][0]
        part["text"] += event.text
        more: dict[str, Any] = {}
        if isinstance(event, Content):
            part["logprobs"] += logprobs
            more = {"logprobs": logprobs}
        return [*events, self._event(f"response.{part['type']}.delta", **self._place(), content_index=0,
                                     delta=event.text, **more)]

    def _push_call(self, call: CallDelta) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if call.name is not None or not self._open("function_call") or self.call != call.index:
            events, self.call = self._close("completed"), call.index
            self.output.append({"id": f"fc_{secrets.token_hex(12)}", "type": "function_call",
                                "call_id": self.call_id(), "name": call.name or "",
                                "arguments": "", "status": "in_progress"})
            events.append(self._item_event("added"))
        self.output[-1]["arguments"] += call.text
        if not call.text: return events
        return [*events, self._event("response.function_call_arguments.delta", **self._place(),
                                     delta=call.text)]

    def _begin_text(self, kind: str) -> list[StreamEvent]:
        events = self._close("completed")
        name = "rs" if kind == "reasoning" else "msg"
        item: dict[str, Any] = {"id": f"{name}_{secrets.token_hex(12)}", "type": kind,
                                "status": "in_progress",
                                "content": []}
        if kind == "reasoning": item["summary"] = []
        else: item["role"] = "assistant"
        self.output.append(item)
        events.append(self._item_event("added"))
        item["content"].append({"type": "reasoning_text", "text": ""} if kind == "reasoning" else
                               {"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        return [*events, self._part_event("added")]

    def _open(self, kind: str) -> bool:
        """Whether the last item is of this kind and goes on."""
        return bool(self.output) and self.output[-1]["type"] == kind and \
            self.output[-1]["status"] == "in_progress"

    def _close(self, status: str) -> list[StreamEvent]:
        """Ends the last item."""
        if not self.output or (item := self.output[-1])["status"] != "in_progress": return []
        item["status"] = status
        if item["type"] == "function_call":
            return [self._event("response.function_call_arguments.done", **self._place(), name=item["name"],
                                arguments=item["arguments"]), self._item_event("done")]
        part = item["content"][0]
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        return [self._event(f"response.{part['type']}.done", **self._place(), content_index=0,
                            text=part["text"], **more), self._part_event("done"), self._item_event("done")]

    # **** events ****

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        self.count += 1
        return {"type": kind, "sequence_number": self.count - 1, **fields}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _item_event(self, what: str) -> StreamEvent:
        item = self.output[-1]
        shown = {**item, "content": [*item["content"]]} if "content" in item else {**item}
        return self._event(f"response.output_item.{what}", output_index=len(self.output) - 1, item=shown)

    def _part_event(self, what: str) -> StreamEvent:
        return self._event(f"response.content_part.{what}", **self._place(), content_index=0,
                           part={**self.output[-1]["content"][0]})

    def _copy(self) -> dict[str, Any]: return {**self.response, "output": [*self.output]}


def usage(record: Record) -> dict[str, Any]:
    """Tokens of a response."""
    return {"input_tokens": record.prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens},
            "output_tokens": record.output_tokens,
            "output_tokens_details": {"reasoning_tokens": record.reasoning_tokens},
            "total_tokens": record.prompt_tokens + record.output_tokens}
