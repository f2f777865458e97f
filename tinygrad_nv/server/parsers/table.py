"""Parsers by name, and which ones a chat template asks for.

Protocol: `REASONING` and `TOOLS` have vLLM's names, and "think". `Kind.signs` are what a chat template has
whose model writes so: `detect` finds the first kind of which it has one. `Kind.special` are markers that are
special tokens of some models: they must be in the text that is parsed.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tinygrad_nv.server.parsers.harmony import MARKS, Harmony
from tinygrad_nv.server.parsers.json_calls import TAG, Hermes, Llama
from tinygrad_nv.server.parsers.mistral import ARGS, CALLS, ID, Mistral
from tinygrad_nv.server.parsers.parser import Chain, Machine, Parser
from tinygrad_nv.server.parsers.pythonic import CALLS as CALLS_BEGIN
from tinygrad_nv.server.parsers.pythonic import END, START, Pythonic
from tinygrad_nv.server.parsers.qwen import OPEN, Qwen
from tinygrad_nv.server.parsers.think import Think, begins_inside


@dataclass(frozen=True)
class Answer:
    """Facts of an answer that are known before it begins. `prefix`: the end of the prompt, or the text of the
    message that is `continued`; `schemas`: by the name of a tool, its parameters' schema (none: no call is
    parsed); `thinking`: whether the request leaves the reasoning on."""
    prefix: str = ""
    continued: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool = True


@dataclass(frozen=True)
class Kind:
    """A parser. `make(answer)` is one for an answer. Of reasoning, `start` and `end` are the tokens around
    it."""
    make: Callable[[Answer], Machine]
    signs: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    start: str = ""
    end: tuple[str, ...] = ()


def _think(start: str, end: str, answer: Answer, always: Callable[[Answer], bool] = lambda _: False,
           implicit: tuple[str, ...] = ()) -> Think:
    """`always`: whether the answer begins inside of the reasoning, unless the prompt has ended it."""
    inside = begins_inside(answer.prefix, start, end, answer.continued)
    inside = inside or (always(answer) and not answer.continued and not answer.prefix.rstrip().endswith(end))
    return Think(start, end, inside, implicit if answer.schemas else ())


def _thinks(start: str, end: str, signs: tuple[str, ...] | None = None, **more: Any) -> Kind:
    """Reasoning between two markers, of which `signs` are in a template."""
    return Kind(partial(_think, start, end, **more), (start,) if signs is None else signs, (start, end),
                start, (end,))


THINK = ("<think>", "</think>")
HARMONY = Kind(lambda answer: Harmony(True, bool(answer.schemas)), ("<|channel|>",), MARKS,
               end=("<|channel|>", "final", "<|message|>"))
REASONING = {
    "openai_gptoss": HARMONY,
    "mistral": _thinks("[THINK]", "[/THINK]"),
    "seed_oss": _thinks("<seed:think>", "</seed:think>"),
    # no name of vLLM's: an answer without a marker is content, as a parser that a template chose must have it
    "think": _thinks(*THINK, signs=THINK, implicit=(OPEN,)),
    "qwen3": _thinks(*THINK, signs=(), always=lambda answer: answer.thinking, implicit=(OPEN,)),
    "deepseek_r1": _thinks(*THINK, signs=(), always=lambda _: True),
}
TOOLS = {
    "openai": Kind(lambda answer: Harmony(False, bool(answer.schemas)), ("<|channel|>",), MARKS),
    "qwen3_coder": Kind(lambda answer: Qwen(answer.schemas), ("<function=",), (OPEN, "</tool_call>")),
    "mistral": Kind(lambda _: Mistral(), (CALLS,), (CALLS, ARGS, ID)),
    "hermes": Kind(lambda _: Hermes(), (OPEN,), (OPEN, "</tool_call>")),
    "pythonic": Kind(lambda answer: Pythonic(answer.schemas), (START, CALLS_BEGIN), (START, END)),
    "llama3_json": Kind(lambda _: Llama(), ("python_tag", "ipython"), (TAG,)),
}
# other names of the same
REASONING |= {"openai": HARMONY, "deepseek_v3": REASONING["think"], "glm45": REASONING["qwen3"]}
TOOLS |= {"qwen3": TOOLS["qwen3_coder"], "qwen3_xml": TOOLS["qwen3_coder"],
          "llama4_json": TOOLS["llama3_json"],
          "llama4_pythonic": TOOLS["pythonic"], "olmo3": TOOLS["pythonic"]}
AUTO, NONE = "auto", "none"


def detect(kinds: Mapping[str, Kind], template: str | None) -> str:
    """The name of the kind that a chat template asks for; "none" if it has no sign of any."""
    return next((name for name, kind in kinds.items()
                 if any(each in (template or "") for each in kind.signs)),
                NONE)


def answer_parser(reasoning: str, tools: str, answer: Answer) -> Parser:
    """The parser of an answer, by the names of its parsers; "none" for none."""
    named = TOOLS[tools] if tools != NONE and answer.schemas else None
    if reasoning == NONE: return Machine() if named is None else named.make(answer)
    first = REASONING[reasoning].make(answer)
    # channels have calls, too
    if named is None or isinstance(first, Harmony): return first
    return Chain(first, named.make(answer))


def markers(reasoning: str, tools: str) -> tuple[str, ...]:
    """The markers that these parsers need in the text."""
    return tuple(mark for kinds, name in ((REASONING, reasoning), (TOOLS, tools)) if name != NONE
                 for mark in kinds[name].special)
