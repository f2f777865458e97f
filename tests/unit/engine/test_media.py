"""Audio files to samples: formats against soundfile, resampling against closed forms, and outputs.
Files of images to RGB bytes, as transformers' loader and image processors have them."""
from __future__ import annotations

import base64
import io
import wave

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from tinygrad_nv.engine.speech import outputs
from tinygrad_nv.engine.speech.audio import Resampler, decode_audio, resample
from tinygrad_nv.engine.speech.outputs import Segment, Transcription
from tinygrad_nv.engine.speech.recording import Span, spans_of
from tinygrad_nv.engine.vision.images import as_image, decode_image, from_url, pixels

RNG = np.random.default_rng(0)


def written(samples: np.ndarray, rate: int, kind: str, subtype: str) -> bytes:
    made = io.BytesIO()
    soundfile.write(made, samples, rate, format=kind, subtype=subtype)
    return made.getvalue()


@pytest.mark.parametrize(("kind", "subtype", "bits"), [
    ("WAV", "PCM_U8", 8), ("WAV", "PCM_16", 16), ("WAV", "PCM_24", 24), ("WAV", "PCM_32", 32),
    ("WAV", "FLOAT", 32), ("WAVEX", "PCM_16", 16), ("FLAC", "PCM_16", 16), ("AIFF", "PCM_24", 24)])
@pytest.mark.parametrize("channels", [1, 2])
def test_formats(kind: str, subtype: str, bits: int, channels: int):
    """The mean of channels, to the last bit that the format has."""
    samples = RNG.uniform(-0.9, 0.9, (1001, channels))
    made = decode_audio(written(samples, 16000, kind, subtype), "a file")
    assert made.dtype == np.float32
    assert made.shape == (1001,)
    assert np.abs(made - samples.mean(1)).max() <= 2.0 ** (1 - min(bits, 23))


def test_wav_is_read_as_soundfile_reads_it():
    samples = RNG.uniform(-1, 1, 500)
    for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32"):
        data = written(samples, 16000, "WAV", subtype)
        theirs = soundfile.read(io.BytesIO(data), dtype="float32")[0]
        assert np.array_equal(decode_audio(data, "a file"), theirs)


def test_a_recorder_that_was_cut_off():
    """The header says more than there is: what is there is read."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(np.arange(2000, dtype="<i2").tobytes())
    assert len(decode_audio(made.getvalue()[:-1001], "a file")) == 749


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 32000, 44100, 48000, 44101])
def test_resampled_tones(rate: int):
    """A tone that both rates have stays what it is; one above 8 kHz is 80 dB down."""
    seconds = 1.0
    t, wanted_t = np.arange(int(rate * seconds)) / rate, np.arange(int(16000 * seconds)) / 16000
    inside = slice(2000, 14000)     # away from the ends, where the signal begins
    made = resample(np.sin(2 * np.pi * 1234.5 * t).astype(np.float32), rate)
    assert len(made) == -(-len(t) * 16000 // rate)
    wanted = np.sin(2 * np.pi * 1234.5 * wanted_t)
    assert np.abs(made[:len(wanted)] - wanted)[inside].max() < 2e-4
    if rate > 20000:
        made = resample(np.sin(2 * np.pi * 9500 * t).astype(np.float32), rate)
        assert np.abs(made[inside]).max() < 1e-4


def test_resampling_is_linear_and_keeps_constants():
    made = resample(np.ones(5000, np.float32), 22050)
    assert np.abs(made[200:-200] - 1).max() < 1e-5


def test_half_the_rate_against_a_filter_of_torch():
    """48 kHz to 16 kHz is every third output of one filter."""
    samples = RNG.normal(size=6000).astype(np.float32)
    impulse = np.zeros(601, np.float32)
    impulse[300] = 1
    taps = np.stack([resample(np.roll(impulse, shift), 48000)[100] for shift in range(-150, 151)])
    wanted = torch.nn.functional.conv1d(torch.tensor(samples)[None, None], torch.tensor(taps)[None, None],
                                        padding=150)[0, 0].numpy()[::3]
    assert np.abs(resample(samples, 48000)[100:-100] - wanted[100:-100]).max() < 1e-5


@pytest.mark.parametrize("rate", [8000, 44100, 44101, 48000])
def test_blocks_make_what_the_whole_does(rate: int):
    """Blocks of any sizes, smaller than a filter or empty."""
    samples = RNG.normal(size=30_000).astype(np.float32)
    resampler = Resampler(rate)
    made = [resampler.feed(each) for each in np.split(samples, [1, 7, 7, 5000, 5001, 20_000])]
    whole = resample(samples, rate)
    assert np.abs(np.concatenate([*made, resampler.finish()]) - whole).max() <= 1e-6 * np.abs(whole).max()


def test_spans():
    """Windows of 200 frames from frame 100 on; timestamps begin at 1000."""
    def spans(*tokens: int) -> tuple[list[Span], int]: return spans_of(tokens, 1000, 100, 200, 9.0)
    assert spans(5, 6) == ([Span(1.0, 3.0, 0, 2)], 200)
    assert spans(1000, 5, 6) == ([Span(1.0, 3.0, 0, 3)], 200)
    assert spans(1000, 5, 1020) == ([Span(1.0, 1.4, 0, 3)], 200)
    assert spans(1000, 5, 1010, 1010, 6, 1030) == ([Span(1.0, 1.2, 0, 3), Span(1.2, 1.6, 3, 6)], 200)
    assert spans(1000, 5, 1010, 1010, 6) == ([Span(1.0, 1.2, 0, 4)], 20)
    assert spans(1000, 5, 1010, 1012, 6, 1030, 1030) == ([Span(1.0, 1.2, 0, 3), Span(1.24, 1.6, 3, 7)], 60)
    assert spans_of([5, 1001], None, 0, 200, 9.0) == ([Span(0.0, 2.0, 0, 2)], 200)
    # padding is no audio
    for tokens in ((5, 6), (1000, 5, 6)): assert spans_of(tokens, 1000, 100, 200, 1.7)[0][0].end_s == 1.7
    # without the rules of timestamps: a pair that takes no time is not decoded for ever
    assert spans(1000, 1000, 5)[1] == 200


def test_subtitles():
    segments = tuple(Segment(start, end, text, (), 0, 0, 1, 0) for start, end, text in (
        (0.0, 1.5, " Hello."), (1.5, 1.5, " "), (1.5, 1.6, "\x1d"), (3725.25, 3725.0, " a --> b\n\n c ")))
    made = Transcription("Hello.", "en", 4000, segments)
    assert outputs.srt(made) == ("1\n00:00:00,000 --> 00:00:01,500\nHello.\n\n"
                                   "2\n01:02:05,250 --> 01:02:05,250\na → b\nc\n")
    assert outputs.vtt(made).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello.\n\n01:02:05.250")
    assert outputs.lines(made).splitlines()[1] == "[01:02:05.250 → 01:02:05.000] a → b c"


# **** images ****


COLOURS = Image.fromarray(RNG.integers(0, 256, (9, 7, 4), np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **how: object) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **how)
    return made.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "1", "P", "CMYK"])
def test_modes(mode: str) -> None:
    """What is transparent is white."""
    image = COLOURS.convert(mode)
    data = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    for one, made in ((image, as_image(image)), (Image.open(io.BytesIO(data)), decode_image(data))):
        assert np.array_equal(made, convert_to_rgb(one, return_numpy=True))


def test_a_transparent_colour() -> None:
    image = COLOURS.convert("P")
    found = Image.open(io.BytesIO(encoded(image, transparency=image.getpixel((0, 0)))))
    made = as_image(found)
    assert np.array_equal(made, convert_to_rgb(found, return_numpy=True))
    assert made[0, 0].tolist() == [255] * 3


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif(turn: int) -> None:
    """Photographs are seen upright."""
    exif = Image.Exif()
    exif[0x112] = turn
    data = encoded(COLOURS.convert("RGB"), "JPEG", exif=exif)
    wanted = load_image(base64.b64encode(data).decode())
    assert np.array_equal(decode_image(data), np.asarray(wanted))
    assert decode_image(data).shape == ((9, 7, 3) if turn < 5 else (7, 9, 3))


def test_exif_that_is_damaged() -> None:
    assert decode_image(encoded(COLOURS.convert("RGB"), "JPEG", exif=b"Exif\0\0junk")).shape == (9, 7, 3)


def test_16_bits() -> None:
    """The upper 8 of them."""
    levels = RNG.integers(0, 1 << 16, (5, 6), np.uint16)
    made = decode_image(encoded(Image.fromarray(levels)))
    assert np.array_equal(made, np.repeat((levels >> 8).astype(np.uint8)[:, :, None], 3, 2))


@pytest.mark.parametrize("form", ["data:image/png;base64,{}", "DATA:;BASE64,{}"])
def test_urls(form: str) -> None:
    """Lines may be broken, and characters escaped."""
    image = COLOURS.convert("RGB")
    text = base64.encodebytes(encoded(image)).decode()
    assert "\n" in text.strip()
    for body in (text, text.replace("+", "%2B").replace("=", "%3D")):
        assert np.array_equal(pixels(from_url(form.format(body))), np.asarray(image))
