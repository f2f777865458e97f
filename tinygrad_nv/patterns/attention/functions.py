"""Attention as torch has it, with scale, soft-cap, window and sinks; and the Tensor method of that name while
enabled. Kernels of ours where there are any, and plain tinygrad elsewhere."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

from tinygrad import Tensor, dtypes
from tinygrad.helpers import TRAINING, to_tuple

from tinygrad_nv import config, hooks
from tinygrad_nv.errors import SpecError, as_well
from tinygrad_nv.patterns.attention.named import (
    FlashAttention,
    apply_sink,
    attend,
    draw_seed,
    lse_of,
    scores,
    sums,
    weigh_values,
)
from tinygrad_nv.patterns.attention.operands import Operands, arrange_operands, check
from tinygrad_nv.patterns.named import check_devices
from tinygrad_nv.patterns.target import GPUS, kind_of, takes
from tinygrad_nv.tile.attention.dropout import keep_256ths
from tinygrad_nv.tile.attention.spec import KEEP_ALL
from tinygrad_nv.tile.expression import short

FLOAT16S = (dtypes.bfloat16, dtypes.float16)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, enable_gqa: bool = False, *,
                                 scale: float | None = None, softcap: float | None = None,
                                 window: int | None = None, sinks: Tensor | None = None) -> Tensor:
    """softmax(scale · query keyᵀ + mask) value: [..., H, S_q, D_v] in query's dtype.

    query [..., H, S_q, D], key [..., H_kv, S_kv, D], value [..., H_kv, S_kv, D_v]; what stands before the
    heads is broadcast. H_kv is H or 1, or with `enable_gqa` a divisor of H. `attn_mask`, bool (true: seen) or
    floats (added), is broadcast to [..., H, S_q, S_kv]. `is_causal`: row r sees columns up to r. `window`:
    columns nearer to r than so many. A row that sees nothing is 0. `scale` is 1/√D by default; `softcap`
    makes scores cap · tanh(s / cap). `sinks`, float32 [H], are one more logit of each head's softmax, of no
    value. `dropout_p` of the weights are dropped in Context(TRAINING=1), by
    kernels of ours a multiple of 1/256 of them, the nearest, and the others are multiplied accordingly.
    Raises `SpecError`."""
    check(query, key, value, attn_mask, enable_gqa)
    check_devices(query, key, value, *([] if attn_mask is None else [attn_mask]))
    if not 0 <= dropout_p <= 1: raise SpecError(f"dropout_p={dropout_p}", "0 to 1")
    if is_causal and attn_mask is not None:
        raise SpecError("is_causal=True with an attn_mask", "one of them", "hide columns in the mask")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not (isfinite(number) and (number > 0 or name == "scale")):
            raise SpecError(f"{name}={number}", "a finite number" + " above 0" * (name == "softcap"))
    if window is not None and (type(window) is not int or window < 1):
        raise SpecError(f"window={window}", "at least a row's own column: 1")
    if sinks is not None and (sinks.shape != (query.shape[-3],) or sinks.dtype != dtypes.float32):
        raise SpecError(f"sinks of {short(sinks.dtype)} {sinks.shape}", f"float32 ({query.shape[-3]},)")
    what = FlashAttention(is_causal, scale, softcap, window)
    if (given := _ours(query, key, value, attn_mask, dropout_p, enable_gqa)) is not None:
        return _attend(what, given, dropout_p, sinks)
    if (given := arrange_operands(query, key, value, attn_mask)) is not None:
        masks = () if given.mask is None else (given.mask,)
        s = scores(what, sums(given.q, given.k), query.shape[-1], *masks)
        out = weigh_values(what, s, given.q, given.v, bool(masks), dropout_p)
        return (out if sinks is None else apply_sink(out, lse_of(s), sinks)).reshape(given.shape)
    if scale is softcap is window is sinks is None:
        return query.scaled_dot_product_attention(key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    raise SpecError("scale, softcap, window or sinks with symbolic extents, or with a mask that enlarges the "
                    "result", "none of these", "bind extents, or expand query to the mask's batch")


def _ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float,
          gqa: bool) -> Operands | None:
    """The operands, where kernels of ours may do it. Raises `SpecError` there for what has no attention."""
    if not hooks.enabled() or not config.get("NV_ATTENTION"): return None
    if {k.dtype, v.dtype} != {q.dtype} or not takes(q.device): return None
    names = to_tuple(q.device)
    if q.dtype not in (FLOAT16S if kind_of(names[0]) in GPUS else (*FLOAT16S, dtypes.float32)): return None
    if TRAINING and dropout_p and (len(names) > 1 or not 0 < _keep_256ths(dropout_p) < KEEP_ALL): return None
    if {k.device, v.device} != {q.device} or (mask is not None and mask.device not in (None, q.device)):
        return None
    if len(names) > 1 and not _by_heads(q, k, v, mask): return None
    check(q, k, v, mask, gqa)
    return arrange_operands(q, k, v, mask)


def _by_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether each shard is an attention: of whole heads."""
    axes = {one.uop.axis for one in (q, k, v)}
    return mask is None and len(axes) == 1 and axes <= {0, 1} and {q.ndim, k.ndim, v.ndim} == {4} \
        and {k.shape[0], v.shape[0]} == {q.shape[0]}


def method(theirs: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor,
           attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
           enable_gqa: bool = False) -> Tensor:
    """Tensor.scaled_dot_product_attention while enabled: tinygrad's own where kernels of ours have no way."""
    refused: SpecError | None = None
    try: given = _ours(query, key, value, attn_mask, dropout_p, enable_gqa)
    except SpecError as error: given, refused = None, error
    if given is None or (is_causal and attn_mask is not None):
        try:
            made = theirs(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
            if refused is not None: _ = made.shape
        except Exception as error:
            # tinygrad allows more, such as masks of integers; what it cannot do is refused in our words
            if refused is None: raise
            raise as_well(refused, error) from None
        return made
    return _attend(FlashAttention(is_causal), given, dropout_p)


def _attend(what: FlashAttention, given: Operands, dropout_p: float, sinks: Tensor | None = None) -> Tensor:
    """Returns the attention, with a new seed for its dropout."""
    kept, seed = _keep_256ths(dropout_p), None
    if kept < KEEP_ALL: seed = draw_seed(given.q.device)
    out = attend(replace(what, kept=kept), given.q, given.k, given.v, given.mask, seed, sinks)
    return out.reshape(given.shape)


def _keep_256ths(dropout_p: float) -> int:
    """Returns the number of weights of 256 that are kept."""
    return keep_256ths(dropout_p) if TRAINING and dropout_p else KEEP_ALL
