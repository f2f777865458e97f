"""A JSON schema, a regular expression, a choice of texts, a grammar, or any JSON object.

Protocol: `StructuredOutputsParams` is checked when created, without a tokenizer: exactly one constraint, of
bounded size. `grammar_text` is what matcher.py compiles: llguidance's JSON, in which every kind is a grammar
or a schema. Schema keywords that cannot be enforced raise an error; `annotations` are formats that constrain
nothing.
"""
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tinygrad_nv.engine.structured_output.schema import close_objects, simplify
from tinygrad_nv.errors import RequestError

# bytes of a constraint's text, and nesting depth of a schema: llguidance reads 128 levels at most, of which
# its own wrapper takes three
MAX_BYTES, MAX_DEPTH = 256 << 10, 100
# properties of all objects of a schema: time to compile grows with their square, 0.4 s for 1000 optional ones
MAX_PROPERTIES = 1000
MAX_CHOICES, MAX_CHOICE_BYTES = 4096, 64 << 10
# multipleOf m compiles to an automaton of m states: 0.14 s for 9973, minutes for 10^8
MAX_MULTIPLE = 10_000
# White space where JSON allows it: one blank, or a new line with an indent of at most 16 blanks (8 levels of
# 2) or 8 tabs. A model that resists JSON would otherwise write blanks up to max_tokens.
WHITESPACE = r" |\n {0,16}|\n\t{0,8}"
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one constraint. `json`: a schema as an object, a boolean or its text (draft 2020-12).
    `regex`: the whole output matches it (Rust syntax: no look-around, no back-references). `choice`: one of
    these texts. `grammar`: Lark, or llama.cpp's GBNF. `json_object`: any JSON object.
    `disable_any_whitespace`: JSON on one line, with no white space but one blank after a comma or colon.
    `whitespace_pattern`: a regular expression of the white space that JSON may have (`WHITESPACE`)."""
    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: None = None

    def __post_init__(self) -> None:
        for name, served in (("structural_tag", "None: tool choices and schemas are enforced"),
                             ("disable_additional_properties", "False: a schema says which it allows")):
            if (value := getattr(self, name)): raise _invalid(name, f"is {short_repr(value)}", served)
        if self.whitespace_pattern is not None: _text("whitespace_pattern", self.whitespace_pattern)
        names = [name for name in ("json", "regex", "choice", "grammar")
                 if getattr(self, name) is not None] + ["json_object"] * bool(self.json_object)
        if len(names) != 1:
            raise RequestError(f"structured output with {' and '.join(names) or 'no constraint'}",
                               "exactly one of json, regex, choice, grammar, json_object",
                               "leave one" if names else "add one of them")
        _ = self.grammar_text   # raises now if invalid

    @property
    def kind(self) -> str:
        """The kind of constraint, for messages."""
        if self.regex is not None: return "regex"
        if self.choice is not None: return "choice"
        return "grammar" if self.grammar is not None else "JSON schema"

    @property
    def is_trusted(self) -> bool:
        """Whether its size bounds the time to compile it."""
        return self.json_object or self.choice is not None

    @cached_property
    def grammar_text(self) -> str:
        """The grammar in llguidance's format. Equal constraints have equal texts."""
        if self.regex is not None: return _lark_grammar(f"start: /{_lark_regex(_text('regex', self.regex))}/")
        if self.choice is not None: return _lark_grammar(_choice_grammar(self.choice))
        if self.grammar is not None: return _lark_grammar(_to_lark(_text("grammar", self.grammar)))
        schema = {"type": "object"} if self.json_object else self._schema[0]
        space = COMPACT if self.disable_any_whitespace else \
            {"whitespace_pattern": WHITESPACE if self.whitespace_pattern is None else self.whitespace_pattern}
        schema = {**schema, "x-guidance": space}
        return json.dumps({"grammars": [{"json_schema": schema}]})

    @cached_property
    def _schema(self) -> tuple[dict[str, Any], frozenset[str]]:
        made, formats = simplify(close_objects(_check_schema(self.json)))
        if isinstance(made, dict): return made, formats
        raise _invalid("JSON schema", "matches no value, or none that ends", "one that some value matches")

    @property
    def annotations(self) -> frozenset[str]:
        """Formats of the schema that say how a string is meant, and constrain nothing."""
        return frozenset() if self.json is None else self._schema[1]

    def __hash__(self) -> int: return hash(self.grammar_text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructuredOutputsParams) and self.grammar_text == other.grammar_text


@dataclass(frozen=True)
class ReasoningTokens:
    """How a model's reasoning is written, in tokens. `start`: the token that may begin it, None of an answer
    that is `inside` from its first token on. `end`: the tokens that end it."""
    start: int | None
    end: tuple[int, ...]
    inside: bool
    may_end: bool = False
    budget: int | None = None


def _lark_grammar(text: str) -> str: return json.dumps({"grammars": [{"lark_grammar": text}]})


def _text(kind: str, text: Any) -> str:
    if not isinstance(text, str): raise _invalid(kind, f"is a {type(text).__name__}", "a text")
    if not text: raise _invalid(kind, "is empty", "at least one character")
    _require_size(kind, text)
    return text


def _require_size(kind: str, text: str, most: int = MAX_BYTES) -> None:
    try: size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _invalid(kind, f"is not UTF-8: {text[error.start]!r} at character {error.start}",
                       "characters that UTF-8 has") from error
    if size > most: raise _invalid(kind, f"has {size} bytes", f"at most {most}")


def _invalid(kind: str, what: str, expected: str) -> RequestError:
    return RequestError(f"the {kind} of the structured output {what}", expected, f"change the {kind}")


def _lark_regex(regex: str) -> str:
    """A regular expression, escaped for Lark's slashes, on one line."""
    from llguidance import regex_to_lark
    return str(regex_to_lark(regex, "d")).replace("\n", r"\n").replace("\r", r"\r")


def _choice_grammar(choice: Any) -> str:
    """A grammar of literal texts."""
    if not isinstance(choice, list | tuple) or not all(isinstance(each, str) for each in choice):
        raise _invalid("choice", f"is {short_repr(choice)}", "a list of texts")
    if not choice or not all(choice):
        raise _invalid("choice", f"is {short_repr(choice)}", "texts, none empty")
    if len(choice) > MAX_CHOICES:
        raise _invalid("choice", f"has {len(choice)} texts", f"at most {MAX_CHOICES}")
    _require_size("choice", "".join(choice), MAX_CHOICE_BYTES)
    # as an escaped regular expression: llguidance could take a quoted text for a special token
    return f"start: /{'|'.join(_lark_regex(_escape(each)) for each in dict.fromkeys(choice))}/"


def short_repr(value: Any) -> str:
    """Returns repr(value), cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _escape(text: str) -> str:
    """Returns a regular expression that matches this text alone."""
    return "".join(each if each.isalnum() and each.isascii() else f"\\u{{{ord(each):x}}}" for each in text)


def _to_lark(grammar: str) -> str:
    """A GBNF grammar converted to Lark; a Lark grammar as it is."""
    if not re.search(r"(?m)^\s*[\w-]+\s*::=", grammar): return grammar
    from llguidance.gbnf_to_lark import any_to_lark
    try: return str(any_to_lark(grammar))
    except Exception as error:  # the library raises arbitrary exceptions
        raise _invalid("grammar", f"is not understood: {error}", "Lark, or llama.cpp's GBNF") from error


def _check_schema(schema: Any) -> dict[str, Any]:
    """Returns a schema as an object. Raises for sizes and shapes that are not accepted."""
    if isinstance(schema, str):
        _require_size("JSON schema", schema)
        try: schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _invalid("JSON schema", f"is not JSON: {error}", "a JSON schema") from error
    if isinstance(schema, bool): schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise _invalid("JSON schema", f"is a {type(schema).__name__}", "an object, true or false")
    _require_depth(schema)
    try: text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise _invalid("JSON schema", f"is not JSON: {error}", "a JSON schema") from error
    _require_size("JSON schema", text)
    if "x-guidance" in schema: raise _invalid("JSON schema", "has x-guidance", "keywords of JSON schema")
    return schema


def _require_depth(schema: Any) -> None:
    """Raises for a schema that is nested too deeply, names too many properties, or has a multipleOf that
    needs too many states."""
    level, depth, properties = [schema], 0, 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _invalid("JSON schema", f"is more than {MAX_DEPTH} levels deep", f"at most {MAX_DEPTH}")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                _require_multiple(each.get("multipleOf"))
                properties += len(named) if isinstance(named := each.get("properties"), dict) else 0
                inner += each.values()
            elif isinstance(each, list | tuple): inner += each
        if properties > MAX_PROPERTIES:
            raise _invalid("JSON schema", f"has {properties} properties or more", f"at most {MAX_PROPERTIES}")
        level = [each for each in inner if isinstance(each, dict | list | tuple)]


def _require_multiple(multiple: Any) -> None:
    if not isinstance(multiple, int | float) or isinstance(multiple, bool): return
    digits = re.sub(r"e.*|\.", "", repr(float(multiple))).strip("0") or "0"
    if int(digits) > MAX_MULTIPLE:
        raise _invalid("JSON schema", f"has multipleOf {multiple}", f"multiples of at most {MAX_MULTIPLE}, "
                       "or of so much shifted by digits")
