"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, anywhere in an answer (Hermes, Qwen)."""
from __future__ import annotations

from tinygrad_nv.server.parsers.json_calls import CallObject
from tinygrad_nv.server.parsers.parser import CallMachine, cut, may_begin

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(CallMachine):
    """See above. What is between the markers and is no call stays text."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self._outside
        self.call = CallObject(self.begin, self.emit)

    def _outside(self) -> bool:
        before, mark, self.held = cut(self.held, (OPEN,), self.ended)
        self.content(before)
        if not mark: return False
        self.call = CallObject(self.begin, self.emit)
        return self.next(self._inside)

    def _inside(self) -> bool:
        self.held = self.call.feed(self.held)
        if self.call.done: return self.next(self._closing)
        if self.call.has_started: return self.call.failed and self.next(self._skipping, self.call.held)
        if not (self.call.failed or self.ended): return False
        self.content(OPEN)
        return self.next(self._outside, self.call.text)

    def _closing(self) -> bool:
        text = self.held.lstrip()
        if text.startswith(CLOSE): return self.next(self._outside, text[len(CLOSE):])
        if may_begin(text, CLOSE, self.ended): return False
        return self.next(self._outside)

    def _skipping(self) -> bool:
        _, mark, self.held = cut(self.held, (CLOSE,), self.ended)
        return bool(mark) and self.next(self._outside)
