"""The comparison of two servers' answers (tests/support/vllm/compare.py) finds each kind of difference."""
from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from bench.serving.vllm_differences import BEGIN, DOCS, END, make_table
from tests.support.vllm import recording
from tests.support.vllm.answers import plain, read_events
from tests.support.vllm.compare import Difference, compare
from tests.support.vllm.table import requests

REQUESTS, VLLM = requests(), recording.read_answers()


def differences(name: str, path: tuple[Any, ...], value: Any) -> list[str]:
    """Returns the differences from vLLM's answer where the value at a path is another one, or left out."""
    theirs = VLLM[name]
    ours = deepcopy(theirs)
    place: Any = ours
    for key in path[:-1]: place = place[key]
    if value is None: del place[path[-1]]
    else: place[path[-1]] = value
    assert not compare(REQUESTS[name], theirs, deepcopy(theirs))
    return [each.what for each in compare(REQUESTS[name], theirs, ours)]


CHOICE, EVENT = ("body", "choices", 0), ("events", 1, 1)
CASES: list[tuple[str, tuple[Any, ...], Any, list[str]]] = [
    ("completions: plain", ("status",), 404, ["status 200, here 404"]),
    ("completions: plain", ("type",), "text/plain", ["type application/json, here text/plain"]),
    ("completions: plain", (*CHOICE, "text"), "?", ["value choices[].text"]),
    ("completions: plain", (*CHOICE, "finish_reason"), "stop", ["value choices[].finish_reason"]),
    ("completions: plain", (*CHOICE, "stop_reason"), 5, ["null choices[].stop_reason"]),
    ("completions: plain", ("body", "metrics"), None, ["missing metrics"]),
    ("completions: plain", ("body", "more"), 1, ["extra more"]),
    ("completions: plain", ("body", "usage", "total_tokens"), 1, ["value usage.total_tokens"]),
    ("completions: plain", ("body", "usage", "total_tokens"), "1", ["kind usage.total_tokens"]),
    ("completions: plain", ("body", "created"), 7, []), ("completions: plain", ("body", "id"), "other-*",
                                                         ["value id"]),
    ("completions: logprobs", (*CHOICE, "logprobs", "token_logprobs", 0), -9.0,
     ["value choices[].logprobs.token_logprobs[]"]),
    ("completions: logprobs", (*CHOICE, "logprobs", "tokens"), ["a"], ["length choices[].logprobs.tokens",
                                                                       "value choices[].logprobs.tokens[]"]),
    ("completions: model = \"other\"", ("body", "error", "type"), "Error",
     ["value error.type NotFoundError, here Error"]),
    ("completions: model = \"other\"", ("body", "error", "message"), "Other words.", []),
    ("chat: plain, streamed", (*EVENT, "choices", 0, "delta", "content"), "?",
     ["value choices[].delta.content"]),
    ("chat: plain, streamed", (*EVENT, "choices", 0, "delta", "more"), 1, ["extra choices[].delta.more"]),
    ("chat: plain, streamed", ("events", 0), None, ["order of events"]),
    ("messages: plain, streamed", ("events", 0, 1, "message", "usage", "input_tokens"), 0,
     ["value usage.input_tokens"]),
]


@pytest.mark.parametrize(("name", "path", "value", "found"), CASES)
def test_a_changed_answer_differs_there(name: str, path: tuple[Any, ...], value: Any,
                                        found: list[str]) -> None:
    assert set(found) <= set(differences(name, path, value)) or not found
    assert bool(found) == bool(differences(name, path, value))


def test_the_order_of_fields_counts() -> None:
    name = "completions: plain"
    theirs = VLLM[name]
    choice = theirs["body"]["choices"][0]
    ours = theirs | {"body": theirs["body"] | {"choices": [dict(reversed(choice.items()))]}}
    assert [each.what for each in compare(REQUESTS[name], theirs, ours)] == ["order of fields choices[]"]


def test_random_parts_and_times_are_replaced() -> None:
    assert plain({"id": "cmpl-bd7377053cc25b13", "created": 17959, "message": "m" * 200, "text": "a1"}) == {
        "id": "cmpl-*", "created": 0, "message": "m" * 160, "text": "a1"}
    assert read_events('event: a\ndata: {"created": 5}\n\ndata: [DONE]\n\n') == [["a", {"created": 0}],
                                                            ["", "[DONE]"]]


def test_check_tells_new_and_vanished_differences() -> None:
    known = {"status 200, here 400": ["chat: a"], "extra b": ["chat: a …"]}
    assert not recording.check("chat: a", [Difference("status 200, here 400"), Difference("extra b")], known)
    assert recording.check("chat: a", [Difference("extra b")], known) == ["status 200, here 400 (gone)"]
    assert not recording.check("chat: c", [Difference("extra b")], known)
    assert not recording.check("chat: c", [], known)
    assert recording.check("chat: c", [Difference("extra d")], known) == ["extra d (new)"]
    assert recording.agreement(["chat: a", "chat: c"], known) == 0.5


def test_the_page_has_the_table_of_the_known_differences() -> None:
    assert f"{BEGIN}\n{make_table()}\n{END}" in DOCS.read_text()


def test_many_requests_of_an_endpoint_are_told_by_one() -> None:
    found = {f"chat: {i}": [Difference("extra a"), Difference("value choices[].text")] for i in range(5)}
    assert recording.shorten(found) == {"extra a": ["chat: 0 …"], "value choices[].text": list(found)}
    json.dumps(recording.shorten(found))
