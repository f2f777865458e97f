"""A request that vLLM's server and ours get, and what makes tables of them."""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL = "model"
LEFT_OUT = object()         # the value of a field that the request does not have
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"enum": [1, 2]}},
          "required": ["city", "size"], "additionalProperties": False}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks at a city.", "strict": True,
                                         "parameters": SCHEMA}}
WAIT = {"type": "function", "function": {"name": "wait", "strict": True, "parameters": {
    "type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"],
    "additionalProperties": False}}}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "look"}}
GRAMMAR = 'root ::= "yes" | "no"'
CALL = r'<tool_call>\n\{"name": "look", "arguments": \{"city": "Paris", "size": 1\}\}\n</tool_call>'


@dataclass(frozen=True)
class Request:
    """A request: `body` is written as JSON unless it is bytes; None is no body. `reasoning`: to a server that
    has a parser of reasoning."""
    name: str
    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    reasoning: bool = False

    def data(self) -> bytes | None:
        """Returns the bytes of the body."""
        return self.body if self.body is None or isinstance(self.body,
                                                            bytes) else json.dumps(self.body).encode()


def request(endpoint: str, name: str, path: str, body: Any = None, method: str = "POST",
            **headers: str) -> Request:
    """Returns a request. A body that is not bytes is announced as JSON."""
    kind = {} if body is None or isinstance(body, bytes) else {"Content-Type": "application/json"}
    return Request(f"{endpoint}: {name}", method, path, body,
                   kind | {header.replace("_", "-"): value for header, value in headers.items()})


def fill(defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of `fields` over `defaults`, without those that are left out."""
    return {name: value for name, value in {**defaults, **fields}.items() if value is not LEFT_OUT}


def both(endpoint: str, path: str, defaults: Mapping[str, Any],
         table: Mapping[str, Mapping[str, Any]], **stream: Any) -> Iterator[Request]:
    """Yields each request of a table, plain and streamed, then with the fields of `stream`."""
    for name, fields in table.items():
        body = fill(defaults, fields)
        yield request(endpoint, name, path, body)
        yield request(endpoint, f"{name}, streamed", path, body | {"stream": True} | stream)


def once(endpoint: str, path: str, defaults: Mapping[str, Any],
         table: Mapping[str, Mapping[str, Any]]) -> Iterator[Request]:
    """Yields each request of a table as it is."""
    for name, fields in table.items(): yield request(endpoint, name, path, fill(defaults, fields))


@dataclass(frozen=True)
class Tables:
    """The requests of an endpoint: what is over its defaults. Those of `plain` are streamed, too; of `wrong`
    each value of each field is one."""
    name: str
    path: str
    defaults: Mapping[str, Any]
    plain: Mapping[str, Mapping[str, Any]]
    alone: Mapping[str, Mapping[str, Any]]
    wrong: Mapping[str, tuple[Any, ...]]

    def requests(self) -> Iterator[Request]:
        """Yields every request."""
        where = self.name, self.path, self.defaults
        yield from both(*where, self.plain, stream_options={"include_usage": True})
        yield from once(*where, self.alone)
        yield from wrong(*where, self.wrong)


def wrong(endpoint: str, path: str, defaults: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]
          ) -> Iterator[Request]:
    """Yields a request for each value of each field of a table."""
    for name, values in table.items():
        for value in values:
            said = "(left out)" if value is LEFT_OUT else json.dumps(value)
            yield request(endpoint, f"{name} = {said if len(said) < 60 else said[:57] + '...'}", path,
                          fill(defaults, {name: value}))
