"""Error messages of structured output constraints."""
from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.structured_output.matcher import GrammarCompiler
from tinygrad_nv.engine.structured_output.params import MAX_BYTES
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured
from tinygrad_nv.engine.text.token_bytes import token_bytes
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import RequestError, TokenizerError


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth): made = {"properties": {"a": made}}
    return made


def named(count: int) -> dict[str, Any]: return {"properties": {f"p{i}": {} for i in range(count)}}


@pytest.mark.parametrize(("form", "words"), [
    ({}, "structured output with no constraint\n  expected: exactly one of json, regex, choice, "
         "grammar, json_object\n  to fix:   add one of them"),
    ({"regex": "a", "json_object": True}, "structured output with regex and json_object\n"),
    ({"regex": ""}, "the regex of the structured output is empty"),
    ({"regex": 3}, "the regex of the structured output is a int\n  expected: a text"),
    ({"regex": "a\ud800"}, r"the regex of the structured output is not UTF-8: '\ud800' at character 1"),
    ({"regex": "a" * (MAX_BYTES + 1)}, f"has {MAX_BYTES + 1} bytes\n  expected: at most {MAX_BYTES}"),
    ({"choice": []}, "the choice of the structured output is []\n  expected: texts, none empty"),
    ({"choice": ["a", ""]}, "the choice of the structured output is ['a', '']\n  expected: texts, none "),
    ({"choice": "ab"}, "the choice of the structured output is 'ab'\n  expected: a list of texts"),
    ({"choice": ["a", 1]}, "the choice of the structured output is ['a', 1]\n  expected: a list of "),
    ({"choice": ["a"] * 4097}, "choice of the structured output has 4097 texts\n  expected: at most 4096"),
    ({"grammar": "root ::= ("}, "the grammar of the structured output is not understood: "),
    ({"json": "{"}, "the JSON schema of the structured output is not JSON: "),
    ({"json": "[" * 100_000}, "the JSON schema of the structured output is not JSON: "),
    ({"json": False}, "the JSON schema of the structured output matches no value"),
    ({"json": {"enum": []}}, "the JSON schema of the structured output matches no value"),
    ({"json": [1]}, "the JSON schema of the structured output is a list\n  expected: an object, "),
    ({"json": {"const": float("nan")}}, "the JSON schema of the structured output is not JSON: "),
    ({"json": {"const": {1, 2}}}, "the JSON schema of the structured output is not JSON: "),
    ({"json": {"items": named(500), "$defs": {"a": named(1500)}}}, "has 2000 properties or more\n  expected: "
     "at most 1000"),
    ({"json": nested(60)}, "is more than 100 levels deep\n  expected: at most 100"),
    ({"json": {"items": {"multipleOf": 99999989}}}, "has multipleOf 99999989\n  expected: multiples "
     "of at most 10000, or of so much shifted by digits"),
    ({"json": {"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}},
                               "required": ["a"]}}, "$ref": "#/$defs/a"}}, "matches no value, or none that"),
    *(({"json": {"anyOf": [{"properties": {"a": {"type": kind, word: value}}}]}},
       f"has {word} {value!r}\n  expected: a whole number from 0 on")
      for kind, word, value in (("string", "minLength", True), ("object", "minProperties", False),
                                ("object", "minProperties", -1), ("array", "maxItems", 0.5),
                                ("string", "maxLength", "3"), ("array", "minItems", [1]))),
    ({"json": {"contains": {}, "minContains": False}}, "has minContains False\n"),
    ({"json": {"additionalProperties": False, "maxProperties": True}}, "has maxProperties True\n"),
    ({"json": {"propertyNames": {"minLength": False}}}, "has minLength False\n"),
    ({"json": {"x-guidance": {"lenient": True}}}, "has x-guidance\n  expected: keywords of JSON "),
])
def test_an_invalid_constraint(form: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught: Structured(**form)
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.load(DEFAULT_MODEL), 2048, [1], seconds=1.0)


LEAVE = "to fix:   leave it out, and check the answer for it afterwards"


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("form", "words"), [
    ({"regex": "(a"}, "the regex of the structured output cannot be compiled: unclosed group\n  expected: a "
                      "regex of bounded size that some text matches, without look-around or back-references"),
    ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"grammar": "start: other"}, 'unknown name: "other"'),
    ({"grammar": "start: start"}, "the grammar of the structured output cannot be compiled"),
    ({"json": {"not": {"const": 1}}}, f'the JSON schema uses "not", which cannot be enforced while tokens '
     f"are sampled\n  expected: keywords that docs/structured.md names\n  {LEAVE}"),
    ({"json": {"type": "array", "uniqueItems": True, "contains": {}}}, "uniqueItems"),
    ({"json": {"if": {"type": "string"}, "then": {"maxLength": 1}}}, 'the JSON schema uses "if"'),
    ({"json": {"type": "object", "propertyNames": {"maxLength": 3}}}, 'the JSON schema uses "propertyNames"'),
    ({"json": {"type": "object", "unevaluatedProperties": False}}, '"unevaluatedProperties"'),
    ({"json": {"$dynamicRef": "#a"}}, 'the JSON schema uses "$dynamicRef"'),
    ({"json": {"$ref": "http://example.com/a"}}, "the JSON schema of the structured output cannot "),
    ({"json": {"type": "string", "format": "iri"}}, "the JSON schema has format 'iri', which is not "
     "known\n  expected: date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid or uri"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum"),
    ({"json": {"type": "object", "minProperties": 2}}, None),
    ({"json": {"properties": {"a": {}, "b": {}}, "minProperties": 2}}, "min/maxProperties only "),
    ({"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]}
                                for i in range(8)]}}, "schema too large"),
    ({"json": {"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 101)]}},
     "the JSON schema takes more than 1 s to compile\n  expected: a grammar that compiles in that time"),
    ({"json": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}}, "the JSON schema "),
])
def test_a_constraint_that_cannot_be_enforced(grammars: GrammarCompiler, form: dict[str, Any],
                                              words: str | None) -> None:
    if words is None:
        grammars.matcher(Structured(**form))
        return
    with pytest.raises(RequestError) as caught: grammars.matcher(Structured(**form))
    assert words in str(caught.value)


def test_a_tokenizer_whose_bytes_are_not_known() -> None:
    words = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(TokenizerError) as caught: token_bytes(words, 2)
    assert str(caught.value) == (
        "structured output needs the bytes of each token, and its decoder does not give them (none)\n"
        "  expected: byte-level BPE, or SentencePiece\n  to fix:   use a model with such a tokenizer")
