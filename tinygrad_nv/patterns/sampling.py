"""Parts of a sampler as named functions, with the references of tile/sampling/reference.py, and kernels.

Protocol: `largest`, `choose_tokens`, `choose_part` and `tally_tokens` are what the sampler calls;
tile/sampling/spec.py says what they compute. What is kept is the same by body and kernel, bit by bit,
whatever the processor; noise has them where the compiler contracts products and sums alike, as it does for
one processor. """
from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.sampling.reference import apply_filter, choice, tally
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, CountSpec, FilterSpec, Number

# **** filters ****

def largest(logits: Tensor, weights: Tensor | None, numbers: Tensor, number: Number) -> Tensor:
    """float32 logits [R, V], -inf but for the largest of each row: those with a sum of float32 `weights`
    [R, V] of at least `number` of the row's float32 `numbers` [R, NUMBERS], or so many of them without
    weights. Ties are all kept."""
    R, V = map(int, logits.shape)
    spec = FilterSpec(R, V, number, weights is None)
    return call(spec, apply_filter, logits, *([] if weights is None else [weights]), numbers)[0]


# **** choices ****

def choose_tokens(logits: Tensor, numbers: Tensor | None, places: Tensor) -> Tensor:
    """int32 [R]: the index of the largest of each row of float32 logits [R, V] after noise, a function of the
    seed in the row's float32 `numbers` [R, NUMBERS], its int place [R] and the index alone; V where there is
    NaN. Rows without a temperature have no noise; none has without `numbers`."""
    return _choose(logits, numbers, places, None)


def choose_part(logits: Tensor, numbers: Tensor | None, places: Tensor, first: int) -> Tensor:
    """Returns the choice among a part of rows, their elements from `first` on: keys, uint64 [R]. Those of all
    parts have the token: `token_of(largest key, V)`."""
    return _choose(logits, numbers, places, first)


def _choose(logits: Tensor, numbers: Tensor | None, places: Tensor, first: int | None) -> Tensor:
    R, V = map(int, logits.shape)
    others = [] if numbers is None else [numbers, places.cast(dtypes.int32)]
    return call(ChoiceSpec(R, V, numbers is not None, first), choice, logits, *others)[0]


# **** counts ****

def tally_tokens(counts: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """float32 counts [slots, V] and 1 at (rows[r], tokens[r]) for each r, where that is one of them; no two
    rows are the same. A kernel writes them in place, where they are storage of their own."""
    slots, V = map(int, counts.shape)
    spec = CountSpec(int(rows.shape[0]), slots, V)
    return call(spec, tally, counts, rows.cast(dtypes.int32), tokens.cast(dtypes.int32))[0]


# **** kernels ****

def _filter(spec: FilterSpec, target: Target, *arguments: UOp) -> tuple[UOp, ...]:
    """A filter by a kernel."""
    return _call_kernel(spec, target, program.Output((spec.rows, spec.size), dtypes.float32), arguments)


def _choice(spec: ChoiceSpec, target: Target, *arguments: UOp) -> tuple[UOp, ...]:
    """A choice by a kernel, or by two where a row is chosen from in pieces."""
    return _call_kernel(spec, target, program.Output((spec.rows,), spec.result_dtype), arguments)


def _count(spec: CountSpec, target: Target, counts: UOp, *arguments: UOp) -> tuple[UOp, ...]:
    """Counts by a kernel, in place."""
    if not program.is_whole(counts):
        raise Unsupported("counts are no storage of their own, to be written in place")
    return _call_kernel(spec, target, counts, arguments)


def _call_kernel(spec: FilterSpec | ChoiceSpec | CountSpec, target: Target, out: program.Output | UOp,
            arguments: Sequence[UOp]) -> tuple[UOp, ...]:
    return choose(spec, target).call(arguments[0].device, [out], arguments, flops=spec.flops)


lower(FilterSpec, "threshold", _filter)
lower(ChoiceSpec, "choice", _choice)
lower(CountSpec, "count", _count)
