"""Requests of the clients of soak.py, and what makes two answers the same one.

A `Kind` is one thing that a server does; `cases()` are all kinds with their prompts. `vary` adds what must
not change the answer: streaming, priorities, salts of the prefix cache. `Answer` collects the choices of a
completion or a chat, streamed or not; other answers are compared as the JSON that they are, without names
and times.
"""
from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
SYSTEM = "The king told the children a story about a fox, a bear and the old tree by the river. " * 6
PROMPTS = ("Once upon a time there was a little fox", "One day a bear", "Tom and his dog",
           "It rained all day, and the mouse", SYSTEM + "A bird had lost", SYSTEM + "In the morning the sun",
           SYSTEM + SYSTEM + "The girl found a key in the wood")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                           "age": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["name", "age"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds a thing.", "parameters": {
    "type": "object", "properties": {"thing": {"enum": ["key", "dog", "tree"]}}, "required": ["thing"]}}}]
# what differs between two equal answers
NAMES = frozenset({"id", "created", "created_at", "completed_at", "cached_tokens", "input_tokens",
                   "cache_read_input_tokens", "cache_creation_input_tokens", "priority"})


@dataclass(frozen=True)
class Kind:
    """Kind of request to `server`, besides the prompt. `streams`: it may be streamed. `sampled`: by a
    seed."""
    name: str
    path: str
    body: dict[str, Any]
    server: str = "lookup"
    streams: bool = True
    sampled: bool = False


LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 32}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "min_p": 0.02, "seed": 11, "max_tokens": 32}
SAMPLES: dict[str, Any] = {"n": 3, "temperature": 1.0, "top_p": 0.9, "seed": 5}
REGEX: dict[str, Any] = {"structured_outputs": {"regex": "(a|b|c| ){6}[0-9]{2}"}}
COMPLETED: dict[str, dict[str, Any]] = {
    "greedy": LONG, "logprobs": {"logprobs": 3}, "stop": {"stop": [" the", ".", "and"], "max_tokens": 40},
    "regex": REGEX, "samples": SAMPLES, "seeded": SEEDED}
KINDS = (
    *(Kind(name, COMPLETIONS, body, sampled="seed" in body) for name, body in COMPLETED.items()),
    *(Kind(f"adapter a{i}", COMPLETIONS, {"model": f"a{i}", **LONG}) for i in range(3)),
    Kind("adapter, seeded", COMPLETIONS, {"model": "a1", **SEEDED, "n": 2}, sampled=True),
    Kind("choice", COMPLETIONS, {"structured_outputs": {"choice": ["a bear", "a bird", "foxes"]}}),
    Kind("grammar", COMPLETIONS, {"structured_outputs": {"grammar": 'root ::= ("fox" | "bear") [0-9]+ "."'}}),
    Kind("adapter, regex", COMPLETIONS, {"model": "a2", **REGEX}),
    Kind("echo", COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 4}),
    Kind("beams", COMPLETIONS, {"use_beam_search": True, "n": 3, "max_tokens": 5}, streams=False),
    Kind("penalties", COMPLETIONS, {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 8,
                                    "presence_penalty": 0.2, "logit_bias": {"17": -5.0}}),
    Kind("bad words", COMPLETIONS, {"bad_words": ["e"]}),
    Kind("chat", CHAT, {}), Kind("chat, seeded", CHAT, SEEDED, sampled=True),
    Kind("chat, logprobs", CHAT, {"logprobs": True, "top_logprobs": 2}),
    Kind("json schema", CHAT, {"max_tokens": 60, "response_format": {
        "type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}),
    Kind("tools", CHAT, {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}),
    Kind("responses", "/v1/responses", {"max_output_tokens": 20}, streams=False),
    Kind("messages", "/v1/messages", {"max_tokens": 20, "model": "tales"}, streams=False),
    *(Kind(f"draft model: {name}", COMPLETIONS, body, "draft", sampled="seed" in body)
      for name, body in COMPLETED.items()),
    Kind("embedding", EMBEDDINGS, {}, "embed", streams=False))
WRONG: tuple[dict[str, Any], ...] = ({"model": "a9"}, {"logprobs": 99}, {"temperature": -1}, {"n": 0},
                                     {"structured_outputs": {"regex": "("}}, {"prompt": "a " * 3000})


@dataclass(frozen=True, eq=False)
class Case:
    """A kind with a prompt. `body` is the whole request."""
    kind: Kind
    body: dict[str, Any]


def cases(only: Iterable[str] = ()) -> list[Case]:
    """All kinds, or those whose names begin with one of `only`, with each prompt."""
    return [Case(kind, request(kind, prompt)) for kind in KINDS for prompt in PROMPTS
            if not only or kind.name.startswith(tuple(only))]


def request(kind: Kind, prompt: str) -> dict[str, Any]:
    """A request of this kind."""
    said = [{"role": "user", "content": prompt}]
    usual: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "return_token_ids": True}
    if kind.path == COMPLETIONS: return {"prompt": prompt, **usual, **kind.body}
    if kind.path == CHAT: return {"messages": said, **usual, **kind.body}
    if kind.path == "/v1/messages": return {"messages": said, "temperature": 0, **kind.body}
    if kind.path == EMBEDDINGS: return {"input": prompt, **kind.body}
    return {"input": prompt, "temperature": 0, "store": False, **kind.body}


def vary(case: Case, random_: random.Random) -> dict[str, Any]:
    """The request with what must not change its answer."""
    body = case.body
    if case.kind.path == EMBEDDINGS: return body
    if case.kind.streams: body = {**body, "stream": random_.random() < 0.8}
    if random_.random() < 0.3: body = {**body, "priority": random_.randint(-2, 2)}
    if random_.random() < 0.3: body = {**body, "cache_salt": str(random_.randrange(10_000))}
    return body


@dataclass
class Choice:
    """A choice of a completion or a chat. `values`: log probabilities."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    finish: str | None = None


class Answer:
    """Answer to a request: `add` takes its events, or the one object of an answer that is not streamed."""

    def __init__(self) -> None:
        self.choices: dict[int, Choice] = {}
        self.other: Any = None

    def add(self, event: dict[str, Any]) -> None:
        """Adds to the choices. Raises RuntimeError for an error."""
        if event.get("error"): raise RuntimeError(event["error"]["message"])
        if "choices" not in event:
            self.other = without_names(event)
            return
        for given in event["choices"]:
            to = self.choices.setdefault(given["index"], Choice())
            said = given.get("delta") or given.get("message") or given
            to.text += said.get("text") or said.get("content") or ""
            to.tokens += given.get("token_ids") or ()
            to.values += log_probabilities(given.get("logprobs"))
            for call in said.get("tool_calls") or ():
                at, function = call.get("index", len(to.calls)), call["function"]
                if at == len(to.calls): to.calls.append(function["name"])
                to.calls[at] += function.get("arguments") or ""
            to.finish = given.get("finish_reason") or to.finish

    @property
    def length(self) -> int:
        """Characters so far."""
        return sum(len(each.text) for each in self.choices.values())

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return sum(len(each.tokens) for each in self.choices.values())

    def difference(self, right: Answer, values: bool) -> str:
        """In what this answer is another one, or "". `values`: log probabilities must be equal, too."""
        for at in right.choices.keys() | self.choices.keys():
            one, other = self.choices.get(at, Choice()), right.choices.get(at, Choice())
            for name in ("finish", "tokens", "text", "calls", *(["values"] if values else [])):
                found, known = getattr(one, name), getattr(other, name)
                if found != known: return f"{name} of choice {at}: {found!r}, alone {known!r}"
        if self.other != right.other: return f"{self.other!r}, alone {right.other!r}"
        return ""


def log_probabilities(given: dict[str, Any] | None) -> list[float]:
    """All that an answer says, of completions and of chats."""
    if not given: return []
    if "content" in given:
        return [value for each in given["content"] or ()
                for value in (each["logprob"], *(top["logprob"] for top in each["top_logprobs"]))]
    tops = given["top_logprobs"] or [None] * len(given["token_logprobs"])
    return [value for token, top in zip(given["token_logprobs"], tops, strict=True)
            for value in (token, *(top or {}).values()) if value is not None]


def without_names(found: Any) -> Any:
    """JSON without names, times and what the prefix cache had."""
    if isinstance(found, list): return [without_names(each) for each in found]
    if not isinstance(found, dict): return found
    return {name: without_names(value) for name, value in found.items() if name not in NAMES}
