"""One recording, window by window, as a coroutine that asks for one token at a time.

Protocol: `Recording.steps()` is a generator. It writes windows and prompts to its slot of the runner by
itself, and yields `(token, length)`, to be appended to its sequence of then `length` tokens; it is sent the
logits of the next. Its return value is the `Transcription`. So a caller runs the tokens of many recordings in
one step (batching.py). Windows follow each other as in transformers' sequential long form, with its tests of
what was decoded: nothing depends on which recordings run beside it.

`split` makes segments of a window's tokens. Two timestamps in a row end a segment. A window that ends with
one alone has said all there is: the next begins behind it. Otherwise what follows the last pair is cut off in
the middle, and the next window begins there, in time. A window without a pair is one segment; where no
timestamp ends it, it ends with the window, or with the audio if that is shorter.
"""
from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np

from tinygrad_nv.engine.speech.outputs import Segment, Transcription
from tinygrad_nv.engine.speech.params import TranscriptionParams
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import RequestError
from tinygrad_nv.models.whisper.config import WhisperConfig
from tinygrad_nv.models.whisper.features import HOP, RATE, log_mel
from tinygrad_nv.models.whisper.tokens import SpeechTokens, TokenRules, lse_of

Steps: TypeAlias = Generator[tuple[int, int], np.ndarray, Transcription]
WindowSteps: TypeAlias = Generator[tuple[int, int], np.ndarray, "Decoded"]
COLD = 1e-5     # no other token is drawn at less, and scores / temperature may be infinite
WARM = 0.5      # a text chosen at such a temperature is no context for the next window
Progress: TypeAlias = Callable[[float, float], None]
FRAME_S, TIMESTAMP_S = 0.01, 0.02       # seconds of a frame of the spectrogram, and between two timestamps
FRAMES_PER_TIMESTAMP = 2


class Slot(Protocol):
    """A slot of the runner."""

    def encode(self, features: np.ndarray) -> None: ...

    def start(self, prompt: Sequence[int], at: int) -> np.ndarray: ...


@dataclass(frozen=True)
class SpeechModel:
    """Parts that all recordings share."""
    config: WhisperConfig
    tokens: SpeechTokens
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Decoded:
    """A window: its tokens without the end token, and figures as in `Segment`."""
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Recording:
    """Samples at 16 kHz, float32 [n]. `on_segment(segment)` is called for each segment, `progress(done,
    total)` with seconds after each window. Raises `RequestError`."""

    def __init__(self, model: SpeechModel, samples: np.ndarray, params: TranscriptionParams,
                 on_segment: Callable[[Segment], None] = lambda segment: None,
                 progress: Progress = lambda done, total: None) -> None:
        self.model, self.params, self.on_segment, self.progress = model, params, on_segment, progress
        config, tokens = model.config, model.tokens
        if samples.ndim != 1 or not len(samples):
            raise RequestError(f"samples of shape {samples.shape}", "one channel with at least one sample",
                               "pass a recording that is not empty")
        if not np.issubdtype(samples.dtype, np.floating):
            raise RequestError(f"samples of dtype {samples.dtype}", "floats from -1 to 1 at 16 kHz",
                               "divide samples of int16 by 32768")
        samples = samples.astype(np.float32, copy=False)
        if not np.isfinite(samples).all():
            raise RequestError("samples that are NaN or infinite", "numbers", "look at what made them")
        self.samples = samples
        self.language = tokens.language(params.language)
        self.timestamps = params.timestamps or len(samples) // HOP > config.frames
        tokens.prompt(self.language, params.task, self.timestamps)      # raises for what there is not
        self.context = self._context(params.prompt)
        self.rules = TokenRules(tokens, self.timestamps)
        self.segments: list[Segment] = []

    @cached_property
    def features(self) -> np.ndarray:
        """The spectrogram, float32 [frames, mels]. An hour takes 9 s on a core: a caller with others beside
        it computes it before the recording is submitted, so that the engine's thread does not."""
        config = self.model.config
        return log_mel(self.samples, config.mels, config.frames * HOP)

    def _context(self, text: str | None) -> list[int]:
        """Tokens of a text before the recording, as many of the last as there is room for."""
        if not text or not text.strip(): return []
        if self.model.tokens.previous is None:
            raise RequestError("a prompt, and generation_config.json has no prev_sot_token_id",
                               "a model with <|startofprev|>", "leave the prompt out")
        ids = self.model.tokenizer.encode(f" {text.strip()}", special=False)
        if special := [each for each in ids if each >= self.model.tokens.end]:
            raise RequestError(f"the prompt {text[:60]!r} has a special token ({special[0]})", "text",
                               "leave <|…|> out of the prompt")
        return ids[-self.most_context:]

    @property
    def most_context(self) -> int:
        """Tokens of text before a window."""
        return self.model.config.max_tokens // 2 - 1

    def steps(self, slot: Slot) -> Steps:
        """The transcription."""
        frames, samples, features = self.model.config.frames, self.samples, self.features
        seek, conditioned, text = 0, self.params.condition_on_previous, list(self.context)
        duration, total = len(samples) / RATE, len(features)
        while seek < total:
            count = min(frames, total - seek)
            window = features[seek:seek + count]
            slot.encode(np.pad(window, ((0, frames - count), (0, 0))))
            if self.language is None and self.model.tokens.languages:
                self.language = self._detect_language(slot)
            decoded, silent = yield from self._window(slot, self._prompt(conditioned, text), seek)
            if silent: seek += count
            else:
                later, words = self._add_segments(decoded, seek, count)
                seek, text = seek + later, text + words
            conditioned = self.params.condition_on_previous and decoded.temperature < WARM
            self.progress(min(seek / total, 1) * duration, duration)
        code = self.model.tokens.codes.get(-1 if self.language is None else self.language)
        return Transcription(self.text([token for each in self.segments for token in each.tokens]).strip(),
                             code, duration, tuple(self.segments))

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, timestamps and special tokens left out."""
        first = self.model.tokens.first_timestamp
        return self.model.tokenizer.decode([each for each in tokens if first is None or each < first])

    def _detect_language(self, slot: Slot) -> int:
        """Returns the token of the likeliest language of the window in the slot."""
        known = np.array(sorted(self.model.tokens.languages.values()))
        scores = slot.start([self.model.tokens.start], 0)[0]
        return int(known[scores[known].argmax()])

    def _prompt(self, conditioned: bool, text: Sequence[int]) -> tuple[list[int], int]:
        """Tokens in front of a window's, and the place of the start token among them."""
        before = list(text[-self.most_context:]) if conditioned else self.context
        previous = self.model.tokens.previous
        if before and previous is not None: before = [previous, *before]
        prompt = self.model.tokens.prompt(self.language, self.params.task, self.timestamps)
        return [*before, *prompt], len(before)

    def _add_segments(self, decoded: Decoded, seek: int, count: int) -> tuple[int, list[int]]:
        """Adds the segments of a window of `count` frames. Returns by how many frames the next one is later,
        and the tokens that it continues."""
        first, kept = self.model.tokens.first_timestamp, []
        spans, later = spans_of(decoded.tokens, first, seek, count, len(self.samples) / RATE)
        for span in spans:
            tokens = decoded.tokens[span.first:span.end]
            segment = Segment(span.start_s, span.end_s, self.text(tokens), tuple(tokens),
                              decoded.temperature, decoded.avg_logprob, decoded.compression_ratio,
                              decoded.no_speech_prob)
            self.segments.append(segment)
            self.on_segment(segment)
            # of two timestamps at the end one is the next segment's
            cut = len(tokens) > 2 and first is not None and tokens[-2] >= first
            kept += tokens[:-1] if cut else tokens
        return later, kept

    # **** one window ****

    def _window(self, slot: Slot, prompt: tuple[list[int], int],
                seek: int) -> Generator[tuple[int, int], np.ndarray, tuple[Decoded, bool]]:
        """The window in the slot, with the first temperature at which it passes the tests; and whether it is
        silence."""
        p, last = self.params, len(self.params.temperatures) - 1
        for attempt, temperature in enumerate(p.temperatures):
            chooser = np.random.default_rng((p.seed, seek, attempt))
            made = yield from self._decode_window(slot, prompt, temperature, chooser)
            unlikely = p.logprob_threshold is not None and made.avg_logprob < p.logprob_threshold
            if unlikely and p.no_speech_threshold is not None and made.no_speech_prob > p.no_speech_threshold:
                return made, True
            repeats = p.compression_ratio_threshold is not None and \
                made.compression_ratio > p.compression_ratio_threshold
            if not (unlikely or repeats) or attempt == last: break
        return made, False

    def _decode_window(self, slot: Slot, prompt: tuple[list[int], int], temperature: float,
                 chooser: np.random.Generator) -> WindowSteps:
        t, (before, at) = self.model.tokens, prompt
        limit = self._limit(len(before))
        at_start, scores = slot.start(before, at)
        silence = 0.0 if t.no_speech is None else math.exp(float(at_start[t.no_speech]) - lse_of(at_start))
        tokens: list[int] = []
        likelihood = 0.0
        while True:
            self.rules(scores, tokens)
            token = choose_token(scores, temperature, chooser)
            likelihood += float(scores[token]) - lse_of(scores)
            tokens.append(token)
            if token == t.end or len(before) + len(tokens) >= limit: break
            scores = yield token, len(before) + len(tokens)
        ratio = compression_ratio(tokens, self.model.config.vocab_size)
        mean = likelihood / len(tokens)
        if tokens[-1] == t.end: tokens.pop()
        return Decoded(tokens, temperature, mean, ratio, silence)

    def _limit(self, prompt: int) -> int:
        """Tokens that a sequence may have. Raises `RequestError`."""
        most, new = self.model.config.max_tokens, self.params.max_new_tokens
        if new is None: return min(self.model.tokens.max_length + min(self.most_context, prompt), most)
        if prompt + new <= most: return prompt + new
        raise RequestError(f"max_new_tokens is {new}, after {prompt} tokens of the prompt",
                           f"at most {most} together", "lower max_new_tokens, or shorten the prompt")


def choose_token(scores: np.ndarray, temperature: float, chooser: np.random.Generator) -> int:
    """Returns the likeliest token, or with a temperature one drawn by softmax(scores / temperature): the
    largest of scores with Gumbel noise."""
    if temperature < COLD: return int(scores.argmax())
    return int((scores / temperature + chooser.gumbel(size=len(scores))).argmax())


def compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Bytes of tokens by those that zlib makes of them: as transformers counts them."""
    width = int(math.log2(vocab_size) / 8) + 1
    data = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))


@dataclass(frozen=True)
class Span:
    """Tokens [first, end) of a window, from `start_s` to `end_s` seconds of the recording."""
    start_s: float
    end_s: float
    first: int
    end: int


def spans_of(tokens: Sequence[int], first_timestamp: int | None, seek: int, frames: int,
             audio_s: float) -> tuple[list[Span], int]:
    """The segments of a window of `frames` that begins at frame `seek` of audio of `audio_s` seconds, and by
    how many frames the next one is later. `tokens` are without the end token."""
    offset = seek * FRAME_S
    at = [first_timestamp is not None and token >= first_timestamp for token in tokens]
    pairs = [i + 1 for i in range(len(tokens) - 1) if at[i] and at[i + 1]]
    if first_timestamp is None or not pairs:
        stamps = [token for token, is_stamp in zip(tokens, at, strict=True) if is_stamp]
        if first_timestamp is not None and stamps and stamps[-1] != first_timestamp:
            end_s = offset + (stamps[-1] - first_timestamp) * TIMESTAMP_S
        else: end_s = min(offset + frames // FRAMES_PER_TIMESTAMP * TIMESTAMP_S, audio_s)
        return [Span(offset, end_s, 0, len(tokens))], frames
    alone = at[-2:] == [False, True]
    # the last segment has both of its timestamps, so that it is known to be cut off behind them
    ends = [*pairs, len(tokens)] if alone else [*pairs[:-1], pairs[-1] + 1]
    spans, begin = [], 0
    for number, end in enumerate(ends, 1):
        closing = end - 1 if alone or number < len(ends) else end - 2
        start_s, end_s = (offset + (tokens[i] - first_timestamp) * TIMESTAMP_S for i in (begin, closing))
        spans.append(Span(start_s, end_s, begin, end))
        begin = end
    later = (tokens[begin - 2] - first_timestamp) * FRAMES_PER_TIMESTAMP
    # without the rules of timestamps a model may end where it began
    return spans, frames if alone or later <= 0 else later
