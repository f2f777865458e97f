"""The sampler as tensor code, for rows of logits.

Protocol: a row of logits belongs to a slot; a slot has numbers, biases and counts of tokens on the device
(`Slots`), which `begin` writes for a sequence. `next_tokens(logits, filters, slots, rows, places, …)` runs
inside a captured step: `rows` says which slot each row belongs to, so that changing requests replays the same
graph, and only which filters are in use selects another one. A row's token depends on its own logits and its
slot alone, to the bit: a row without a filter that others have is as without it, and one without a
temperature is the largest of its logits. `counted` then counts the tokens, for penalties.

The order is vLLM's, and that of transformers where it has the part: mask, bias, penalties (repetition,
frequency, presence), temperature, top-k, top-p, min-p, draw. The draw is the Gumbel maximum of the filtered
logits with noise from Threefry on (seed, place, token): no state goes from one draw to the next, so the same
seed and logits give the same token whatever was drawn before, and a token that a draft proposed is verified
by drawing at its place (Salmon et al., SC 2011; Gumbel-max: Maddison et al., arXiv 1411.0030).

All rows of a slot see the same counts, so of a request with penalties one token a step can be chosen, and no
draft verified. A row that belongs to no slot, of padding, has -1: its token is some number, and counts
nowhere.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.patterns.embedding.named import embedding
from tinygrad_nv.patterns.sampling.named import chosen, largest, tallied
from tinygrad_nv.runtime.memory import read_part, write
from tinygrad_nv.tile.sampling.spec import NUMBERS, Number


class Slots:
    """What the device keeps for each of `count` sequences: `numbers` float32 [count, NUMBERS]; `counts`
    float32 [count, vocab_size], how often a token is in the output, and a half more if it is in the prompt;
    `bias` float32 [count, vocab_size]. The last two take memory from the first request on that needs them."""

    def __init__(self, count: int, vocab_size: int, device: str | None = None) -> None:
        self.count, self.vocab_size, self.device = count, vocab_size, device
        self._nothing = memoryview(bytes(4 * vocab_size))
        self.numbers = Tensor.empty(count, NUMBERS, device=device)
        for slot in range(count): write(self.numbers, self._at(NUMBERS, slot), _bytes(_NONE))

    @cached_property
    def counts(self) -> Tensor:
        """Of penalties."""
        return self._zeros()

    @cached_property
    def bias(self) -> Tensor:
        """Of logit_bias."""
        return self._zeros()

    def begin(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int],
              output: Sequence[int] = ()) -> None:
        """A sequence takes a slot, with what there is of its output already."""
        write(self.numbers, self._at(NUMBERS, slot), _bytes(params.numbers(seed)))
        if params.filters.penalty:
            row = np.bincount(np.asarray(output, np.int64), minlength=self.vocab_size).astype(np.float32)
            row[np.unique(np.asarray(prompt, np.int64))] += 0.5
            write(self.counts, self._at(self.vocab_size, slot), _bytes(row))
        if params.filters.bias:
            biases = np.zeros(self.vocab_size, np.float32)
            biases[list(params.logit_bias)] = list(params.logit_bias.values())
            write(self.bias, self._at(self.vocab_size, slot), _bytes(biases))
        elif "bias" in vars(self): write(self.bias, self._at(self.vocab_size, slot), self._nothing)

    def fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        """A sequence takes a slot as another is now, but for the seed."""
        self.begin(slot, params, seed, ())
        if params.filters.penalty:
            size = 4 * self.vocab_size
            write(self.counts, slot * size, memoryview(read_part(self.counts, source * size, size)))

    @property
    def written(self) -> tuple[Tensor, ...]:
        """What steps write."""
        return (self.counts,) if "counts" in vars(self) else ()

    def _zeros(self) -> Tensor:
        made = Tensor.empty(self.count, self.vocab_size, dtype=dtypes.float32, device=self.device)
        for slot in range(self.count): write(made, self._at(self.vocab_size, slot), self._nothing)
        return made

    def _at(self, words: int, slot: int) -> int:
        """The byte at which a slot's row of so many words begins."""
        return 4 * words * slot


_NONE = SamplingParams(temperature=0).numbers(0)


def _bytes(x: np.ndarray) -> memoryview: return x.data.cast("B")


def mask_of(size: int, forbidden: Iterable[int]) -> np.ndarray:
    """A packed mask, uint32 [⌈size / 32⌉], of all tokens but the forbidden."""
    allowed = np.ones(-(-size // 32) * 32, np.uint8)
    allowed[list(forbidden)] = 0
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def next_tokens(logits: Tensor, filters: Filters, slots: Slots, rows: Tensor, places: Tensor,
                masks: Tensor | None = None) -> Tensor:
    """The next tokens, int32 [R], of float32 logits [R, V]. `rows` int32 [R] are the slots they belong to.
    `places` int32 [R] are the places the tokens will have: with the seed they select the noise. `masks`, of
    `filters.mask`, are uint32 [R, ⌈V / 32⌉]. A token is V where the logits are not numbers."""
    numbers = embedding(slots.numbers, rows) if filters.draw or filters.penalty else slots.numbers
    logits = filtered(logits, filters, slots, rows, numbers, masks)
    return chosen(logits, numbers if filters.draw else None, places)


def filtered(logits: Tensor, filters: Filters, slots: Slots, rows: Tensor, numbers: Tensor,
             masks: Tensor | None = None) -> Tensor:
    """float32 logits [R, V] after every filter in use, -inf where a token is out.

    A draw is by their softmax. Without one nothing else than mask, bias and penalties changes which is
    largest.
    """
    def number(which: Number) -> Tensor: return numbers[:, which:which + 1]

    x = logits
    if masks is not None and filters.mask: x = unpacked(masks, int(x.shape[1])).where(x, -float("inf"))
    if filters.bias:
        bias = embedding(slots.bias, rows)
        x = (bias != 0).where(x + bias, x)  # -0 plus 0 would be another number
    if filters.penalty: x = penalised(x, embedding(slots.counts, rows), number)
    if filters.draw:
        t = number(Number.temperature)
        x = x / (t > 0).where(t, 1)
    if x is not logits: x = x.contiguous()
    if not filters.draw: return x
    if filters.top_k: x = largest(x, None, numbers, Number.top_k)
    if filters.top_p: x = largest(x, x.softmax(-1).contiguous(), numbers, Number.top_p)
    if filters.min_p:
        # p ≥ min_p · p_max, in logarithms
        least = x.max(-1, keepdim=True) + number(Number.min_p).log()
        x = (x >= least).where(x, -float("inf")).contiguous()
    return x


def penalised(x: Tensor, counts: Tensor, number: Callable[[Number], Tensor]) -> Tensor:
    """Logits [R, V] after penalties, by `Slots.counts` of their rows."""
    repetition = number(Number.repetition_penalty)
    x = (counts > 0).where((x > 0).where(x / repetition, x * repetition), x)
    x = x - number(Number.frequency_penalty) * counts.floor()
    return x - (counts >= 1).where(number(Number.presence_penalty), 0)


def unpacked(masks: Tensor, size: int) -> Tensor:
    """bool [R, size] of packed masks uint32 [R, ⌈size / 32⌉]."""
    R, words = masks.shape
    bits = masks.reshape(R, words, 1) >> Tensor.arange(32, dtype=dtypes.uint32)
    return ((bits & 1) != 0).reshape(R, 32 * int(words))[:, :size]


def counted(slots: Slots, rows: Tensor, tokens: Tensor) -> Tensor:
    """`Slots.counts` after tokens int32 [R] were chosen for the slots `rows`, to be realized."""
    return slots.counts.assign(tallied(slots.counts, rows, tokens))
