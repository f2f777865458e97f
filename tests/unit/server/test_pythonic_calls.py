"""Calls as Python writes them, and as models write Python: no argument is left out, however cut."""
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.server.parser_case import calls_of, every_cut
from tinygrad_nv.server.parsers.parser import Content
from tinygrad_nv.server.parsers.pythonic import Pythonic

SCHEMAS: dict[str, Any] = {"send-mail": None, "f": {"type": "object", "properties": {
    "city": {"type": "string"}, "unit": {"type": "string"}, "n": {"type": "integer"}}}}
ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    # names
    ('class="a", from="b", my-arg=1, é=2, "city"="c"',
     {"class": "a", "from": "b", "my-arg": 1, "é": 2, "city": "c"}),
    # quotes
    ('city="a\nb\r\tc", unit=\'d\'', {"city": "a\nb\r\tc", "unit": "d"}),
    ('city="""a\n"b" c""", unit=\'\'\'it\'s\'\'\', n=""', {"city": 'a\n"b" c', "unit": "it's", "n": ""}),
    (r'''city="q\"u\'o\\", unit='\\', n="\u00e9\n"''', {"city": "q\"u'o\\", "unit": "\\", "n": "é\n"}),
    ('city="run \\\n  -x", unit=r"c:\\x"', {"city": "run \\\n  -x", "unit": "c:\\x"}),
    ("city='a, b) [c', unit=\"]\"", {"city": "a, b) [c", "unit": "]"}), ('city="a" "b"', {"city": "ab"}),
    # without names
    ('"Paris", "c", 5', {"city": "Paris", "unit": "c", "n": 5}), ('"Paris", n=5', {"city": "Paris", "n": 5}),
    ("Paris", {"city": "Paris"}), ("n=1, 2", {"n": 1, "city": 2}),
    ('**{"city": "x", "n": 1}', {"city": "x", "n": 1}),
    ("1, 2, 3, 4", {"city": 1, "unit": 2, "n": 3, "argument4": 4}),
    ("city: 'x', n: 3, 'c'", {"city": "x", "n": 3, "unit": "c"}), ("other: 1", {"city": "other: 1"}),
    ("{'city': 'x', 'n': 3}", {"city": "x", "n": 3}), ("{'a': 3}", {"city": {"a": 3}}),
    # digits in groups
    ("n=5,000", {"n": 5000}), ("n=-1,234,567, city='x'", {"n": -1234567, "city": "x"}),
    ("n=5,00, a=1,2000, b=1,a1,", {"n": 5, "city": 0, "a": 1, "unit": 2000, "b": 1, "argument6": "a1"}),
    # without quotes
    ("city=San Francisco, CA, n=5", {"city": "San Francisco, CA", "n": 5}),
    ("city=007, n=007", {"city": "007", "n": 7}),
    ("city=it's fine (so far), n=2", {"city": "it's fine (so far)", "n": 2}),
    ("n=2*3, city=nan", {"n": "2*3", "city": "nan"}),
    ("a=[red, blue], b={k: v}, city=", {"a": ["red", "blue"], "b": {"k": "v"}, "city": ""}),
    # literals
    ("a=[1, [2, {\"a\": (1, 2), 'b': null}]], b={\"x\": true, 1: False}, c=None, d=-1.5, e=1e3, f={1}",
     {"a": [1, [2, {"a": [1, 2], "b": None}]], "b": {"x": True, "1": False}, "c": None, "d": -1.5,
      "e": 1000.0, "f": [1]}),
    ("n=1,", {"n": 1}), ("", {})]


@pytest.mark.parametrize(("text", "wanted"), ARGUMENTS)
def test_every_argument_is_passed_on(text: str, wanted: dict[str, Any]):
    events = every_cut(lambda: Pythonic(SCHEMAS), f"[f({text}), send-mail(to=1)]")
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(events)] == [
        ("f", wanted), ("send-mail", {"to": 1})]
    assert len(calls_of(events)) == len({event.index for event in events if not isinstance(event, Content)})


@pytest.mark.parametrize(("text", "content", "count"), [
    ("[send-mail(1)]", "[send-mail(1)]", 0),                # no parameter for it
    ("[f(n=1), send-mail(1, a=2)]", " send-mail(1, a=2)]", 1),
    ("[f(n=1),]", "", 1), ('[f(city="a" n=1)]', '[f(city="a" n=1)]', 0),
    ("[f(n=f(n=1))]", "[f(n=f(n=1))]", 0), ('[f(city="a', '[f(city="a', 0), ("[f(n=1), f(n=", " f(n=", 1)])
def test_what_cannot_be_passed_on_is_shown(text: str, content: str, count: int):
    events = every_cut(lambda: Pythonic(SCHEMAS), text)
    assert "".join(each.text for each in events if isinstance(each, Content)) == content
    assert [call.arguments for call in calls_of(events)] == ['{"n": 1}'] * count


@pytest.mark.parametrize("text", [
    "<function_calls>\nf(n=1)\nf(city=\"a\nb\")\n</function_calls>",
    "<function_calls>[f(n=1), f(city='a\\nb')]",
    "<|python_start|>[f(n=1), f(city='a\nb')]<|python_end|>"])
def test_calls_between_markers(text: str):
    events = every_cut(lambda: Pythonic(SCHEMAS), text)
    assert [json.loads(call.arguments) for call in calls_of(events)] == [{"n": 1}, {"city": "a\nb"}]
    assert not [each for each in events if isinstance(each, Content)]
