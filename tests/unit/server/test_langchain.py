"""LangChain's ChatOpenAI against the server, over an engine that says what a test wants."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live

# hermes' calls, and the results of tools: the engine's prompt shows what came of both
TEMPLATE = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
            "{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}")


class Animal(BaseModel):
    """An animal of a story."""
    name: str
    age: int


@tool
def weather(place: str, days: int = 1) -> str:
    """The weather of a place."""
    return f"rain in {place}"


@pytest.fixture(scope="module")
def engine() -> FakeEngine: return FakeEngine(FakeModel(TEMPLATE))


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[Live]:
    with live(fake_service(engine)) as running: yield running


@pytest.fixture
def chat(server: Live, engine: FakeEngine) -> ChatOpenAI:
    engine.text, engine.pieces = "Once upon a time", ()
    return connected(server)


def connected(server: Live, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=NAME, base_url=server.url + "/v1", api_key="any", max_retries=0, **more)


def said(engine: FakeEngine) -> str:
    """The prompt of the last request."""
    return engine.model.tokenizer.decode(engine.asked[-1][0].ids)


def test_invoke(chat: ChatOpenAI, engine: FakeEngine):
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage("A story")])
    assert answer.content == "Once upon a time"
    assert answer.response_metadata["finish_reason"] == "stop"
    used, count = answer.usage_metadata, len(engine.asked[-1][0].ids or ())
    assert (used["input_tokens"], used["output_tokens"], used["total_tokens"]) == (count, 4, count + 4)


def test_options_arrive(server: Live, engine: FakeEngine):
    connected(server, temperature=0.3, top_p=0.5, seed=7, max_tokens=3, stop=["zz"], n=2, logprobs=True,
              top_logprobs=1, frequency_penalty=0.1, presence_penalty=0.2,
              extra_body={"top_k": 4, "min_p": 0.1}).invoke("A story")
    params = engine.asked[-1][1]
    assert (params.temperature, params.top_p, params.seed, params.max_tokens, params.stop, params.n) == (
        0.3, 0.5, 7, 3, ["zz"], 2)
    assert (params.top_k, params.min_p, params.logprobs) == (4, 0.1, 1)
    assert (params.frequency_penalty, params.presence_penalty) == (0.1, 0.2)


def test_stream(chat: ChatOpenAI, server: Live):
    chunks = list(chat.stream("A story"))
    assert "".join(str(chunk.content) for chunk in chunks) == "Once upon a time"
    assert sum(1 for chunk in chunks if chunk.content) == 4
    whole = chunks[0]
    for chunk in chunks[1:]: whole += chunk
    assert whole.response_metadata["finish_reason"] == "stop"
    usages = [chunk.usage_metadata for chunk in connected(server, stream_usage=True).stream("A story")]
    assert [used["output_tokens"] for used in usages if used] == [4]


def test_batch(chat: ChatOpenAI, engine: FakeEngine):
    engine.text = None      # the prompt again
    answers = chat.bind(max_tokens=40).batch(["a fox", "a bear", "a bird"])
    assert [each for answer, each in zip(answers, ("fox", "bear", "bird"), strict=True)
            if each not in str(answer.content)] == []


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_and_answered(chat: ChatOpenAI, engine: FakeEngine, streamed: bool):
    call = '<tool_call>{"name": "weather", "arguments": {"place": "wood", "days": 2}}</tool_call>'
    engine.pieces = [call[i:i + 5] for i in range(0, len(call), 5)]
    bound = chat.bind_tools([weather])
    asked: list[Any] = [HumanMessage("how is it?")]
    if streamed:
        first, *rest = bound.stream(asked)
        for chunk in rest: first += chunk
        answer: Any = first
    else: answer = bound.invoke(asked)
    [made] = answer.tool_calls
    assert (made["name"], made["args"]) == ("weather", {"place": "wood", "days": 2})
    assert "The weather of a place." in said(engine)
    engine.pieces = ()
    result = weather.invoke(made)
    assert isinstance(result, ToolMessage)
    done = bound.invoke([*asked, AIMessage("", tool_calls=answer.tool_calls), result])
    assert done.content == "Once upon a time"
    assert "[tool]rain in wood" in said(engine)
    assert "weather{'place': 'wood', 'days': 2}" in said(engine)


@pytest.mark.parametrize(("choice", "text"), [
    ("any", '[{"name": "weather", "parameters": {"place": "wood"}}]'), ("weather", '{"place": "wood"}')])
def test_a_forced_call(chat: ChatOpenAI, engine: FakeEngine, choice: str, text: str):
    engine.text = text
    answer = chat.bind_tools([weather], tool_choice=choice, strict=True).invoke("how is it?")
    assert [(each["name"], each["args"]) for each in answer.tool_calls] == [("weather", {"place": "wood"})]
    assert engine.asked[-1][1].structured_outputs is not None


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(chat: ChatOpenAI, engine: FakeEngine, method: Any):
    engine.text = '{"name": "fox", "age": 3}'
    assert chat.with_structured_output(Animal, method=method).invoke("a fox") == Animal(name="fox", age=3)
    constraint = engine.asked[-1][1].structured_outputs
    assert constraint is not None
    assert constraint.json_object if method == "json_mode" else \
        constraint.json["properties"]["age"]["type"] == "integer"


def test_the_responses_api(server: Live, engine: FakeEngine):
    engine.text, engine.pieces = "Once upon a time", ()
    chat = connected(server, use_responses_api=True)
    assert chat.invoke("A story").text == "Once upon a time"
    assert "".join(chunk.text for chunk in chat.stream("A story")) == "Once upon a time"
    engine.text = '{"name": "fox", "age": 3}'
    assert chat.with_structured_output(Animal).invoke("a fox") == Animal(name="fox", age=3)


def test_tokens_are_counted_by_the_server(server: Live):
    """ChatOpenAI without `custom_get_token_ids` counts tokens of OpenAI's models, whose files it fetches."""
    def tokens(text: str) -> list[int]:
        return server.post({"prompt": text, "add_special_tokens": False}, "/tokenize").json()["tokens"]
    chat = connected(server, custom_get_token_ids=tokens)
    text = "Once upon a time there was a fox"
    assert chat.get_num_tokens(text) == len(FakeModel().tokenizer.encode(text, special=False))
