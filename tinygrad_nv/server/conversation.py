"""Steps that the endpoints of conversations share: from a `ChatRequest` to parsed answers.

Protocol: `Conversation.of(service, request)` renders the chat template and chooses the parsers; it raises
`APIError` for what the template or the parsers cannot do. `Conversation.run(record)` yields an `Update` for
each delta of the engine: its choice, and the reasoning, content and tool calls in it.

A schema, a regular expression or a grammar constrains what comes after the reasoning, where tokens tell its
end (`reasoning_tokens`); else it holds from the first token on, and the answer has no reasoning.

`reasoning_tokens` finds the markers of a reasoning parser in the vocabulary. It returns None where
an answer has no reasoning, or none that its tokens tell: the model has no parser, the prompt has ended the
reasoning, or a marker is no token of its own. A constraint then holds from the first token on.
"""
from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import ReasoningTokens
from tinygrad_nv.engine.text.content_format import text_of
from tinygrad_nv.engine.text.earlier_calls import render
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.engine.vision.prompt import PromptImages
from tinygrad_nv.errors import NVError
from tinygrad_nv.server.beams import beam_deltas
from tinygrad_nv.server.chat_protocol import EFFORTS, ChatRequest
from tinygrad_nv.server.conversation_images import has_images, with_images
from tinygrad_nv.server.errors import api_error, invalid
from tinygrad_nv.server.leniency import ignore, note, translate_names
from tinygrad_nv.server.parsers.harmony import Harmony
from tinygrad_nv.server.parsers.json_calls import CallList, ForcedCalls, NamedCall
from tinygrad_nv.server.parsers.parser import CallDelta, Chain, Content, Event, Parser, Reasoning, join_events
from tinygrad_nv.server.parsers.table import NONE, REASONING, Answer, answer_parser, markers
from tinygrad_nv.server.parsers.think import Think
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.tools import Tool
from tinygrad_nv.server.workers import INLINE_BYTES, aside

# tokens at the end of the prompt that may have the first marker of reasoning
TAIL_TOKENS = 16
BUDGET = "thinking_token_budget"


@dataclass(frozen=True)
class Update:
    """Text and calls that choice `at` gained with `delta`."""
    at: int
    delta: Delta
    events: list[Event]
    finish_reason: str | None
    reasoning_tokens: int = 0   # of the choice, so far
    unfinished: str = ""        # the text of an answer that had to be calls, and is cut inside of one

    @property
    def reasoning(self) -> str:
        """Its reasoning."""
        return "".join(each.text for each in self.events if isinstance(each, Reasoning))

    @property
    def content(self) -> str:
        """Its content."""
        return "".join(each.text for each in self.events if isinstance(each, Content))

    @property
    def calls(self) -> list[CallDelta]:
        """Its tool calls."""
        return [each for each in self.events if isinstance(each, CallDelta)]


@dataclass(frozen=True)
class Conversation:
    """A request whose prompt is rendered."""
    service: Service
    request: ChatRequest
    model: str
    prompt: list[int]
    answer: Answer
    reasoning: str
    tools: str
    images: PromptImages | None = None
    reasons: bool = False       # whether a parser looks for reasoning

    @staticmethod
    async def of(service: Service, request: ChatRequest, size: int) -> Conversation:
        """See above. `size` of the request in bytes."""
        with translate_names(request.spelling): return await Conversation._of(service, request, size)

    @staticmethod
    async def _of(service: Service, request: ChatRequest, size: int) -> Conversation:
        service.require_generator()
        model, tokenizer = service.require_name(request.model), service.require_tokenizer()
        offered = () if request.choice.mode == "none" else request.tools
        template = _template(service, request, tokenizer, bool(offered))
        images, variables = await aside(size, lambda: (has_images(service, request),
                                                       _variables(request, template)), INLINE_BYTES)
        extra = {**variables, **(request.extra or {})}
        if request.template is not None: extra["chat_template"] = request.template
        if request.continued: extra["continue_final_message"] = True
        if not request.generation_prompt: extra["add_generation_prompt"] = False
        inserted = None
        if images: prompt, inserted = await with_images(service, request, offered, extra)
        else: prompt = await service.render(size, lambda: _encode(service, tokenizer, request, offered,
                                                                  extra), request.template is not None)
        names = service.parsers.names_for(template)
        if request.choice.mode == "auto": service.parsers.require_auto()
        prefix = text_of(request.messages[-1]["content"]) if request.continued \
            else tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in offered}
        answer = Answer(prefix, request.continued, schemas, request.reasons)
        if request.thinking and names[0] == NONE and "enable_thinking" not in template: note("thinking")
        reasons = names[0] != NONE
        names, params = _constrain_answer(names, answer, tokenizer, request)
        request = replace(request, params=params)
        if any(map(tokenizer.special_text, markers(*names) if schemas else markers(names[0], NONE))):
            request = replace(request, params=replace(request.params, skip_special_tokens=False))
        return Conversation(service, request, model, prompt, answer, *names, inserted, reasons)

    def call_id(self) -> str:
        """An id for a tool call: Mistral's templates take 9 letters or digits."""
        return secrets.token_hex(5)[:9] if self.tools == "mistral" else f"call_{secrets.token_hex(12)}"

    def prompt_text(self) -> str | None:
        """The rendered prompt, where the request asks for it."""
        if not self.request.shows_prompt: return None
        return self.service.require_tokenizer().decode(self.prompt, skip_special_tokens=False)

    async def run(self, record: Record) -> AsyncGenerator[Update, None]:
        """The answer as it is generated. Counts the tokens of reasoning."""
        readers: dict[int, Reader] = {}
        request = self.request
        record.model = self.model
        deltas = beam_deltas(self.service, [self.prompt], request, record) if request.beams is not None else \
            self.service.run([self.prompt], request.params, request.priority, record, request.salt,
                             self.images)
        async for at, delta in deltas: yield self.read(readers, at, delta, record)

    def read(self, readers: dict[int, Reader], at: int, delta: Delta, record: Record) -> Update:
        """Returns the update of choice `at`; each has a reader."""
        if at not in readers: readers[at] = Reader(self._parser(), self.service.require_tokenizer())
        reader = readers[at]
        before = reader.reasoning_tokens
        events = reader.push(delta)
        record.reasoning_tokens += reader.reasoning_tokens - before
        return Update(at, delta, [*self._select_events(events)], reader.reason(delta),
                      reader.reasoning_tokens, reader.cut_text(delta))

    def _parser(self) -> Parser:
        choice = self.request.choice
        if not choice.is_forced: return answer_parser(self.reasoning, self.tools, self.answer)
        forced = NamedCall(choice.name) if choice.mode == "named" else CallList()
        if self.reasoning == NONE: return forced
        return Chain(answer_parser(self.reasoning, NONE, self.answer), forced)

    def _select_events(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            if isinstance(event, CallDelta) and event.index and not self.request.choice.several: continue
            if isinstance(event, Reasoning) and not self.request.show_reasoning: continue
            yield event


class Reader:
    """One choice in progress."""

    def __init__(self, parser: Parser, tokenizer: Tokenizer) -> None:
        self.parser, self.tokenizer = parser, tokenizer
        self.reasoning_tokens, self.called = 0, False

    def push(self, delta: Delta) -> list[Event]:
        """The events of a delta. Markers of reasoning count as reasoning."""
        events: list[Event] = []
        for text, count in self._pieces(delta):
            before = self.parser.reasoning
            events += self.parser.feed(text)
            if before or self.parser.reasoning: self.reasoning_tokens += count
        # the end token, in which an answer may end that has not ended its reasoning
        ends = delta.finish_reason == "stop" and delta.stop_reason is None
        if ends and self.parser.reasoning: self.reasoning_tokens -= 1
        if delta.finish_reason is not None: events += self.parser.flush()
        self.called = self.called or any(isinstance(event, CallDelta) for event in events)
        return join_events(events)

    def reason(self, delta: Delta) -> str | None:
        """The finish reason, "tool_calls" for a finished answer with calls."""
        return "tool_calls" if delta.finish_reason == "stop" and self.called else delta.finish_reason

    def cut_text(self, delta: Delta) -> str:
        """The text of calls that the answer had to be, and that it ends inside of."""
        last = self.parser.second if isinstance(self.parser, Chain) else self.parser
        return last.cut_text if delta.finish_reason == "length" and isinstance(last, ForcedCalls) else ""

    def _pieces(self, delta: Delta) -> list[tuple[str, int]]:
        """Its text token by token, where texts of tokens add up to it."""
        if len(delta.tokens) > 1:
            texts = [self.tokenizer.token_text(token) for token in delta.tokens]
            if "".join(texts) == delta.text: return [(text, 1) for text in texts]
        return [(delta.text, len(delta.tokens))]


def _encode(service: Service, tokenizer: Tokenizer, request: ChatRequest, offered: Sequence[Tool],
            extra: dict[str, Any]) -> list[int]:
    """The tokens of a conversation, of which some may be cut off."""
    limit = request.params.truncate_prompt_tokens
    if limit is None and not request.special:
        return service.model.encode_chat(request.messages, offered, **extra)
    text = render(tokenizer, request.messages, offered, **extra)
    tokenizer.require_fitting(text, service.model.length, truncated=limit is not None)
    return service.model.tokenize(tokenizer.encode(text, request.special), limit, request.side)


def _constrain_answer(names: tuple[str, str], answer: Answer, tokenizer: Tokenizer,
              request: ChatRequest) -> tuple[tuple[str, str], SamplingParams]:
    """Returns the names of the parsers, and the parameters, of an answer whose reasoning is free of the
    constraint, and bounded by its budget."""
    params, budget = request.params, request.budget
    if request.must_bound and budget is not None: check_budget(names[0], tokenizer, budget)
    constrained = params.structured_outputs is not None
    if not constrained and budget is None: return names, params
    tokens = reasoning_tokens(names[0], answer, tokenizer, budget)
    if tokens is None and constrained: names = NONE, names[1]
    return names, replace(params, reasoning=tokens)


def _template(service: Service, request: ChatRequest, tokenizer: Tokenizer, tools: bool) -> str:
    if request.template is None:
        try: return tokenizer.chat_template(tools)
        except NVError as error: raise api_error(error) from error
    if service.parsers.trust_request_template: return request.template
    raise invalid("a template from a request is not run; to fix: start the server with --chat-template, or "
                  "with "
                  "--trust-request-chat-template", "chat_template", "unsupported")


def efforts_of(template: str) -> list[str]:
    """Lists the values of reasoning_effort that change something: a template with `enable_thinking` alone
    knows off and on."""
    if "reasoning_effort" in template:
        return [each for each in EFFORTS if each != "none" or "enable_thinking" in template]
    return ["none", "medium"] if "enable_thinking" in template else []


def _variables(request: ChatRequest, template: str) -> dict[str, Any]:
    """Variables of the template for reasoning and verbosity."""
    out: dict[str, Any] = {}
    for name in request.extra or ():
        if name not in template: note(name if name == "documents" else f"chat_template_kwargs.{name}")
    if request.thinking is not None and "enable_thinking" in template:
        out["enable_thinking"] = request.thinking
    if (effort := request.effort) is not None:
        switches = [name for name in ("reasoning_effort", "enable_thinking") if name in template]
        if "reasoning_effort" in switches: out["reasoning_effort"] = effort
        if "enable_thinking" in switches: out["enable_thinking"] = effort != "none"
        if not switches:
            ignore(invalid(f"reasoning_effort is {effort!r}, and the chat template has neither "
                           "reasoning_effort nor enable_thinking: this model's reasoning has no switch; to "
                           "fix: leave it out", "reasoning_effort", "unsupported"))
    if request.verbosity is not None:
        if "verbosity" in template: out["verbosity"] = request.verbosity
        elif request.verbosity != "medium":
            ignore(invalid(f"verbosity is {request.verbosity!r}, and the chat template has no such variable; "
                           "to fix: leave it out, and ask for the length in a message", "verbosity",
                           "unsupported"))
    return out


def reasoning_tokens(name: str, answer: Answer, tokenizer: Tokenizer, budget: int | None
                     ) -> ReasoningTokens | None:
    """See above; `name` is the parser's."""
    if name == NONE: return None
    kind = REASONING[name]
    end = [token for each in kind.end if (token := tokenizer.backend.token_to_id(each)) is not None]
    start = tokenizer.backend.token_to_id(kind.start) if kind.start else None
    parser = kind.make(answer)
    inside = isinstance(parser, Harmony) or (isinstance(parser, Think) and parser.inside)
    ended = answer.continued or answer.prefix.rstrip().endswith("".join(kind.end))
    if len(end) < len(kind.end) or (not inside and (start is None or ended)): return None
    may_end = isinstance(parser, Harmony) and bool(answer.schemas)      # with a call, in a channel of its own
    return ReasoningTokens(None if inside else start, tuple(end), inside, may_end, budget)


def check_budget(name: str, tokenizer: Tokenizer, budget: int) -> None:
    """Ignores a budget where there is no reasoning, or no token that can end it."""
    if name == NONE:
        return ignore(invalid(f"{BUDGET} is {budget}, and the model has no reasoning parser; to fix: leave "
                              "it out, or start the server with --reasoning-parser", BUDGET, "unsupported"))
    if bad := [each for each in REASONING[name].end if tokenizer.backend.token_to_id(each) is None]:
        ignore(invalid(f"{BUDGET} is {budget}, and {bad[0]!r}, which ends the reasoning, is no token of the "
                       "vocabulary; to fix: leave it out, or bound the answer with max_completion_tokens",
                       BUDGET, "unsupported"))
