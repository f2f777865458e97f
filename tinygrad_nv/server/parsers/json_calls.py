"""Tool calls that are written as JSON objects, read while they are written.

Protocol: `ValueEnd.take(text)` says how much of `text` belongs to a JSON value. `CallObject.feed(text)`
consumes {"name": …, "arguments": {…}} and returns the text after it. The arguments are passed on as the
model writes them, from their first brace on, once the name is known. `failed` is True as soon as the text
cannot be a call; if no argument has been passed on by then, `text` holds all of it.

The parsers are of <tool_call>{"name": …, "arguments": {…}}</tool_call>, anywhere in an answer (Hermes, Qwen);
of whole answers that are {"name": …, "parameters": {…}}, several separated by ";" (Llama 3); and of answers
that a tool choice constrains to be tool calls: the text of tool choice "named" is the arguments of the call.
That of "required" is a list of {"name": …, "parameters": {…}} (`structured_output.call_schema`). Where
`max_tokens` cuts the text, the arguments of its last call are cut; a call whose name was cut is none.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tinygrad_nv.server.parsers.parser import (
    CallDelta,
    CallMachine,
    Content,
    Event,
    Machine,
    cut,
    may_begin,
)

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", *ARGUMENTS, "type", "id")
STRING_END = re.compile(r'(?:[^"\\]|\\.)*?"', re.S)
SPACE = " \t\r\n"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG = "<|python_tag|>"


class ValueEnd:
    """Finds the end of a JSON value: of an object, a list or a string at its last sign, of another value
    before what follows it. What is inside is not checked."""

    def __init__(self) -> None:
        self.depth, self.string, self.escaped, self.begun, self.done = 0, False, False, False, False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to the value."""
        for at, sign in enumerate(text):
            if self.string:
                if self.escaped: self.escaped = False
                elif sign == "\\": self.escaped = True
                elif sign == '"': self.string = False
                if not self.string and self.depth == 0: return self._end(at + 1)
            elif sign == '"' and (self.depth or not self.begun): self.string = True
            elif sign in "{[" and (self.depth or not self.begun): self.depth += 1
            elif self.depth:
                self.depth -= sign in "}]"
                if self.depth == 0: return self._end(at + 1)
            elif sign in ',}]"{[:' or sign in SPACE: return self._end(at)
            self.begun = True
        return len(text)

    def _end(self, length: int) -> int:
        self.done = True
        return length


class CallObject:
    """One call; `emit` takes its events."""

    def __init__(self, index: Callable[[], int], emit: Callable[[Event], None]) -> None:
        self.new_index, self.emit = index, emit
        self.name: str | None = None
        self.index: int | None = None       # once the call has begun
        self.text, self.held, self.done, self.failed = "", "", False, False
        self.state = self._opening
        self.key, self.value, self.end, self.pending = "", "", ValueEnd(), ""

    @property
    def has_started(self) -> bool:
        """Whether an event was emitted."""
        return self.index is not None

    def feed(self, text: str) -> str:
        """The text after the object, "" if it goes on."""
        self.text, self.held = self.text + text, self.held + text
        while not (self.done or self.failed) and self.state(): pass
        return self.held if self.done else ""

    # **** states ****

    def _sign(self) -> str:
        self.held = self.held.lstrip(SPACE)
        return self.held[:1]

    def _opening(self) -> bool:
        if not (sign := self._sign()): return False
        return self._went(sign == "{", self._key)

    def _key(self) -> bool:
        if not (sign := self._sign()): return False
        if sign == "}": return self._close()
        if sign != '"': return self._fail()
        if (found := STRING_END.match(self.held, 1)) is None: return False
        self.key, self.held = self.held[1:found.end() - 1], self.held[found.end():]
        self.state = self._colon
        return self.key in KEYS or self._fail()

    def _colon(self) -> bool:
        if not (sign := self._sign()): return False
        return self._went(sign == ":", self._beginning)

    def _beginning(self) -> bool:
        if not (sign := self._sign()): return False
        self.value, self.end, self.state = "", ValueEnd(), self._inside
        if self.key in ARGUMENTS and sign == "{" and self.name is not None: self._start("")
        return True

    def _inside(self) -> bool:
        count = self.end.take(self.held)
        piece, self.held = self.held[:count], self.held[count:]
        self.value += piece
        if self.key in ARGUMENTS and self.index is not None: self.emit(CallDelta(self.index, piece))
        if not self.end.done: return False
        self.state = self._comma
        return self._take_value()

    def _comma(self) -> bool:
        if not (sign := self._sign()): return False
        return self._close() if sign == "}" else self._went(sign == ",", self._key)

    # **** what states do ****

    def _take_value(self) -> bool:
        """Handles a value that is complete."""
        if self.key == "name":
            name = _string(self.value)
            if not name: return self._fail()
            self.name = name
            if self.pending: self._start(self.pending)
        elif self.key in ARGUMENTS and self.index is None:
            made = _object(self.value)
            if made is None: return self._fail()
            if self.name is None: self.pending = made
            else: self._start(made)
        return True

    def _start(self, arguments: str) -> None:
        if self.index is None: self.index = self.new_index()
        self.emit(CallDelta(self.index, arguments, self.name))

    def _close(self) -> bool:
        if self.name is None: return self._fail()
        if self.index is None: self._start("{}")
        self.held, self.done = self.held[1:], True
        return True

    def _went(self, expected: bool, state: Callable[[], bool]) -> bool:
        if not expected: return self._fail()
        self.held, self.state = self.held[1:], state
        return True

    def _fail(self) -> bool:
        self.failed = True
        return False


def _string(text: str) -> str | None:
    """A JSON string; a lone surrogate, which no response can carry, is escaped."""
    try: value = json.loads(text)
    except ValueError: return None
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else None


def _object(text: str) -> str | None:
    """The text of arguments: an object, an object in a string, or null."""
    if text == "null": return "{}"
    inner = _string(text) if text.startswith('"') else text
    try: made = None if inner is None else json.loads(inner)
    except (ValueError, RecursionError): return None
    return inner if isinstance(made, dict) else None


def to_json(value: Any) -> str:
    """JSON as a model would write it; a lone surrogate, which no response can carry, stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if any("\ud800" <= letter <= "\udfff" for letter in text) else text


class Hermes(CallMachine):
    """Parses calls between Hermes' markers. What is between the markers and is no call stays text, and so
    does white space between a text and the first call, as in vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self._outside
        self.call = CallObject(self.begin, self.emit)

    def content(self, text: str) -> None:
        """Content; white space at its end is held back where a call may follow it alone."""
        super().content(text)
        if self.has_text and not self.calls:
            self.emit(Content(self.space))
            self.space = ""

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


class ForcedCalls(Machine):
    """An answer that has to be calls, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def feed(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        self.text += text
        return super().feed(text)

    @property
    def cut_text(self) -> str:
        """The text so far; "" once it is whole."""
        try: json.loads(self.text)
        except (ValueError, RecursionError): return self.text
        return ""


class NamedCall(ForcedCalls):
    """The call of the tool `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.state = name, self._arguments

    def _arguments(self) -> bool:
        if not self.held: return False      # an answer that is cut before its first character has no call
        self.emit(CallDelta(0, self.held, None if self.calls else self.name))
        self.calls, self.held = 1, ""
        return False


class CallList(ForcedCalls):
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
