"""Matmuls with quantised matrices as workloads of the part "quant" of bench/gpu/run.py."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tinygrad.dtype import dtypes

from bench.gpu.compare import spread_numbers
from bench.gpu.gemm import AT_ONCE, CHECKED
from bench.gpu.parts import set_count
from bench.gpu.quant_data import buffers_of, dequantise
from tinygrad_nv.quant import types
from tinygrad_nv.quant.types import QType, per_channel_scale, per_group_scale
from tinygrad_nv.quant.types import nbytes as nbytes_of
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec

BF16, F32 = dtypes.bfloat16, dtypes.float32
TYPES = {"int4": QType(types.UINT4, per_group_scale(128, BF16), shift=8),
         "int8": types.INT8 @ per_channel_scale(0, BF16), "fp8": types.E4M3 @ per_channel_scale(0, BF16)}


@dataclass(frozen=True)
class WeightOnly:
    """Dense rows of bfloat16 times a matrix of a type."""
    name: str
    type: QType
    m: int
    n: int
    k: int

    results = ("out",)

    def __str__(self) -> str: return self.name

    @property
    def spec(self) -> QuantGemmSpec:
        """x @ w.T into bfloat16."""
        gemm = GemmSpec(self.m, self.n, self.k, Operand(BF16, self.k, 1), Operand(BF16, self.k, 1),
                        Result(BF16, self.n, 1))
        return QuantGemmSpec(gemm, replace(self.type, layout="fragments"))

    @property
    def work(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.n * self.k

    @property
    def nbytes(self) -> float: return nbytes_of(self.type, self.n, self.k) + 2.0 * self.m * (self.n + self.k)

    def scale_down(self) -> WeightOnly:
        """Smaller, for the emulator: few rows stay as they are."""
        m, n, k = smaller(self.m, self.n, self.k)
        return replace(self, m=m, n=n, k=k)

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name, as many sets as exceed twice the L2 cache. `rows`: the matrix's codes as bytes
        [n, k] and its other buffers in rows, for contenders and comparisons."""
        import torch

        def one() -> dict[str, Any]:
            laid, rows = buffers_of(self.type, self.n, self.k, device)
            return {"out": torch.empty(self.m * self.n, device=device, dtype=torch.bfloat16),
                    "a": (torch.rand(self.m * self.k, device=device) * 2 - 1).bfloat16(), **laid,
                    **{f"rows {name}": data for name, data in rows.items()}}
        return [one() for _ in range(set_count(device, self.nbytes))]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the matmul; "" when it is."""
        # elements may have been rounded to bfloat16, a relative 2^-9, which grows with the root of K; and
        # scales before that, those of a group all in one direction
        rounded = 1 if self.type.scale.dtype == BF16 else 2
        return compare_rows(self, one["out"], one["a"].view(self.m, -1), dequantise(self.type, one, self.k),
                            rounded * self.k**0.5 * 2.0**-8, rounded * 2.0**-8)


@dataclass(frozen=True)
class CodesWorkload:
    """Codes times codes, with a scale for each row of both."""
    name: str
    element: types.Element
    m: int
    n: int
    k: int

    results = ("out",)

    def __str__(self) -> str: return self.name

    @property
    def int8(self) -> bool: return self.element == types.INT8

    @property
    def spec(self) -> GemmSpec:
        """Spec as patterns/scaled_gemm has it: scales of outputs, then of rows, in the epilogue."""
        operand = Operand(self.element.dtype, self.k, 1)
        total = Sum(dtypes.int32 if self.int8 else F32).cast(F32) * Load(0, F32, 0, 1) * Load(1, F32, 1, 0)
        return GemmSpec(self.m, self.n, self.k, operand, operand, Result(BF16, self.n, 1),
                        epilogue=total.cast(BF16))

    @property
    def work(self) -> float:
        """Operations."""
        return 2.0 * self.m * self.n * self.k

    @property
    def nbytes(self) -> float:
        return float(self.k * (self.m + self.n) + 4 * (self.m + self.n) + 2 * self.m * self.n)

    def scale_down(self) -> CodesWorkload:
        """Smaller, for the emulator."""
        m, n, k = smaller(self.m, self.n, self.k)
        return replace(self, m=m, n=n, k=k)

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name."""
        import torch

        def codes(rows: int) -> torch.Tensor:
            if self.int8: return torch.randint(-128, 128, (rows * self.k,), device=device, dtype=torch.int8)
            return (torch.rand(rows * self.k, device=device) * 2 - 1).to(torch.float8_e4m3fn)

        def scales(rows: int) -> torch.Tensor:
            return (torch.rand(rows, device=device) + 0.5) / (128 if self.int8 else 1)
        return [{"out": torch.empty(self.m * self.n, device=device, dtype=torch.bfloat16),
                 "a": codes(self.m), "b": codes(self.n), "x0": scales(self.n), "x1": scales(self.m)}
                for _ in range(set_count(device, self.nbytes))]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the matmul; "" when it is."""
        import torch
        wide = torch.float64 if self.int8 else torch.float32
        left, right = (one[name].view(rows, self.k).to(wide) * one[scale].to(wide)[:, None]
                       for name, scale, rows in (("a", "x1", self.m), ("b", "x0", self.n)))
        # tensor cores sum int8 exactly; of e4m3 they keep 13 bits of sums (gpu/gemm.py)
        return compare_rows(self, one["out"], left, right,
                            2.0**-10 if self.int8 else 1.5**2 * (self.k / 128)**0.5 * 2.0**-7)


def smaller(m: int, n: int, k: int) -> tuple[int, int, int]:
    """Extents for the emulator; K stays a multiple of a K-quant's 256."""
    return m if m <= 64 else max(m // 32, 64), max(n // 64, 64), max(k // 4096 * 256, 256)


def compare_rows(shape: Any, out: Any, left: Any, right: Any, noise: float, relative: float = 2.0**-8) -> str:
    """One of 16 rows by float64, then every row by float32; a result is rounded to bfloat16 at the end."""
    import torch
    for rows, kind in ((spread_numbers(shape.m, CHECKED), torch.float64),
                       (list(range(shape.m)), torch.float32)):
        for first in range(0, len(rows), AT_ONCE):
            some = rows[first:first + AT_ONCE]
            exact = left[some].to(kind) @ right.to(kind).T
            got = out.view(shape.m, -1)[some].to(kind)
            bound = relative * exact.abs() + noise
            off = (got - exact).abs() - bound
            if bool((off <= 0).all()): continue
            row, column = divmod(int(off.nan_to_num(torch.inf).argmax()), shape.n)
            return (f"row {some[row]}, column {column}: {got[row, column].item():g}, exactly "
                    f"{exact[row, column].item():g}, allowed {bound[row, column].item():g}")
    return ""
