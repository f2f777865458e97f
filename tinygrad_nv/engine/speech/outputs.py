"""Results of a transcription."""
from __future__ import annotations

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
