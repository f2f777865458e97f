"""POST /completion and GET /props: llama.cpp's own API, beside OpenAI's.

Protocol: fields and answers are those of llama.cpp's server. A stream has an event for each delta and a last
one with `stop`, timings and why it ended; there is no [DONE]. Defaults are the model's own, not llama.cpp's.
Fields about its cache and slots have no effect; samplers that are not here are refused unless they are off.
"""
from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygrad_nv.engine.outputs import TokenLogprobs
from tinygrad_nv.engine.sampling import MAX_BIASED_TOKENS
from tinygrad_nv.server import protocol
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.leniency import translate_names
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import Chunks, Plain, stream_events, until_disconnect
from tinygrad_nv.version import __version__

SAME = ("prompt", "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "stop", "ignore_eos", "stream")
SPELLING = {"repetition_penalty": "repeat_penalty", "max_tokens": "n_predict", "logprobs": "n_probs",
            "structured_outputs.json": "json_schema", "structured_outputs.grammar": "grammar"}
HINTS = ("cache_prompt", "id_slot", "slot_id", "n_keep", "repeat_last_n", "penalize_nl", "min_keep",
         "samplers", "timings_per_token", "return_progress", "t_max_predict_ms", "n_indent", "n_cache_reuse",
         "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length",
         "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "n_discard", "lora",
         "response_fields", "post_sampling_probs")
OFF = {"typical_p": 1.0, "dynatemp_range": 0.0, "mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0.0,
       "top_n_sigma": -1.0, "tfs_z": 1.0}


class Events(Plain):
    """Events without an end of their own."""
    end = b""


async def completion(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request of /completion."""
    service.require_generator()
    parsed, shown = await service.read(record, lambda: _parse(data, service))
    name = record.model = service.require_name(parsed.model)
    record.stream = parsed.stream
    if len(parsed.prompts) != 1:
        raise invalid("prompt has several prompts, expected one; to fix: POST /v1/completions", "prompt",
                      "unsupported")
    prompt = parsed.prompts[0]
    ids = await service.aside(record.size, lambda: service.model.tokenize(prompt))
    chunks = _chunks(service, parsed, ids, record, name, shown)
    if parsed.stream: return await stream_events(request, chunks, record, Events())
    return await until_disconnect(request, _whole(chunks))


def _parse(data: dict[str, Any], service: Service) -> tuple[protocol.CompletionRequest, bool]:
    """Returns the request, and whether tokens are returned."""
    fields = Fields(data)
    asked: dict[str, Any] = {name: fields.take(name) for name in SAME}
    most, seed, probs = fields.whole("n_predict", -2), fields.whole("seed"), fields.whole("n_probs", 0)
    shown = fields.flag("return_tokens")
    bias = fields.take("logit_bias")
    asked |= {"repetition_penalty": fields.take("repeat_penalty"), "logprobs": probs or None,
              "seed": None if seed == -1 else seed, "logit_bias": _bias(bias) if bias else None}
    for name, kind in (("json_schema", "json"), ("grammar", "grammar")):
        if (value := fields.take(name)) not in (None, "", {}): asked["structured_outputs"] = {kind: value}
    # -1 and -2, as nothing said, are no limit; 0 is an answer of one token that is not shown
    if most is not None and most >= 0: asked["max_tokens"] = max(most, 1)
    fields.note(HINTS)
    fields.as_usual(OFF)
    fields.finish()
    with translate_names(SPELLING):
        made = protocol.completion({key: value for key, value in asked.items() if value is not None},
                                   service.model.defaults, service.limits.without_context(), None)
    return replace(made, silent=most == 0), shown


def _bias(given: Any) -> dict[str, Any]:
    """logit_bias as OpenAI has it: llama.cpp takes a list of pairs, too, and false for never."""
    if isinstance(given, dict | list) and len(given) > MAX_BIASED_TOKENS:
        raise invalid(f"logit_bias has {len(given)} entries, expected at most {MAX_BIASED_TOKENS}",
                      "logit_bias")
    try: pairs = [(token, value) for token, value in (given.items() if isinstance(given, dict) else given)]
    except (TypeError, ValueError) as error:
        raise invalid("logit_bias is no list of pairs, expected [[token id, bias], …]",
                      "logit_bias") from error
    if bad := [token for token, _ in pairs if not str(token).isdigit()]:
        raise invalid(f"logit_bias has {str(bad[0])[:40]!r}, expected token ids", "logit_bias")
    return {str(token): -100 if value is False else value for token, value in pairs}


async def _chunks(service: Service, parsed: protocol.CompletionRequest, ids: list[int], record: Record,
                  model: str, shown: bool) -> Chunks:
    reason, word, line = "stop", None, False
    async for _, delta in service.run([ids], parsed.params, parsed.priority, record):
        if parsed.silent: break
        reason, word = delta.finish_reason or reason, delta.stop_reason
        line = line or "\n" in delta.text
        probs = {"completion_probabilities": [_probability(each) for each in delta.logprobs]} \
            if delta.logprobs else {}
        yield {"index": 0, "content": delta.text,
               "tokens": list(delta.tokens) if shown or parsed.stream else [], "stop": False,
               "id_slot": 0, "tokens_predicted": record.output_tokens,
               "tokens_evaluated": len(ids), **probs}
    count = 0 if parsed.silent else record.output_tokens
    how = "limit" if reason == "length" or parsed.silent else "word" if isinstance(word, str) else "eos"
    yield {"index": 0, "content": "", "tokens": [], "id_slot": 0, "stop": True, "model": model,
           "tokens_predicted": count, "tokens_evaluated": len(ids), "has_new_line": line, "truncated": False,
           "prompt": parsed.prompts[0] if isinstance(parsed.prompts[0], str) else "", "stop_type": how,
           "generation_settings": settings(parsed), "stopping_word": word if isinstance(word, str) else "",
           "tokens_cached": len(ids) + count, "timings": _timings(record, count)}


def settings(parsed: protocol.CompletionRequest) -> dict[str, Any]:
    """The sampling parameters of a request by llama.cpp's names."""
    params = parsed.params
    return {"n_predict": -1 if params.max_tokens is None else params.max_tokens, "seed": params.seed,
            "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p,
            "min_p": params.min_p, "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty,
            "stop": list(params.stop), "ignore_eos": params.ignore_eos, "stream": parsed.stream}


def _timings(record: Record, count: int) -> dict[str, Any]:
    now = time.perf_counter()
    first = now if record.first is None else record.first
    prompt, predicted = 1e3 * (first - record.started), 1e3 * (now - first)
    computed = record.prompt_tokens - record.cached_tokens
    return {"cache_n": record.cached_tokens, "prompt_n": computed, "prompt_ms": prompt,
            "prompt_per_token_ms": prompt / max(computed, 1), "prompt_per_second": _rate(computed, prompt),
            "predicted_n": count, "predicted_ms": predicted,
            "predicted_per_token_ms": predicted / max(count, 1),
            "predicted_per_second": _rate(count, predicted)}


def _rate(count: int, ms: float) -> float: return 1e3 * count / ms if ms > 0 else 0.0


def _probability(each: TokenLogprobs) -> dict[str, Any]:
    return {**_token(each.token, each.text, each.logprob),
            "top_logprobs": [_token(*entry) for entry in each.top]}


def _token(token: int, text: str, value: float) -> dict[str, Any]:
    return {"id": token, "token": text, "bytes": list(text.encode()), "logprob": value}


async def _whole(chunks: Chunks) -> Response:
    made, text = dict[str, Any](), ""
    tokens, probs = list[int](), list[dict[str, Any]]()
    async for chunk in chunks:
        made, text = chunk, text + chunk["content"]
        tokens += chunk["tokens"]
        probs += chunk.get("completion_probabilities", [])
    more = {"completion_probabilities": probs} if probs else {}
    return JSONAnswer({**made, "content": text, "tokens": tokens, **more})


def routes(service: Service) -> list[Route]:
    """GET /props."""
    return [Route("/props", _props(service))]


def _props(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        service.require_generator()
        tokenizer, model = service.require_tokenizer(), service.model
        params = model.defaults
        return JSONAnswer({
            "default_generation_settings": {"id": 0, "n_ctx": model.length, "speculative": False,
                                            "is_processing": False, "params": {
                                                "temperature": params.temperature, "top_k": params.top_k,
                                                "top_p": params.top_p, "min_p": params.min_p,
                                                "repeat_penalty": params.repetition_penalty}},
            "total_slots": 1, "model_alias": service.names[0], "model_path": service.names[0],
            "chat_template": tokenizer.template or "", "modalities": {"vision": service.vision is not None,
                                                                      "audio": False},
            "bos_token": tokenizer.special.get("bos_token") or "",
            "eos_token": tokenizer.special.get("eos_token") or "",
            "build_info": f"tinygrad_nv {__version__}"})
    return endpoint
