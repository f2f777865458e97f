"""The whole answer is [f(a=1), g(b="x")] (Llama 3.2 and 4), with or without python_start and python_end, or
has calls on lines between <function_calls> and </function_calls> (OLMo 3).

Protocol: an argument is passed on when it is complete, and a call's name with its first argument or its last
parenthesis. Names may be reserved words of Python, or have hyphens; quotes may hold raw line ends. An
argument without a name is the tool's next parameter, or an object of parameters; `name: value` is one of the
tool's. What is no literal is a text: city=Paris; digits in groups are one number: n=5,000. A call whose
arguments have no names, and whose tool has no parameters for them, stays text: no argument is left out.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tinygrad_nv.server.parsers.json_calls import to_json
from tinygrad_nv.server.parsers.literals import has_call, literal, opening
from tinygrad_nv.server.parsers.parser import CallDelta, CallMachine, cut, may_begin
from tinygrad_nv.server.parsers.schema_values import json_of, names_of, parameter

START, END = "<|python_start|>", "<|python_end|>"
CALLS, CALLS_END = "<function_calls>", "</function_calls>"
NAME = re.compile(r"\s*([^\W\d][\w.-]*)\s*\(")
MAY_BE_NAME = re.compile(r"\s*([^\W\d][\w.-]*\s*)?")
KEY = re.compile(r"""\s*(?:([^\W\d][\w.-]*)|"([^"\\]*)"|'([^'\\]*)')\s*=(?!=)""")
COLON = re.compile(r"\s*([^\W\d][\w.-]*)\s*:")
# a number in groups of digits; n=5, whose comma may be within one, and what follows such a comma
GROUPS, NAMED = re.compile(r"\s*[-+]?\d{1,3}(,\d{3})+\s*"), re.compile(r"[^=]*=\s*[-+]?\d{1,3}(,\d{3})*")
GROUP = re.compile(r"\d{3}(?!\d)")
# a quote opens a string behind these signs, and a prefix of Python's
BEFORE_QUOTE = re.compile(r"""(?:^|[=(\[{,:"'])\s*[rRbBuUfF]{0,2}$""")
MAX_PREFIX = 64     # characters in front of a quote that are looked at


class Pythonic(CallMachine):
    """See above. An answer that does not begin so is content. `schemas`: by the name of a tool, its
    parameters' schema."""

    def __init__(self, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.schemas, self.state = schemas or {}, self._beginning
        self.before, self.name, self.index, self.lines = "", "", -1, False
        self.keys: list[str] = []
        self.bare: tuple[str, str] | None = None    # a named argument of bare words, which may go on
        self.argument, self.depth, self.quote, self.escaped, self.tail = "", 0, "", False, ""

    def _beginning(self) -> bool:
        text = self.held.lstrip()
        if may_begin(text, START, self.ended): return False
        text = text.removeprefix(START).lstrip()
        if not text and not self.ended: return False
        if text[:1] != "[": return self.next(self._outside)
        self.before = self.held[:len(self.held) - len(text)] + "["
        return self.next(self._name, text[1:])

    def _outside(self) -> bool:
        text, mark, self.held = cut(self.held, (CALLS,), self.ended)
        self.content(text)
        if not mark: return False
        self.lines, self.before = True, mark
        return self.next(self._name)

    def _name(self) -> bool:
        if self.lines and not self.held.strip().strip("[") and not self.ended: return False
        if self.lines: self.held = self.held.lstrip().removeprefix("[")
        text = self.held.lstrip()
        if self.calls and text[:1] == "]": return self.next(self._closing, text[1:])
        if (found := NAME.match(self.held)) is None:
            if not self.ended and MAY_BE_NAME.fullmatch(self.held): return False
            return self.next(self.rest, self.before + self.held)
        self.before += found[0]
        self.name, self.index, self.keys, self.bare = found[1], -1, [], None
        return self.next(self._arguments, self.held[found.end():])

    # **** arguments ****

    def _arguments(self) -> bool:
        """Up to the end of an argument: a comma or the parenthesis that no bracket or quote is around."""
        at = 0
        while at < len(self.held):
            sign = self.held[at]
            size = 1
            if self.quote: self._take_quoted(sign)
            elif sign in "\"'" and BEFORE_QUOTE.search((self.argument + self.held[:at])[-MAX_PREFIX:]):
                rest = self.held[at:at + 3]
                if rest == sign * len(rest) and len(rest) < 3 and not self.ended: break  # of three, perhaps
                self.quote = opening(self.held, at)
                size = len(self.quote)
            elif sign == "," and self.depth == 0 and (more := self._is_within_number(at)) is not False:
                if more is None: break
            elif sign in ",)" and self.depth == 0:
                return self._argument(self.argument + self.held[:at], self.held[at + 1:], sign)
            elif sign in "([{": self.depth += 1
            elif sign in ")]}": self.depth -= 1
            at += size
        self.argument, self.held = self.argument + self.held[:at], self.held[at:]
        if not self.ended or self.index >= 0: return False
        return self.next(self.rest, self.before + self.argument)

    def _is_within_number(self, at: int) -> bool | None:
        """Whether a comma is one of n=5,000; None if more text would tell."""
        if not NAMED.fullmatch(self.argument + self.held[:at]): return False
        rest = self.held[at + 1:at + 5]
        if len(rest) < 4 and not self.ended and (not rest or rest.isdigit()): return None
        return GROUP.match(rest) is not None

    def _take_quoted(self, sign: str) -> None:
        """Takes a sign inside quotes; `tail` are the quotes among them that may be the end."""
        self.tail = self.tail + sign if sign == self.quote[0] and not self.escaped else ""
        self.escaped = sign == "\\" and not self.escaped
        if len(self.tail) == len(self.quote): self.quote = self.tail = ""

    def _argument(self, text: str, rest: str, sign: str) -> bool:
        if text.strip() and not self._take(text):
            return self.next(self.rest, self.before + text + sign + rest)
        self.argument = ""
        self.before = self.before + text + sign if self.index < 0 else ""
        if sign == ",": return self.next(self._arguments, rest)
        self._end_bare()
        self._begin()
        self.emit(CallDelta(self.index, "}"))
        self.before = ""
        return self.next(self._between, rest)

    def _take(self, text: str) -> bool:
        """Passes an argument on. Returns False where a call has not begun, and has no parameter for it."""
        if (found := KEY.match(text)) is not None:
            key = next(each for each in found.groups() if each is not None)
            self._end_bare()
            return self._pass(key, text[found.end():])
        known = names_of(self.schemas.get(self.name))
        if (found := COLON.match(text)) is not None and found[1] in known:
            self._end_bare()
            return self._pass(found[1], text[found.end():])
        if self.bare is not None:   # city=San Francisco, CA
            self.bare = self.bare[0], f"{self.bare[1]},{text}"
            return True
        free = [name for name in known if name not in self.keys]
        if (more := self._object(text, free)) is not None:
            for key, value in more.items(): self._emit(str(key), to_json(value))
            return True
        if self.index < 0 and (not free or has_call(text)): return False
        key = free[0] if free else f"argument{len(self.keys) + 1}"
        try: self._emit(key, to_json(literal(text, bare=True)))
        except ValueError: self._emit_bare(key, text)
        return True

    def _object(self, text: str, free: list[str]) -> dict[Any, Any] | None:
        """**{…}, or an object of parameters where the next one is none."""
        stars = text.lstrip().startswith("**")
        try: found = literal(text.strip()[2 * stars:], bare=True)
        except ValueError: return None
        if not isinstance(found, dict) or stars: return found if isinstance(found, dict) else None
        own = "object" in parameter(self.schemas.get(self.name), free[0]).types if free else True
        return found if found and not own and {*found} <= {*free} else None

    def _pass(self, key: str, text: str) -> bool:
        if GROUPS.fullmatch(text): text = text.replace(",", "")
        try: value = literal(text, bare=True)
        except ValueError: pass
        else:
            if not isinstance(value, str) or text.rstrip()[-1] in "\"'":
                self._emit(key, to_json(value))
                return True
        if self.index < 0 and (has_call(text) or text.lstrip()[:1] in ("'", '"')): return False
        self.bare = key, text
        return True

    def _end_bare(self) -> None:
        if self.bare is not None: self._emit_bare(*self.bare)
        self.bare = None

    def _emit_bare(self, key: str, text: str) -> None:
        self._emit(key, json_of(text.strip(), parameter(self.schemas.get(self.name), key)))

    def _begin(self) -> None:
        if self.index >= 0: return
        self.index = self.begin()
        self.emit(CallDelta(self.index, "{", self.name))

    def _emit(self, key: str, value: str) -> None:
        self._begin()
        said = f"{to_json(key)}: {value}"
        self.emit(CallDelta(self.index, f"{', ' if self.keys else ''}{said}"))
        self.keys.append(key)

    # **** behind a call ****

    def _between(self) -> bool:
        text = self.held.lstrip()
        if not text: return False
        if text[0] == ",": return self.next(self._name, text[1:])
        if self.lines and text[0] not in "]<": return self.next(self._name, text)
        return self.next(self._closing, text[text[0] == "]":])

    def _closing(self) -> bool:
        text, end = self.held.lstrip(), CALLS_END if self.lines else END
        if may_begin(text, end, self.ended): return False
        return self.next(self.rest, text.removeprefix(end))
