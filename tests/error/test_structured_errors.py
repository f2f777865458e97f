"""Forms of structured answers that are refused, and the words."""
from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.structured_output.matcher import Grammars
from tinygrad_nv.engine.structured_output.structured import MOST_BYTES, Structured
from tinygrad_nv.engine.text.token_bytes import token_bytes
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import RequestError, TokenizerError


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth): made = {"properties": {"a": made}}
    return made


@pytest.mark.parametrize(("form", "words"), [
    ({}, "nothing is asked of a structured answer\n  expected: exactly one of json_schema, regex, choice, "
         "grammar, json_object\n  to fix:   say what form it has"),
    ({"regex": "a", "json_object": True}, "regex and json_object is asked"),
    ({"regex": ""}, "the regex of a structured answer is empty"),
    ({"regex": 3}, "the regex of a structured answer is a int\n  expected: a text"),
    ({"regex": "a\ud800"}, r"the regex of a structured answer is not UTF-8: '\ud800' at character 1"),
    ({"regex": "a" * (MOST_BYTES + 1)}, f"has {MOST_BYTES + 1} bytes\n  expected: at most {MOST_BYTES}"),
    ({"choice": []}, "the choice of a structured answer is []\n  expected: texts, none empty"),
    ({"choice": ["a", ""]}, "the choice of a structured answer is ['a', '']\n  expected: texts, none empty"),
    ({"choice": "ab"}, "the choice of a structured answer is 'ab'\n  expected: a list of texts"),
    ({"choice": ["a", 1]}, "the choice of a structured answer is ['a', 1]\n  expected: a list of texts"),
    ({"choice": ["a"] * 4097}, "the choice of a structured answer has 4097 texts\n  expected: at most 4096"),
    ({"grammar": "root ::= ("}, "the grammar of a structured answer is not understood: "),
    ({"json_schema": "{"}, "the JSON schema of a structured answer is not JSON: "),
    ({"json_schema": "[" * 100_000}, "the JSON schema of a structured answer is not JSON: "),
    ({"json_schema": [1]}, "the JSON schema of a structured answer is a list\n  expected: an object, "),
    ({"json_schema": {"const": float("nan")}}, "the JSON schema of a structured answer is not JSON: "),
    ({"json_schema": {"const": {1, 2}}}, "the JSON schema of a structured answer is not JSON: "),
    ({"json_schema": nested(60)}, "is more than 100 levels deep\n  expected: at most 100"),
    ({"json_schema": {"items": {"multipleOf": 99999989}}}, "has multipleOf 99999989\n  expected: multiples "
     "of at most 10000, or of so much shifted by digits"),
    ({"json_schema": {"x-guidance": {"lenient": True}}}, "has x-guidance\n  expected: keywords of JSON "),
])
def test_a_form_that_is_none(form: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught: Structured(**form)
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def grammars() -> Grammars: return Grammars(Tokenizer.load(DEFAULT_MODEL), 2048, [1], seconds=1.0)


LEAVE = "to fix:   leave it out, and check the answer for it afterwards"


@pytest.mark.parametrize(("form", "words"), [
    ({"regex": "(a"}, "the regex of a structured answer cannot be compiled: unclosed group\n  expected: a "
                      "regex that some text matches, without look-around or references back, of a bounded "),
    ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"grammar": "start: other"}, 'unknown name: "other"'),
    ({"grammar": "start: start"}, "the grammar of a structured answer cannot be compiled"),
    ({"json_schema": {"not": {}}}, f'the JSON schema uses "not", which cannot be held while tokens are chosen'
     f"\n  expected: keywords that docs/structured.md names\n  {LEAVE}"),
    ({"json_schema": False}, "the JSON schema uses"),
    ({"json_schema": {"type": "array", "uniqueItems": True, "contains": {}}}, "uniqueItems"),
    ({"json_schema": {"if": {"type": "string"}}}, 'the JSON schema uses "if"'),
    ({"json_schema": {"type": "object", "propertyNames": {}}}, 'the JSON schema uses "propertyNames"'),
    ({"json_schema": {"type": "object", "unevaluatedProperties": False}}, '"unevaluatedProperties"'),
    ({"json_schema": {"$dynamicRef": "#a"}}, 'the JSON schema uses "$dynamicRef"'),
    ({"json_schema": {"$ref": "http://example.com/a"}}, "the JSON schema of a structured answer cannot be "),
    ({"json_schema": {"type": "string", "format": "zip"}}, "the JSON schema has format 'zip', which is not "
     "known\n  expected: date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid or uri"),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum"),
    ({"json_schema": {"type": "object", "minProperties": 2}}, None),
    ({"json_schema": {"properties": {"a": {}, "b": {}}, "minProperties": 2}}, "min/maxProperties only "),
    ({"json_schema": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]}
                                for i in range(8)]}}, "schema too large"),
    ({"json_schema": {"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 101)]}},
     "the JSON schema takes more than 1 s to compile\n  expected: a form that a person would write"),
    ({"json_schema": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}}, "the JSON schema "),
])
def test_a_form_that_cannot_be_held(grammars: Grammars, form: dict[str, Any], words: str | None) -> None:
    structured = Structured(**form)
    if words is None:
        grammars.matcher(structured)
        return
    with pytest.raises(RequestError) as caught: grammars.matcher(structured)
    assert words in str(caught.value)


def test_a_tokenizer_whose_bytes_are_not_known() -> None:
    words = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(TokenizerError) as caught: token_bytes(words, 2)
    assert str(caught.value) == (
        "structured answers need the bytes of each token, and its decoder does not say them (none)\n"
        "  expected: byte-level BPE, or SentencePiece\n  to fix:   use a model with such a tokenizer")
