"""Answers that must be a call: whatever a model prefers, they are calls, whole or cut."""
from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.support.engine.structured_case import allowed, grammars, text, tokenizer, written
from tests.support.server.parser_case import Call, calls_of, every_cut
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured
from tinygrad_nv.server import chat_protocol
from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.parsers.json_calls import CallList, NamedCall
from tinygrad_nv.server.structured_output import MAX_CALLS, call_schema
from tinygrad_nv.server.tools import ToolChoice

UNIT = {"enum": ["C", "F"]}
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}
PARAMETERS: dict[str, Any] = {
    "flat": {"type": "object", "properties": {"unit": UNIT}, "required": ["unit"]},
    "nested": {"type": "object", "required": ["at", "all"],
               "properties": {"at": PLACE, "all": {"type": "array", "maxItems": 2, "items": PLACE}}},
    "referring": {"$defs": {"place": PLACE}, "type": "object", "required": ["at"],
                  "properties": {"at": {"$ref": "#/$defs/place"}, "or": {"anyOf": [{"$ref": "#/$defs/place"},
                                                                                   {"type": "null"}]}}},
    "root": {"$ref": "#/$defs/place", "$defs": {"place": PLACE}},
    "itself": {"properties": {"child": {"$ref": "#"}}},
    "without a type": {"properties": {"unit": UNIT}, "required": ["unit"]},
    "or null": {"type": ["null", "object"], "properties": {"unit": UNIT}},
    "none": None, "empty": {}, "no properties": {"type": "object", "properties": {}},
}
KEYS = {"flat": {"unit"}, "nested": {"at", "all"}, "referring": {"at", "or"}, "root": {"city"},
        "itself": {"child"}, "without a type": {"unit"}, "or null": {"unit"}, "none": set(), "empty": set(),
        "no properties": set()}
REQUIRED, ONE = ToolChoice("required"), ToolChoice("required", several=False)


def tool(name: str, parameters: Any) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = tuple(tool(name, parameters) for name, parameters in PARAMETERS.items())


def forced_calls(text: str, choice: ToolChoice) -> list[Call]:
    """The calls in an answer, wherever it is cut into pieces."""
    make = (lambda: NamedCall(choice.name)) if choice.mode == "named" else CallList
    return calls_of(every_cut(make, text))


def write_answer(tools: tuple[dict[str, Any], ...], choice: ToolChoice, seed: int) -> str:
    """Returns the text of a model that finds every token equally likely."""
    form = Structured(json=call_schema(tools, choice), disable_any_whitespace=True)
    return text("tales", written(grammars("tales").matcher(form), 1, np.random.default_rng(seed), most=600))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_named_call_has_the_arguments_that_are_listed(name: str):
    choice = ToolChoice("named", name)
    for seed in range(3):
        [call] = forced_calls(write_answer(TOOLS, choice, seed), choice)
        assert call.name == name
        assert set(json.loads(call.arguments)) <= KEYS[name], call
        assert "\n" not in call.arguments


@pytest.mark.parametrize("choice", [ToolChoice("named", next(iter(PARAMETERS))), REQUIRED])
def test_an_answer_that_is_cut_before_it_begins_has_no_call(choice: ToolChoice):
    assert forced_calls("", choice) == []


@pytest.mark.parametrize("choice", [REQUIRED, ONE], ids=["several", "one"])
def test_required_calls_are_of_tools_there_are(choice: ToolChoice):
    seen: set[str] = set()
    for seed in range(8):
        calls = forced_calls(write_answer(TOOLS, choice, seed), choice)
        assert 1 <= len(calls) <= (MAX_CALLS if choice.several else 1)
        for call in calls: assert set(json.loads(call.arguments)) <= KEYS[call.name], call
        seen |= {call.name for call in calls}
    assert len(seen) > 2


def test_a_call_that_is_repeated_ends():
    """The likeliest way for a model in a loop: always another call."""
    form = Structured(json=call_schema((tool("again", None),), REQUIRED), disable_any_whitespace=True)
    matcher, words = grammars("tales").matcher(form), tokenizer("tales")[0]
    comma, ids = words.encode(",", special=False)[0], list[int]()
    while not matcher.is_finished:
        may = allowed(matcher.mask())
        ids.append(comma if comma in may else may[0])
        matcher.accept(ids[-1])
    calls = forced_calls(text("tales", ids), REQUIRED)
    assert [(call.name, call.arguments) for call in calls] == [("again", "{}")] * MAX_CALLS


def test_an_answer_that_is_cut_is_still_calls():
    """At every character: whole calls first, then what came of the last, or nothing before its name."""
    whole = '[{"name":"a \\"b\\"","parameters":{"x": "}],{", "y":[1, 2]}}, {"name": "c", "parameters": {}}]'
    assert [(c.name, json.loads(c.arguments)) for c in forced_calls(whole, REQUIRED)] == [
        ('a "b"', {"x": "}],{", "y": [1, 2]}), ("c", {})]
    for end in range(len(whole)):
        calls = forced_calls(whole[:end], REQUIRED)
        assert [call.name for call in calls] == ['a "b"', "c"][:len(calls)]
        for call in calls[:-1]: assert json.loads(call.arguments) == {"x": "}],{", "y": [1, 2]}
        if calls: assert isinstance(calls[-1].arguments, str)
    assert [forced_calls(whole[:end], REQUIRED) for end in (0, 1, 12, 30)] == [[]] * 4
    assert forced_calls(whole[:50], REQUIRED)[0].arguments == whole[32:50]
    assert forced_calls('{"x": "ha', ToolChoice("named", "a"))[0].arguments == '{"x": "ha'


@pytest.mark.slow
def test_what_lists_no_properties_or_says_more_stays_open():
    for parameters in ({"type": "object"}, {**PARAMETERS["flat"], "additionalProperties": True},
                       {**PARAMETERS["flat"], "patternProperties": {"^x": {"type": "integer"}}}):
        assert call_schema((tool("f", parameters),), ToolChoice("named", "f")) == parameters
    both = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": {"type": "object", "properties": {"x": UNIT}, "required": ["x"]},
                      "b": {"type": "object", "properties": {"y": UNIT}, "required": ["y"]}}}
    [call] = forced_calls(write_answer((tool("f", both),), ONE, 0), ONE)
    assert {"x", "y"} <= set(json.loads(call.arguments))


# **** requests ****

def asked(**fields: Any) -> chat_protocol.ChatRequest:
    data = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOLS[0]], "tool_choice": "required"}
    return chat_protocol.chat({**data, **fields}, SamplingParams(), RequestLimits())


def test_stop_strings_do_not_cut_a_call():
    assert asked(stop=["}"], stop_token_ids=[5]).params.stop == []
    assert asked(stop=["}"], stop_token_ids=[5]).params.stop_token_ids == []
    assert tuple(asked(stop=["}"], tool_choice="auto").params.stop) == ("}",)


NULL = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}


@pytest.mark.parametrize("form", [{"type": "text"}, {"type": "json_object"}, NULL])
def test_response_format_is_about_content(form: dict[str, Any]):
    assert asked(response_format=form).params.structured_outputs == asked().params.structured_outputs
    with pytest.raises(APIError, match="guided_regex asks for another output"): asked(guided_regex="a")


@pytest.mark.parametrize("kind", ["array", ["null", "string"], 3])
def test_arguments_that_are_no_object_are_refused(kind: Any):
    with pytest.raises(APIError, match=r"tools\[0\].function.parameters.type is .*, expected 'object'"):
        asked(tools=[tool("f", {"type": kind})])


def test_a_schema_too_deep_is_refused():
    deep: Any = {"type": "object"}
    for _ in range(900): deep = {"type": "object", "properties": {"x": deep}}
    with pytest.raises(APIError, match="levels"): asked(tools=[tool("f", deep)])


def test_white_space_is_asked_for_as_in_vllm():
    one = asked(tool_choice="none", structured_outputs={"json": PLACE, "disable_any_whitespace": True})
    assert one.params.structured_outputs == Structured(json=PLACE, disable_any_whitespace=True)
    assert one.params.structured_outputs != Structured(json=PLACE)
