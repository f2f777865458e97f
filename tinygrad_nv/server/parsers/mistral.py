"""[TOOL_CALLS] and [{"name": …, "arguments": {…}}, …], or name[ARGS]{…} and name{…} (newer tokenizers), each
after [TOOL_CALLS] (Mistral). What is before the first marker is content."""
from __future__ import annotations

from tinygrad_nv.server.parsers.json_calls import CallObject, ValueEnd
from tinygrad_nv.server.parsers.parser import CallDelta, CallMachine, cut

CALLS, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(CallMachine):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self._outside
        self.call, self.end, self.index, self.name = CallObject(self.begin, self.emit), ValueEnd(), 0, ""

    def _outside(self) -> bool:
        before, mark, self.held = cut(self.held, (CALLS,), self.ended)
        self.content(before)
        return bool(mark) and self.next(self._beginning)

    def _beginning(self) -> bool:
        text = self.held.lstrip()
        if not text: return False
        if text[0] in "[{": return self._object(text[text[0] == "[":])
        return self.next(self._name)

    # **** a list of objects ****

    def _object(self, text: str) -> bool:
        self.call = CallObject(self.begin, self.emit)
        return self.next(self._inside, text)

    def _inside(self) -> bool:
        self.held = self.call.feed(self.held)
        if self.call.done: return self.next(self._between)
        if self.call.has_started: return self.call.failed and self.next(self._outside, self.call.held)
        if not (self.call.failed or self.ended): return False
        return self.next(self._outside, self.call.text)

    def _between(self) -> bool:
        text = self.held.lstrip()
        if not text: return False
        if text[0] == ",": return self._object(text[1:])
        return self.next(self._outside, text[text[0] == "]":])

    # **** a name, then arguments ****

    def _name(self) -> bool:
        before, mark, self.held = cut(self.held, (ARGS, ID, "{"), False)
        self.name += before
        if not mark: return self.ended and self.next(self._nameless)
        if mark == "{": self.held = mark + self.held
        return self.next(self._skip_id if mark == ID else self._arguments)

    def _nameless(self) -> bool:
        self.content(CALLS + self.name)
        self.name = ""
        return self.next(self.rest)

    def _skip_id(self) -> bool:
        _, mark, self.held = cut(self.held, (ARGS,), self.ended)
        return bool(mark) and self.next(self._arguments)

    def _arguments(self) -> bool:
        self.held = self.held.lstrip()
        if not self.held: return False
        self.end, self.index = ValueEnd(), self.begin()
        self.emit(CallDelta(self.index, "", self.name.strip()))
        self.name = ""
        return self.next(self._writing)

    def _writing(self) -> bool:
        count = self.end.take(self.held)
        self.emit(CallDelta(self.index, self.held[:count]))
        self.held = self.held[count:]
        return self.end.done and self.next(self._outside)
