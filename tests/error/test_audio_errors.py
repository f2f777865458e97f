"""Recordings and requests of transcriptions that are refused, with the words of each message."""
from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import tokenizers
import transformers
from tokenizers.models import BPE

from tinygrad_nv.engine.speech.audio import MOST_S, decode_audio, measure_seconds, read_audio
from tinygrad_nv.engine.speech.params import TranscriptionParams
from tinygrad_nv.engine.speech.recording import Recording, SpeechModel
from tinygrad_nv.engine.speech.transcriber import Transcriber
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import AudioError, ModelError, NVError, RequestError
from tinygrad_nv.models.whisper.config import read_whisper_config
from tinygrad_nv.models.whisper.tokens import SpeechTokens

FIELDS = {"vocab_size": 300, "decoder_start_token_id": 258, "eos_token_id": 257, "pad_token_id": 257,
          "bos_token_id": 257, "d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
GENERATION = {"eos_token_id": 257, "decoder_start_token_id": 258, "no_timestamps_token_id": 266,
              "lang_to_id": {"<|en|>": 259, "<|de|>": 260}, "task_to_id": {"transcribe": 262}}


def wav(samples: int = 100, rate: int = 16000) -> bytes:
    made = io.BytesIO()
    soundfile.write(made, np.zeros(samples), rate, format="WAV")
    return made.getvalue()


@pytest.mark.parametrize(("data", "words"), [
    (b"", ("is empty", "an audio file")), (b"RIFF\0\0\0\0WAVEjunk", ("damaged WAV file", "a complete file")),
    (wav()[:30], ("damaged WAV file",)), (b"no audio at all", ("is no audio file", "libsndfile")),
    (wav(0), ("has no samples",)), (wav(rate=500), ("has 500 samples a second", "1000 to 768000")),
    (wav(3200, 1000), ("is 0 minutes long", "at most"))],
    ids=["empty", "junk", "cut", "text", "silent", "slow", "long"])
def test_files(data: bytes, words: tuple[str, ...]):
    with pytest.raises(AudioError) as error: decode_audio(data, "a.wav", 3.0)
    assert [word for word in ("a.wav", *words) if word not in str(error.value)] == []


@pytest.mark.parametrize("form", ["WAV", "WAVEX"])
@pytest.mark.parametrize(("kind", "away"), [("PCM_U8", 2 ** -7), ("PCM_16", 2 ** -15), ("PCM_24", 2 ** -23),
                                            ("PCM_32", 1e-7), ("FLOAT", 1e-7), ("DOUBLE", 1e-7)])
def test_wav(monkeypatch: pytest.MonkeyPatch, form: str, kind: str, away: float):
    """Every width, floats, two channels, and the extensible header, without soundfile."""
    samples, made = np.sin(np.arange(300) / 9).reshape(150, 2) * 0.9, io.BytesIO()
    soundfile.write(made, samples, 16000, format=form, subtype=kind)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert np.abs(decode_audio(made.getvalue(), "a.wav") - samples.mean(1)).max() <= away
    cut = decode_audio(made.getvalue()[:-1], "a.wav")      # in the middle of a frame
    assert 0 < 150 - len(cut) < 20


def riff(kind: int, channels: int, bits: int, align: int) -> bytes:
    head = struct.pack("<HHIIHH", kind, channels, 16000, 16000 * align, align, bits)
    return b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0" + head + b"data\x50\0\0\0" + bytes(80)


@pytest.mark.parametrize(("data", "words"), [
    (riff(1, 0, 16, 0), "0 channels of 16 bits in 0 bytes"),
    (riff(1, 2, 16, 2), "2 channels of 16 bits in 2 bytes"), (riff(1, 1, 40, 5), "is no audio file"),
    (riff(3, 1, 16, 2), "is no audio file"),
    (riff(1, 1, 0, 0), "is no audio file")])
def test_formats_that_are_none(data: bytes, words: str):
    with pytest.raises(AudioError, match=words): decode_audio(data, "a.wav")


def test_samples_are_bounded_as_seconds_are():
    """A FLAC file of 20 kB that would be gigabytes of samples."""
    made = io.BytesIO()
    soundfile.write(made, np.zeros(60000), 192000, format="FLAC")
    assert len(decode_audio(made.getvalue(), "a.flac", 2.0)) == 5000
    with pytest.raises(AudioError, match="60000 samples, 192000 a second\n  expected: at most 48000"):
        decode_audio(made.getvalue(), "a.flac", 1.0)


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_truncated_flac(cut: int):
    """What is left is read, or refused in words."""
    made = io.BytesIO()
    soundfile.write(made, np.sin(np.arange(4000) / 9), 16000, format="FLAC")
    found: list[str] = []
    try: found.append(decode_audio(made.getvalue()[:cut], "a.flac").dtype.name)
    except AudioError as error: found.append(error.found[:6])
    assert found[0] in ("float32", "a.flac")


def test_a_length_beyond_all_bounds_is_refused_before_it_is_read():
    """A header that says two billion frames."""
    data = bytearray(wav(10, 8000))
    data[40:44] = (0xfffffff0).to_bytes(4, "little")
    assert len(decode_audio(bytes(data), "a.wav")) == 20
    assert MOST_S * 16000 * 4 < 6e9


def test_numbers_that_are_none():
    made = io.BytesIO()
    soundfile.write(made, np.array([0.0, np.nan, 1.0]), 16000, format="WAV", subtype="FLOAT")
    with pytest.raises(AudioError, match="NaN or infinite"): decode_audio(made.getvalue(), "a.wav")


def test_a_path_that_is_not_there(tmp_path: Path):
    with pytest.raises(AudioError) as error: read_audio(tmp_path / "nothing.wav")
    assert "No such file or directory" in str(error.value)
    assert "check the path" in str(error.value)


def test_without_soundfile(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert len(decode_audio(wav(), "a.wav")) == 100
    with pytest.raises(AudioError) as error: decode_audio(b"fLaC", "a.flac")
    assert "soundfile is not installed" in str(error.value)
    assert "pip install 'tinygrad-nv[audio]'" in str(error.value)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    transformers.WhisperConfig(**FIELDS, architectures=["WhisperForConditionalGeneration"]
                               ).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    return tmp_path


def read(directory: Path) -> SpeechTokens:
    config = read_whisper_config(directory)
    assert config is not None
    return SpeechTokens.read(directory, config)


def changed(directory: Path, name: str, **fields: Any) -> None:
    data = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps({**data, **fields}))


@pytest.mark.parametrize(("name", "fields", "words"), [
    ("config.json", {"d_model": 65}, ("d_model 65 with encoder_attention_heads 4", "a multiple")),
    ("config.json", {"d_model": 0}, ("d_model is 0", "a positive integer")),
    ("config.json", {"activation_function": "mish"}, ("'mish' is not supported", "gelu")),
    ("config.json", {"decoder_start_token_id": 300},
     ("decoder_start_token_id is 300", "below vocab_size, 300")),
    ("config.json", {"architectures": ["WhisperForAudioClassification"]},
     ("WhisperForAudioClassification", "WhisperForConditionalGeneration")),
    ("generation_config.json", {"suppress_tokens": [5, 300]}, ("suppress_tokens is 300", "below vocab_size")),
    ("generation_config.json", {"lang_to_id": [259]}, ("lang_to_id is [259]", "an object")),
    ("generation_config.json", {"task_to_id": {"transcribe": "x"}}, ("task_to_id is 'x'", "token ids")),
    ("generation_config.json", {"no_timestamps_token_id": 299}, ("timestamps_token_id is 299", "below 299")),
    ("generation_config.json", {"max_initial_timestamp_index": -1}, ("timestamp_index is -1", "0 or more"))])
def test_configurations(directory: Path, name: str, fields: dict[str, Any], words: tuple[str, ...]):
    changed(directory, name, **fields)
    with pytest.raises(ModelError) as error: read(directory)
    assert [word for word in words if word not in str(error.value)] == []


ASKED: dict[str, tuple[Callable[[SpeechTokens], Any], tuple[str, ...]]] = {
    "language": (lambda t: t.language("klingon"), ("the language is 'klingon'", "de, en", "it is detected")),
    "task": (lambda t: t.prompt(None, "sing", False), ("the task is 'sing'", "transcribe, translate")),
    "translate": (lambda t: t.prompt(None, "translate", False), ("the model has one language",
                                                                 "multilingual"))}


@pytest.mark.parametrize("name", ASKED)
def test_prompts(directory: Path, name: str):
    tokens, (ask, words) = read(directory), ASKED[name]
    with pytest.raises(RequestError) as error: ask(tokens)
    assert [word for word in words if word not in str(error.value)] == []


def test_a_model_without_timestamps_and_languages(directory: Path):
    changed(directory, "generation_config.json", no_timestamps_token_id=None, lang_to_id=None)
    tokens = read(directory)
    with pytest.raises(RequestError, match="no_timestamps_token_id"): tokens.prompt(None, "transcribe", True)
    with pytest.raises(RequestError, match="the model has one language"): tokens.language("de")


@pytest.mark.parametrize(("given", "words"), [
    ({"temperatures": ()}, "temperature is missing"), ({"temperatures": (0.0, 3.0)}, "temperature is 3.0"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"), ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
    ({"temperatures": 0.0}, "temperatures is 0.0"), ({"temperatures": ("a",)}, "temperature is a"),
    ({"seed": -1}, "seed is -1"), ({"language": 5}, "language is 5"), ({"prompt": b"A"}, "prompt is b'A'"),
    ({"logprob_threshold": "low"}, "logprob_threshold is 'low'")])
def test_params(given: dict[str, Any], words: str):
    with pytest.raises(RequestError, match=words): TranscriptionParams(**given)


@pytest.mark.parametrize(("samples", "given", "words"), [
    (np.zeros(0), {}, "samples of shape"), (np.zeros((2, 9)), {}, "one channel"),
    (np.array([0, np.inf]), {}, "NaN or infinite"), (np.zeros(9), {"prompt": "Ada"}, "no prev_sot_token_id"),
    (np.zeros(9), {"language": "xx"}, "'xx', which the model does not have"),
    (np.zeros(9, np.int16), {}, "samples of dtype int16")],
    ids=["empty", "stereo", "infinite", "prompt", "language", "int16"])
def test_recordings(directory: Path, samples: np.ndarray, given: dict[str, Any], words: str):
    config = read_whisper_config(directory)
    assert config is not None
    model = SpeechModel(config, read(directory), Tokenizer(tokenizers.Tokenizer(BPE()), {}, None))
    with pytest.raises(RequestError, match=words): Recording(model, samples, TranscriptionParams(**given))


def test_special_tokens_in_a_prompt(directory: Path):
    changed(directory, "generation_config.json", prev_sot_token_id=258)
    config = read_whisper_config(directory)
    assert config is not None
    words = tokenizers.Tokenizer(BPE({f"t{i}": i for i in range(257)}, []))
    words.add_special_tokens(["<|endoftext|>"])
    model = SpeechModel(config, read(directory), Tokenizer(words, {}, None))
    with pytest.raises(RequestError, match=r"a special token \(257\)"):
        Recording(model, np.zeros(9), TranscriptionParams(prompt="Ada <|endoftext|>"))


def test_bounds(directory: Path):
    with pytest.raises(RequestError, match="max_num_seqs is 0"): Transcriber(directory, max_num_seqs=0)
    with pytest.raises(RequestError, match="max_queue is 0"): Transcriber(directory, max_queue=0)


def test_another_model(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(NVError) as error: Transcriber(tmp_path)
    assert "is no model for transcription" in str(error.value)
    assert "WhisperForConditionalGeneration" in str(error.value)


def test_samples_of_all_channels_are_bounded():
    """8 channels of silence are 3 kB, and refused by their header; as is a rate of 1 Hz or of 1 GHz."""
    made = io.BytesIO()
    soundfile.write(made, np.zeros((50_000, 8)), 16000, format="FLAC")
    assert len(decode_audio(made.getvalue(), "a.flac", 60.0, 400_000)) == 50_000
    with pytest.raises(AudioError, match="has 400000 samples, 16000 a second\n  expected: at most 399999"):
        decode_audio(made.getvalue(), "a.flac", 60.0, 399_999)
    for rate in (1, 10 ** 9):
        head = struct.pack("<HHIIHH", 1, 1, rate, 0, 2, 16)
        with pytest.raises(AudioError, match=f"has {rate} samples a second"):
            decode_audio(riff(1, 1, 16, 2)[:20] + head + b"data\xff\xff\xff\xff" + bytes(8), "a.wav")
    def silence(rate: int) -> bytes:
        head = struct.pack("<HHIIHH", 1, 1, rate, 0, 1, 8)
        return riff(1, 1, 8, 1)[:20] + head + b"data\xff\xff\xff\xff" + bytes(1 << 25)
    assert measure_seconds(silence(8000), "a.wav", 7200.0, 1 << 29) == 2 ** 25 / 8000     # 70 minutes
    with pytest.raises(AudioError, match=r"69\.9 minutes at 8001 .*\n.*at most 30\.6 minutes at such a rate"):
        decode_audio(silence(8001), "a.wav", 7200.0, 1 << 29)
    with pytest.raises(AudioError, match="more than 10000 chunks"):
        decode_audio(b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * 20_000, "a.wav")


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "WAV"])
def test_silence_is_decoded_by_blocks(kind: str):
    """What is said of a file before it is decoded, and the memory that decoding takes beyond its result."""
    made = io.BytesIO()
    soundfile.write(made, np.zeros((1_000_000, 2), np.float32), 48000, format=kind)
    assert measure_seconds(made.getvalue(), "a", 60.0, 2_000_000) == 1_000_000 / 48000
    tracemalloc.start()
    samples = decode_audio(made.getvalue(), "a", 60.0, 2_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) == -(-1_000_000 // 3)
    assert peak < 2 * samples.nbytes + (24 << 20)      # a block of 1 Mi samples, and its copies


def test_files_that_are_none(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    (large := tmp_path / "large.wav").touch()
    os.truncate(large, 1 << 40)
    for path, words in ((Path("/dev/zero"), "is a device"), (tmp_path / "fifo", "is a FIFO"),
                        (tmp_path, "is a directory"), (large, "has 1099511627776 bytes, and at most")):
        with pytest.raises(AudioError, match=f"cannot be read: it {words}"): read_audio(path)


@pytest.mark.parametrize("rate", [16000, 44100])
def test_mp3_without_a_tag(tmp_path: Path, rate: int):
    """libsndfile knows such a file by its name only, which bytes do not have."""
    samples, path = np.sin(np.arange(rate) / 9) / 2, tmp_path / "a.mp3"
    soundfile.write(path, samples, rate, format="MP3")
    assert path.read_bytes()[:2] in (b"\xff\xf3", b"\xff\xfb")
    found = read_audio(path)
    assert found.shape == (16000,)
    if rate == 16000: assert np.abs(found - soundfile.read(path)[0])[2000:].max() < 1e-4


def test_flac_of_unknown_length(capfd: pytest.CaptureFixture[str]):
    """Programs that write to a pipe say 0 samples; what a header says too much prints nothing."""
    made = io.BytesIO()
    soundfile.write(made, np.sin(np.arange(3000) / 9).reshape(-1, 2), 16000, format="FLAC")
    whole = made.getvalue()
    lying = [whole[:21] + bytes((whole[21] & 0xf0,)) + total.to_bytes(4, "big") + whole[26:]
             for total in (0, 100_000_000)]
    assert np.array_equal(decode_audio(lying[0], "a.flac"), decode_audio(whole, "a.flac"))
    with contextlib.suppress(AudioError): decode_audio(lying[1], "a.flac")
    for at in range(0, len(whole), len(whole) // 20):
        with contextlib.suppress(AudioError): decode_audio(whole[:at], "a.flac")
    assert capfd.readouterr().err == ""
