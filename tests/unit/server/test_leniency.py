"""Fields that have no effect, in all protocols: accepted, named in a header, logged once, or refused."""
from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.serve_case import FakeEngine, FakeModel, Live, fake_service, live
from tests.unit.server.test_embeddings import FakeEmbedder, embedding_service
from tinygrad_nv.server.leniency import MOST_NAMES

HEADER = "x-ignored-fields"
USER = [{"role": "user", "content": "a"}]
LOOK = {"type": "function", "function": {"name": "look"}}
CHAT, MESSAGES, RESPONSES, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 1}, MESSAGES: {"messages": USER, "max_tokens": 1},
    RESPONSES: {"input": "a", "max_output_tokens": 1}, TEXT: {"prompt": "a", "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": USER}, "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]}}
TEMPLATE = ("{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}")
SEARCH = {"type": "web_search", "name": "web_search"}
CODEX_TOOL = {"type": "function", "name": "look", "parameters": None, "strict": None, "extra": 1}
TOOL = {"name": "look", "input_schema": {"type": "object"}}


def said(role: str, **fields: Any) -> list[dict[str, Any]]: return [{"role": role, **fields}, *USER]


# what is asked for, and the header; a strict server refuses those that have one
ACCEPTED: list[tuple[str, dict[str, Any], str]] = [
    # **** unknown ****
    *((path, {"colour": 1}, "colour") for path in BASE),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (MESSAGES, {"stream": True, "x": 1}, "x"), (RESPONSES, {"stream": True, "x": 1}, "x"),
    (CHAT, {"messages": said("user", content="b", x=1, y={"z": 2})}, "messages[].x, messages[].y"),
    (CHAT, {"messages": said("user", content=[{"type": "text", "text": "b", "x": 1}])},
     "messages[].content[].x"),
    (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
     "response_format.json_schema.x"),
    (CHAT, {"a b,\r\n\ud800": 1}, "a%20b%2C%0D%0A%3F"), (CHAT, {"": 1}, '""'),
    (MESSAGES, {"tools": [{**TOOL, "defer_loading": True}]}, "tools[].defer_loading"),
    (RESPONSES, {"tools": [CODEX_TOOL]}, "tools[].extra"),
    # **** hints, and switches that the template lacks ****
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"), (CHAT, {"verbosity": "low"}, "verbosity"),
    (RESPONSES, {"reasoning": {"effort": "high", "summary": "detailed"}, "text": {"verbosity": "low"}},
     "reasoning.summary, reasoning.effort, text.verbosity"),
    (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
    (CHAT, {"store": True, "service_tier": "flex"}, "service_tier, store"),
    (CHAT, {"audio": {"voice": "a", "format": "wav"}}, "audio"),
    (MESSAGES, {"service_tier": "priority", "context_management": {"edits": []}, "container": "c"},
     "service_tier, context_management, container"),
    (MESSAGES, {"output_config": {"effort": "low", "task_budget": {}}},
     "output_config.task_budget, output_config.effort"),
    (RESPONSES, {"include": ["web_search_call.action.sources"], "max_tool_calls": 1},
     "include, max_tool_calls"),
    # **** tools that the server would run, beside one that the client runs ****
    (RESPONSES, {"tools": [SEARCH, CODEX_TOOL]}, "tools[].extra, tools[].type"),
    (CHAT, {"tools": [LOOK, {"type": "custom", "custom": {"name": "f"}}]}, "tools[].type"),
    (MESSAGES, {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[].type")]
# accepted by a strict server, too: they ask for nothing, or are served
SILENT: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"logprobs": False, "top_logprobs": 0}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": None,
                                                        "description": None}}]}),
    (CHAT, {"messages": said("assistant", content=[{"type": "refusal", "refusal": "no"}])}),
    (CHAT, {"messages": said("assistant", content=None, refusal="no")}),
    (CHAT, {"messages": said("tool", content=None, tool_call_id="c")}),
    (CHAT, {"response_format": {"type": "json_object", "schema": {"type": "object"}}}),
    (CHAT, {"tools": [{**LOOK, "type": None}]}),
    (CHAT, {"tools": [LOOK], "functions": [], "function_call": "auto"}),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": None}]}),
    (MESSAGES, {"messages": [*USER, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "tool_use", "id": "t", "name": "find", "input": {}, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "tool_reference", "tool_name": "look"}]}]}]}),
    (MESSAGES, {"mcp_servers": [], "service_tier": "auto", "metadata": {"user_id": "u"},
                "output_format": {"type": "json_schema", "schema": {"type": "object"}}}),
    (RESPONSES, {"input": [*USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                           {"type": "function_call_output", "call_id": "c", "output": None}]}),
    (RESPONSES, {"reasoning": None, "service_tier": "auto", "top_logprobs": 0,
                 "text": {"verbosity": "medium"}})]
# they would change the answer
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"modalities": ["text", "audio"]}, "modalities is not served"), (CHAT, {"n": 1000}, "n"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"), (CHAT, {"top_logprobs": 2}, "needs logprobs"),
    (CHAT, {"web_search_options": {"a": 1}}, "web_search_options is not served"),
    (CHAT, {"structured_outputs": {"structural_tag": "a"}}, "structural_tag is not served"),
    (CHAT, {"messages": said("user", content=[{"type": "file"}])}, "reads nothing else"),
    (CHAT, {"messages": said("user", content=None)}, "messages[0].content is missing"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "type is 'custom', expected 'function'"),
    (CHAT, {"chat_template_kwargs": {"generation_marks": True}}, "chat_template_kwargs has generation_marks"),
    (MESSAGES, {"mcp_servers": [{"name": "a"}]}, "mcp_servers is not served"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs no tools of its"),
    (RESPONSES, {"tools": [SEARCH]}, "runs no tools of its own"),
    (RESPONSES, {"conversation": "c"}, "conversation is not served"),
    (TEXT, {"suffix": "b"}, "suffix"),
    (TEXT, {"prompt_embeds": "AA=="}, "prompt_embeds is not served")]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[bool, Live]]:
    with (live(fake_service(FakeEngine(FakeModel(TEMPLATE)))) as lenient,
          live(fake_service(FakeEngine(FakeModel(TEMPLATE)), strict=True)) as strict):
        yield {False: lenient, True: strict}


def ask(server: Live, path: str, fields: dict[str, Any]) -> tuple[int, str, str]:
    """The status, the header and the body."""
    # httpx's own JSON has no half surrogate pairs
    answer = server.http.post(path, content=json.dumps({**BASE[path], **fields}),
                              headers={"Content-Type": "application/json"})
    return answer.status_code, answer.headers.get(HEADER, ""), answer.text


def test_what_has_no_effect_is_named(servers: dict[bool, Live]):
    for path, fields, header in ACCEPTED:
        status, found, text = ask(servers[False], path, fields)
        assert (status, found) == (200, header), (path, fields, text)
        status, _, text = ask(servers[True], path, fields)
        assert status == 400, (path, fields, text)


def test_what_asks_for_nothing_is_not(servers: dict[bool, Live]):
    for path, fields in SILENT:
        for server in servers.values():
            assert ask(server, path, fields)[:2] == (200, ""), (path, fields, ask(server, path, fields))


def test_what_would_change_the_answer_is_refused(servers: dict[bool, Live]):
    for path, fields, words in REFUSED:
        for server in servers.values():
            status, _, text = ask(server, path, fields)
            assert (status, words in text) == (400, True), (path, fields, text)


def test_tools_of_which_the_model_reads(servers: dict[bool, Live]):
    """Parameters that are null are none, and a tool that is left out is not in the prompt."""
    for path, tools in ((RESPONSES, [SEARCH, CODEX_TOOL]), (CHAT, [LOOK]), (MESSAGES, [{"name": "look"}])):
        assert ask(servers[False], path, {"tools": tools})[0] == 200
        engine: Any = servers[False].service.engine
        prompt = servers[False].service.require_tokenizer().decode(engine.asked[-1][0].ids)
        assert prompt.endswith('a{"type": "function", "function": {"name": "look", "parameters": '
                               '{"type": "object", "properties": {}}}}')


def test_a_field_is_logged_once(servers: dict[bool, Live], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "tinygrad_nv.server"):
        for at in range(3):
            ask(servers[False], CHAT, {"messages": said("user", content="b", **{"once": at})})
    assert caplog.messages.count("ignored_field name=messages[].once") == 1


def test_many_fields_do_not_make_a_long_header(servers: dict[bool, Live]):
    _, header, _ = ask(servers[False], CHAT, {f"x{'y' * 200}{at}": at for at in range(10_000)})
    assert len(header.split(", ")) == 1     # the same name, cut
    _, header, _ = ask(servers[False], CHAT, {f"{at}{'y' * 200}": at for at in range(10_000)})
    assert len(header.split(", ")) == MOST_NAMES
    assert len(header) < MOST_NAMES * 90


def test_embeddings():
    made = embedding_service(FakeEmbedder())
    made.strict = False
    with live(made) as server:
        for path, fields in (("/v1/embeddings", {"input": "a", "input_type": "query"}),
                             ("/rerank", {"query": "a", "documents": [{"text": "b", "title": "c"}]}),
                             ("/score", {"text_1": "a", "text_2": "b", "x": 1}),
                             ("/pooling", {"input": "a", "task": "embed", "x": 1})):
            answer = server.post(fields, path)
            assert (answer.status_code, HEADER in answer.headers) == (200, True), answer.text


def test_items_of_earlier_responses(servers: dict[bool, Live]):
    first = servers[True].post({"input": "first", "max_output_tokens": 2}, RESPONSES).json()
    asked = {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}, *USER]}
    assert servers[True].post({**asked, "max_output_tokens": 1}, RESPONSES).status_code == 200
    engine: Any = servers[True].service.engine
    prompt = servers[True].service.require_tokenizer().decode(engine.asked[-1][0].ids)
    assert prompt == first["output"][0]["content"][0]["text"] + "a"
    missing = servers[True].post({"input": [{"type": "item_reference", "id": "msg_x"}]}, RESPONSES)
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "input[0].id")
