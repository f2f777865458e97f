"""Conversations over HTTP, by the openai client: reasoning, tool calls, and the fields of a turn."""
from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.lazy import lazy
from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, fake_service, live
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import TokenizerError
from tinygrad_nv.server.service import Parsers

openai = lazy("openai")

QWEN = ("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.reasoning_content }}\n{% endfor %}{% if "
        "tools %}"
        "<tool_call>{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}")
EFFORT = "{{ messages[0].content }} Reasoning: {{ reasoning_effort }}, {{ verbosity }}.<|channel|>"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}}}}
SAID = ("<think>\nso it is</think>see "
        '<tool_call>{"name": "look", "arguments": {"at": "a fox"}}</tool_call>')
USER = [{"role": "user", "content": "how?"}]


@contextlib.contextmanager
def serving(said: str | Sequence[str], template: str = QWEN, **more: Any) -> Iterator[tuple[Any, FakeEngine]]:
    """A client, and the engine it talks to, which says `said`, a character a token."""
    engine = FakeEngine(FakeModel(template), pieces=tuple(said))
    with (live(fake_service(engine, **more)) as server,
          openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0,
                        http_client=openai.DefaultHttpxClient(verify=False)) as client):
        yield client, engine


def prompt(engine: FakeEngine) -> str:
    """The prompt of the last request."""
    return engine.model.tokenizer.decode(engine.asked[-1][0].ids or [], skip_special_tokens=False)


def test_reasoning_and_calls_are_told_apart():
    with serving(SAID) as (client, _):
        asked: dict[str, Any] = {"model": NAME, "messages": USER, "tools": [LOOK]}
        done = client.chat.completions.create(**asked)
        [choice] = done.choices
        message = choice.message
        assert (message.reasoning, message.reasoning_content) == ("\nso it is", "\nso it is")
        assert message.content == "see "
        assert [(c.function.name, c.function.arguments)
                for c in message.tool_calls] == [("look", '{"at": "a fox"}')]
        assert choice.finish_reason == "tool_calls"
        count = done.usage.completion_tokens_details.reasoning_tokens
        assert count == len("<think>so it is</think>") + 1 - len("<think")
        chunks = list(client.chat.completions.create(**asked, stream=True,
                                                     stream_options={"include_usage": True}))
        deltas = [c.choices[0].delta for c in chunks if c.choices]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(getattr(d, name, "") for d in deltas) == "\nso it is"
        assert "".join(d.content or "" for d in deltas) == "see "
        calls = [call for d in deltas for call in d.tool_calls or []]
        assert [c.function.name for c in calls] == ["look"] + [None] * (len(calls) - 1)
        assert [bool(c.id) for c in calls] == [True] + [False] * (len(calls) - 1)
        assert "".join(c.function.arguments for c in calls) == '{"at": "a fox"}'
        assert len(calls) > 10
        assert chunks[-1].usage.to_dict() == {  # vLLM leaves null out of a stream
            name: each for name, each in done.usage.to_dict().items() if each is not None}
        hidden = client.chat.completions.create(**asked, extra_body={"include_reasoning": False})
        assert hidden.choices[0].message.reasoning is None
        assert hidden.usage == done.usage


def test_parsers_may_be_named_or_left_out():
    with serving(SAID, parsers=Parsers("none", "none")) as (client, _):
        done = client.chat.completions.create(model=NAME, messages=USER, tools=[LOOK]).choices[0]
        assert (done.message.content, done.finish_reason) == (SAID, "stop")
    with serving("hm</think>[look(at='x')]", parsers=Parsers("deepseek_r1", "pythonic")) as (client, _):
        done = client.chat.completions.create(model=NAME, messages=USER, tools=[LOOK]).choices[0].message
        assert (done.reasoning, done.tool_calls[0].function.arguments) == ("hm", '{"at": "x"}')


def test_the_template_for_tools_says_how_calls_are_written():
    """A model with a default and a tool_use template; contents of parts are what the default reads."""
    parts = "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }};{% endfor %}{%endfor%}"
    call = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
    with serving(call, parts) as (client, engine):
        engine.model.tokenizer = replace(engine.model.tokenizer, named={"tool_use": QWEN})
        done = client.chat.completions.create(model=NAME, messages=USER, tools=[LOOK]).choices[0]
        assert done.message.tool_calls[0].function.arguments == '{"at": "x"}'
        assert prompt(engine).startswith("user: how?\n<tool_call>[{")
        told = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]}, *USER]
        done = client.chat.completions.create(model=NAME, messages=told).choices[0]
        assert not done.message.tool_calls
        assert prompt(engine) == "user: a;b;user: how?;"


def test_the_template_of_the_command_line(tmp_path: Path):
    """A file, a template, or the name of one of the model's."""
    tokenizer = replace(FakeModel(QWEN).tokenizer, named={"rag": "{{ documents }}"})
    (tmp_path / "own.jinja").write_text("own")
    for given, wanted in (("rag", "{{ documents }}"), ("default", QWEN), ("{{ messages }}", "{{ messages }}"),
                          (str(tmp_path / "own.jinja"), "own")):
        assert tokenizer.with_template(given).template == wanted
    with pytest.raises(TokenizerError, match="--chat-template tool_use cannot be read") as error:
        tokenizer.with_template("tool_use")
    assert "default, rag" in error.value.expected


def test_without_automatic_tool_choice_a_choice_is_needed():
    with serving('{"at": "a"}', parsers=Parsers(auto_tool_choice=False)) as (client, _):
        with pytest.raises(openai.BadRequestError, match="expected: 'none', 'required'"):
            client.chat.completions.create(model=NAME, messages=USER, tools=[LOOK])
        named = {"type": "function", "function": {"name": "look"}}
        done = client.chat.completions.create(model=NAME, messages=USER, tools=[LOOK], tool_choice=named)
        assert done.choices[0].message.tool_calls[0].function.arguments == '{"at": "a"}'


@pytest.mark.parametrize("several", [True, False])
def test_forced_calls_are_calls(several: bool):
    said = '[{"name": "look", "parameters": {"at": "a"}}, {"name": "look", "parameters": {}}]'
    with serving(said) as (client, engine):
        asked = {"model": NAME, "messages": USER, "tools": [LOOK], "tool_choice": "required",
                 "parallel_tool_calls": several}
        done = client.chat.completions.create(**asked).choices[0]
        assert [c.function.arguments for c in done.message.tool_calls] == ['{"at": "a"}', "{}"][:1 + several]
        assert (done.finish_reason, done.message.content) == ("tool_calls", "")
        assert engine.asked[-1][1].structured_outputs.json["maxItems"] == (16 if several else 1)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        assert "".join(c.function.arguments for c in calls if c.index == 0) == '{"at": "a"}'
        assert {c.index for c in calls} == {0, 1} if several else {0}


def test_functions_are_older_tools():
    with serving('<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>') as (client, engine):
        messages = [*USER, {"role": "assistant", "content": None,
                            "function_call": {"name": "look", "arguments": "{}"}},
                    {"role": "function", "name": "look", "content": "a fox"}]
        asked = {"model": NAME, "messages": messages, "functions": [LOOK["function"]]}
        done = client.chat.completions.create(**asked).choices[0]
        assert (done.finish_reason, done.message.tool_calls) == ("function_call", None)
        assert (done.message.function_call.name, done.message.function_call.arguments) == ("look",
                                                                                           '{"at": "x"}')
        assert "tool: a fox" in prompt(engine)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        parts = [c.choices[0].delta.function_call for c in chunks if c.choices[0].delta.function_call]
        assert "".join(part.arguments for part in parts) == '{"at": "x"}'
        assert chunks[-1].choices[0].finish_reason == "function_call"
        forced = client.chat.completions.create(**asked, function_call={"name": "look"}).choices[0].message
        assert forced.function_call.name == "look"
        assert engine.asked[-1][1].structured_outputs is not None
        plain = client.chat.completions.create(**asked, function_call="none").choices[0].message
        assert plain.content.startswith("<tool_call>")


def test_constrained_answers_have_no_reasoning():
    with serving('{"a": 1}', parsers=Parsers("deepseek_r1")) as (client, _):
        done = client.chat.completions.create(model=NAME, messages=USER,
                                              response_format={"type": "json_object"})
        assert done.choices[0].message.content == '{"a": 1}'


# **** the prompt ****

def test_effort_and_verbosity_are_variables_of_the_template():
    with serving("ok", EFFORT) as (client, engine):
        client.chat.completions.create(model=NAME, messages=USER, reasoning_effort="high", verbosity="low")
        assert "Reasoning: high, low." in prompt(engine)
        client.chat.completions.create(model=NAME, messages=USER, reasoning_effort="high",
                                       extra_body={"chat_template_kwargs": {"reasoning_effort": "odd"}})
        assert "Reasoning: odd" in prompt(engine)
    with serving("ok") as (client, engine):
        client.chat.completions.create(model=NAME, messages=USER, reasoning_effort="none", verbosity="medium")
        assert prompt(engine).endswith("<think></think>")
        client.chat.completions.create(model=NAME, messages=USER, reasoning_effort="low")
        assert prompt(engine).endswith("assistant:")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("template", "efforts"), [
    ("{{ messages }}", []), ("{% if enable_thinking %}", ["none", "medium"]),
    ("{{ reasoning_effort }}", ["minimal", "low", "medium", "high", "xhigh", "max"]),
    ("{{ reasoning_effort }}{% if enable_thinking %}",
     ["none", "minimal", "low", "medium", "high", "xhigh", "max"])])
def test_efforts_that_a_template_knows_are_listed_with_the_model(template: str, efforts: list[str]):
    with live(fake_service(FakeEngine(FakeModel(template)))) as server:
        assert server.http.get("/v1/models").json()["data"][0]["reasoning_efforts"] == efforts


def test_a_message_goes_on():
    with serving(" more</think>yes") as (client, engine):
        messages = [*USER, {"role": "assistant", "content": "<think>so"}]
        asked: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
        done = client.chat.completions.create(model=NAME, messages=messages,
                                              extra_body=asked).choices[0].message
        assert prompt(engine).endswith("assistant: <think>so")
        assert (done.reasoning, done.content) == (" more", "yes")
        client.chat.completions.create(model=NAME, messages=USER, extra_body={"add_generation_prompt": False})
        assert prompt(engine).rstrip().endswith("how?")


def test_reasoning_of_an_earlier_turn_reaches_the_template():
    with serving("ok") as (client, engine):
        messages = [*USER, {"role": "assistant", "content": "yes", "reasoning": "hm"}, *USER]
        client.chat.completions.create(model=NAME, messages=messages)
        assert "assistant: yeshm" in prompt(engine)


def test_a_template_of_a_request_runs_where_it_is_trusted():
    asked = {"chat_template": "Mine: {{ messages[0].content }}"}
    with serving("ok", parsers=Parsers(trust_request_template=True)) as (client, engine):
        client.chat.completions.create(model=NAME, messages=USER, extra_body=asked)
        assert prompt(engine) == "Mine: how?"
    with serving("ok") as (client, _), pytest.raises(openai.BadRequestError,
                                                     match="--trust-request-chat-template"):
        client.chat.completions.create(model=NAME, messages=USER, extra_body=asked)


# **** other fields ****

def test_fields_reach_the_engine():
    with serving("ok") as (client, engine):
        extra = {"cache_salt": "mine", "skip_special_tokens": False, "stop_token_ids": [7], "priority": 3,
                 "bad_words": ["fox"], "allowed_token_ids": [5, 6], "return_token_ids": True}
        asked: dict[str, Any] = {"model": NAME, "messages": USER, "extra_body": extra, "n": 2,
                                 "service_tier": "auto",
                                 "store": False, "user": "u", "safety_identifier": "s",
                                 "metadata": {"a": "b"},
                                 "prediction": {"type": "content", "content": "ok"}}
        done = client.chat.completions.create(**asked)
        given, params = engine.asked[-1]
        assert (given.salt, params.skip_special_tokens, params.stop_token_ids) == ("mine", False, [7])
        assert (params.bad_words, params.allowed_token_ids, params.n) == (["fox"], [5, 6], 2)
        assert done.prompt_token_ids == given.ids
        assert [choice.token_ids for choice in done.choices] == [[0, 1]] * 2
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert [c.prompt_token_ids for c in chunks if hasattr(c, "prompt_token_ids")] == [given.ids] * 2
        assert [i for c in chunks for p in c.choices if p.index == 1
                for i in getattr(p, "token_ids", [])] == [0, 1]
        client.completions.create(model=NAME, prompt="a",
                                  extra_body={"cache_salt": "x", "skip_special_tokens": False})
        assert (engine.asked[-1][0].salt, engine.asked[-1][1].skip_special_tokens) == ("x", False)


def test_markers_that_are_special_tokens_are_in_the_text():
    with serving('[TOOL_CALLS]look[ARGS]{"at": "x"}',
                 "{{ messages[0].content }}{# [TOOL_CALLS] #}") as (client, engine):
        loaded = Tokenizer.load(DEFAULT_MODEL)
        loaded.backend.add_special_tokens(["[TOOL_CALLS]"])
        engine.model.tokenizer = replace(loaded, template=engine.model.tokenizer.template)
        done = client.chat.completions.create(model=NAME, messages=USER, tools=[LOOK])
        assert not engine.asked[-1][1].skip_special_tokens
        [call] = done.choices[0].message.tool_calls
        assert (call.function.arguments, len(call.id), call.id.isalnum()) == ('{"at": "x"}', 9, True)
        client.chat.completions.create(model=NAME, messages=USER)
        assert engine.asked[-1][1].skip_special_tokens


def test_arguments_are_json_wherever_deltas_are_cut():
    for size in (1, 7, 500):
        pieces = [SAID[at:at + size] for at in range(0, len(SAID), size)]
        with serving(pieces) as (client, _):
            chunks = client.chat.completions.create(model=NAME, messages=USER, tools=[LOOK], stream=True)
            calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
            assert json.loads("".join(c.function.arguments for c in calls)) == {"at": "a fox"}
