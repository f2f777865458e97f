"""<tool_call><function=name><parameter=city>Paris</parameter></function></tool_call> (Qwen3-Coder).

Protocol: values are texts, with a new line after and before their markers. The tool's schema says what type a
value has: a string is passed on while it is written, another value when it is complete.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tinygrad_nv.server.parsers.parser import CallDelta, CallMachine, cut, may_begin

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class Qwen(CallMachine):
    """`schemas`: by the name of a tool, its parameters' schema."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        super().__init__()
        self.schemas, self.state = schemas, self._outside
        self.index, self.name, self.count, self.value, self.text = 0, "", 0, "", False

    def _outside(self) -> bool:
        before, mark, self.held = cut(self.held, (OPEN, FUNCTION), self.ended)
        self.content(before)
        if mark == FUNCTION: return self.next(self._name)
        return bool(mark) and self.next(self._opened)

    def _opened(self) -> bool:
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
        self.index, self.name, self.count = self.begin(), name.strip(), 0
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
        self.emit(CallDelta(self.index,
                            f"{', ' if self.count else ''}{json.dumps(key, ensure_ascii=False)}: "))
        self.count += 1
        self.value, self.text = "", self._types(key) == {"string"}
        return self.next(self._beginning, rest)

    def _beginning(self) -> bool:
        if not self.held: return self.ended and self.next(self._text if self.text else self._other)
        if self.text: self.emit(CallDelta(self.index, '"'))
        return self.next(self._text if self.text else self._other, self.held.removeprefix("\n"))

    def _text(self) -> bool:
        """A string: its last new line is not part of it."""
        before, mark, self.held = self._value()
        if not mark and before.endswith("\n"): before, self.held = before[:-1], "\n" + self.held
        if mark: before = before.removesuffix("\n")
        self.emit(CallDelta(self.index, json.dumps(before, ensure_ascii=False)[1:-1] + '"' * bool(mark)))
        return bool(mark) and self.next(self._between)

    def _other(self) -> bool:
        before, mark, self.held = self._value()
        self.value += before
        if not mark: return False
        self.emit(CallDelta(self.index, _typed(self.value.removesuffix("\n"))))
        return self.next(self._between)

    def _value(self) -> tuple[str, str, str]:
        before, mark, rest = cut(self.held, (PARAMETER_END, PARAMETER, FUNCTION_END), self.ended)
        return before, mark, rest if mark in ("", PARAMETER_END) else mark + rest

    def _closing(self) -> bool:
        text = self.held.lstrip()
        if text.startswith(CLOSE): return self.next(self._outside, text[len(CLOSE):])
        if may_begin(text, CLOSE, self.ended): return False
        return self.next(self._outside)

    def _types(self, key: str) -> set[str]:
        """The types that the tool's schema gives a parameter; a string, where it gives none."""
        schema = self.schemas.get(self.name)
        found = schema.get("properties") if isinstance(schema, dict) else None
        about = found.get(key) if isinstance(found, dict) else None
        if not isinstance(about, dict): return {"string"}
        options = found if isinstance(found := about.get("anyOf"), list) else [about]
        kinds = [each.get("type") for each in options if isinstance(each, dict)]
        types = {kind for each in kinds for kind in (each if isinstance(each, list) else [each])}
        if types == {None}: return {"string"} if _texts(about.get("enum")) else {"any"}
        return {str(kind) for kind in types}


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _typed(text: str) -> str:
    """JSON of a value that is no string: as the model writes it, or as Python does; a string otherwise."""
    try: json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        constants = {"True": "true", "False": "false", "None": "null"}
        return constants.get(text.strip(), json.dumps(text, ensure_ascii=False))
    return text.strip()


def _no_constant(word: str) -> float: raise ValueError(f"{word} is not a JSON number")
