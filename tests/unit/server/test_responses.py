"""/v1/responses, by the openai client."""
from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.lazy import lazy
from tests.support.server.serve_case import (
    LENGTH,
    NAME,
    FakeEngine,
    FakeModel,
    Live,
    fake_service,
    live,
    until,
)
from tinygrad_nv.errors import NVError
from tinygrad_nv.server import response_store
from tinygrad_nv.server.response_store import ResponseStore, Stored

openai = lazy("openai")

TEMPLATE = ("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.reasoning_content }}"
            "{{ m.tool_calls }}\n{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
            "{# reasoning_effort <think> #}")
LOOK: dict[str, Any] = {"type": "function", "name": "look", "description": "sees", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}}}
SAID = '<think>so</think>see <tool_call>{"name": "look", "arguments": {"at": "a fox"}}</tool_call>'


@contextlib.contextmanager
def serving(said: str | Sequence[str] = "yes", **engine: Any) -> Iterator[tuple[Any, FakeEngine, Live]]:
    """A client, the engine it talks to, which says `said`, a character a token, and the server."""
    made = FakeEngine(FakeModel(TEMPLATE), pieces=tuple(said), **engine)
    with (live(fake_service(made)) as server,
          openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0,
                        http_client=openai.DefaultHttpxClient(verify=False)) as client):
        yield client, made, server


def prompt(engine: FakeEngine) -> str:
    """The prompt of the last request."""
    return engine.model.tokenizer.decode(engine.asked[-1][0].ids or [], skip_special_tokens=False)


def test_reasoning_text_and_calls_are_items():
    with serving(SAID) as (client, engine, _):
        asked: dict[str, Any] = {"model": NAME, "input": "how?", "instructions": "Be brief.", "tools": [LOOK],
                                 "metadata": {"a": "b"}, "max_output_tokens": 200, "temperature": 0.5}
        done = client.responses.create(**asked)
        thought, message, call = done.output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "so", [])
        assert (message.content[0].text, done.output_text, message.status) == ("see ", "see ", "completed")
        assert (call.type, call.name, call.arguments) == ("function_call", "look", '{"at": "a fox"}')
        assert (done.status, done.error, done.incomplete_details) == ("completed", None, None)
        assert (done.instructions, done.metadata, done.max_output_tokens) == ("Be brief.", {"a": "b"}, 200)
        assert (done.temperature, done.tools[0].name, done.id[:5]) == (0.5, "look", "resp_")
        assert done.usage.input_tokens == len(engine.asked[-1][0].ids)
        assert (done.usage.output_tokens,
                done.usage.total_tokens - done.usage.input_tokens) == (len(SAID),) * 2
        assert done.usage.output_tokens_details.reasoning_tokens == len("<think>so</think>") - len("<think")
        assert prompt(engine).startswith("system: Be brief.\nuser: how?\n<tool_call>")
        assert engine.asked[-1][1].max_tokens == 200


def test_events_of_a_stream():
    with serving(SAID) as (client, _, server):
        asked: dict[str, Any] = {"model": NAME, "input": "how?", "tools": [LOOK]}
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        kinds = [event.type.removeprefix("response.") for event in events]
        once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
        text = ["content_part.done", "output_item.done", "output_item.added"]
        assert once == [
            "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
            "reasoning_text.done", *text, "content_part.added", "output_text.delta", "output_text.done",
            *text,
            "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert final.output_text == "see "
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "so"
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert (json.loads("".join(deltas)), len(deltas) > 5) == ({"at": "a fox"}, True)
        assert client.responses.retrieve(final.id).output_text == "see "
        # named events, and no [DONE]
        raw = server.post({**asked, "stream": True}, "/v1/responses").text
        assert raw.startswith("event: response.created\ndata: {")
        assert raw.rstrip().rpartition("\n\n")[2].startswith("event: response.completed\n")


def test_a_conversation_goes_on():
    with serving(SAID) as (client, engine, _):
        first = client.responses.create(model=NAME, input="how?", tools=[LOOK], instructions="Old.")
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a fox"}
        second = client.responses.create(model=NAME, input=[result], previous_response_id=first.id,
                                         instructions="New.")
        said = prompt(engine)
        assert said.startswith("system: New.\nuser: how?\nassistant: see so[{'id': '" + call.call_id)
        assert "tool: a fox\n" in said
        assert second.previous_response_id == first.id
        # the same, with the items sent back
        items = [{"role": "user", "content": "how?"}, *[item.to_dict() for item in first.output], result]
        client.responses.create(model=NAME, input=items, instructions="New.", store=False)
        assert prompt(engine) == said


def test_items_of_every_kind():
    with serving() as (client, engine, _):
        items = [{"role": "developer", "content": "D"}, {"role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "c", "annotations": []}]},
            {"type": "function_call", "call_id": "x", "name": "look", "arguments": '{"at": 1}'},
            {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "d"}]}]
        client.responses.create(model=NAME, input=items)
        assert prompt(engine).startswith(
            "system: D\nuser: a\nb\nassistant: cs[{'id': 'x', 'type': 'function', "
            "'function': {'name': 'look', 'arguments': {'at': 1}}}]\ntool: d\n")


def test_an_answer_that_is_cut_is_incomplete():
    with serving(SAID) as (client, _, _):
        done = client.responses.create(model=NAME, input="how?", tools=[LOOK],
                                       max_output_tokens=len(SAID) - 20)
        assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [item.status for item in done.output] == [None, "completed", "incomplete"], "of reasoning none"
        with client.responses.stream(model=NAME, input="how?", max_output_tokens=3) as stream:
            assert list(stream)[-1].type == "response.incomplete"


def test_text_formats_constrain_the_output():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with serving('{"a": 1}') as (client, engine, _):
        done = client.responses.create(model=NAME, input="x", text={"format": {
            "type": "json_schema", "name": "thing", "schema": schema, "strict": True}})
        assert done.text.format.name == "thing"
        assert engine.asked[-1][1].structured_outputs.json == schema
        client.responses.create(model=NAME, input="x", text={"format": {"type": "json_object"}})
        assert engine.asked[-1][1].structured_outputs.json_object
        client.responses.create(model=NAME, input="x", reasoning={"effort": "low", "summary": "auto"})
        named = client.responses.create(model=NAME, input="x", tools=[LOOK],
                                        tool_choice={"type": "function", "name": "look"})
        assert [(item.type, item.arguments) for item in named.output] == [("function_call", '{"a": 1}')]
        allowed = {"type": "allowed_tools", "mode": "required",
                   "tools": [{"type": "function", "name": "look"}]}
        client.responses.create(model=NAME, input="x", tools=[LOOK, {**LOOK, "name": "hear"}],
                                tool_choice=allowed)
        assert "hear" not in json.dumps(engine.asked[-1][1].structured_outputs.json)


def test_logprobs_are_of_the_text():
    with serving() as (client, _, _):
        done = client.responses.create(model=NAME, input="x", include=["message.output_text.logprobs"],
                                       top_logprobs=1)
        found = done.output[0].content[0].logprobs
        assert [(each.token, each.logprob, len(each.top_logprobs)) for each in found] == \
            [(letter, -0.5, 1) for letter in "yes"]


def test_truncation_drops_the_oldest_messages():
    with serving() as (client, engine, _):
        items = [{"role": "user", "content": f"{at} " + "word " * 40} for at in range(30)]
        with pytest.raises(openai.BadRequestError, match="the context holds"):
            client.responses.create(model=NAME, input=items, instructions="Stay.")
        client.responses.create(model=NAME, input=items, instructions="Stay.", truncation="auto")
        said = prompt(engine)
        assert said.startswith("system: Stay.\nuser: 2")
        assert "29 word" in said
        assert LENGTH * 0.7 < len(engine.asked[-1][0].ids or []) < LENGTH


def test_truncation_leaves_no_result_without_its_call():
    with serving() as (client, engine, _):
        items = [{"role": "user", "content": "first"},
                 {"type": "function_call", "call_id": "x", "name": "look",
                  "arguments": json.dumps({"at": "b " * 600})},
                 {"type": "function_call_output", "call_id": "x", "output": "a fox"},
                 {"role": "user", "content": "last"}]
        client.responses.create(model=NAME, input=items, truncation="auto")
        assert prompt(engine).startswith("user: last")


# **** responses that are kept ****

def test_a_response_is_kept_until_it_is_deleted():
    with serving() as (client, _, _):
        done = client.responses.create(model=NAME, input="one")
        assert client.responses.retrieve(done.id) == done
        [item] = client.responses.input_items.list(done.id).data
        assert item.content[0].text == "one"
        client.responses.delete(done.id)
        for again in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="there is no response"): again(done.id)
        unkept = client.responses.create(model=NAME, input="one", store=False)
        with pytest.raises(openai.NotFoundError): client.responses.retrieve(unkept.id)
        with pytest.raises(openai.NotFoundError, match="send the conversation's items"):
            client.responses.create(model=NAME, input="two", previous_response_id=unkept.id)


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch):
    store = ResponseStore()
    monkeypatch.setattr(response_store, "MOST", 3)
    for at in range(5): store.put(Stored({"id": f"r{at}"}, [], []))
    assert list(store.kept) == ["r2", "r3", "r4"]
    store.put(Stored({"id": "r3", "text": "a" * 100}, [], []))
    assert list(store.kept) == ["r2", "r4", "r3"]
    assert store.bytes == sum(each.size for each in store.kept.values())
    monkeypatch.setattr(response_store, "MOST_BYTES", 150)
    store.put(Stored({"id": "r5", "text": "a" * 100}, [], []))
    assert list(store.kept) == ["r5"]


def test_a_response_in_the_background():
    with serving("slow", pause_s=0.02) as (client, engine, server):
        begun = client.responses.create(model=NAME, input="x", background=True)
        assert (begun.status, begun.output) == ("queued", [])
        with pytest.raises(openai.BadRequestError, match="in_progress, expected a complete one"):
            client.responses.create(model=NAME, input="y", previous_response_id=begun.id)
        until(lambda: client.responses.retrieve(begun.id).status == "completed")
        assert client.responses.retrieve(begun.id).output_text == "slow"
        assert client.responses.cancel(begun.id).status == "completed"
        engine.pause_s = 5
        begun = client.responses.create(model=NAME, input="x", background=True)
        until(lambda: bool(engine.running))
        assert client.responses.cancel(begun.id).status == "cancelled"
        until(lambda: not engine.running and server.service.active == 0)
        client.responses.delete(client.responses.create(model=NAME, input="x", background=True).id)
        until(lambda: not engine.running and server.service.active == 0)
        engine.pause_s = 0
        whole = client.responses.create(model=NAME, input="x")
        with pytest.raises(openai.BadRequestError, match="does not run in the background"):
            client.responses.cancel(whole.id)


def test_an_engine_that_fails_is_an_event():
    with serving("slow", fails_after=2) as (client, _, _):
        with client.responses.stream(model=NAME, input="x") as stream: events = list(stream)
        assert events[-1].type == "response.failed"
        assert (events[-1].response.error.code,
                "NaN" in events[-1].response.error.message) == ("server_error", True)
        with pytest.raises(openai.InternalServerError, match="NaN"):
            client.responses.create(model=NAME, input="x")
        begun = client.responses.create(model=NAME, input="x", background=True)
        until(lambda: client.responses.retrieve(begun.id).status == "failed")
    with serving(failure=NVError("gone", "it", "restart")) as (client, engine, _):
        engine.limit = 0
        with pytest.raises(openai.RateLimitError): client.responses.create(model=NAME, input="x", stream=True)


# **** refusals ****

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "input is missing"), ({"input": []}, "input", "empty"),
    ({"input": 3}, "input", "a whole"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "expected message, function_call"),
    ({"input": [{"role": "king", "content": "a"}]}, "input[0].role", "expected one of user"),
    ({"input": [{"content": "a"}]}, "input[0].role", "role is missing"),
    ({"input": [{"role": "user"}]}, "input[0].content", "content is missing"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]",
     "reads nothing else"),
    ({"input": [{"role": "user", "content": "a", "colour": 1}]}, "input[0].colour", "unknown field"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", "is missing"),
    ({"input": [{"type": "reasoning", "content": [{"text": 3}]}]}, "input[0]", "no texts"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools of its own"),
    ({"tools": [{**LOOK, "colour": 1}]}, "tools[0].colour", "unknown field"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "expected one of text"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
    ({"text": {"format": {}}}, "text.format.type", "is missing"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "expected one of none"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "the reasoning itself is"),
    ({"include": ["file_search_call.results"]}, "include", "expected message.output_text.logprobs"),
    ({"background": True, "store": False}, "background", "stored"),
    ({"truncation": "most"}, "truncation", "auto, disabled"),
    ({"conversation": "c"}, "conversation", "not served"),
    ({"max_tool_calls": 3}, "max_tool_calls", "not served"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_tokens": 3}, "max_tokens", "unknown field"),
    ({"temperature": -1}, "temperature", "0 to 2"),
    ({"service_tier": "flex"}, "service_tier", 'say "auto" or'),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "there is no response"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(FakeEngine(FakeModel(TEMPLATE)), strict=True)) as running: yield running


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[str(each[0])[:40] for each in REFUSED])
def test_what_is_refused(server: Live, fields: dict[str, Any], param: str, words: str):
    answer = server.post({"input": "a", **fields}, "/v1/responses")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if "previous_response_id" in fields else 400, param)
    assert words in error["message"]
