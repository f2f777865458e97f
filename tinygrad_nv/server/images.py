"""POST /v1/images/generations.

Protocol: fields are OpenAI's (prompt, model, n, size, response_format, output_format), and those of
Stable Diffusion: negative_prompt, seed, steps, guidance_scale, scheduler. Images are PNG, base64, each with
its seed. A client that disconnects ends its request after the step that runs.
"""
from __future__ import annotations

import asyncio
import base64
import re
import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tinygrad_nv.engine.image_engine import ImageEngine
from tinygrad_nv.errors import NVError
from tinygrad_nv.models.diffusion.pipeline import Generated, ImageParams
from tinygrad_nv.models.diffusion.png import png
from tinygrad_nv.models.diffusion.schedulers import NAMES
from tinygrad_nv.server.errors import APIError, api_error, invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import until_disconnect

MOST_IMAGES = 10        # OpenAI's
MOST_CHARACTERS = 32000
# OpenAI's fields of its own models, which change nothing here
IGNORED = ("quality", "style", "user", "background", "moderation", "output_compression", "partial_images")


@dataclass(frozen=True)
class ImagesRequest:
    """Request of /v1/images/generations."""
    model: str | None
    prompt: str
    params: ImageParams


def parse_request(data: dict[str, Any]) -> ImagesRequest:
    """Parses a request of /v1/images/generations. Raises `APIError`."""
    fields = Fields(data)
    model, prompt, negative = fields.text("model"), fields.text("prompt"), fields.text("negative_prompt")
    if not prompt: raise invalid("prompt is missing", "prompt", "missing_prompt")
    for name, text in (("prompt", prompt), ("negative_prompt", negative or "")):
        if len(text) > MOST_CHARACTERS:
            raise invalid(f"{name} has {len(text)} characters, expected at most {MOST_CHARACTERS}", name)
    width, height = _size(fields.text("size"))
    if fields.one_of("response_format", ("b64_json", "url")) == "url":
        raise invalid("response_format 'url' is not served; expected: b64_json", "response_format",
                      "unsupported")
    if fields.one_of("output_format", ("png", "jpeg", "webp")) in ("jpeg", "webp"):
        raise invalid("output_format is not png, which alone is served", "output_format", "unsupported")
    params = ImageParams(_steps(fields), fields.number("guidance_scale", 0, 100), negative, height, width,
                         fields.whole("seed", 0, (1 << 64) - 1), fields.one_of("scheduler", NAMES),
                         fields.whole("n", 1, MOST_IMAGES) or 1)
    if fields.flag("stream"): raise invalid("stream is not served", "stream", "unsupported")
    fields.ignore(IGNORED)
    fields.finish()
    return ImagesRequest(model, prompt, params)


def _steps(fields: Fields) -> int:
    given = [fields.whole(name, 1, 1000) for name in ("steps", "num_inference_steps")]
    return given[0] or given[1] or ImageParams().steps


def _size(text: str | None) -> tuple[int | None, int | None]:
    """Width and height, None for the model's. Raises `APIError`."""
    if text in (None, "auto"): return None, None
    if (match := re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text or "")) is None:
        raise invalid(f"size is {(text or '')[:60]!r}, expected: such as 512x512", "size")
    return int(match[1]), int(match[2])


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    asked, engine = parse_request(data), service.require_images()
    service.require_name(asked.model)
    made = await until_disconnect(request, generate_images(service, engine, asked))
    images = await asyncio.to_thread(lambda: [base64.b64encode(png(each)).decode() for each in made.images])
    height, width = made.images.shape[1:3]
    return JSONResponse({"created": int(time.time()), "size": f"{width}x{height}", "output_format": "png",
                         "data": [{"b64_json": image, "seed": seed}
                                  for image, seed in zip(images, made.seeds, strict=True)]})


async def generate_images(service: Service, engine: ImageEngine, asked: ImagesRequest) -> Generated:
    """Returns the images of a request, which ends with this."""
    try: queued = engine.submit(asked.prompt, asked.params)
    except NVError as error: raise api_error(error) from error
    try:
        async with asyncio.timeout(service.limits.request_s): return await asyncio.wrap_future(queued.future)
    except TimeoutError as error:
        raise APIError(504, f"the answer was not complete within {service.limits.request_s:g} s",
                       "request_timeout") from error
    except NVError as error: raise api_error(error) from error
    finally: queued.cancel()
