"""Functions of tensors that are kernels of ours where there are any, and plain tinygrad elsewhere.

    from tinygrad_nv.functional import embedding, kv_append, paged_attention, scaled_dot_product_attention

`scaled_dot_product_attention` is torch's, with scale, soft-cap and window. While tinygrad_nv is enabled, the
Tensor method of that name is the same function: `q.scaled_dot_product_attention(k, v, is_causal=True)` of any
model trains with flash attention, forward and backward, without a change (`method`).

`kv_append` and `paged_attention` are a decoder's steps over keys and values in pages, `latent_attention` one
over latents (MLA), `linear_attention` and `selective_scan` those of layers that keep a state for each
sequence, and `causal_conv` their short convolutions, `varlen_attention` is for sequences that lie one after
the other, `document_attention` for documents that are packed into rows of a batch, as training has them,
`fp8_attention` for operands of 8 bits with scales, `fp8_linear` a linear layer whose three matmuls of
training are in FP8, `embedding` for rows of a table by number, `quant_matmul` for a quantised matrix,
`scaled_matmul` for one whose codes are multiplied with codes of activations (W8A8, FP8), `sparse_matmul` for
one that is 2:4 sparse, `dispatch` for mixtures of experts, made of `route`, `group_rows`, `grouped_matmul`
and `grouped_outer`, `quant_grouped_matmul` for quantised experts, `scaled_grouped_matmul` where codes are
multiplied with codes, `lora_added` for low-rank adapters, `cross_entropy` and `distillation` for losses of
logits, `linear_cross_entropy` and `linear_distillation` for those of an output layer without all logits at
once, `gate_up` for gated activations, `convolution` and `group_norm` for images whose channels lie side by
side, `rotate_heads` for rotary positions, `dropout` for elements dropped by a counter: the modules of
patterns/ with these names define them (`LATER`).
"""
from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tinygrad import Tensor

from tinygrad_nv import hooks

if TYPE_CHECKING:
    from tinygrad_nv.patterns.attention.fp8 import fp8_attention
    from tinygrad_nv.patterns.attention.functions import scaled_dot_product_attention
    from tinygrad_nv.patterns.attention.varlen import document_attention, varlen_attention
    from tinygrad_nv.patterns.causal_conv import causal_conv
    from tinygrad_nv.patterns.conv import convolution
    from tinygrad_nv.patterns.cross_entropy.functions import (
        cross_entropy,
        distillation,
        linear_cross_entropy,
        linear_distillation,
    )
    from tinygrad_nv.patterns.decode.paged import latent_attention, paged_attention
    from tinygrad_nv.patterns.dropout import dropout
    from tinygrad_nv.patterns.embedding import embedding
    from tinygrad_nv.patterns.grouped_gemm.dispatch import Experts, dispatch
    from tinygrad_nv.patterns.grouped_gemm.named import grouped_matmul
    from tinygrad_nv.patterns.grouped_gemm.outer import grouped_outer
    from tinygrad_nv.patterns.grouped_gemm.scaled import scaled_grouped_matmul
    from tinygrad_nv.patterns.kv_append.named import kv_append
    from tinygrad_nv.patterns.linear_attention import linear_attention
    from tinygrad_nv.patterns.lora import lora_added
    from tinygrad_nv.patterns.norm.gated import gate_up
    from tinygrad_nv.patterns.norm.group import group_norm
    from tinygrad_nv.patterns.quant_gemm.named import prepare_matrix, quant_matmul
    from tinygrad_nv.patterns.quant_grouped import prepare_type, quant_grouped_matmul
    from tinygrad_nv.patterns.rope import rotate_heads
    from tinygrad_nv.patterns.router.named import Routing, route
    from tinygrad_nv.patterns.router.rows import group_rows
    from tinygrad_nv.patterns.scaled_gemm.fp8 import ALIGNED as FP8_ALIGNED
    from tinygrad_nv.patterns.scaled_gemm.fp8 import KINDS as FP8_KINDS
    from tinygrad_nv.patterns.scaled_gemm.fp8 import SEEN as FP8_FIGURES
    from tinygrad_nv.patterns.scaled_gemm.fp8 import Fp8Linear, fp8_linear
    from tinygrad_nv.patterns.scaled_gemm.named import scaled_matmul
    from tinygrad_nv.patterns.scaled_gemm.quantize import quantize
    from tinygrad_nv.patterns.selective_scan import selective_scan
    from tinygrad_nv.patterns.sparse_gemm import sparse_matmul
    from tinygrad_nv.patterns.weights import (
        multiplies_codes,
        multiplies_grouped_codes,
        multiplies_sparse,
        weights_key,
    )
    from tinygrad_nv.tile.router.spec import Policy

__all__ = [
    "FP8_ALIGNED",
    "FP8_FIGURES",
    "FP8_KINDS",
    "Experts",
    "Fp8Linear",
    "Policy",
    "Routing",
    "causal_conv",
    "convolution",
    "cross_entropy",
    "dispatch",
    "distillation",
    "document_attention",
    "dropout",
    "embedding",
    "fp8_attention",
    "fp8_linear",
    "gate_up",
    "group_norm",
    "group_rows",
    "grouped_matmul",
    "grouped_outer",
    "kv_append",
    "latent_attention",
    "linear_attention",
    "linear_cross_entropy",
    "linear_distillation",
    "lora_added",
    "multiplies_codes",
    "multiplies_grouped_codes",
    "multiplies_sparse",
    "paged_attention",
    "prepare_matrix",
    "prepare_type",
    "quant_grouped_matmul",
    "quant_matmul",
    "quantize",
    "rotate_heads",
    "route",
    "scaled_dot_product_attention",
    "scaled_grouped_matmul",
    "scaled_matmul",
    "selective_scan",
    "sparse_matmul",
    "varlen_attention",
    "weights_key",
]

# module → its names, each loaded when it is asked for first: a program that lowers nothing loads none.
# `name=there` is one of another name there.
LATER = {
    "patterns.attention.fp8": "fp8_attention",
    "patterns.attention.functions": "scaled_dot_product_attention",
    "patterns.attention.varlen": "document_attention varlen_attention",
    "patterns.causal_conv": "causal_conv",
    "patterns.conv": "convolution",
    "patterns.cross_entropy.functions": "cross_entropy distillation linear_cross_entropy linear_distillation",
    "patterns.decode.paged": "latent_attention paged_attention",
    "patterns.dropout": "dropout",
    "patterns.embedding": "embedding",
    "patterns.grouped_gemm.dispatch": "Experts dispatch",
    "patterns.grouped_gemm.named": "grouped_matmul",
    "patterns.grouped_gemm.outer": "grouped_outer",
    "patterns.grouped_gemm.scaled": "scaled_grouped_matmul",
    "patterns.kv_append.named": "kv_append",
    "patterns.linear_attention": "linear_attention",
    "patterns.lora": "lora_added",
    "patterns.norm.gated": "gate_up",
    "patterns.norm.group": "group_norm",
    "patterns.quant_gemm.named": "prepare_matrix quant_matmul",
    "patterns.quant_grouped": "prepare_type quant_grouped_matmul",
    "patterns.rope": "rotate_heads",
    "patterns.router.named": "Routing route",
    "patterns.router.rows": "group_rows",
    "patterns.scaled_gemm.fp8": "FP8_ALIGNED=ALIGNED FP8_FIGURES=SEEN FP8_KINDS=KINDS Fp8Linear fp8_linear",
    "patterns.scaled_gemm.named": "scaled_matmul",
    "patterns.scaled_gemm.quantize": "quantize",
    "patterns.selective_scan": "selective_scan",
    "patterns.sparse_gemm": "sparse_matmul",
    "patterns.weights": "multiplies_codes multiplies_grouped_codes multiplies_sparse weights_key",
    "tile.router.spec": "Policy",
}
PLACES = {name: (f"tinygrad_nv.{module}", there or name) for module, names in LATER.items()
          for name, _, there in (each.partition("=") for each in names.split())}


if not TYPE_CHECKING:
    def __getattr__(name: str) -> Any:
        """Returns a name that `LATER` has."""
        if name not in PLACES: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, there = PLACES[name]
        globals()[name] = found = getattr(importlib.import_module(module), there)
        return found


def __dir__() -> list[str]: return sorted({*globals(), *__all__})


def register() -> None:
    """Lets Tensor's methods be functions of ours while enabled."""
    hooks.add_method("scaled_dot_product_attention", _attention)
    hooks.add_method("conv2d", _conv2d)


def _attention(theirs: Callable[..., Tensor], query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    from tinygrad_nv.patterns.attention.functions import method
    return method(theirs, query, *args, **kwargs)


def _conv2d(theirs: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    from tinygrad_nv.patterns.conv import method
    return method(theirs, x, *args, **kwargs)
