"""Selective scans as a function known by name: sequences whose states lie in pages, written in place.

Protocol. `selective_scan(x, step, a, b, c, states, sequences)` gives each token's results, and changes the
pages of states as `Tensor.assign` does (tile/selective_scan/spec.py says what). Its body is the reference,
and what runs wherever no kernel does: it costs as much as all tokens times all tokens. There is no gradient.
Results and pages are realized together: each alone would run the kernel again.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.decode.paged import check_kind, check_shape
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.strides import Laid, lay_out_rows
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.selective_scan.reference import scan
from tinygrad_nv.tile.selective_scan.spec import Rows, SelectiveScanSpec
from tinygrad_nv.tile.sequences import COLUMNS, FLOATS

NAME = "selective_scan"


@dataclass(frozen=True)
class SelectiveScan:
    """A selective scan, as far as its tensors do not say it."""
    single: bool


def selective_scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor,
                   sequences: Tensor, *, single: bool = False) -> tuple[Tensor, Tensor]:
    """Scans x (T, E) of sequences, and changes their states. Returns float32 (T, E), and the states.

    step float32 (T, E), at least 0; a float32 (N, E), at most 0; b and c (T, N); states float32 (P, N, E);
    sequences int32 (S, 6). `single`: sequence s has at most one token, which is token s. Raises
    `SpecError`."""
    check_shape("x", x, "T, E", (None, None))
    tokens, channels = x.shape
    check_shape("step", step, "T, E", (tokens, channels))
    check_shape("a", a, "N, E", (None, channels))
    count = a.shape[0]
    for name, each in (("b", b), ("c", c)): check_shape(name, each, "T, N", (tokens, count))
    check_shape("states", states, "P, N, E", (None, count, channels))
    check_shape("sequences", sequences, "S, 6", (tokens if single else None, len(COLUMNS)))
    for name, each in (("x", x), ("b", b), ("c", c)): check_kind(name, each.dtype, FLOATS)
    for name, each in (("step", step), ("a", a), ("states", states)):
        check_kind(name, each.dtype, (dtypes.float32,))
    check_kind("sequences", sequences.dtype, (dtypes.int32,))
    out, made = call(SelectiveScan(single), _compute, states, x, step, a, b, c, sequences)
    return out, states.assign(made)


def _compute(what: SelectiveScan, *given: Tensor) -> tuple[Tensor, ...]:
    *tensors, sequences = given
    return scan(sequences, *(each.float() for each in tensors))


def lower_selective_scan(what: SelectiveScan, target: Target, *given: UOp) -> tuple[UOp, ...]:
    """Returns results and states after the kernel. Raises `Unsupported` where there is none."""
    states, sequences = given[0], given[-1]
    if not program.is_whole(states):
        raise Unsupported("states are no storage of their own, to be written in place")
    step, a = (each.contiguous() for each in given[2:4])
    x, b, c = (lay_out_rows(given[i]) for i in (1, 4, 5))
    (tokens, channels), (pages, count, _) = (map(int, each.shape) for each in (given[1], states))
    spec = SelectiveScanSpec(tokens, int(sequences.shape[0]), channels, count, pages,
                             _place(x), _place(b), _place(c), what.single)
    outputs = [program.Output((tokens, channels), dtypes.float32), states]
    inputs = [x.storage, step, a, b.storage, c.storage, sequences]
    return choose(spec, target).call(states.device, outputs, inputs, nbytes=spec.nbytes, flops=spec.flops)


def _place(x: Laid) -> Rows: return Rows(x.dtype, x.strides[0], x.offset)


lower(SelectiveScan, NAME, lower_selective_scan, "NV_ATTENTION")
