"""The record of a request, for its log line and the metrics."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.sampling import SamplingParams


@dataclass
class ChoiceTimes:
    """One choice of a request: times of its first and last token, and their number."""
    first: float
    last: float
    tokens: int


@dataclass
class Record:
    """One request, for its log line and the metrics; `params` and `choices` are set when it reaches the
    engine. Times are of time.perf_counter."""
    id: str
    path: str = ""
    size: int = 0       # bytes of the body
    client_id: str | None = None    # what the client calls it
    owner: str = ""         # a hash of its key, where the server has several
    started: float = field(default_factory=time.perf_counter)
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    answers: dict[int, ChoiceTimes] = field(default_factory=dict)
    params: SamplingParams | None = None
    choices: int = 0
    model: str = ""     # the name that was asked for
    reasons: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def first(self) -> float | None:
        """Time of the first token."""
        return min((answer.first for answer in self.answers.values()), default=None)

    def answer_id(self, prefix: str, given: Any) -> str:
        """The id of an answer: `prefix` and the name that the client has `given` it, else the record's."""
        return f"{prefix}{given}" if given else self.id

    def count_delta(self, choice: int, delta: Delta) -> list[float]:
        """Counts a delta. Returns the seconds before each of its tokens, except the choice's first."""
        now, count = time.perf_counter(), len(delta.tokens)
        if delta.finish_reason: self.reasons.append(delta.finish_reason)
        if not count: return []
        self.output_tokens += count
        if (answer := self.answers.get(choice)) is None:
            self.answers[choice] = ChoiceTimes(now, now, count)
            return []
        gap, answer.last, answer.tokens = (now - answer.last) / count, now, answer.tokens + count
        return [gap] * count
