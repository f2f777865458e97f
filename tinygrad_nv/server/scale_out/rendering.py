"""POST /v1/completions/render, and of /v1/chat/completions, /v1/messages and /v1/responses: the request of
/inference/v1/generate that a request comes to, without running it.

Protocol: a request of the endpoint without "/render" is read in the same way; the answer has its token ids
and its `sampling_params` as vLLM writes them: numbers and lists always, other parameters where they are not
the default. Completions give a list with a request for each prompt.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.sampling import GREEDY_BELOW, SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams
from tinygrad_nv.server import completions, protocol
from tinygrad_nv.server.chat_protocol import ChatRequest, chat
from tinygrad_nv.server.conversation import Conversation
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.messages_request import message_request
from tinygrad_nv.server.parsers.table import NONE
from tinygrad_nv.server.protocol import Common
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.responses_request import response_request
from tinygrad_nv.server.service import Service

ALWAYS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "stop",
          "stop_token_ids", "bad_words")
# numbers that greedy sampling does not use
SAMPLED = ("top_p", "min_p")
# how vLLM's engine passes outputs on: 1 is for streams
DELTAS, WHOLE = 1, 2
# what only this package's parameters have, and what is written in another way
OWN = ("structured_outputs", "reasoning", "output_kind", "best_of", "logits_processors", "guided_decoding",
       "truncate_prompt_tokens", "skip_clone", "skip_reading_prefix_cache", "repetition_detection")


async def render_completion(request: Request, service: Service, record: Record,
                            data: dict[str, Any]) -> Response:
    """The requests of the prompts of a request of /v1/completions."""
    service.require_generator()
    parsed = await service.read(record, lambda: protocol.completion(data, service.model.defaults,
                                                                    service.limits))
    _require_no_beams(parsed)
    service.require_name(parsed.model)
    prompts, _ = await service.aside(record.size, lambda: completions.tokenize_prompts(service, parsed))
    name = _name(record, data)
    offsets = [_offsets(service, parsed, given, ids) if data.get("return_token_offsets") else None
               for given, ids in zip(parsed.prompts, prompts, strict=True)]
    return JSONAnswer([{**_make_request(service, parsed, ids, data), "token_offsets": offsets[at],
                        "request_id": name if len(prompts) == 1 else f"{name}-{at}"}
                       for at, ids in enumerate(prompts)])


async def render_chat(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The request of a request of /v1/chat/completions."""
    parsed = await service.read(record, lambda: chat(data, service.model.defaults, service.limits))
    return await _render(service, record, parsed, data)


async def render_message(request: Request, service: Service, record: Record,
                         data: dict[str, Any]) -> Response:
    """The request of a request of /v1/messages."""
    parsed = await service.read(record, lambda: message_request(data, service.model.defaults, service.limits))
    return await _render(service, record, parsed, data)


async def render_response(request: Request, service: Service, record: Record,
                          data: dict[str, Any]) -> Response:
    """The request of a request of /v1/responses, which goes on with no earlier one."""
    if data.get("previous_response_id") is not None:
        raise invalid("previous_response_id is not rendered, expected all messages in input",
                      "previous_response_id", "unsupported")
    parsed = await service.read(record, lambda: response_request(
        data, service.responses_of(record), service.model.defaults, service.limits))
    return await _render(service, record, parsed.chat, data)


async def _render(service: Service, record: Record, parsed: ChatRequest, data: dict[str, Any]) -> Response:
    _require_no_beams(parsed)
    conversation = await Conversation.of(service, parsed, record.size)
    if conversation.images is not None:
        raise invalid("messages have images, which are not rendered; to fix: POST /v1/chat/completions",
                      "messages", "unsupported")
    made = _make_request(service, conversation.request, conversation.prompt, data)
    if conversation.reasoning != NONE:
        variables = {**(parsed.extra or {}), "add_generation_prompt": parsed.generation_prompt,
                     "continue_final_message": parsed.continued}
        made |= {"reasoning_parser_kwargs": {"chat_template_kwargs": variables}}
    # without reasoning before it a constraint holds from the first token on
    params = conversation.request.params
    made["reasoning_ended"] = params.structured_outputs is not None and params.reasoning is None
    return JSONAnswer({**made, "request_id": _name(record, data)})


def _make_request(service: Service, parsed: Common, prompt: list[int],
                  data: dict[str, Any]) -> dict[str, Any]:
    """A request of /inference/v1/generate."""
    most = parsed.params.max_tokens
    room = service.model.length - len(prompt)
    made = sampling_params(parsed.params, room if most is None else min(most, room), parsed.stream)
    constrained = parsed.params.structured_outputs is not None
    options = {"include_usage": parsed.usage, "continuous_usage_stats": parsed.usages}
    return {"request_id": "", "token_ids": prompt, "token_offsets": None, "features": None,
            "content_parts": None, "sampling_params": made, "model": parsed.model,
            "reasoning_ended": True if constrained else None, "reasoning_parser_kwargs": None,
            "return_token_ids": None, "output_mode": "tokens", "stream": parsed.stream,
            "stream_options": options if parsed.stream and data.get("stream_options") else None,
            "cache_salt": parsed.salt or None, "priority": parsed.priority, "kv_transfer_params": None,
            "ec_transfer_params": None}


def sampling_params(params: SamplingParams, most: int, stream: bool) -> dict[str, Any]:
    """Parameters as vLLM writes them, with `most` tokens of an answer."""
    greedy, usual, made = params.temperature < GREEDY_BELOW, SamplingParams(), dict[str, Any]()
    for each in fields(params):
        value = most if each.name == "max_tokens" else getattr(params, each.name)
        shown = each.name in ALWAYS or (each.name in SAMPLED and not greedy)
        if each.name not in OWN and (shown or value != getattr(usual, each.name)): made[each.name] = value
    if params.repetition_detection is not None:
        made["repetition_detection"] = vars(params.repetition_detection)
    if (constraint := params.structured_outputs) is not None:
        made["structured_outputs"] = _constraint(constraint)
    return made | {"output_kind": DELTAS if stream else WHOLE, "skip_clone": True,
                   "skip_reading_prefix_cache": params.prompt_logprobs is not None}


def _constraint(params: StructuredOutputsParams) -> dict[str, Any]:
    made = {name: getattr(params, name) for name in ("json", "regex", "choice", "grammar")}
    return {**made, "json_object": params.json_object or None,
            "disable_any_whitespace": params.disable_any_whitespace, "disable_additional_properties": False,
            "whitespace_pattern": None, "structural_tag": None}


def _offsets(service: Service, parsed: protocol.CompletionRequest, given: Any,
             ids: Sequence[int]) -> list[tuple[int, int]] | None:
    """Returns the place of each token in the text of a prompt; None for token ids, and for one that is cut.
    """
    if not isinstance(given, str): return None
    found = service.require_tokenizer().backend.encode(given, add_special_tokens=parsed.special)
    return found.offsets if found.ids == [*ids] else None


def _require_no_beams(parsed: Common) -> None:
    if parsed.beams is None: return
    raise invalid("use_beam_search is not rendered; to fix: leave it out", "use_beam_search", "unsupported")


def _name(record: Record, data: dict[str, Any]) -> str:
    given = record.client_id or data.get("request_id")
    return record.id if given is None else f"{record.id.partition('-')[0]}-{given}"
