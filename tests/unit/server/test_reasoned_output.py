"""Structured output, forced calls and budgets beside reasoning, over HTTP: what the engine is asked for, and
what it says, with a fake engine; and with the model in the box, to which markers were added."""
from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tokenizers

from tests.support.lazy import lazy
from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, fake_service, live, llm_service
from tinygrad_nv import LLM
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.structured_output.params import ReasoningTokens
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.server.service import Parsers

openai = lazy("openai")

THINK, HARMONY = ("<think>", "</think>"), ("<|channel|>", "final", "<|message|>", "<|end|>", "<|start|>")
TEMPLATE = ("{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
            "{% if opened is defined %}<think>{% endif %}")
USER: Any = [{"role": "user", "content": "A fox?"}]
SCHEMA = {"type": "object", "properties": {"at": {"enum": ["wood", "river"]}}, "required": ["at"],
          "additionalProperties": False}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
SAID = '{"at":"wood"}'


def with_tokens(marks: Sequence[str], template: str = TEMPLATE) -> Tokenizer:
    """The tokenizer of the model in the box, with more tokens, in ids that the model has."""
    loaded = Tokenizer.load(DEFAULT_MODEL)
    backend = tokenizers.Tokenizer.from_str(loaded.backend.to_str())
    backend.add_special_tokens([*marks])
    return Tokenizer(backend, loaded.special, template)


@contextlib.contextmanager
def serving(pieces: Sequence[str], marks: Sequence[str] = THINK, reasoning: str = "think"
            ) -> Iterator[tuple[openai.OpenAI, FakeEngine, dict[str, int]]]:
    """A client, the engine, and the ids of the markers."""
    engine = FakeEngine(FakeModel(), pieces=tuple(pieces))
    engine.model.tokenizer = with_tokens(marks)
    ids = {each: engine.model.tokenizer.encode(each, special=False)[-1] for each in marks}
    with (live(fake_service(engine, parsers=Parsers(reasoning))) as server,
          openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client):
        yield client, engine, ids


def asked(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=USER, **more)


def test_a_schema_is_of_what_comes_after_the_reasoning():
    with serving(["<think>", "so ", "it is", "</think>", *SAID]) as (client, engine, ids):
        start, end = ids["<think>"], ids["</think>"]
        message = asked(client, response_format=FORM).choices[0].message
        assert (message.reasoning, message.content) == ("so it is", SAID)
        params = engine.asked[-1][1]
        assert params.structured_outputs.json == SCHEMA
        assert params.reasoning == ReasoningTokens(start, (end,), False)
        assert not params.skip_special_tokens
        chunks = list(asked(client, response_format=FORM, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(getattr(each, "reasoning", "") for each in deltas) == "so it is"
        assert "".join(each.content or "" for each in deltas) == SAID
        # the prompt has begun the reasoning, or ended it
        asked(client, response_format=FORM, extra_body={"chat_template_kwargs": {"opened": True}})
        assert engine.asked[-1][1].reasoning == ReasoningTokens(None, (end,), True)
        engine.pieces = tuple(SAID)
        message = asked(client, response_format=FORM, reasoning_effort="none").choices[0].message
        assert (message.content, message.reasoning) == (SAID, None)
        assert engine.asked[-1][1].reasoning is None
        # without a constraint nothing is bounded
        asked(client)
        assert engine.asked[-1][1].reasoning is None


@pytest.mark.parametrize(("choice", "text"), [
    ({"type": "function", "function": {"name": "look"}}, SAID),
    ("required", f'[{{"name": "look", "parameters": {SAID}}}]')])
def test_a_forced_call_comes_after_the_reasoning(choice: Any, text: str):
    with serving(["<think>", "hm", "</think>", *text]) as (client, engine, _):
        done = asked(client, tools=[LOOK], tool_choice=choice).choices[0]
        assert (done.message.reasoning, done.message.content) == ("hm", "")
        assert done.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert [call.function.arguments for call in done.message.tool_calls] == [SAID]
        assert engine.asked[-1][1].reasoning is not None
        chunks = [chunk.choices[0].delta
                  for chunk in asked(client, tools=[LOOK], tool_choice=choice, stream=True)]
        calls = [call for each in chunks for call in each.tool_calls or []]
        assert "".join(call.function.arguments for call in calls) == SAID
        assert "".join(getattr(each, "reasoning", "") for each in chunks) == "hm"


def test_channels():
    pieces = ["<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>", "assistant",
              "<|channel|>", "final", "<|message|>", *SAID]
    with serving(pieces, HARMONY, "openai_gptoss") as (client, engine, ids):
        message = asked(client, response_format=FORM).choices[0].message
        assert (message.reasoning, message.content) == ("hm", SAID)
        end = tuple(ids[each] for each in ("<|channel|>", "final", "<|message|>"))
        assert engine.asked[-1][1].reasoning == ReasoningTokens(None, end, True)
        # with tools an answer may be a call, in a channel of its own, and end so
        asked(client, response_format=FORM, tools=[LOOK])
        assert engine.asked[-1][1].reasoning == ReasoningTokens(None, end, True, may_end=True)


def test_markers_that_are_no_tokens():
    """The constraint holds from the first token on."""
    with serving(SAID, ()) as (client, engine, _):
        message = asked(client, response_format=FORM).choices[0].message
        assert (message.content, message.reasoning) == (SAID, None)
        assert engine.asked[-1][1].reasoning is None


def test_the_other_endpoints():
    with serving(["<think>", "so", "</think>", *SAID]) as (client, engine, _):
        made = client.responses.create(model=NAME, input="A fox?", text={
            "format": {"type": "json_schema", "name": "place", "schema": SCHEMA}})
        assert made.output_text == SAID
        assert engine.asked[-1][1].reasoning is not None
        body = {"model": NAME, "messages": USER, "max_tokens": 2000,
                "thinking": {"type": "enabled", "budget_tokens": 1024}}
        client.post("/messages", body=body, cast_to=object)
        assert engine.asked[-1][1].reasoning.budget == 1024


def test_a_budget_is_asked_for():
    with serving(["<think>", "so", "</think>", "yes"]) as (client, engine, ids):
        asked(client, extra_body={"thinking_token_budget": 7})
        assert engine.asked[-1][1].reasoning == ReasoningTokens(ids["<think>"], (ids["</think>"],), False,
                                                                budget=7)


def test_a_budget_that_cannot_hold():
    with serving(["yes"], (), "qwen3") as (client, engine, _):
        answer = client.with_raw_response.chat.completions.create(
            model=NAME, messages=USER, extra_body={"thinking_token_budget": 7})
        assert answer.headers["x-ignored-fields"] == "thinking_token_budget"
        assert engine.asked[-1][1].reasoning is None
    strict = fake_service(FakeEngine(FakeModel(TEMPLATE)), parsers=Parsers("qwen3"), strict=True)
    with live(strict) as server:
        answer = server.post({"messages": USER, "thinking_token_budget": 7}, "/v1/chat/completions")
    error = answer.json()["error"]
    assert "'</think>', which ends the reasoning, is no token of the vocabulary; to fix" in error["message"]
    assert (answer.status_code, error["param"]) == (400, "thinking_token_budget")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"speculative": "ngram:3"}])
def test_the_model_in_the_box_thinks_and_then_follows_the_schema(options: dict[str, Any]):
    """The model has never seen the markers: a budget ends its reasoning, greedy or not."""
    with LLM(DEFAULT_MODEL, device="CPU", max_model_len=160, max_num_seqs=4, max_num_batched_tokens=32,
             **options) as llm:
        llm.tokenizer = with_tokens(THINK)
        with (live(llm_service(llm, parsers=Parsers("deepseek_r1"))) as server,
              openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client):
            for temperature in (0, 1):
                done = client.chat.completions.create(
                    model=NAME, messages=USER, temperature=temperature, seed=1, max_tokens=60,
                    response_format=FORM, extra_body={"thinking_token_budget": 9})
                message = done.choices[0].message
                assert json.loads(message.content or "")["at"] in ("wood", "river")
                assert message.reasoning.strip()
                assert done.usage.completion_tokens_details.reasoning_tokens == 10      # with its end
                assert done.choices[0].finish_reason == "stop"
