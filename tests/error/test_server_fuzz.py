"""Any JSON is answered: a status that fits, an error of OpenAI's shape, and never 500."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.server.serve_case import Live, fake_service, live
from tinygrad_nv.server.limits import RequestLimits

JSON = {"Content-Type": "application/json"}
NAMES = ("prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p",
         "top_k", "min_p", "n", "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "logit_bias",
         "echo", "stream", "stream_options", "response_format", "tools", "tool_choice", "structured_outputs",
         "priority", "min_tokens", "presence_penalty", "repetition_penalty", "best_of", "suffix",
         "guided_json",
         "guided_regex", "guided_choice", "guided_grammar", "chat_template_kwargs", "user", "role", "content",
         "type", "text", "function", "name", "parameters", "arguments", "tool_calls", "json_schema", "schema",
         "include_usage", "functions", "function_call", "reasoning_effort", "prediction", "cache_salt",
         "continue_final_message", "add_generation_prompt", "return_token_ids", "include_reasoning", "input",
         "instructions", "reasoning", "output", "call_id", "previous_response_id", "truncation", "thinking",
         "system", "input_schema", "tool_use_id", "1", "\ud800")
WORDS = st.sampled_from(("user", "assistant", "text", "function", "json_schema", "json_object", "required",
                         "auto", "object", "{}", "a", "Once", "", "\0", "\ud800", "(", "start: \"a\""))
NUMBERS = st.sampled_from((-1, 0, 1, 2, 3, 0.5, 1e300, 5e-324, 10 ** 30, 10 ** 400, 1 << 63))
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=3)
NAME = st.sampled_from(NAMES) | st.text(max_size=3)
ANY = st.recursive(LEAVES, lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=4)), max_leaves=8)
MESSAGE = st.fixed_dictionaries({"role": WORDS, "content": LEAVES}) | ANY
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries(
    {"name": WORDS}, optional={"parameters": ANY})}) | ANY
COMPLETION = st.fixed_dictionaries({"prompt": st.just("Once") | ANY})
CHAT = st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=3)},
                             optional={"tools": st.lists(TOOL, max_size=2)})


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(limits=RequestLimits(choices=4, request_s=20))) as running: yield running


def answered(server: Live, path: str, body: dict[str, Any]) -> None:
    """With 200, or with an error that has words."""
    kinds = {"invalid_request_error", "not_found_error"} if "messages" in path else \
        {"BadRequestError", "Bad Request", "NotFoundError"}
    shape = {"type", "message"} if path == "/v1/messages" else {"message", "type", "param", "code"}
    answer = server.http.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    if answer.status_code == 200: return
    error = answer.json()["error"]
    assert set(error) - {"reason"} == shape
    assert error["message"]
    assert error["type"] in kinds


def body_of(base: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """`base`, few tokens, and up to three fields of any name with anything in them."""
    return st.builds(lambda first, more: {"max_tokens": 2, **more, **first}, base,
                     st.dictionaries(NAME, ANY, max_size=3))


FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
FEWER = settings(FUZZ, max_examples=50)


@FUZZ
@given(body_of(COMPLETION))
def test_any_completion(server: Live, body: dict[str, Any]): answered(server, "/v1/completions", body)


@FUZZ
@given(body_of(CHAT))
def test_any_conversation(server: Live, body: dict[str, Any]): answered(server, "/v1/chat/completions", body)


ITEM = st.fixed_dictionaries({"role": WORDS,
                              "content": LEAVES | st.lists(ANY, max_size=2)}) | st.fixed_dictionaries(
    {"type": st.sampled_from(("message", "function_call", "function_call_output", "reasoning"))}, optional={
        "call_id": WORDS, "name": WORDS, "arguments": LEAVES, "output": LEAVES, "content": ANY,
        "summary": ANY})
RESPONSE = st.fixed_dictionaries({"input": st.just("Once") | st.lists(ITEM, max_size=3)}, optional={
    "tools": st.lists(TOOL, max_size=2), "text": ANY, "reasoning": ANY, "tool_choice": ANY, "include": ANY,
    "truncation": WORDS, "store": ANY, "stream": st.booleans()})
BLOCK = st.fixed_dictionaries({"type": st.sampled_from(("text", "tool_use", "tool_result", "thinking",
                                                        "image"))},
                              optional={"text": WORDS, "id": WORDS, "name": WORDS, "input": ANY,
                                        "content": ANY,
                                        "tool_use_id": WORDS, "thinking": LEAVES, "is_error": LEAVES})
TURN = st.fixed_dictionaries({"role": st.sampled_from(("user", "assistant")),
                              "content": WORDS | st.lists(BLOCK, max_size=3)})
MESSAGES = st.fixed_dictionaries({"messages": st.lists(TURN, min_size=1, max_size=3)}, optional={
    "system": WORDS | st.lists(BLOCK, max_size=2), "tools": st.lists(ANY, max_size=2), "tool_choice": ANY,
    "thinking": ANY, "output_config": ANY, "stop_sequences": ANY, "stream": st.booleans(), "metadata": ANY})


@FEWER
@given(RESPONSE)
def test_any_response(server: Live, body: dict[str, Any]):
    answered(server, "/v1/responses", {"max_output_tokens": 2, **body})


@FEWER
@given(MESSAGES)
def test_any_message(server: Live, body: dict[str, Any]):
    answered(server, "/v1/messages", {"max_tokens": 2, **body})
