"""Runs batches of texts through an embedding model, as captured steps.

Protocol: `run(texts)` gives the pooled hidden states of one batch, float32 [texts, hidden], and
`run_tokens(texts)` those of all tokens, one array [tokens, hidden] for each text. Texts lie one
after the other (models/paged.py), so the only padding is at the end, up to the next of `sizes`. `warm_up`
captures sizes that serve all batches, and no other is captured afterwards. Without it a size is captured when
no larger one can serve it, or when it has come often. One thread at a time.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.engine.memory_planning import ACTIVATIONS
from tinygrad_nv.engine.worker.captured_step import CapturedStep
from tinygrad_nv.runtime.memory import allocate, read, write
from tinygrad_nv.runtime.memory_pool import label_allocations

if TYPE_CHECKING:
    from tinygrad_nv.models.embedding_model import EmbeddingModel

SMALLEST = 8
CAPTURE_AFTER = 8   # uses of a size before it is captured, if a larger captured one serves it
MAX_PADDING = 4     # a larger size serves a batch if it has at most so many times its tokens
AHEAD, AHEAD_TOKENS = 2, 8      # the same of sizes that a warm-up captures, of `run` and of `run_tokens`


class Pair(list[int]):
    """Token ids of two texts; `types` are 0 for tokens of the first, and 1 for those of the second."""

    def __init__(self, ids: Sequence[int], types: Sequence[int]) -> None:
        super().__init__(ids)
        self.types = types


def token_types(text: Sequence[int]) -> np.ndarray:
    """Returns the type of each token of a text, int32."""
    return np.asarray(text.types if isinstance(text, Pair) else [0] * len(text), np.int32)


def step_sizes(most: int) -> list[int]:
    """8, 16, 32, 48, 64, 96, …: powers of two, and from 32 on also the middles between them, so that at most
    a third of a step is padding; the last holds `most` tokens."""
    sizes, size = [SMALLEST], SMALLEST
    while size < most:
        size *= 2
        if size > 32: sizes.append(size * 3 // 4)
        sizes.append(size)
    return [each for each in sizes if each < most] + [next(each for each in sizes if each >= most)]


class EmbeddingRunner:
    """`model` for batches of at most `max_seqs` texts and `max_tokens` tokens."""

    def __init__(self, model: EmbeddingModel, max_seqs: int, max_tokens: int) -> None:
        self.model, self.max_seqs = model, max_seqs
        self.max_tokens = max(max_tokens, model.length)
        self.sizes = step_sizes(self.max_tokens)
        self.steps: dict[int, _Step] = {}
        self.token_steps: dict[int, _Step] = {}     # of `run_tokens`
        self.uses = Counter[int]()
        self.warm = False       # after `warm_up` only captured sizes run

    def run(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Pooled hidden states of texts, which have at most `max_tokens` tokens together."""
        step = self._step(self._size(sum(map(len, texts))))
        return step(texts)[:len(texts)].copy()

    def run_tokens(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Hidden states of each token."""
        fitting = (size for size in self.sizes if size >= sum(map(len, texts)))
        size = next(size for size in fitting if not self.warm or size in self.token_steps)
        made = self._token_step(size)(texts).copy()
        return np.split(made, np.cumsum([len(text) for text in texts]))[:len(texts)]

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Captures sizes that serve all batches. `progress(done, total)` is called for each."""
        steps = [*((self._step, size) for size in self._capture_sizes(AHEAD)),
                 *((self._token_step, size) for size in self._capture_sizes(AHEAD_TOKENS))]
        for done, (step, size) in enumerate(steps):
            progress(done, len(steps))
            step(size)([[0]])
        progress(len(steps), len(steps))
        self.warm = True

    def _capture_sizes(self, padding: int) -> list[int]:
        """The largest size, and below each the least that has at most `padding` times fewer tokens."""
        wanted = self.sizes[-1:]
        while wanted[0] > SMALLEST:
            wanted.insert(0, next(size for size in self.sizes if size * padding >= wanted[0]))
        return wanted

    def _size(self, tokens: int) -> int:
        """Returns the size of the step that runs so many tokens."""
        fitting = [size for size in self.sizes if size >= tokens]
        if self.warm: return next(size for size in fitting if size in self.steps)
        best = fitting[0]
        self.uses[best] += 1
        if best in self.steps or self.uses[best] >= CAPTURE_AFTER: return best
        return next((size for size in fitting if size in self.steps and size <= MAX_PADDING * best), best)

    def _token_step(self, size: int) -> _Step:
        if size not in self.token_steps:
            self.token_steps[size] = _Step(self.model, size, self._seqs(size), every=True)
        return self.token_steps[size]

    def _step(self, size: int) -> _Step:
        if size not in self.steps: self.steps[size] = _Step(self.model, size, self._seqs(size))
        return self.steps[size]

    def _seqs(self, size: int) -> int: return min(size, self.max_seqs)


class _Step:
    """The step of one size, with its inputs and outputs in memory."""

    def __init__(self, model: EmbeddingModel, size: int, seqs: int, every: bool = False) -> None:
        def ints(count: int) -> Tensor: return Tensor.empty(count, dtype=dtypes.int32, device=model.device)
        self.model, self.size, self.longest = model, size, min(size, model.length)
        self.every = every
        self.types: Tensor | None = None
        with label_allocations(ACTIVATIONS):
            self.tokens, self.positions, self.starts = ints(size), ints(size), ints(seqs + 1)
            if model.config.has_types: self.types = ints(size)
            shape = size if every else seqs, model.config.network.hidden_size
            self.out = Tensor.empty(*shape, device=model.device)
            for each in (self.tokens, self.positions, self.types, self.starts, self.out):
                if each is not None: allocate(each)
        self.captured = CapturedStep(self._compute, lambda: [self.out], model.device)

    def _compute(self) -> None:
        made = self.model(self.tokens, self.positions, self.starts, self.longest, self.types, self.every)
        self.out.assign(made.cast(dtypes.float32)).realize()

    def __call__(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        given = np.zeros((3, self.size), np.int32)
        arrays = [np.asarray(text, np.int32) for text in texts]
        starts = np.zeros(int(self.starts.shape[0]), np.int32)
        starts[1:len(texts) + 1] = np.cumsum([len(text) for text in texts])
        starts[len(texts) + 1:] = total = starts[len(texts)]
        given[0, :total] = np.concatenate(arrays)
        given[1, :total] = np.concatenate([self.model.positions(text) for text in arrays])
        given[2, :total] = np.concatenate([token_types(text) for text in texts])
        for tensor, data in ((self.tokens, given[0]), (self.positions, given[1]), (self.types, given[2]),
                             (self.starts, starts)):
            if tensor is not None: write(tensor, 0, data.data.cast("B"))
        self.captured()
        return read(self.out, np.float32).reshape(self.out.shape)
