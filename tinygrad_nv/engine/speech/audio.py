"""Audio files to samples at 16 kHz.

Protocol: `read_audio(path)` and `decode_audio(data, name)` give float32 [n] from −1 to 1, channels averaged.
WAV files of PCM (8, 16, 24 or 32 bits) and of floats are read here; all else by the package soundfile, which
knows FLAC, MP3, OGG and more. Anything that cannot be read raises `AudioError`.

Resampling is polyphase: with 16000 / rate = up / down in lowest terms, sample n of the result is the sum over
a windowed sinc, centred at n · down / up of the input, that passes what both rates have. Its stopband is 80
dB down (Kaiser, β 8), its transition a tenth of the band.
"""
from __future__ import annotations

import io
import struct
from math import gcd
from pathlib import Path

import numpy as np

from tinygrad_nv.errors import AudioError
from tinygrad_nv.models.whisper.features import RATE

CROSSINGS = 32          # zeros of the sinc on each side
KAISER_BETA = 8.0
PASSED = 0.95           # of the lower of both bands
LOWEST, HIGHEST = 1000, 768000      # samples a second
MOST_S = 24 * 3600.0    # seconds of a recording: 5.5 GB of samples at 16 kHz
FULL = 48000            # samples a second of which a recording may have so many seconds
UNKNOWN = 1 << 62       # libsndfile's number of frames where a stream does not say it, or more
# WAV: kinds of samples, with the bytes of each; the format of a file, and the end of GUIDs that are kinds
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
ENCODINGS = {(PCM, 1), (PCM, 2), (PCM, 3), (PCM, 4), (FLOAT, 4), (FLOAT, 8)}
FORM = struct.Struct("<HHIIHH")
EXTENSIBLE_BYTES, GUID = 40, bytes.fromhex("000000001000800000aa00389b71")
PHASES = 1024           # filters that are made: of more they are interpolated, to 1e-6
BLOCK = 1 << 13         # samples of a result that are made at a time
FRAMES = 1 << 20        # of a file that are read at a time


def read_audio(path: Path) -> np.ndarray:
    """The samples of a file. Raises `AudioError`."""
    try: data = path.read_bytes()
    except OSError as error:
        raise AudioError(f"{path} cannot be read: {error.strerror}", "an audio file",
                         "check the path and its permissions") from error
    return decode_audio(data, str(path))


def decode_audio(data: bytes, name: str, most_s: float = MOST_S) -> np.ndarray:
    """The samples of a file's bytes, of at most so many seconds; `name` is used in messages. Raises
    `AudioError`."""
    if not data: raise AudioError(f"{name} is empty", "an audio file", "record it again")
    found = _wav(data, name, most_s) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else None
    mono, rate = _by_soundfile(data, name, most_s) if found is None else found
    if not len(mono): raise AudioError(f"{name} has no samples", "a recording", "record it again")
    if not np.isfinite(mono).all():
        raise AudioError(f"{name} has samples that are NaN or infinite", "numbers", "record it again")
    return resampled(mono, rate)


def _require(name: str, rate: int, frames: int, most_s: float) -> None:
    """Raises `AudioError` for a file that is not read, before it is."""
    if not LOWEST <= rate <= HIGHEST:
        raise AudioError(f"{name} has {rate} samples a second", f"{LOWEST} to {HIGHEST}",
                         "convert the file to 16 kHz")
    if frames > most_s * rate:
        raise AudioError(f"{name} is {frames / rate / 60:.0f} minutes long", f"at most {most_s / 60:.0f}",
                         "cut it into several files")
    if frames > most_s * FULL:
        raise AudioError(f"{name} has {frames} samples, {rate} a second", f"at most {most_s * FULL:.0f}",
                         "convert the file to 16 kHz, or cut it into several files")


def _wav(data: bytes, name: str, most_s: float) -> tuple[np.ndarray, int] | None:
    """Samples [n] and their rate; None of an encoding other than numbers."""
    chunks = _chunks(data)
    form = bytes(chunks.get(b"fmt ", b""))[:EXTENSIBLE_BYTES]
    if len(form) < FORM.size or b"data" not in chunks:
        raise AudioError(f"{name} is a damaged WAV file: the chunks fmt and data are not whole",
                         "a complete file", "record or convert it again")
    kind, channels, rate, _, align, bits = FORM.unpack(form[:FORM.size])
    if kind == EXTENSIBLE and len(form) == EXTENSIBLE_BYTES and form[26:] == GUID:
        kind = int.from_bytes(form[24:26], "little")
    width = -(-bits // 8)
    if (kind, width) not in ENCODINGS: return None
    if not channels or align != channels * width:
        raise AudioError(f"{name} is a damaged WAV file: {channels} channels of {bits} bits in {align} bytes",
                         "a complete file", "record or convert it again")
    frames = chunks[b"data"][:len(chunks[b"data"]) // align * align]
    _require(name, rate, len(frames) // align, most_s)
    if width == 3:      # as the upper ones of 32 bits
        made = np.zeros((len(frames) // 3, 4), np.uint8)
        made[:, 1:] = np.frombuffer(frames, np.uint8).reshape(-1, 3)
        whole = made.view("<i4").astype(np.float32) / 2.0 ** 31
    elif kind == FLOAT: whole = np.frombuffer(frames, f"<f{width}").astype(np.float32)
    elif width == 1: whole = (np.frombuffer(frames, np.uint8).astype(np.float32) - 128) / 128
    else: whole = np.frombuffer(frames, f"<i{width}").astype(np.float32) / 2.0 ** (8 * width - 1)
    return whole.reshape(-1, channels).mean(1), rate


def _chunks(data: bytes) -> dict[bytes, memoryview]:
    """The first chunk of each name of a RIFF file, up to the end of the file: a recorder that was cut off, or
    that writes to a pipe, says more bytes than there are."""
    made, at, view = dict[bytes, memoryview](), 12, memoryview(data)
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4:at + 8], "little")
        made.setdefault(data[at:at + 4], view[at + 8:at + 8 + size])
        at += 8 + size + size % 2
    return made


def _by_soundfile(data: bytes, name: str, most_s: float) -> tuple[np.ndarray, int]:
    """Samples [n] and their rate."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise AudioError(f"{name} is no WAV file of PCM or floats, and the Python package soundfile is not "
                         "installed", "soundfile, which reads FLAC, MP3, OGG and others",
                         "convert the file to WAV, or pip install 'tinygrad-nv[audio]'") from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, blocks, read = int(file.samplerate), list[np.ndarray](), 0
            _require(name, rate, file.frames if file.frames < UNKNOWN else 0, most_s)
            for each in file.blocks(max(1, FRAMES // file.channels), dtype="float32", always_2d=True):
                _require(name, rate, read := read + len(each), most_s)
                blocks.append(each.mean(1))
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        why = getattr(error, "error_string", str(error))
        raise AudioError(f"{name} is no audio file: {why[:200]}", "WAV, FLAC, MP3, OGG or another "
                         "file that libsndfile reads", "convert the file to WAV") from error
    return np.concatenate([np.empty(0, np.float32), *blocks]), rate


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Samples, float32 [n], at `rate` as float32 [⌈n · 16000 / rate⌉] at 16 kHz."""
    if rate == RATE: return samples
    shared = gcd(rate, RATE)
    up, down = RATE // shared, rate // shared
    cutoff = min(1.0, up / down) * PASSED       # of the input's band
    reach = int(np.ceil(CROSSINGS / cutoff))    # input samples on each side
    padded = np.pad(samples, reach).astype(np.float32)
    taps = np.arange(-reach + 1, reach + 1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, len(taps))
    count = min(up, PHASES)
    table = _sinc(taps[None] - (np.arange(count + 1) / count)[:, None], cutoff, reach)
    out = np.empty(-(-len(samples) * up // down), np.float32)
    for first in range(0, len(out), BLOCK):
        places = np.arange(first, min(first + BLOCK, len(out))) * down
        phase, between = np.divmod(places % up * count, up)
        filters = table[phase]
        if count < up: filters += (between / up).astype(np.float32)[:, None] * (table[phase + 1] - filters)
        out[first:first + len(places)] = np.einsum("nt,nt->n", windows[places // up + 1], filters)
    return out


def _sinc(distance: np.ndarray, cutoff: float, reach: int) -> np.ndarray:
    """The filter at distances in input samples, float32, each row with sum 1."""
    inside = np.clip(1 - (distance / reach) ** 2, 0, None)
    made = np.sinc(distance * cutoff) * np.i0(KAISER_BETA * np.sqrt(inside))
    return (made / made.sum(1, keepdims=True)).astype(np.float32)
