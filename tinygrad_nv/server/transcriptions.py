"""POST /v1/audio/transcriptions and /v1/audio/translations.

Protocol: the form is read whole (transcription_request.py), its file decoded and its spectrogram computed in
a thread, and the recording joins the engine's batch. The answer is JSON, text or subtitles; with `stream` an
event for each segment, transcript.text.delta, and transcript.text.done at the end, as OpenAI's API has them.
A client that disconnects ends its recording.
"""
from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tinygrad_nv.engine.speech.audio import decode_audio, measure_seconds
from tinygrad_nv.engine.speech.batching import Cancelled
from tinygrad_nv.engine.speech.outputs import Segment, Transcription, segment_fields, srt, vtt
from tinygrad_nv.engine.speech.recording import Recording
from tinygrad_nv.errors import AudioError, NVError
from tinygrad_nv.models.whisper.languages import LANGUAGES
from tinygrad_nv.server.errors import APIError, api_error
from tinygrad_nv.server.limits import AUDIO_PATH, limits_of, read_body
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service, SpeechClient
from tinygrad_nv.server.sse import stream_events, until_disconnect
from tinygrad_nv.server.transcription_request import TranscriptionRequest, form_aside, parse_form

if TYPE_CHECKING:
    import numpy as np

PATHS = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
BYTES_A_SECOND = 16000 * 4 + 100 * 128 * 4     # of a recording at 16 kHz, and its spectrogram


def endpoint(service: Service, task: str) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a task."""
    async def answer(request: Request) -> Response:
        record: Record = request.scope["record"]
        record.id = "transcript-" + record.id
        client = service.require_speech()
        limits = limits_of(AUDIO_PATH, service.limits)
        with service.body_budget.hold(limits) as count:
            return await respond(request, record, client, await read_body(request, limits, count))

    async def respond(request: Request, record: Record, client: SpeechClient, body: bytes) -> Response:
        asked = parse_form(await form_aside(request.headers.get("content-type", ""), body), task)
        service.require_name(asked.model)
        record.stream = asked.stream
        if asked.stream:
            events = _events(service, client, asked, record)
            return await stream_events(request, events, record)
        made = await until_disconnect(request, _transcribe(service, client, asked))
        record.output_tokens = len(made.token_ids)
        return format_answer(made, asked)
    return answer


def format_answer(made: Transcription, asked: TranscriptionRequest) -> Response:
    """Returns the transcription in the format that is asked for."""
    if asked.format == "srt": return PlainTextResponse(srt(made), media_type="application/x-subrip")
    if asked.format == "vtt": return PlainTextResponse(vtt(made), media_type="text/vtt")
    if asked.format == "text": return PlainTextResponse(f"{made.text}\n")
    usage = {"type": "duration", "seconds": math.ceil(made.duration)}
    if asked.format == "json": return JSONResponse({"text": made.text, "usage": usage})
    language = "english" if made.language is None else LANGUAGES.get(made.language, made.language)
    segments = [{"seek": 0, **segment_fields(number, each)} for number, each in enumerate(made.segments)]
    return JSONResponse({"task": asked.params.task, "language": language, "duration": made.duration,
                         "text": made.text, "segments": segments, "usage": usage})


async def _transcribe(service: Service, client: SpeechClient, asked: TranscriptionRequest,
                       on_segment: Callable[[Segment], None] = lambda segment: None) -> Transcription:
    """Returns the transcription, within the memory of all requests. What has not run when the request ends is
    cancelled."""
    limits = service.limits
    given = asked.data, asked.name, limits.audio_s, limits.audio_samples
    try:
        length = await asyncio.to_thread(measure_seconds, *given)
        async with service.media.hold(int(length * BYTES_A_SECOND)):
            samples = await asyncio.to_thread(decode_audio, *given)
            return await _run_recording(client, samples, asked, limits.request_s, on_segment)
    except AudioError as error: raise api_error(error, "file") from error


async def _run_recording(client: SpeechClient, samples: np.ndarray, asked: TranscriptionRequest,
                         most_s: float,
                    on_segment: Callable[[Segment], None]) -> Transcription:
    cancelled = Cancelled()

    def prepare() -> Recording:
        """Makes the recording, with its spectrogram: other recordings' steps do not wait for it."""
        made = client.recording(samples, asked.params, on_segment)
        assert made.features is not None
        return made
    try:
        recording = await asyncio.to_thread(prepare)
        future = asyncio.wrap_future(client.engine.submit([recording], cancelled)[0])
    except NVError as error: raise api_error(error) from error
    try:
        async with asyncio.timeout(most_s): return await future
    except TimeoutError as error:
        raise APIError(504, f"the answer was not complete within {most_s:g} s", "request_timeout") from error
    except NVError as error: raise api_error(error) from error
    finally: cancelled.asked = True


async def _events(service: Service, client: SpeechClient, asked: TranscriptionRequest, record: Record
                  ) -> AsyncGenerator[dict[str, Any], None]:
    """An event for each segment as it is decoded, and one at the end."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Segment | None]()

    def push(segment: Segment | None) -> None: loop.call_soon_threadsafe(queue.put_nowait, segment)
    task = asyncio.ensure_future(_transcribe(service, client, asked, push))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        first = True
        while (segment := await queue.get()) is not None:
            text = segment.text.lstrip() if first else segment.text
            if not text: continue
            first = False
            yield {"type": "transcript.text.delta", "delta": text}
        made = await task
        record.output_tokens = len(made.token_ids)
        yield {"type": "transcript.text.done", "text": made.text,
               "usage": {"type": "duration", "seconds": math.ceil(made.duration)}}
    finally: task.cancel()
