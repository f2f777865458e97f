"""Answers have vLLM's fields, in vLLM's order, null and left out where they are there.

`vllm_answers.jsonl` has a request and the outline of what vLLM 0.32 answered on each line: recorded from a
server of SmolLM2-135M-Instruct with --reasoning-parser qwen3 and --tool-call-parser hermes.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server.outline import events, in_order, outline
from tests.support.server.serve_case import FakeEngine, FakeModel, Live, fake_service, live
from tinygrad_nv.server.service import Parsers

RECORDED = {line[0]: line[1:] for line in map(json.loads, Path(__file__).with_name(
    "vllm_answers.jsonl").read_text().splitlines())}
# what is here beside vLLM's: OpenAI's and Anthropic's own fields, and an older name
MORE = ("error", "store", "stop_sequence", "reasoning_efforts", "reasoning_content")
# what says that an item is cut
ITEMS = {"incomplete": "completed", "response.incomplete": "response.completed"}
PLAIN = ("The", " ca", "pi", "tal", ".")
SAID = {"reasoning": ("<think>", "a", "b", "c", "d"), "call": ('{"', "at", '": "', "a", '"}')}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def engine() -> FakeEngine: return FakeEngine(FakeModel(TEMPLATE))


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[Live]:
    with live(fake_service(engine, parsers=Parsers("qwen3", "hermes"))) as served: yield served


def same_words(value: Any) -> Any:
    """`value` with vLLM's words for items that are cut."""
    if isinstance(value, dict): return {name: same_words(each) for name, each in value.items()}
    if isinstance(value, list): return [same_words(each) for each in value]
    return ITEMS.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize("name", RECORDED)
def test_fields_are_those_that_vllm_writes(server: Live, engine: FakeEngine, name: str):
    path, asked, recorded = RECORDED[name]
    engine.pieces = next((pieces for word, pieces in SAID.items() if word in name), PLAIN)
    answer = server.http.get(path) if asked is None else server.post(asked, path)
    assert answer.status_code == 200, answer.text
    found = events(answer.text) if asked and asked.get("stream") else answer.json()
    ours, theirs = (in_order(same_words(each), MORE) for each in (outline(found), recorded))
    assert ours == theirs


LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(("choice", "pieces"), [
    (NAMED, ('{"', "at", '": "', "a", '"}')),
    ("required", ('[{"name"', ': "look", "parameters": {"at', '": "', "a", '"}}, {"name"', ': "look"',
                  "}]"))])
def test_calls_that_are_cut_are_text(server: Live, engine: FakeEngine, choice: Any, pieces: tuple[str, ...]):
    """As vLLM has it, a client never gets arguments that are no JSON, except in a stream."""
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


@pytest.mark.parametrize(("path", "prefix"), [
    ("/v1/completions", "cmpl-"), ("/v1/chat/completions", "chatcmpl-")])
def test_an_answer_has_the_name_that_the_client_gives_it(server: Live, path: str, prefix: str):
    """As vLLM's has the request's `request_id`."""
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    asked |= {"max_tokens": 1, "request_id": "mine"}
    assert server.post(asked, path).json()["id"] == prefix + "mine"


def test_the_prompt_and_whose_message_it_goes_on_with_are_told(server: Live, engine: FakeEngine):
    """Recorded: with add_generation_prompt false vLLM's answer has the role of the last message."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "return_prompt_text": True}
    made = server.post(asked, "/v1/chat/completions").json()
    assert (made["prompt_text"], made["choices"][0]["message"]["role"]) == ("user: hi\n", "assistant")
    asked |= {"add_generation_prompt": False}
    assert server.post(asked, "/v1/chat/completions").json()["choices"][0]["message"]["role"] == "user"
    [first, *_] = events(server.post({**asked, "stream": True}, "/v1/chat/completions").text)
    assert (first["prompt_text"], first["choices"][0]["delta"]["role"]) == ("user: hi\n", "user")


def test_log_probabilities_of_a_response_are_of_all_its_tokens(server: Live, engine: FakeEngine):
    """Also of an end token, which has no text: vLLM's eighth for the seven tokens of its sentence."""
    engine.pieces = ("a", "b", "")
    asked = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    [item] = server.post(asked, "/v1/responses").json()["output"]
    assert [each["token"] for each in item["content"][0]["logprobs"]] == ["a", "b", ""]
    streamed = events(server.post({**asked, "stream": True}, "/v1/responses").text)
    deltas = [each["logprobs"] for each in streamed if each["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in some] for some in deltas] == [["a"], ["b"]]
    assert [streamed[3]["part"]["logprobs"]] == [[]], "nothing is added to an event that was made"


def test_an_echo_with_token_ids_has_the_prompt_as_ids_alone(server: Live, engine: FakeEngine):
    """Recorded: vLLM's text is then " Paris. …", without "The capital of France is"."""
    engine.pieces = PLAIN
    asked = {"prompt": "Once upon", "echo": True, "max_tokens": 4}
    [made] = server.post(asked).json()["choices"]
    assert (made["text"], made["prompt_token_ids"]) == ("Once upon" + "".join(PLAIN[:4]), None)
    [told] = server.post({**asked, "return_token_ids": True}).json()["choices"]
    assert (told["text"], told["token_ids"]) == ("".join(PLAIN[:4]), [0, 1, 2, 3])
    assert engine.model.tokenizer.decode(told["prompt_token_ids"]) == "Once upon"
