"""How a chat template reads the content of a message: as one text, or as a list of parts.

Protocol: `formed(messages, form, template, special)` returns the messages as the template reads them. `form`
is vLLM's chat_template_content_format: "string" joins parts of text by new lines, "openai" makes a part of
each text, "auto" asks the template: it renders a word as a text and as a part, for each role, and a content
stays as it was given unless the word is lost so. Contents with other parts, such as images, stay lists.

vLLM looks for loops over `message.content` in the template's syntax tree. A rendered word also tells of
macros, renamed variables and `content[0].text`, and of templates that read some roles otherwise than others.
"""
from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.errors import RequestError, TokenizerError

FORMATS = ("auto", "string", "openai")
WORD, FILLING = "zqxjwordkvb", "hello"      # the word that is looked for, and the text of the other messages
TEXTS = ("text", "input_text", "output_text")
# a list that was written as Python or JSON has its word, too
RAW = re.compile(r"""text(['"]|&#3[49];|&quot;):\s*\1""" + WORD)
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Reads:
    """Whether a template writes the content of a role that is a text, and one that is a list of parts."""
    text: bool
    parts: bool


def format_contents(messages: Sequence[Message], form: str, template: str,
           special: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the messages as the template reads them, as described above. Raises `RequestError` for a form
    that is not known."""
    require_format(form)
    return [_format_content(each, form, template, special) for each in messages]


def require_format(form: str) -> None:
    """Raises `RequestError` unless `form` is one of `FORMATS`."""
    if form not in FORMATS:
        raise RequestError(f"chat_template_content_format is {form!r}", f"one of {', '.join(FORMATS)}",
                           "auto finds out what the template reads")


def text_of(content: Any) -> str:
    """The text of a content: parts of type text, joined by new lines as vLLM joins them."""
    if isinstance(content, str): return content
    return "\n".join(each["text"] for each in content or () if is_text(each))


def is_text(part: Any) -> bool:
    """Whether a part of a content is a text."""
    return isinstance(part, Mapping) and isinstance(part.get("text"), str) and \
        part.get("type", "text") in TEXTS


def _format_content(message: Message, form: str, template: str, special: Mapping[str, str]) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if value is not None}
    content = made.get("content")
    if isinstance(content, str):
        if form == "openai" or (form == "auto" and _wants(made, template, special, text=False)):
            made["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list | tuple):
        made["content"] = parts = [{**each, "type": "text"} if is_text(each) else each for each in content]
        if all(map(is_text, parts)) and (form == "string" or (
                form == "auto" and _wants(made, template, special, text=True))):
            made["content"] = text_of(parts)
    return made


def _wants(message: Message, template: str, special: Mapping[str, str], text: bool) -> bool:
    """Whether a content must change its form: to a text, where the template reads no parts of this role, or
    to parts, where it loses texts."""
    reads = _reads(template, str(message.get("role")), tuple(sorted(special.items())))
    return not reads.parts if text else reads.parts and not reads.text


@functools.lru_cache(64)
def _reads(template: str, role: str, special: tuple[tuple[str, str], ...]) -> Reads:
    variables = {**dict.fromkeys(SPECIAL, ""), **dict(special)}
    user = _probe(template, variables, (_with_system, _with_parts, _alone), "user", FILLING)
    if role == "user": return user
    filler = FILLING if user.text or not user.parts else [{"type": "text", "text": FILLING}]
    turns = {"system": (_with_system, _with_tools), "assistant": (_with_answer, _as_last_answer),
             "tool": (_with_call, _with_call_and_more)}
    return _probe(template, variables, turns[role], role, filler) if role in turns else user


def _probe(template: str, variables: Mapping[str, Any], turns: Iterable[Any], role: str,
           filler: Any) -> Reads:
    """Tells in which forms the template writes a content, by the first of the conversations that tells it."""
    for turn in turns:
        text, parts = (_writes(template, {**variables, **turn(role, content, filler)})
                       for content in (WORD, [{"type": "text", "text": WORD}]))
        if text or parts: return Reads(text, parts)
    return Reads(True, False)   # nothing can be told: a text is what templates are made for


def _writes(template: str, variables: Mapping[str, Any]) -> bool:
    from tinygrad_nv.engine.text.chat_template import render_template
    from tinygrad_nv.engine.text.template_budget import TemplateLimit
    try: text = render_template(template, False, lambda: variables)
    except TemplateLimit: raise
    except (TokenizerError, RequestError): return False
    return WORD in text.lower() and not RAW.search(text)


# **** conversations in which the word is looked for ****

def _turns(*messages: tuple[str, Any], tools: Any = None, **more: Any) -> dict[str, Any]:
    made = [{"role": role, "content": content} for role, content in messages]
    return {"messages": made, "tools": tools, "documents": None, "add_generation_prompt": True, **more}


def _alone(role: str, content: Any, filler: Any) -> dict[str, Any]: return _turns((role, content))


def _with_system(role: str, content: Any, filler: Any) -> dict[str, Any]:
    if role == "user": return _turns(("system", filler), (role, content))
    return _turns((role, content), ("user", filler))


def _with_parts(role: str, content: Any, filler: Any) -> dict[str, Any]:
    return _with_system(role, content, [{"type": "text", "text": filler}])


def _with_tools(role: str, content: Any, filler: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {
        "type": "object", "properties": {}, "required": []}}}
    return _turns((role, content), ("user", filler), tools=[tool])


def _with_answer(role: str, content: Any, filler: Any) -> dict[str, Any]:
    return _turns(("user", filler), (role, content), ("user", filler))


def _as_last_answer(role: str, content: Any, filler: Any) -> dict[str, Any]:
    return _turns(("user", filler), (role, content))


def _with_call(role: str, content: Any, filler: Any) -> dict[str, Any]:
    empty = "" if isinstance(filler, str) else [{"type": "text", "text": ""}]
    made = _turns(("user", filler), ("assistant", empty), (role, content))
    made["messages"][1]["tool_calls"] = [CALL]
    made["messages"][2] |= {"name": "f", "tool_call_id": CALL["id"]}
    return made


def _with_call_and_more(role: str, content: Any, filler: Any) -> dict[str, Any]:
    made = _with_call(role, content, filler)
    made["messages"] += [{"role": "assistant", "content": FILLING}, {"role": "user", "content": filler}]
    return made
