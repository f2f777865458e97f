"""The form of /v1/audio/transcriptions and /v1/audio/translations.

Protocol: fields are OpenAI's (file, model, language, prompt, response_format, temperature,
timestamp_granularities[], stream) and vLLM's (seed). `read_form` takes a body apart; `parse_form` checks its
fields. Temperature 0, as in OpenAI's API, is greedy with rising temperatures where a text repeats itself or
is unlikely.
"""
from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from tinygrad_nv.engine.speech.params import FALLBACK, TranscriptionParams
from tinygrad_nv.errors import RequestError
from tinygrad_nv.server.errors import APIError, api_error, invalid
from tinygrad_nv.server.fields import Fields, unicode
from tinygrad_nv.server.workers import INLINE_BYTES, aside

FORM = "multipart/form-data"
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
SEGMENTED = ("srt", "verbose_json", "vtt")      # formats that need times
LISTS = ("timestamp_granularities[]", "include[]")
NUMBERS = ("temperature", "seed")
SLICE = 256 << 10       # bytes that are parsed at a time
MOST_FIELDS, MOST_FIELD_BYTES = 32, 64 << 10


@dataclass(frozen=True)
class TranscriptionRequest:
    """Request of a transcription. `name` of the file is used in messages."""
    model: str | None
    data: bytes
    name: str
    format: str
    stream: bool
    params: TranscriptionParams


async def form_aside(content_type: str, body: bytes) -> dict[str, Any]:
    """`read_form`, in a thread for a large body: the parser takes up to a second, and does not pause."""
    if len(body) <= INLINE_BYTES: return await read_form(content_type, body)
    return await aside(len(body), lambda: asyncio.run(read_form(content_type, body)))


async def read_form(content_type: str, body: bytes) -> dict[str, Any]:
    """The fields of a form: texts, lists of them by names that end with [], and the file. Raises `APIError`.
    """
    if content_type.partition(";")[0].strip().lower() != FORM:
        raise APIError(415, f"the body's type is {content_type[:100]!r}; expected: the header Content-Type: "
                       f"{FORM}", "unsupported_media_type")

    async def stream() -> AsyncGenerator[bytes, None]:
        for at in range(0, len(body), SLICE): yield body[at:at + SLICE]
    try:
        parser = MultiPartParser(Headers({"content-type": content_type}), stream(), max_files=1,
                                 max_fields=MOST_FIELDS, max_part_size=MOST_FIELD_BYTES)
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise invalid(f"the body is no form: {error}", code="invalid_form") from error
    made: dict[str, Any] = {}
    for name, value in form.multi_items():
        found = (value.filename or "the file", await value.read()) if isinstance(value, UploadFile) else value
        if name in LISTS: made.setdefault(name, []).append(found)
        elif name in made: raise invalid(f"{name[:100]!r} is given twice", name[:100])
        else: made[name] = found
    await form.close()
    return made


def parse_form(form: dict[str, Any], task: str) -> TranscriptionRequest:
    """Parses the request of a form. Raises `APIError`."""
    if not isinstance(file := form.pop("file", None), tuple):
        raise invalid("file is missing" if file is None else "file is a text", "file", "missing_file")
    fields = Fields({name: _value(name, value) for name, value in form.items()})
    model, kind = fields.text("model"), fields.one_of("response_format", FORMATS) or "json"
    temperature = fields.number("temperature", 0, 2)
    stream, seed = fields.flag("stream"), fields.whole("seed", 0)
    language = fields.text("language") if task == "transcribe" else None
    prompt = fields.text("prompt")
    _granularities(fields, kind)
    fields.ignore(("chunking_strategy", "user"))
    if fields.take("include[]"):
        raise invalid("include[] is not served; to fix: leave it out, verbose_json has mean log "
                      "probabilities", "include[]", "unsupported")
    fields.finish()
    if stream and kind not in ("json", "text"):
        raise invalid(f"stream with response_format {kind!r}; expected: json or text", "stream")
    try:
        params = TranscriptionParams(language, task, kind in SEGMENTED,
                                     (temperature,) if temperature else FALLBACK, prompt=prompt,
                                     seed=seed or 0)
    except RequestError as error: raise api_error(error) from error
    return TranscriptionRequest(model, file[1], unicode(file[0], "file")[:200], kind, stream, params)


def _value(name: str, value: Any) -> Any:
    """A field of a form as JSON would have it."""
    if name == "stream" and value in ("true", "false", "True", "False"): return value.lower() == "true"
    if name not in NUMBERS or not isinstance(value, str): return value if value != "" else None
    try: found = json.loads(value, parse_constant=lambda word: word)
    except (ValueError, RecursionError): return value
    return found if isinstance(found, int | float) else value


def _granularities(fields: Fields, kind: str) -> None:
    """timestamp_granularities[]: segments alone, and these where the format has them."""
    asked = fields.texts("timestamp_granularities[]", 2)
    for each in asked:
        if each != "segment":
            raise invalid(f"timestamp_granularities[] is {each[:60]!r}; expected: segment",
                          "timestamp_granularities[]", "unsupported")
    if asked and kind != "verbose_json":
        raise invalid("timestamp_granularities[] without response_format verbose_json",
                      "timestamp_granularities[]")
