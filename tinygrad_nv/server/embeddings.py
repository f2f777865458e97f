"""POST /v1/embeddings.

Protocol: fields are OpenAI's (input, model, encoding_format, dimensions) and vLLM's (truncate_prompt_tokens,
normalize). All texts of a request are queued at once and computed in the engine's batches; the answer is one
object. base64 is of float32, little-endian.
"""
from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.prompts import TextOrTokens
from tinygrad_nv.errors import NVError
from tinygrad_nv.server.errors import APIError, api_error, invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.protocol import labels, prompts
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import EmbeddingClient, Service
from tinygrad_nv.server.sse import until_disconnect
from tinygrad_nv.server.usage import Usage
from tinygrad_nv.server.workers import checkpoint

MOST_INPUTS = 2048      # OpenAI's
ENCODINGS = ("float", "base64")


@dataclass(frozen=True)
class EmbeddingsRequest:
    """Request of /v1/embeddings. `normalize` None is what the model says."""
    model: str | None
    inputs: tuple[TextOrTokens, ...]
    base64: bool
    dimensions: int | None
    truncate: int | None
    normalize: bool | None


def parse_request(data: dict[str, Any]) -> EmbeddingsRequest:
    """Parses a request of /v1/embeddings. Raises `APIError`."""
    fields = Fields(data)
    inputs = prompts(fields, "input")
    if len(inputs) > MOST_INPUTS:
        raise invalid(f"input has {len(inputs)} texts, expected at most {MOST_INPUTS}", "input")
    kind = fields.one_of("encoding_format", ENCODINGS)
    dimensions, truncate = fields.whole("dimensions", 1), fields.whole("truncate_prompt_tokens", -1)
    normalize = fields.flag("normalize", True) if "normalize" in fields.left else None
    made = EmbeddingsRequest(fields.text("model"), inputs, kind == "base64", dimensions, truncate, normalize)
    fields.as_usual({"add_special_tokens": True, "priority": 0})
    labels(fields)
    fields.finish()
    return made


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    model, asked = service.require_embedder(), await service.read(record, lambda: parse_request(data))
    name = service.require_name(asked.model)
    vectors = await embed(request, service, model, asked, record)
    shown = await service.aside(vectors.size, lambda: [
        {"index": at, "object": "embedding", "embedding": _format_vector(vector, asked)}
        for at, vector in enumerate(vectors)])
    return JSONAnswer({"id": record.id, "object": "list", "created": int(time.time()), "model": name,
                       "data": shown, "usage": Usage(record.prompt_tokens, 0).fields()})


async def embed(request: Request, service: Service, model: EmbeddingClient, asked: EmbeddingsRequest,
                   record: Record) -> np.ndarray:
    """Returns the embeddings of a request's texts. Counts their tokens."""
    try: model.require_dimensions(asked.dimensions)
    except NVError as error: raise api_error(error, "dimensions") from error
    ids = await encode_texts(service, record, model, asked.inputs, asked.truncate)
    found = await until_disconnect(request, pool(service, model, ids))
    return model.finish(found, asked.normalize, asked.dimensions)


async def encode_texts(service: Service, record: Record, model: EmbeddingClient,
                       texts: Sequence[TextOrTokens],
                  truncate: int | None) -> list[list[int]]:
    """Returns the token ids of texts, which the record counts."""
    def encode_one(text: TextOrTokens) -> list[int]:
        checkpoint()
        return model.encode(text, truncate)
    ids = await service.aside(record.size, lambda: [*map(encode_one, texts)])
    record.prompt_tokens = sum(map(len, ids))
    return ids


async def pool(service: Service, model: EmbeddingClient, ids: Sequence[Sequence[int]],
                 every: bool = False) -> list[np.ndarray]:
    """Returns the pooled hidden states of prompts, or with `every` those of their tokens. What has not run
    when the request ends is cancelled."""
    try: futures = [asyncio.wrap_future(each) for each in model.submit(ids, every)]
    except NVError as error: raise api_error(error) from error
    try:
        async with asyncio.timeout(service.limits.request_s): return await asyncio.gather(*futures)
    except TimeoutError as error:
        raise APIError(504, f"the answer was not complete within {service.limits.request_s:g} s",
                       "request_timeout") from error
    except NVError as error: raise api_error(error) from error
    finally:
        for each in futures: each.cancel()


def _format_vector(vector: np.ndarray, asked: EmbeddingsRequest) -> str | list[float]:
    if asked.base64: return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found
