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
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import numpy as np

from tinygrad_nv.errors import AudioError
from tinygrad_nv.files import read_bytes
from tinygrad_nv.models.whisper.features import RATE

CROSSINGS = 32          # zeros of the sinc on each side
KAISER_BETA = 8.0
PASSED = 0.95           # of the lower of both bands
LOWEST, HIGHEST = 1000, 768000      # samples a second
MOST_S = 24 * 3600.0    # limit: seconds of a recording from Python or the command line; 5.5 GB of samples
FULL = 48000            # samples a second, of all channels, of which a recording may have so many seconds
UNKNOWN = 1 << 62       # libsndfile's number of frames where a stream does not say it, or more
# WAV: kinds of samples, with the bytes of each; the format of a file, and the end of GUIDs that are kinds
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
ENCODINGS = {(PCM, 1), (PCM, 2), (PCM, 3), (PCM, 4), (FLOAT, 4), (FLOAT, 8)}
FORM = struct.Struct("<HHIIHH")
EXTENSIBLE_BYTES, GUID = 40, bytes.fromhex("000000001000800000aa00389b71")
# how frames of MP3 begin, and a tag of ID3: libsndfile knows bytes without a name as MP3 only by a tag
SYNC = tuple(bytes((0xFF, each)) for each in (0xE2, 0xE3, 0xF2, 0xF3, 0xFA, 0xFB))
TAG = b"ID3\4\0\0\0\0\0\x0a" + bytes(10)
MAX_FILE_BYTES = 4 << 30    # limit: bytes of a recording's file, as WAV has
MAX_CHUNKS = 10_000         # limit: chunks of a WAV file
PHASES = 1024           # filters that are made: of more they are interpolated, to 1e-6
# limit: multiplications of interpolated filters for a request, at rates such as 44,101: 4 s of a core
MAX_INTERPOLATED = 2_000_000_000
BLOCK = 1 << 20         # samples of windows that are copied at a time, with a filter for each
FRAMES = 1 << 20        # of a file that are read at a time


def read_audio(path: Path) -> np.ndarray:
    """The samples of a file. Raises `AudioError`."""
    try: data = read_bytes(path, MAX_FILE_BYTES)
    except OSError as error:
        raise AudioError(f"{path} cannot be read: {error.strerror}", "an audio file",
                         "check the path and its permissions") from error
    return decode_audio(data, str(path))


def decode_audio(data: bytes, name: str, most_s: float = MOST_S, most_samples: int | None = None
                 ) -> np.ndarray:
    """The samples of a file's bytes, of at most so many seconds, and of at most `most_samples` of all
    channels before they are resampled; `name` is used in messages. Raises `AudioError`."""
    rate, frames, blocks = _open(data, _Limits(name, most_s, most_samples))
    # pages are taken as they are written: a header that says too much takes no memory
    resampler, made, at = Resampler(rate), np.empty(-(-frames * RATE // rate), np.float32), 0
    for block in itertools.chain(blocks, [None]):
        each = resampler.finish() if block is None else resampler.feed(_finite(name, block))
        if at + len(each) > len(made): made.resize(at + at // 4 + len(each), refcheck=False)
        made[at:at + len(each)] = each
        at += len(each)
    if not resampler.read: raise AudioError(f"{name} has no samples", "a recording", "record it again")
    return made[:at]


def measure_seconds(data: bytes, name: str, most_s: float, most_samples: int) -> float:
    """Returns the seconds of a recording, as its header says: `most_s` where it says nothing. Raises
    `AudioError` for one that `decode_audio` refuses by its header."""
    rate, frames, _ = _open(data, _Limits(name, most_s, most_samples))
    return frames / rate if frames else most_s


def _open(data: bytes, limits: _Limits) -> tuple[int, int, Iterator[np.ndarray]]:
    """The rate, the frames (0: unknown), and blocks of samples [n], which are decoded as they are taken."""
    if not data: raise AudioError(f"{limits.name} is empty", "an audio file", "record it again")
    found = _wav(data, limits) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else None
    return _by_soundfile(data, limits) if found is None else found


def _finite(name: str, mono: np.ndarray) -> np.ndarray:
    if np.isfinite(mono).all(): return mono
    raise AudioError(f"{name} has samples that are NaN or infinite", "numbers", "record it again")


@dataclass(frozen=True)
class _Limits:
    name: str
    seconds: float
    samples: int | None     # of all channels; None: of one, `FULL` a second

    def require(self, rate: int, frames: int, channels: int) -> None:
        """Raises `AudioError` for a file that is not read, before it is."""
        name, most_s = self.name, self.seconds
        if not LOWEST <= rate <= HIGHEST:
            raise AudioError(f"{name} has {rate} samples a second", f"{LOWEST} to {HIGHEST}",
                             "convert the file to 16 kHz")
        if frames > most_s * rate:
            raise AudioError(f"{name} is {frames / rate / 60:.0f} minutes long", f"at most {most_s / 60:.0f}",
                             "cut it into several files")
        count, most = frames, int(most_s * FULL)
        if self.samples is not None: count, most = frames * channels, self.samples
        if count > most:
            raise AudioError(f"{name} has {count} samples, {rate} a second", f"at most {most}",
                             "convert the file to 16 kHz and one channel, or cut it into several files")
        each = RATE * 2 * _reach(rate) if RATE // gcd(rate, RATE) > PHASES else 0
        if self.samples is not None and frames * each > MAX_INTERPOLATED * rate:
            raise AudioError(f"{name} has {frames / rate / 60:.1f} minutes at {rate} samples a second",
                             f"at most {MAX_INTERPOLATED / each / 60:.1f} minutes at such a rate, whose "
                             f"ratio to {RATE} is not one of small numbers", "convert the file to 16 kHz")


def _wav(data: bytes, limits: _Limits) -> tuple[int, int, Iterator[np.ndarray]] | None:
    """Opens a WAV file as `_open` does; None of an encoding other than numbers."""
    name, chunks = limits.name, _chunks(data, limits.name)
    form = bytes(chunks.get(b"fmt ", b"")[:EXTENSIBLE_BYTES])
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
    limits.require(rate, len(frames) // align, channels)
    step = max(1, FRAMES // channels) * align
    blocks = (frames[at:at + step] for at in range(0, len(frames), step))
    return rate, len(frames) // align, (_numbers(each, kind, width).reshape(-1, channels).mean(1)
                                        for each in blocks)


def _numbers(data: memoryview, kind: int, width: int) -> np.ndarray:
    """Samples of a WAV file from −1 to 1."""
    if width == 3:      # as the upper ones of 32 bits
        made = np.zeros((len(data) // 3, 4), np.uint8)
        made[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return made.view("<i4").reshape(-1).astype(np.float32) / 2.0 ** 31
    if kind == FLOAT: return np.frombuffer(data, f"<f{width}").astype(np.float32)
    if width == 1: return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    return np.frombuffer(data, f"<i{width}").astype(np.float32) / 2.0 ** (8 * width - 1)


def _chunks(data: bytes, name: str) -> dict[bytes, memoryview]:
    """The first chunk of each name of a RIFF file, up to the end of the file: a recorder that was cut off, or
    that writes to a pipe, says more bytes than there are."""
    made, at, view = dict[bytes, memoryview](), 12, memoryview(data)
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data): return made
        size = int.from_bytes(data[at + 4:at + 8], "little")
        made.setdefault(data[at:at + 4], view[at + 8:at + 8 + size])
        at += 8 + size + size % 2
    raise AudioError(f"{name} is a WAV file of more than {MAX_CHUNKS} chunks", "a recording",
                     "convert it again")


class _File(io.BytesIO):
    """A file in which damaged ones seek before its beginning: soundfile prints errors of that on stderr."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = {1: self.tell(), 2: len(self.getbuffer())}.get(whence, 0)
        return super().seek(max(0, base + offset))


def _by_soundfile(data: bytes, limits: _Limits) -> tuple[int, int, Iterator[np.ndarray]]:
    """Opens other files as `_open` does."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise AudioError(f"{limits.name} is no WAV file of PCM or floats, and the Python package soundfile "
                         "is not installed", "soundfile, which reads FLAC, MP3, OGG and others",
                         "convert the file to WAV, or pip install 'tinygrad-nv[audio]'") from error

    class Stream(soundfile.SoundFile):
        """A file that is not looked for after each read, which fails where its length is not known."""
        def seekable(self) -> bool: return False
    kinds = (soundfile.SoundFileError, RuntimeError, ValueError, TypeError)

    def blocks() -> Iterator[np.ndarray]:
        read = 0
        try:
            with file:
                step = max(1, FRAMES // channels)
                while len(each := file.read(step, "float32", always_2d=True)):
                    limits.require(rate, read := read + len(each), channels)
                    yield each.mean(1)
        except kinds as error: raise _no_audio(limits.name, error) from error
    try:
        file = Stream(_File(TAG + data if data.startswith(SYNC) else data))
        rate, channels, frames = int(file.samplerate), int(file.channels), int(file.frames)
    except kinds as error: raise _no_audio(limits.name, error) from error
    if frames >= UNKNOWN: frames = 0
    limits.require(rate, frames, channels)
    return rate, frames, blocks()


def _no_audio(name: str, error: Exception) -> AudioError:
    why = getattr(error, "error_string", str(error))
    return AudioError(f"{name} is no audio file: {why[:200]}", "WAV, FLAC, MP3, OGG or another file that "
                      "libsndfile reads", "convert the file to WAV")


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Converts samples, float32 [n], at `rate` to float32 [⌈n · 16000 / rate⌉] at 16 kHz."""
    resampler = Resampler(rate)
    return np.concatenate([resampler.feed(samples), resampler.finish()])


class Resampler:
    """Resamples a recording as its blocks arrive: `feed` returns what they suffice for, `finish` the rest."""

    def __init__(self, rate: int) -> None:
        shared = gcd(rate, RATE)
        self.up, self.down = RATE // shared, rate // shared
        cutoff, self.reach = _cutoff(rate), _reach(rate)
        taps = np.arange(-self.reach + 1, self.reach + 1)
        self.count = min(self.up, PHASES)
        self.table = _sinc(taps[None] - (np.arange(self.count + 1) / self.count)[:, None], cutoff, self.reach)
        # samples of the padded input from `first` on; so many of the input were read, of the result made
        self.kept, self.first, self.read, self.made = np.zeros(self.reach, np.float32), 0, 0, 0

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """See above."""
        self.read += len(samples)
        if self.up == self.down: return samples
        self.kept = np.concatenate([self.kept, samples.astype(np.float32, copy=False)])
        # the last window, of 2 · reach samples, that is whole; a result begins at window place // up + 1
        last = self.first + len(self.kept) - 2 * self.reach
        return self._until(min(-(-last * self.up // self.down), -(-self.read * self.up // self.down)))

    def finish(self) -> np.ndarray:
        """See above."""
        if self.up == self.down: return np.empty(0, np.float32)
        self.kept = np.concatenate([self.kept, np.zeros(self.reach, np.float32)])
        return self._until(-(-self.read * self.up // self.down))

    def _until(self, end: int) -> np.ndarray:
        """The result from where it is up to `end`; what no later one needs of the input is dropped."""
        out, width = np.empty(max(0, end - self.made), np.float32), 2 * self.reach
        if not len(out): return out
        windows = np.lib.stride_tricks.sliding_window_view(self.kept, width)
        if self.count == self.up: self._by_filter(out, windows)
        else: self._interpolate(out, windows)
        self.made = end
        done = max(0, min(self.made * self.down // self.up + 1 - self.first, len(self.kept)))
        self.kept, self.first = self.kept[done:].copy(), self.first + done
        return out

    def _by_filter(self, out: np.ndarray, windows: np.ndarray) -> None:
        """Every `up`th sample has the same filter, and its window is `down` behind that of the one before."""
        for at in range(min(self.up, len(out))):
            place, into = (self.made + at) * self.down, out[at::self.up]
            ours = windows[place // self.up + 1 - self.first::self.down][:len(into)]
            into[:] = np.einsum("nt,t->n", ours, self.table[place % self.up])

    def _interpolate(self, out: np.ndarray, windows: np.ndarray) -> None:
        """Each sample has a filter between two of the table; those between the same two are made together."""
        places = np.arange(self.made, self.made + len(out)) * self.down
        phase, between = np.divmod(places % self.up * self.count, self.up)
        begins, share = places // self.up + 1 - self.first, (between / self.up).astype(np.float32)
        order, bounds = np.argsort(phase, kind="stable"), np.cumsum(np.bincount(phase, minlength=self.count))
        for each, ours in enumerate(np.split(order, bounds[:-1])):
            for some in np.array_split(ours, -(-len(ours) * windows.shape[1] // BLOCK)) if len(ours) else ():
                low, high = (windows[begins[some]] @ self.table[each:each + 2].T).T
                out[some] = low + share[some] * (high - low)


def _cutoff(rate: int) -> float:
    """Returns the share of the input's band that the filter passes."""
    return min(1.0, RATE / rate) * PASSED


def _reach(rate: int) -> int:
    """Input samples on each side of the filter."""
    return int(np.ceil(CROSSINGS / _cutoff(rate)))


def _sinc(distance: np.ndarray, cutoff: float, reach: int) -> np.ndarray:
    """The filter at distances in input samples, float32, each row with sum 1."""
    inside = np.clip(1 - (distance / reach) ** 2, 0, None)
    made = np.sinc(distance * cutoff) * np.i0(KAISER_BETA * np.sqrt(inside))
    return (made / made.sum(1, keepdims=True)).astype(np.float32)
