"""Perplexity of a model on a text, and how that of a quantised copy differs.

Protocol: `perplexity(directory, text)` is exp of the mean of −ln p over the tokens that follow another of
their sequence. `compared(before, after, text)` runs two directories beside each other, layer by layer
(network.py): both perplexities, the Kullback-Leibler divergence KL(before ‖ after) of their next tokens'
probabilities in nats, how often the likeliest token is the same, and after each layer how far the states are
apart. `affordable(config)` is how many tokens take about a minute or two on a CPU.
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.quantize.network import Source, advance
from tinygrad_nv.quantize.text import Sequences

LOGITS = 1 << 25        # elements of a batch of tokens' logits
OPERATIONS = 2e13       # of an evaluation: two models, two for each parameter and token
HEADS = 10              # steps of progress of the last layer
MOST, LEAST = 1 << 15, 1 << 11  # tokens of one that nothing else says
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Quality:
    """Quality of a quantised copy: how many tokens were predicted, perplexities, the mean KL divergence in
    nats, the share of tokens with the same likeliest one, and root mean squares of how far states are apart
    after each layer, relative to them."""
    tokens: int
    before: float
    after: float
    divergence: float
    same: float
    states: tuple[float, ...]

    @property
    def change(self) -> float:
        """Relative change of the perplexity."""
        return self.after / self.before - 1


def affordable(config: ModelConfig) -> int:
    """Tokens of an evaluation that is made without being asked for; 0 if they are too few."""
    tokens = min(MOST, int(OPERATIONS / (4 * config.parameters)))
    return tokens if tokens >= LEAST else 0


def perplexity(directory: Path, text: Sequences) -> float:
    """Returns the perplexity of a directory's model, quantised or not. Raises `ModelError` and
    `WeightError`."""
    lost = sum(float(-_pick(log, next).sum()) for (log,), next in _predictions([directory], text))
    return float(np.exp(lost / _num_predictions(text)))


def compare(before: Path, after: Path, text: Sequences, progress: Progress | None = None,
             seconds: float = math.inf) -> Quality:
    """Returns the quality of a quantised copy `after`. `progress(done, total)` counts layers of both, and
    parts of the last one. Later sequences are left out where all would take longer than `seconds`, by the
    second layer's time: the first one compiles. Raises `ModelError` and `WeightError`."""
    states: list[float] = []
    lost, divergence, same = np.zeros(2), 0.0, 0
    count = 0
    for (log, other), next in _predictions([before, after], text, states, progress, seconds):
        count += len(next)
        lost -= [float(_pick(each, next).sum()) for each in (log, other)]
        divergence += float((np.exp(log) * (log - other)).sum(dtype=np.float64))
        same += int((log.argmax(-1) == other.argmax(-1)).sum())
    first, second = (float(each) for each in np.exp(lost / count))
    return Quality(count, first, second, divergence / count, same / count, tuple(states))


def _num_predictions(text: Sequences) -> int: return len(text.ids) - len(text.lengths)


def _pick(log: np.ndarray, next: np.ndarray) -> np.ndarray:
    return log[np.arange(len(next)), next].astype(np.float64)


def _predictions(directories: Sequence[Path], text: Sequences, states: list[float] | None = None,
                 progress: Progress | None = None, seconds: float = math.inf
                 ) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    """Logarithms of probabilities [T, vocab] by each model, and the tokens that came, some at a time."""
    sources = [Source(each, max(text.lengths)) for each in directories]
    begun = started = time.monotonic()
    xs = [source.embed(text.ids) for source in sources]
    layers, done = sources[0].config.num_layers, 0
    whole = len(sources) * layers + HEADS

    def step_done(count: float) -> None:
        if progress is not None: progress(round(count), whole)
    for index in range(layers):
        started = time.monotonic()
        for source, x in zip(sources, xs, strict=True):
            advance(source.block(index), x, text.lengths)
            step_done(done := done + 1)
        if states is not None: states.append(_apart(*xs))
        if index == 1:
            left = seconds - (now := time.monotonic()) + begun
            text = _within(text, left / (now - started) / (layers - 1))
            xs = [x[:len(text.ids)] for x in xs]
    heads, begins = [source.head() for source in sources], np.cumsum(text.lengths)
    rows = np.delete(np.arange(len(text.ids)), begins - 1)
    step = max(1, LOGITS // sources[0].config.vocab_size)
    for begin in range(0, len(rows), step):
        step_done(done + HEADS * begin / len(rows))
        some = rows[begin:begin + step]
        yield [log_softmax(head(x[some])) for head, x in zip(heads, xs, strict=True)], text.ids[some + 1]


def _within(text: Sequences, share: float) -> Sequences:
    """The first sequences of a text, about a share of its tokens; at least one."""
    if share >= 1: return text
    ends = np.cumsum(text.lengths)
    count = max(1, int(np.searchsorted(ends, share * len(text.ids), "right")))
    return replace(text, ids=text.ids[:ends[count - 1]], lengths=text.lengths[:count])


def _apart(x: np.ndarray, other: np.ndarray) -> float:
    whole = float(np.square(x).sum(dtype=np.float64))
    return (float(np.square(other - x).sum(dtype=np.float64)) / whole) ** 0.5 if whole else 0.0


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last dimension, in place."""
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x
