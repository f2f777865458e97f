"""Linear attention as a function known by name: sequences whose states lie in pages, written in place.

Protocol. `linear_attention(q, k, v, decay, beta, states, sequences)` gives each token's result, and changes
the pages of states as `Tensor.assign` does (tile/linear_attention/spec.py says what; tile/sequences.py what
`sequences` has). Its body is the reference, and what runs wherever no kernel does: it costs as much as all
tokens times all tokens. There is no gradient. Results and pages are realized together: each alone would run
the kernel again.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.decode.paged import check_kind, check_shape
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.strides import lay_out_rows
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.linear_attention.reference import attend
from tinygrad_nv.tile.linear_attention.spec import Heads, LinearAttentionSpec
from tinygrad_nv.tile.sequences import COLUMNS, FLOATS

NAME = "linear_attention"


@dataclass(frozen=True)
class LinearAttention:
    """Linear attention, as far as its tensors do not say it."""
    scale: float
    delta: bool
    single: bool


def linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: Tensor,
                     sequences: Tensor, *, scale: float = 1.0,
                     single: bool = False) -> tuple[Tensor, Tensor]:
    """Attends of each token to the tokens up to it, and changes states. Returns (T, H, D_v) in v's dtype, and
    the states.

    q and k (T, H_k, D_k), v (T, H, D_v), H a multiple of H_k; decay float32 (T, H), or (T, H, D_k) for each
    row of a state, at most 0; beta float32 (T, H), of the delta rule, or None; states float32 (P, H, D_k,
    D_v); sequences int32 (S, 6). `single`: sequence s has at most one token, which is token s. Raises
    `SpecError`."""
    check_shape("q", q, "T, H_k, D_k", (None, None, None))
    tokens, shared, d_k = q.shape
    check_shape("k", k, "T, H_k, D_k", (tokens, shared, d_k))
    check_shape("v", v, "T, H, D_v", (tokens, None, None))
    heads, d_v = v.shape[1:]
    check_shape("states", states, "P, H, D_k, D_v", (None, heads, d_k, d_v))
    check_shape("sequences", sequences, "S, 6", (tokens if single else None, len(COLUMNS)))
    if decay.ndim == 3: check_shape("decay", decay, "T, H, D_k", (tokens, heads, d_k))
    else: check_shape("decay", decay, "T, H", (tokens, heads))
    if heads % shared: raise SpecError(f"{heads} heads with {shared} of keys", "a multiple of these")
    for name, x in (("q", q), ("v", v)): check_kind(name, x.dtype, FLOATS)
    check_kind("k", k.dtype, (q.dtype,))
    given = [("decay", decay), ("states", states)]
    if beta is not None:
        check_shape("beta", beta, "T, H", (tokens, heads))
        given.append(("beta", beta))
    for name, x in given: check_kind(name, x.dtype, (dtypes.float32,))
    check_kind("sequences", sequences.dtype, (dtypes.int32,))
    tensors = [states, q, k, v, decay, *([] if beta is None else [beta]), sequences]
    out, made = call(LinearAttention(float(scale), beta is not None, single), _compute, *tensors)
    return out, states.assign(made)


def _compute(what: LinearAttention, *given: Tensor) -> tuple[Tensor, ...]:
    states, q, k, v, decay, *rest = given
    beta, table = (rest[0], rest[1]) if what.delta else (None, rest[0])
    out, made = attend(table, states, q.float(), k.float(), v.float(), decay, beta, what.scale)
    return out.cast(v.dtype), made


def lower_linear_attention(what: LinearAttention, target: Target, *given: UOp) -> tuple[UOp, ...]:
    """Returns results and states after the kernel. Raises `Unsupported` where there is none."""
    states, *tokens = given[:4]
    if not program.is_whole(states):
        raise Unsupported("states are no storage of their own, to be written in place")
    rest = [x.contiguous() for x in given[4:-1]]
    laid = [lay_out_rows(x) for x in tokens]
    q, k, v = (Heads(x.dtype, x.strides[0], x.strides[1], x.offset) for x in laid)
    (T, shared, d_k), (_, heads, d_v) = (map(int, x.shape) for x in (tokens[0], tokens[2]))
    spec = LinearAttentionSpec(T, int(given[-1].shape[0]), heads, shared, d_k, d_v, int(states.shape[0]),
                               q, k, v, what.scale, what.delta, len(given[4].shape) == 3, what.single)
    outputs = [program.Output((T, heads, d_v), v.dtype), states]
    inputs = [*(x.storage for x in laid), *rest, given[-1]]
    return choose(spec, target).call(states.device, outputs, inputs, nbytes=spec.nbytes, flops=spec.flops)


lower(LinearAttention, NAME, lower_linear_attention, "NV_ATTENTION")
