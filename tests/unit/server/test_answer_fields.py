"""Fields of answers as vLLM with --reasoning-parser qwen3 and --tool-call-parser hermes has them, where
they depend on a model's text. tests/models/test_vllm_server.py compares all fields."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.serve_case import FakeEngine, FakeModel, Live, fake_service, live
from tinygrad_nv.server.service import Parsers

PLAIN = ("The", " ca", "pi", "tal", ".")
SAID = {"reasoning": ("<think>", "a", "b", "c", "d"), "call": ('{"', "at", '": "', "a", '"}')}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def engine() -> FakeEngine: return FakeEngine(FakeModel(TEMPLATE))


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[Live]:
    with live(fake_service(engine, parsers=Parsers("qwen3", "hermes"))) as served: yield served


def events(text: str) -> list[Any]:
    """Returns the events of a stream; `[DONE]` is a text."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


OFF: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(("more", "reasons"), [
    ({}, True), (OFF, False), ({"reasoning_effort": "none"}, False), ({"reasoning_effort": "low"}, True),
    (OFF | {"reasoning_effort": "low"}, False)])
def test_an_answer_that_ends_no_reasoning_is_reasoning_unless_that_is_off(
        server: Live, engine: FakeEngine, more: dict[str, Any], reasons: bool):
    """The parser is that of vLLM with this name. The end token is no reasoning."""
    engine.pieces = ("a", "b", "")
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **more}
    made = server.post(asked, "/v1/chat/completions").json()
    message = made["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (("ab", None) if reasons else (None, "ab"))
    assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] == (2 if reasons else 0)


LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(("choice", "pieces"), [
    (NAMED, ('{"', "at", '": "', "a", '"}')),
    ("required", ('[{"name"', ': "look", "parameters": {"at', '": "', "a", '"}}, {"name"', ': "look"',
                  "}]"))])
def test_calls_that_are_cut_are_text(server: Live, engine: FakeEngine, choice: Any, pieces: tuple[str, ...]):
    """A client never gets arguments that are no JSON, except in a stream, as in vLLM."""
    engine.pieces, most = pieces, len(pieces) - 1
    turn = {"role": "user", "content": "hi"}
    asked = {"messages": [turn], "tools": [{"type": "function", "function": LOOK}], "tool_choice": choice}
    [made] = server.post({**asked, "max_tokens": most}, "/v1/chat/completions").json()["choices"]
    assert (made["finish_reason"], made["message"]["content"]) == ("length", "".join(pieces[:-1]))
    assert "tool_calls" not in made["message"]
    [made] = server.post(asked, "/v1/chat/completions").json()["choices"]
    assert made["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    assert json.loads(made["message"]["tool_calls"][0]["function"]["arguments"]) == {"at": "a"}
    streamed = events(server.post({**asked, "max_tokens": most, "stream": True}, "/v1/chat/completions").text)
    assert "tool_calls" in streamed[-3]["choices"][0]["delta"], "what was told stays told"
    asked = {"input": "hi", "tools": [{"type": "function", **LOOK}], "max_output_tokens": most,
             "tool_choice": choice if choice == "required" else {"type": "function", "name": "look"}}
    [item] = server.post(asked, "/v1/responses").json()["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "".join(pieces[:-1]))


def test_what_is_hidden_is_not_told_by_logprobs_or_ids(server: Live, engine: FakeEngine):
    engine.pieces = SAID["reasoning"]
    asked = {"messages": [{"role": "user", "content": "hi"}], "include_reasoning": False, "logprobs": True,
             "return_token_ids": True, "max_tokens": 4}
    [made] = server.post(asked, "/v1/chat/completions").json()["choices"]
    assert (made["logprobs"], made["token_ids"], made["message"]["reasoning"]) == (None, None, None)
    for chunk in events(server.post({**asked, "stream": True}, "/v1/chat/completions").text)[1:-1]:
        assert (chunk["choices"][0]["logprobs"], chunk["choices"][0]["token_ids"]) == (None, None)


def test_tokens_of_the_prefix_cache_are_told_where_the_server_says_so():
    """vLLM's --enable-prompt-tokens-details."""
    with live(fake_service(FakeEngine(FakeModel(TEMPLATE), cached=3), prompt_details=True)) as served:
        used = served.post({"prompt": "Once upon a time there", "max_tokens": 2}).json()["usage"]
        assert used["prompt_tokens_details"] == {"cached_tokens": 3}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(served.post({"prompt": "Once upon a time there", "max_tokens": 2, **stream}).text)
    assert chunks[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("asked", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_a_server_may_give_requests_usage_and_ids(asked: dict[str, Any]):
    """vLLM's --enable-force-include-usage and --return-tokens-as-token-ids."""
    path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
    asked = {**asked, "max_tokens": 2, "logprobs": 1 if "prompt" in asked else True}
    with live(fake_service(FakeEngine(FakeModel(TEMPLATE)), force_usage=True, ids_for_texts=True)) as served:
        for options in ({}, {"stream_options": {"include_usage": False}}):
            chunks = events(served.post({**asked, **options, "stream": True}, path).text)[:-1]
            assert all(chunk["usage"]["total_tokens"] for chunk in chunks)
        for given in ({}, {"return_tokens_as_token_ids": None}):
            assert "token_id:" in json.dumps(served.post({**asked, **given}, path).json()["choices"])
        made = served.post({**asked, "return_tokens_as_token_ids": False}, path).json()
        assert "token_id:" not in json.dumps(made["choices"])


@pytest.mark.parametrize(("path", "prefix"), [
    ("/v1/completions", "cmpl-"), ("/v1/chat/completions", "chatcmpl-")])
def test_an_answer_has_the_name_that_the_client_gives_it(server: Live, path: str, prefix: str):
    """The id ends with the request's `request_id`, as vLLM's."""
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    asked |= {"max_tokens": 1, "request_id": "mine"}
    assert server.post(asked, path).json()["id"] == prefix + "mine"


def test_the_prompt_and_whose_message_it_goes_on_with_are_told(server: Live, engine: FakeEngine):
    """The role is that of the last message without add_generation_prompt, as vLLM recorded it."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "return_prompt_text": True}
    made = server.post(asked, "/v1/chat/completions").json()
    assert (made["prompt_text"], made["choices"][0]["message"]["role"]) == ("user: hi\n", "assistant")
    asked |= {"add_generation_prompt": False}
    assert server.post(asked, "/v1/chat/completions").json()["choices"][0]["message"]["role"] == "user"
    [first, *_] = events(server.post({**asked, "stream": True}, "/v1/chat/completions").text)
    assert (first["prompt_text"], first["choices"][0]["delta"]["role"]) == ("user: hi\n", "user")


def test_log_probabilities_of_a_response_are_of_all_its_tokens(server: Live, engine: FakeEngine):
    """An end token, which has no text, has one, too: vLLM told an eighth of a sentence of seven tokens."""
    engine.pieces = ("a", "b", "")
    asked = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1, **OFF}
    [item] = server.post(asked, "/v1/responses").json()["output"]
    assert [each["token"] for each in item["content"][0]["logprobs"]] == ["a", "b", ""]
    streamed = events(server.post({**asked, "stream": True}, "/v1/responses").text)
    deltas = [each["logprobs"] for each in streamed if each["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in some] for some in deltas] == [["a"], ["b"]]
    assert [streamed[3]["part"]["logprobs"]] == [[]], "nothing is added to an event that was made"


def test_an_echo_of_ids_names_special_tokens(server: Live, engine: FakeEngine):
    """A client has put them there, and vLLM names them, too. Texts are echoed as they are."""
    [made] = server.post({"prompt": [0, 0, 5], "echo": True, "max_tokens": 1}).json()["choices"]
    tokenizer = engine.model.tokenizer
    assert made["text"].startswith(tokenizer.decode([0, 0, 5], skip_special_tokens=False))
    assert made["text"].startswith("<|bos|><|bos|>")
    [made] = server.post({"prompt": "Once upon", "echo": True, "max_tokens": 1}).json()["choices"]
    assert made["text"].startswith("Once upon")


def test_an_echo_with_token_ids_has_the_prompt_as_ids_alone(server: Live, engine: FakeEngine):
    """The text is the answer alone: vLLM's was " Paris. …", without "The capital of France is"."""
    engine.pieces = PLAIN
    asked = {"prompt": "Once upon", "echo": True, "max_tokens": 4}
    [made] = server.post(asked).json()["choices"]
    assert (made["text"], made["prompt_token_ids"]) == ("Once upon" + "".join(PLAIN[:4]), None)
    [told] = server.post({**asked, "return_token_ids": True}).json()["choices"]
    assert (told["text"], told["token_ids"]) == ("".join(PLAIN[:4]), [0, 1, 2, 3])
    assert engine.model.tokenizer.decode(told["prompt_token_ids"]) == "Once upon"
