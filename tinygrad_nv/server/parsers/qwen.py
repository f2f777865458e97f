"""<tool_call><function=name><parameter=city>Paris</parameter></function></tool_call> (Qwen3-Coder).

Protocol: values are texts, with a new line after and before their markers. The tool's schema says what type a
value has (schema_values.py): a string is passed on while it is written, another value when it is complete. A
marker inside of a value ends it only where the rest of the call follows.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tinygrad_nv.server.parsers.json_calls import to_json
from tinygrad_nv.server.parsers.parser import CallDelta, CallMachine, cut, may_begin
from tinygrad_nv.server.parsers.schema_values import NULLS, TEXT, find, json_of, parameter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_KEY = 128       # characters of a name that are waited for


class Qwen(CallMachine):
    """`schemas`: by the name of a tool, its parameters' schema."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        super().__init__()
        self.schemas, self.state = schemas, self._outside
        self.index, self.name, self.value, self.allowed = 0, "", "", TEXT
        self.keys, self.opened = set[str](), False      # of the call; whether it is inside of <tool_call>

    def _outside(self) -> bool:
        before, mark, self.held = cut(self.held, (OPEN, FUNCTION), self.ended)
        self.content(before)
        self.opened = mark == OPEN
        if mark == FUNCTION: return self.next(self._name)
        return bool(mark) and self.next(self._open_call)

    def _open_call(self) -> bool:
        text = self.held.lstrip()
        if text.startswith(FUNCTION): return self.next(self._name, text[len(FUNCTION):])
        if may_begin(text, FUNCTION, self.ended): return False
        self.content(OPEN)
        return self.next(self._outside)

    def _name(self) -> bool:
        name, mark, rest = self.held.partition(">")
        if not mark and not self.ended: return False
        if not mark:
            self.content(FUNCTION + self.held)
            return self.next(self.rest, "")
        self.index, self.name, self.keys = self.begin(), name.strip(), set()
        self.emit(CallDelta(self.index, "{", self.name))
        return self.next(self._between, rest)

    def _between(self) -> bool:
        before, mark, self.held = cut(self.held, (PARAMETER, FUNCTION_END, CLOSE), self.ended)
        del before          # white space, or what no marker explains
        if not mark: return False
        if mark == PARAMETER: return self.next(self._key)
        self.emit(CallDelta(self.index, "}"))
        return self.next(self._outside if mark == CLOSE else self._closing)

    def _key(self) -> bool:
        key, mark, rest = self.held.partition(">")
        if not mark: return False
        key = key.strip()
        said = f"{', ' if self.keys else ''}{json.dumps(key, ensure_ascii=False)}: "
        self.emit(CallDelta(self.index, said))
        self.keys.add(key)
        self.value, self.allowed = "", parameter(self.schemas.get(self.name), key)
        return self.next(self._beginning, rest)

    def _beginning(self) -> bool:
        if not self.held and not self.ended: return False
        self.held = self.held.removeprefix("\n")
        if not self.allowed.is_text: return self.next(self._other)
        return self.next(self._null if self.allowed.may_be_null else self._quote)

    def _null(self) -> bool:
        """A text, or null: which of them, as soon as it can be told."""
        before, ends, rest = self._value()
        self.value += before
        text = self.value.strip()
        if ends and text in NULLS:
            self.emit(CallDelta(self.index, "null"))
            return self.next(self._between, rest)
        if ends or self.ended or not any(word.startswith(text) for word in NULLS):
            text, self.value = self.value, ""
            return self.next(self._quote, text + self.held[len(before):])
        self.held = rest
        return False

    def _quote(self) -> bool:
        if not self.held and not self.ended: return False
        if self.held: self.emit(CallDelta(self.index, '"'))
        return self.next(self._text)

    def _text(self) -> bool:
        """A string: its last new line is not part of it."""
        before, ends, self.held = self._value()
        if not ends and before.endswith("\n"): before, self.held = before[:-1], "\n" + self.held
        if ends: before = before.removesuffix("\n")
        self.value = before[-1:] or self.value
        self.emit(CallDelta(self.index, to_json(before)[1:-1] + '"' * ends))
        return ends and self.next(self._between)

    def _other(self) -> bool:
        before, ends, self.held = self._value()
        self.value += before
        if not ends: return False
        self.emit(CallDelta(self.index, json_of(self.value.removesuffix("\n"), self.allowed)))
        return self.next(self._between)

    def _value(self) -> tuple[str, bool, str]:
        """The text of a value, whether it ends there, and the text after it: behind its marker, or from what
        may be one on."""
        at = 0
        while True:
            before, mark, rest = cut(self.held[at:], (PARAMETER_END, PARAMETER, FUNCTION_END), self.ended)
            at += len(before)
            if not mark: return self.held[:at], False, rest
            ends = self._ends(mark, self.held[:at], rest)
            if ends is None: return self.held[:at], False, self.held[at:]
            if ends: return self.held[:at], True, rest if mark == PARAMETER_END else mark + rest
            at += len(mark)

    def _ends(self, mark: str, before: str, rest: str) -> bool | None:
        """Whether a marker ends the value, and is not just mentioned in it: None if more text would tell. The
        end of a value is followed by another parameter, or by the end of the call; where it is missing, it is
        the next parameter of the tool, on a line of its own."""
        if mark == PARAMETER:
            key, closed, _ = rest.partition(">")
            known = self.schemas.get(self.name)
            if not (self.value + before or "\n").endswith("\n"): return False
            if not closed: return None if not self.ended and len(rest) < MAX_KEY else False
            return key.strip() not in self.keys and find(known, key.strip(), known) is not None
        if mark == FUNCTION_END: return self._begins(rest, (CLOSE, OPEN, FUNCTION))
        found = self._begins(rest, (PARAMETER, CLOSE, FUNCTION_END))
        if not found or not self.opened: return found
        text = rest.lstrip()
        return self._begins(text[len(FUNCTION_END):], (CLOSE, OPEN, FUNCTION)) \
            if text.startswith(FUNCTION_END) else found

    def _begins(self, text: str, marks: tuple[str, ...]) -> bool | None:
        """Whether one of `marks` follows, or nothing; None if more text would tell."""
        text = text.lstrip()
        if text.startswith(marks) or (self.ended and not text): return True
        return None if not self.ended and any(mark.startswith(text) for mark in marks) else False

    def _closing(self) -> bool:
        text = self.held.lstrip()
        if text.startswith(CLOSE): return self.next(self._outside, text[len(CLOSE):])
        if may_begin(text, CLOSE, self.ended): return False
        return self.next(self._outside)
