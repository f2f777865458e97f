"""The whole answer is {"name": …, "parameters": {…}}, several separated by ";" (Llama 3)."""
from __future__ import annotations

from tinygrad_nv.server.parsers.json_calls import CallObject
from tinygrad_nv.server.parsers.parser import CallMachine, may_begin

TAG = "<|python_tag|>"


class Llama(CallMachine):
    """See above. An answer that does not begin so is content."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self._beginning
        self.before = ""        # the text before the first object
        self.call = CallObject(self.begin, self.emit)

    def _beginning(self) -> bool:
        text = self.held.lstrip()
        if may_begin(text, TAG, self.ended): return False
        text = text.removeprefix(TAG).lstrip()
        if not text and not self.ended: return False
        if text[:1] != "{": return self.next(self.rest)
        self.before = self.held[:len(self.held) - len(text)]
        return self._object(text)

    def _object(self, text: str) -> bool:
        self.call = CallObject(self.begin, self.emit)
        return self.next(self._inside, text)

    def _inside(self) -> bool:
        self.held = self.call.feed(self.held)
        if self.call.done: return self.next(self._between)
        if self.call.has_started: return self.call.failed and self.next(self.rest, self.call.held)
        if not (self.call.failed or self.ended): return False
        return self.next(self.rest, self.before + self.call.text)

    def _between(self) -> bool:
        self.before = ""
        text = self.held.lstrip()
        after = text[1:].lstrip()
        if text in ("", ";") or (text[0] == ";" and not after): return self.ended and self.next(self.rest)
        return self._object(after) if text[0] == ";" and after[0] == "{" else self.next(self.rest)
