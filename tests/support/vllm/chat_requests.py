"""Requests to /v1/chat/completions, for table.py."""
from __future__ import annotations

from typing import Any

from tests.support.vllm.request import (
    CALL,
    CITY,
    GRAMMAR,
    LEFT_OUT,
    LOOK,
    MESSAGES,
    MODEL,
    NAMED,
    SCHEMA,
    WAIT,
    Tables,
)

DEFAULTS = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
TOOLS = {"tools": [LOOK], "max_tokens": 120}
TURNS = [*MESSAGES, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"}]
CALLED = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Paris"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "large"}]
HALF_CALL = [{"role": "assistant", "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{"}}]}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "<think>\nIt is"}]

PLAIN: dict[str, dict[str, Any]] = {
    "plain": {}, "n": {"n": 2, "temperature": 1, "top_k": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs alone": {"logprobs": True}, "stop": {"stop": "capital"},
    "return_token_ids": {"return_token_ids": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 1},
    "echo": {"echo": True, "messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
    "continue_final_message": {"messages": [*MESSAGES, {"role": "assistant", "content": "It is the city of"}],
                               "continue_final_message": True, "add_generation_prompt": False},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}},
                    "max_tokens": 40},
    "json": {"structured_outputs": {"json": CITY}, "max_tokens": 40},
    "json of several splits": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40},
    "regex": {"structured_outputs": {"regex": "[a-c]{4}"}},
    "choice": {"structured_outputs": {"choice": ["Paris", "Rome"]}},
    "tools, auto": TOOLS, "tools, none": TOOLS | {"tool_choice": "none", "max_tokens": 8},
    "tools, required": TOOLS | {"tool_choice": "required"}, "tools, named": TOOLS | {"tool_choice": NAMED},
    "two tools, required": TOOLS | {"tools": [LOOK, WAIT], "tool_choice": "required",
                                    "parallel_tool_calls": False},
    "tools, named, cut": TOOLS | {"tool_choice": NAMED, "max_tokens": 5},
    "tools, required, cut": TOOLS | {"tool_choice": "required", "max_tokens": 12},
    "tools, auto, a call": TOOLS | {"structured_outputs": {"regex": CALL}},
    "tools, auto, a call, cut": TOOLS | {"structured_outputs": {"regex": CALL}, "max_tokens": 14},
    "tools, auto, text and a call": TOOLS | {"structured_outputs": {"regex": "Let me see\\. " + CALL}},
    "tools, auto, two calls": TOOLS | {"structured_outputs": {"regex": CALL + r"\n" + CALL},
                                       "max_tokens": 160},
    "tools, auto, logprobs": TOOLS | {"structured_outputs": {"regex": CALL}, "logprobs": True,
                                      "top_logprobs": 1},
    "tools, named, logprobs": TOOLS | {"tool_choice": NAMED, "logprobs": True},
    "tools, auto, n": TOOLS | {"structured_outputs": {"regex": CALL}, "n": 2, "temperature": 1, "top_k": 1},
    "logprob_token_ids": {"logprobs": True, "logprob_token_ids": [30, 28]},
    "echo of an assistant's message": {"echo": True, "messages": TURNS[:2]},
    "a bias to the end": {"logit_bias": {"2": 100}},
}
ONCE: dict[str, dict[str, Any]] = {
    "no model": {"model": LEFT_OUT}, "n, greedy": {"n": 2}, "max_completion_tokens": {"max_tokens": LEFT_OUT,
                                                            "max_completion_tokens": 4},
    "both limits": {"max_tokens": 5, "max_completion_tokens": 3},
    "no limit": {"max_tokens": LEFT_OUT, "stop": "is"},
    "system": {"messages": [{"role": "system", "content": "Be short."}, *MESSAGES]},
    "developer": {"messages": [{"role": "developer", "content": "Be short."}, *MESSAGES]},
    "turns": {"messages": TURNS}, "called": {"messages": CALLED, "tools": [LOOK]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is"},
                                                        {"type": "text", "text": "the time?"}]}]},
    "name of a message": {"messages": [MESSAGES[0] | {"name": "Ann"}]},
    "ends with an assistant": {"messages": TURNS[:2]},
    "no add_generation_prompt": {"add_generation_prompt": False},
    "add_special_tokens": {"add_special_tokens": True, "return_token_ids": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "chat_template_kwargs known": {"chat_template_kwargs": {"add_generation_prompt": False}},
    "reasoning_effort": {"reasoning_effort": "low"}, "reasoning_effort none": {"reasoning_effort": "none"},
    "stop kept": {"stop": ["capital"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [3575]},
    "grammar": {"structured_outputs": {"grammar": GRAMMAR}},
    "response_format text": {"response_format": {"type": "text"}},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 12},
    "presence_penalty": {"presence_penalty": 1.5}, "frequency_penalty": {"frequency_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.5}, "logit_bias": {"logit_bias": {"7042": -100}},
    "bad_words": {"bad_words": ["capital"]}, "allowed_token_ids": {"allowed_token_ids": [7042, 30]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [3575]}, "ignore_eos": {"ignore_eos": True},
    "top_k": {"top_k": 1, "temperature": 1}, "seed": {"seed": 3}, "priority 5": {"priority": 5},
    "truncate": {"truncate_prompt_tokens": 6, "return_token_ids": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "return_prompt_text": {"return_prompt_text": True}, "user": {"user": "me"},
    "metadata": {"metadata": {"a": "b"}},
    "store": {"store": True}, "service_tier": {"service_tier": "flex"}, "cache_salt": {"cache_salt": "salt"},
    "request_id": {"request_id": "mine"}, "unknown field": {"temprature": 0},
    "verbosity": {"verbosity": "low"},
    "functions": {"functions": [LOOK["function"]]}, "web_search_options": {"web_search_options": {}},
    "modalities": {"modalities": ["text"]}, "prediction": {"prediction": {"type": "content",
                                                            "content": "Paris"}},
    "prompt_cache_key": {"prompt_cache_key": "key"}, "documents": {"documents": [{"title": "a",
                                                            "text": "b"}]},
    "beam search": {"use_beam_search": True, "n": 2}, "numbers as strings": {"max_tokens": "4",
                                                            "temperature": "0"},
    "thinking_token_budget": {"thinking_token_budget": 4}, "tools without parameters": TOOLS | {
        "tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "required",
        "max_tokens": 30},
    "tools, required, not strict": TOOLS | {"tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]},
    "tools empty": {"tools": []}, "tools null": {"tools": None, "tool_choice": None},
    "tool_choice none without tools": {"tool_choice": "none"},
    "tool_choice auto without tools": {"tool_choice": "auto"},
    "required and json": TOOLS | {"tool_choice": "required", "response_format": {"type": "json_object"}},
    "stream without usage": {"stream": True},
    "stream_options without stream": {"stream_options": {"include_usage": True}},
    "usage of each chunk": {"stream": True, "stream_options": {"include_usage": True,
                                                            "continuous_usage_stats": True}},
    "stream, beam search": {"stream": True, "use_beam_search": True, "n": 2},
    "stream, prompt_logprobs": {"stream": True, "prompt_logprobs": 1}, "long prompt": {
        "messages": [{"role": "user", "content": "word " * 600}]},
    "empty content": {"messages": [{"role": "user", "content": ""}]}, "null content": {
        "messages": [{"role": "user", "content": None}]},
        "content left out": {"messages": [{"role": "user"}]},
    "reasoning of a message": {"messages": [*MESSAGES, {"role": "assistant", "content": "Paris.",
                                                        "reasoning": "Hm."},
                                            TURNS[2]], "return_token_ids": True},
    "echo of a user's message": {"echo": True, "logprobs": True, "top_logprobs": 1},
    "echo of what goes on": {"echo": True, "add_generation_prompt": False},
    "echo, n": {"echo": True, "messages": TURNS[:2], "n": 2, "temperature": 1, "top_k": 1},
    "logprob_token_ids without logprobs": {"logprob_token_ids": [30]},
    "chat_template": {"chat_template": "{{ messages[0].content }}"}, "stream_interval": {
        "stream": True, "stream_interval": 4, "stream_options": {"include_usage": True}},
}
WRONG: dict[str, tuple[Any, ...]] = {
    "model": ("other", 5), "messages": ([], None, LEFT_OUT, "hi", [5], [{}], [{"role": "user", "content": 5}],
        [{"role": "king", "content": "hi"}], [{"content": "hi"}],
        [{"role": "user", "content": [{"type": "other"}]}],
        [{"role": "user", "content": [{"type": "image_url",
                                       "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "tool", "content": "large"}],
        HALF_CALL),
    "max_tokens": (-1, 0, "x", 3000), "max_completion_tokens": (0, -1, "x"), "temperature": (-0.5, 2.5, "x"),
    "top_p": (0, 1.1), "top_k": (-2, 0), "n": (0, -1, None, "x"), "logprobs": (5, "x"),
    "top_logprobs": (2, 21, -1, "x"), "stop": (5, ""), "tools": (5, [5], [{}], [{"type": "function"}],
        [{"type": "other", "function": {"name": "a"}}], [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "a", "parameters": 5}}]),
    "tool_choice": ("required", "always", 5, NAMED, {"type": "function"}), "response_format": (
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "other"}, 5), "structured_outputs": ({"regex": "("}, {"json": {"type": 5}}, 5),
    "stream": ("x",), "stream_options": ({"include_usage": 5},), "reasoning_effort": ("much", 5),
    "chat_template_kwargs": (5, [], {"messages": []}), "add_generation_prompt": ("x",), "cache_salt": ("",),
    "logit_bias": ({"x": 1}, {"99999": 1}), "seed": ("x", 2**64), "user": (5,), "metadata": (5, {"a": 5}),
    "parallel_tool_calls": ("x",), "thinking_token_budget": ("x",), "bad_words": (5,), "documents": (5,),
}
TOOL_ERRORS: dict[str, dict[str, Any]] = {
    "a tool that there is not": {"tools": [WAIT], "tool_choice": NAMED},
    "choice of tools empty": {"tools": [], "tool_choice": "required"},
    "continue and generation prompt": {"continue_final_message": True, "add_generation_prompt": True,
                                       "messages": TURNS[:2]},
    "continue a user's message": {"continue_final_message": True, "add_generation_prompt": False},
    "top_logprobs without logprobs": {"top_logprobs": 2}, "two constraints":
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    "allowed_tools": TOOLS | {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [NAMED]}}},
    "custom tool": {"tools": [{"type": "custom", "custom": {"name": "a"}}]},
}
TABLES = Tables("chat", "/v1/chat/completions", DEFAULTS, PLAIN, ONCE | TOOL_ERRORS, WRONG)
