"""Transcriptions as SubRip (.srt), WebVTT (.vtt), and lines of text with times.

Protocol: a cue is a segment that has text; its end is at least its start. A text that has the arrow of times
in it gets another one, and blank lines, which would end a cue, are left out.
"""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.engine.speech.outputs import Segment, Transcription


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
