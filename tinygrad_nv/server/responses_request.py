"""Requests of /v1/responses, as requests of a conversation.

Protocol: `response_request(data, store, defaults, limits)` reads the fields of OpenAI's Responses API, and
translates input items to messages: a message, a function_call, a function_call_output and a reasoning item,
of which neighbours of the assistant become one message. Calls of other tools, in past_calls.py, are data of
earlier turns. Fields that completions have too are passed on.
"""
from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad_nv.engine.sampling import MAX_LOGPROBS, SamplingParams
from tinygrad_nv.server.chat_protocol import EFFORTS, VERBOSITIES, ChatRequest, chat
from tinygrad_nv.server.errors import APIError, invalid
from tinygrad_nv.server.fields import Fields, unicode
from tinygrad_nv.server.leniency import ignore, translate_names
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.past_calls import add_call, add_past
from tinygrad_nv.server.response_store import ResponseStore, Stored, size
from tinygrad_nv.server.tools import leave_out, list_names, other_tool

# fields that mean the same as in /v1/chat/completions
SHARED = ("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
          "frequency_penalty", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias",
          "include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids", "priority",
          "cache_salt", "structured_outputs", "chat_template_kwargs", "parallel_tool_calls", "user",
          "safety_identifier", "prompt_cache_key", "metadata", "service_tier", "stream")
# what other fields of a conversation are called here
SPELLING = {"max_completion_tokens": "max_output_tokens", "response_format.json_schema": "text.format",
            "response_format": "text.format", "reasoning_effort": "reasoning.effort",
            "verbosity": "text.verbosity"}
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
ROLES = ("user", "assistant", "system", "developer")
# fields that are in a response as they were in its request, with their defaults
SHOWN: dict[str, Any] = {"instructions": None, "max_tool_calls": None,
                         "metadata": None, "parallel_tool_calls": True, "previous_response_id": None,
                         "service_tier": "auto", "store": True, "top_logprobs": None,
                         "truncation": "disabled", "user": None, "background": False}
# fields of objects in a response, in vLLM's order; null where the request has none
TOOL = ("name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading", "description",
        "output_schema")
FORMAT = ("name", "schema", "type", "description", "strict")
REASONING = ("context", "effort", "generate_summary", "mode", "summary")


@dataclass(frozen=True)
class ResponseRequest:
    """`items`: the input items; `messages`: the conversation up to them, without instructions; `shown`: what
    the response repeats. `truncate`: the oldest messages may be left out. `size_before`: bytes of the earlier
    response and items that it names."""
    chat: ChatRequest
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    shown: dict[str, Any]
    store: bool
    background: bool
    truncate: bool
    size_before: int = 0


def response_request(data: dict[str, Any], store: ResponseStore, defaults: SamplingParams,
                     limits: RequestLimits) -> ResponseRequest:
    """A request of /v1/responses."""
    fields = Fields(data)
    asked: dict[str, Any] = {name: fields.take(name) for name in SHARED}
    if not isinstance(asked["metadata"], dict | None):
        raise fields.wrong("metadata", asked["metadata"], "an object")
    items, size_before = _items(fields, store, limits)
    instructions = fields.text("instructions")
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    previous, spelling = _previous(fields, store), dict(SPELLING)
    before: Sequence[dict[str, Any]] = () if previous is None else previous.messages
    if previous is not None: size_before += previous.conversation
    if size_before > limits.body_bytes:
        raise invalid(f"the response that this one goes on with and the items that it refers to have "
                      f"{size_before} bytes, expected at most {limits.body_bytes}; to fix: begin a new "
                      "conversation, or raise --max-body-bytes", "input", "too_long")
    messages = [*before, *messages_of(items, spelling, len(system) + len(before))]
    if not messages: raise invalid("input has nothing that the model reads, expected a message", "input")
    asked |= {"messages": [*system, *messages], "max_completion_tokens": fields.whole("max_output_tokens", 1),
              **_text(fields), **_reasoning(fields), **_tools(fields, spelling), **_logprobs(fields)}
    keep, background = fields.flag("store", True), fields.flag("background")
    if background and (asked["stream"] or not keep):
        raise invalid("background is true, with stream or without store, expected a response that is stored "
                      "and "
                      "asked for later; to fix: leave background or stream out", "background", "unsupported")
    truncate = fields.one_of("truncation", ("auto", "disabled")) == "auto"
    _stream_options(fields)
    # compaction of long conversations, which the client does; and a limit of tools that are not served
    for name in ("context_management", "max_tool_calls"): fields.hint(name)
    for name in ("conversation", "prompt"):
        if fields.take(name) is not None:
            raise invalid(f"{name} is not served; to fix: leave it out, and send input or "
                          "previous_response_id",
                          name, "unsupported")
    fields.finish()
    with translate_names(spelling):
        request = chat({name: value for name, value in asked.items() if value is not None}, defaults, limits)
    request = replace(request, spelling=spelling)
    shown = _fields_to_repeat(data, request)
    return ResponseRequest(request, items, messages, shown, keep, background, truncate, size_before)


def _fields_to_repeat(data: dict[str, Any], request: ChatRequest) -> dict[str, Any]:
    """Returns the fields of a request that its response repeats."""
    shown = {name: value if (given := data.get(name)) is None else given for name, value in SHOWN.items()}
    if request.params.logprobs is None: shown["top_logprobs"] = None
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        shown[name] = getattr(request.params, name)
    tools = data.get("tools") or []
    shown["tools"] = [{**dict.fromkeys(TOOL), **each} if each.get("type") == "function" else each
                      for each in tools]
    shown["tool_choice"] = data.get("tool_choice") or ("auto" if tools else "none")
    if text := data.get("text"):
        given = text.get("format")
        if given and given.get("type") == "json_schema": given = {**dict.fromkeys(FORMAT), **given}
        shown["text"] = {"format": given, "verbosity": text.get("verbosity")}
    if (reasoning := data.get("reasoning")) is not None:
        shown["reasoning"] = {**dict.fromkeys(REASONING), **reasoning}
    return shown


# **** fields ****

def _previous(fields: Fields, store: ResponseStore) -> Stored | None:
    if (name := fields.text("previous_response_id")) is None: return None
    stored = store.get(name, "previous_response_id")
    if stored.response["status"] in ("completed", "incomplete"): return stored
    raise invalid(f"previous_response_id names a response that is {stored.response['status']}, expected a "
                  "complete one", "previous_response_id")


def _text(fields: Fields) -> dict[str, Any]:
    inner = Fields(fields.object("text") or {}, "text")
    given, verbosity = inner.object("format"), inner.one_of("verbosity", VERBOSITIES)
    inner.finish()
    out: dict[str, Any] = {"verbosity": verbosity}
    if given is None: return out
    about = Fields(given, "text.format")
    kind = about.one_of("type", ("text", "json_object", "json_schema"))
    if kind is None: raise invalid("text.format.type is missing, expected text, json_object or json_schema",
                                   "text.format.type", "missing_field")
    schema = about.object("schema")
    if kind == "json_schema" and schema is None:
        raise invalid("text.format.schema is missing, expected a JSON schema", "text.format.schema",
                      "missing_field")
    names = {name: about.take(name) for name in ("name", "description", "strict")}
    about.finish()
    described = {} if schema is None else {"json_schema": {**names, "schema": schema}}
    return {**out, "response_format": {"type": kind, **described}}


def _reasoning(fields: Fields) -> dict[str, Any]:
    inner = Fields(fields.object("reasoning") or {}, "reasoning")
    effort = inner.one_of("effort", EFFORTS)
    for name in ("summary", "generate_summary"):
        inner.hint(name, ("auto",), "is not served: the reasoning itself is in the response")
    inner.finish()
    return {"reasoning_effort": effort}


def _tools(fields: Fields, spelling: dict[str, str]) -> dict[str, Any]:
    made: list[dict[str, Any]] = []
    refused: list[APIError] = []
    for at, each in enumerate(fields.objects("tools") or []):
        inner = Fields(each, f"tools[{at}]")
        if (kind := inner.text("type")) != "function":
            refused.append(other_tool(inner, kind, "function"))
            continue
        spelling[f"tools[{len(made)}].function"] = f"tools[{at}]"
        made.append({"type": "function", "function": {
            name: value for name in ("name", "description", "parameters", "strict")
            if (value := inner.take(name)) is not None}})
        inner.finish()
    leave_out(refused, made)
    choice = fields.take("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        made, choice = _allow_tools(Fields(choice, "tool_choice"), made)
    elif isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tools": made or None, "tool_choice": choice if made or choice != "auto" else None}


def _allow_tools(fields: Fields, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Returns the tools that a tool choice keeps, and its mode."""
    fields.ignore(["type"])
    mode = fields.one_of("mode", ("auto", "required"))
    names = {str(each.get("name")) for each in fields.objects("tools") or []}
    fields.finish()
    kept = [each for each in tools if each["function"].get("name") in names]
    if kept: return kept, mode or "auto"
    raise invalid("tool_choice.tools names no function, expected some of tools: "
                  + list_names([str(each["function"].get("name")) for each in tools]), "tool_choice.tools")


def _logprobs(fields: Fields) -> dict[str, Any]:
    include = fields.texts("include", 16)
    for each in include:
        if each not in (LOGPROBS, ENCRYPTED):
            ignore(invalid(f"include has {each[:60]!r}, expected {LOGPROBS} or {ENCRYPTED}", "include"))
    asked = LOGPROBS in include     # else the number says nothing
    top = fields.whole("top_logprobs", 0, MAX_LOGPROBS if asked else None)
    return {"logprobs": asked or None, "top_logprobs": top if asked else None}


def _stream_options(fields: Fields) -> None:
    options = Fields(fields.object("stream_options") or {}, "stream_options")
    options.flag("include_obfuscation")
    options.finish()


# **** items ****

def _items(fields: Fields, store: ResponseStore, limits: RequestLimits) -> tuple[list[dict[str, Any]], int]:
    """Input items, each with a type and an id; those of earlier responses, where they are referred to, and
    the bytes of these."""
    value = fields.take("input")
    if value is None: raise invalid("input is missing, expected a string or a list of items", "input",
                                    "missing_field")
    if isinstance(value, str):
        value = [{"role": "user", "content": [{"type": "input_text", "text": unicode(value, "input")}]}]
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise fields.wrong("input", value, "a string or a list of items")
    if not value: raise invalid("input is empty, expected at least one item", "input")
    made, referred = [_item(each, f"input[{at}]", store) for at, each in enumerate(value)], 0
    for given, found in zip(value, made, strict=True):
        # the bytes of many may be those of one
        if given.get("type") == "item_reference" and referred <= limits.body_bytes: referred += size(found)
    return made, referred


def _item(given: dict[str, Any], path: str, store: ResponseStore) -> dict[str, Any]:
    if given.get("type") != "item_reference":
        return {"type": "message", "id": f"item_{secrets.token_hex(12)}",
                **{name: value for name, value in given.items() if value is not None}}
    fields = Fields(given, path)
    fields.ignore(["type"])
    name = fields.require_text("id")
    fields.finish()
    if (found := store.item(name)) is not None: return found
    raise APIError(404, f"{path}.id is {name[:100]!r}, an item of no response that is kept; to fix: send the "
                   "item itself", "not_found", f"{path}.id")


def messages_of(items: Sequence[dict[str, Any]], spelling: dict[str, str] | None = None,
                first: int = 0) -> list[dict[str, Any]]:
    """Items as messages of /v1/chat/completions, of which the first one is message `first`. `spelling` gets
    the names of their fields."""
    out: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        fields = Fields(item, f"input[{at}]")
        kind = fields.text("type")
        if not add_past(kind or "", fields, out): _add(kind, fields, out)
        fields.finish()
        if spelling is not None and out: _spell(out, first, fields.where, spelling)
    return out


def _add(kind: str | None, fields: Fields, out: list[dict[str, Any]]) -> None:
    fields.ignore(["id", "status"])
    if kind == "message": _message(fields, out)
    elif kind == "function_call":
        add_call(out, fields.require_text("call_id"), fields.require_text("name"), fields.take("arguments"))
    elif kind == "function_call_output":
        out.append({"role": "tool", "tool_call_id": fields.require_text("call_id"),
                    "content": _content(fields, "output", may_lack=True)})
    elif kind == "reasoning": _add_reasoning(fields, out)
    else: raise invalid(f"{fields.path('type')} is {str(kind)[:60]!r}, expected message, function_call, "
                        "function_call_output or reasoning", fields.path("type"), "unsupported")


def _spell(out: Sequence[dict[str, Any]], first: int, where: str, spelling: dict[str, str]) -> None:
    """Says which item the last message and its last call are of."""
    name = f"messages[{first + len(out) - 1}]"
    spelling.setdefault(name, where)
    if calls := out[-1].get("tool_calls"):
        spelling.setdefault(f"{name}.tool_calls[{len(calls) - 1}].function", where)


def _message(fields: Fields, out: list[dict[str, Any]]) -> None:
    role = fields.one_of("role", ROLES)
    if role is None: raise invalid(f"{fields.path('role')} is missing, expected one of {', '.join(ROLES)}",
                                   fields.path("role"), "missing_field")
    fields.ignore(["phase"])
    content = _content(fields, "content")
    last = out[-1] if out else {}
    # the answer after its reasoning
    if role == "assistant" and set(last) == {"role", "content", "reasoning"} and not last["content"]:
        last["content"] = content
    else: out.append({"role": role, "content": content})


def _add_reasoning(fields: Fields, out: list[dict[str, Any]]) -> None:
    texts = [each.get("text") for name in ("content", "summary") for each in fields.objects(name) or []]
    fields.ignore(["encrypted_content"])    # of a server that keeps its reasoning to itself
    if not all(isinstance(text, str) for text in texts):
        raise invalid(f"{fields.where} has no texts, expected content of type reasoning_text", fields.where)
    out.append({"role": "assistant", "content": "", "reasoning": "".join(map(str, texts))})


def _content(fields: Fields, name: str, may_lack: bool = False) -> str:
    """A text, or the texts of parts."""
    value, path = fields.take(name), fields.path(name)
    if value is None and may_lack: return ""
    if value is None: raise invalid(f"{path} is missing, expected a string or a list of parts", path,
                                    "missing_field")
    if isinstance(value, str): return unicode(value, path)
    if not isinstance(value, list): raise fields.wrong(name, value, "a string or a list of parts")
    texts = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(text, str):
            raise invalid(f"{path}[{at}] is of type {str(kind)[:40]!r}, expected input_text or output_text "
                          "with a "
                          "text: the model reads nothing else", f"{path}[{at}]", "unsupported")
        texts.append(unicode(text, f"{path}[{at}].text"))
    return "\n".join(texts)
