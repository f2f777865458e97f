"""Filters, choices and counts in plain tinygrad (tile/reference.py): those of patterns/sampling, too.

A filter's sums are of integers, as its spec says; noise is of float64 where nothing else is rounded, either
(`exact`).
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.reference import Argument, Given, compute_dtype, dense, gather
from tinygrad_nv.tile.sampling.spec import (
    DIGITS,
    MOST_UNITS,
    NUMBERS,
    ChoiceSpec,
    CountSpec,
    FilterSpec,
    Number,
)

F32, S32, U64 = dtypes.float32, dtypes.int32, dtypes.uint64
NAN_KEY = (1 << 64) - 1
Spec = FilterSpec | ChoiceSpec | CountSpec


def arguments(spec: Spec) -> tuple[Argument, ...]:
    """out, logits, weights, numbers; out, logits, numbers, places; or counts, slots, tokens: those that there
    are."""
    row = dense(spec.rows)
    if isinstance(spec, CountSpec):
        return (Argument("counts", F32, (dense(spec.slots, spec.size),), "inout"),
                Argument("slots", S32, (row,), values=range(-1, spec.slots + 1), usual=range(spec.slots)),
                Argument("tokens", S32, (row,), values=range(-1, spec.size + 1), usual=range(spec.size)))
    whole = dense(spec.rows, spec.size)
    logits = Argument("logits", F32, (whole,))
    numbers = Argument("numbers", F32, (dense(spec.rows, NUMBERS),))
    if isinstance(spec, ChoiceSpec):
        drawn = (numbers, Argument("places", S32, (row,), values=range(1 << 20))) if spec.draw else ()
        return Argument("out", spec.result_dtype, (row,), "out"), logits, *drawn
    weights = () if spec.counted else (Argument("weights", F32, (whole,)),)
    return Argument("out", F32, (whole,), "out"), logits, *weights, numbers


def reference(spec: Spec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[rows, size] of a filter, [rows] of a choice, all counts."""
    first, *rest = (gather(given[each.name], each.places[0]) for each in arguments(spec)
                    if each.role != "out")
    if isinstance(spec, FilterSpec): return apply_filter(spec, first, *rest)
    if isinstance(spec, CountSpec): return tally(spec, first, *rest)
    return choice(spec, first, *rest, wide=compute_dtype(F32, exact))


# **** filters ****

def apply_filter(spec: FilterSpec, logits: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """A filter in tinygrad."""
    keys, target = order_bits(logits), others[-1][:, spec.number:spec.number + 1]
    floor = threshold(keys, None if spec.counted else others[0], target)
    return ((keys >= floor).where(logits, -float("inf")).contiguous(),)


def order_bits(x: Tensor) -> Tensor:
    """float32 as uint32 in the same order (IEEE 754: flip negatives, set the sign bit of the rest); -0 comes
    just before 0."""
    bits = x.bitcast(dtypes.uint32)
    return (bits >= 1 << 31).where(bits ^ 0xFFFFFFFF, bits | (1 << 31)).contiguous()


def threshold(keys: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
    """For each row the largest uint32 t with Σ weights[keys ≥ t] ≥ target, [R, 1], or 0 if there is none: the
    k-th largest key without weights, which are 1 then, and with k for a target; the nucleus' smallest key
    when weights are probabilities and target is top_p. Keys and float32 weights are [R, V], target is float32
    [R, 1].

    Radix selection, four bits a pass from the top, eight passes instead of a sort. A pass sums for all 16
    digits, in units of the spec."""
    if weights is None: weights = Tensor.ones_like(keys, dtype=F32)
    R = int(keys.shape[0])
    limited = target < float("inf")
    bits = limited.where(target, 1.0).cast(F32).bitcast(dtypes.int32)
    scale = (((283 - (bits >> 23)).minimum(254)) << 23).bitcast(F32)
    goal = limited.where((target.maximum(0) * scale).ceil(), float(1 << 62)).cast(dtypes.int64)
    scaled = weights * scale
    scaled = (scaled > 0).where(scaled.minimum(float(MOST_UNITS)), 0).contiguous()
    # floats from 2^23 on are integers, of which round makes others
    units = (scaled < 1 << 23).where(scaled.round(), scaled).cast(dtypes.int64).contiguous()
    digits = Tensor.arange(DIGITS, dtype=dtypes.uint32)
    found = Tensor.zeros(R, 1, dtype=dtypes.uint32, device=keys.device)
    for shift in range(28, -4, -4):
        edges = (found + digits * (1 << shift)).reshape(R, DIGITS, 1)
        mass = (keys.reshape(R, 1, -1) >= edges).where(units.reshape(R, 1, -1), 0).sum(2)
        # mass falls with the digit, so the count of digits that reach the target is the digit sought, plus
        # one; at least digit 0: rounding may leave the total just under a target of 1
        reached = (mass >= goal).cast(dtypes.uint32).sum(1, keepdim=True).maximum(1).cast(dtypes.uint32) - 1
        found = (found + reached * (1 << shift)).contiguous()
    return found


# **** choices ****

def choice(spec: ChoiceSpec, logits: Tensor, *others: Tensor, wide: DType = F32) -> tuple[Tensor, ...]:
    """A choice in tinygrad."""
    x = noisy(logits, others[0], others[1], wide, spec.first or 0) if spec.draw else logits
    nan, at = (x != x).max(-1), x.argmax(-1)
    if spec.first is None: return (nan.where(spec.size, at).cast(S32).contiguous(),)
    best = x.max(-1).cast(F32)
    above = order_bits((best == 0).where(0.0, best)).cast(U64) << 32
    below = (at.cast(S32) + spec.first).cast(U64) ^ 0xFFFFFFFF
    return (nan.where(NAN_KEY, above | below).contiguous(),)


def token_of(keys: Tensor, size: int) -> Tensor:
    """int32 tokens of the largest keys of rows of `size` logits; `size` where there is NaN."""
    return ((keys >> 32) == 0xFFFFFFFF).where(size, ((keys ^ 0xFFFFFFFF) & 0xFFFFFFFF).cast(S32))


def noisy(logits: Tensor, numbers: Tensor, places: Tensor, wide: DType = F32, first: int = 0) -> Tensor:
    """A draw's logits, of noise computed in `wide`, of a row's elements from `first` on."""
    R, V = map(int, logits.shape)
    seed = numbers[:, Number.seed:].cast(dtypes.uint64)
    key = seed[:, 0:1] | (seed[:, 1:2] << 16) | (seed[:, 2:3] << 32) | (seed[:, 3:4] << 48)
    pairs = -(-V // 2)
    index = Tensor.arange(first // 2, first // 2 + pairs, dtype=dtypes.uint32).cast(U64)
    counter = (places.reshape(R, 1).cast(dtypes.uint32).cast(dtypes.uint64) << 32) | index
    both = counter.threefry(key.expand(R, pairs)).contiguous()
    bits = both.cast(dtypes.uint32).stack((both >> 32).cast(dtypes.uint32), dim=-1)
    # contiguous: in one kernel with argmax the noise is computed more than once and not vectorised
    noise = gumbel_of(bits.reshape(R, 2 * pairs)[:, :V], wide).contiguous()
    drawn = numbers[:, Number.temperature:Number.temperature + 1] > 0
    return drawn.where(logits + noise, logits).contiguous()


def gumbel_of(bits: Tensor, wide: DType = F32) -> Tensor:
    """Standard Gumbel noise in (-2.9, 16.7) from uniform uint32 of the same shape."""
    # 23 bits and a half fit float32 exactly; of 24, the largest would round to 1, whose noise is infinite
    uniform = ((bits >> 9).cast(wide) + 0.5) * 2.0 ** -23
    return -(-uniform.log()).log()


# **** counts ****

def tally(spec: CountSpec, counts: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    """Counts in tinygrad."""
    slot = rows.reshape(-1, 1, 1) == Tensor.arange(spec.slots).reshape(-1, 1)
    here = slot & (tokens.reshape(-1, 1, 1) == Tensor.arange(spec.size))
    return (counts + here.sum(0).cast(F32),)
