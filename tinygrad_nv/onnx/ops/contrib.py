"""Operators of com.microsoft, which onnxruntime's optimizers and exporters of language models write."""
from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.functional import quant_matmul, scaled_dot_product_attention
from tinygrad_nv.onnx.elements import Value, to_numpy
from tinygrad_nv.onnx.matrices import matrix_of, matrix_of_blocks
from tinygrad_nv.onnx.model import Node
from tinygrad_nv.onnx.ops.attention import Masks, heads
from tinygrad_nv.onnx.ops.control import tensor
from tinygrad_nv.onnx.ops.quantised import dequantize
from tinygrad_nv.onnx.table import Call, op
from tinygrad_nv.quant.tensor import QTensor

MICROSOFT = "com.microsoft"
_matrices: WeakKeyDictionary[Node, QTensor | None] = WeakKeyDictionary()     # made at a node's first call


# **** quantised matrices ****

@op("QuantMatMul", domain="tinygrad_nv", raw=True, call=True)
def matmul_quantised(call: Call, x: Value, codes: Value, scale: Value, zero: Value = None, bias: Value = None,
                     axis: int = 1, block_size: int = 0, transposed: int = 0) -> Tensor:
    """x · dequantised codes + bias (matrices.py)."""
    given, more = tensor(x), None if bias is None else tensor(bias)
    if call.node not in _matrices:
        arrays = [None if each is None else np.asarray(to_numpy(each)) for each in (codes, scale, zero)]
        _matrices[call.node] = matrix_of(arrays[0], arrays[1], arrays[2], axis, block_size,     # type: ignore[arg-type]
                                         bool(transposed))
    if (matrix := _matrices[call.node]) is not None:
        if more is not None and (more.shape, more.dtype) == (matrix.shape[:1], given.dtype):
            return quant_matmul(given, matrix, more)
        made = quant_matmul(given, matrix)
    else:
        plain = dequantize(codes, scale, zero, axis, block_size)
        made = given @ (plain.T if transposed else plain)
    return made if more is None else made + more


@op("MatMulNBits", domain=MICROSOFT, raw=True, call=True)
def matmul_n_bits(call: Call, x: Value, data: Value, scales: Value, zeros: Value = None, order: Value = None,
                  bias: Value = None, K: int = 0, N: int = 0, bits: int = 4, block_size: int = 32,
                  accuracy_level: int = 0) -> Tensor:
    """x times a matrix of blocks of codes. One that is no constant, or of no type of quant/types.py, is
    dequantised in the graph."""
    given, more = tensor(x), None if bias is None else tensor(bias)
    if call.node not in _matrices:
        constant = order is None and call.constant(1, 2, 3)
        arrays = [np.asarray(to_numpy(each)) if constant and each is not None else None
                  for each in (data, scales, zeros)]
        _matrices[call.node] = matrix_of_blocks(arrays[0], arrays[1], arrays[2], bits, N, K,    # type: ignore[arg-type]
                                                block_size) if constant else None
    if (matrix := _matrices[call.node]) is not None: return quant_matmul(given, matrix, more)
    blocks = Blocks(N, K, bits, block_size)
    made = given @ blocks.matrix(tensor(data), tensor(scales), None if zeros is None else tensor(zeros),
                                 None if order is None else tensor(order)).cast(given.dtype).T
    return made if more is None else made + more


@dataclass(frozen=True)
class Blocks:
    """The format of MatMulNBits: a matrix [n, k] of codes of 2, 4 or 8 bits, the lower first in a byte, with
    a scale for each block of `size` inputs."""
    n: int
    k: int
    bits: int
    size: int

    def matrix(self, data: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None) -> Tensor:
        """The numbers [n, k] in the scales' dtype; `order` has the block of each input. Zero points are
        codes, or of the scales' dtype. Raises `OnnxError` for other numbers of bits."""
        if self.bits not in (2, 4, 8): raise OnnxError(f"MatMulNBits of {self.bits} bits", "2, 4 or 8")
        codes, blocks = self.codes(data)[:, :self.k], -(-self.k // self.size)
        if zeros is None: points = scales.full_like(1 << (self.bits - 1)).reshape(self.n, blocks)
        elif zeros.dtype == dtypes.uint8: points = self.codes(zeros)[:, :blocks]
        else: points = zeros.reshape(self.n, blocks)
        of_input = Tensor.arange(self.k) // self.size if order is None else order
        scale, zero = (each[:, of_input] for each in (scales.reshape(self.n, blocks), points))
        return (codes.cast(scales.dtype) - zero.cast(scales.dtype)) * scale

    def codes(self, data: Tensor) -> Tensor:
        """Codes of bytes, a row for each output."""
        rows = data.reshape(self.n, -1)
        parts = [(rows >> shift) & ((1 << self.bits) - 1) for shift in range(0, 8, self.bits)]
        return Tensor.stack(*parts, dim=-1).flatten(1)


# **** norms ****

@op("SimplifiedLayerNormalization")
@op("SimplifiedLayerNormalization", domain=MICROSOFT)
def rms_norm(x: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    """x / rms(x) · scale along the last dimensions, statistics in float32."""
    dims = tuple(range(axis % x.ndim, x.ndim))
    f = x.float()
    return (f * (f.square().mean(dims, keepdim=True) + epsilon).rsqrt()).cast(x.dtype) * scale


def _total(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    """The sum that is normalised, in float32, as statistics are."""
    total = x.float() + skip.float()
    return total if bias is None else total + bias.float()


@op("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_norm(x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None,
                    bias: Tensor | None = None, epsilon: float = 1e-12) -> tuple[Tensor | None, ...]:
    """The norm of a sum, and the sum."""
    total = _total(x, skip, bias)
    made = total.layernorm(eps=epsilon).cast(x.dtype) * gamma
    return (made if beta is None else made + beta), None, None, total.cast(x.dtype)


@op("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_rms_norm(x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5
                  ) -> tuple[Tensor | None, ...]:
    """The norm of a sum, and the sum."""
    total = _total(x, skip, bias)
    return rms_norm(total, gamma.float(), epsilon=epsilon).cast(x.dtype), None, None, total.cast(x.dtype)


@op("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Tensor, alpha: float = 1.702) -> Tensor: return x * (x * alpha).sigmoid()


# **** attention ****

def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [batch, heads, sequence, size], its first 2 n dimensions rotated by cos, sin [batch, sequence, n]."""
    n = int(cos.shape[-1])
    cos, sin, rest = cos.unsqueeze(1), sin.unsqueeze(1), x[..., 2 * n:]
    a, b = (x[..., 0:2 * n:2], x[..., 1:2 * n:2]) if interleaved else (x[..., :n], x[..., n:2 * n])
    first, second = a * cos - b * sin, b * cos + a * sin
    made = Tensor.stack(first, second, dim=-1).flatten(-2) if interleaved else first.cat(second, dim=-1)
    return made.cat(rest, dim=-1) if rest.shape[-1] else made


@op("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: int = 0,
                     num_heads: int = 0, rotary_embedding_dim: int = 0, is_packed_batching: int = 0,
                     scale: float = 1.0) -> Tensor:
    """x [batch, sequence, heads · size] or [batch, heads, sequence, size], rotated by positions [batch,
    sequence], or by those that follow one number."""
    number = num_heads or (int(x.shape[-1]) // (2 * int(cos.shape[1])) if x.ndim == 3 else 0)
    given = heads(x, number)
    follow = Tensor.arange(int(given.shape[2])).unsqueeze(0)
    places = positions if positions.ndim == 2 else positions.reshape(1, 1) + follow
    made = rotate(given, cos[places], sin[places], bool(interleaved))
    return made if x.ndim == 4 else made.transpose(1, 2).flatten(2)


@op("GroupQueryAttention", domain=MICROSOFT, host=(6,))
def group_query_attention(q: Tensor, k: Tensor | None, v: Tensor | None, past_key: Tensor | None,
                          past_value: Tensor | None, lengths: Tensor, total: np.ndarray,
                          cos: Tensor | None = None, sin: Tensor | None = None,
                          positions: Tensor | None = None, bias: Tensor | None = None, num_heads: int = 0,
                          kv_num_heads: int = 0, do_rotary: int = 0, rotary_interleaved: int = 0,
                          local_window_size: int = -1, scale: float = 0.0, softcap: float = 0.0
                          ) -> tuple[Tensor, ...]:
    """Causal attention of q [batch, new, heads · size] over a past, the keys and values of which lie from the
    first place on. `lengths` are the sequences' numbers of tokens less one, with the new ones."""
    if k is None or v is None:      # packed
        size = int(q.shape[-1]) // (num_heads + 2 * kv_num_heads)
        q, k, v = q.split([num_heads * size, kv_num_heads * size, kv_num_heads * size], dim=-1)
    q, k, v = heads(q, num_heads), heads(k, kv_num_heads), heads(v, kv_num_heads)
    new = int(q.shape[2])
    have = 0 if past_key is None else int(past_key.shape[2])
    valid = lengths.reshape(-1).cast(dtypes.int32) + 1
    # of a prompt, which is padded on the right, all tokens are new
    first = (valid - new).maximum(0) if have else valid.const_like(0)
    if do_rotary and cos is not None and sin is not None:
        places = first.unsqueeze(1) + Tensor.arange(new).unsqueeze(0) if positions is None else positions
        q, k = (rotate(each, cos[places], sin[places], bool(rotary_interleaved)) for each in (q, k))
    keys = max(have, int(total.item()))
    k, v = (_append(past, each, first, keys) for past, each in ((past_key, k), (past_value, v)))
    left = local_window_size - 1 if local_window_size > 0 else -1
    mask = Masks(True, left, -1, first, valid).to_addend(new, keys, q.dtype)
    if bias is not None: mask = mask + bias
    out = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, scale=scale or None,
                                       softcap=softcap or None)
    return out.transpose(1, 2).flatten(2), k, v


def _append(past: Tensor | None, new: Tensor, first: Tensor, keys: int) -> Tensor:
    """Keys or values [batch, heads, keys, size]: those before, and from place `first` of each sequence on the
    new ones."""
    if past is None or not past.shape[2]: return new
    place = Tensor.arange(keys).reshape(1, 1, -1, 1)
    offset = place - first.reshape(-1, 1, 1, 1)
    shape = (*new.shape[:2], keys, new.shape[3])
    fresh = new.gather(2, offset.clamp(0, int(new.shape[2]) - 1).expand(shape))
    before = past.pad((None, None, (0, keys - int(past.shape[2])), None))
    return ((offset >= 0) & (offset < int(new.shape[2]))).where(fresh, before)


@op("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None,
                         padding: Tensor | None = None, added: Tensor | None = None,
                         past_key: Tensor | None = None, past_value: Tensor | None = None, num_heads: int = 0,
                         mask_filter_value: float = -10000.0, scale: float = 0.0, unidirectional: int = 0
                         ) -> tuple[Tensor, ...]:
    """Attention of q [batch, new, heads · size] over k and v, which may be in heads already."""
    if bias is not None:
        parts = bias.split([int(each.shape[-1]) if each.ndim == 3 else int(bias.shape[0]) // 3
                            for each in (q, k, v)])
        q, k, v = (each + part if each.ndim == 3 else each
                   for each, part in zip((q, k, v), parts, strict=True))
    q, k, v = (heads(each, num_heads) for each in (q, k, v))
    first = 0
    if past_key is not None and past_value is not None:
        first, k, v = int(past_key.shape[2]), past_key.cat(k, dim=2), past_value.cat(v, dim=2)
    queries, keys = int(q.shape[2]), int(k.shape[2])
    mask = added
    if padding is not None:
        seen = padding.reshape(-1, 1, 1, keys).bool() if padding.ndim == 2 else \
            Tensor.arange(keys).reshape(1, 1, 1, -1) < padding.reshape(-1, 1, 1, 1)
        hidden = seen.where(0.0, mask_filter_value).cast(q.dtype)
        mask = hidden if mask is None else mask + hidden
    if unidirectional:
        own = Masks(True, -1, -1, first, None).to_addend(queries, keys, q.dtype)
        mask = own if mask is None else mask + own
    out = scaled_dot_product_attention(q, k, v, mask, scale=scale or 1 / math.sqrt(int(q.shape[-1])))
    return out.transpose(1, 2).flatten(2), k, v
