"""Linear attention in plain tinygrad (tile/reference.py), by matrices over all tokens."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.linear_attention.spec import Heads, LinearAttentionSpec
from tinygrad_nv.tile.reference import Argument, Given, Place, compute_dtype, dense, round_to
from tinygrad_nv.tile.sequences_reference import (
    gather_inputs,
    load_states,
    split_columns,
    store_states,
    table_argument,
)


def arguments(spec: LinearAttentionSpec) -> tuple[Argument, ...]:
    """out, states, q, k, v, decay, beta with the delta rule, sequences."""
    def rows(name: str, x: Heads, heads: int, d: int) -> Argument:
        return Argument(name, x.dtype, (Place(x.offset, (spec.tokens, heads, d), (x.row, x.head, 1)),))
    states = dense(spec.pages, spec.heads, spec.d_k, spec.d_v)
    decay = (spec.tokens, spec.heads, *((spec.d_k,) if spec.channels else ()))
    made = [Argument("out", spec.v.dtype, (dense(spec.tokens, spec.heads, spec.d_v),), "out"),
            Argument("states", dtypes.float32, (states,), "inout"),
            rows("q", spec.q, spec.key_heads, spec.d_k), rows("k", spec.k, spec.key_heads, spec.d_k),
            rows("v", spec.v, spec.heads, spec.d_v), Argument("decay", dtypes.float32, (dense(*decay),))]
    if spec.delta: made.append(Argument("beta", dtypes.float32, (dense(spec.tokens, spec.heads),)))
    return *made, table_argument(spec)


def reference(spec: LinearAttentionSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """out (tokens, heads, d_v) and states (pages, heads, d_k, d_v)."""
    table, x = gather_inputs(arguments(spec), given, compute_dtype(dtypes.float32, exact))
    out, states = attend(table, x["states"], x["q"], x["k"], x["v"], x["decay"], x.get("beta"), spec.scale)
    return (out if exact else round_to(out, spec.v.dtype)), states


def attend(table: Tensor, states: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor,
           beta: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out and states of tensors of one float dtype. `owner` says which sequence has a token; `seen` which
    tokens a token's state has, itself included; the rest is the chunked form (arXiv 2412.06464, 3.3) of one
    chunk, whose decays are sums over `seen`."""
    (T, heads, _), wide = v.shape, v.dtype
    shared = heads // int(k.shape[1])
    q, k = (each.repeat_interleave(shared, dim=1) for each in (q * scale, k))
    first, count, source, border, kept, target = split_columns(table)
    token = Tensor.arange(T).reshape(1, -1)
    owner = ((token >= first) & (token < first + count)).cast(wide)                         # (S, T)
    seen = ((owner.T @ owner) > 0) & (token <= token.reshape(-1, 1))
    if decay.ndim == 2: decay = decay.unsqueeze(-1)
    summed = (seen.cast(wide) @ decay.reshape(T, -1)).reshape(decay.shape)                  # (T, H, 1 or d_k)
    start = load_states(states, source)
    before = (owner.T @ start.reshape(start.shape[0], -1)).reshape(T, *start.shape[1:])     # (T, H, d_k, d_v)
    q_seen = pair(q, k, summed, seen)
    new = v
    if beta is not None:
        rate = beta.transpose(0, 1).unsqueeze(-1)
        earlier = seen & (token != token.reshape(-1, 1))
        system = pair(k, k, summed, earlier) * rate
        error = v - read(k * summed.exp(), before)
        new = (invert(system) @ (error.transpose(0, 1) * rate)).transpose(0, 1)
    out = read(q * summed.exp(), before) + (q_seen @ new.transpose(0, 1)).transpose(0, 1)
    inside = (owner.sum(0) > 0).reshape(-1, 1, 1)
    out = inside.where(out, 0)
    made = states
    for length, page in ((border, kept), (count, target)):
        until = owner * (token < first + length).cast(wide)                                 # (S, T)
        made = store_states(made, page, compute_states(start, k, new, decay, until))
    return out, made


def compute_states(start: Tensor, k: Tensor, new: Tensor, decay: Tensor, until: Tensor) -> Tensor:
    """Each sequence's state after the tokens that `until` (S, T) has of it."""
    S, T = until.shape
    token = Tensor.arange(T)
    later = (until.unsqueeze(1) * (token.reshape(-1, 1) < token.reshape(1, -1)).cast(until.dtype))
    left = (later.reshape(S * T, T) @ decay.reshape(T, -1)).reshape(S, *decay.shape)        # (S, T, H, …)
    keys = until.reshape(S, T, 1, 1) * left.exp() * k
    total = (until @ decay.reshape(T, -1)).reshape(S, *decay.shape[1:], 1).exp()
    return start * total + (keys.permute(0, 2, 3, 1) @ new.transpose(0, 1))


def pair(q: Tensor, k: Tensor, summed: Tensor, where: Tensor) -> Tensor:
    """(H, T, T): q kᵀ with the decays between two tokens, 0 but `where` both meet."""
    gap = summed.permute(1, 0, 2).unsqueeze(2) - summed.permute(1, 0, 2).unsqueeze(1)       # (H, T, T, …)
    left = where.unsqueeze(-1).where(gap, -float("inf")).exp()
    if summed.shape[-1] == 1: return (q.transpose(0, 1) @ k.permute(1, 2, 0)) * left.squeeze(-1)
    return (q.transpose(0, 1).unsqueeze(2) * k.transpose(0, 1).unsqueeze(1) * left).sum(-1)


def read(keys: Tensor, states: Tensor) -> Tensor:
    """(T, H, d_v): keys (T, H, d_k) times states (T, H, d_k, d_v)."""
    return (keys.unsqueeze(-2) @ states).squeeze(-2)


def invert(lower: Tensor) -> Tensor:
    """(I + lower)⁻¹ of strictly lower triangles (H, T, T), by blocks of 1, 2, 4 … rows: what two of them need
    between them is −(lower block's inverse) · between · (upper block's)."""
    T = int(lower.shape[-1])
    i, j = Tensor.arange(T).reshape(-1, 1), Tensor.arange(T).reshape(1, -1)
    made, size = (i == j).cast(lower.dtype).expand(lower.shape), 1
    while size < T:
        between = (i // (2 * size) == j // (2 * size)) & (i // size != j // size)
        made = (made - made @ between.where(lower, 0) @ made).contiguous()
        size *= 2
    return made
