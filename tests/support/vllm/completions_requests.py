"""Requests to /v1/completions, for table.py."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.vllm.request import (
    GRAMMAR,
    LEFT_OUT,
    MODEL,
    PROMPT,
    SCHEMA,
    Request,
    both,
    once,
    wrong,
)

NAME, PATH = "completions", "/v1/completions"
DEFAULTS = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
IDS = [504, 3575, 282, 4649, 314]       # PROMPT

PLAIN: dict[str, dict[str, Any]] = {
    "plain": {}, "token ids": {"prompt": IDS}, "two prompts": {"prompt": [PROMPT, "Once upon a time"]},
    "lists of token ids": {"prompt": [IDS, [504, 260]]}, "n": {"n": 2, "temperature": 1, "top_k": 1},
    "logprobs": {"logprobs": 2}, "logprobs 0": {"logprobs": 0}, "echo": {"echo": True},
    "echo, logprobs": {"echo": True, "logprobs": 2}, "echo alone": {"echo": True, "max_tokens": 0,
                                                            "logprobs": 1},
    "echo, two prompts": {"echo": True, "prompt": [PROMPT, "Once"]},
    "echo of token ids": {"echo": True, "prompt": IDS}, "echo, n": {"echo": True, "n": 2, "temperature": 1,
                                                            "top_k": 1},
    "return_token_ids": {"return_token_ids": True},
    "return_token_ids, echo": {"return_token_ids": True, "echo": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "logprobs": 2},
    "stop": {"stop": "."}, "stop of two": {"stop": ["zzz", " Paris"]},
    "stop kept": {"stop": [" Paris"], "include_stop_str_in_output": True},
    "stop over tokens": {"stop": "is. T"}, "stop_token_ids": {"stop_token_ids": [30]},
    "stop_token_ids kept": {"stop_token_ids": [30], "include_stop_str_in_output": True},
    "json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 30},
    "regex": {"structured_outputs": {"regex": "[a-c]{4}"}},
    "choice": {"structured_outputs": {"choice": ["Paris", "Rome"]}},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "characters of several tokens": {"prompt": "Repeat: 🌍🌎🌏 日本語 🌍🌎🌏 日本語 🌍🌎",
                                     "max_tokens": 9},
    "cut inside a character": {"prompt": "Repeat: 🌍🌎🌏 🌍🌎🌏 🌍🌎", "max_tokens": 1},
}
# one answer each
ONCE: dict[str, dict[str, Any]] = {
    "no model": {"model": LEFT_OUT}, "n, greedy": {"n": 2}, "no max_tokens": {"max_tokens": LEFT_OUT},
    "max_tokens null": {"max_tokens": None, "stop": "."}, "suffix": {"suffix": " and Rome"},
    "user": {"user": "me"},
    "best_of 1": {"best_of": 1}, "best_of 2": {"best_of": 2}, "best_of 2, n 1": {"best_of": 2, "n": 1},
    "n 3, best_of 1": {"best_of": 1, "n": 3, "temperature": 1, "top_k": 1},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 2}, "repetition_penalty": {"repetition_penalty": 1.8},
    "logit_bias": {"logit_bias": {"30": 100}}, "logit_bias below": {"logit_bias": {"7042": -100}},
    "bad_words": {"bad_words": ["Paris"]}, "bad_words with a space": {"bad_words": [" Paris", "the"]},
    "allowed_token_ids": {"allowed_token_ids": [30, 28]},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": [30]}, "min_tokens and stop": {"min_tokens": 4,
                                                            "stop": "."},
    "ignore_eos": {"ignore_eos": True}, "min_p": {"min_p": 0.5}, "top_k": {"top_k": 1, "temperature": 1},
    "top_p": {"top_p": 1e-6, "temperature": 1}, "seed": {"seed": 7}, "priority": {"priority": 0},
    "priority 5": {"priority": 5}, "truncate": {"truncate_prompt_tokens": 3, "return_token_ids": True},
    "truncate to the context": {"truncate_prompt_tokens": -1, "prompt": "a " * 600, "max_tokens": 2},
    "truncate from the right": {"truncate_prompt_tokens": 3, "truncation_side": "right",
                                "return_token_ids": True},
    "add_special_tokens": {"add_special_tokens": False, "return_token_ids": True},
    "special tokens of the text": {"prompt": "<|im_start|>user\nHi<|im_end|>\n", "return_token_ids": True},
    "skip_special_tokens": {"skip_special_tokens": False, "prompt": "<|im_start|>user\nSay hi.<|im_end|>\n"
                            "<|im_start|>assistant\n", "max_tokens": 32},
    "ends by itself": {"prompt": "<|im_start|>user\nSay only hi.<|im_end|>\n<|im_start|>assistant\nhi",
                       "max_tokens": 32},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "detokenize": {"detokenize": False},
    "cache_salt": {"cache_salt": "salt"}, "request_id": {"request_id": "mine"},
    "unknown field": {"temprature": 0},
    "several unknown fields": {"a": 1, "b": None}, "grammar": {"structured_outputs": {"grammar": GRAMMAR}},
    "json_object": {"structured_outputs": {"json_object": True}, "max_tokens": 12},
    "response_format json_object": {"response_format": {"type": "json_object"}, "max_tokens": 12},
    "response_format json_schema": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": SCHEMA}}, "max_tokens": 30},
    "response_format text": {"response_format": {"type": "text"}},
    "guided_choice": {"guided_choice": ["Paris", "Rome"]},
    "structured_outputs empty": {"structured_outputs": {}},
    "two constraints": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "beam search": {"use_beam_search": True, "n": 2}, "beam search, length_penalty":
        {"use_beam_search": True, "n": 2, "length_penalty": 0.5},
    "prompt_logprobs 0": {"prompt_logprobs": 0}, "logprob_token_ids": {"logprob_token_ids": [30, 28],
                                                            "logprobs": 1},
    "numbers as strings": {"max_tokens": "4", "temperature": "0"}, "booleans as strings": {"echo": "true"},
    "booleans as numbers": {"echo": 1}, "number as boolean": {"max_tokens": True},
    "whole floats": {"max_tokens": 4.0},
    "nulls": {"n": 1, "stop": None, "logprobs": None, "echo": None, "seed": None, "logit_bias": None,
              "user": None,
              "presence_penalty": None, "frequency_penalty": None, "top_p": None, "stream": None,
              "suffix": None},
    "stop empty list": {"stop": []}, "stop empty string": {"stop": ""},
    "stop with an empty string": {"stop": ["a", ""]},
    "prompt of one word": {"prompt": "a", "max_tokens": 1},
    "thinking_token_budget": {"thinking_token_budget": 4},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 3, "min_count": 2},
                             "max_tokens": 16},
    "stream_interval": {"stream": True, "stream_interval": 4, "stream_options": {"include_usage": True}},
    "vllm_xargs": {"vllm_xargs": {"a": 1}}, "kv_transfer_params": {"kv_transfer_params": {}},
    "session_id": {"session_id": "one"}, "watermarking": {"watermarking": False},
    "stream without usage": {"stream": True}, "usage of each chunk": {
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "stream_options without stream": {"stream_options": {"include_usage": True}},
    "stream_options null": {"stream": True, "stream_options": None},
    "usage of each chunk alone": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    "echo streamed with logprobs 0": {"stream": True, "echo": True, "logprobs": 0},
    "stream, beam search": {"stream": True, "use_beam_search": True, "n": 2},
    "stream, prompt_logprobs": {"stream": True, "prompt_logprobs": 1},
    "long prompt": {"prompt": "word " * 600}, "long prompt of ids": {"prompt": [504] * 512},
    "prompt and max_tokens too long": {"prompt": [504] * 480, "max_tokens": 100},
    "prompt that leaves nothing": {"prompt": [504] * 512, "max_tokens": 0, "echo": True},
}
WRONG: dict[str, tuple[Any, ...]] = {
    "model": ("other", "", 7), "prompt": ("", [], [""], [[]], None, 5, {}, [1, "a"], ["a", [1]], [-1],
                                          [49152], [1.5], [True],
                                          {"a": 1}, LEFT_OUT),
    "max_tokens": (-1, 0, 1.5, "x", 3000, [], 10**30), "temperature": (-1, 2.5, 1e300, "hot", []),
    "top_p": (0, 1.5, -1, "x"), "top_k": (-2, -1, 0, 1.5, "x"), "min_p": (-0.1, 1.5),
    "n": (0, -1, 1.5, "1", None, 1000),
    "logprobs": (-1, 21, 1.5, "x", True), "prompt_logprobs": (-1, -2, 21, "x"), "echo": ("maybe", 5),
    "stop": (5, [5], {}, ["a"] * 40), "stop_token_ids": (5, ["a"], [-1], [99999], None),
    "presence_penalty": (-2.5, 2.5, "x"), "frequency_penalty": (-2.5, 2.5), "repetition_penalty": (0, -1, 3),
    "logit_bias": ({"a": 1}, {"99999": 1}, {"5": 101}, {"5": "x"}, [], {"-1": 1}),
    "bad_words": ("a", [5], [""], []), "allowed_token_ids": ([], [99999], "a", [-1], None),
    "min_tokens": (-1, 9, "x"), "seed": (-1, 2**63, 1.5, "x"), "ignore_eos": ("x", None),
    "truncate_prompt_tokens": (0, -2, 5000, "x"), "stream": ("x", 5, "true"),
    "stream_options": (5, {}, {"include_usage": "x"}, {"other": 1}), "best_of": (0, -1, "x"),
    "structured_outputs": ({"json": "{"}, {"json": {"type": "nothing"}}, {"regex": "("}, {"choice": []},
                           {"grammar": "?"},
                           {"json": 5}, {"other": 1}, 5, {"structural_tag": "x"}),
    "response_format": ({"type": "json_schema"}, {"type": "other"}, {}, 5, "json"),
    "cache_salt": ("", 5), "priority": ("x", 1.5), "suffix": ("", 5), "user": (5,), "request_id": (5,),
    "skip_special_tokens": ("x",), "length_penalty": ("x",), "use_beam_search": ("x",),
    "return_token_ids": ("x", 5),
    "logprob_token_ids": ([99999], "x"), "thinking_token_budget": (-2, "x"), "vllm_xargs": ({"a": None}, 5),
    "repetition_detection": ({}, 5), "stream_interval": (0, "x"), "truncation_side": ("up",),
}


def all_requests() -> Iterator[Request]:
    """Yields every request."""
    yield from both(NAME, PATH, DEFAULTS, PLAIN, stream_options={"include_usage": True})
    yield from once(NAME, PATH, DEFAULTS, ONCE)
    yield from wrong(NAME, PATH, DEFAULTS, WRONG)
