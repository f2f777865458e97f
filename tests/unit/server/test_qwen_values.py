"""Values of qwen3_coder: what a parameter's schema says of its text, cut at every place."""
from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.server.parser_case import calls_of, every_cut
from tinygrad_nv.server.parsers.parser import CallDelta
from tinygrad_nv.server.parsers.qwen import Qwen
from tinygrad_nv.server.parsers.schema_values import names_of, parameter

TEXT, WHOLE, NULL, LIST = ({"type": kind} for kind in ("string", "integer", "null", "array"))
DEFS = {"E": {**TEXT, "enum": ["1", "2"]}, "I": {"$ref": "#/$defs/J"}, "J": WHOLE, "L": {"$ref": "#/$defs/L"}}
VALUES: list[tuple[Any, str, Any]] = [
    *((TEXT, text, text) for text in ("12", "true", "null", "None", "[1]", "  indented\n", "")),
    *(({"anyOf": [TEXT, NULL]}, text, text) for text in ("12", '{"a": 1}', "nullable", "nul", "  7 ", "")),
    *((schema, "null", None) for schema in (
        {"oneOf": [NULL, TEXT]}, {"type": ["string", "null"]}, {**TEXT, "nullable": True},
        {"enum": ["x", None]}, WHOLE, {"anyOf": [{"$ref": "#/$defs/E"}, NULL]})),
    *((schema, "1", "1") for schema in (
        {"$ref": "#/$defs/E"}, {"allOf": [{"$ref": "#/$defs/E"}]}, {"const": "1"}, {"enum": ["1", 2]},
        {"allOf": [{"type": ["integer", "string"]}, TEXT]}, {}, True, {"$ref": "#/$defs/L"},
        {"$ref": "#/$defs/nowhere"})),
    ({"enum": ["1", 2]}, "2", 2), ({"enum": [1, 2]}, "1", 1), ({"const": True}, "true", True),
    ({"anyOf": [WHOLE, TEXT]}, "5", 5), ({"anyOf": [WHOLE, TEXT]}, "five", "five"),
    ({"$ref": "#/$defs/I"}, "5", 5), (WHOLE, "140.0", 140), (WHOLE, "007", 7), (WHOLE, "many", "many"),
    (WHOLE, "5,000", "5,000"), ({"type": "number"}, "1, 2", "1, 2"), (LIST, "1, 2", [1, 2]),
    (WHOLE, "[5]", [5]),
    ({"anyOf": [WHOLE, NULL]}, "None", None), ({"type": "number"}, "5", 5), ({"type": "number"}, ".5", 0.5),
    ({"type": "number"}, "nan", "nan"), ({"type": "number"}, "1e400", "1e400"), (LIST, "[1e999]", "[1e999]"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "FALSE", False),
    (LIST, "[1, 'a', {\"b\": null, 'c': (True, None)}]", [1, "a", {"b": None, "c": [True, None]}]),
    ({"items": WHOLE}, "[1]", [1]), ({"type": "object"}, "{'a': 'two\nlines', 'b': \"it's\"}",
                                     {"a": "two\nlines", "b": "it's"}),
    ({"properties": {"a": {}}}, '{"a": "</function>"}', {"a": "</function>"}),
    *((TEXT, text, text) for text in (
        "close with </function> and </parameter> and </tool_call>.", "a </parameter> b\n</parameter>\nc",
        "say:\n<tool_call>\n<function=g>\n<parameter=y>\n1\n</parameter>\nmore", "<parameter=p> in a line",
        "ends </function>\n</x>"))]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_a_value_is_what_its_schema_says(schema: Any, text: str, value: Any):
    whole = {"type": "object", "properties": {"p": schema}, "$defs": DEFS}
    events = every_cut(lambda: Qwen({"f": whole}), "<tool_call>\n<function=f>\n<parameter=p>\n" + text +
                       "\n</parameter>\n</function>\n</tool_call>")
    [call] = calls_of(events)
    found = json.loads(call.arguments)["p"]
    assert (type(found), found) == (type(value), value)


def test_a_parameter_is_found_where_schemas_combine():
    schema = {"$ref": "#/$defs/A", "$defs": {"A": {
        "allOf": [{"properties": {"n": WHOLE}}], "patternProperties": {"^x-": {"type": "boolean"}},
        "additionalProperties": LIST}}}
    text = "".join(f"<parameter={key}>{value}</parameter>" for key, value in
                   (("n", "1"), (" x-a ", "true"), ("other", "[]")))
    [call] = calls_of(every_cut(lambda: Qwen({"f": schema}), f"<function=f>{text}</function> then"))
    assert json.loads(call.arguments) == {"n": 1, "x-a": True, "other": []}


def test_references_in_circles_are_followed_once():
    twice = [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/C"}]      # 2 ** depth schemas, if each was followed
    long = [*({"$ref": f"#/long/{at + 1}"} for at in range(3000)), {"properties": {"far": WHOLE}}]
    schema = {"allOf": [*twice, {"$ref": "#/long/0"}], "long": long, "$defs": {"C": {
        "allOf": [*twice, {"$ref": "#"}], "anyOf": twice,
        "properties": {"n": {"anyOf": [{"$ref": "#/$defs/C/properties/n"}] * 2, "type": "integer"}}}}}
    begin = time.process_time()
    assert names_of(schema) == ["n", "far"]
    assert [parameter(schema, name).types for name in ("n", "far")] == [frozenset({"integer"})] * 2
    assert parameter(schema, "nowhere").is_text
    assert time.process_time() - begin < 2


def test_a_missing_end_is_the_next_parameter_of_the_tool():
    schema = {"properties": {"p": TEXT, "n": WHOLE}}
    text = "<tool_call><function=f><parameter=p>\na <parameter=n>\n<parameter=q>\n<parameter=n>\n5\n" \
        "</function></tool_call>"
    [call] = calls_of(every_cut(lambda: Qwen({"f": schema}), text))
    assert json.loads(call.arguments) == {"p": "a <parameter=n>\n<parameter=q>", "n": 5}


@pytest.mark.parametrize("schema", [TEXT, {"anyOf": [TEXT, NULL]}, {"$ref": "#/$defs/E"}])
def test_texts_are_passed_on_while_they_are_written(schema: Any):
    parser = Qwen({"f": {"properties": {"p": schema}, "$defs": DEFS}})
    parser.feed("<function=f><parameter=p>\nOnce")
    [event] = parser.feed(" upon a time")
    assert isinstance(event, CallDelta)
    assert event.text == " upon a time"
