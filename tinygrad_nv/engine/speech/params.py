"""Parameters of a transcription."""
from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

from tinygrad_nv.errors import RequestError

FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class TranscriptionParams:
    """`language` is a code or an English name, None to detect it; the `task` is "transcribe", or "translate"
    into English. Recordings longer than a window (30 s) always have timestamps.

    A window is decoded with the first of the `temperatures` (0: greedily), and with the next one while its
    text repeats itself (its tokens compress more than `compression_ratio_threshold` times), or while its mean
    log probability of a token is below `logprob_threshold`. If it is then, too, and the probability of
    silence is above `no_speech_threshold`, the window has no text. None: no such test.

    `prompt` is text that might come before, for spelling and style. `condition_on_previous`: windows continue
    the text of those before. At most `max_new_tokens` are chosen for a window. `seed` is of the choices at
    temperatures above 0. Raises `RequestError`."""
    language: str | None = None
    task: str = "transcribe"
    timestamps: bool = False
    temperatures: tuple[float, ...] = FALLBACK
    compression_ratio_threshold: float | None = 1.35
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    prompt: str | None = None
    condition_on_previous: bool = False
    max_new_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.temperatures, tuple | list):
            raise RequestError(f"temperatures is {self.temperatures!r}", "a tuple of numbers from 0 to 2")
        bad = [t for t in self.temperatures if not (_is_number(t) and isfinite(t) and 0 <= t <= 2)]
        if bad or not self.temperatures:
            raise RequestError(f"temperature is {bad[0] if bad else 'missing'}", "numbers from 0 to 2")
        new, texts = self.max_new_tokens, {"language": self.language, "prompt": self.prompt}
        if new is not None and (type(new) is not int or new < 1):
            raise RequestError(f"max_new_tokens is {new!r}", "a whole number of at least 1")
        if type(self.seed) is not int or self.seed < 0:
            raise RequestError(f"seed is {self.seed!r}", "a whole number of at least 0")
        for name, text in texts.items():
            if not isinstance(text, str | None): raise RequestError(f"{name} is {text!r}", "a text, or None")
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            value = getattr(self, name)
            if value is not None and not _is_number(value):
                raise RequestError(f"{name} is {value!r}", "a number, or None for no such test")


def _is_number(value: Any) -> bool: return isinstance(value, int | float) and value == value
