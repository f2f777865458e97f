"""Short causal convolutions in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.causal_conv.spec import CausalConvSpec
from tinygrad_nv.tile.reference import Argument, Given, Place, compute_dtype, dense, round_to
from tinygrad_nv.tile.sequences_reference import (
    gather_inputs,
    load_states,
    split_columns,
    store_states,
    table_argument,
)


def arguments(spec: CausalConvSpec) -> tuple[Argument, ...]:
    """out, windows, x, weight, bias if there is one, sequences."""
    T, C, K = spec.tokens, spec.channels, spec.taps
    made = [Argument("out", spec.dtype, (dense(T, C),), "out"),
            Argument("windows", spec.dtype, (dense(spec.pages, K - 1, C),), "inout"),
            Argument("x", spec.dtype, (Place(spec.offset, (T, C), (spec.row, 1)),)),
            Argument("weight", spec.dtype, (dense(C, K),))]
    if spec.bias: made.append(Argument("bias", spec.dtype, (dense(C),)))
    return *made, table_argument(spec)


def reference(spec: CausalConvSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """out (tokens, channels) and windows (pages, taps − 1, channels)."""
    table, x = gather_inputs(arguments(spec), given, compute_dtype(dtypes.float32, exact))
    out, windows = convolve(table, x["windows"], x["x"], x["weight"], x.get("bias"), spec.silu)
    return tuple(each if exact else round_to(each, spec.dtype) for each in (out, windows))


def convolve(table: Tensor, windows: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
             silu: bool) -> tuple[Tensor, Tensor]:
    """out and windows of tensors of one float dtype."""
    T, K = int(x.shape[0]), int(weight.shape[1])
    first, count, source, border, kept, target = split_columns(table)
    token = Tensor.arange(T).reshape(1, -1)
    owner = (token >= first) & (token < first + count)                                      # (S, T)
    before = load_states(windows, source)
    seq, there = owner.cast(dtypes.int32).argmax(0), owner.any(0)                           # (T,)
    place = token.reshape(-1) - first.reshape(-1)[seq]                                      # in its sequence
    total = x * 0 if bias is None else x * 0 + bias
    for j in range(K):
        back = K - 1 - j
        own = x[(token.reshape(-1) - back).maximum(0)]
        earlier = before[seq, (place + j).minimum(K - 2).maximum(0)]
        total = total + (place >= back).reshape(-1, 1).where(own, earlier) * weight[:, j]
    out = there.reshape(-1, 1).where(total.silu() if silu else total, 0)
    made = windows
    for length, page in ((border, kept), (count, target)):
        made = store_states(made, page, shift_windows(before, x, first, length, K))
    return out, made


def shift_windows(before: Tensor, x: Tensor, first: Tensor, count: Tensor, K: int) -> Tensor:
    """The windows (S, K − 1, C) after `count` (S, 1) tokens of each sequence."""
    place = count - (K - 1) + Tensor.arange(K - 1).reshape(1, -1)                           # (S, K − 1)
    own = x[(first + place).maximum(0).minimum(int(x.shape[0]) - 1)]
    earlier = before.gather(1, (place + K - 1).minimum(K - 2).unsqueeze(-1).expand(before.shape))
    return (place >= 0).unsqueeze(-1).where(own, earlier)
