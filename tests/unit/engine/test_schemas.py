"""Keywords of JSON schemas that constrain nothing, schemas in which a text could get stuck, and white
space in JSON: docs/structured.md, statement by statement. Keywords mean what jsonschema makes of them."""
from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from tests.support.engine.structured_case import grammars, holds, text, tokenizer, written
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured
from tinygrad_nv.engine.structured_output.schema import close_objects, simplify
from tinygrad_nv.errors import RequestError

KIND = "byte-level BPE"
TEXT, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 99}
CLOSED = {"type": "object", "additionalProperties": False}
BASE: dict[str, Any] = {"type": "object", "properties": {"a": TEXT}, "required": ["a"],
                        "additionalProperties": False}
IDLE: list[dict[str, Any]] = [
    {"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"propertyNames": {}},
    {"propertyNames": True},
    {"propertyNames": {"type": ["string", "null"], "title": "t"}}, {"propertyNames": {"minLength": 0}},
    {"minProperties": 0}, {"minProperties": 1}, {"maxProperties": 1}, {"maxProperties": 7}, {"not": False},
    {"additionalItems": False}, {"unevaluatedProperties": True}, {"unevaluatedItems": {}}, {"minContains": 2},
    {"contains": {"type": "null"}, "minContains": 0}, {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependencies": {"a": []}}, {"dependentSchemas": {"a": {"title": "t"}}}, {"if": {"type": "null"}},
    {"then": False}, {"if": TEXT, "then": True, "else": {}}, {"$dynamicAnchor": "a"}]
KEPT: list[dict[str, Any]] = [
    {"uniqueItems": True}, {"propertyNames": {"type": "string", "pattern": "b"}},
    {"propertyNames": {"type": "null"}}, {"propertyNames": {"pattern": ["a"]}},
    {"not": TEXT}, {"unevaluatedProperties": False}, {"contains": TEXT}, {"dependentRequired": {"a": ["b"]}},
    {"if": {}, "then": False}, {"contains": {}, "minContains": 0, "maxContains": 1}]
NOTED = ("password", "binary", "byte", "int32", "zip", "phone", "")
ANNOTATED = {"title": "t", "description": "d", "default": {"a": 1}, "examples": [1], "$comment": "c",
             "deprecated": True, "readOnly": True, "writeOnly": True, "contentEncoding": "base64",
             "contentMediaType": "text/plain", "$schema": "https://json-schema.org/draft/2020-12/schema",
             "x-order": 1, "nullable": False}


def test_keywords_that_constrain_nothing():
    for words in IDLE:
        assert simplify({**BASE, **words}) == (BASE, frozenset()), words
        for outer in (lambda x: {"items": x}, lambda x: {"$defs": {"x": x}}, lambda x: {"anyOf": [x]},
                      lambda x: {"additionalProperties": x}):
            assert simplify(outer({**BASE, **words}))[0] == outer(BASE)
    grammars(KIND).matcher(Structured(json={**BASE, **ANNOTATED}))


def test_keywords_that_constrain_something_stay():
    for words in KEPT:
        assert simplify({**BASE, **words})[0] == {**BASE, **words}
        with pytest.raises(RequestError): grammars(KIND).matcher(Structured(json={**BASE, **words}))


def test_values_of_keywords():
    nulls = dict.fromkeys(("description", "enum", "required", "format", "items", "minLength"))
    assert simplify({"properties": {"a": {**TEXT, **nulls}}, "additionalProperties": None})[0] == {
        "properties": {"a": TEXT}}
    # integers are numbers without a fraction, in JSON Schema
    assert simplify({**TEXT, "minLength": 2.0})[0] == {**TEXT, "minLength": 2}
    assert isinstance(simplify({**TEXT, "minLength": 2.0})[0]["minLength"], int)  # type: ignore[index]
    # names of properties, and data, are no keywords
    named = {"properties": {"minLength": True, "maxItems": {"enum": [{"minItems": True}]}}}
    assert simplify(named)[0] == named
    assert simplify({"const": None, "enum": [None]})[0] == {"const": None, "enum": [None]}


def test_names_by_property_names():
    colours = {"$defs": {"C": {"enum": ["red", "blue"], "type": "string", "title": "C"}}}
    for words in ({"enum": ["red", "blue"]}, {"$ref": "#/$defs/C"}):
        made, _ = simplify({**colours, "type": "object", "propertyNames": words,
                              "additionalProperties": WHOLE})
        assert made == {**colours, **CLOSED, "properties": {"red": WHOLE, "blue": WHOLE}}
    assert simplify({"propertyNames": {"type": "string", "pattern": "^x"}})[0] == {
        "patternProperties": {"^x": True}, "additionalProperties": False}
    assert simplify({"propertyNames": {"const": "a"}})[0] == {
        "properties": {"a": True}, "additionalProperties": False}


def test_schemas_that_nothing_matches():
    for never in (False, {"not": {}}, {"not": True}, {"enum": []}, {"anyOf": []},
                  {"title": "t", "not": {"title": "t"}}):
        made, _ = simplify({"properties": {"a": never, "b": TEXT}, "additionalProperties": never})
        assert made == {"properties": {"a": False, "b": TEXT}, "additionalProperties": False}
        with pytest.raises(RequestError, match="matches no value"): Structured(json=never)


def test_one_target_that_is_spelled_in_a_thousand_ways_is_looked_at_once():
    spelled = ["".join(f"%{ord(sign):02x}" if at >> bit & 1 else sign
                       for bit, sign in enumerate("abcdefghij")) for at in range(1000)]
    schema = {"$ref": "#/$defs/abcdefghij", "$defs": {"abcdefghij": {
        "anyOf": [{"$ref": f"#/$defs/{each}"} for each in spelled]}}}
    begin = time.process_time()
    with pytest.raises(RequestError, match="matches no value"): Structured(json=schema)
    assert time.process_time() - begin < 2


def test_data_is_no_schema():
    data = {"uniqueItems": False, "format": "zip", "propertyNames": {}}
    schema = {"enum": [data], "default": data, "properties": {"format": TEXT, "uniqueItems": {"const": data}}}
    assert simplify(schema) == (schema, frozenset())


def test_formats_that_say_how_a_text_is_meant():
    for name in NOTED:
        made = Structured(json={"properties": {"a": {**TEXT, "format": name}}})
        assert made.annotations == {name}
        assert made.grammar_text == Structured(json={"properties": {"a": TEXT}}).grammar_text
        # of a number it says nothing here
        assert Structured(json={"type": "integer", "format": name}).annotations == frozenset()
    assert Structured(json={**TEXT, "format": "date"}).annotations == frozenset()


# in all of them a text could get stuck, or never end
STUCK: list[dict[str, Any]] = [
    {**CLOSED, "properties": {"a": WHOLE}, "patternProperties": {"^a$": WHOLE}},
    {**CLOSED, "properties": {"a": WHOLE}, "patternProperties": {"^a$": WHOLE}, "required": ["a"]},
    {**CLOSED, "properties": {"a": WHOLE, "b": WHOLE},
     "patternProperties": {"^[ab]$": WHOLE, "^c{2}$": WHOLE}},
    {"type": "array", "minItems": 1, "maxItems": 2, "items": {
        **CLOSED, "properties": {"ä b": WHOLE, '"': WHOLE}, "patternProperties": {'^(ä b|")$': WHOLE}}},
    {"allOf": [{"type": "object", "properties": {"a": WHOLE}, "patternProperties": {"^a$": WHOLE}},
               {"additionalProperties": False}]},
    {"$defs": {"n": {**CLOSED, "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}, **CLOSED,
     "properties": {"x": {"$ref": "#/$defs/n"}, "y": WHOLE}},
    {"$defs": {"a": {**CLOSED, "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
               "b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}},
     "anyOf": [{"$ref": "#/$defs/a"}, WHOLE]}]
ENDLESS: list[dict[str, Any]] = [
    {**CLOSED, "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
    {"$defs": {"n": {"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#/$defs/n"}, False]}}},
     "$ref": "#/$defs/n"},
    {"allOf": [{"$ref": "#"}]}]
FINITE: list[dict[str, Any]] = [
    {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]},
    {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
     "required": ["kids"]},
    {"type": "object", "properties": {"n": {"$ref": "#"}}}]


def test_texts_that_could_get_stuck_come_to_an_end():
    _, _, eos = tokenizer(KIND)
    for schema in STUCK:
        constraint = Structured(json=schema, disable_any_whitespace=True)
        also = {"additionalProperties": WHOLE} if "c{2}" in str(schema) else {}
        for seed in range(12):
            ids = written(grammars(KIND).matcher(constraint), eos, np.random.default_rng(seed), 40)
            assert holds(json.loads(text(KIND, ids)), {**schema, **also}), (schema, seed)


def test_schemas_that_need_themselves():
    for schema in ENDLESS:
        with pytest.raises(RequestError, match="matches no value, or none that ends"): Structured(json=schema)
    for schema in FINITE: assert simplify(schema)[0] == schema


def test_what_is_found_before_the_first_token():
    """By texts written at random: they are not known by their schemas."""
    for made in (Structured(grammar='start: "x" END\nEND: /a/ & /b/'), Structured(regex="b(a{900}){900}"),
                 Structured(grammar='start: "x"+ ("y" | "," END)\nEND: /a+/ & /b+/')):
        with pytest.raises(RequestError, match="cannot be compiled"): grammars(KIND).matcher(made)


def test_a_thousand_optional_properties():
    named = {"type": "object", "properties": {f"p{i}": WHOLE for i in range(1000)}}
    matcher = grammars(KIND).matcher(Structured(json=named, disable_any_whitespace=True))
    for token in tokenizer(KIND)[0].encode('{"p7":5,"p9":1', special=False): matcher.accept(token)


# **** white space ****


SCHEMA = {"type": "object", "required": ["a"], "additionalProperties": False,
          "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}}}
WRITTEN = '{"a":[1,2],"b":"x"}'
BETWEEN = [at for at in range(1, len(WRITTEN)) if WRITTEN[at - 1] in '{[,:]' or WRITTEN[at] in '}],:']


def allows(text: str, one_line: bool = False, schema: Any = SCHEMA) -> bool:
    """Whether a model may write this, letter by letter, and end there."""
    made = grammars("tales")
    matcher = made.matcher(Structured(json=schema, disable_any_whitespace=one_line))
    for byte in text.encode():
        token = made._tokenizer_info._ids[bytes([byte])]
        if not int(matcher.mask()[token >> 5]) >> (token & 31) & 1: return False
        matcher.accept(token)
    return matcher.is_finished


def spaced(space: str, at: int) -> str: return WRITTEN[:at] + space + WRITTEN[at:]


def test_the_texts_are_json():
    assert {json.dumps(json.loads(spaced("\n", at))) for at in BETWEEN} == {json.dumps(json.loads(WRITTEN))}
    assert len(BETWEEN) == 12


@pytest.mark.parametrize("space", ["", " ", "\n", "\n ", "\n" + 16 * " ", "\n\t", "\n" + 8 * "\t"])
def test_none_or_one_blank_or_one_new_line_with_its_indent_wherever_json_allows_it(space: str):
    for at in BETWEEN: assert allows(spaced(space, at)), at
    assert allows("".join(space * (at in BETWEEN) + letter for at, letter in enumerate(WRITTEN)))


def test_objects_that_list_properties_are_closed():
    """A model would add to them without end; vLLM's default allows no more, either."""
    listed = {"type": "object", "properties": {"a": TEXT, "b": {"properties": {"c": {}}}}}
    closed = close_objects({**listed, "items": listed, "$defs": {"d": listed}})
    for each in (closed, closed["items"], closed["$defs"]["d"]):
        assert each["additionalProperties"] is False
        assert each["properties"]["b"] == {"properties": {"c": {}}, "additionalProperties": False}
    assert "additionalProperties" not in listed
    assert allows('{"a":"x"}', schema=listed)
    assert not allows('{"a":"x","z":1}', schema=listed)
    assert allows('{"a":"x","z":1}', schema={**listed, "additionalProperties": True})


@pytest.mark.parametrize("more", [
    {"additionalProperties": TEXT}, {"required": ["a", "z"]}, {"minProperties": 2}, {"allOf": [{}]},
    {"$ref": "#/$defs/x"}, {"patternProperties": {"^x": TEXT}}, {"enum": [{"z": 1}]}, {"if": {}, "then": {}}])
def test_objects_that_may_need_more_stay_open(more: dict[str, Any]):
    schema = {"type": "object", "properties": {"a": TEXT}, **more}
    assert close_objects(schema) == schema


REF: dict[str, Any] = {"$ref": "#/$defs/d"}


@pytest.mark.parametrize("schema", [
    {"properties": {"x": {"allOf": [REF, {"required": ["k"]}]}}},
    {"properties": {"k": TEXT}, "required": ["k", "a"], "anyOf": [REF]},
    {"$ref": "#/$defs/d", "properties": {"b": TEXT}, "required": ["b"]},
    {"properties": {"x": {"if": REF, "then": TEXT}}}, {"properties": {"x": {"not": REF}}},
    {"dependentSchemas": {"k": REF}}, {"anyOf": [REF], "oneOf": [REF]}])
def test_schemas_that_are_combined_stay_open(schema: dict[str, Any]):
    """{"allOf": [{"$ref": …}, …]} allows the properties of both, and so does a reference beside others."""
    schema = {"$defs": {"d": {"type": "object", "properties": {"a": TEXT}}}, **schema}
    assert close_objects(schema) == schema


@pytest.mark.parametrize("every", [True, 5, None, "x", {}])
def test_what_is_called_as_a_keyword_is_none(every: Any):
    """A property may have the name of one, and so no list where a keyword has one."""
    for schema in ({"properties": {"allOf": every}}, {"allOf": every},
                   {"properties": every, "required": every}):
        assert isinstance(close_objects(schema), dict)


@pytest.mark.parametrize("schema", [{"properties": {"x": REF}}, {"anyOf": [REF, {"type": "null"}]},
                                    {"allOf": [REF], "title": "t"}, {"items": REF}])
def test_close_objects_reaches_definitions_that_stand_alone(schema: dict[str, Any]):
    made = close_objects({"$defs": {"d": {"type": "object", "properties": {"a": TEXT}}}, **schema})
    assert made["$defs"]["d"]["additionalProperties"] is False


@pytest.mark.parametrize("space", ["  ", "\t", "\n\n", " \n", "\n" + 17 * " ", "\n" + 9 * "\t", "\n \t",
                                   "\n\t ", "\r\n", "\r"])
def test_no_other_white_space(space: str):
    for at in BETWEEN: assert not allows(spaced(space, at)), at


@pytest.mark.parametrize("space", [" ", "\n"])
def test_none_before_the_first_sign_and_after_the_last(space: str):
    cases: tuple[tuple[Any, str], ...] = ((SCHEMA, WRITTEN), ({"type": "array"}, "[]"), ({"const": 1}, "1"))
    for schema, said in cases:
        assert allows(said, schema=schema)
        assert not allows(space + said, schema=schema)
        assert not allows(said + space, schema=schema)


def test_strings_hold_what_they_like():
    assert allows('{"a":[],"b":"' + 99 * " " + '\\n\\t"}')


def test_one_line_has_a_blank_after_commas_and_colons_at_most():
    after = [at for at in BETWEEN if WRITTEN[at - 1] in ",:"]
    assert len(after) == 4
    assert allows("".join(" " * (at in after) + letter for at, letter in enumerate(WRITTEN)), True)
    for at in BETWEEN:
        assert allows(spaced(" ", at), True) == (at in after), at
        for space in ("  ", "\n", "\t"): assert not allows(spaced(space, at), True), at
