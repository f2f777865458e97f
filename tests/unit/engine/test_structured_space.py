"""White space in JSON: docs/structured.md, statement by statement."""
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.engine.structured_case import grammars
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured

SCHEMA = {"type": "object", "required": ["a"], "additionalProperties": False,
          "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}}}
TEXT = '{"a":[1,2],"b":"x"}'
BETWEEN = [at for at in range(1, len(TEXT)) if TEXT[at - 1] in '{[,:]' or TEXT[at] in '}],:']


def allows(text: str, one_line: bool = False, schema: Any = SCHEMA) -> bool:
    """Whether a model may write this, letter by letter, and end there."""
    made = grammars("tales")
    matcher = made.matcher(Structured(json=schema, disable_any_whitespace=one_line))
    for byte in text.encode():
        token = made._tokenizer_info._ids[bytes([byte])]
        if not int(matcher.mask()[token >> 5]) >> (token & 31) & 1: return False
        matcher.accept(token)
    return matcher.is_finished


def spaced(space: str, at: int) -> str: return TEXT[:at] + space + TEXT[at:]


def test_the_texts_are_json():
    assert {json.dumps(json.loads(spaced("\n", at))) for at in BETWEEN} == {json.dumps(json.loads(TEXT))}
    assert len(BETWEEN) == 12


@pytest.mark.parametrize("space", ["", " ", "\n", "\n ", "\n" + 16 * " ", "\n\t", "\n" + 8 * "\t"])
def test_none_or_one_blank_or_one_new_line_with_its_indent_wherever_json_allows_it(space: str):
    for at in BETWEEN: assert allows(spaced(space, at)), at
    assert allows("".join(space * (at in BETWEEN) + letter for at, letter in enumerate(TEXT)))


@pytest.mark.parametrize("space", ["  ", "\t", "\n\n", " \n", "\n" + 17 * " ", "\n" + 9 * "\t", "\n \t",
                                   "\n\t ", "\r\n", "\r"])
def test_no_other_white_space(space: str):
    for at in BETWEEN: assert not allows(spaced(space, at)), at


@pytest.mark.parametrize("space", [" ", "\n"])
def test_none_before_the_first_sign_and_after_the_last(space: str):
    cases: tuple[tuple[Any, str], ...] = ((SCHEMA, TEXT), ({"type": "array"}, "[]"), ({"const": 1}, "1"))
    for schema, text in cases:
        assert allows(text, schema=schema)
        assert not allows(space + text, schema=schema)
        assert not allows(text + space, schema=schema)


def test_strings_hold_what_they_like():
    assert allows('{"a":[],"b":"' + 99 * " " + '\\n\\t"}')


def test_one_line_has_a_blank_after_commas_and_colons_at_most():
    after = [at for at in BETWEEN if TEXT[at - 1] in ",:"]
    assert len(after) == 4
    assert allows("".join(" " * (at in after) + letter for at, letter in enumerate(TEXT)), True)
    for at in BETWEEN:
        assert allows(spaced(" ", at), True) == (at in after), at
        for space in ("  ", "\n", "\t"): assert not allows(spaced(space, at), True), at
