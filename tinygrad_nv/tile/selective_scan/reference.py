"""Selective scans in plain tinygrad (tile/reference.py), by sums over all tokens before each."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.reference import Argument, Given, Place, compute_dtype, dense
from tinygrad_nv.tile.selective_scan.spec import Rows, SelectiveScanSpec
from tinygrad_nv.tile.sequences_reference import (
    gather_inputs,
    load_states,
    split_columns,
    store_states,
    table_argument,
)


def arguments(spec: SelectiveScanSpec) -> tuple[Argument, ...]:
    """out, states, x, step, a, b, c, sequences."""
    T, E, N = spec.tokens, spec.channels, spec.states

    def rows(name: str, own: Rows, size: int) -> Argument:
        return Argument(name, own.dtype, (Place(own.offset, (T, size), (own.row, 1)),))
    return (Argument("out", dtypes.float32, (dense(T, E),), "out"),
            Argument("states", dtypes.float32, (dense(spec.pages, N, E),), "inout"),
            rows("x", spec.x, E), Argument("step", dtypes.float32, (dense(T, E),)),
            Argument("a", dtypes.float32, (dense(N, E),)), rows("b", spec.b, N), rows("c", spec.c, N),
            table_argument(spec))


def reference(spec: SelectiveScanSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """out (tokens, channels) and states (pages, states, channels)."""
    table, x = gather_inputs(arguments(spec), given, compute_dtype(dtypes.float32, exact))
    return scan(table, *x.values())


def scan(table: Tensor, states: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor,
         c: Tensor) -> tuple[Tensor, Tensor]:
    """out and states of tensors of one float dtype. `owner` says which sequence has a token; `seen` which
    tokens a token's states have, itself included; A times the steps between two tokens is the logarithm of
    what is left of a state."""
    T, wide = x.shape[0], x.dtype
    first, count, source, border, kept, target = split_columns(table)
    token = Tensor.arange(T).reshape(1, -1)
    owner = ((token >= first) & (token < first + count)).cast(wide)                         # (S, T)
    seen = ((owner.T @ owner) > 0) & (token <= token.reshape(-1, 1))                        # (T, T)
    summed, given = (seen.cast(wide) @ step).contiguous(), step * x                         # (T, E)
    start = load_states(states, source)
    before = (owner.T @ start.reshape(start.shape[0], -1)).reshape(T, *start.shape[1:])     # (T, N, E)
    out = ((summed.unsqueeze(1) * a).exp() * before * c.unsqueeze(-1)).sum(1)
    gap = seen.unsqueeze(-1).where(summed.unsqueeze(1) - summed.unsqueeze(0), 0)            # (T, T, E)
    for n in range(int(a.shape[0])):
        pair = seen.where(c[:, n].reshape(-1, 1) * b[:, n], 0).unsqueeze(-1)
        out = out + (pair * (gap * a[n]).exp() * given).sum(1)
    made = states
    for length, page in ((border, kept), (count, target)):
        until = owner * (token < first + length).cast(wide)                                 # (S, T)
        made = store_states(made, page, compute_states(start, step, given, a, b, until))
    return out, made


def compute_states(start: Tensor, step: Tensor, given: Tensor, a: Tensor, b: Tensor, until: Tensor) -> Tensor:
    """Each sequence's states after the tokens that `until` (S, T) has of it."""
    token = Tensor.arange(until.shape[1])
    later = until.unsqueeze(1) * (token.reshape(-1, 1) < token.reshape(1, -1)).cast(until.dtype)
    left = (later.reshape(-1, until.shape[1]) @ step).reshape(*until.shape, -1)             # (S, T, E)
    made = [(((left * a[n]).exp() * given * b[:, n].reshape(-1, 1)) * until.unsqueeze(-1)).sum(1)
            for n in range(int(a.shape[0]))]
    return start * ((until @ step).unsqueeze(1) * a).exp() + Tensor.stack(*made, dim=1)
