"""The captured prefill and decode steps over one KV cache.

Protocol: `prefill(ids)` runs the prompt in chunks and chooses the first token, `decode()` chooses the next
one; both return it. The token stays on the device between steps: a step reads it from, and writes it to,
the same buffer, so the host only looks on. Positions are bound variables and knobs are buffers, so one
graph for each chunk size, one for the step and one for each set of sampling filters serve every request.

The cache remembers which tokens it holds: a prompt that continues the last one (a chat) is prefilled from
where they part. Rows of a padded chunk past the prompt are written too; no later row may look at them
before they are overwritten, since masks end at the writer's own position.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit, UOp, Variable, dtypes

from tinygrad_nv.engine.fit import ACTIVATIONS, CACHE, WEIGHTS
from tinygrad_nv.engine.sampler import Slots, counted, next_tokens
from tinygrad_nv.engine.sampling import Filters, SamplingParams, fresh_seed
from tinygrad_nv.models.llama import KVCache, Llama
from tinygrad_nv.runtime.memory import allocate, read, write
from tinygrad_nv.runtime.memory_pool import labelled
from tinygrad_nv.runtime.ranges import layer, span

# Tokens a prefill graph takes at once. 16 bounds the padding of a short prompt, 128 amortises a launch over
# rows.
CHUNKS = (128, 16)


class Decoder:
    """One sequence of at most `length` tokens over `model`."""

    def __init__(self, model: Llama, length: int) -> None:
        self.model, self.length = model, length
        self.capacity = length + CHUNKS[-1]  # a last chunk may be padded past the end
        self.cache = KVCache.create(model.config, self.capacity, model.dtype, device=model.device)
        self.slots = Slots(1, model.config.vocab_size, model.device)
        self.row = Tensor.empty(1, dtype=dtypes.int32, device=model.device)
        self.token = Tensor.empty(1, 1, dtype=dtypes.int32, device=model.device)
        self.logits = Tensor.empty(1, model.config.vocab_size, dtype=dtypes.float32, device=model.device)
        self.lengths = Tensor.empty(1, dtype=dtypes.int32, device=model.device)
        buffers = (self.token, self.logits, self.row, self.lengths)
        with labelled(CACHE):
            for tensor in self.cache.tensors: allocate(tensor)
        with labelled(ACTIVATIONS):
            for tensor in buffers: allocate(tensor)
        write(self.row, 0, np.zeros(1, np.int32).data.cast("B"))
        self.held: list[int] = []  # tokens whose keys and values are in the cache
        self.filters, self.requests = Filters(), 0
        self.chunks = {T: capturing(self._chunk) for T in CHUNKS}
        # made here: inside a captured step they would be computed at every replay
        with labelled(WEIGHTS): _ = model.rope_tables
        self.step = capturing(self._step)
        self.samples: dict[Filters, Any] = {}

    def warm_up(self, params: SamplingParams, prompt_tokens: int) -> None:
        """Compiles what a prompt of this length and these filters need, by running it on a made-up prompt."""
        self.start(params, [])
        self.held = []
        sizes = {size for size in CHUNKS if prompt_tokens >= size}
        if prompt_tokens % CHUNKS[0]: sizes.add(CHUNKS[-1])
        for size in sizes:
            self.held = []  # or what the last one left would be reused, and another graph run
            self.prefill([0] * min(size, self.length - 1))
        self.decode()
        self.held = []

    def start(self, params: SamplingParams, prompt: Sequence[int]) -> int:
        """Sets the sampler for a new request; returns the seed in use."""
        params.require_vocabulary(self.model.config.vocab_size)
        seed = fresh_seed() if params.seed is None else params.seed
        self.slots.begin(0, params, seed, prompt)
        self.filters, self.requests = params.filters, self.requests + 1
        return seed

    def prefill(self, prompt: Sequence[int]) -> int:
        """Brings the cache to hold `prompt` and chooses the token after it."""
        self.held = self.held[:common_prefix(self.held, prompt[:-1])]
        while rest := prompt[len(self.held):]:
            T = next((size for size in CHUNKS if size <= len(rest)), CHUNKS[-1])
            part = rest[:T]
            tokens = np.zeros((1, T), np.int32)
            tokens[0, :len(part)] = part
            start = Variable("start", 0, self.capacity - T).bind(len(self.held))
            last = Variable("last", 0, T - 1).bind(len(part) - 1)
            with span(f"prefill {len(part)}"):
                self._count(T)
                self._replay(self.chunks[T], Tensor(tokens, device=self.model.device), start, last)
            self.held += part
        return self._choose()

    def decode(self) -> int:
        """Puts the last chosen token into the cache and chooses the one after it."""
        token = self.peek()
        with span("decode"):
            self._count(1)
            self._replay(self.step, Variable("position", 0, self.capacity - 1).bind(len(self.held)))
        self.held.append(token)
        return self._choose()

    def peek(self) -> int:
        """The last chosen token."""
        return int(read(self.token, np.int32)[0])

    def _count(self, rows: int) -> None:
        """Writes down how long the cache is with so many rows more: a kernel for that would be one more."""
        write(self.lengths, 0, np.array([len(self.held) + rows], np.int32).data.cast("B"))

    def _replay(self, jit: Any, *arguments: Any) -> None:
        """One call of a captured step. After an exception, also Ctrl-C, the decoder is as if new."""
        before = [(tensor, tensor.uop) for tensor in (self.token, self.logits, *self.slots.written)]
        try:
            with labelled(ACTIVATIONS), span("capture" if jit.captured is None else "replay"):
                jit(*arguments)
        except BaseException:
            # an assignment that was written down but not run would get into the next capture
            for tensor, uop in before: tensor.uop = uop
            if jit.captured is None: recapture(jit)
            self.held = []
            raise

    def _choose(self) -> int:
        """Chooses a token by the logits; it will have the place after what is held."""
        if self.filters not in self.samples:
            filters = self.filters
            self.samples[filters] = capturing(lambda: self._sample(filters))
        with span("sample"):
            self._count(0)
            self._replay(self.samples[self.filters])
        return self.peek()

    def _chunk(self, tokens: Tensor, start: UOp, last: UOp) -> None:
        self.logits.assign(self.model.step(tokens, start, self.cache, last, self.lengths)).realize()

    def _step(self, position: UOp) -> None:
        self.logits.assign(self.model.step(self.token, position, self.cache, 0, self.lengths)).realize()

    def _sample(self, filters: Filters) -> None:
        with layer("sampler"):
            token = next_tokens(self.logits, filters, self.slots, self.row, self.lengths)
        changed = [self.token.assign(token.reshape(1, 1))]
        if filters.penalty: changed.append(counted(self.slots, self.row, token))
        Tensor.realize(*changed)


def capturing(step: Callable[..., None]) -> Any:
    """A TinyJit that captures on its first call.

    TinyJit runs its first call eagerly, for functions that set something up; these set up nothing, and that
    run would schedule every kernel a second time (1.5 s of a 4 s start for the model in the box).
    """
    return recapture(TinyJit(step))


def recapture(jit: Any) -> Any:
    """The TinyJit, to capture on its next call."""
    jit.reset()
    jit.cnt = 1
    return jit


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements a and b share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
