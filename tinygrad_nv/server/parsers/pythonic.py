"""The whole answer is [f(a=1), g(b="x")] (Llama 3.2 and 4), with or without python_start and python_end.

Protocol: an argument is passed on when it is complete, and a call's name with its first argument or its last
parenthesis.
"""
from __future__ import annotations

import ast
import math
import re
from typing import Any

from tinygrad_nv.server.parsers.json_calls import to_json
from tinygrad_nv.server.parsers.parser import CallDelta, CallMachine, may_begin

START, END = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")
MAY_BE_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*\s*)?")


class Pythonic(CallMachine):
    """See above. An answer that does not begin so is content."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self._beginning
        self.before, self.name, self.index, self.count = "", "", -1, 0
        self.argument, self.depth, self.quote, self.escaped = "", 0, "", False

    def _beginning(self) -> bool:
        text = self.held.lstrip()
        if may_begin(text, START, self.ended): return False
        text = text.removeprefix(START).lstrip()
        if not text and not self.ended: return False
        if text[:1] != "[": return self.next(self.rest)
        self.before = self.held[:len(self.held) - len(text)] + "["
        return self.next(self._name, text[1:])

    def _name(self) -> bool:
        if (found := NAME.match(self.held)) is None:
            if not self.ended and MAY_BE_NAME.fullmatch(self.held): return False
            return self.next(self.rest, self.before + self.held)
        self.before += found[0]
        self.name, self.index, self.count, self.argument = found[1], -1, 0, ""
        return self.next(self._arguments, self.held[found.end():])

    def _arguments(self) -> bool:
        """Up to the end of an argument: a comma or the parenthesis that no bracket or quote is around."""
        for at, sign in enumerate(self.held):
            if self.quote: self._quoted(sign)
            elif sign in "\"'": self.quote = sign
            elif sign in ",)" and self.depth == 0:
                return self._argument(self.held[:at], self.held[at + 1:], sign)
            elif sign in "([{": self.depth += 1
            elif sign in ")]}": self.depth -= 1
        self.argument, self.held = self.argument + self.held, ""
        if not self.ended or self.index >= 0: return False
        return self.next(self.rest, self.before + self.argument)

    def _quoted(self, sign: str) -> None:
        if self.escaped: self.escaped = False
        elif sign == "\\": self.escaped = True
        elif sign == self.quote: self.quote = ""

    def _argument(self, text: str, rest: str, sign: str) -> bool:
        text = self.argument + text
        made = _pairs(text)
        if made is None and self.index < 0:
            return self.next(self.rest, self.before + text + sign + rest)
        if self.index < 0:
            self.index = self.begin()
            self.emit(CallDelta(self.index, "{", self.name))
        for key, value in (made or {}).items():
            said = to_json({key: value})[1:-1]
            self.emit(CallDelta(self.index, f"{', ' if self.count else ''}{said}"))
            self.count += 1
        self.before, self.argument = "", ""
        if sign == ",": return self.next(self._arguments, rest)
        self.emit(CallDelta(self.index, "}"))
        return self.next(self._between, rest)

    def _between(self) -> bool:
        text = self.held.lstrip()
        if not text: return False
        if text[0] == ",": return self.next(self._name, text[1:])
        return self.next(self._closing, text[text[0] == "]":])

    def _closing(self) -> bool:
        text = self.held.lstrip()
        if may_begin(text, END, self.ended): return False
        return self.next(self.rest, text.removeprefix(END))


def _pairs(text: str) -> dict[str, Any] | None:
    """The value of "key=value", none for an empty text; None for what is no argument."""
    if not text.strip(): return {}
    try: call = ast.parse(f"f({text})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError): return None
    if not isinstance(call, ast.Call) or call.args: return None
    try: return {str(each.arg): _value(each.value) for each in call.keywords if each.arg is not None}
    except (ValueError, TypeError, RecursionError): return None


def _value(node: ast.expr) -> Any:
    """A literal of Python, or of JSON."""
    if isinstance(node, ast.Name): return {"true": True, "false": False, "null": None}[_known(node.id)]
    if isinstance(node, ast.List | ast.Tuple): return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if each is None else ast.literal_eval(each) for each in node.keys]
        if not all(isinstance(key, str) for key in keys): raise ValueError("keys that are no texts")
        return {key: _value(each) for key, each in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    infinite = isinstance(value, float) and not math.isfinite(value)
    if infinite or not isinstance(value, str | int | float | None): raise ValueError("no value of JSON")
    return value


def _known(word: str) -> str:
    if word not in ("true", "false", "null"): raise ValueError(f"the name {word}")
    return word
