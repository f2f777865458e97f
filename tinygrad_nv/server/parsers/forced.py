"""Answers that a tool choice constrains to be tool calls.

Protocol: the text of tool choice "named" is the arguments of the call. That of "required" is a list of
{"name": …, "parameters": {…}} (`structured_output.call_schema`). Where `max_tokens` cuts the text, the
arguments of its last call are cut; a call whose name was cut is none.
"""
from __future__ import annotations

from tinygrad_nv.server.parsers.json_calls import CallObject
from tinygrad_nv.server.parsers.parser import CallDelta, Machine


class NamedCall(Machine):
    """The call of the tool `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.state = name, self._arguments

    def _arguments(self) -> bool:
        if not self.held and not (self.ended and not self.calls): return False
        self.emit(CallDelta(0, self.held, None if self.calls else self.name))
        self.calls, self.held = 1, ""
        return False


class CallList(Machine):
    """A list of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.call = self._between, CallObject(self._index, self.emit)

    def _index(self) -> int:
        self.calls += 1
        return self.calls - 1

    def _between(self) -> bool:
        text = self.held.lstrip("[, \n\t")
        if text[:1] != "{": return False     # no more yet, or the end of the list
        self.call = CallObject(self._index, self.emit)
        return self.next(self._inside, text)

    def _inside(self) -> bool:
        self.held = self.call.feed(self.held)
        return self.call.done and self.next(self._between)
