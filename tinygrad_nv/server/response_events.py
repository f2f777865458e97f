"""A response as it grows, and the events of its stream.

Protocol: `ResponseBuilder.push(update)` adds what an update brings to the output items and returns the events
of the stream; `finish(...)` ends it. Reasoning, content and each tool call are items of their own, in the
order in which the model writes them. `response` is the response so far.
"""
from __future__ import annotations

import secrets
import time
from typing import Any

from tinygrad_nv.engine.outputs import TokenLogprobs
from tinygrad_nv.server.chat import logprob
from tinygrad_nv.server.conversation import Conversation, Update
from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.parsers.parser import CallDelta, Content, Event, Reasoning
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.responses_request import ResponseRequest

StreamEvent = dict[str, Any]
# of a response, in vLLM's order; `error` and `store` are OpenAI's
FIELDS = ("id", "created_at", "error", "incomplete_details", "instructions", "metadata", "model", "object",
          "output", "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p", "background",
          "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt", "reasoning",
          "service_tier", "status", "store", "text", "top_logprobs", "truncation", "usage", "user",
          "presence_penalty", "frequency_penalty", "kv_transfer_params", "ec_transfer_params",
          "input_messages", "output_messages")


class ResponseBuilder:
    """The response to `request`."""

    def __init__(self, name: str, conversation: Conversation, request: ResponseRequest) -> None:
        self.call_id = conversation.call_id
        most = request.chat.params.max_tokens or conversation.service.model.length - len(conversation.prompt)
        told = {"id": name, "created_at": int(time.time()), "model": conversation.model, "object": "response",
                "output": [], "status": "in_progress", "max_output_tokens": most, **request.shown}
        self.response: dict[str, Any] = {field: told.get(field) for field in FIELDS}
        self.count, self.call = 0, -1       # events so far; the index of the call that is written
        self.held: list[dict[str, Any]] = []    # logprobs of tokens without a text so far
        self.stream, self.with_logprobs = request.chat.stream, request.chat.params.logprobs is not None

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items so far."""
        return self.response["output"]

    def begin(self) -> list[StreamEvent]:
        """The first events."""
        return [self._event(f"response.{name}", response=self._copy()) for name in ("created", "in_progress")]

    def push(self, update: Update) -> list[StreamEvent]:
        """The events of an update."""
        if self.with_logprobs: self.held += [_logprob(each) for each in update.delta.logprobs]
        return [made for event in update.events for made in self._push(event)]

    def finish(self, reason: str | None, record: Record, unfinished: str) -> list[StreamEvent]:
        """The last events. `reason`: the finish reason of the answer; `unfinished`: the text of calls that it
        ends inside of, which is content where no event has told of them."""
        if unfinished and not self.stream:
            self.response["output"] = [each for each in self.output if each["type"] != "function_call"]
            self._push(Content(unfinished))
        status = "incomplete" if reason == "length" else "completed"
        # as in vLLM the response tells that it is cut, and a call, whose arguments are no JSON
        cut_call = status == "incomplete" and self._open("function_call")
        events = self._close("incomplete" if cut_call else "completed")
        for item in () if self.stream else self.output:
            if item["type"] == "reasoning": item["status"] = None
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

    def _push(self, event: Event) -> list[StreamEvent]:
        if isinstance(event, CallDelta): return self._push_call(event)
        kind = "reasoning" if isinstance(event, Reasoning) else "message"
        events = [] if self._open(kind) else self._begin_text(kind)
        part = self.output[-1]["content"][0]
        part["text"] += event.text
        more: dict[str, Any] = {}
        logprobs, self.held = self.held, []
        if isinstance(event, Content):
            part["logprobs"] = [*part["logprobs"], *logprobs]   # earlier events keep theirs
            more = {"logprobs": without_bytes(logprobs)}
        return [*events, self._event(f"response.{part['type']}.delta", **self._place(), content_index=0,
                                     delta=event.text, **more)]

    def _push_call(self, call: CallDelta) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if call.name is not None or not self._open("function_call") or self.call != call.index:
            events, self.call = self._close("completed"), call.index
            self.output.append({"arguments": "", "call_id": self.call_id(), "name": call.name or "",
                                "type": "function_call", "id": f"fc_{secrets.token_hex(12)}",
                                **dict.fromkeys(("async", "caller", "namespace")), "status": "in_progress"})
            events.append(self._item_event("added"))
        self.output[-1]["arguments"] += call.text
        if not call.text: return events
        return [*events, self._event("response.function_call_arguments.delta", **self._place(),
                                     delta=call.text)]

    def _begin_text(self, kind: str) -> list[StreamEvent]:
        events = self._close("completed")
        reasons = kind == "reasoning"
        named = {"id": f"{'rs' if reasons else 'msg'}_{secrets.token_hex(12)}"}
        item: dict[str, Any] = \
            {**named, "summary": [], "type": kind, "content": None, "encrypted_content": None,
             "status": "in_progress"} if reasons else \
            {**named, "content": [], "role": "assistant", "status": "in_progress", "type": kind,
             "phase": None}
        self.output.append(item)
        events.append(self._item_event("added"))
        item["content"] = [{"text": "", "type": "reasoning_text"} if reasons else
                           {"annotations": [], "text": "", "type": "output_text", "logprobs": []}]
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
        # as vLLM's: those of a text are in its part, and null where none were asked for
        more: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        if more and not self.with_logprobs: part["logprobs"] = None
        elif more and not self.stream: part["logprobs"] += self.held    # such as the end token's
        return [self._event(f"response.{part['type']}.done", **self._place(), content_index=0,
                            text=part["text"], **more), self._part_event("done"), self._item_event("done")]

    # **** events ****

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        self.count += 1
        told = {**fields, "sequence_number": self.count - 1}
        return {name: told[name] for name in sorted(told)} | {"type": kind}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _item_event(self, what: str) -> StreamEvent:
        item = self.output[-1]
        shown = {**item, "content": [*item["content"]]} if item.get("content") else {**item}
        return self._event(f"response.output_item.{what}", output_index=len(self.output) - 1, item=shown)

    def _part_event(self, what: str) -> StreamEvent:
        return self._event(f"response.content_part.{what}", **self._place(), content_index=0,
                           part={**self.output[-1]["content"][0]})

    def _copy(self) -> dict[str, Any]: return {**self.response, "output": [*self.output]}


def _logprob(each: TokenLogprobs) -> dict[str, Any]:
    """A token's entry in the logprobs of a part."""
    found = logprob(each)
    names = ("token", "bytes", "logprob")
    likeliest = [{name: one[name] for name in names} for one in found["top_logprobs"]]
    return {name: found[name] for name in names} | {"top_logprobs": likeliest}


def without_bytes(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries as events have them."""
    return [{name: without_bytes(value) if name == "top_logprobs" else value
             for name, value in each.items() if name != "bytes"} for each in logprobs]


def usage(record: Record) -> dict[str, Any]:
    """Tokens of a response."""
    return {"input_tokens": record.prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens, "cache_write_tokens": 0,
                                     "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
            "output_tokens": record.output_tokens,
            "output_tokens_details": {"reasoning_tokens": record.reasoning_tokens, "tool_output_tokens": 0,
                                      "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []},
            "total_tokens": record.prompt_tokens + record.output_tokens}
