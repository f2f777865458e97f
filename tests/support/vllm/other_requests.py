"""Requests to the other endpoints that both servers have, for table.py."""
from __future__ import annotations

from collections.abc import Iterator

from tests.support.vllm.request import (
    CITY,
    LEFT_OUT,
    LOOK,
    MESSAGES,
    MODEL,
    NAMED,
    PROMPT,
    SCHEMA,
    Request,
    both,
    once,
    request,
    wrong,
)

IDS = [504, 3575, 282, 4649, 314]       # PROMPT
JSON = {"Content_Type": "application/json"}
TOOL = {"name": "look", "description": "Looks at a city.", "strict": True, "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "look", "strict": True, "parameters": SCHEMA}
MESSAGE = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
RESPONSE = {"model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 8,
            "temperature": 0}
TOLD = {"index": 0, "token_ids": [7042, 30], "finish_reason": "length", "logprobs": {"content": [
    {"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": [
        {"token_id": token, "logprob": -0.5, "rank": 1}]} for token in (7042, 30)]}}
GENERATE = {"token_ids": IDS, "sampling_params": {"max_tokens": 8, "temperature": 0}}


def _messages() -> Iterator[Request]:
    path = "/v1/messages"
    yield from both("messages", path, MESSAGE, {
        "plain": {}, "system": {"system": "Be short."}, "stop": {"stop_sequences": ["capital"]},
        "tools, any": {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 120},
        "tools, named": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}, "max_tokens": 120},
        "tools, auto": {"tools": [TOOL], "max_tokens": 8}, "json": {"output_config": {"format": {
            "type": "json_schema", "schema": CITY}}, "max_tokens": 40}})
    yield from once("messages", path, MESSAGE, {
        "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]},
        "system blocks": {"system": [{"type": "text", "text": "Be short."}]},
        "metadata": {"metadata": {"user_id": "a"}},
        "top_k": {"top_k": 1, "temperature": 1}, "unknown field": {"temprature": 0},
        "thinking": {"thinking": {"type": "disabled"}}, "thinking enabled": {
            "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 8},
        "prefill": {"messages": [*MESSAGES, {"role": "assistant", "content": "It is"}]},
        "tool result": {"messages": [*MESSAGES, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "look", "input": {"city": "Paris"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "large"}]}]},
        "long prompt": {"messages": [{"role": "user", "content": "word " * 600}]}})
    yield from wrong("messages", path, MESSAGE, {
        "model": ("other", LEFT_OUT, 5), "messages": ([], LEFT_OUT, "x", [{"role": "king", "content": "a"}]),
        "max_tokens": (LEFT_OUT, 0, -1, "x", 3000), "temperature": (-1, 3), "top_p": (2,),
        "stop_sequences": (5, "a"),
        "tool_choice": ({"type": "tool"}, {"type": "other"}, {"type": "any"}), "tools": (5, [{}]),
        "system": (5,),
        "stream": ("x",), "thinking": ({"type": "other"}, {"type": "enabled", "budget_tokens": 5})})
    count = {"model": MODEL, "messages": MESSAGES}
    yield from once("count_tokens", path + "/count_tokens", count, {
        "plain": {}, "system": {"system": "Be short."}, "tools": {"tools": [TOOL]}})
    yield from wrong("count_tokens", path + "/count_tokens", count,
                     {"model": ("other",), "messages": (LEFT_OUT, 5)})


def _responses() -> Iterator[Request]:
    path = "/v1/responses"
    yield from both("responses", path, RESPONSE, {
        "plain": {}, "instructions": {"instructions": "Be short."},
        "items": {"input": MESSAGES}, "json": {"text": {"format": {
            "type": "json_schema", "name": "a", "schema": CITY}}, "max_output_tokens": 40},
        "tools, required": {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 120},
        "tools, named": {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "look"},
                         "max_output_tokens": 120},
        "cut": {"max_output_tokens": 3}, "tools, auto": {"tools": [FUNCTION]},
        "not stored": {"store": False},
        "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 1}})
    yield from once("responses", path, RESPONSE, {
        "metadata": {"metadata": {"a": "b"}}, "fields": {
            "tools": [FUNCTION], "tool_choice": "none", "text": {"format": {"type": "text"}}, "user": "u",
            "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "service_tier": "default"},
        "parts": {"input": [{"type": "message", "role": "user",
                             "content": [
            {"type": "input_text", "text": "What is the capital of France?"}]}]},
        "unknown field": {"temprature": 0}, "call and output": {"input": [
            {"role": "user", "content": "Look."}, {"type": "function_call", "call_id": "a", "name": "look",
                                                   "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "large"}]},
        "truncation auto": {"truncation": "auto"}, "long prompt": {"input": "word " * 600},
        "reasoning": {"reasoning": {"effort": "low"}},
        "previous response": {"previous_response_id": "resp_none"},
        "web search": {"tools": [{"type": "web_search"}]}, "background": {"background": True,
                                                            "store": False}})
    yield from wrong("responses", path, RESPONSE, {
        "model": ("other",), "input": (LEFT_OUT, 5, [], [{"role": "king", "content": "a"}], ""),
        "max_output_tokens": (0, -1, "x", 3000), "temperature": (-1, 3), "tools": (5, [{}]),
        "tool_choice": ("always",),
        "stream": ("x",), "text": (5,), "top_logprobs": (21,), "metadata": (5,), "truncation": ("other",)})
    yield request("responses", "unknown id", path + "/resp_none", method="GET")
    yield request("responses", "odd id", path + "/none", method="GET")
    yield request("responses", "cancel unknown", path + "/resp_none/cancel", {})


def _tokens() -> Iterator[Request]:
    yield from once("tokenize", "/tokenize", {"model": MODEL, "prompt": PROMPT}, {
        "plain": {}, "no model": {"model": LEFT_OUT}, "strings": {"return_token_strs": True},
        "empty": {"prompt": ""},
        "add_special_tokens": {"add_special_tokens": False}, "long": {"prompt": "a " * 600},
        "emoji": {"prompt": "🌍 日本", "return_token_strs": True},
        "special": {"prompt": "<|im_start|>user"},
        "unknown field": {"other": 1}})
    yield from once("tokenize", "/tokenize", {"model": MODEL, "messages": MESSAGES}, {
        "messages": {}, "messages without generation prompt": {"add_generation_prompt": False},
        "messages with tools": {"tools": [LOOK]}, "messages continued": {"messages": [*MESSAGES, {
            "role": "assistant", "content": "It"}], "continue_final_message": True,
            "add_generation_prompt": False},
        "messages with both": {"continue_final_message": True, "add_generation_prompt": True},
        "prompt and messages": {"prompt": PROMPT}})
    yield from wrong("tokenize", "/tokenize", {"model": MODEL, "prompt": PROMPT}, {
        "model": ("other",), "prompt": (LEFT_OUT, 5, None, ["a"]), "add_special_tokens": ("x",)})
    yield from once("detokenize", "/detokenize", {"model": MODEL, "tokens": IDS}, {
        "plain": {}, "no model": {"model": LEFT_OUT}, "empty": {"tokens": []},
        "half a character": {"tokens": [229]},
        "special": {"tokens": [1, 504, 2]}, "unknown field": {"other": 1}})
    yield from wrong("detokenize", "/detokenize", {"model": MODEL, "tokens": IDS}, {
        "model": ("other",), "tokens": (LEFT_OUT, 5, ["a"], [-1], [49152], [10**30], "ab", [1.5], ["5"])})


def _scale_out() -> Iterator[Request]:
    path = "/inference/v1/generate"
    yield from both("generate", path, GENERATE, {
        "plain": {}, "text": {"output_mode": "text"}, "model": {"model": MODEL},
        "logprobs": {"sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 1}},
        "n": {"sampling_params": {"max_tokens": 4, "temperature": 1, "top_k": 1, "n": 2}},
        "stop": {"sampling_params": {"max_tokens": 8, "temperature": 0, "stop": ["Paris"]},
                 "output_mode": "text"},
        "prompt logprobs": {"sampling_params": {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 1}},
        "return_token_ids": {"return_token_ids": True}})
    yield from wrong("generate", path, GENERATE, {
        "token_ids": (LEFT_OUT, [], [-1], "x", [49152], [504] * 600), "model": ("other",),
        "sampling_params": (LEFT_OUT, {"temperature": 0, "stop_token_ids": [30]}, {"max_tokens": -1},
                            {"temperature": -1}, 5,
                            {"temperature": 0, "stop_token_ids": [30], "other": 1}),
        "output_mode": ("other",), "stream": ("x",), "request_id": ("mine", 5), "other": (1,)})
    yield from once("abort_requests", "/inference/v1/abort_requests", {}, {
        "none": {}, "unknown": {"request_ids": ["none"]}, "wrong": {"request_ids": 5}})
    yield from once("completions/render", "/v1/completions/render", {"model": MODEL, "prompt": PROMPT}, {
        "plain": {}, "two prompts": {"prompt": ["a", "b"]}, "parameters": {"max_tokens": 5, "temperature": 0,
                                                            "stop": "a"},
        "offsets": {"return_token_offsets": True}, "wrong": {"prompt": {}}, "negative": {"max_tokens": -1}})
    yield from once("chat/render", "/v1/chat/completions/render", {"model": MODEL, "messages": MESSAGES}, {
        "plain": {}, "tools": {"tools": [LOOK], "tool_choice": NAMED},
        "parameters": {"max_tokens": 5, "temperature": 0},
        "json": {"structured_outputs": {"json": SCHEMA}}, "wrong": {"messages": 5},
        "other model": {"model": "other"}})
    yield from once("messages/render", "/v1/messages/render", MESSAGE, {"plain": {}})
    yield from once("responses/render", "/v1/responses/render", RESPONSE, {"plain": {}})
    made = {"request_id": "mine", "choices": [{"index": 0, "token_ids": [7042, 30], "finish_reason": "length",
                                               "logprobs": None}]}
    yield from once("completions/derender", "/v1/completions/derender", {
        "generate_response": made, "model": MODEL, "request": {"model": MODEL, "prompt": PROMPT}},
        {"plain": {}, "without response": {"generate_response": LEFT_OUT}})
    yield from once("chat/derender", "/v1/chat/completions/derender", {
        "generate_response": made, "model": MODEL, "request": {"model": MODEL, "messages": MESSAGES}},
        {"plain": {}, "without response": {"generate_response": LEFT_OUT}})
    answered = {"model": MODEL, "prompt_tokens": [5], "generate_responses": [made]}
    yield from once("completions/derender", "/v1/completions/derender", answered, {
        "answer": {}, "two answers": {"prompt_tokens": [5, 3], "generate_responses": [made, made]},
        "request": {"completion_request": {"model": MODEL, "prompt": PROMPT, "stop": "."}},
        "log probabilities": {"generate_responses": [made | {"choices": [TOLD]}]}, "chunk": {
            "prompt_tokens": LEFT_OUT, "generate_responses": LEFT_OUT, "stream": True,
            "generate_chunk": made}})
    asked = {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    yield from once("chat/derender", "/v1/chat/completions/derender", {
        "model": MODEL, "prompt_tokens": 37, "generate_response": made,
        "chat_request": {"model": MODEL, "messages": MESSAGES}}, {
        "answer": {}, "log probabilities": {"generate_response": made | {"choices": [TOLD]},
                                            "chat_request": asked},
        "two choices": {"generate_response": made | {"choices": [TOLD, TOLD | {"index": 1}]}},
        "chunk": {"generate_response": LEFT_OUT, "prompt_tokens": LEFT_OUT, "stream": True,
                  "prompt_token_ids": IDS, "generate_chunk": made}})
    yield from once("chat/batch", "/v1/chat/completions/batch", {
        "model": MODEL, "messages": [MESSAGES, MESSAGES], "max_tokens": 4, "temperature": 0},
        {"plain": {}, "one": {"messages": MESSAGES}, "n": {"n": 2}, "stream": {"stream": True},
         "empty": {"messages": []}, "an empty conversation": {"messages": [MESSAGES, []]},
         "log probabilities": {"messages": [MESSAGES, [{"role": "user", "content": "Who are you?"}]],
                               "logprobs": True, "top_logprobs": 1},
         "echo": {"messages": [[*MESSAGES, {"role": "assistant", "content": "Paris."}]], "echo": True},
         "ids": {"return_token_ids": True, "prompt_logprobs": 1}, "beams": {"use_beam_search": True},
         "json": {"structured_outputs": {"json": CITY}, "max_tokens": 40}})
    yield from once("generative_scoring", "/generative_scoring", {
        "model": MODEL, "query": PROMPT, "items": [" Paris"], "label_token_ids": [30, 28]},
        {"plain": {}, "none": {"items": []}, "among all": {"items": [" Paris", "."], "apply_softmax": False},
         "item first": {"items": ["Paris. "], "item_first": True, "add_special_tokens": False},
         "token ids": {"query": IDS, "items": [[7042], [30]]}, "no labels": {"label_token_ids": []},
         "a label that there is not": {"label_token_ids": [99999]}, "long": {"query": [504] * 600,
                                                                             "items": [[30]]}})
    yield from once("systemone", "/v1/systemone", {"model": MODEL}, {"empty": {}})


def _plumbing() -> Iterator[Request]:
    for path in ("/v1/models", "/v1/models/model", "/v1/models/other", "/health", "/version", "/ping",
                 "/load",
                 "/metrics", "/v1", "/nothing", "/v1/completions", "/v1/chat/completions", "/v1/messages",
                 "/tokenize",
                 "/inference/v1/generate", "/is_sleeping", "/tokenizer_info", "/server_info",
                 "/kv_event_sources"):
        yield request("paths", f"GET {path}", path, method="GET")
    for path in ("/v1/models", "/health", "/version", "/ping", "/nothing", "/v1/embeddings", "/pooling",
                 "/score", "/rerank",
                 "/classify", "/v1/audio/transcriptions", "/reset_prefix_cache", "/sleep",
                 "/v1/load_lora_adapter",
                 "/invocations"):
        yield request("paths", f"POST {path}", path, {})
    yield request("paths", "POST /invocations, completion", "/invocations",
                  {"prompt": PROMPT, "max_tokens": 2,
                                                                            "temperature": 0})
    yield request("paths", "POST /invocations, conversation", "/invocations",
                  {"messages": MESSAGES, "max_tokens": 4, "temperature": 0})
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        yield request("paths", f"{method} /v1/completions", "/v1/completions", {"prompt": "a"}, method=method)
    yield request("paths", "HEAD /v1/models", "/v1/models", method="HEAD")
    bodies = {"broken JSON": b'{"prompt": "a"', "no body": b"", "a list": b"[]", "a string": b'"a"',
              "null": b"null",
              "NaN": b'{"prompt": "a", "temperature": NaN}',
              "a name twice": b'{"prompt": "a", "prompt": "b", '
              b'"max_tokens": 1, "temperature": 0}', "not UTF-8": b'{"prompt": "\xff"}',
              "half a surrogate pair":
              b'{"prompt": "\\ud800", "max_tokens": 1, "temperature": 0}',
              "trailing comma": b'{"prompt": "a",}',
              "1e999": b'{"prompt": "a", "temperature": 1e999}'}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"):
        for name in bodies if path == "/v1/completions" else ("broken JSON", "no body", "a list"):
            yield request("bodies", f"{path}, {name}", path, bodies[name], **JSON)
    whole = b'{"prompt": "a", "max_tokens": 1, "temperature": 0}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8",
                 "application/jsonx",
                 "APPLICATION/JSON", "multipart/form-data; boundary=a", "application/vnd.api+json"):
        yield request("types", kind, "/v1/completions", whole, Content_Type=kind)
    yield request("types", "none", "/v1/completions", whole)
    yield request("types", "text/plain to /tokenize", "/tokenize", b'{"prompt": "a"}',
                  Content_Type="text/plain")
    yield request("headers", "X-Request-Id", "/v1/completions", whole, X_Request_Id="mine", **JSON)
    yield request("headers", "Authorization", "/v1/completions", whole, Authorization="Bearer none", **JSON)


def all_requests() -> Iterator[Request]:
    """Yields every request."""
    for each in (_messages, _responses, _tokens, _scale_out, _plumbing): yield from each()
