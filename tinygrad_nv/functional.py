"""Functions of tensors that are kernels of ours where there are any, and plain tinygrad elsewhere.

    from tinygrad_nv.functional import embedding, kv_append, paged_attention, scaled_dot_product_attention

`scaled_dot_product_attention` is torch's, with scale, soft-cap and window. While tinygrad_nv is enabled, the
Tensor method of that name is the same function: `q.scaled_dot_product_attention(k, v, is_causal=True)` of any
model trains with flash attention, forward and backward, without a change (`method`).

`kv_append` and `paged_attention` are a decoder's steps over keys and values in pages, `latent_attention` one
over latents (MLA), `varlen_attention` is for sequences that lie one after the other, `document_attention` for
documents that are packed into rows of a batch, as training has them, `fp8_attention` for operands of 8 bits
with scales, `fp8_linear` a linear layer whose three matmuls of training are in FP8,
`embedding` for rows of a table by number, `quant_matmul` for a quantised
matrix, `scaled_matmul` for one whose codes are multiplied with codes of activations (W8A8, FP8),
`sparse_matmul` for one that is 2:4 sparse, `dispatch` for mixtures of experts, made of `route`, `group_rows`,
`grouped_matmul` and `grouped_outer`, `quant_grouped_matmul` for quantised experts, `scaled_grouped_matmul`
where codes are multiplied with codes, `lora_added` for low-rank adapters, `cross_entropy` and `distillation`
for losses of logits, `linear_cross_entropy` and `linear_distillation` for those of an output layer without
all logits at once, `gated` for gated activations, `convolution` and
`group_norm` for images whose channels lie side by side, `rotated_heads` for rotary positions, `dropout` for
elements dropped by a counter: the modules of patterns/ with these names (decode/paged.py, decode/latent.py,
attention/varlen.py, attention/documents.py, attention/fp8.py, norm/gated.py, scaled_gemm/named.py,
router/rows.py, cross_entropy/functions.py, grouped_gemm/, and named.py of the others) define them.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import TRAINING, to_tuple

from tinygrad_nv import config, hooks
from tinygrad_nv.errors import SpecError, as_well
from tinygrad_nv.patterns.attention import (
    lower as attention_lower,
)
from tinygrad_nv.patterns.attention import (
    lower_backward as attention_lower_backward,
)
from tinygrad_nv.patterns.attention.documents import document_attention
from tinygrad_nv.patterns.attention.dropout import drawn
from tinygrad_nv.patterns.attention.fp8 import fp8_attention
from tinygrad_nv.patterns.attention.named import (
    FlashAttention,
    attend,
    lse_of,
    scores,
    sums,
    sunk,
    weighted,
)
from tinygrad_nv.patterns.attention.operands import Operands, arranged, check
from tinygrad_nv.patterns.attention.varlen import varlen_attention
from tinygrad_nv.patterns.conv import named as conv
from tinygrad_nv.patterns.conv.named import convolution
from tinygrad_nv.patterns.cross_entropy.functions import (
    cross_entropy,
    distillation,
    linear_cross_entropy,
    linear_distillation,
)
from tinygrad_nv.patterns.decode.latent import latent_attention
from tinygrad_nv.patterns.decode.paged import paged_attention
from tinygrad_nv.patterns.dropout import dropout
from tinygrad_nv.patterns.embedding.named import embedding
from tinygrad_nv.patterns.grouped_gemm import scaled as scaled_grouped
from tinygrad_nv.patterns.grouped_gemm.dispatch import Experts, dispatch
from tinygrad_nv.patterns.grouped_gemm.named import grouped_matmul
from tinygrad_nv.patterns.grouped_gemm.outer import grouped_outer
from tinygrad_nv.patterns.grouped_gemm.scaled import scaled_grouped_matmul
from tinygrad_nv.patterns.kv_append.named import kv_append
from tinygrad_nv.patterns.lora.named import lora_added
from tinygrad_nv.patterns.named import check_devices
from tinygrad_nv.patterns.norm.gated import gated
from tinygrad_nv.patterns.norm.group import group_norm
from tinygrad_nv.patterns.quant_gemm.named import prepared, prepared_for, quant_matmul
from tinygrad_nv.patterns.quant_grouped.named import prepared_type, quant_grouped_matmul
from tinygrad_nv.patterns.rope.named import rotated_heads
from tinygrad_nv.patterns.router.named import Routing, route
from tinygrad_nv.patterns.router.rows import group_rows
from tinygrad_nv.patterns.scaled_gemm.fp8 import ALIGNED as FP8_ALIGNED
from tinygrad_nv.patterns.scaled_gemm.fp8 import KINDS as FP8_KINDS
from tinygrad_nv.patterns.scaled_gemm.fp8 import SEEN as FP8_FIGURES
from tinygrad_nv.patterns.scaled_gemm.fp8 import Fp8Linear, fp8_linear
from tinygrad_nv.patterns.scaled_gemm.named import has_kernel, scaled_matmul
from tinygrad_nv.patterns.scaled_gemm.quantize import quantize
from tinygrad_nv.patterns.sparse_gemm import named as sparse
from tinygrad_nv.patterns.sparse_gemm.named import sparse_matmul
from tinygrad_nv.patterns.target import GPUS, kind_of, takes, target_of
from tinygrad_nv.quant.types import QType, Scale
from tinygrad_nv.tile.attention.dropout import kept_of
from tinygrad_nv.tile.attention.spec import EVERY
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.router.spec import Policy

__all__ = [
    "FP8_ALIGNED",
    "FP8_FIGURES",
    "FP8_KINDS",
    "Experts",
    "Fp8Linear",
    "Policy",
    "Routing",
    "convolution",
    "cross_entropy",
    "dispatch",
    "distillation",
    "document_attention",
    "dropout",
    "embedding",
    "fp8_attention",
    "fp8_linear",
    "gated",
    "group_norm",
    "group_rows",
    "grouped_matmul",
    "grouped_outer",
    "kv_append",
    "latent_attention",
    "linear_cross_entropy",
    "linear_distillation",
    "lora_added",
    "multiplies_codes",
    "multiplies_grouped_codes",
    "multiplies_sparse",
    "paged_attention",
    "prepared",
    "prepared_type",
    "quant_grouped_matmul",
    "quant_matmul",
    "quantize",
    "rotated_heads",
    "route",
    "scaled_dot_product_attention",
    "scaled_grouped_matmul",
    "scaled_matmul",
    "sparse_matmul",
    "varlen_attention",
    "weights_key",
]

FLOAT16S = (dtypes.bfloat16, dtypes.float16)


def register() -> None:
    """Lets attention known by name become kernels, and the Tensor method be `method` while enabled."""
    attention_lower.register()
    attention_lower_backward.register()
    conv.register()
    hooks.add_method("scaled_dot_product_attention", method)


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
        return _attended(what, given, dropout_p, sinks)
    if (given := arranged(query, key, value, attn_mask)) is not None:
        masks = () if given.mask is None else (given.mask,)
        s = scores(what, sums(given.q, given.k), query.shape[-1], *masks)
        out = weighted(what, s, given.q, given.v, bool(masks), dropout_p)
        return (out if sinks is None else sunk(out, lse_of(s), sinks)).reshape(given.shape)
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
    if TRAINING and dropout_p and (len(names) > 1 or not 0 < _kept(dropout_p) < EVERY): return None
    if {k.device, v.device} != {q.device} or (mask is not None and mask.device not in (None, q.device)):
        return None
    if len(names) > 1 and not _by_heads(q, k, v, mask): return None
    check(q, k, v, mask, gqa)
    return arranged(q, k, v, mask)


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
    return _attended(FlashAttention(is_causal), given, dropout_p)


def _attended(what: FlashAttention, given: Operands, dropout_p: float, sinks: Tensor | None = None) -> Tensor:
    """The attention, with a new seed for its dropout."""
    kept, seed = _kept(dropout_p), None
    if kept < EVERY: seed = drawn(given.q.device)
    out = attend(replace(what, kept=kept), given.q, given.k, given.v, given.mask, seed, sinks)
    return out.reshape(given.shape)


def multiplies_codes(type: QType, shape: tuple[int, int], element: str, block: Scale,
                     device: str | None) -> bool:
    """Whether `scaled_matmul` is a kernel for a matrix that is `prepared` for codes, with activations that
    are quantised to `element` with scales of blocks."""
    name = Device.canonicalize(device)
    if not hooks.enabled() or not config.get("NV_GEMM"): return False
    return (target := target_of(name)) is not None and has_kernel(type, shape, element, block, target)


def multiplies_grouped_codes(type: QType, shape: tuple[int, int, int], activation: str, dtype: DType,
                             element: str, block: Scale, device: str | None) -> bool:
    """Whether `scaled_grouped_matmul` is a kernel for a stack of matrices, with results of a dtype, and with
    activations that are quantised to `element` with scales of blocks."""
    name = Device.canonicalize(device)
    if not hooks.enabled() or (type, element, block) != (scaled_grouped.BLOCKS, "e4m3", scaled_grouped.ROWS):
        return False
    return (target := target_of(name)) is not None and \
        scaled_grouped.has_kernel(shape, activation, dtype, target)


def multiplies_sparse(dtype: DType, shape: tuple[int, int], device: str | None) -> bool:
    """Whether `sparse_matmul` is a kernel on a GPU for a matrix."""
    name = Device.canonicalize(device)
    if not hooks.enabled() or not config.get("NV_GEMM") or kind_of(name) not in GPUS: return False
    return (target := target_of(name)) is not None and sparse.has_kernel(dtype, shape, target)


def weights_key(device: str | None) -> str:
    """What `prepared`, `multiplies_codes` and the like depend on besides a matrix, for keys of
    weights that were repacked."""
    ours = hooks.enabled() and config.get("NV_GEMM")
    return f"{prepared_for(Device.canonicalize(device))}, codes and sparse {'yes' if ours else 'no'}"


def _kept(dropout_p: float) -> int:
    """Weights of 256 that are kept."""
    return kept_of(dropout_p) if TRAINING and dropout_p else EVERY
