"""What form an answer has: a JSON schema, a regular expression, one of several texts, or a grammar.

Protocol: `Structured` is checked when made, without a tokenizer: exactly one form, of a size that a person
would write. `grammar` is what matcher.py compiles: llguidance's JSON, in which every kind is a grammar or a
schema. What a schema says and cannot be held is refused there, in words; nothing is left out in silence.
"""
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tinygrad_nv.errors import RequestError

# bytes of a form's text, and how deep a schema's objects and lists may lie in each other: llguidance's reader
# takes 128 at most, of which its own words around a schema are three
MOST_BYTES, MOST_DEPTH = 256 << 10, 100
MOST_CHOICES, MOST_CHOICE_BYTES = 4096, 64 << 10
# finding the multiples of m takes an automaton of m states: 0.14 s for 9973, minutes for 10^8
MOST_MULTIPLE = 10_000
# White space where JSON allows it: one blank, or a new line with an indent of at most 16 blanks (8 levels of
# 2) or 8 tabs. A model that would rather write something else than JSON otherwise writes blanks to the end.
BLANK = r" |\n {0,16}|\n\t{0,8}"
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True)
class Structured:
    """Exactly one form. `json_schema`: a schema as an object, a boolean or its text (draft 2020-12).
    `regex`: the whole answer matches it (Rust's syntax: no look-around, no references back). `choice`: one
    of these texts. `grammar`: Lark, or GBNF as llama.cpp's. `json_object`: any JSON object.
    `disable_any_whitespace`: JSON on one line, without white space but one blank after a comma or colon."""
    json_schema: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        names = [name for name in ("json_schema", "regex", "choice", "grammar")
                 if getattr(self, name) is not None] + ["json_object"] * bool(self.json_object)
        if len(names) != 1:
            raise RequestError(f"{' and '.join(names) or 'nothing'} is asked of a structured answer",
                               "exactly one of json_schema, regex, choice, grammar, json_object",
                               "leave one" if names else "say what form it has")
        _ = self.grammar_text   # what is wrong is said now

    @property
    def kind(self) -> str:
        """The form in words."""
        if self.regex is not None: return "regex"
        if self.choice is not None: return "choice"
        return "grammar" if self.grammar is not None else "JSON schema"

    @property
    def trusted(self) -> bool:
        """Whether compiling it takes a time that its size bounds."""
        return self.json_object or self.choice is not None

    @cached_property
    def grammar_text(self) -> str:
        """The form as llguidance reads it; equal forms have equal texts."""
        if self.regex is not None: return _lark(f"start: /{_slashed(_text('regex', self.regex))}/")
        if self.choice is not None: return _lark(_choices(self.choice))
        if self.grammar is not None: return _lark(_as_lark(_text("grammar", self.grammar)))
        schema = {"type": "object"} if self.json_object else _schema(self.json_schema)
        space = ONE_LINE if self.disable_any_whitespace else {"whitespace_pattern": BLANK}
        schema = {**schema, "x-guidance": space}
        return json.dumps({"grammars": [{"json_schema": schema}]})

    def __hash__(self) -> int: return hash(self.grammar_text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structured) and self.grammar_text == other.grammar_text


def _lark(text: str) -> str: return json.dumps({"grammars": [{"lark_grammar": text}]})


def _text(kind: str, text: Any) -> str:
    if not isinstance(text, str): raise _wrong(kind, f"is a {type(text).__name__}", "a text")
    if not text: raise _wrong(kind, "is empty", "at least one character")
    _require_size(kind, text)
    return text


def _require_size(kind: str, text: str, most: int = MOST_BYTES) -> None:
    try: size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _wrong(kind, f"is not UTF-8: {text[error.start]!r} at character {error.start}",
                     "characters that UTF-8 has") from error
    if size > most: raise _wrong(kind, f"has {size} bytes", f"at most {most}")


def _wrong(kind: str, what: str, expected: str) -> RequestError:
    return RequestError(f"the {kind} of a structured answer {what}", expected, f"change the {kind}")


def _slashed(regex: str) -> str:
    """A regular expression as it stands between slashes, on one line."""
    from llguidance import regex_to_lark
    return str(regex_to_lark(regex, "d")).replace("\n", r"\n").replace("\r", r"\r")


def _choices(choice: Any) -> str:
    """A grammar of texts."""
    if not isinstance(choice, list | tuple) or not all(isinstance(each, str) for each in choice):
        raise _wrong("choice", f"is {short(choice)}", "a list of texts")
    if not choice or not all(choice): raise _wrong("choice", f"is {short(choice)}", "texts, none empty")
    if len(choice) > MOST_CHOICES:
        raise _wrong("choice", f"has {len(choice)} texts", f"at most {MOST_CHOICES}")
    _require_size("choice", "".join(choice), MOST_CHOICE_BYTES)
    # escaped as a regular expression: a quoted text could be taken for a special token
    return f"start: /{'|'.join(_slashed(_escaped(each)) for each in dict.fromkeys(choice))}/"


def short(value: Any) -> str:
    """A value as Python writes it, cut."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _escaped(text: str) -> str:
    """A regular expression for this text alone."""
    return "".join(each if each.isalnum() and each.isascii() else f"\\u{{{ord(each):x}}}" for each in text)


def _as_lark(grammar: str) -> str:
    """A grammar of llama.cpp's kind in Lark's words, and Lark's as it is."""
    if not re.search(r"(?m)^\s*[\w-]+\s*::=", grammar): return grammar
    from llguidance.gbnf_to_lark import any_to_lark
    try: return str(any_to_lark(grammar))
    except Exception as error:  # the library raises whatever comes
        raise _wrong("grammar", f"is not understood: {error}", "Lark, or llama.cpp's GBNF") from error


def _schema(schema: Any) -> dict[str, Any]:
    """A schema as an object, with what its shape alone forbids."""
    if isinstance(schema, str):
        _require_size("JSON schema", schema)
        try: schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _wrong("JSON schema", f"is not JSON: {error}", "a JSON schema") from error
    if isinstance(schema, bool): schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise _wrong("JSON schema", f"is a {type(schema).__name__}", "an object, true or false")
    _require_shallow(schema)
    try: text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise _wrong("JSON schema", f"is not JSON: {error}", "a JSON schema") from error
    _require_size("JSON schema", text)
    if "x-guidance" in schema: raise _wrong("JSON schema", "has x-guidance", "keywords of JSON schema")
    return schema


def _require_shallow(schema: Any) -> None:
    """Refuses what lies too deep, and multiples that take too many states to tell."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise _wrong("JSON schema", f"is more than {MOST_DEPTH} levels deep", f"at most {MOST_DEPTH}")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                _require_multiple(each.get("multipleOf"))
                inner += each.values()
            elif isinstance(each, list | tuple): inner += each
        level = [each for each in inner if isinstance(each, dict | list | tuple)]


def _require_multiple(multiple: Any) -> None:
    if not isinstance(multiple, int | float) or isinstance(multiple, bool): return
    digits = re.sub(r"e.*|\.", "", repr(float(multiple))).strip("0") or "0"
    if int(digits) > MOST_MULTIPLE:
        raise _wrong("JSON schema", f"has multipleOf {multiple}", f"multiples of at most {MOST_MULTIPLE}, "
                     "or of so much shifted by digits")
