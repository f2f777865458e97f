"""All requests that the servers are compared by, those to a server with a parser of reasoning among them.

`requests()` returns them by name. A name is the endpoint's, and what is odd about the request; that of a
streamed one ends in ", streamed". Texts are greedy everywhere, or bounded by a constraint.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.support.vllm import chat_requests, completions_requests, other_requests
from tests.support.vllm.other_requests import MESSAGE, RESPONSE
from tests.support.vllm.request import CITY, LOOK, MESSAGES, Request, both, once

# what the model says again, so that an answer has both markers
ECHOED = [{"role": "user", "content": "Repeat this exactly: <think>\nHm.\n</think>\n\nParis."},
          {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nParis."},
          {"role": "user", "content": "Repeat this exactly: <think>\nHm.\n</think>\n\nParis."}]
INSIDE = {"messages": [*MESSAGES, {"role": "assistant", "content": "<think>\nIt is"}],
          "continue_final_message": True,
          "add_generation_prompt": False}
BEHIND = {"messages": [*MESSAGES, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt is"}],
          "continue_final_message": True, "add_generation_prompt": False}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
JSON = {"structured_outputs": {"json": CITY}, "max_tokens": 40}
CHAT: dict[str, dict[str, Any]] = {
    "plain": {}, "both markers": {"messages": ECHOED, "max_tokens": 24}, "inside": INSIDE, "off": OFF,
    "both markers, include_reasoning false": {"messages": ECHOED, "max_tokens": 24,
                                              "include_reasoning": False},
    "both markers, cut": {"messages": ECHOED, "max_tokens": 5}, "json, off": JSON | OFF,
    "tools, required, off": OFF | {"tools": [LOOK], "tool_choice": "required", "max_tokens": 120},
    "logprobs, both markers": {"messages": ECHOED, "max_tokens": 24, "logprobs": True},
    "n, both markers": {"messages": ECHOED, "max_tokens": 24, "n": 2, "temperature": 1, "top_k": 1},
    "return_token_ids, both markers": {"messages": ECHOED, "max_tokens": 24, "return_token_ids": True},
}
CHAT_ONCE: dict[str, dict[str, Any]] = {
    "behind": BEHIND, "json": JSON, "reasoning_effort none": {"reasoning_effort": "none"},
    "json, include_reasoning false": JSON | {"include_reasoning": False},
    "tools, required": {"tools": [LOOK], "tool_choice": "required", "max_tokens": 120},
    "thinking_token_budget": {"thinking_token_budget": 4}, "stop inside": INSIDE | {"stop": " "},
}
# prompts of many kinds, of which the greedy texts are compared
TEXTS = (
    "Once upon a time", "def fibonacci(n):\n    ", "The three laws of motion are", "1, 2, 3, 4, 5,",
    "Q: Who are you?\nA:",
    "Water boils at", "SELECT name FROM users WHERE", "La capitale de l'Espagne est",
    "Die Hauptstadt von Italien ist",
    "東京は", "Привет, как", "🙂🙂🙂",
    "{\"name\": \"Ann\", \"age\":", "<html>\n<body>\n", "# Title\n\n## Section",
    "    indented", "ALL CAPITALS ARE", "a", "  two blanks", "tab\tseparated\tvalues", "x = 3.14159 *",
    "https://example.",
    "To be, or not to be,", "Dear Sir or Madam,", "Ingredients:\n- flour\n- sugar",
    "Translate to French: cheese ->",
    "The opposite of hot is", "Monday, Tuesday,", "E = mc", "import numpy as np\n", "naïve café",
    "line one\r\nline two",
    "repeat repeat repeat repeat", "\n\n\n", "<|im_start|>user\nHello<|im_end|>\n", "Why is the sky blue?",
    "{}", "0.1 + 0.2 =",
    "She said \"", "The quick brown fox jumps over the lazy dog. " * 8)


def _texts() -> Iterator[Request]:
    """Yields each prompt to both endpoints, plain and streamed, with log probabilities."""
    usage, more = {"include_usage": True}, {"max_tokens": 16}
    yield from both("texts/completions", "/v1/completions", completions_requests.DEFAULTS,
                    {f"{i}": more | {"prompt": text, "logprobs": 1} for i, text in enumerate(TEXTS)},
                    stream_options=usage)
    yield from both("texts/chat", "/v1/chat/completions", chat_requests.DEFAULTS,
                    {f"{i}": more | {"messages": [{"role": "user", "content": text}], "logprobs": True,
                                     "top_logprobs": 1}
                     for i, text in enumerate(TEXTS)}, stream_options=usage)


def _reasoning_requests() -> Iterator[Request]:
    """Yields those to a server with `--reasoning-parser qwen3`."""
    usage = {"include_usage": True}
    tables: tuple[tuple[str, str, dict[str, Any], dict[str, dict[str, Any]], dict[str, Any]], ...] = (
        ("reasoning/chat", "/v1/chat/completions", chat_requests.DEFAULTS, CHAT, {"stream_options": usage}),
        ("reasoning/messages", "/v1/messages", MESSAGE,
         {"plain": {}, "both markers": {"messages": ECHOED, "max_tokens": 24}}, {}),
        ("reasoning/responses", "/v1/responses", RESPONSE,
         {"plain": {}, "both markers": {"input": ECHOED, "max_output_tokens": 24}}, {}),
        ("reasoning/completions", "/v1/completions", completions_requests.DEFAULTS, {"plain": {}},
         {"stream_options": usage}))
    for endpoint, path, defaults, table, stream in tables:
        for each in both(endpoint, path, defaults, table, **stream): yield replace(each, reasoning=True)
    for each in (*once("reasoning/chat", "/v1/chat/completions", chat_requests.DEFAULTS, CHAT_ONCE),
                 *once("reasoning/completions", "/v1/completions", completions_requests.DEFAULTS,
                       {"json": JSON})):
        yield replace(each, reasoning=True)


def requests() -> dict[str, Request]:
    """Returns the requests, by name."""
    every = [*completions_requests.TABLES.requests(), *chat_requests.TABLES.requests(),
             *other_requests.all_requests(), *_texts(), *_reasoning_requests()]
    table = {each.name: each for each in every}
    assert len(table) == len(every), "two requests have one name"
    return table
