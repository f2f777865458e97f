"""Strict JSON, and typed access to its fields.

Protocol: `parse(body)` returns the JSON object of a body, and rejects what json.loads accepts: duplicate
names, NaN and Infinity, numbers beyond float64. Each field of a `Fields` is then read once (null counts as
absent); those that were not read have no effect: `finish()` gives them to leniency.py. Numbers and booleans
may be written as vLLM takes them: as strings, true for 1, 0 for false, 3.0 for a whole number.
"""
from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinygrad_nv.engine.text.earlier_calls import strict_json
from tinygrad_nv.server.errors import APIError, invalid
from tinygrad_nv.server.leniency import ignore, is_strict, note

MAX_WHOLE = (1 << 63) - 1
FLAGS = {**dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
         **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False)}
DIGITS = re.compile(r"\s*([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0*)?\s*")


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises `APIError` 400 with what is wrong and where."""
    try: text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {body[error.start]:#04x} at offset {error.start}",
                      code="invalid_utf8") from error
    data = parse_value(text)
    if not isinstance(data, dict):
        raise invalid(f"the body is {_kind(data)}, not a JSON object", code="invalid_json")
    return data


def parse_value(text: str) -> Any:
    """The JSON value of `text`. Raises `APIError` 400 with what is wrong and where."""
    try: return strict_json(text)
    except RecursionError as error:
        raise invalid("the body is not usable JSON: it is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        words = "it has a whole number of more than 4300 digits" if "integer string" in str(error) else error
        raise invalid(f"the body is not JSON: {words}", code="invalid_json") from error


def _kind(value: Any) -> str:
    if value is None: return "null"
    if isinstance(value, bool): return "true" if value else "false"
    names = {str: "a string", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]


class Fields:
    """The fields of a JSON object, removed one by one. `where` is the path in front of their names."""

    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        self.left = {name: value for name, value in data.items() if value is not None}
        self.where, self.known = where, set[str]()

    def path(self, name: str) -> str:
        """The full name of a field, for messages."""
        return f"{self.where}.{name}" if self.where else name

    def wrong(self, name: str, value: Any, expected: str) -> APIError:
        """400 for a field of the wrong type."""
        return invalid(f"{self.path(name)} is {_kind(value)}, expected {expected}", self.path(name),
                       "wrong_type")

    def take(self, name: str) -> Any:
        """The field's value; None if it is absent or null."""
        self.known.add(name)
        return self.left.pop(name, None)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false, or 1 or 0, or a word for one of them."""
        value = self.take(name)
        if value is None: return default
        if (found := as_flag(value)) is None: raise self.wrong(name, value, "true or false")
        return found

    def whole(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        """A whole number from `low` to `high`, or of 64 bits."""
        given = self.take(name)
        if given is None: return None
        if (value := as_whole(given)) is None: raise self.wrong(name, given, "a whole number")
        if high is None and abs(value) > MAX_WHOLE:
            low, high = -MAX_WHOLE if low is None else low, MAX_WHOLE
        if (low is not None and value < low) or (high is not None and value > high):
            shown = str(value) if abs(value) < 10 ** 20 else "a number of many digits"
            bounds = f"at least {low}" if high is None else f"{low} to {high}"
            raise invalid(f"{self.path(name)} is {shown}, expected {bounds}", self.path(name))
        return value

    def number(self, name: str, low: float | None = None, high: float | None = None) -> float | None:
        """A number from `low` to `high`."""
        given = self.take(name)
        if given is None: return None
        if (value := as_number(given)) is None: raise self.wrong(name, given, "a number")
        if isinstance(value, int) and abs(value) >= 1 << 1023:
            raise invalid(f"{self.path(name)} is beyond every 64-bit float", self.path(name))
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
            raise invalid(f"{self.path(name)} is {value:g}, expected {bounds}", self.path(name))
        return float(value)

    def text(self, name: str) -> str | None:
        """A string of valid Unicode: a lone surrogate is rejected."""
        value = self.take(name)
        if value is None: return None
        if not isinstance(value, str): raise self.wrong(name, value, "a string")
        return unicode(value, self.path(name))

    def require_text(self, name: str) -> str:
        """Returns a string that may not be missing or empty."""
        if value := self.text(name): return value
        path = self.path(name)
        raise invalid(f"{path} is missing, expected a string", path, "missing_field")

    def one_of(self, name: str, words: Sequence[str]) -> str | None:
        """One of these words."""
        value = self.text(name)
        if value is None or value in words: return value
        raise invalid(f"{self.path(name)} is {value[:60]!r}, expected one of {', '.join(words)}",
                      self.path(name))

    def object(self, name: str) -> dict[str, Any] | None:
        """An object."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict): raise self.wrong(name, value, "an object")
        return value

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        """A list of objects."""
        value = self.take(name)
        if value is None: return None
        if not isinstance(value, list): raise self.wrong(name, value, "a list of objects")
        for at, item in enumerate(value):
            if not isinstance(item, dict): raise self.wrong(f"{name}[{at}]", item, "an object")
        return value

    def texts(self, name: str, most: int, alone: bool = True) -> tuple[str, ...]:
        """A list of at most `most` strings, or, if it may stand `alone`, a string."""
        value = self.take(name)
        if value is None: return ()
        if alone and isinstance(value, str): return (unicode(value, self.path(name)),)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, value, f"{'a string or ' if alone else ''}a list of strings")
        if len(value) > most:
            raise invalid(f"{self.path(name)} has {len(value)} strings, expected at most {most}",
                          self.path(name))
        return tuple(unicode(item, self.path(name)) for item in value)

    def wholes(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers ≥ 0."""
        value = self.take(name)
        if value is None: return None
        ids = as_wholes(value) if isinstance(value, list) else None
        if ids is None or min(ids, default=0) < 0:
            raise self.wrong(name, value, "a list of whole numbers ≥ 0")
        return tuple(ids)

    def ignore(self, names: Iterable[str]) -> None:
        """Accepts fields without a word: what they ask for holds anyway, or is of an earlier answer."""
        for name in names: self.take(name)

    def note(self, names: Iterable[str]) -> None:
        """Accepts fields that have no effect, strict or not, and names those that are not empty."""
        for name in names:
            if self.take(name) not in (None, "", [], {}): note(self.path(name))

    def hint(self, name: str, usual: Sequence[Any] = (), why: str = "is not served") -> None:
        """A field that has no effect, whatever its value; `usual` ones ask for what holds anyway."""
        value = self.take(name)
        if value is None or any(_same(value, each) for each in usual): return
        hint = f", or say {' or '.join(map(json.dumps, usual))}" if usual else ""
        ignore(invalid(f"{self.path(name)} {why}; to fix: leave it out{hint}", self.path(name),
                       "unsupported"))

    def as_usual(self, usual: Mapping[str, Any]) -> None:
        """Accepts fields only with the value of the default behaviour."""
        for name, value in usual.items():
            if (asked := self.take(name)) is not None and not _same(asked, value):
                raise invalid(f"{self.path(name)} is not served; to fix: leave it out, or say "
                              f"{json.dumps(value)}", self.path(name), "unsupported")

    def finish(self) -> None:
        """Ignores unread fields, as vLLM does; where requests are strict, the first one is an error."""
        for name in self.left:
            if is_strict(): raise self._unknown(name)
            note(self.path(name[:100]), lambda name=name: self._nearest(name))  # type: ignore[misc]
        self.left = {}

    def _nearest(self, name: str) -> str:
        """The most similar field that is known; "" without one."""
        return next(iter(difflib.get_close_matches(name[:100], self.known, 1)), "")

    def _unknown(self, name: str) -> APIError:
        hint = f"; did you mean {near}?" if (near := self._nearest(name)) else ""
        return invalid(f"unknown field {self.path(name)[:100]!r}{hint}", self.path(name)[:100],
                       "unknown_field")


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one in JSON: true is not 1."""
    return bool(one == other and isinstance(one, bool) == isinstance(other, bool))


def as_flag(value: Any) -> bool | None:
    """The boolean that `value` stands for; None if it is none."""
    if isinstance(value, str): return FLAGS.get(value.lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def as_whole(value: Any) -> int | None:
    """The whole number that `value` stands for; None if it is none."""
    if isinstance(value, float): return int(value) if value.is_integer() else None
    if isinstance(value, int): return int(value)
    found = DIGITS.fullmatch(value) if isinstance(value, str) and len(value) < 64 else None
    return None if found is None else int(found[1])


def as_wholes(values: Sequence[Any]) -> Sequence[int] | None:
    """The whole numbers that `values` stand for; None if one is none."""
    # in C: there may be a million
    if {*map(type, values)} <= {int}: return values
    found = [*map(as_whole, values)]
    return None if None in found else [each for each in found if each is not None]


def as_number(value: Any) -> int | float | None:
    """The number that `value` stands for; None if it is none, or none that JSON has."""
    if isinstance(value, bool): return int(value)
    if isinstance(value, int | float): return value
    try: found = float(value) if isinstance(value, str) and len(value) < 64 else math.nan
    except ValueError: return None
    return found if math.isfinite(found) else None


def unicode(text: str, param: str) -> str:
    """`text`, if it is valid Unicode."""
    try: text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(f"{param} holds half a surrogate pair ({text[error.start]!r}) at character "
                      f"{error.start}", param, "invalid_utf8") from error
    return text
