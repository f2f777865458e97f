"""The sampler as tensor code.

Protocol: a row of logits belongs to a slot. A slot has sampling parameters, biases and token counts on the
device (`SamplerState`), which `start_slot` writes for a sequence. `next_tokens(logits, filters, state, slots,
positions, …)` runs inside a captured step. `slots` maps rows to slots, so that other requests replay the same
graph; only the set of filters in use selects another graph. A row's token depends on its own logits and its
slot alone, bit for bit: a filter that only other rows use does not change it, and a row without a temperature
takes the argmax. `count_tokens` then counts the tokens, for penalties.

The order is vLLM's, and that of transformers where it has the filter: mask, bias, penalties (repetition,
frequency, presence), temperature, top-k, top-p, min-p, sample. Sampling takes the Gumbel maximum of the
filtered logits with noise from Threefry on (seed, position, token). No state carries over between samples:
the same seed and logits give the same token whatever was sampled before, and a draft token is verified by
sampling at its position (Salmon et al., SC 2011; Gumbel-max: Maddison et al., arXiv 1411.0030).

Where ranks have parts of the vocabulary (`Parts`), logits, biases, counts and masks are of this rank's tokens
alone. Each rank filters and chooses among them, with the noise of the whole row, and the largest of all
ranks' choices is the row's: 8 bytes a row and rank are sent, 4 more for min-p. Top-k and top-p depend on the
order of the whole row: in a step in which a row asks for one, each rank gets its share of whole rows, after
temperature, and chooses in these. Either way the tokens are those of whole rows, bit for bit.

All rows of a slot use the same token counts, so a request with penalties samples one token a step and
verifies no draft. Padding rows have slot −1: their token is undefined and not counted.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.patterns.embedding.named import embedding
from tinygrad_nv.patterns.sampling.named import chosen, chosen_part, largest, tallied
from tinygrad_nv.runtime.memory import read_part, write
from tinygrad_nv.tile.sampling.reference import token_of
from tinygrad_nv.tile.sampling.spec import NUMBERS, Number


class Parts(Protocol):
    """A part of a vocabulary of `size` tokens for each rank (models/parallel.py). This one has `tokens`, of
    which the last may be beyond the vocabulary: their logits are -inf."""
    @property
    def size(self) -> int: ...

    @property
    def tokens(self) -> range: ...

    def rows(self, count: int) -> slice:
        """Which of so many rows this rank gets whole: a share, or all where shares are not equal."""

    def whole_rows(self, x: Tensor) -> Tensor:
        """These rows, [rows, size], of the parts of all ranks, which are like x, [R, tokens]."""

    def of_all_rows(self, x: Tensor, count: int) -> Tensor:
        """[count] of each rank's [rows]."""

    def most(self, x: Tensor) -> Tensor:
        """The largest of all ranks', elementwise."""


class SamplerState:
    """The device's state of `count` slots: `numbers` float32 [count, NUMBERS]; `counts` float32 [count,
    width], how often a token is in the output, plus 0.5 if it is in the prompt; `bias` float32 [count,
    width]. The last two are allocated with the first request that needs them. They are of `tokens`, which are
    all of the vocabulary by default."""

    def __init__(self, count: int, vocab_size: int, device: str | None = None,
                 tokens: range | None = None) -> None:
        self.count, self.tokens, self.device = count, tokens or range(vocab_size), device
        self.width, self._end = len(self.tokens), max(vocab_size, self.tokens.stop)
        self._nothing = memoryview(bytes(4 * self.width))
        self._biased = set[int]()   # slots with biases
        self.numbers = Tensor.empty(count, NUMBERS, device=device)
        for slot in range(count): write(self.numbers, self._at(NUMBERS, slot), _bytes(_GREEDY))

    @cached_property
    def counts(self) -> Tensor:
        """Token counts, for penalties."""
        return self._zeros()

    @cached_property
    def bias(self) -> Tensor:
        """logit_bias."""
        return self._zeros()

    def start_slot(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int],
                   output: Sequence[int] = ()) -> None:
        """Assigns a slot to a sequence; `output` are the tokens it has generated already."""
        write(self.numbers, self._at(NUMBERS, slot), _bytes(params.numbers(seed)))
        if params.filters.penalty:
            row = np.bincount(np.asarray(output, np.int64), minlength=self._end).astype(np.float32)
            row[np.unique(np.asarray(prompt, np.int64))] += 0.5
            write(self.counts, self._at(self.width, slot), self._own(row))
        if params.filters.bias:
            biases = np.zeros(self._end, np.float32)
            biases[list(params.logit_bias)] = list(params.logit_bias.values())
            write(self.bias, self._at(self.width, slot), self._own(biases))
            self._biased.add(slot)
        elif slot in self._biased:
            write(self.bias, self._at(self.width, slot), self._nothing)
            self._biased.remove(slot)

    def fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        """Assigns a slot to a copy of the sequence in `source`, with another seed."""
        self.start_slot(slot, params, seed, ())
        if params.filters.penalty:
            size = 4 * self.width
            write(self.counts, slot * size, memoryview(read_part(self.counts, source * size, size)))

    @property
    def written(self) -> tuple[Tensor, ...]:
        """The tensors that steps assign to."""
        return (self.counts,) if "counts" in vars(self) else ()

    def allocate(self, filters: Filters) -> None:
        """Allocates what a sampler with these filters needs."""
        if filters.penalty: _ = self.counts
        if filters.bias: _ = self.bias

    def _zeros(self) -> Tensor:
        made = Tensor.empty(self.count, self.width, dtype=dtypes.float32, device=self.device)
        for slot in range(self.count): write(made, self._at(self.width, slot), self._nothing)
        return made

    def _own(self, row: np.ndarray) -> memoryview:
        """What a row of all tokens has of these."""
        return _bytes(row[self.tokens.start:self.tokens.stop])

    def _at(self, words: int, slot: int) -> int:
        """The byte offset of a slot's row of `words` words."""
        return 4 * words * slot


_GREEDY = SamplingParams(temperature=0).numbers(0)


def _bytes(x: np.ndarray) -> memoryview: return x.data.cast("B")


def packed_mask(size: int, forbidden: Iterable[int]) -> np.ndarray:
    """A packed token mask, uint32 [⌈size / 32⌉], that allows all tokens but the forbidden."""
    allowed = np.ones(-(-size // 32) * 32, np.uint8)
    allowed[list(forbidden)] = 0
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def next_tokens(logits: Tensor, filters: Filters, state: SamplerState, slots: Tensor, positions: Tensor,
                masks: Tensor | None = None, parts: Parts | None = None) -> Tensor:
    """The next tokens, int32 [R], from float32 logits [R, V]. `slots` int32 [R] are the rows' slots.
    `positions` int32 [R] are the positions of the new tokens: with the seed they determine the noise. `masks`
    (with `filters.mask`) are uint32 [R, ⌈V / 32⌉]. A token is V where the logits are NaN. With `parts` logits
    are those of this rank's tokens, masks the words that have its tokens."""
    numbers = embedding(state.numbers, slots) if filters.draw or filters.penalty else state.numbers
    x = _changed(logits, filters, state, slots, numbers, masks)
    if parts is None or not filters.ordering:
        x = _kept(x, filters, numbers, parts)
        drawn = numbers if filters.draw else None
        if parts is None: return chosen(x, drawn, positions)
        return token_of(parts.most(chosen_part(x, drawn, positions, parts.tokens.start)), parts.size)
    count = int(x.shape[0])
    numbers, positions = (each[parts.rows(count)].contiguous() for each in (numbers, positions))
    x = _kept(parts.whole_rows(x), filters, numbers)
    return parts.of_all_rows(chosen(x, numbers, positions), count)


def apply_filters(logits: Tensor, filters: Filters, state: SamplerState, slots: Tensor, numbers: Tensor,
                  masks: Tensor | None = None) -> Tensor:
    """float32 logits [R, V] after every filter in use, -inf where a token is filtered out.

    The token is sampled from their softmax. Without sampling only mask, bias and penalties change the argmax.
    """
    return _kept(_changed(logits, filters, state, slots, numbers, masks), filters, numbers)


def _changed(logits: Tensor, filters: Filters, state: SamplerState, slots: Tensor, numbers: Tensor,
             masks: Tensor | None) -> Tensor:
    """Logits after what changes each by itself."""
    def number(which: Number) -> Tensor: return numbers[:, which:which + 1]

    x = logits
    if masks is not None and filters.mask:
        x = unpack_masks(masks, int(x.shape[1]), state.tokens.start % 32).where(x, -float("inf"))
    if filters.bias:
        bias = embedding(state.bias, slots)
        x = (bias != 0).where(x + bias, x)  # -0 plus 0 would change the bits
    if filters.penalty: x = apply_penalties(x, embedding(state.counts, slots), number)
    if filters.draw:
        t = number(Number.temperature)
        x = x / (t > 0).where(t, 1)
    return x if x is logits else x.contiguous()


def _kept(x: Tensor, filters: Filters, numbers: Tensor, parts: Parts | None = None) -> Tensor:
    """Logits after what compares them with each other."""
    if not filters.draw: return x
    if filters.top_k: x = largest(x, None, numbers, Number.top_k)
    if filters.top_p: x = largest(x, x.softmax(-1).contiguous(), numbers, Number.top_p)
    if filters.min_p:
        # p ≥ min_p · p_max, in logarithms
        most = x.max(-1, keepdim=True)
        if parts is not None: most = parts.most(most).contiguous()
        least = most + numbers[:, Number.min_p:Number.min_p + 1].log()
        x = (x >= least).where(x, -float("inf")).contiguous()
    return x


def apply_penalties(x: Tensor, counts: Tensor, number: Callable[[Number], Tensor]) -> Tensor:
    """Logits [R, V] after penalties, given the token counts of their slots."""
    repetition = number(Number.repetition_penalty)
    x = (counts > 0).where((x > 0).where(x / repetition, x * repetition), x)
    x = x - number(Number.frequency_penalty) * counts.floor()
    return x - (counts >= 1).where(number(Number.presence_penalty), 0)


def unpack_masks(masks: Tensor, size: int, first: int = 0) -> Tensor:
    """bool [R, size] of packed masks uint32 [R, ⌈(first + size) / 32⌉], from bit `first` on."""
    R, words = masks.shape
    bits = masks.reshape(R, words, 1) >> Tensor.arange(32, dtype=dtypes.uint32)
    return ((bits & 1) != 0).reshape(R, 32 * int(words))[:, first:first + size]


def count_tokens(state: SamplerState, slots: Tensor, tokens: Tensor) -> Tensor:
    """`SamplerState.counts` after tokens int32 [R] were sampled for `slots`; to be realized."""
    if state.tokens.start: tokens = tokens - state.tokens.start     # those of other ranks are out of range
    return state.counts.assign(tallied(state.counts, slots, tokens))
