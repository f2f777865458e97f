"""POST /v1/completions/derender, /v1/chat/completions/derender: answers of /inference/v1/generate as those of
the request that was rendered.

Protocol: `generate_response` (of completions a list of them) has the token ids, `chat_request` or
`completion_request` is what was rendered: its tools, parsers and stop strings count. With `stream` each
`generate_chunk` becomes one chunk. The client keeps `stream_state` between its chunks: the token ids so far,
which are read again each time.
"""
from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.outputs import Delta, EngineCoreOutput
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.scheduler_output import Logprobs
from tinygrad_nv.engine.text.output_processor import OutputProcessor
from tinygrad_nv.server import chat, completions, protocol
from tinygrad_nv.server.chat_protocol import chat as parse_chat
from tinygrad_nv.server.conversation import Conversation, Reader, Update
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.usage import Usage

# fields of answers of /inference/v1/generate that change nothing here
OTHER = ("model", "created", "prompt_logprobs", "prompt_token_id_logprobs", "mm_placeholders", "metrics",
         "kv_transfer_params", "ec_transfer_params")
# of a stream's state, as vLLM has them: what its own way of decoding needs
UNUSED: dict[str, Any] = {"prev_tokens": [], "prefix_offset": 0, "read_offset": 0,
                          "logprob_context_token_ids": []}
WORK = 8    # bytes of a request that take as long as a token does


@dataclass(frozen=True)
class Choice:
    """A choice of an answer of /inference/v1/generate, or what it gained in a chunk."""
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    reason: str | None = None
    stop: str | int | None = None


@dataclass(frozen=True)
class Generated:
    """An answer of /inference/v1/generate, or a chunk of one."""
    name: str
    choices: list[Choice]
    prompt: tuple[int, ...] | None
    usage: Usage | None


@dataclass(frozen=True)
class StreamState:
    """The state of a stream, which the client keeps: the tokens so far, by chunk."""
    chunks: list[tuple[int, ...]]
    role_sent: bool
    offset: int
    calls: tuple[str, ...]

    def fields(self) -> dict[str, Any]:
        """The state as vLLM names it."""
        return {**UNUSED, "role_sent": self.role_sent, "logprob_text_offset": self.offset,
                "output_token_ids": [token for chunk in self.chunks for token in chunk],
                "output_chunk_lens": [*map(len, self.chunks)], "tools_streamed": bool(self.calls),
                "last_tool_call_ids": [*self.calls]}


async def derender_chat(request: Request, service: Service, record: Record,
                        data: dict[str, Any]) -> Response:
    """The answer of a conversation, or a chunk of one."""
    service.require_generator()
    fields, stream = Fields(data), bool(data.get("stream"))
    fields.flag("stream")
    made, state, prompt, count = _common(service, fields, "chat", stream)
    asked = _require(fields, "chat_request")
    fields.finish()
    parsed = await service.read(record, lambda: parse_chat(asked, service.model.defaults, service.limits))
    conversation = await Conversation.of(service, parsed, record.size)
    found = [each for each in made.choices if each.logprobs is not None]
    params = replace(conversation.request.params, n=1 if stream else max(len(made.choices), 1),
                     logprobs=(parsed.params.logprobs or 0) if found else None)
    conversation = replace(conversation, prompt=[*(prompt or conversation.prompt)], request=replace(
        conversation.request, params=params, beams=None, stream=stream, usage=False, usages=False,
        prompt_logprobs=None))
    shared = {"id": made.name, "object": "chat.completion.chunk" if stream else "chat.completion",
              "created": int(time.time()), "model": conversation.model}
    updates = await service.aside(_work(made, state), lambda: _read(conversation, made, state, record))
    record.prompt_tokens = count
    if not stream: return await chat.whole_answer(conversation, _iterate(updates), shared, record)
    chunk: dict[str, Any] = {
        **shared, "choices": [], "usage": None if made.usage is None else made.usage.fields(),
        **dict.fromkeys(("system_fingerprint", "prompt_token_ids", "prompt_text", "metrics"))}
    if not made.choices: return JSONAnswer({"chunk": chunk, "stream_state": state.fields()})
    entry = {"stop_reason": None, **chat.chunk_entry(updates[-1], conversation),
             "index": made.choices[0].index}
    if not state.role_sent: entry["delta"] = {"role": "assistant", **entry["delta"]}
    ids = tuple(call["id"] for call in entry["delta"].get("tool_calls", ()) if "id" in call)
    after = StreamState([*state.chunks, *_chunk(made)], True, state.offset, state.calls + ids)
    return JSONAnswer({"chunk": {**chunk, "choices": [entry]}, "stream_state": after.fields()})


async def derender_completion(request: Request, service: Service, record: Record,
                              data: dict[str, Any]) -> Response:
    """The answer of a completion, or a chunk of one."""
    service.require_generator()
    if data.get("stream"): return await _completion_chunk(service, record, data)
    fields = Fields(data)
    fields.flag("stream")
    name, given = service.require_name(fields.text("model")), fields.objects("generate_responses")
    if not given:
        raise invalid("generate_responses is missing or empty, expected answers of /inference/v1/generate",
                      "generate_responses", "missing_field" if given is None else None)
    counts = fields.wholes("prompt_tokens") or (0,) * len(given)
    prompts = _lists(fields, "prompt_token_ids") or [()] * len(given)
    for each, found in (("prompt_tokens", counts), ("prompt_token_ids", prompts)):
        if len(found) != len(given):
            raise invalid(f"{each} has {len(found)} entries, expected one for each of {len(given)} answers",
                          each, "wrong_type")
    params, by_id = await _completion_params(service, record, fields.object("completion_request"))
    fields.finish()
    made = [_read_answer(service, each, f"generate_responses[{at}]") for at, each in enumerate(given)]

    def read() -> list[tuple[Choice, Delta]]:
        return [(choice, _deltas(service, params, ids or each.prompt or (), [choice])[0])
                for each, ids in zip(made, prompts, strict=True) for choice in each.choices]
    deltas = await service.aside(sum(_work(each) for each in made), read)
    parts = []
    for at, (_, delta) in enumerate(deltas):
        record.count_delta(at, delta)
        parts.append(_completion_entry(at, delta, params, by_id, 0)[0])
    record.prompt_tokens, record.model = sum(counts), name
    shared = {"id": made[0].name, "object": "text_completion", "created": int(time.time()), "model": name}
    chunks = _iterate([{"choices": [part]} for part in parts])
    return await completions.whole_answer(service, chunks, shared, len(parts), record)


async def _completion_chunk(service: Service, record: Record, data: dict[str, Any]) -> Response:
    fields = Fields(data)
    fields.flag("stream")
    made, state, prompt, _ = _common(service, fields, "completion", True)
    name = service.require_name(data.get("model"))
    params, by_id = await _completion_params(service, record, fields.object("completion_request"))
    fields.finish()
    chunk: dict[str, Any] = {
        "id": made.name, "object": "text_completion", "created": int(time.time()), "model": name,
        "choices": [], "usage": None if made.usage is None else made.usage.fields(),
        **dict.fromkeys(("system_fingerprint", "metrics"))}
    if not made.choices: return JSONAnswer({"chunk": chunk, "stream_state": state.fields()})
    deltas = await service.aside(_work(made, state), lambda: _deltas(
        service, params, prompt or (), [*_earlier(state), *made.choices]))
    entry, offset = _completion_entry(made.choices[0].index, deltas[-1], params, by_id, state.offset)
    after = StreamState([*state.chunks, *_chunk(made)], state.role_sent, offset, ())
    return JSONAnswer({"chunk": {**chunk, "choices": [entry]}, "stream_state": after.fields()})


# **** requests ****

def _common(service: Service, fields: Fields, kind: str, stream: bool
            ) -> tuple[Generated, StreamState, tuple[int, ...] | None, int]:
    """Returns the answer or chunk, the state, the prompt's token ids and their number."""
    service.require_name(fields.text("model"))
    name = "generate_chunk" if stream else "generate_response"
    made = _read_answer(service, _require(fields, name), name, whole=not stream)
    state = _state(fields.object("stream_state") or {})
    prompt = fields.wholes("prompt_token_ids") or made.prompt
    used = len(prompt or ()) + sum(map(len, state.chunks)) + sum(len(each.tokens) for each in made.choices)
    if stream and (len(made.choices) > 1 or used > service.model.length):
        raise invalid(f"{name} has {len(made.choices)} choices, and {used} tokens with those before, "
                      f"expected one choice, and at most {service.model.length} tokens", name)
    return made, state, prompt, fields.whole("prompt_tokens", 0) or 0


def _require(fields: Fields, name: str) -> dict[str, Any]:
    if (value := fields.object(name)) is not None: return value
    raise invalid(f"{fields.path(name)} is missing, expected an object", fields.path(name), "missing_field")


def _read_answer(service: Service, given: dict[str, Any], path: str, whole: bool = True) -> Generated:
    fields = Fields(given, path)
    if fields.text("output_mode") not in (None, "tokens"):
        raise invalid(f"{path}.output_mode is not 'tokens': other answers have their text",
                      f"{path}.output_mode", "wrong_type")
    if (listed := fields.objects("choices")) is None:
        raise invalid(f"{path}.choices is missing, expected a list", f"{path}.choices", "missing_field")
    if len(listed) > service.limits.choices:
        raise invalid(f"{path} has {len(listed)} choices, expected at most {service.limits.choices}", path)
    choices = [_choice(service, Fields(each, f"{path}.choices[{at}]"), whole)
               for at, each in enumerate(listed)]
    used, name, prompt = fields.object("usage"), fields.text("request_id"), fields.wholes("prompt_token_ids")
    usage = None
    if used is not None:
        counts = Fields(used, f"{path}.usage")
        usage = Usage(counts.whole("prompt_tokens", 0) or 0, counts.whole("completion_tokens", 0) or 0)
    fields.ignore(OTHER)
    fields.finish()
    return Generated(name or "", choices, prompt, usage)


def _choice(service: Service, fields: Fields, whole: bool) -> Choice:
    tokens, path = fields.wholes("token_ids") or (), fields.path("token_ids")
    if (whole and not tokens) or len(tokens) > service.model.length:
        raise invalid(f"{path} has {len(tokens)} token ids, expected 1 to {service.model.length}", path)
    tokenizer = service.require_tokenizer()
    if bad := [token for token in dict.fromkeys(tokens) if token >= 1 << 31 or tokenizer.unknown(token)]:
        raise invalid(f"{path} has the id {str(bad[0])[:20]}, which is out of vocabulary", path)
    reason, stop, index = fields.text("finish_reason"), fields.take("stop_reason"), fields.whole("index", 0)
    given = fields.object("logprobs")
    logprobs = None if given is None else tuple(
        _logprobs(Fields(each, fields.path("logprobs"))) for each in Fields(given).objects("content") or ())
    fields.ignore(("routed_experts", "sampling_mask", "weight_versions"))
    fields.finish()
    return Choice(index or 0, tokens, logprobs, (reason or "stop") if whole else reason, stop)


def _logprobs(fields: Fields) -> Logprobs:
    """A token's entry, as /inference/v1/generate writes it."""
    chosen, rank = fields.number("logprob") or 0.0, fields.whole("rank", 0) or 0
    likeliest = [(each.whole("rank", 0) or 0, each.whole("token_id", 0) or 0, each.number("logprob") or 0.0)
                 for each in (Fields(one, fields.where) for one in fields.objects("top_logprobs") or ())]
    return Logprobs(chosen, rank, tuple((token, value) for _, token, value in sorted(likeliest)))


def _state(given: dict[str, Any]) -> StreamState:
    fields = Fields(given, "stream_state")
    tokens, counts = fields.wholes("output_token_ids") or (), fields.wholes("output_chunk_lens") or ()
    if sum(counts) != len(tokens):
        raise invalid(f"stream_state has {len(tokens)} token ids in chunks of {sum(counts)} in all",
                      "stream_state.output_chunk_lens", "wrong_type")
    chunks = [tokens[first:last] for first, last in pairwise(accumulate(counts, initial=0))]
    return StreamState(chunks, fields.flag("role_sent"), fields.whole("logprob_text_offset", 0) or 0,
                       fields.texts("last_tool_call_ids", 1 << 10))


async def _completion_params(service: Service, record: Record,
                             asked: dict[str, Any] | None) -> tuple[SamplingParams, bool]:
    if asked is None: return SamplingParams(), False
    parsed = await service.read(record, lambda: protocol.completion(asked, service.model.defaults,
                                                                    service.limits))
    return parsed.params, parsed.ids_for_texts


def _lists(fields: Fields, name: str) -> list[tuple[int, ...]] | None:
    """A list of lists of token ids; null for one is an empty one."""
    value = fields.take(name)
    if value is None: return None
    if not isinstance(value, list): raise fields.wrong(name, value, "a list of lists of token ids")
    return [Fields({name: each}).wholes(name) or () for each in value]


# **** answers ****

def _read(conversation: Conversation, made: Generated, state: StreamState, record: Record) -> list[Update]:
    """Returns an update for each chunk so far, or for each choice."""
    service, params = conversation.service, replace(conversation.request.params, n=1)
    readers: dict[int, Reader] = {}
    if conversation.request.stream:
        deltas = _deltas(service, params, conversation.prompt, [*_earlier(state), *made.choices])
        return [conversation.read(readers, 0, delta, record) for delta in deltas]
    out = []
    for at, choice in enumerate(made.choices):
        [delta] = _deltas(service, params, conversation.prompt, [choice])
        record.count_delta(at, delta)
        out.append(conversation.read(readers, at, delta, record))
    return out


def _deltas(service: Service, params: SamplingParams, prompt: Sequence[int],
            chunks: Iterable[Choice]) -> list[Delta]:
    """The texts of one answer's chunks. An end token has none."""
    processor = OutputProcessor(service.require_tokenizer(), prompt, replace(params, n=1, detokenize=True))
    ends, out = {*service.model.eos, *params.stop_token_ids}, list[Delta]()
    for each in chunks:
        complete = not each.tokens or each.tokens[-1] not in ends
        made = processor.process(EngineCoreOutput("", 0, each.tokens, each.logprobs or (), each.reason,
                                                  each.stop, complete=complete))
        if made is None: raise invalid("the stream has ended before this chunk", "stream_state")
        out.append(made)
    return out


def _completion_entry(at: int, delta: Delta, params: SamplingParams, by_id: bool,
                      offset: int) -> tuple[dict[str, Any], int]:
    """A choice of a completion, and the length of the text after it."""
    logprobs = None
    if delta.logprobs:
        top = max(len(each.top) for each in delta.logprobs) if params.logprobs is None else params.logprobs
        logprobs, _ = completions.completion_logprobs(delta.logprobs, offset, top, by_id)
    return {"index": at, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason, "prompt_token_ids": None,
            "token_ids": None}, offset + len(delta.text)


def _earlier(state: StreamState) -> list[Choice]: return [Choice(0, tokens) for tokens in state.chunks]


def _chunk(made: Generated) -> list[tuple[int, ...]]:
    """The tokens of a chunk, if it has some."""
    return [each.tokens for each in made.choices if each.tokens]


def _work(made: Generated, state: StreamState | None = None) -> int:
    """About how many bytes of a text take as long."""
    before = 0 if state is None else sum(map(len, state.chunks))
    return WORK * (before + sum(len(each.tokens) for each in made.choices))


async def _iterate(values: Iterable[Any]) -> AsyncGenerator[Any, None]:
    for each in values: yield each
