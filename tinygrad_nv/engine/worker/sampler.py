"""The sampler as tensor code.

Protocol: a row of logits belongs to a slot. A slot has sampling parameters, biases and token counts on the
device (sampler_state.py), which `start_slot` writes for a sequence. `next_tokens(logits, filters, state,
slots, positions, …)` runs inside a captured step. `slots` maps rows to slots, so that other requests replay
the same graph; only the set of filters in use selects another graph. A row's token depends on its own logits
and its slot alone, bit for bit: a filter that only other rows use does not change it, and a row without a
temperature takes the argmax. `count_tokens` then counts the tokens, for penalties.

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

from collections.abc import Callable
from typing import Protocol

from tinygrad import Tensor, dtypes

from tinygrad_nv.engine.sampling import Filters
from tinygrad_nv.engine.worker.sampler_state import SamplerState
from tinygrad_nv.patterns.embedding import embedding
from tinygrad_nv.patterns.sampling import choose_part, choose_tokens, largest, tally_tokens
from tinygrad_nv.tile.sampling.reference import token_of
from tinygrad_nv.tile.sampling.spec import Number


class Parts(Protocol):
    """A part of a vocabulary of `size` tokens for each rank (models/parallel.py). This one has `tokens`, of
    which the last may be beyond the vocabulary: their logits are -inf."""
    @property
    def size(self) -> int: ...

    @property
    def tokens(self) -> range: ...

    def rows(self, count: int) -> slice:
        """Returns which of so many rows this rank gets whole: a share, or all where shares are not equal."""

    def whole_rows(self, x: Tensor) -> Tensor:
        """Gathers these rows, [rows, size], from the parts of all ranks, which are like x, [R, tokens]."""

    def of_all_rows(self, x: Tensor, count: int) -> Tensor:
        """[count] of each rank's [rows]."""

    def most(self, x: Tensor) -> Tensor:
        """The largest of all ranks', elementwise."""


def next_tokens(logits: Tensor, filters: Filters, state: SamplerState, slots: Tensor, positions: Tensor,
                masks: Tensor | None = None, parts: Parts | None = None) -> Tensor:
    """The next tokens, int32 [R], from float32 logits [R, V]. `slots` int32 [R] are the rows' slots.
    `positions` int32 [R] are the positions of the new tokens: with the seed they determine the noise. `masks`
    (with `filters.mask`) are uint32 [R, ⌈V / 32⌉]. A token is V where the logits are NaN. With `parts` logits
    are those of this rank's tokens, masks the words that have its tokens."""
    numbers = embedding(state.numbers, slots) if filters.draw or filters.penalty else state.numbers
    x = _process_logits(logits, filters, state, slots, numbers, masks)
    if parts is None or not filters.ordering:
        x = _truncate(x, filters, numbers, parts)
        drawn = numbers if filters.draw else None
        if parts is None: return choose_tokens(x, drawn, positions)
        return token_of(parts.most(choose_part(x, drawn, positions, parts.tokens.start)), parts.size)
    count = int(x.shape[0])
    numbers, positions = (each[parts.rows(count)].contiguous() for each in (numbers, positions))
    x = _truncate(parts.whole_rows(x), filters, numbers)
    return parts.of_all_rows(choose_tokens(x, numbers, positions), count)


def apply_filters(logits: Tensor, filters: Filters, state: SamplerState, slots: Tensor, numbers: Tensor,
                  masks: Tensor | None = None) -> Tensor:
    """float32 logits [R, V] after every filter in use, -inf where a token is filtered out.

    The token is sampled from their softmax. Without sampling only mask, bias and penalties change the argmax.
    """
    return _truncate(_process_logits(logits, filters, state, slots, numbers, masks), filters, numbers)


def _process_logits(logits: Tensor, filters: Filters, state: SamplerState, slots: Tensor, numbers: Tensor,
             masks: Tensor | None) -> Tensor:
    """Returns logits after mask, bias, penalties and temperature, which change each by itself."""
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


def _truncate(x: Tensor, filters: Filters, numbers: Tensor, parts: Parts | None = None) -> Tensor:
    """Returns logits after top-k, top-p and min-p, which compare them with each other."""
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
    return state.counts.assign(tally_tokens(state.counts, slots, tokens))
