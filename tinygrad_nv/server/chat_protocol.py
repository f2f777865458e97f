"""Requests of conversations: JSON objects to typed ones.

Protocol: `chat(data, defaults, limits)` returns a `ChatRequest`. Other endpoints of conversations translate
their requests to the fields of this one. What depends on the chat template (reasoning_effort, verbosity) is
decided where it is rendered: conversation.py.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.text.content_format import text_of
from tinygrad_nv.engine.text.earlier_calls import arguments_of
from tinygrad_nv.server.body import require_bounded_texts
from tinygrad_nv.server.errors import APIError, invalid
from tinygrad_nv.server.fields import Fields, unicode
from tinygrad_nv.server.leniency import ignore
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.protocol import Common, answer_limit, common_fields, logprob_token_ids
from tinygrad_nv.server.structured_output import call_schema
from tinygrad_nv.server.tools import Tool, ToolChoice, legacy_choice, select_tools, tool_choice, tool_list

# reserved variables of chat templates
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                 "chat_template", "content_format", "generation_marks")
IMAGE = "image_url"     # the type of parts that are images
# of parts: what earlier answers had, and marks for caches, which keep prompts with equal beginnings anyway
PART_EXTRAS = ("cache_control", "annotations", "citations", "logprobs")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")


@dataclass(frozen=True)
class ChatRequest(Common):
    """Request of /v1/chat/completions. `extra` are further variables of the chat template, `template` stands
    for the model's own. `continued`: the answer goes on with the last message. `legacy`: tools were given as
    functions, and the call is returned as a function_call. `budget`: tokens of reasoning at most, if its end
    is a token; `must_bound`: an error otherwise."""
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...]
    choice: ToolChoice
    extra: dict[str, Any] | None = None
    effort: str | None = None
    thinking: bool | None = None        # a switch of some templates
    verbosity: str | None = None
    template: str | None = None
    continued: bool = False
    generation_prompt: bool = True
    echoed: str = ""                    # the text of the last message, in front of the answer
    special: bool = False               # the tokenizer adds its special tokens to what the template has
    legacy: bool = False
    show_reasoning: bool = True
    shows_prompt: bool = False          # its text is returned
    budget: int | None = None
    must_bound: bool = False
    # how the client spells fields whose errors name them otherwise (leniency.py)
    spelling: Mapping[str, str] = field(default_factory=dict)

    @property
    def reasons(self) -> bool:
        """Whether the reasoning is left on: the variable of the template counts before the fields."""
        extra = self.extra or {}
        if "enable_thinking" in extra: return bool(extra["enable_thinking"])
        return self.thinking is not False and self.effort != "none"

    @property
    def role(self) -> str:
        """The role of the answer: that of the last message where the prompt begins no new one, as vLLM's."""
        return "assistant" if self.generation_prompt else str(self.messages[-1]["role"])


def chat(data: dict[str, Any], defaults: SamplingParams, limits: RequestLimits) -> ChatRequest:
    """A request of /v1/chat/completions. Without `max_completion_tokens` or `max_tokens`, an answer may fill
    the context."""
    fields = Fields(data)
    listed = _messages(fields)
    require_bounded_texts([*_arguments(listed)], limits, "a tool call")
    messages = tuple(_message(item, at) for at, item in enumerate(listed))
    tools = tool_list(fields)
    if tools and not fields.left.get("functions"):
        for name in ("functions", "function_call"): fields.hint(name, ([], "auto", "none"))
    legacy = "functions" in fields.left or "function_call" in fields.left
    if legacy: tools, choice = legacy_choice(fields, tools)
    else:
        tools = select_tools(fields, tools)
        choice = tool_choice(fields, tools)
    logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, limits.logprobs)
    if top and not logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    most = answer_limit(fields, "max_completion_tokens", limits)
    # the older name gives way to the newer one, as in vLLM
    older = answer_limit(fields, "max_tokens", limits if most is None else limits.without_context())
    if most is None: most = older
    echo = fields.flag("echo")
    turn = _turn(fields, messages, echo)
    given = {"max_tokens": most, "logprobs": (top or 0) if logprobs else None,
             "logprob_token_ids": logprob_token_ids(fields, logprobs)}
    common = common_fields(fields, defaults, limits, 1, given, call_schema(tools, choice), streams_beams=True)
    # vLLM's answer with an echo tells of the prompt, too
    if echo and not common.stream and common.prompt_logprobs is None:
        common = replace(common, prompt_logprobs=top or 0,
                         params=replace(common.params, prompt_logprobs=top or 0))
    # a stop string within its arguments would truncate a tool call
    if choice.is_forced: common = replace(common, params=replace(common.params, stop=[], stop_token_ids=[]))
    _prediction(fields)
    fields.as_usual({"modalities": ["text"], "web_search_options": {}})
    fields.hint("audio", ({},))
    fields.finish()
    return ChatRequest(**vars(common), **turn, messages=messages, tools=tools, choice=choice, legacy=legacy)


def _turn(fields: Fields, messages: Sequence[dict[str, Any]], echo: bool) -> dict[str, Any]:
    """The fields that are about the chat template."""
    continued = fields.flag("continue_final_message")
    begins = fields.flag("add_generation_prompt", not continued)
    asked = {"add_generation_prompt": begins, "continue_final_message": continued}
    extra = fields.object("chat_template_kwargs") or {}
    for name in asked.keys() & extra.keys():
        if extra[name] is not asked[name]: _ignore_variable(name)
    extra = {name: value for name, value in extra.items() if name not in asked}
    if own := [name for name in OWN_VARIABLES if name in extra]:
        raise invalid(f"chat_template_kwargs has {own[0]}, which the server sets; to fix: "
                      "leave it out", "chat_template_kwargs")
    if documents := fields.objects("documents"): extra["documents"] = documents
    last = messages[-1]
    echo = echo and (last["role"] == "assistant" or not begins)
    if continued and begins:
        raise invalid("continue_final_message and add_generation_prompt are both true: the answer goes on "
                      "with "
                      "the last message or begins a new one; to fix: set add_generation_prompt to false",
                      "continue_final_message")
    budget = fields.whole("thinking_token_budget", -1)
    return {"extra": extra, "continued": continued, "generation_prompt": begins,
            "echoed": text_of(last["content"]) if echo else "",
            "special": fields.flag("add_special_tokens"),
            "template": fields.text("chat_template"), "effort": fields.one_of("reasoning_effort", EFFORTS),
            "verbosity": fields.one_of("verbosity", VERBOSITIES),
            "budget": None if budget == -1 else budget, "must_bound": True,
            "show_reasoning": fields.flag("include_reasoning", True),
            "shows_prompt": fields.flag("return_prompt_text")}


def _ignore_variable(name: str) -> None:
    """Ignores a variable of the template that a field of the request says otherwise, as vLLM does."""
    ignore(invalid(f"chat_template_kwargs has {name}, and the request's own field says otherwise; to fix: "
                   f"set {name} beside messages", f"chat_template_kwargs.{name}", "unsupported"))


def _prediction(fields: Fields) -> None:
    """Predicted content: it could make an answer faster, and changes none."""
    given = fields.object("prediction")
    if given is None: return
    inner = Fields(given, "prediction")
    if (kind := inner.text("type")) != "content":
        raise invalid(f"prediction.type is {kind!r}, expected 'content'", "prediction.type")
    _content(inner, may_lack=False)
    inner.finish()


def _messages(fields: Fields) -> Sequence[dict[str, Any]]:
    messages = fields.objects("messages")
    if messages is None: raise invalid("messages is missing, expected a list", "messages", "missing_field")
    if not messages: raise invalid("messages is empty, expected at least one message", "messages")
    return messages


def _arguments(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The texts of arguments of tool calls, which are JSON themselves."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in (*(calls if isinstance(calls, list) else ()), {"function": message.get("function_call")}):
            function = call.get("function") if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str): yield text


def _message(data: dict[str, Any], at: int) -> dict[str, Any]:
    """A message for the chat template: role, content as a string or parts, tool calls with parsed arguments.
    """
    fields = Fields(data, f"messages[{at}]")
    role = fields.require_text("role")      # others than these are for the chat template
    calls = fields.objects("tool_calls")
    if (function := fields.object("function_call")) is not None:
        calls = [*(calls or ()), {"function": function}]
    # a refusal is the text of its message
    if role == "assistant" and not fields.left.get("content"): fields.left["content"] = fields.text("refusal")
    own: list[str] | None = [] if role == "assistant" else None
    # as in vLLM, null is none for these roles alone
    may_lack = "content" not in data or role in ("assistant", "tool", "function")
    content = _content(fields, may_lack, images=role == "user", thoughts=own)
    out: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(role, role),
                           "content": content}
    if calls: out["tool_calls"] = [_call(item, f"{fields.path('tool_calls')}[{i}]")
                                   for i, item in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if (value := fields.text(name)) is not None: out[name] = value
    thoughts = ["\n".join(own or ()), fields.text("reasoning"), fields.text("reasoning_content")]
    if reasoning := next(filter(None, thoughts), None):
        out |= dict.fromkeys(("reasoning", "reasoning_content"), reasoning)
        # the name in the template of gpt-oss, which takes one of content and thinking before a call
        if not (calls and content): out["thinking"] = reasoning
    # fields of an earlier response, sent back unchanged
    fields.ignore(["refusal", "audio", "annotations"])
    fields.finish()
    return out


def _content(fields: Fields, may_lack: bool, images: bool = False,
             thoughts: list[str] | None = None) -> str | list[dict[str, Any]]:
    """A string, or parts of type text, of which the template gets what it reads; some of them may be
    `images`, which a user may send. Of an assistant's message, `thoughts` get the texts of reasoning, and
    refusals are text."""
    value, path = fields.take("content"), fields.path("content")
    if value is None:
        if may_lack: return ""
        raise invalid(f"{path} is missing, expected a string or a list of parts", path, "missing_field")
    if isinstance(value, str): return unicode(value, path)
    if not isinstance(value, list): raise fields.wrong("content", value, "a string or a list of parts")
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(value):
        if not isinstance(part, dict): raise fields.wrong(f"content[{i}]", part, "an object")
        if images and part.get("type") == IMAGE: parts.append(part)
        elif thoughts is not None and (kind := part.get("type")) in ("thinking", "reasoning"):
            thoughts.append(_part_text(part, f"{path}[{i}]", kind if kind in part else "text"))
        else:
            refused = thoughts is not None and part.get("type") == "refusal"
            if not refused and part.get("type") not in ("text", "input_text", "output_text"):
                raise only_text(f"{path}[{i}].type", part)
            text = _part_text(part, f"{path}[{i}]", "refusal" if refused else "text")
            parts.append({"type": "text", "text": text})
    return parts


def _part_text(part: dict[str, Any], path: str, name: str) -> str:
    """The text of a part, by its `name`."""
    inner = Fields(part, path)
    inner.ignore(("type", *PART_EXTRAS))
    text = inner.text(name)
    if text is None: raise invalid(f"{path}.{name} is missing, expected a string", f"{path}.{name}")
    inner.finish()
    return text


def only_text(path: str, part: dict[str, Any]) -> APIError:
    """Returns the error for a part that the model does not read."""
    return invalid(f"{path} is {str(part.get('type'))[:40]!r}, expected 'text': the model reads nothing else",
                   path, "unsupported")


def _call(data: dict[str, Any], path: str) -> dict[str, Any]:
    """A tool call of an earlier turn. Templates write arguments as JSON themselves: they get the value; that
    of a custom tool is a text, in {"input": text}."""
    fields = Fields(data, path)
    if (custom := fields.object("custom")) is not None:
        function = Fields(custom, f"{path}.custom")
        name, given = function.require_text("name"), {"input": function.text("input") or ""}
    else:
        function = Fields(fields.object("function") or {}, f"{path}.function")
        name, given = function.require_text("name"), arguments_of(function.take("arguments"))
    fields.ignore(("type", "index"))
    made = {"id": fields.text("id") or "", "type": "function", "function": {"name": name, "arguments": given}}
    for each in (function, fields): each.finish()
    return made
