"""Tokens of a window to segments, and where the next window begins: as transformers' long form has it.

Protocol: two timestamps in a row end a segment. A window that ends with one alone has said all there is: the
next begins behind it. Otherwise what follows the last pair is cut off in the middle, and the next window
begins there, in time. A window without a pair is one segment; where no timestamp ends it, it ends with the
window, or with the audio if that is shorter.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FRAME_S, TIMESTAMP_S = 0.01, 0.02       # seconds of a frame of the spectrogram, and between two timestamps
FRAMES_PER_TIMESTAMP = 2


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
