"""Differences between two servers' answers to one request.

`compare` returns differences, each a text that says what differs and where, without the values: equal texts
are the same difference. A path is that of an answer that is not streamed. The order of fields counts. Of
identifiers the prefixes are compared, of times and messages of errors the types, of arguments the JSON. A
stream is compared in three ways: the fields of its events, their order, and what they add up to.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.support.vllm.answers import TIMES, Answer
from tests.support.vllm.request import Request

LOGPROB_BOUND = 1e-3            # of log probabilities, and of scores, absolute: both sides compute in float32
BY_KIND = TIMES | {"message", "signature", "system_fingerprint", "version", "owned_by", "root", "detail",
                              "cached_tokens", "cache_read_input_tokens"}
BY_TOKEN = ("top_logprobs[]", "prompt_logprobs[]")      # dictionaries whose names are tokens
JOINED = {"content", "reasoning", "reasoning_content", "text", "arguments", "partial_json", "thinking"}
JSONS = ("arguments", "partial_json")       # texts that are compared as JSON
LABELS = ("role", "content", "reasoning", "tool_calls", "text")        # of a chunk
FINISH = ("finish_reason", "stop_reason", "status")     # finish reasons, and the state of a response
PLACE = re.compile(r"\.\d+(?=\.|$)")                       # of a choice or a call in what a stream adds up to
WHOLE = re.compile(r"^(?:@[^.]*\.)?(?:(?:response|message)\.)?")        # an event, and the whole answer in it
TEXTS = ("text", "content", "reasoning", "arguments", "name", "input", "token_ids", "tokens", "prompt",
         "delta",
         "count", "partial_json", "thinking")


@dataclass(frozen=True)
class Difference:
    """A difference of one kind: `what` says which; the values are for reports."""
    what: str
    theirs: Any = None
    ours: Any = None

    @property
    def counts(self) -> bool:
        """Whether it is of status, finish reason or greedy text, by which agreement is measured."""
        kind, _, path = self.what.partition(" ")
        place, _, last = path.removesuffix(" here").rpartition(".")
        if kind not in ("value", "length") and not (kind == "null" and place): return kind == "status"
        return last.removesuffix("[]") in (*FINISH, *TEXTS) and "logprobs" not in place


def compare(request: Request, theirs: Answer, ours: Answer) -> list[Difference]:
    """Returns the differences, each kind once."""
    found: dict[str, Difference] = {}
    for each in _compare(theirs, ours): found.setdefault(each.what, each)
    return list(found.values())


def _compare(theirs: Answer, ours: Answer) -> Iterator[Difference]:
    if theirs["status"] != ours["status"]:
        yield Difference(f"status {theirs['status']}, here {ours['status']}", _short(theirs), _short(ours))
        return
    if theirs["type"] != ours["type"]:
        yield Difference(f"type {theirs['type'] or 'none'}, here {ours['type'] or 'none'}")
    elif "events" in theirs: yield from _compare_streams(theirs["events"], ours["events"])
    else: yield from walk(theirs["body"], ours["body"])


def _short(answer: Answer) -> Any:
    body = answer.get("body", answer.get("events", [None])[0])
    return body.get("error", body) if isinstance(body, dict) else body


def walk(theirs: Any, ours: Any, path: str = "", values: bool = True) -> Iterator[Difference]:
    """Yields the differences of two values at a path. Without `values`, those of their fields alone."""
    name = path.rpartition(".")[2]
    if (theirs is None) != (ours is None):
        kind = "empty" if "" in (theirs, ours) else "null"
        yield Difference(f"{kind} {path}{'' if theirs is None else ' here'}", theirs, ours)
    elif isinstance(theirs, dict) and isinstance(ours, dict):
        yield from _walk_fields(theirs, ours, path, values)
    elif isinstance(theirs, list) and isinstance(ours, list):
        if values and len(theirs) != len(ours): yield Difference(f"length {path}", theirs, ours)
        for one, other in zip(theirs, ours, strict=False): yield from walk(one, other, f"{path}[]", values)
    elif _is_number(theirs) and _is_number(ours) and ("logprob" in path or name == "score"):
        if values and abs(theirs - ours) > LOGPROB_BOUND: yield Difference(f"value {path}", theirs, ours)
    elif type(theirs) is not type(ours): yield Difference(f"kind {path}", theirs, ours)
    elif values and name not in BY_KIND and theirs != ours:
        if name in JSONS and _same_json(theirs, ours): return
        told = f" {theirs}, here {ours}" if path in ("error.type", "error.code") else ""
        if path == "error.param": told = " without body" if theirs == f"body.{ours}" else ""
        yield Difference(f"value {path}{told}", theirs, ours)


def _walk_fields(theirs: dict[str, Any], ours: dict[str, Any], path: str,
                 values: bool) -> Iterator[Difference]:
    if path.endswith(BY_TOKEN) and "top_logprobs" not in theirs and "logprob" not in theirs:
        if values and theirs.keys() != ours.keys(): yield Difference(f"value {path}", theirs, ours)
        for name in theirs.keys() & ours.keys(): yield from walk(theirs[name], ours[name], f"{path}.*",
                                                            values)
        return
    prefix = f"{path}." if path else ""
    for name in theirs:
        if name not in ours: yield Difference(f"missing {prefix}{name}", theirs[name])
        else: yield from walk(theirs[name], ours[name], prefix + name, values)
    for name in ours:
        if name not in theirs: yield Difference(f"extra {prefix}{name}", None, ours[name])
    first, second = ([name for name in every if name in theirs and name in ours] for every in (theirs, ours))
    if first != second: yield Difference(f"order of fields {path}".rstrip(), first, second)


def _same_json(one: str, other: str) -> bool:
    try: return bool(json.loads(one) == json.loads(other))
    except ValueError: return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# **** streams ****

def _compare_streams(theirs: list[list[Any]], ours: list[list[Any]]) -> Iterator[Difference]:
    first, second = _by_label(theirs), _by_label(ours)
    for label in first.keys() & second.keys():
        yield from map(_without_event, walk(first[label], second[label], values=False))
    if (order := _orders(theirs)) != _orders(ours): yield Difference("order of events", order, _orders(ours))
    for each in map(_without_event, walk(fold(theirs), fold(ours))):
        # the fields of events are compared above
        if each.counts or each.what.partition(" ")[0] in ("value", "length", "kind"): yield each


def _without_event(found: Difference) -> Difference:
    """Returns the difference with the place that it has in an answer that is not streamed."""
    kind, _, path = found.what.partition(" ")
    return replace(found, what=f"{kind} {WHOLE.sub('', PLACE.sub('[]', path))}")


def _list_labels(event: list[Any]) -> list[str]:
    """Returns the labels of an event: its name, or the fields that a chunk has, in the order in which several
    chunks would have them. How many tokens are in one depends on the time that they take."""
    name, data = event
    if name or not isinstance(data, dict): return [name or str(data)]
    labels = []
    for choice in data.get("choices", ()):
        delta = choice.get("delta") or {"text": choice.get("text")}
        labels += [key for key in LABELS if delta.get(key)] + ["finish"] * bool(choice.get("finish_reason"))
    if data.get("choices"): return list(dict.fromkeys(labels))
    return ["usage" if data.get("usage") else "error" if "error" in data else "nothing"]


def _by_label(events: list[list[Any]]) -> dict[str, Any]:
    """Returns the first event of each kind; of chunks the first delta of each kind, and what is around it in
    the last chunk and in others."""
    found: dict[str, Any] = {}
    for event in events:
        name, data = event
        if name or not isinstance(data, dict) or not data.get("choices"):
            found.setdefault(" ".join(_list_labels(event)), data)
            continue
        choice = data["choices"][0]
        for label in _list_labels(event):
            if label in choice.get("delta", ()): found.setdefault(label,
                                                            {"choices": [{"delta": choice["delta"]}]})
        around = {key: value for key, value in choice.items() if key not in ("delta", "text")}
        found.setdefault("last" if choice.get("finish_reason") else "chunk", data | {"choices": [around]})
    return found


def _orders(events: list[list[Any]]) -> dict[str, list[str]]:
    """Returns what the events of each choice carry in their order, equal neighbours once."""
    orders: dict[str, list[str]] = {}
    for event in events:
        choices = event[1].get("choices") if isinstance(event[1], dict) else None
        order = orders.setdefault(str(choices[0].get("index", "")) if choices else "", [])
        order += [each for each in _list_labels(event) if not order or order[-1] != each]
    return orders


def fold(events: list[list[Any]]) -> dict[str, Any]:
    """Returns what the events of a stream add up to: texts are joined, of other values the last counts."""
    whole: dict[str, Any] = {}
    for name, data in events:
        if not isinstance(data, dict): continue
        if name: _fold_event(whole, name, data)
        else: _fold_into(whole, {key: value for key, value in data.items() if key not in BY_KIND | {"id"}})
    return whole


def _fold_event(whole: dict[str, Any], name: str, data: dict[str, Any]) -> None:
    place = f"@{name.replace('.', '/')} {data.get('output_index', data.get('index', ''))}".strip()
    data = {key: value for key, value in data.items() if key != "sequence_number"}
    if not place.partition(" ")[0].endswith("delta"): whole.setdefault(place, []).append(data)
    elif isinstance(data.get("delta"), str): whole[place] = whole.get(place, "") + data["delta"]
    else: _fold_into(whole.setdefault(place, {}), {"delta": data.get("delta"), "usage": data.get("usage")})


def _fold_into(whole: dict[str, Any], data: dict[str, Any]) -> None:
    for key, value in data.items():
        if value is None: whole.setdefault(key, None)
        elif isinstance(value, dict): _fold_into(_container(whole, key, {}), value)
        elif key in ("choices", "tool_calls"):
            for each in value: _fold_into(_container(_container(whole, key, {}), str(each.get("index", 0)),
                                                     {}), each)
        elif isinstance(value, list): _container(whole, key, []).extend(value)
        elif key in JOINED and isinstance(value, str): whole[key] = (whole.get(key) or "") + value
        else: whole[key] = value


def _container(whole: dict[str, Any], key: str, empty: Any) -> Any:
    if whole.get(key) is None: whole[key] = empty
    return whole[key]
