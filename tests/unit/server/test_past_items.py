"""Items of earlier turns: calls of tools that a client or a server ran, and messages of the system, in
all protocols. They are data: never an error, and in the prompt where they say something. Tool calls of
earlier turns whose arguments are no object, in all three protocols; and whose fields errors name."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.lazy import lazy
from tests.support.server.serve_case import FakeEngine, FakeModel, Live, fake_service, live

anthropic, openai = lazy("anthropic"), lazy("openai")

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
            "[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
            "{% endfor %}{% for t in tools or [] %}{{ t.function.name }};{% endfor %}")
USER: dict[str, Any] = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(FakeEngine(FakeModel(TEMPLATE)))) as made: yield made


def prompt(server: Live, path: str, **asked: Any) -> tuple[str, str]:
    """The prompt of a request, and the fields that were left out."""
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    answer = server.post({most: 1, **asked}, path)
    assert answer.status_code == 200, (asked, answer.text)
    engine: Any = server.service.engine
    text = server.service.require_tokenizer().decode(engine.asked[-1][0].ids or [], skip_special_tokens=False)
    return text, answer.headers.get("x-ignored-fields", "")


# items, and what the template writes of them
ITEMS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin\n"},
      {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}],
     '<assistant>[c patch {"input": "*** Begin\\n"}]<tool>done'),
    ([{"type": "custom_tool_call", "id": "x", "call_id": "c", "name": "n", "input": "", "status": "x"},
      {"type": "custom_tool_call_output", "call_id": "c", "output": [
          {"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]}],
     '<assistant>[c n {"input": ""}]<tool>b\nc'),
    ([{"type": "local_shell_call", "id": "l", "call_id": "c", "status": "completed",
       "action": {"type": "exec", "command": ["ls"], "env": {}}},
      {"type": "local_shell_call_output", "id": "c", "output": "x.py"}],
     '<assistant>[c local_shell {"type": "exec", "command": ["ls"], "env": {}}]<tool>x.py'),
    ([{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
      {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "stderr": ""}]}],
     '<assistant>[c shell {"commands": ["ls"]}]<tool>[{"stdout": "x", "stderr": ""}]'),
    ([{"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "p"}},
      {"type": "apply_patch_call_output", "call_id": "c", "status": "completed", "output": None}],
     '<assistant>[c apply_patch {"type": "delete_file", "path": "p"}]<tool>'),
    ([{"type": "mcp_call", "id": "m", "server_label": "s", "name": "n", "arguments": '{"x": 1}',
       "output": "y"}], '<assistant>[m n {"x": 1}]<tool>y'),
    ([{"type": "code_interpreter_call", "id": "i", "container_id": "k", "code": "1+1",
       "outputs": [{"type": "logs", "logs": "2"}]}],
     '<assistant>[i code_interpreter {"code": "1+1"}]<tool>[{"type": "logs", "logs": "2"}]'),
    ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": "1', "id": None,
       "status": None}, {"type": "function_call_output", "call_id": "c", "output": "r", "id": None}],
     '<assistant>[c f "{\\"x\\": \\"1"]<tool>r'),
    ([{"type": None, "role": "assistant", "content": [
        {"type": "refusal", "refusal": "no", "text": None}]}], "<assistant>no")]
LEFT_OUT: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "file_search_call", "id": "f", "queries": ["q"], "results": None},
    {"type": "code_interpreter_call", "id": "i", "code": "1", "outputs": None},
    {"type": "image_generation_call", "id": "g", "result": "base64"},
    {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": []},
    {"type": "compaction", "encrypted_content": "x"}]


def test_items_of_responses(server: Live):
    for items, written in ITEMS:
        assert prompt(server, RESPONSES, input=[USER, *items, USER]) == (f"<user>a{written}<user>a", "")
    for item in LEFT_OUT:
        for around in ([USER, item, USER], [item, USER, USER]):
            assert prompt(server, RESPONSES, input=around) == ("<user>a<user>a", "input[].type"), item
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0,
                       http_client=openai.DefaultHttpxClient(verify=False)) as client:
        items: Any = [each for item, _ in ITEMS for each in item]
        assert client.responses.create(input=[USER, *items, *LEFT_OUT], max_output_tokens=1).output_text


@pytest.mark.parametrize(("items", "words"), [
    ([{"type": "image", "id": "x"}], "input[0].type is 'image'"),
    ([LEFT_OUT[0]], "input has nothing that the model reads"),
    ([{"type": "custom_tool_call", "name": "n", "input": "x", "call_id": 5}], "input[0].call_id is a whole"),
    ([USER, {"type": "custom_tool_call_output", "call_id": "c", "output": [
        {"type": "input_image", "image_url": "data:"}]}], "has a part of type 'input_image'")])
def test_items_that_are_refused(server: Live, items: Any, words: str):
    answer = server.post({"input": items, "max_output_tokens": 1}, RESPONSES)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_tools_that_a_choice_keeps(server: Live):
    f, g = ({"type": "function", "name": name} for name in "fg")
    for choice, kept in (({"tools": [g], "mode": "auto"}, "g;"),
                         ({"tools": [{"type": "web_search"}, f, g]}, "f;g;")):
        asked = {"input": "a", "tools": [f, g], "tool_choice": {"type": "allowed_tools", **choice}}
        assert prompt(server, RESPONSES, **asked)[0] == "<user>a" + kept
    for tools in (5, [5], [], [{"type": "function", "name": "h"}]):
        answer = server.post({**asked, "tool_choice": {"type": "allowed_tools", "tools": tools}}, RESPONSES)
        assert answer.status_code == 400, tools
        assert "tool_choice.tools" in answer.json()["error"]["message"]


def test_calls_of_custom_tools_in_chat(server: Live):
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "done"}]
    assert prompt(server, CHAT, messages=messages) == (
        '<user>a<assistant>[c patch {"input": "*** Begin"}]<tool>done', "")
    for custom, words in (({}, "custom.name is missing"), (5, "custom is a whole number"),
                          ({"name": "n", "input": {}}, "custom.input is an object")):
        messages[1]["tool_calls"] = [{**call, "custom": custom}]
        answer = server.post({"messages": messages, "max_tokens": 1}, CHAT)
        assert (answer.status_code, words in answer.text) == (400, True)


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]: return {"role": "assistant", "content": [*blocks]}


# messages of Anthropic's API, what the template writes of them, and the fields that are left out
BLOCKS: list[tuple[list[dict[str, Any]], str, str]] = [
    ([{"role": "system", "content": "s"}, USER], "<system>s<user>a", ""),
    ([USER, {"role": "system", "content": [{"type": "text", "text": "s"}]}, USER],
     "<user>a<system>s<user>a", ""),
    ([USER, assistant({"type": "text", "text": "b"},
                      {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                      {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
                          {"type": "web_search_result", "url": "u", "encrypted_content": "x"}]},
                      {"type": "text", "text": "c", "citations": [{"type": "web_search_result_location"}]}),
      USER], "<user>a<assistant>b\nc<user>a", "messages[].content[].type"),
    ([assistant({"type": "code_execution_tool_result", "tool_use_id": "s", "content": {}}), USER], "<user>a",
     "messages[].content[].type"),
    ([USER, assistant({"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {"x": 1}},
                      {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False,
                       "content": [{"type": "text", "text": "r"}]}, {"type": "text", "text": "b"}), USER],
     '<user>a<assistant>[m n {"x": 1}]<tool>r<assistant>b<user>a', "")]


def test_blocks_of_messages(server: Live):
    for messages, written, header in BLOCKS:
        assert prompt(server, MESSAGES, messages=messages) == (written, header)
    assert prompt(server, MESSAGES, messages=BLOCKS[0][0], system="t") == ("<system>t\ns<user>a", "")
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0,
                             http_client=anthropic.DefaultHttpxClient(verify=False)) as client:
        messages: Any = [each for some, _, _ in BLOCKS for each in some]
        assert client.messages.create(model="tales", max_tokens=1, messages=messages).content
        with pytest.raises(anthropic.BadRequestError, match="messages has nothing that the model reads"):
            client.messages.create(model="tales", max_tokens=1, messages=BLOCKS[3][0][:1])


@pytest.mark.parametrize(("part", "words"), [
    ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
     "type is 'image', expected 'text': the model reads nothing else"),
    ({"type": "document", "source": {"type": "url", "url": "u"}},
     "type is 'document', expected 'text': the model reads nothing else")])
def test_results_that_no_text_model_reads(server: Live, part: dict[str, Any], words: str):
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}, part]}
    answer = server.post({"max_tokens": 1, "messages": [{"role": "user", "content": [result]}]}, MESSAGES)
    assert answer.status_code == 400
    assert f"messages[0].content[0].content[1].{words}" in answer.json()["error"]["message"]


def test_a_header_that_proxies_pass_on(server: Live):
    """32 names of characters that are written as twelve each; proxies take 4 KB of headers or more."""
    names = {chr(0x10000 + at) * 80: 1 for at in range(40)}
    _, header = prompt(server, CHAT, messages=[USER], **names)
    assert 1000 < len(header) < 3000
    assert all(name.count("%") * 3 == len(name) for name in header.split(", "))


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
