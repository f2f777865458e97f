"""Matmuls with 2:4 sparse matrices as workloads of the part "quant" of bench/gpu/run.py.

A set's buffers are those of tinygrad_nv/quant/sparse.py, and "dense", the whole matrix [n, k] with its zeros,
for contenders and comparisons. The data are made in torch: which two of each four columns are kept is random.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tinygrad.dtype import DType, dtypes

from bench.gpu.parts import set_count
from bench.gpu.quant_data import torch_dtype
from bench.gpu.quant_workloads import compare_rows, smaller
from tinygrad_nv.quant.sparse import FIRST_TWO, UNIT, buffers
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec

BF16, F32, E4M3, INT8 = dtypes.bfloat16, dtypes.float32, dtypes.fp8e4m3, dtypes.int8
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


@dataclass(frozen=True)
class SparseWorkload:
    """x @ w.T into bfloat16, of which w is 2:4 sparse; both of bfloat16, e4m3 or int8."""
    name: str
    dtype: DType
    m: int
    n: int
    k: int

    results = ("out",)

    def __str__(self) -> str: return self.name

    @property
    def bf16(self) -> bool: return self.dtype == BF16

    @property
    def int8(self) -> bool: return self.dtype == INT8

    @property
    def spec(self) -> SparseGemmSpec:
        """Sums of int8 are int32."""
        operand = Operand(self.dtype, self.k, 1)
        total = Sum(dtypes.int32).cast(F32) if self.int8 else Sum(F32)
        return SparseGemmSpec(GemmSpec(self.m, self.n, self.k, operand, operand, Result(BF16, self.n, 1),
                                       epilogue=total.cast(BF16)))

    @property
    def work(self) -> float:
        """Operations of the dense matmul, those with 0, too: as vendors count those of sparse matrices."""
        return 2.0 * self.m * self.n * self.k

    @property
    def nbytes(self) -> float:
        """Values, metadata, activations and the result once."""
        return float(self.spec.nbytes + self.dtype.itemsize * self.m * self.k + 2 * self.m * self.n)

    def scale_down(self) -> SparseWorkload:
        """Smaller, for the emulator."""
        m, n, k = smaller(self.m, self.n, self.k)
        return replace(self, m=m, n=n, k=k)

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name."""
        import torch

        def numbers(*shape: int) -> torch.Tensor:
            if self.int8: return torch.randint(-128, 128, shape, device=device, dtype=torch.int8)
            return (torch.rand(shape, device=device) * 2 - 1).to(torch_dtype(self.dtype))

        def one() -> dict[str, Any]:
            pairs = torch.randint(len(PAIRS), (self.n, self.k // 4), device=device)
            dense, values, metadata = sparse(self.dtype, numbers(self.n, self.k), pairs)
            return {"out": torch.empty(self.m * self.n, device=device, dtype=torch.bfloat16),
                    "a": numbers(self.m * self.k), "values": values, "metadata": metadata, "dense": dense}
        return [one() for _ in range(set_count(device, self.nbytes))]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the matmul; "" when it is."""
        import torch
        wide = torch.float64 if self.int8 else torch.float32
        left, right = one["a"].view(self.m, self.k).to(wide), one["dense"].to(wide)
        # int8 is exact. Tensor cores keep 13 bits of sums of e4m3, half as many of them as of a dense matrix
        noise = {INT8: 2.0**-10, E4M3: (self.k / 128)**0.5 * 2.0**-7, BF16: self.k**0.5 * 2.0**-14}
        return compare_rows(self, one["out"], left, right, noise[self.dtype])


def sparse(dtype: DType, whole: Any, pairs: Any) -> tuple[Any, Any, Any]:
    """Returns, of a matrix [n, k], the one with zeros, `values` and `metadata` (int32), flat; of each four
    columns the two of `PAIRS` that `pairs` [n, k / 4] numbers are kept."""
    import torch
    n, k = whole.shape
    kept = torch.tensor(PAIRS, device=whole.device)[pairs]
    fours = whole.view(torch.int16 if dtype.itemsize == 2 else torch.int8).view(n, k // 4, 4)
    values = fours.gather(2, kept)
    dense = torch.zeros_like(fours).scatter_(2, kept, values)
    codes = (kept[..., 0] | kept[..., 1] << 2).int()
    return (dense.view(n, k).view(whole.dtype), values.flatten().view(whole.dtype),
            pack_codes(codes, buffers(dtype, n, k)["metadata"].shape, dtype.itemsize))


def pack_codes(codes: Any, shape: tuple[int, ...], itemsize: int) -> Any:
    """Words of codes [n, k / 4] in the lanes of tinygrad_nv/quant/sparse.py: [tiles, units, 32], flat."""
    import torch
    tiles, units, lanes = shape
    n, groups = codes.shape
    more = (0, units * UNIT // 4 - groups, 0, tiles * TILE - n)
    split = torch.nn.functional.pad(codes, more, value=FIRST_TWO)
    halves = (4, 4) if itemsize == 2 else (2, 8)
    split = split.view(tiles, 2, 8, units, *halves).permute(0, 3, 2, 4, 1, 5).reshape(tiles, units, lanes, 8)
    words = torch.zeros(tiles, units, lanes, dtype=torch.int32, device=codes.device)
    for i in range(8): words |= split[..., i] << (4 * i)
    return words.flatten()
