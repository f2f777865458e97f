"""Parts of a sampler as functions known by name: bodies in tinygrad, and kernels.

Protocol: `largest`, `chosen` and `tallied` are what the sampler calls; tile/sampling/spec.py says what they
compute. What is kept is the same by body and kernel, bit by bit, whatever the processor; noise has them where
the compiler contracts products and sums alike, as it does for one processor.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import NotOurs
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.sampling.spec import DIGITS, LANES, ChoiceSpec, CountSpec, FilterSpec, Number

# **** filters ****

def largest(logits: Tensor, weights: Tensor | None, numbers: Tensor, number: Number) -> Tensor:
    """float32 logits [R, V], -inf but for the largest of each row: those with a sum of float32 `weights`
    [R, V] of at least `number` of the row's float32 `numbers` [R, NUMBERS], or so many of them without
    weights. Ties are all kept."""
    R, V = map(int, logits.shape)
    spec = FilterSpec(R, V, number, weights is None)
    return call(spec, filtered, logits, *([] if weights is None else [weights]), numbers)[0]


def filtered(spec: FilterSpec, logits: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """A filter in tinygrad."""
    keys, target = ordered_bits(logits), others[-1][:, spec.number:spec.number + 1]
    floor = threshold(keys, None if spec.counted else others[0], target)
    return ((keys >= floor).where(logits, -float("inf")).contiguous(),)


def ordered_bits(x: Tensor) -> Tensor:
    """float32 as uint32 in the same order (IEEE 754: flip negatives, set the sign bit of the rest); -0 comes
    just before 0."""
    bits = x.bitcast(dtypes.uint32)
    return (bits >= 1 << 31).where(bits ^ 0xFFFFFFFF, bits | (1 << 31)).contiguous()


def threshold(keys: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
    """For each row the largest uint32 t with Σ weights[keys ≥ t] ≥ target, [R, 1], or 0 if there is none: the
    k-th largest key without weights, which are 1 then, and with k for a target; the nucleus' smallest key
    when weights are probabilities and target is top_p. Keys and float32 weights are [R, V], target is float32
    [R, 1].

    Radix selection, four bits a pass from the top, eight passes of two kernels instead of a sort. A pass sums
    for all 16 digits in `LANES` lanes, since one float sum a digit is a chain of additions that no compiler
    may break up."""
    if weights is None: weights = Tensor.ones_like(keys, dtype=dtypes.float32)
    R, size = map(int, keys.shape)
    length = -(-size // LANES)
    # weights of the padding are 0
    keys, weights = (x.pad(((0, 0), (0, length * LANES - size))).reshape(R, LANES, length, 1).contiguous()
                     for x in (keys, weights))
    digits = Tensor.arange(DIGITS, dtype=dtypes.uint32)
    found = Tensor.zeros(R, 1, dtype=dtypes.uint32, device=keys.device)
    for shift in range(28, -4, -4):
        edges = (found + digits * (1 << shift)).reshape(R, 1, 1, DIGITS)
        mass = (keys >= edges).where(weights, 0).sum(2).contiguous().sum(1)
        # mass falls with the digit, so the count of digits that reach the target is the digit sought, plus
        # one; at least digit 0: rounding may leave the total just under a target of 1
        reached = (mass >= target).cast(dtypes.uint32).sum(1, keepdim=True).maximum(1).cast(dtypes.uint32) - 1
        found = (found + reached * (1 << shift)).contiguous()
    return found


# **** choices ****

def chosen(logits: Tensor, numbers: Tensor | None, places: Tensor) -> Tensor:
    """int32 [R]: the index of the largest of each row of float32 logits [R, V] after noise, a function of the
    seed in the row's float32 `numbers` [R, NUMBERS], its int place [R] and the index alone; V where there is
    NaN. Rows without a temperature have no noise; none has without `numbers`."""
    R, V = map(int, logits.shape)
    others = [] if numbers is None else [numbers, places.cast(dtypes.int32)]
    return call(ChoiceSpec(R, V, numbers is not None), choice, logits, *others)[0]


def choice(spec: ChoiceSpec, logits: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """A choice in tinygrad."""
    x = noisy(logits, *others) if spec.draw else logits
    nan = (x != x).max(-1)
    return (nan.where(spec.size, x.argmax(-1)).cast(dtypes.int32).contiguous(),)


def noisy(logits: Tensor, numbers: Tensor, places: Tensor) -> Tensor:
    """A draw's logits."""
    R, V = map(int, logits.shape)
    seed = numbers[:, Number.seed:].cast(dtypes.uint64)
    key = seed[:, 0:1] | (seed[:, 1:2] << 16) | (seed[:, 2:3] << 32) | (seed[:, 3:4] << 48)
    index = Tensor.arange(V, dtype=dtypes.uint32).cast(dtypes.uint64)
    counter = (places.reshape(R, 1).cast(dtypes.uint32).cast(dtypes.uint64) << 32) | index
    # contiguous: in one kernel with argmax the noise is computed more than once and not vectorised
    noise = gumbel_of(counter.threefry(key.expand(R, V)).cast(dtypes.uint32)).contiguous()
    drawn = numbers[:, Number.temperature:Number.temperature + 1] > 0
    return drawn.where(logits + noise, logits).contiguous()


def gumbel_of(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in (-2.9, 16.7), float32, from uniform uint32 of the same shape."""
    # 23 bits and a half fit float32 exactly; of 24, the largest would round to 1, whose noise is infinite
    uniform = ((bits >> 9).cast(dtypes.float32) + 0.5) * 2.0 ** -23
    return -(-uniform.log()).log()


# **** counts ****

def tallied(counts: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """float32 counts [slots, V] and 1 at (rows[r], tokens[r]) for each r, where that is one of them; no two
    rows are the same. A kernel writes them in place, where they are storage of their own."""
    slots, V = map(int, counts.shape)
    spec = CountSpec(int(rows.shape[0]), slots, V)
    return call(spec, tally, counts, rows.cast(dtypes.int32), tokens.cast(dtypes.int32))[0]


def tally(spec: CountSpec, counts: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    """Counts in tinygrad."""
    slot = rows.reshape(-1, 1, 1) == Tensor.arange(spec.slots).reshape(-1, 1)
    here = slot & (tokens.reshape(-1, 1, 1) == Tensor.arange(spec.size))
    return (counts + here.sum(0).cast(dtypes.float32),)


# **** kernels ****

def _filter(spec: FilterSpec, target: Target, *arguments: UOp) -> tuple[UOp, ...]:
    """A filter by a kernel."""
    return _called(spec, target, program.Output((spec.rows, spec.size), dtypes.float32), arguments)


def _choice(spec: ChoiceSpec, target: Target, *arguments: UOp) -> tuple[UOp, ...]:
    """A choice by a kernel, or by two where a row is chosen from in pieces."""
    return _called(spec, target, program.Output((spec.rows,), dtypes.int32), arguments)


def _count(spec: CountSpec, target: Target, counts: UOp, *arguments: UOp) -> tuple[UOp, ...]:
    """Counts by a kernel, in place."""
    if not program.is_whole(counts):
        raise NotOurs("counts are no storage of their own, to be written in place")
    return _called(spec, target, counts, arguments)


def _called(spec: FilterSpec | ChoiceSpec | CountSpec, target: Target, out: program.Output | UOp,
            arguments: Sequence[UOp]) -> tuple[UOp, ...]:
    return choose(spec, target).called(arguments[0].device, [out], arguments, flops=spec.flops)


lower(FilterSpec, "threshold", _filter)
lower(ChoiceSpec, "choice", _choice)
lower(CountSpec, "count", _count)
