"""Requests of Ollama's API, as requests of a conversation.

Protocol: `chat_request` reads /api/chat, and `generate_request` /api/generate, whose prompt and system become
messages. Fields of `options` have Ollama's names; what is not given is the model's own default, not Ollama's.
Options of how Ollama runs a model have no effect; samplers that are not here are refused unless they are off.
"""
from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tinygrad_nv.server.chat_protocol import EFFORTS, ChatRequest, chat
from tinygrad_nv.server.errors import APIError, invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.leniency import translate_names
from tinygrad_nv.server.protocol import STOPS
from tinygrad_nv.server.service import Service

LATEST = ":latest"      # the tag of a name without one
# options that mean the same here, by the name of the field in /v1/chat/completions
NUMBERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
           "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
           "frequency_penalty": "frequency_penalty"}
SPELLING = {**{field: f"options.{name}" for name, field in NUMBERS.items()}, "stop": "options.stop",
            "max_tokens": "options.num_predict", "seed": "options.seed", "response_format": "format",
            "response_format.json_schema.schema": "format", "reasoning_effort": "think"}
# how Ollama runs a model, which the server's own options say here
HINTS = ("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram",
         "f16_kv", "use_mmap", "use_mlock", "vocab_only", "logits_all", "repeat_last_n", "penalize_newline",
         "mirostat_eta", "mirostat_tau")
OFF = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1.0}
# the first bytes of images
KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}


def chat_request(fields: Fields, service: Service) -> ChatRequest:
    """A request of /api/chat."""
    given = fields.objects("messages") or []
    messages = [_message(Fields(each, f"messages[{at}]")) for at, each in enumerate(given)]
    return _request(fields, service, {"messages": messages, "tools": fields.take("tools")})


def generate_request(fields: Fields, service: Service) -> ChatRequest:
    """A request of /api/generate that is not raw."""
    for name, why in (("suffix", "no model here fills a gap"),
                      ("template", "the server runs the model's own, or that of --chat-template")):
        if fields.text(name): raise invalid(f"{name} is not served: {why}; to fix: leave it out", name,
                                            "unsupported")
    system, user = fields.text("system"), {"role": "user", "content": fields.text("prompt")}
    if images := fields.take("images"): user["images"] = images
    messages = [*([{"role": "system", "content": system}] if system else []), _message(Fields(user, ""))]
    return _request(fields, service, {"messages": messages})


def model_name(fields: Fields, service: Service) -> str:
    """The model that a request names, also with the tag `latest`. Raises `APIError` 404."""
    given, older = fields.text("model"), fields.text("name")
    if given is None: given = older
    if given is None:
        raise invalid("model is missing, expected a name of /api/tags", "model", "missing_field")
    try: return service.require_name(given)
    except APIError:
        if not given.endswith(LATEST): raise
    return service.require_name(given.removesuffix(LATEST))


def sampling(fields: Fields) -> dict[str, Any]:
    """The fields that `options`, `format` and `think` stand for."""
    options = Fields(fields.object("options") or {}, "options")
    made = {field: options.take(name) for name, field in NUMBERS.items()}
    most, seed = options.whole("num_predict"), options.whole("seed")
    made |= {"max_tokens": most if most is not None and most > 0 else None,
             "seed": seed if seed is not None and seed >= 0 else None,
             "stop": list(options.texts("stop", STOPS)) or None}
    options.note(HINTS)
    options.as_usual(OFF)
    options.finish()
    form, think = fields.take("format"), fields.take("think")
    if form == "json": made["response_format"] = {"type": "json_object"}
    elif isinstance(form, Mapping):
        made["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}
    elif form not in (None, ""):
        raise invalid(f"format is {str(form)[:60]!r}, expected 'json' or a JSON schema", "format")
    if isinstance(think, str): made["reasoning_effort"] = think
    elif think is not None and not isinstance(think, bool):
        raise invalid(f"think is {str(think)[:60]!r}, expected true, false, or one of {', '.join(EFFORTS)}",
                      "think")
    made["thinking"] = think if isinstance(think, bool) else None
    return made


def _request(fields: Fields, service: Service, asked: dict[str, Any]) -> ChatRequest:
    asked |= {**sampling(fields), "model": model_name(fields, service), "logprobs": fields.take("logprobs"),
              "top_logprobs": fields.take("top_logprobs")}
    thinking, stream = asked.pop("thinking"), fields.flag("stream", True)
    fields.note(("keep_alive",))
    fields.finish()
    with translate_names(SPELLING):
        made = chat({name: value for name, value in asked.items() if value is not None},
                    service.model.defaults, service.limits.without_context())
    return replace(made, stream=stream, thinking=thinking, show_reasoning=thinking is not False,
                   spelling=SPELLING)


def _message(fields: Fields) -> dict[str, Any]:
    """A message with its images as parts, and the name of a tool as /v1/chat/completions has it."""
    role, content, images = fields.text("role"), fields.text("content") or "", fields.take("images")
    made: dict[str, Any] = {"role": role, "content": content}
    if images:
        if not isinstance(images, list): raise fields.wrong("images", images, "a list of images in base64")
        made["content"] = [*([{"type": "text", "text": content}] if content else []),
                           *(_image(each, fields.path(f"images[{at}]")) for at, each in enumerate(images))]
    made |= {name: value for name, value in (
        ("tool_calls", fields.take("tool_calls")), ("reasoning", fields.text("thinking")),
        ("name", fields.text("tool_name") or fields.text("name")),
        ("tool_call_id", fields.text("tool_call_id"))) if value is not None}
    fields.finish()
    return made


def _image(text: Any, path: str) -> dict[str, Any]:
    if isinstance(text, str) and text.startswith("data:"): url = text
    else:
        try: data = base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise invalid(f"{path} is not base64, expected the bytes of an image in base64", path) from error
        kind = next((kind for head, kind in KINDS.items() if data.startswith(head)), "png")
        url = f"data:image/{kind};base64,{text}"
    return {"type": "image_url", "image_url": {"url": url}}
