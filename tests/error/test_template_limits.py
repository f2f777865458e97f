"""Chat templates and regular expressions that would run, or grow, without end: what is refused, and what
must run."""
from __future__ import annotations

import threading
import time
from typing import Any

import jinja2.sandbox
import pytest

from tinygrad_nv.engine.text import template_budget
from tinygrad_nv.engine.text.chat_template import render_template
from tinygrad_nv.engine.text.content_format import format_contents
from tinygrad_nv.engine.text.template_budget import Meter, TemplateLimit
from tinygrad_nv.errors import ModelError, RequestError, TokenizerError
from tinygrad_nv.models.peft import pattern_of, targets_of
from tinygrad_nv.quant.readers.compressed_tensors import CompressedTensorsReader
from tinygrad_nv.quantize.directory import _matches as is_ignored
from tinygrad_nv.regexes import MAX_PATTERNS, compile_pattern
from tinygrad_nv.server.parsers.schema_values import find

MESSAGES = [{"role": "user", "content": f"héllo {i}", "tags": ["a", {"b": i}]} for i in range(5)]
LOOPS = "{% for i in range(60) %}STEP{% endfor %}"


def render(template: str, **more: Any) -> str:
    return render_template(template, False, lambda: {"messages": MESSAGES, **more})


def doubling(step: str, start: str = "'aaaaaaaa'") -> str:
    """A template that replaces ns.s by what `step` makes of it, 60 times."""
    step = step if "{%" in step else f"{{% set ns.s = {step} %}}"
    return f"{{% set ns = namespace(s={start}) %}}" + LOOPS.replace("STEP", step) + "{{ ns.s }}"


BIG = ["'a' * 10**10", "10**10 * 'a'", "[0] * 10**10", "[messages] * 10**6", "10 ** (10 ** 9)",
       "7**60000*7**60000",
       "'%1000000000d' % 1", "'%*d' % (10**9, 1)", "'%.*f' % (10**9, 1)", "'%(a)1000000000d' % {'a': 1}",
       "'{:>1000000000}'.format(1)", "'{:{}}'.format(1, 10**9)", "'{x:>1000000000}'.format_map({'x': 1})",
       "('{:>1000000000}'|safe).format(1)", "('{:>1000000000}'|attr('format'))(1)",
       "'%1000000000s'|format(1)",
       "'a'|center(10**10)", "['a']|map('center', 10**10)|list", "'a'.center(10**10)", "'a'['ljust'](10**10)",
       "'a'.rjust(10**10)", "'a'.zfill(10**10)", "('a'|e).center(10**10)", "('\\t'*9999).expandtabs(9999)",
       "[1]|batch(10**9, 'x')|list", "[1]|slice(10**9, 'x')|list", "('a\\n'*9999)|indent(10**9)",
       "('a\\n'*9999)|indent('x'*9999)", "('a'*9999)|replace('a', 'b'*9999)",
       "('a'*9999).replace('', 'b'*9999)",
       "('x'*9999).join('a'*9999)", "('a'*9999).translate({97: 'b'*9999})", "range(9999)|join('x'*9999)",
       "[1]|tojson(indent=10**9)", "[1]|tojson(separators=('x'*10**6, ''))", "1|round(-10**9)",
       "2.5|round(10**9, 'ceil')", "lipsum(n=10**9)", "('a '*99999)|urlize", "('a '*99999)|wordwrap(1)",
       "('a'*9999999).rfind('b' ~ 'a'*999999)", "('a'*32000000).split('a')",
       "('a'*30000000) ~ ('b'*30000000)"]
GROWING = ["ns.s ~ ns.s", "ns.s + ns.s", "ns.s + 'b' + ns.s", "[ns.s, ns.s]|join", "'%s%s' % (ns.s, ns.s)",
           "'{0}{0}'.format(ns.s)", "ns.s|replace('a', 'aa')", "(ns.s ~ '\"')|tojson ~ ns.s",
           "ns.s|format ~ ns.s",
           "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}", "ns.s.join([ns.s, ns.s])",
           "{% set x %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}{% set ns.s = x %}"]
SHARED = ["[ns.s, ns.s]", "(ns.s, ns.s)", "dict(a=ns.s, b=ns.s)", "[ns.s] * 2", "cycler(ns.s, ns.s).items",
          "{% macro f() %}{% set ns.s = varargs %}{% endmacro %}{{ f(ns.s, ns.s) }}"]
ENDLESS = {"steps": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
           "recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
                        "{{ f(60) }}",
           "work": "{% set t = 'a '*999999 %}{% for i in range(99999) %}"
                   "{% set x = t.replace('a','b') %}{% endfor %}",
           "lists": "{% set l = range(99999)|list %}{% for i in range(99999) %}{{ -1 in l }}{% endfor %}"}


@pytest.mark.parametrize("expression", BIG)
def test_one_operation_that_makes_too_much(expression: str) -> None:
    with pytest.raises(TokenizerError, match="the chat template"): render("{{ " + expression + " }}")


def test_what_grows_in_a_loop_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_GROWTH", 64 << 20)
    monkeypatch.setattr(template_budget, "CHECK_BYTES", 8 << 20)
    with pytest.raises(TemplateLimit, match="keeps too many texts"):
        render("{% set ns = namespace(s=[]) %}{% set t = 'a '*999999 %}{% for i in range(9999) %}"
               "{% set ns.s = ns.s + [t[1:]] %}{% endfor %}")
    monkeypatch.setenv("NV_TEMPLATE_CHARS", "100000")
    monkeypatch.setattr(template_budget, "MAX_HELD", 1 << 14)
    for step in GROWING:
        with pytest.raises(TemplateLimit, match=r"makes a text of|keeps too many"): render(doubling(step))
    for step in SHARED:
        with pytest.raises(TemplateLimit, match=r"holds itself many times|entries"):
            render(doubling(step, "(1,)" if step[0] == "(" or "varargs" in step else "[1]"))
    with pytest.raises(TemplateLimit, match="nests lists without end"):
        render("{% set ns = namespace(s=()) %}{% for i in range(999) %}{% set ns.s = (ns.s,) %}{% endfor %}")
    with pytest.raises(TemplateLimit, match=r"power|thousands of digits"): render(doubling("ns.s * ns.s",
                                                                                           "9"))


@pytest.mark.parametrize("kind", ENDLESS)
def test_endless_work_ends_with_words(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.process_time()
    monkeypatch.setenv("NV_TEMPLATE_SECONDS", "5" if kind == "steps" else "1")     # steps come first
    with pytest.raises(TemplateLimit) as error: render(ENDLESS[kind])
    assert time.process_time() - begin < 2.5
    words = "10,000,000 iterations" if kind == "steps" else "runs for more than 1 seconds"
    assert words in str(error.value)
    assert "NV_TEMPLATE_SECONDS" in error.value.fix
    assert render("{{ messages[1].content }}") == "héllo 1"     # nothing is left of the interruption


def test_the_probe_of_content_formats_ends_at_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.process_time()
    monkeypatch.setenv("NV_TEMPLATE_SECONDS", "1")
    with pytest.raises(TemplateLimit):
        format_contents([{"role": "user", "content": "hi"}], "auto", ENDLESS["recursion"], {})
    assert time.process_time() - begin < 2.5


def test_renderings_of_one_conversation_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each role that the content format is found out for has renderings of its own."""
    loop = "{% set t = 'a '*999999 %}{% for i in range(200) %}{% set x = t.replace('a','b') %}{% endfor %}"
    begin = time.process_time()
    monkeypatch.setenv("NV_TEMPLATE_SECONDS", "1")
    talk = [{"role": role, "content": "hi"} for role in ("user", "assistant", "tool", "system")]
    with pytest.raises(TemplateLimit, match="runs for more than 1 seconds"):
        render_template(loop, False, lambda: {"messages": format_contents(talk, "auto", loop, {})})
    assert time.process_time() - begin < 2.5


def test_a_busy_machine_ends_a_template_by_the_time_that_passes() -> None:
    used, passed = 0.0, time.monotonic()
    meter = Meter(lambda: used, 3, 1)
    for used, later, over in ((3.1, 0, True), (1, 3.9, False), (1, 4.1, True), (0.2, 99, False)):
        meter.began_at = passed - later
        assert meter.is_over() is over, (used, later)


def test_threads_render_beside_an_endless_template(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    def attack() -> None:
        try: render(ENDLESS["lists"])
        except TemplateLimit as error: found.append(error.found)
    monkeypatch.setenv("NV_TEMPLATE_SECONDS", "1")
    thread = threading.Thread(target=attack)
    thread.start()
    while thread.is_alive(): assert render("{{ messages|length }}") == "5"
    assert len(found) == 1


@pytest.mark.parametrize(("template", "words"), [
    ("x" * 300_000, "has 300,000 characters"), ("{{ a }}" * 9999, "characters of Python"),
    ("{{ " + "(" * 9999, "failed"),
    ("{{ " + "+".join("1" * 9999) + "}}",
    "failed"), ("{{ 0x" + "f" * 9999 + " * 2 }}", "digits"), ("{% include 'a' %}", "no loader"),
    ("{{ (1).to_bytes(9, 'big') }}", "int.to_bytes is not"), ("{{ raise_exception('x' * 99999) }}", "x…")])
def test_templates_that_are_refused(template: str, words: str) -> None:
    with pytest.raises(TokenizerError, match="the chat template") as error: render(template)
    assert words in str(error.value)
    assert len(str(error.value)) < 2000


HONEST = ["{{ messages[1:3]|length }}{{ messages[::-1][0].content }}",
          "{{ '%05d|%s' % (3, messages[0].content) }}",
          "{% for m in messages %}{{ loop.index0 % 2 }}{{ m.role + ':' + m['content']|trim + '\\n' }}"
          "{% endfor %}",
          "{{ '{:>5}|{a}'.format(1, a=2) }}{{ 'a'.center(9) }}{{ 'x'|center(9) }}"
          "{{ 'a\\nb'|indent(2, true) }}",
          "{{ messages|map(attribute='content')|join(', ') }}{{ [1, 2]|sum }}{{ [[1], [2]]|sum(start=[]) }}",
          "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 'a b c'.split() }}"
          "{{ 2 ** 10 }}",
          "{{ messages[0]|items|list }}{{ messages[0].tags }}{{ messages.missing is defined }}{{ 7 // 2 }}",
          "{% set ns = namespace(a=[], s='') %}{% for m in messages %}{% set ns.a = ns.a + [m] %}"
          "{% set ns.s = ns.s ~ m.content ~ 1 %}{% endfor %}{{ ns.a|length }}{{ ns.s }}{{ ns.a|last }}",
          "{% macro f(x, y=2) %}{{ x ~ y }}{% endmacro %}{{ f(1) }}{{ f(messages[0].content, y='é') }}",
          "{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}{{ 'aXb'.rsplit('X', 1) }}"
          "{{ 'ab'.upper() }}",
          "{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}",
          "{{ (1.567)|round(1) }}{{ messages|batch(2, 'z')|list|length }}{{ [3, 1]|sort }}"
          "{{ ('<'|e) + '&' }}",
          "{% for k in {'a': 1, 'b': 2} %}{{ loop.last }}{% endfor %}{{ 'abc'|replace('b', 'x') }}"
          "{{ [1] * 3 }}",
          "{% for x in range(2000) if x is odd %}{{ x if loop.first or loop.last }}{% endfor %}"
          "{{ ('a', 1)|first }}"]


@pytest.mark.parametrize("template", HONEST)
def test_honest_templates_write_what_jinja_writes(template: str) -> None:
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert render(template) == plain.from_string(template).render(messages=MESSAGES)


def test_long_conversations_and_templates_render() -> None:
    many = [{"role": "user", "content": "word " * 80}] * 10_000      # 4 MB
    template = ("{# " + "x" * 100_000 + " #}{% set ns = namespace(l=[]) %}{% for m in messages %}"
                "{% set ns.l = ns.l + [m] %}{% endfor %}"
                "{% for m in ns.l %}{{ '<|' + m.role + '|>' ~ m.content }}{% endfor %}")
    assert len(render_template(template, False, lambda: {"messages": many})) == 10_000 * 408
    one = [{"role": "user", "content": "é" * 8_000_000}]
    assert len(render_template("{{ messages[0].content|trim + '!' }}", False,
                        lambda: {"messages": one})) == 8_000_001


# **** regular expressions ****

SLOW_PATTERNS = ("(a|aa)+$", r"(?:(a|aa)+)\1x", "(x+x+)+y")


@pytest.mark.parametrize("text", SLOW_PATTERNS)
def test_a_match_that_backtracks_ends_on_time(text: str) -> None:
    pattern, begin = compile_pattern(text, f"file {text}", RequestError, seconds=0.2), time.process_time()
    with pytest.raises(RequestError) as error: pattern.search("a" * 60 + "c" + "x" * 3000 + "c")
    assert error.value.found == f"file {text}: matching the regular expression {text!r} takes more than 0.2 s"
    assert time.process_time() - begin < 2


def test_patterns_of_one_file_share_their_time() -> None:
    begin = time.process_time()
    for number in range(20):
        with pytest.raises(ModelError, match=r"one\.json"):
            compile_pattern(f"({'a' * (number + 1)}|a|aa)+$", "one.json", seconds=0.2).match("a" * 60 + "b")
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(("text", "words"), [
    ("a" * 70_000, "has 70,000 characters"), ("|".join(map(str, range(10**6))), "characters"),
    ("a{1000}{1000}{1000}", "repeats too often"), ("((a?){100000000})", "repeats too often"),
    ("(", r"'\(' is no regular expression: missing \)"), ("*", "no regular expression"),
    ("(" * 20_000 + ")" * 20_000, "no regular expression"), ("(?R)", "no regular expression")])
def test_a_pattern_that_is_too_large_is_refused(text: str, words: str) -> None:
    with pytest.raises(ModelError, match="adapter.json.*" + words): compile_pattern(text, "adapter.json")


def test_honest_patterns_match_as_those_of_re() -> None:
    peft = compile_pattern(r"^(?!.*vision)(?!.*lm_head).*\.(q_proj|k_proj)$", "adapter")
    assert peft.match("model.layers.1.self_attn.q_proj")
    assert not peft.match("vision.layers.1.q_proj")
    assert [*targets_of(r".*\.layers\.[01]\..*q_proj", {"model.layers.0.a.q_proj": 1,
                                                      "model.layers.2.a.q_proj": 1})
            ] == ["model.layers.0.a.q_proj"]
    assert [*targets_of(["q_proj", "mlp.up"], {"a.q_proj": 1, "aq_proj": 1, "x.mlp.up": 1, "mlp.up": 1,
                                             "up": 1})
            ] == ["a.q_proj", "x.mlp.up", "mlp.up"]
    assert pattern_of({"k_proj": 1, r"layers\.1\..*q_proj": 2}, "model.layers.1.attn.q_proj") == \
        r"layers\.1\..*q_proj"


def test_every_place_that_reads_patterns_is_bounded() -> None:
    layer = "a" * 60 + "b"
    with pytest.raises(ModelError, match=r"ignore of quantization_config.*takes more than"):
        CompressedTensorsReader({}, ("re:(a|aa)+$",), "places.json").group(layer)
    with pytest.raises(ModelError, match=r"target_modules.*takes more than"):
        list(targets_of("(a|aa|aaa)+$", {layer: 1}))
    with pytest.raises(ModelError, match=r"ignored layers.*repeats too often"):
        is_ignored(layer + ".weight", ["re:a{9999999}"])
    with pytest.raises(ModelError, match=f"has {MAX_PATTERNS + 1:,} regular expressions"):
        CompressedTensorsReader({}, tuple(f"re:{n}" for n in range(MAX_PATTERNS + 1))).group("x")
    schema = {"patternProperties": {"(a|aa)+$": {"type": "string"}}, "additionalProperties": {"type": "null"}}
    assert find(schema, layer, schema) == {"type": "null"}
