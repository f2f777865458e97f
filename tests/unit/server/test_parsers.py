"""Parsers of reasoning and tool calls, with their texts cut at every place. Calls as Python writes them,
and as models write Python: no argument is left out, however cut."""
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.server.parser_case import calls_of, every_cut, fed
from tinygrad_nv.server.parsers.json_calls import Hermes
from tinygrad_nv.server.parsers.parser import Content, Event, Reasoning
from tinygrad_nv.server.parsers.pythonic import Pythonic
from tinygrad_nv.server.parsers.table import NONE, REASONING, TOOLS, Answer, answer_parser, detect, markers

SCHEMAS: dict[str, Any] = {"f": {"type": "object", "properties": {
    "s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "e": {"enum": ["a", "b"]},
    "m": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "w": {"type": ["string", "null"]}}}, "g": None}
ANSWER = Answer(schemas=SCHEMAS)


def parsed(text: str, tools: str = NONE, reasoning: str = NONE, answer: Answer = ANSWER) -> list[Event]:
    return every_cut(lambda: answer_parser(reasoning, tools, answer), text)


def content(events: list[Event]) -> str: return "".join(e.text for e in events if isinstance(e, Content))


def thoughts(events: list[Event]) -> str: return "".join(e.text for e in events if isinstance(e, Reasoning))


TWO = [("f", {"a": "}</tool_call>\"", "b": [1, {}]}), ("g", {})]
F = '{"a": "}</tool_call>\\"", "b": [1, {}]}'
CALLS = [
    ("hermes", f'see\n\n<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>\n'
     '<tool_call>{"arguments": null, "name": "g"}</tool_call>\n', "see\n\n", TWO),
    ("hermes", f'<tool_call>{{"name": "f", "parameters": {F}}}</tool_call> and <tool_call>{{"name":"g"}}',
     " and", TWO),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "id": "x", "name": "f"}</tool_call>', "",
     [("f", {"a": 1})]),
    ("llama3_json", f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {F}}} ; '
     '{"name": "g", "parameters": {}}', "", TWO),
    ("llama3_json", f'\n{{"name": "f", "parameters": {F}}}; then', "; then", TWO[:1]),
    ("mistral", f'ok [TOOL_CALLS] [{{"name": "f", "arguments": {F}}}, {{"name": "g", "arguments": {{}}}}]',
     "ok", TWO),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]a1[ARGS]{F}[TOOL_CALLS]g{{}}", "", TWO),
    ("qwen3_coder", "hm <tool_call>\n<function=f>\n<parameter=s>\nPa\"r\nis\n\n</parameter>\n"
     "<parameter=n>\n3\n</parameter>\n<parameter=o>\n{\"x\": [1]}\n</parameter>\n"
     "<parameter=e>\na\n</parameter>\n<parameter=m>\nnull\n</parameter>\n<parameter=w>\n7\n</parameter>\n"
     "<parameter=free>\n5 < 6\n</parameter>\n</function>\n</tool_call>",
     "hm", [("f", {"s": 'Pa"r\nis\n', "n": 3, "o": {"x": [1]}, "e": "a", "m": None, "w": "7",
                   "free": "5 < 6"})]),
    ("qwen3_xml", "<function=g></function><tool_call><function=f><parameter=n>many</parameter><parameter=s>"
     "</parameter></tool_call>", "", [("g", {}), ("f", {"n": "many", "s": ""})]),
    ("pythonic", '[f(a="x, )\\"]", b=[1, {"k": None}], c=-2.5, d=true, e={}), g()]', "",
     [("f", {"a": 'x, )"]', "b": [1, {"k": None}], "c": -2.5, "d": True, "e": {}}), ("g", {})]),
    ("llama4_pythonic", "<|python_start|>[ g( ) ]<|python_end|>", "", [("g", {})]),
    ("openai", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
     f"to=functions.f <|constrain|>json<|message|>{F}<|call|><|start|>assistant to=functions.g<|channel|>"
     "commentary json<|message|><|call|>", "", TWO),
]


@pytest.mark.parametrize(("name", "text", "said", "calls"), CALLS,
                         ids=[f"{c[0]}-{i}" for i, c in enumerate(CALLS)])
def test_calls(name: str, text: str, said: str, calls: list[tuple[str, Any]]):
    events = parsed(text, name, "openai" if name == "openai" else NONE)
    assert content(events) == said
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(events)] == calls


@pytest.mark.parametrize(("name", "text"), [
    ("hermes", "a < b <tool_c"), ("hermes", '<tool_call>{"nam": 3}</tool_call> x'),
    ("hermes", "<tool_call>no</tool_call>"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}'),
    ("hermes", '<tool_call>{"name": "f", "argu'), ("hermes", " white \n"),
    ("llama3_json", ' {"a": 1} '), ("llama3_json", "Once {"),
    ("llama3_json", '<|python_tag|> {"name": "f", '),
    ("llama3_json", "<|python"), ("mistral", "[TOOL_CALLS"), ("qwen3", "<tool_call>\nhm"),
    ("qwen3", "<function=f"),
    ("pythonic", "[1, 2]"), ("pythonic", "[g(1), f()]"), ("pythonic", "[f(open('x'))]"),
    ("pythonic", "[f(a=open('x'))]"),
    ("pythonic", "[see (this"),
    ("openai", "plain < text"), ("openai", "<"),
])
def test_what_is_no_call_stays_text(name: str, text: str):
    assert parsed(text, name) == [Content(text)]


@pytest.mark.parametrize(("name", "text", "start"), [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "ha', '{"a": "ha'),
    ("llama3_json", '{"name": "f", "parameters": {"a": [1', '{"a": [1'),
    ("mistral", '[TOOL_CALLS]f{"a', '{"a'),
    ("qwen3", "<tool_call><function=f><parameter=s>\nPar", '{"s": "Par'),
    ("pythonic", '[f(a=1, b="x', '{"a": 1'), ("openai", '<|channel|>commentary to=functions.f<|message|>{"a',
                                              '{"a'),
])
def test_arguments_are_cut_where_the_answer_is(name: str, text: str, start: str):
    [call] = calls_of(parsed(text, name))
    assert (call.name, call.arguments) == ("f", start)


def test_arguments_are_passed_on_while_they_are_written():
    """Only what may be the start of a marker, or the end of a string, is held back."""
    texts = {"hermes": '<tool_call>{"name": "f", "arguments": {"s": "one two',
             "llama3_json": '{"name": "f", "parameters": {"s": "one two',
             "mistral": '[TOOL_CALLS]f[ARGS]{"s": "one two', "qwen3": "<function=f><parameter=s>one two",
             "openai": '<|channel|>commentary to=functions.f<|message|>{"s": "one two'}
    for name, text in texts.items():
        assert calls_of(answer_parser(NONE, name, ANSWER).feed(text))[0].arguments == '{"s": "one two', name
    assert calls_of(answer_parser(NONE, "pythonic",
                                  ANSWER).feed("[f(s='one', n="))[0].arguments == '{"s": "one"'


def test_half_a_surrogate_pair_stays_escaped():
    for name, text in (("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}'),
                       ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}'),
                       ("pythonic", "[f(a='\\ud800')]")):
        [call] = calls_of(parsed(text, name))
        assert call.arguments.encode() == b'{"a": "\\ud800"}', name
    assert calls_of(parsed('<tool_call>{"name": "\\ud800"}', "hermes"))[0].name == "\\ud800"


# **** reasoning ****

IN, OUT = Answer("user\n<think>\n"), Answer("assistant\n<think>\n\n</think>\n\n")
THOUGHT = [
    ("think", "<think>\nhm</think>\n\nyes", Answer(), "\nhm", "\n\nyes"),
    ("think", " hi <think>x", Answer(), "", " hi <think>x"),
    ("think", "hm</think>yes", IN, "hm", "yes"), ("think", "hm", IN, "hm", ""),
    ("think", "hm", OUT, "", "hm"),
    ("think", "<thi", Answer(), "", "<thi"), ("think", "<think>a</thin", Answer(), "a</thin", ""),
    ("qwen3", "<think>hm</think>yes", Answer(), "hm", "yes"), ("qwen3", "hm", Answer(), "hm", ""),
    ("qwen3", "hm", OUT, "", "hm"), ("qwen3", "hm", Answer(thinking=False), "", "hm"),
    ("qwen3", "<think>hm</think>yes", Answer(thinking=False), "hm", "yes"),
    ("deepseek_r1", "hm</think>yes</think>", Answer(), "hm", "yes</think>"),
    ("deepseek_r1", "hm", OUT, "", "hm"),
    ("deepseek_r1", "<think>hm</think>yes", Answer(), "hm", "yes"), ("deepseek_r1", "hm", Answer(), "hm", ""),
    ("qwen3", " more</think>yes", Answer("<think>so", True), " more", "yes"),
    ("deepseek_r1", " more", Answer("<think>so</think>yes", True), "", " more"),
    ("mistral", "[THINK]hm[/THINK]yes", Answer(), "hm", "yes"),
    ("seed_oss", "<seed:think>hm</seed:think>yes", Answer(), "hm", "yes"),
    ("openai", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>pre "
     "<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>", Answer(), "hm", "pre yes"),
    ("openai_gptoss", "<|channel|>analysis<|message|>hm", Answer(), "hm", ""),
]


@pytest.mark.parametrize(("name", "text", "answer", "thought", "said"), THOUGHT,
                         ids=[f"{t[0]}-{i}" for i, t in enumerate(THOUGHT)])
def test_reasoning(name: str, text: str, answer: Answer, thought: str, said: str):
    events = parsed(text, NONE, name, answer)
    assert (thoughts(events), content(events)) == (thought, said)


def test_reasoning_then_calls():
    text = 'hm <tool_call> hm</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    first = parsed(text, "hermes", "deepseek_r1")
    assert (thoughts(first), content(first)) == ("hm <tool_call> hm", "")
    assert [call.name for call in calls_of(first)] == ["f"]
    # Qwen's newer models leave their reasoning with a call
    events = parsed('hm <tool_call>{"name": "f", "arguments": {}}</tool_call>', "hermes", "qwen3",
                    Answer(IN.prefix, schemas=SCHEMAS))
    assert (thoughts(events), [call.name for call in calls_of(events)]) == ("hm ", ["f"])
    assert thoughts(parsed("hm <tool_call>", "hermes", "qwen3", IN)) == "hm <tool_call>"


def test_without_tools_calls_are_text():
    for name, text, _, _ in CALLS:
        if name != "openai": assert parsed(text, name, NONE, Answer()) == [Content(text)]


# **** which parser ****

@pytest.mark.parametrize(("template", "reasoning", "tools"), [
    ("<|channel|>", "openai_gptoss", "openai"), ("<tool_call><function=x <think>", "think", "qwen3_coder"),
    ("<tool_call> </think>", "think", "hermes"), ("[THINK] [TOOL_CALLS]", "mistral", "mistral"),
    ("<|python_start|> ipython", "none", "pythonic"), ("ipython", "none", "llama3_json"),
    ("{{ messages }}", "none", "none"),
])
def test_a_template_tells_its_parsers(template: str, reasoning: str, tools: str):
    assert (detect(REASONING, template), detect(TOOLS, template)) == (reasoning, tools)


def test_every_parser_has_markers_and_takes_any_text():
    for tools in TOOLS:
        for reasoning in (*REASONING, NONE):
            assert markers(reasoning, tools)
            events = fed(lambda r=reasoning, t=tools: answer_parser(r, t, OUT), ["a", " b"])
            assert content(events) == "a b"


@pytest.mark.parametrize(("text", "wanted"), [
    ("Let me see. \n<tool_call>\n{}\n</tool_call>\n<tool_call>{}</tool_call>", "Let me see. \n"),
    ("\n<tool_call>{}</tool_call>\n", ""), ("a <tool_call>{}</tool_call> b ", "a  b")])
def test_text_before_the_first_call_keeps_its_end(text: str, wanted: str):
    """White space alone, between calls and after the last one is no content, as in vLLM."""
    text = text.replace("{}", '{"name": "f", "arguments": {}}')
    for pieces in ([text], [*text]):
        events = fed(Hermes, pieces)
        assert content(events) == wanted
        assert calls_of(events)


FUNCTIONS: dict[str, Any] = {"send-mail": None, "f": {"type": "object", "properties": {
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
    events = every_cut(lambda: Pythonic(FUNCTIONS), f"[f({text}), send-mail(to=1)]")
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(events)] == [
        ("f", wanted), ("send-mail", {"to": 1})]
    assert len(calls_of(events)) == len({event.index for event in events if not isinstance(event, Content)})


@pytest.mark.parametrize(("text", "content", "count"), [
    ("[send-mail(1)]", "[send-mail(1)]", 0),                # no parameter for it
    ("[f(n=1), send-mail(1, a=2)]", " send-mail(1, a=2)]", 1),
    ("[f(n=1),]", "", 1), ('[f(city="a" n=1)]', '[f(city="a" n=1)]', 0),
    ("[f(n=f(n=1))]", "[f(n=f(n=1))]", 0), ('[f(city="a', '[f(city="a', 0), ("[f(n=1), f(n=", " f(n=", 1)])
def test_what_cannot_be_passed_on_is_shown(text: str, content: str, count: int):
    events = every_cut(lambda: Pythonic(FUNCTIONS), text)
    assert "".join(each.text for each in events if isinstance(each, Content)) == content
    assert [call.arguments for call in calls_of(events)] == ['{"n": 1}'] * count


@pytest.mark.parametrize("text", [
    "<function_calls>\nf(n=1)\nf(city=\"a\nb\")\n</function_calls>",
    "<function_calls>[f(n=1), f(city='a\\nb')]",
    "<|python_start|>[f(n=1), f(city='a\nb')]<|python_end|>"])
def test_calls_between_markers(text: str):
    events = every_cut(lambda: Pythonic(FUNCTIONS), text)
    assert [json.loads(call.arguments) for call in calls_of(events)] == [{"n": 1}, {"city": "a\nb"}]
    assert not [each for each in events if isinstance(each, Content)]
