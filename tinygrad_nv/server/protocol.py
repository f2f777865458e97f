"""Requests of /v1/completions, and what they share with conversations: JSON objects to typed ones.

Protocol: `completion(data, defaults, limits)` checks every field's type and range, and returns a
`CompletionRequest` whose `params` are ready for the engine; chat_protocol.py does for conversations. Names
are OpenAI's, and vLLM's for what OpenAI lacks (top_k, min_p, repetition_penalty, min_tokens, stop_token_ids,
ignore_eos, structured_outputs, priority, cache_salt). Fields that would change an answer, and are not served,
are refused by name. Labels (user, metadata), and fields that ask for the default behaviour, are checked and
have no effect. Hints, and fields that are unknown, have none either, and are named in a header (leniency.py).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from tinygrad_nv.engine.beam_search import BeamSearchParams
from tinygrad_nv.engine.prompts import TextOrTokens
from tinygrad_nv.engine.sampling import (
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    RepetitionDetectionParams,
    SamplingParams,
)
from tinygrad_nv.errors import RequestError
from tinygrad_nv.server.errors import api_error, invalid
from tinygrad_nv.server.fields import Fields, as_whole, as_wholes, unicode
from tinygrad_nv.server.leniency import ignore, note
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.structured_output import parse_structured

# texts that name a client or a request for its own records
LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id",
          "session_id")
# hints, and the values of each that ask for what holds anyway
HINTS: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"), "store": (False,), "spaces_between_special_tokens": (True,),
    "kv_transfer_params": ({},), "ec_transfer_params": ({},), "vllm_xargs": ({},), "detokenize": (True,),
    "routed_experts_prompt_start": (0,)}
WHY = {"store": "is true, and only responses are kept (POST /v1/responses)",
       "detokenize": "is not served: the answer has its text (return_token_ids adds the token ids)"}
# of vLLM's endpoints that render prompts, which accept them elsewhere, too
OF_RENDERING = ("return_token_offsets", "mm_payload", "return_mm_kwargs")
# vLLM's fields that are accepted with their default value only
USUAL = {"early_stopping": False, "logits_processors": [], "mm_processor_kwargs": {}, "media_io_kwargs": {},
         "prompt_embeds": [], "watermarking": False}
# what beam search has no use for
NOT_OF_BEAMS = ("stop", "stop_token_ids", "min_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids",
                "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k",
                "min_p", "bad_words", "allowed_token_ids", "structured_outputs")
# limits of OpenAI and vLLM
STOPS, PENALTY, HOTTEST = 16, 2.0, 2.0
BIAS = 100.0    # a bias beyond it is this one, as vLLM's


@dataclass(frozen=True)
class Common:
    """Fields of all requests. `params.n` texts for every prompt. Prompts with different salts share no pages.
    """
    model: str | None
    params: SamplingParams
    stream: bool
    usage: bool             # a last chunk has the usage
    usages: bool            # every chunk has
    priority: int
    salt: str
    ids: bool               # return token ids, too
    prompt_logprobs: int | None     # return so many for each token of the prompt
    side: str               # of a prompt that is truncated, whose tokens stay: "left" keeps the last ones
    ids_for_texts: bool     # log probabilities have "token_id:5" for the text of a token
    beams: BeamSearchParams | None  # beams.py


@dataclass(frozen=True)
class CompletionRequest(Common):
    """Request of /v1/completions. `silent`: the prompt is all that is returned. `special`: texts get the
    special tokens that the model expects around them."""
    prompts: tuple[TextOrTokens, ...]
    echo: bool
    silent: bool
    special: bool


def completion(data: dict[str, Any], defaults: SamplingParams, limits: RequestLimits,
               usual: int | None = 16) -> CompletionRequest:
    """A request of /v1/completions. `max_tokens` defaults to `usual`, which is OpenAI's (None: as many as the
    context holds), and may be 0 with `echo`."""
    fields = Fields(data)
    # refused also where the tokenizer begins each text with a token, as by vLLM's server
    if data.get("prompt") == "": raise invalid("prompt is empty, expected at least one character", "prompt")
    texts = prompts(fields)
    if fields.text("suffix"):
        raise invalid("suffix is not served: no model here fills a gap; to fix: put what follows into the "
                      "prompt, or leave suffix out", "suffix", "unsupported")
    echo = fields.flag("echo")
    logprobs = fields.whole("logprobs", 0, limits.logprobs)
    most = answer_limit(fields, "max_tokens", limits, 0 if echo else 1)
    limit = usual if most is None else max(most, 1)
    common = common_fields(fields, defaults, limits, len(texts), {
        "max_tokens": limit, "logprobs": logprobs, "prompt_logprobs": logprobs if echo else None,
        "logprob_token_ids": logprob_token_ids(fields, logprobs is not None)})
    _best_of(fields, common.params)
    budget = fields.whole("thinking_token_budget", -1)
    _ignore_number("thinking_token_budget", budget, -1, "is of conversations")
    special = fields.flag("add_special_tokens", True)
    fields.finish()
    return CompletionRequest(**vars(common), prompts=texts, echo=echo, silent=most == 0, special=special)


def common_fields(fields: Fields, defaults: SamplingParams, limits: RequestLimits, prompts: int,
                  given: dict[str, Any], forced: dict[str, Any] | None = None,
                  streams_beams: bool = False) -> Common:
    """Fields of all requests. `given`: sampling parameters already read. `forced`: a schema for the whole
    answer, required by the tool choice. `streams_beams`: those of a stream are sent when they are complete.
    """
    side = fields.one_of("truncation_side", ("left", "right")) or "left"
    given = {"logprobs": None, **given} | {
        "temperature": fields.number("temperature", 0, HOTTEST), "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", -1), "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0),
        "presence_penalty": fields.number("presence_penalty", -PENALTY, PENALTY),
        "frequency_penalty": fields.number("frequency_penalty", -PENALTY, PENALTY),
        "seed": fields.whole("seed", -(1 << 63), (1 << 63) - 1), "n": fields.whole("n", 1),
        "min_tokens": fields.whole("min_tokens", 0), "logit_bias": _bias(fields),
        "stop": fields.texts("stop", STOPS) or None,
        "stop_token_ids": fields.wholes("stop_token_ids") or None,
        "ignore_eos": fields.flag("ignore_eos") or None,
        "include_stop_str_in_output": fields.flag("include_stop_str_in_output") or None,
        "skip_special_tokens": fields.flag("skip_special_tokens", True),
        "bad_words": fields.texts("bad_words", MAX_BAD_WORDS, alone=False) or None,
        "allowed_token_ids": fields.wholes("allowed_token_ids"),
        "truncate_prompt_tokens": fields.whole("truncate_prompt_tokens", -1, limits.context),
        "structured_outputs": parse_structured(fields, limits, forced),
        "repetition_detection": _repetition(fields)}
    own = fields.whole("prompt_logprobs", 0, limits.logprobs)
    given["prompt_logprobs"] = max(filter(_is_given, (own, given.get("prompt_logprobs"))), default=None)
    if limits.output_tokens is not None:
        given["max_tokens"] = min(given["max_tokens"] or limits.output_tokens, limits.output_tokens)
    # OpenAI's seeds are signed
    if given["seed"] is not None: given["seed"] %= 1 << 64
    if (choices := prompts * (given["n"] or 1)) > limits.choices:
        shown = choices if choices < 10 ** 20 else "too many"
        raise invalid(f"{shown} choices requested (prompts × n),  expected at most {limits.choices}", "n")
    stream = fields.flag("stream")
    if stream and own is not None:
        raise invalid("prompt_logprobs are not streamed; to fix: leave out stream or prompt_logprobs",
                      "prompt_logprobs", "unsupported")
    if (described := fields.object("stream_options")) and not stream:
        raise invalid("stream_options is given without stream, expected it in streams; to fix: leave it out, "
                      "or set stream to true", "stream_options")
    options = Fields(described or {}, "stream_options")
    usage = options.flag("include_usage")
    usages = options.flag("continuous_usage_stats") and usage
    options.ignore(["include_obfuscation"])
    options.finish()
    model, priority = fields.text("model"), fields.whole("priority", -(1 << 31), 1 << 31) or 0
    salt, ids = fields.text("cache_salt"), fields.flag("return_token_ids")
    if salt == "": raise invalid("cache_salt is empty, expected at least one character", "cache_salt")
    by_id = fields.flag("return_tokens_as_token_ids")
    labels(fields)
    fields.as_usual(USUAL)
    fields.ignore(OF_RENDERING)
    fields.whole("stream_interval", 1)  # chunks have a token each, or more
    beams = _beams(fields, given, stream and not streams_beams)
    return Common(model, _params(defaults, given), stream, usage, usages, priority, salt or "", ids, own,
                  side, by_id, beams)


def logprob_token_ids(fields: Fields, logprobs: bool) -> tuple[int, ...] | None:
    """The tokens whose log probabilities stand for those of the likeliest."""
    ids = fields.wholes("logprob_token_ids") or None
    if ids and not logprobs:
        raise invalid("logprob_token_ids is given without logprobs; to fix: set logprobs, too",
                      "logprob_token_ids")
    return ids


def _repetition(fields: Fields) -> RepetitionDetectionParams | None:
    """Returns when an answer that repeats itself ends."""
    if (given := fields.object("repetition_detection")) is None: return None
    inner = Fields(given, "repetition_detection")
    names = "max_pattern_size", "min_pattern_size", "min_count"
    sizes = {name: inner.whole(name, 0) or 0 for name in names}
    inner.finish()
    try: return RepetitionDetectionParams(**sizes)
    except RequestError as error: raise api_error(error, "repetition_detection") from error


def answer_limit(fields: Fields, name: str, limits: RequestLimits, low: int = 1) -> int | None:
    """The field `name`, tokens of an answer at most: one that the context cannot hold is an error, as vLLM's.
    """
    return fields.whole(name, low, limits.context)


def _best_of(fields: Fields, params: SamplingParams) -> None:
    """Accepts what vLLM ignores, unless an answer would be chosen among samples."""
    value = as_whole(asked) if (asked := fields.take("best_of")) is not None else None
    if value is not None and value > params.n and params.temperature:
        raise invalid(f"best_of is {value}, more than n, {params.n}, and answers are not chosen among; to "
                      "fix: ask for n choices with logprobs and choose", "best_of", "unsupported")
    if asked is not None and value != params.n: note("best_of")


def _beams(fields: Fields, given: Mapping[str, Any], stream: bool) -> BeamSearchParams | None:
    """Returns the parameters of `use_beam_search`: n beams. Greedy, where the request has no temperature."""
    if not fields.flag("use_beam_search"):
        _ignore_number("length_penalty", fields.number("length_penalty"), 1.0, "is of beam search")
        return None
    if bad := [*(name for name in NOT_OF_BEAMS if given.get(name) is not None), *["stream"] * stream]:
        raise invalid(f"{bad[0]} and use_beam_search are both given, expected one of them: beams are whole "
                      "answers, by their probability alone; to fix: leave one out", bad[0], "unsupported")
    penalty = fields.number("length_penalty")
    try:
        return BeamSearchParams(given["n"] or 1, given["max_tokens"] or 1, bool(given["ignore_eos"]),
                                given["temperature"] or 0.0, 1.0 if penalty is None else penalty,
                                bool(given["include_stop_str_in_output"]))
    except RequestError as error: raise api_error(error, "n") from error


def _ignore_number(name: str, value: float | None, usual: float, why: str) -> None:
    """Ignores a number that has no effect, unless it is `usual`."""
    if value in (None, usual): return
    ignore(invalid(f"{name} {why}; to fix: leave it out, or say {usual}", name, "unsupported"))


def _is_given(value: int | None) -> TypeGuard[int]: return value is not None


def labels(fields: Fields) -> None:
    """Fields that say something of the client, and change no answer."""
    for name in LABELS: fields.text(name)
    fields.ignore(["metadata"])
    for name, usual in HINTS.items():
        value = fields.left.get(name)
        if usual == ({},) and value is not None and not isinstance(value, dict):
            raise fields.wrong(name, value, "an object")
        fields.hint(name, usual, WHY.get(name, "is not served"))


def _params(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    # max_tokens None is meaningful: as many as the context holds
    changed = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    try: return replace(defaults, **changed)
    except RequestError as error:
        # the message starts with the parameter's name
        name = error.found.split(" ", 1)[0]
        raise api_error(error, name if name in changed else None) from error


def _bias(fields: Fields) -> dict[int, float] | None:
    """logit_bias: token ids, which JSON makes strings, to numbers."""
    data = fields.object("logit_bias")
    if not data: return None
    if len(data) > MAX_BIASED_TOKENS:
        raise invalid(f"logit_bias has {len(data)} entries, expected at most {MAX_BIASED_TOKENS}",
                      "logit_bias")
    if wrong := [key for key in data if not (key.isascii() and key.isdigit() and len(key) < 10)]:
        shown = ", ".join(repr(key[:40]) for key in wrong[:3])
        raise invalid(f"logit_bias has the key{'s' * (len(wrong) > 1)} {shown}, expected token ids",
                      "logit_bias")
    entries, out = Fields(data, "logit_bias"), {}
    for key in data:
        value = entries.number(key)
        if value is not None: out[int(key)] = min(max(value, -BIAS), BIAS)
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
    if (ids := as_wholes(value)) is not None: return ([*ids],)
    lists = [as_wholes(item) if isinstance(item, list) else None for item in value]
    if None not in lists: return tuple([*each] for each in lists if each is not None)
    raise invalid(f"{name} is a list of mixed types, expected {expected}", name, "wrong_type")
