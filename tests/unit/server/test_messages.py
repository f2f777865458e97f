"""/v1/messages, by the anthropic client."""
from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.lazy import lazy
from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live
from tinygrad_nv.server.parsers.parser import CallDelta

anthropic = lazy("anthropic")

TEMPLATE = ("{% for m in messages %}{{ '' if loop.first else '\n' }}{{ m.role }}: {{ m.content }}"
            "{{ m.reasoning_content }}{{ m.tool_calls }}{% endfor %}{% if add_generation_prompt %}{{ '\n' }}"
            "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
            "{% if enable_thinking is defined %}({{ enable_thinking }}){% endif %}<{% endif %}{# <think> #}")
LOOK: dict[str, Any] = {"name": "look", "description": "sees", "input_schema": {
    "type": "object", "properties": {"at": {"type": "string"}}}}
SAID = '<think>so</think>see <tool_call>{"name": "look", "arguments": {"at": "a fox"}}</tool_call>'
USER: list[Any] = [{"role": "user", "content": "how?"}]


@contextlib.contextmanager
def serving(said: str | Sequence[str] = "yes", keys: frozenset[str] = frozenset(), details: bool = False,
            **engine: Any) -> Iterator[tuple[Any, FakeEngine, Live]]:
    """A client, the engine it talks to, which says `said`, a character a token, and the server."""
    made = FakeEngine(FakeModel(TEMPLATE), pieces=tuple(said), **engine)
    with (live(fake_service(made, keys=keys, prompt_details=details)) as server,
          anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0,
                              http_client=anthropic.DefaultHttpxClient(verify=False)) as client):
        yield client, made, server


def prompt(engine: FakeEngine) -> str:
    """The prompt of the last request."""
    return engine.model.tokenizer.decode(engine.asked[-1][0].ids or [], skip_special_tokens=False)


def test_thinking_text_and_calls_are_blocks():
    with serving(SAID) as (client, engine, _):
        asked: dict[str, Any] = {"model": NAME, "max_tokens": 200, "messages": USER, "tools": [LOOK],
                                 "system": "Brief."}
        done = client.messages.create(**asked)
        thought, text, call = done.content
        assert (thought.thinking, text.text, call.name, call.input) == ("so", "see ", "look", {"at": "a fox"})
        assert (done.role, done.model) == ("assistant", NAME)
        assert (done.stop_reason, done.stop_sequence) == ("tool_use", None)
        assert done.usage.input_tokens == len(engine.asked[-1][0].ids or [])
        assert done.usage.output_tokens == len(SAID)
        assert prompt(engine).startswith('system: Brief.\nuser: how?\n<tool_call>[{"type": "function", '
                                         '"function":')
        with client.messages.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_message()
        kinds = [event.type for event in events]
        assert [kind for kind in kinds if "start" in kind or "stop" in kind or kind == "message_delta"] == [
            "message_start", *["content_block_start",
                               "content_block_stop"] * 3, "message_delta", "message_stop"]
        assert (final.content[0].thinking, final.content[1].text) == ("so", "see ")
        assert (final.content[2].input, final.stop_reason) == ({"at": "a fox"}, "tool_use")
        assert final.usage.output_tokens == len(SAID)
        parts = [event.partial_json for event in events if event.type == "input_json"]
        assert (json.loads("".join(parts)), len(parts) > 5) == ({"at": "a fox"}, True)


def test_blocks_of_every_kind_reach_the_template():
    with serving() as (client, engine, _):
        mark = {"cache_control": {"type": "ephemeral"}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "a", **mark},
                                                 {"type": "text", "text": "b"}]},
                    {"role": "user", "content": "c"},
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "d"},
                        {"type": "tool_use", "id": "u", "name": "look", "input": {"at": 1}}]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "u",
                         "content": [{"type": "text", "text": "e"}]},
                        {"type": "tool_result", "tool_use_id": "u", "content": "f", "is_error": True},
                        {"type": "text", "text": "g"}]}]
        client.messages.create(model=NAME, max_tokens=9, messages=messages, metadata={"user_id": "me"},
                               system=[{"type": "text", "text": "S", **mark}, {"type": "text", "text": "T"}])
        assert prompt(engine) == (
            "system: S\nT\nuser: a\nb\nc\nassistant: dt[{'id': 'u', 'type': 'function', 'function': {'name': "
            "'look', 'arguments': {'at': 1}}}]\ntool: e\ntool: Error: f\nuser: g\n<")


def test_a_prefill_goes_on():
    with serving(" (B)") as (client, engine, _):
        done = client.messages.create(model=NAME, max_tokens=9,
                                      messages=[*USER, {"role": "assistant", "content": "It is"}])
        assert prompt(engine) == "user: how?\nassistant: It is"
        assert done.content[0].text == " (B)"


@pytest.mark.parametrize(("engine", "reason", "sequence"), [
    ({}, "end_turn", None), ({"stopped_by": "STOP"}, "stop_sequence", "STOP"),
    ({"stopped_by": 7}, "end_turn", None)])
def test_why_an_answer_ends(engine: dict[str, Any], reason: str, sequence: str | None):
    with serving(**engine) as (client, made, _):
        done = client.messages.create(model=NAME, max_tokens=9, messages=USER, stop_sequences=["STOP"],
                                      extra_body={"top_k": 5, "top_p": 0.5})
        assert (done.stop_reason, done.stop_sequence) == (reason, sequence)
        params = made.asked[-1][1]
        assert (params.stop, params.top_k, params.top_p, params.max_tokens) == (["STOP"], 5, 0.5, 9)
        cut = client.messages.create(model=NAME, max_tokens=2, messages=USER)
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "ye")


def test_thinking_is_a_switch():
    with serving("<think>so</think>yes") as (client, engine, _):
        for thinking, said in (({"type": "enabled", "budget_tokens": 1024}, "(True)"),
                               ({"type": "adaptive"}, "(True)"),
                               ({"type": "disabled"}, "(False)")):
            done = client.messages.create(model=NAME, max_tokens=2000, messages=USER, thinking=thinking)
            assert said in prompt(engine)
            kinds = [block.type for block in done.content]
            assert kinds == (["text"] if thinking["type"] == "disabled" else ["thinking", "text"])
        client.messages.create(model=NAME, max_tokens=9, messages=USER, output_config={"effort": "low"})
        assert "(True)" in prompt(engine)


def test_tool_choices():
    with serving('[{"name": "look", "parameters": {"at": "a"}}]') as (client, engine, _):
        asked: dict[str, Any] = {"model": NAME, "max_tokens": 99, "messages": USER, "tools": [LOOK]}
        done = client.messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        assert [(b.name, b.input) for b in done.content] == [("look", {"at": "a"})]
        assert engine.asked[-1][1].structured_outputs.json["maxItems"] == 1
        none = client.messages.create(**asked, tool_choice={"type": "none"})
        assert (none.content[0].type, "<tool_call>" in prompt(engine)) == ("text", False)
    with serving('{"at": "a"}') as (client, engine, _):
        done = client.messages.create(**asked, tool_choice={"type": "tool", "name": "look"})
        assert done.content[0].input == {"at": "a"}
        cut = client.messages.create(**{**asked, "max_tokens": 5},
                                     tool_choice={"type": "tool", "name": "look"})
        assert (cut.content[0].text, cut.stop_reason) == ('{"at"', "max_tokens")
        schema = {"type": "object", "properties": {"at": {"type": "string"}}}
        client.messages.create(**asked, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert engine.asked[-1][1].structured_outputs.json == schema


def test_half_a_surrogate_pair_in_a_call_is_answered():
    with serving('{"at": "\\ud800"}') as (client, _, _):
        done = client.messages.create(model=NAME, max_tokens=99, messages=USER, tools=[LOOK],
                                      tool_choice={"type": "tool", "name": "look"})
        assert done.content[0].input == {}
    assert CallDelta(0, "{").name is None


def test_tokens_are_counted():
    with serving() as (client, engine, _):
        counted = client.messages.count_tokens(model=NAME, messages=USER, tools=[LOOK], system="Brief.")
        client.messages.create(model=NAME, max_tokens=1, messages=USER, tools=[LOOK], system="Brief.")
        assert counted.input_tokens == len(engine.asked[-1][0].ids or [])


def test_tokens_of_the_prefix_cache_are_counted_apart():
    with serving(cached=4) as (client, engine, _):
        used = client.messages.create(model=NAME, max_tokens=9, messages=USER).usage
        assert used.to_dict() == {"input_tokens": len(engine.asked[-1][0].ids or []), "output_tokens": 3}
    with serving(cached=4, details=True) as (client, engine, _):
        used = client.messages.create(model=NAME, max_tokens=9, messages=USER).usage
        assert (used.cache_read_input_tokens, used.cache_creation_input_tokens) == (4, 0)
        assert used.input_tokens + 4 == len(engine.asked[-1][0].ids or [])


# **** errors ****

def test_the_key_may_be_in_either_header():
    with serving(keys=frozenset({"secret"})) as (client, _, server):
        client.messages.create(model=NAME, max_tokens=1, messages=USER)
        wrong = client.with_options(api_key="other")
        with pytest.raises(anthropic.AuthenticationError) as found:
            wrong.messages.create(model=NAME, max_tokens=1, messages=USER)
        assert found.value.body["error"] == {
            "type": "authentication_error", "message": "the API key is wrong; expected: the header "
            "Authorization: Bearer KEY, or x-api-key: KEY"}
        assert found.value.body["request_id"]
        assert server.http.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
        assert server.http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        both = {"Authorization": "Bearer other", "x-api-key": "secret"}
        assert server.http.get("/v1/models", headers=both).status_code == 401
        assert "error" in server.http.get("/v1/models").json()


def test_errors_have_anthropics_shape():
    with serving() as (client, engine, server):
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(model="other", max_tokens=1, messages=USER)
        assert unknown.value.body["error"]["type"] == "not_found_error"
        engine.limit = 0
        with pytest.raises(anthropic.RateLimitError) as full:
            client.messages.create(model=NAME, max_tokens=1, messages=USER, stream=True)
        assert full.value.body["error"]["type"] == "rate_limit_error"
        for answer in (server.http.get("/v1/messages"), server.http.post("/v1/messages", content=b"{")):
            body = answer.json()
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    with (serving("slow", fails_after=2) as (client, _, server),
          pytest.raises(anthropic.APIStatusError, match="NaN")):
        list(client.messages.create(model=NAME, max_tokens=9, messages=USER, stream=True))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"), ({"max_tokens": 0}, "at least 1"),
    ({"messages": None}, "is missing"),
    ({"messages": []}, "is empty"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "expected one of user, assistant"),
    ({"messages": [{"content": "a"}]}, "role is missing"),
    ({"messages": [{"role": "user"}]}, "neither a string nor"),
    ({"messages": [{"role": "user", "content": []}]}, "at least one block"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
     "'image', expected text or tool_result"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "expected text or tool_result"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "u"}]}]}, "name is missing"),
    ({"system": [{"type": "image"}]}, "system[0].type is 'image'"), ({"temperature": 2.5}, "0 to 2"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "runs no tools of its own"),
    ({"tools": [{"input_schema": {}}]}, "name is missing"),
    ({"tool_choice": {"type": "any"}}, "without tools"),
    ({"tool_choice": {"type": "some"}}, "expected one of auto"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "hear"}}, "'hear'"),
    ({"thinking": {"type": "deep"}}, "expected one of enabled"), ({"thinking": {}}, "type is missing"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens is -1"),
    ({"mcp_servers": [{"name": "a"}]}, "mcp_servers is not served"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "schema is missing"),
    ({"stop_sequences": ["a"] * 17}, "at most 16"), ({"container": "c"}, "unknown field"),
    ({"stop": "a"}, "unknown field"),
    ({"service_tier": "fast"}, 'say "auto" or "standard_only"'),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(FakeEngine(FakeModel(TEMPLATE)), strict=True)) as running: yield running


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[str(each[0])[:40] for each in REFUSED])
def test_what_is_refused(server: Live, fields: dict[str, Any], words: str):
    answer = server.post({"max_tokens": 9, "messages": USER, **fields}, "/v1/messages")
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
