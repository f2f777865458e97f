"""Requests of /v1/messages, as requests of a conversation.

Protocol: `message_request(data, defaults, limits)` reads the fields of Anthropic's Messages API, and
translates content blocks: text, thinking, tool_use and tool_result. Neighbours of one role become one
message; one of the system may be among them. Blocks of tools that Anthropic's servers ran are left out, but
for those of MCP, which have texts. A last message of the assistant is gone on with (prefill).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.server.chat_protocol import EFFORTS, ChatRequest, chat
from tinygrad_nv.server.errors import APIError, invalid
from tinygrad_nv.server.fields import Fields, unicode
from tinygrad_nv.server.leniency import ignore, translate_names
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.protocol import HOTTEST, STOPS
from tinygrad_nv.server.tools import leave_out, other_tool

# fields that mean the same as in /v1/chat/completions
SHARED = ("model", "stream", "top_k", "min_p", "repetition_penalty", "seed", "stop_token_ids", "ignore_eos",
          "priority", "cache_salt", "structured_outputs", "chat_template_kwargs")
# what other fields of a conversation are called here
SPELLING = {"stop": "stop_sequences", "reasoning_effort": "output_config.effort"}
ROLES = ("user", "assistant", "system")
# blocks that the model reads
EXPECTED = {"user": "text or tool_result", "assistant": "text, thinking or tool_use", "system": "text"}
USES, RESULTS = ("tool_use", "mcp_tool_use"), (("tool_result", "user"), ("mcp_tool_result", "assistant"))
SERVED = ("_tool_use", "_tool_result")      # the ends of other kinds of blocks of an assistant
THINKING = ("enabled", "adaptive", "disabled")
BETWEEN = {"content": "\n", "reasoning": ""}    # the texts of blocks
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def message_request(data: dict[str, Any], defaults: SamplingParams, limits: RequestLimits,
                    counted: bool = False) -> ChatRequest:
    """A request of /v1/messages; with `counted` of /v1/messages/count_tokens, which has no max_tokens."""
    fields = Fields(data)
    asked: dict[str, Any] = {name: fields.take(name) for name in SHARED}
    most = fields.whole("max_tokens", 1)
    if most is None and not counted:
        raise invalid("max_tokens is missing, expected a whole number ≥ 1", "max_tokens", "missing_field")
    messages = _system(fields)
    spelling = _add_messages(fields, messages)
    continued = messages[-1]["role"] == "assistant"
    asked |= {"messages": messages, "max_tokens": most, "stop": list(fields.texts(
                  "stop_sequences", STOPS, alone=False)) or None,
              "temperature": fields.number("temperature", 0, HOTTEST), "top_p": fields.number("top_p", 0, 1),
              **_tools(fields, spelling), **_output(fields, spelling)}
    if continued: asked |= {"continue_final_message": True, "add_generation_prompt": False}
    thinking, budget = _thinking(fields)
    metadata = Fields(fields.object("metadata") or {}, "metadata")
    metadata.text("user_id")
    metadata.finish()
    fields.hint("service_tier", ("auto", "standard_only"))
    fields.as_usual({"mcp_servers": []})
    fields.ignore(["cache_control"])        # prompts with equal prefixes share pages anyway
    fields.finish()
    with translate_names(spelling):
        request = chat({name: value for name, value in asked.items() if value is not None}, defaults, limits)
    return replace(request, thinking=thinking, show_reasoning=thinking is not False, budget=budget,
                   must_bound=False, spelling=spelling)


# **** fields ****

def _thinking(fields: Fields) -> tuple[bool | None, int | None]:
    """Whether the model reasons, if the request says so, and tokens of reasoning at most."""
    given = fields.object("thinking")
    if given is None: return None, None
    inner = Fields(given, "thinking")
    kind = inner.one_of("type", THINKING)
    if kind is None: raise invalid(f"thinking.type is missing, expected one of {', '.join(THINKING)}",
                                   "thinking.type", "missing_field")
    budget = inner.whole("budget_tokens", 0)
    inner.hint("display", ("full",), "is not served: reasoning is shown as it is")
    inner.finish()
    return kind != "disabled", budget


def _tools(fields: Fields, spelling: dict[str, str]) -> dict[str, Any]:
    made: list[dict[str, Any]] = []
    refused: list[APIError] = []
    for at, each in enumerate(fields.objects("tools") or []):
        inner = Fields(each, f"tools[{at}]")
        if (kind := inner.text("type")) not in (None, "custom"):
            refused.append(other_tool(inner, kind, "custom"))
            continue
        function = {"name": inner.take("name"), "description": inner.text("description"),
                    "parameters": inner.object("input_schema")}
        inner.flag("strict")
        inner.ignore(["cache_control"])
        inner.finish()
        spelling |= {f"tools[{len(made)}].function.parameters": f"tools[{at}].input_schema",
                     f"tools[{len(made)}].function": f"tools[{at}]"}
        made.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    leave_out(refused, made)
    given = fields.object("tool_choice")
    if given is None: return {"tools": made or None}
    inner = Fields(given, "tool_choice")
    kind, name = inner.one_of("type", (*CHOICES, "tool")), inner.text("name")
    several = not inner.flag("disable_parallel_tool_use")
    inner.finish()
    named = {"type": "function", "function": {"name": name}}
    choice = named if kind == "tool" else CHOICES.get(kind or "auto")
    return {"tools": made or None, "tool_choice": choice if made or choice != "auto" else None,
            "parallel_tool_calls": several}


def _output(fields: Fields, spelling: dict[str, str]) -> dict[str, Any]:
    """output_config: the effort, and the schema of the answer, also under its older name output_format."""
    inner = Fields(fields.object("output_config") or {}, "output_config")
    effort, given, path = inner.one_of("effort", EFFORTS), inner.object("format"), "output_config.format"
    inner.finish()
    older = fields.object("output_format")
    if given is None: given, path = older, "output_format"
    if given is None: return {"reasoning_effort": effort}
    spelling["response_format.json_schema"] = path
    about = Fields(given, path)
    about.one_of("type", ("json_schema",))
    schema = about.object("schema")
    about.finish()
    if schema is None: raise invalid(f"{path}.schema is missing, expected a JSON schema", f"{path}.schema",
                                     "missing_field")
    return {"reasoning_effort": effort,
            "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}}


# **** messages ****

def _system(fields: Fields) -> list[dict[str, Any]]:
    value = fields.take("system")
    if value is None: return []
    if isinstance(value, str): return [{"role": "system", "content": unicode(value, "system")}]
    blocks = _blocks(value, "system")
    return [{"role": "system", "content": "\n".join(_text(each) for each in blocks)}]


def _add_messages(fields: Fields, out: list[dict[str, Any]]) -> dict[str, str]:
    """Adds the messages to the conversation, and returns the spelling of their fields."""
    given = fields.objects("messages")
    if given is None: raise invalid("messages is missing, expected a list", "messages", "missing_field")
    if not given: raise invalid("messages is empty, expected at least one message", "messages")
    spelling = dict(SPELLING)
    for at, each in enumerate(given):
        inner = Fields(each, f"messages[{at}]")
        role, path = inner.one_of("role", ROLES), inner.path("content")
        content = inner.take("content")
        inner.finish()
        if role is None: raise invalid(f"messages[{at}].role is missing, expected user or assistant",
                                       f"messages[{at}].role", "missing_field")
        blocks = [Fields({"type": "text", "text": content}, path)] if isinstance(content, str) \
            else _blocks(content, path)
        for block in blocks:
            _add(block, role, out)
            if not out: continue
            name = f"messages[{len(out) - 1}]"
            spelling.setdefault(name, f"messages[{at}]")
            spelling[f"{name}.content"] = block.where
            if calls := out[-1].get("tool_calls"):
                call = f"{name}.tool_calls[{len(calls) - 1}].function"
                spelling.setdefault(call, block.where)
                spelling.setdefault(f"{call}.arguments", f"{block.where}.input")
        if not blocks: raise invalid(f"{path} is empty, expected at least one block", path)
    if not out: raise invalid("messages has nothing that the model reads, expected a text", "messages")
    for message in out:
        for name, between in BETWEEN.items():
            if isinstance(texts := message.get(name), list): message[name] = between.join(texts)
    return spelling


def _blocks(value: Any, path: str) -> list[Fields]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise invalid(f"{path} is neither a string nor a list of blocks", path)
    return [Fields(each, f"{path}[{at}]") for at, each in enumerate(value)]


def _add(block: Fields, role: str, out: list[dict[str, Any]]) -> None:
    """Adds a block to the conversation."""
    kind = block.left.get("type")
    if (kind, role) in RESULTS:
        out.append(_result(block))
        return
    if role == "assistant" and kind not in USES and str(kind).endswith(SERVED):
        return ignore(invalid(f"{block.path('type')} is {str(kind)[:40]!r}, of a tool that the server does "
                              "not run; to fix: leave it out", block.path("type"), "unsupported"))
    if not out or out[-1]["role"] != role: out.append({"role": role, "content": []})
    last = out[-1]
    if kind == "text": _append(last, "content", _text(block))
    elif kind in USES and role == "assistant": last.setdefault("tool_calls", []).append(_use(block))
    elif kind == "thinking" and role == "assistant":
        _append(last, "reasoning", block.text("thinking") or "")
        block.ignore(["type", "signature", "cache_control"])
        block.finish()
    elif kind != "redacted_thinking":
        raise invalid(f"{block.path('type')} is {str(kind)[:40]!r}, expected {EXPECTED[role]}: the model "
                      "reads nothing else", block.path("type"), "unsupported")


def _append(message: dict[str, Any], name: str, text: str) -> None:
    """Adds a text to those of a field, which are joined at the end: each would copy what is there."""
    texts = message.get(name) or []
    if isinstance(texts, str): texts = [texts]
    if text or texts: texts.append(text)
    message[name] = texts


def _text(block: Fields) -> str:
    # of a tool that was found; all tools are offered anyway
    if block.left.get("type") == "tool_reference": return block.text("tool_name") or ""
    kind, text = block.take("type"), block.text("text")
    if kind != "text": raise invalid(f"{block.path('type')} is {str(kind)[:40]!r}, expected 'text': the "
                                     "model reads nothing else", block.path("type"), "unsupported")
    if text is None: raise invalid(f"{block.path('text')} is missing, expected a string", block.path("text"),
                                   "missing_field")
    block.ignore(["cache_control", "citations"])
    block.finish()
    return text


def _use(block: Fields) -> dict[str, Any]:
    """A call of an earlier turn."""
    block.ignore(["type", "cache_control", "caller", "server_name"])
    name, given, call = block.require_text("name"), block.take("input"), block.text("id")
    block.finish()
    return {"id": call, "type": "function", "function": {"name": name, "arguments": given}}


def _result(block: Fields) -> dict[str, Any]:
    """The result of a tool."""
    block.ignore(["type", "cache_control"])
    name, content, path = block.require_text("tool_use_id"), block.take("content"), block.path("content")
    failed = block.flag("is_error")
    block.finish()
    texts: Sequence[str] = [unicode(content, path)] if isinstance(content, str) else \
        [_text(each) for each in _blocks(content or [], path)]
    return {"role": "tool", "tool_call_id": name, "content": ("Error: " if failed else "") + "\n".join(texts)}
