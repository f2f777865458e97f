"""Layers that networks share: linear layers, quantised or not, embeddings, norms and activations."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from tinygrad import Tensor
from tinygrad.dtype import DType
from tinygrad.helpers import TRAINING

from tinygrad_nv import functional as F
from tinygrad_nv.quant.activations import QWeight, SparseWeight
from tinygrad_nv.quant.layouts import rows_of
from tinygrad_nv.quant.tensor import QTensor, dequantize

from .config import ModelConfig


class Adapters(Protocol):
    """Adapters of a layer (lora.py): a term that is added to its result."""

    def addend(self, x: Tensor) -> Tensor | None: ...


class Matmul(Protocol):
    """A function that multiplies in place of x Wᵀ in training (numerics/fp8.py)."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...


class Linear:
    """y = x Wᵀ + b with W of shape (out, in), as PyTorch stores it. `out` may be several projections
    stacked. Of a quantised or sparse layer `parts` stand in for W: its rows in order, quantised or not.
    `adapters` may add something in a step that has some; `training`, if there is one, multiplies in
    training."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: DType, device: str | None) -> None:
        self.weight = Tensor.empty(outputs, inputs, dtype=dtype, device=device)
        self.bias = Tensor.empty(outputs, dtype=dtype, device=device) if bias else None
        self.parts: tuple[QWeight | SparseWeight | Tensor, ...] = ()
        self.adapters: Adapters | None = None
        self.training: Matmul | None = None

    def __call__(self, x: Tensor) -> Tensor:
        more = None if self.adapters is None else self.adapters.addend(x)
        return self.multiply(x) if more is None else self.multiply(x) + more

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        if self.training is not None and TRAINING:
            made = self.training(x, self.weight)
            return made if self.bias is None else made + self.bias
        if not self.parts: return x.linear(self.weight.T, self.bias)
        if len(self.parts) == 1: return multiply(x, self.parts[0], self.bias)
        made = Tensor.cat(*(multiply(x, part) for part in self.parts), dim=-1)
        return made if self.bias is None else made + self.bias


def multiply(x: Tensor, weight: QWeight | SparseWeight | Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, of W quantised, sparse, or neither. Training does not round x: that has no gradient."""
    if isinstance(weight, Tensor): return x.linear(weight.T, bias)
    if TRAINING and isinstance(weight, QWeight): return F.quant_matmul(x, weight.matrix, bias)
    how = weight.activations
    if how is None and isinstance(weight, SparseWeight): return F.sparse_matmul(x, weight.matrix, bias)
    if isinstance(weight, QWeight) and (how is None or not weight.codes):
        return F.quant_matmul(weight.inputs(x), weight.matrix, bias, weight.int8)
    assert how is not None
    codes, scales = F.quantize(x, how.element, how.scale, weight.input_scale)
    if isinstance(weight, SparseWeight): return F.sparse_matmul(codes, weight.matrix, bias, scales, x.dtype)
    return F.scaled_matmul(codes, scales, weight.matrix, bias, x.dtype)


# a matrix, the names of its parts in a checkpoint, from the top, and the rows of each
StoredLinear: TypeAlias = tuple[Linear, tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True)
class TensorRows:
    """Rows [first, first + count) of a parameter, which are a tensor of a checkpoint."""
    tensor: Tensor
    first: int
    count: int


def normalise(x: Tensor, eps: float, squares: Tensor | None = None) -> Tensor:
    """x / rms(x), float32; `squares` is another mean of squares than x's own."""
    f = x.float()
    return f * ((f.square().mean(-1, keepdim=True) if squares is None else squares) + eps).rsqrt()


class LayerNorm:
    """(x − mean) / √(variance + eps) · w + b, in float32 (arXiv 1607.06450); without `bias` there is no b."""

    def __init__(self, size: int, eps: float, dtype: DType, device: str | None, bias: bool = True) -> None:
        self.eps, self.weight = eps, Tensor.empty(size, dtype=dtype, device=device)
        self.bias = Tensor.empty(size, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        f = x.float()
        f = f - f.mean(-1, keepdim=True)
        f = f * (f.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight.float()
        return (f if self.bias is None else f + self.bias.float()).cast(x.dtype).contiguous()


class RMSNorm:
    """x / rms(x) · (w + offset): statistics in float32 (arXiv 1910.07467). It is rounded to the dtype of x
    before the weights, or with `rounds_last` after them; an offset needs that."""

    def __init__(self, size: int, eps: float, dtype: DType, device: str | None, offset: float = 0.0,
                 rounds_last: bool = False) -> None:
        self.weight = Tensor.empty(size, dtype=dtype, device=device)
        self.eps, self.offset, self.rounds_last = eps, offset, rounds_last

    @staticmethod
    def of(size: int, config: ModelConfig, dtype: DType, device: str | None) -> RMSNorm:
        """Returns the norm of a config."""
        return RMSNorm(size, config.norm_eps, dtype, device, config.norm_offset, config.norm_rounds_last)

    def __call__(self, x: Tensor, squares: Tensor | None = None) -> Tensor:
        f = normalise(x, self.eps, squares)
        if self.rounds_last:
            weight = self.weight.float() + self.offset if self.offset else self.weight.float()
            return (f * weight).cast(x.dtype).contiguous()
        return (f.cast(x.dtype) * self.weight).contiguous()


# by their names in config.json, and by those of configs here
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + (x * 0.5 ** 0.5).erf()), "gelu_tanh": Tensor.gelu,
    "gelu_new": Tensor.gelu, "gelu_pytorch_tanh": Tensor.gelu,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(), "relu": Tensor.relu,
    "relu2": lambda x: x.relu().square(), "silu": Tensor.silu, "swish": Tensor.silu}


def activate(x: Tensor, name: str) -> Tensor:
    """The activation of a name, one of `ACTIVATIONS`, of x."""
    return ACTIVATIONS[name](x)


@dataclass(frozen=True)
class InsertedRows:
    """Rows of `table` [N, hidden] in place of tokens' embeddings: `numbers`, int32 [T], has that of each
    token, −1 for a token whose own embedding stays."""
    table: Tensor
    numbers: Tensor

    def over(self, x: Tensor) -> Tensor:
        """x (1, T, hidden) with the rows in their places."""
        rows = F.embedding(self.table, self.numbers.maximum(0)).unsqueeze(0)
        return (self.numbers >= 0).reshape(1, -1, 1).where(rows, x).contiguous()


def lookup_quantised(table: QTensor, tokens: Tensor, dtype: DType) -> Tensor:
    """Rows of a table [N, K], whose scales are of single rows, for tokens 0 … N − 1 of any shape: (…, K).
    A table in tiles or fragments is the one that the head multiplies with (quant/types.py); a row of it is in
    many places. Others have their rows in one piece. Rows are dequantised as they are read."""
    flat, count, k = tokens.flatten(), int(tokens.numel()), table.shape[1]

    def read(lines: Tensor, at: Tensor) -> Tensor: return F.embedding(lines, at.contiguous())
    given = {name: rows_of(table.type, name, data, flat, k, read) for name, data in table.buffers.items()}
    made = dequantize(replace(table.type, layout="rows"), (count, k), given, dtype)
    return made.reshape(*tokens.shape, k)
