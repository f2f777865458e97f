"""Inputs of a layer, quantised before they are multiplied: what they are rounded to, in plain tinygrad.

    int8    s = amax / 127.5, x ≈ clamp(round(x / s), −128, 127) · s        ties to even
    e4m3    s = amax / 448, x ≈ e4m3(x / s) · s

amax is the largest of a token, of a group of a token's inputs, or of all; a static scale s is given instead.
Computed in float32. As compressed-tensors 0.20 has it, and transformers runs its checkpoints.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinygrad import Tensor, dtypes

from tinygrad_nv.quant.fp8 import quotient
from tinygrad_nv.quant.sparse import SparseTensor
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import Scale

if TYPE_CHECKING:
    from tinygrad_nv.quant.readers.reader import Activations  # NumPy

E4M3_MAX, E4M3_LEAST = 448.0, 2.0 ** -6     # the largest, and the smallest that is not subnormal
TINY = 2.0 ** -100                          # the scale of zeros


@dataclass(frozen=True)
class QWeight:
    """A layer's matrix, and how its inputs are quantised; a static scale in `input_scale`. `int8`: kernels
    may round inputs, as llama.cpp does for its formats. `codes`: codes of inputs and of the matrix are
    multiplied, not what they stand for."""
    matrix: QTensor
    activations: Activations | None = None
    input_scale: float | None = None
    int8: bool = False
    codes: bool = False

    def inputs(self, x: Tensor) -> Tensor:
        """Returns the rounded left operand: x (…, K), in its dtype."""
        if self.activations is None: return x
        return round_activations(x, self.activations, self.input_scale)


@dataclass(frozen=True)
class StackWeight:
    """Matrices of a layer's experts, and how their inputs are rounded. `int8` and `codes` as of a
    `QWeight`."""
    matrix: QStack
    activations: Activations | None = None
    int8: bool = False
    codes: bool = False

    def inputs(self, x: Tensor) -> Tensor:
        """Returns the rounded left operand: x (…, K), in its dtype."""
        return x if self.activations is None else round_activations(x, self.activations)


@dataclass(frozen=True)
class SparseWeight:
    """A layer's 2:4 sparse matrix; of 8-bit codes with how its inputs are quantised, and a static scale."""
    matrix: SparseTensor
    activations: Activations | None = None
    input_scale: float | None = None


def round_activations(x: Tensor, how: Activations, scale: float | None = None) -> Tensor:
    """x (…, K) rounded to elements of `how`, in x's dtype."""
    made, s = _scale(x, how.element, how.scale, scale)
    return _in_rows(made * s, x).cast(x.dtype).contiguous()


def quantize_activations(x: Tensor, element: str, block: Scale,
              scale: Tensor | float | None = None) -> tuple[Tensor, Tensor]:
    """x (…, K) as codes of the same shape, int8 or the bits of e4m3 in uint8, and float32 scales: of each row
    or each `block.columns` of one, (…, blocks); of a whole tensor, or the one that is given, (1, …)."""
    made, s = _scale(x, element, block, scale)
    codes = made.cast(dtypes.int8) if element == "int8" else e4m3_bits(made)
    codes = _in_rows(codes, x).contiguous()
    return codes, s.reshape((1,) * x.ndim) if s.numel() == 1 else s.reshape(*x.shape[:-1], -1)


def _in_rows(blocks: Tensor, x: Tensor) -> Tensor:
    """Blocks (…, blocks, columns) as rows of x, without what the last block has more."""
    return blocks.reshape(*x.shape[:-1], -1)[..., :x.shape[-1]]


def _scale(x: Tensor, element: str, block: Scale, scale: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """float32 numbers of the element, (…, blocks, K / blocks), and the scales of them. Zeros fill the last
    block."""
    columns = block.columns or int(x.shape[-1])
    filled = x.float().pad((None,) * (x.ndim - 1) + ((0, -x.shape[-1] % columns),))
    parts = filled.reshape(*x.shape[:-1], -1, columns)
    axes = (-1,) if block.rows else tuple(range(parts.ndim))
    most = 127.5 if element == "int8" else E4M3_MAX
    if scale is None:
        s = quotient(parts.abs().max(axes, keepdim=True), Tensor(most, dtype=dtypes.float32, device=x.device))
    elif isinstance(scale, Tensor): s = scale.reshape((1,) * parts.ndim)
    else: s = Tensor(scale, dtype=dtypes.float32, device=x.device)
    s = s.maximum(TINY).contiguous()
    # not by a reciprocal, a unit off: the largest number of each token, −127.5, lies between two integers
    q = quotient(parts, s)
    return (q.round().clamp(-128, 127) if element == "int8" else to_e4m3(q)), s


def to_e4m3(x: Tensor) -> Tensor:
    """float32 rounded to the nearest e4m3, ties to even, clamped to ±448; float32."""
    clamped = x.clamp(-E4M3_MAX, E4M3_MAX)
    bits = clamped.bitcast(dtypes.uint32)
    # 20 of 23 bits of the mantissa go; what is carried reaches the exponent by itself
    kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    small = (clamped * 512).round() / 512
    return (clamped.abs() < E4M3_LEAST).where(small, kept.bitcast(dtypes.float32))


def e4m3_bits(x: Tensor) -> Tensor:
    """The codes, in uint8, of float32 numbers that e4m3 has."""
    bits = x.bitcast(dtypes.uint32)
    small = x.abs() < E4M3_LEAST
    magnitude = small.where((x.abs() * 512).cast(dtypes.uint32), ((bits & 0x7FFFFFFF) >> 20) - (120 << 3))
    return (((bits >> 24) & 128) | magnitude).cast(dtypes.uint8)
