"""Requests: JSON objects to typed ones.

Protocol: `completion(data, defaults, limits)` and `chat(…)` check every field's type and range, and return a
`CompletionRequest` or `ChatRequest` whose `params` are ready for the engine. Names are OpenAI's, and vLLM's
for what OpenAI lacks (top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos,
structured_outputs, priority). Unsupported features are rejected by name. Fields that cannot affect an answer
(user, metadata, store), and fields that ask for the default behaviour, are accepted and ignored. An unknown
field is an error: it may be misspelt.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad_nv.engine.prompts import TextOrTokens
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import RequestError
from tinygrad_nv.server.errors import APIError, api_error, invalid
from tinygrad_nv.server.fields import Fields, parse, unicode
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.structured_output import call_schema, structured
from tinygrad_nv.server.tools import Tool, ToolChoice, tool_choice, tool_list

WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                  "request_id")
# vLLM's fields that are accepted with their default value only
USUAL = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "detokenize": True,
         "use_beam_search": False, "early_stopping": False, "length_penalty": 1.0}
TOP_LOGPROBS = 20
# reserved variables of chat templates
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt",
                 "continue_final_message", "chat_template")
# limits of OpenAI and vLLM
STOPS, PENALTY = 16, 2.0


@dataclass(frozen=True)
class Common:
    """Fields of both kinds of requests. `params.n` texts for every prompt."""
    model: str | None
    params: SamplingParams
    stream: bool
    usage: bool             # a last chunk has the usage
    usages: bool            # every chunk has
    priority: int


@dataclass(frozen=True)
class CompletionRequest(Common):
    """Of /v1/completions."""
    prompts: tuple[TextOrTokens, ...]
    echo: bool
    ids: bool               # return token ids, too


@dataclass(frozen=True)
class ChatRequest(Common):
    """Of /v1/chat/completions. `extra` are further variables of the chat template."""
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...]
    choice: ToolChoice
    extra: dict[str, Any]


def completion(data: dict[str, Any], defaults: SamplingParams, limits: RequestLimits) -> CompletionRequest:
    """A request of /v1/completions. `max_tokens` defaults to 16, as OpenAI's."""
    fields = Fields(data)
    texts = prompts(fields)
    if fields.text("suffix"):
        raise invalid("suffix is not served: no model here fills a gap; to fix: put what follows into the "
                      "prompt, or leave suffix out", "suffix", "unsupported")
    echo = fields.flag("echo")
    logprobs = fields.whole("logprobs", 0, TOP_LOGPROBS)
    if echo and logprobs is not None:
        raise invalid("logprobs of an echoed prompt are not computed; to fix: leave out echo or logprobs",
                      "logprobs", "unsupported")
    most = fields.whole("max_tokens", 1)
    limit = 16 if most is None else most
    common = _common(fields, defaults, limits, len(texts), {"max_tokens": limit, "logprobs": logprobs})
    best_of = fields.whole("best_of", 1)
    if best_of is not None and best_of != getattr(common.params, "n", 1):
        raise invalid(f"best_of is {best_of}, and is served only equal to n; to fix: ask for n choices with "
                      "logprobs and choose", "best_of", "unsupported")
    ids = fields.flag("return_token_ids")
    fields.as_usual({"add_special_tokens": True})
    fields.finish()
    return CompletionRequest(**vars(common), prompts=texts, echo=echo, ids=ids)


def chat(data: dict[str, Any], defaults: SamplingParams, limits: RequestLimits) -> ChatRequest:
    """A request of /v1/chat/completions. Without `max_completion_tokens` or `max_tokens`, an answer may fill
    the context."""
    fields = Fields(data)
    messages = tuple(_message(item, at) for at, item in enumerate(_messages(fields)))
    tools = tool_list(fields)
    choice = tool_choice(fields, tools)
    logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, TOP_LOGPROBS)
    if top is not None and not logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    limits_given = [fields.whole("max_completion_tokens", 1), fields.whole("max_tokens", 1)]
    most = min((limit for limit in limits_given if limit is not None), default=None)
    extra = fields.object("chat_template_kwargs") or {}
    if own := [name for name in OWN_VARIABLES if name in extra]:
        raise invalid(f"chat_template_kwargs has {own[0]}, which the server sets; to fix: "
                      "leave it out", "chat_template_kwargs")
    if not fields.flag("add_generation_prompt", True) or fields.flag("continue_final_message"):
        raise invalid("a conversation always goes on with the assistant's turn; to fix: use /v1/completions "
                      "to continue a text", "add_generation_prompt", "unsupported")
    if fields.take("chat_template") is not None:
        raise invalid("a template from a request is not run; to fix: start the server with --chat-template",
                      "chat_template", "unsupported")
    given = {"max_tokens": most, "logprobs": (top or 0) if logprobs else None}
    common = _common(fields, defaults, limits, 1, given, call_schema(tools, choice))
    # a stop string within its arguments would truncate a tool call
    if choice.forced: common = replace(common, params=replace(common.params, stop=(), stop_token_ids=()))
    fields.as_usual({"modalities": ["text"]})
    fields.finish()
    return ChatRequest(**vars(common), messages=messages, tools=tools, choice=choice, extra=extra)


def _common(fields: Fields, defaults: SamplingParams, limits: RequestLimits, prompts: int,
            given: dict[str, Any], forced: dict[str, Any] | None = None) -> Common:
    """Fields of both kinds. `given`: sampling parameters already read. `forced`: a schema for the whole
    answer, required by the tool choice."""
    given = {"logprobs": None, **given} | {
        "temperature": fields.number("temperature", 0), "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", -1), "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0),
        "presence_penalty": fields.number("presence_penalty", -PENALTY, PENALTY),
        "frequency_penalty": fields.number("frequency_penalty", -PENALTY, PENALTY),
        "seed": fields.whole("seed", -(1 << 63), (1 << 64) - 1), "n": fields.whole("n", 1),
        "min_tokens": fields.whole("min_tokens", 0), "logit_bias": _bias(fields),
        "stop": fields.texts("stop", STOPS) or None,
        "stop_token_ids": fields.wholes("stop_token_ids") or None,
        "ignore_eos": fields.flag("ignore_eos") or None,
        "include_stop_str_in_output": fields.flag("include_stop_str_in_output") or None,
        "structured_outputs": structured(fields, limits, forced)}
    # OpenAI's seeds are signed
    if given["seed"] is not None: given["seed"] %= 1 << 64
    if (choices := prompts * (given["n"] or 1)) > limits.choices:
        raise invalid(f"{choices} choices requested (prompts × n),  expected at most {limits.choices}", "n")
    stream = fields.flag("stream")
    options = Fields(fields.object("stream_options") or {}, "stream_options")
    usage = options.flag("include_usage")
    usages = options.flag("continuous_usage_stats")
    options.ignore(["include_obfuscation"])
    options.finish()
    model, priority = fields.text("model"), fields.whole("priority", -(1 << 31), 1 << 31) or 0
    fields.ignore(WITHOUT_EFFECT)
    fields.as_usual(USUAL)
    return Common(model, _params(defaults, given), stream, usage, usages, priority)


def _params(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    # max_tokens None is meaningful: as many as the context holds
    changed = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    try: return replace(defaults, **changed)
    except RequestError as error:
        # the message starts with the parameter's name
        name = error.found.split(" ", 1)[0]
        raise api_error(error, name if name in changed else None) from error


def _bias(fields: Fields) -> dict[int, float] | None:
    """logit_bias: token ids, which JSON makes strings, to numbers from -100 to 100."""
    data = fields.object("logit_bias")
    if not data: return None
    entries, out = Fields(data, "logit_bias"), {}
    for key in data:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid(f"logit_bias has the key {key[:40]!r}, expected token ids", "logit_bias")
        value = entries.number(key, -100, 100)
        if value is not None: out[int(key)] = value
    return out or None


def prompts(fields: Fields, name: str = "prompt") -> tuple[TextOrTokens, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    value = fields.take(name)
    expected = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if value is None: raise invalid(f"{name} is missing, expected {expected}", name, "missing_field")
    if isinstance(value, str): return (unicode(value, name),)
    if not isinstance(value, list): raise fields.wrong(name, value, expected)
    if not value: raise invalid(f"{name} is an empty list, expected {expected}", name)
    if all(isinstance(item, str) for item in value): return tuple(unicode(item, name) for item in value)
    if all(type(item) is int for item in value): return (value,)
    if all(isinstance(item, list) and all(type(i) is int for i in item) for item in value):
        return tuple(value)
    raise invalid(f"{name} is a list of mixed types, expected {expected}", name)


def _messages(fields: Fields) -> Sequence[dict[str, Any]]:
    messages = fields.objects("messages")
    if messages is None: raise invalid("messages is missing, expected a list", "messages", "missing_field")
    if not messages: raise invalid("messages is empty, expected at least one message", "messages")
    return messages


def _message(data: dict[str, Any], at: int) -> dict[str, Any]:
    """A message for the chat template: role, content as one string, tool calls with parsed arguments."""
    fields = Fields(data, f"messages[{at}]")
    role = fields.text("role")
    if role not in (roles := ("system", "developer", "user", "assistant", "tool", "function")):
        raise invalid(f"{fields.path('role')} is {role!r}, expected one of {', '.join(roles)}",
                      fields.path("role"))
    calls = fields.objects("tool_calls")
    content = _content(fields, may_lack=role == "assistant")
    out: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(role, role),
                           "content": content}
    if calls: out["tool_calls"] = [_call(item, f"{fields.path('tool_calls')}[{i}]")
                                   for i, item in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if (value := fields.text(name)) is not None: out[name] = value
    # fields of an earlier response, sent back unchanged
    fields.ignore(["refusal", "audio", "annotations", "function_call", "reasoning", "reasoning_content"])
    fields.finish()
    return out


def _content(fields: Fields, may_lack: bool) -> str:
    """A string, or parts of type text, which are joined by new lines, as `LLM.chat` joins them."""
    value, path = fields.take("content"), fields.path("content")
    if value is None:
        if may_lack: return ""
        raise invalid(f"{path} is missing, expected a string or a list of parts", path, "missing_field")
    if isinstance(value, str): return unicode(value, path)
    if not isinstance(value, list): raise fields.wrong("content", value, "a string or a list of parts")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict): raise fields.wrong(f"content[{i}]", part, "an object")
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise invalid(f"{path}[{i}].type is {str(part.get('type'))[:40]!r}, expected 'text': the model "
                          "reads nothing else", f"{path}[{i}].type", "unsupported")
        text = part.get("text")
        if not isinstance(text, str):
            raise invalid(f"{path}[{i}].text is missing, expected a string", f"{path}[{i}].text")
        texts.append(unicode(text, f"{path}[{i}].text"))
    return "\n".join(texts)


def _call(data: dict[str, Any], path: str) -> dict[str, Any]:
    """A tool call of an earlier turn. Templates write arguments as JSON themselves: they get the object."""
    fields = Fields(data, path)
    function = Fields(fields.object("function") or {}, f"{path}.function")
    name, arguments = function.text("name"), function.take("arguments")
    if not name: raise invalid(f"{path}.function.name is missing, expected a string", f"{path}.function.name")
    if isinstance(arguments, str) and arguments:
        try: arguments = parse(arguments.encode())
        except (APIError, UnicodeEncodeError) as error:
            raise invalid(f"{path}.function.arguments is no JSON object: {error}",
                          f"{path}.function.arguments") from error
    return {"id": fields.text("id") or "", "type": "function",
            "function": {"name": name, "arguments": arguments or {}}}
