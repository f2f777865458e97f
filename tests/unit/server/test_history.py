"""Tool calls of earlier turns whose arguments are no object, in all three protocols; and whose fields errors
name."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.serve_case import FakeEngine, FakeModel, Live, fake_service, live

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# as most templates have it; as some, which fail for other arguments than objects
TEXTS = ("{% for m in messages %}{% for c in m.tool_calls or [] %}[{% set a = c.function.arguments %}"
         "{{ a if a is string else a | tojson }}]{% endfor %}{% endfor %}")
OBJECTS = ("{% for m in messages %}{% for c in m.tool_calls or [] %}["
           "{% for k, v in c.function.arguments | items %}"
           "{{ k }}={{ v if v is string else v | tojson }};{% endfor %}]{% endfor %}{% endfor %}")
# the arguments, and what the two templates write
ARGUMENTS: list[tuple[str, str, str]] = [
    ('{"x": "1"}', '{"x": "1"}', "x=1;"), ('{"x": "1', '{"x": "1', 'arguments={"x": "1;'), ("", "{}", ""),
    ("null", "{}", ""), ("[]", "{}", ""), ("[1]", "[1]", "arguments=[1];"), ("5", "5", "arguments=5;"),
    ('"a"', "a", "arguments=a;"), ("{", "{", "arguments={;"), ("nonsense", "nonsense", "arguments=nonsense;"),
    ("true", "true", "arguments=true;"), ('{"x": NaN}', '{"x": NaN}', 'arguments={"x": NaN};'),
    ('{"x": "\\ud800"}', '{"x": "\ufffd"}', "x=\ufffd;"),
    ("9" * 5000, "9" * 5000, f"arguments={'9' * 5000};"),
    ("[" * 3000, "[" * 3000, f"arguments={'[' * 3000};")]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Live]]:
    with (live(fake_service(FakeEngine(model(TEXTS)))) as texts,
          live(fake_service(FakeEngine(model(OBJECTS)))) as objects):
        yield {TEXTS: texts, OBJECTS: objects}


def model(template: str) -> FakeModel:
    made = FakeModel(template)
    made.length = 30_000
    return made


def body(path: str, arguments: Any) -> dict[str, Any]:
    """A conversation with a call."""
    user = {"role": "user", "content": "a"}
    if path == CHAT:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"max_tokens": 1, "messages": [
            user, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "r"}]}
    if path == RESPONSES:
        return {"max_output_tokens": 1, "instructions": "i", "input": [
            user, {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "r"}]}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    return {"max_tokens": 1, "system": "i", "messages": [
        user, {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}]}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_arguments_are_data(servers: dict[str, Live], path: str):
    for given, text, objects in ARGUMENTS:
        for template, wanted in ((TEXTS, text), (OBJECTS, objects)):
            server = servers[template]
            asked = body(path, given)
            if path == RESPONSES and len(given) < 100: asked["truncation"] = "auto"
            answer = server.post(asked, path)
            assert answer.status_code == 200, (given, answer.text)
            engine: Any = server.service.engine
            prompt = server.service.require_tokenizer().decode(engine.asked[-1][0].ids)
            assert prompt.strip() == f"[{wanted}]", given


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_arguments_that_are_no_text(servers: dict[str, Live], path: str):
    for given, wanted in (({"x": 1}, '{"x": 1}'), (None, "{}"), ([], "{}"), ([1], "[1]"), (5, "5"),
                          (False, "false")):
        server = servers[TEXTS]
        answer = server.post(body(path, given), path)
        assert answer.status_code == 200, (given, answer.text)
        engine: Any = server.service.engine
        prompt = server.service.require_tokenizer().decode(engine.asked[-1][0].ids)
        assert prompt.strip() == f"[{wanted}]", given


@pytest.mark.parametrize(("path", "changed", "param"), [
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"reasoning": {"effort": "x"}}, "reasoning.effort"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"x-guidance": 5}}}},
     "text.format.schema"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f" * 300}]}, "tools[0].name"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
    (MESSAGES, {"tools": [{"name": "\ud800", "input_schema": {}}]}, "tools[0].name"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"x-guidance": 5}}}},
     "output_config.format.schema"),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": {"x-guidance": 5}}},
     "output_format.schema"),
    (MESSAGES, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "\ud800"}]}]},
     "input[0].content[0].text")])
def test_errors_name_the_field_that_was_sent(servers: dict[str, Live], path: str, changed: Any, param: str):
    sent = json.dumps({**body(path, "{}"), **changed})
    answer = servers[TEXTS].http.post(path, content=sent, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert param in answer.json()["error"]["message"]
    if path == RESPONSES: assert answer.json()["error"]["param"] == param

