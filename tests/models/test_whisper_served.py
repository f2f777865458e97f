"""/v1/audio of a Whisper model, driven by the openai client, and `tinygrad-nv serve` of one."""
from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.lazy import lazy
from tests.support.models import whisper_case as case
from tests.support.server.serve_case import Live, live
from tinygrad_nv.engine.speech.audio import decode_audio
from tinygrad_nv.engine.speech.params import TranscriptionParams
from tinygrad_nv.engine.speech.transcriber import Transcriber
from tinygrad_nv.models.whisper.features import log_mel
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.metrics import Metrics
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.speech_startup import SpeechEngineClient, SpeechModel

openai = lazy("openai")

NAME = "whisper-1"
SAMPLES = case.sound(70000)


def recording(samples: int = len(SAMPLES), rate: int = 16000) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((SAMPLES[:samples] * 32767).astype("<i2").tobytes())
    return made.getvalue()


def decoded(samples: int) -> np.ndarray:
    return decode_audio(recording(samples), "a.wav")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transcriber]:
    directory = tmp_path_factory.mktemp("whisper")
    case.save(directory)
    made = Transcriber(directory, device="CPU", max_num_seqs=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(whisper: Transcriber) -> Iterator[Live]:
    engine = SpeechEngineClient(whisper.engine)
    service = Service(engine, SpeechModel(whisper), (NAME,), RequestLimits(body_bytes=1000),
                      Metrics(NAME, 64, engine.stats), speech=whisper)
    with live(service) as running: yield running


@pytest.fixture(scope="module")
def audio(server: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client.audio


def test_json(whisper: Transcriber, audio: Any):
    """As the transcriber has it, with its own fallback at temperature 0, and the usage."""
    made = audio.transcriptions.create(model=NAME, file=("a.wav", recording(20000)), temperature=0)
    assert made.text == whisper.transcribe(decoded(20000)).text
    assert (made.usage.type, made.usage.seconds) == ("duration", 2)


def test_verbose_json(whisper: Transcriber, audio: Any):
    made = audio.transcriptions.create(model=NAME, file=("a.wav", recording()), language="de", prompt="Ada",
                                       response_format="verbose_json", temperature=0.5,
                                       timestamp_granularities=["segment"])
    params = TranscriptionParams("de", timestamps=True, temperatures=(0.5,), prompt="Ada")
    wanted = whisper.transcribe(decoded(len(SAMPLES)), params)
    assert (made.text, made.language, made.duration) == (wanted.text, "german", len(SAMPLES) / 16000)
    assert [(each.start, each.end, each.text, tuple(each.tokens)) for each in made.segments] == [
        (round(each.start, 3), round(each.end, 3), each.text, each.tokens) for each in wanted.segments]
    assert {each.temperature for each in made.segments} == {0.5}


@pytest.mark.parametrize(("kind", "begins"), [("srt", "1\n00:00:0"), ("vtt", "WEBVTT\n\n00:00:0"),
                                              ("text", "")])
def test_texts(audio: Any, kind: str, begins: str):
    made = audio.transcriptions.create(model=NAME, file=("a.wav", recording()), response_format=kind)
    assert isinstance(made, str)
    assert made.startswith(begins)


@pytest.mark.filterwarnings("ignore:deprecated")     # openai's, of its own method
def test_translations(whisper: Transcriber, audio: Any):
    made = audio.translations.create(model=NAME, file=("a.wav", recording(20000)))
    assert made.text == whisper.transcribe(decoded(20000), TranscriptionParams(task="translate")).text


def test_a_stream(audio: Any):
    events = list(audio.transcriptions.create(model=NAME, file=("a.wav", recording()), stream=True))
    assert [each.type for each in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert len(events) > 2
    assert events[-1].type == "transcript.text.done"
    assert "".join(each.delta for each in events[:-1]).strip().replace("�", "") == \
        events[-1].text.replace("�", "")


def test_requests_at_once(whisper: Transcriber, server: Live, monkeypatch: pytest.MonkeyPatch):
    """More than run at a time, each as alone. No spectrogram, which takes seconds of an hour, is computed in
    the engine's thread. Those whose clients disconnect leave the engine."""
    threads = set[str]()

    def told(*given: Any) -> np.ndarray:
        threads.add(threading.current_thread().name)
        return log_mel(*given)
    monkeypatch.setattr("tinygrad_nv.engine.speech.recording.log_mel", told)
    counts, idle = (9000, 20000, 12345), whisper.engine.stats

    async def post(http: httpx.AsyncClient, samples: int) -> str:
        made = await http.post(f"{server.url}/v1/audio/transcriptions", data={"language": "en"},
                               files={"file": ("a.wav", recording(samples))})
        return str(made.json()["text"])

    async def answers() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as http:
            gone = [asyncio.ensure_future(post(http, 70000)) for _ in range(4)]
            made = await asyncio.gather(*(post(http, each) for each in counts))
            for each in gone: each.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            async with asyncio.timeout(20):
                while idle().running or idle().waiting: await asyncio.sleep(0.01)
            return made
    made = asyncio.run(answers())
    assert threads
    assert "nv-speech" not in threads
    assert made == [whisper.transcribe(decoded(each), TranscriptionParams("en")).text for each in counts]


@pytest.mark.parametrize(("given", "param", "words"), [
    ({"file": ("a.wav", b"RIFF1234WAVEjunk")}, "file", "damaged WAV file"),
    ({"file": ("a.mp3", b"no audio")}, "file", "a.mp3 is no audio file"),
    ({"file": ("a.wav", b"")}, "file", "a.wav is empty"),
    ({"prompt": "a <|endoftext|>"}, None, "special token"),
    ({"language": "klingon"}, None, "'klingon', which the model does not have"),
    ({"temperature": 3}, "temperature", "expected 0 to 2"),
    ({"response_format": "xml"}, "response_format", "verbose_json"),
    ({"response_format": "verbose_json", "timestamp_granularities": ["word"]}, "timestamp_granularities[]",
     "expected: segment"),
    ({"timestamp_granularities": ["segment"]}, "timestamp_granularities[]", "verbose_json"),
    ({"include": ["logprobs"]}, "include[]", "not served"),
    ({"stream": True, "response_format": "srt"}, "stream", "json or text"),
    ({"extra_body": {"seed": "many"}}, "seed", "a whole number")])
def test_refused(audio: Any, given: dict[str, Any], param: str | None, words: str):
    with pytest.raises(openai.BadRequestError) as error:
        audio.transcriptions.create(**{"model": NAME, "file": ("a.wav", recording(2000)), **given})
    assert words in error.value.body["message"]
    assert error.value.body["param"] == param


def test_other_bodies(server: Live):
    def post(**how: Any) -> tuple[int, str]:
        made = httpx.post(f"{server.url}/v1/audio/transcriptions", **how)
        return made.status_code, made.json()["error"].get("reason")
    form = {"content-type": "multipart/form-data; boundary=x"}
    assert post(json={}) == (415, "unsupported_media_type")
    assert post(files={"other": b"1"}) == (400, "missing_file")
    assert post(data={"file": "a text"}, files={"other": b"1"}) == (400, "missing_file")
    assert post(content=b"junk", headers={"content-type": "multipart/form-data"}) == (400, "invalid_form")
    assert post(content=b"junk", headers=form) == (400, "invalid_form")
    assert post(files={"file": bytes(26 << 20)}) == (413, "body_too_large")


def test_other_endpoints(server: Live):
    """A model that transcribes answers nothing else, and says so."""
    asked = {"messages": [{"role": "user", "content": "hello"}]}
    for path, body in (("chat/completions", asked), ("completions", {"prompt": "a"}),
                       ("embeddings", {"input": "a"})):
        made = httpx.post(f"{server.url}/v1/{path}", json=body)
        assert (made.status_code, made.json()["error"]["reason"]) == (404, "unsupported_task")
        assert "/v1/audio/transcriptions" in made.json()["error"]["message"]


@pytest.mark.slow
def test_a_whisper_model_is_served(tmp_path: Path):
    case.save(tmp_path)
    command = [sys.executable, "-m", "tinygrad_nv", "serve", str(tmp_path), "--port", "0", "--device", "CPU",
               "--max-num-seqs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        start = ""
        while (found := re.search(r" ready url=(\S+)", start)) is None: start += process.stderr.readline()
        assert "speech mels=80 languages=2 max_num_seqs=2" in start
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none") as client:
            made = client.audio.transcriptions.create(model=tmp_path.name, file=("a.wav", recording()))
        assert made.text
        process.terminate()
        assert process.wait(60) == 0
