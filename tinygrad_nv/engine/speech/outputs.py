"""Results of a transcription; as SubRip (.srt), WebVTT (.vtt), and lines of text with times.

A cue is a segment that has text; its end is at least its start. A text that has the arrow of times
in it gets another one, and blank lines, which would end a cue, are left out.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Segment:
    """Text from `start` to `end`, seconds of the recording. `tokens` include timestamps. The other figures
    are of the window that it was decoded with: the temperature, the mean log probability of its tokens, how
    many times they compress, and the probability of silence."""
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True)
class Transcription:
    """The `text` of a recording of `duration` seconds, its `language` (a code; None of an English-only model)
    and its segments."""
    text: str
    language: str | None
    duration: float
    segments: tuple[Segment, ...]

    @property
    def token_ids(self) -> list[int]:
        """Tokens of all segments, timestamps included."""
        return [token for segment in self.segments for token in segment.tokens]


def segment_fields(number: int, segment: Segment) -> dict[str, Any]:
    """A segment as OpenAI's API has it."""
    return {"id": number, "start": round(segment.start, 3), "end": round(segment.end, 3),
            "text": segment.text, "tokens": list(segment.tokens), "temperature": segment.temperature,
            "avg_logprob": segment.avg_logprob, "compression_ratio": segment.compression_ratio,
            "no_speech_prob": segment.no_speech_prob}


def srt(made: Transcription) -> str:
    """SubRip: numbered cues."""
    return "\n".join(f"{number}\n{_times(each, ',')}\n{_text(each)}\n"
                     for number, each in enumerate(_cues(made), 1))


def vtt(made: Transcription) -> str:
    """WebVTT (W3C)."""
    return "\n".join(["WEBVTT\n", *(f"{_times(each, '.')}\n{_text(each)}\n" for each in _cues(made))])


def lines(made: Transcription) -> str:
    """[from → to] and the text, a line for each segment."""
    return "\n".join(f"[{clock(each.start, '.')} → {clock(each.end, '.')}] {' '.join(_text(each).split())}"
                     for each in _cues(made))


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds: 00:01:02,345."""
    ms = max(0, round(seconds * 1000))
    return f"{ms // 3600000:02}:{ms // 60000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"


def _cues(made: Transcription) -> Iterator[Segment]:
    return (each for each in made.segments if _text(each))


def _times(segment: Segment, point: str) -> str:
    return f"{clock(segment.start, point)} --> {clock(max(segment.start, segment.end), point)}"


def _text(segment: Segment) -> str:
    kept = (line.strip() for line in segment.text.replace("-->", "→").splitlines())
    return "\n".join(line for line in kept if line)
