"""The part "gemm" of bench/gpu/run.py: TFLOP/s of ours, torch (cuBLAS), Triton, torch.compile, tinygrad.

x @ w.T, bfloat16, operands uniform in [-1, 1]: cubes, the layers of Llama 8B and 70B, and few rows; then gate
and up with silu between them, which torch.compile fuses too; then operands of 8 bits (e4m3, scales of 1; or
of 1 x 128 of x and 128 x 128 of w).
GB/s counts each operand and the result once. Contenders are in gemm_contenders.py.

Every row of a result is compared with float32, one of 16 with float64.

With --emulate: each matmul scaled down on the emulator, two sets in turns, whose results must be right, and
what the cost model predicts of the whole.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tinygrad.dtype import dtypes

from bench.gpu import gemm_contenders  # noqa: F401 (registers them)
from bench.gpu.compare import check_on_emulator, spread_numbers
from bench.gpu.launch import GemmLauncher
from bench.gpu.parts import (
    Column,
    NotMeasured,
    Options,
    Row,
    emulation,
    set_count,
    timing_part,
    verdict_row,
    workloads,
)
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.expression import Sum, silu
from tinygrad_nv.tile.gemm.cost import predict
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, BlockScales, ScaledGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

LLAMA = {"8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
         "70B": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)}}
FEW = (1, 2, 4, 8, 16, 32, 64)
BLOCK_SIZES = ((4096, 7168, 16384), (4096, 4096, 7168), (128, 7168, 16384), (64, 7168, 2048))
FP8_SIZES = ((8192, 8192, 8192), (4096, 4096, 4096), (4096, 7168, 16384), (4096, 28672, 4096),
             (64, 7168, 16384))
CHECKED = 16        # one of so many rows is compared with float64
AT_ONCE = 1024      # rows


@dataclass(frozen=True)
class GemmWorkload:
    """A product with a name; `gated`: silu(x @ gate.T) * (x @ up.T), with gate and up in one matrix; `fp8`:
    operands are e4m3; `blocks`: with scales of 1 x 128 and 128 x 128, too."""
    name: str
    m: int
    n: int
    k: int
    gated: bool = False
    fp8: bool = False
    blocks: bool = False

    results = ("out",)

    def __str__(self) -> str: return self.name

    @property
    def spec(self) -> GemmSpec:
        """x @ w.T into bfloat16."""
        kind, ends = dtypes.bfloat16, {}
        if self.gated:
            ends = {"parts": 2, "part": self.n * self.k,
                    "epilogue": (silu(Sum()) * Sum(dtypes.float32, 1)).cast(kind)}
        operand = Operand(dtypes.fp8e4m3 if self.fp8 else kind, self.k, 1)
        if self.blocks:
            return ScaledGemmSpec(self.m, self.n, self.k, operand, operand, Result(kind, self.n, 1),
                                  a_scale=BlockScales(1, self.groups),
                                  b_scale=BlockScales(GROUP, self.groups))
        return GemmSpec(self.m, self.n, self.k, operand, operand, Result(kind, self.n, 1),
                        **ends)  # type: ignore[arg-type]

    @property
    def groups(self) -> int:
        """Scales along K."""
        return -(-self.k // GROUP)

    @property
    def columns(self) -> int:
        """Rows of the weight."""
        return self.n * (2 if self.gated else 1)

    @property
    def work(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.columns * self.k

    @property
    def nbytes(self) -> float:
        """Each operand and the result once."""
        return (1.0 if self.fp8 else 2.0) * self.k * (self.m + self.columns) + 2.0 * self.m * self.n

    def scale_down(self, by: int = 16) -> GemmWorkload:
        """Smaller, for the emulator: few rows stay as they are."""
        m = self.m if self.m <= 64 else max(self.m // by, 64)
        return replace(self, m=m, n=max(self.n // by, 64), k=max(self.k // by, 256))

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name, as many sets as exceed twice the L2 cache."""
        import torch
        kind = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        def uniform(size: int) -> torch.Tensor:
            return (torch.rand(size, device=device) * 2 - 1).to(kind)
        def scales(rows: int) -> torch.Tensor: return torch.rand(rows * self.groups, device=device) + 0.5
        more = {"a_scale": self.m, "b_scale": -(-self.n // GROUP)} if self.blocks else {}
        return [{"out": torch.empty(self.m * self.n, device=device, dtype=torch.bfloat16),
                 "a": uniform(self.m * self.k), "b": uniform(self.columns * self.k),
                 **{name: scales(rows) for name, rows in more.items()}}
                for _ in range(set_count(device, self.nbytes))]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the product; "" when it is: one of 16 rows by float64,
        then every row by float32, whose sums of these operands are a tenth of the bound off at most."""
        import torch
        for rows, kind in ((spread_numbers(self.m, CHECKED), torch.float64),
                           (list(range(self.m)), torch.float32)):
            for first in range(0, len(rows), AT_ONCE):
                if words := self._unlike(one, rows[first:first + AT_ONCE], kind): return words
        return ""

    def _unlike(self, one: dict[str, Any], rows: list[int], kind: Any) -> str:
        import torch
        left, right = one["a"].view(self.m, -1)[rows].to(kind), one["b"].view(self.columns, -1).to(kind)
        if self.blocks:
            def spread(name: str, many: int) -> torch.Tensor:
                each = one[name].view(-1, self.groups).to(kind).repeat_interleave(many, 0)
                return each.repeat_interleave(GROUP, 1)[:, :self.k]
            left, right = left * spread("a_scale", 1)[rows], right * spread("b_scale", GROUP)[:self.n]
        sums = left @ right.T
        # fp8: tensor cores keep 13 bits of sums of at most 16, in 4 instructions for each 128 terms
        noise = (self.k / 128)**0.5 * 2.0**-7 if self.fp8 else self.k**0.5 * 2.0**-14
        if self.blocks: noise *= 1.5**2     # of the largest scales
        exact, bound = sums, 2.0**-8 * sums.abs() + noise
        if self.gated:
            gate, up = sums[:, :self.n], sums[:, self.n:]
            exact = torch.nn.functional.silu(gate) * up
            bound = 2.0**-6 * exact.abs() + (2.0**-8 + noise) * (1 + gate.abs() + up.abs())
        got = one["out"].view(self.m, -1)[rows].to(kind)
        off = (got - exact).abs() - bound
        if bool((off <= 0).all()): return ""
        row, column = divmod(int(off.argmax()), self.n)
        return (f"row {rows[row]}, column {column}: {got[row, column].item():g}, exactly "
                f"{exact[row, column].item():g}, allowed {bound[row, column].item():g}")


@workloads("gemm")
def shapes() -> Iterator[GemmWorkload]:
    """All products."""
    for size in (8192, 4096, 6144, 2048, 1024): yield GemmWorkload(f"{size}³", size, size, size)
    for m, n, k in FP8_SIZES: yield GemmWorkload(f"fp8 {m}x{n}x{k}", m, n, k, fp8=True)
    for m, n, k in BLOCK_SIZES:
        yield GemmWorkload(f"fp8, block scales {m}x{n}x{k}", m, n, k, fp8=True, blocks=True)
    for model, sizes in LLAMA.items():
        for layer, (n, k) in sizes.items():
            for m in (4096, *FEW): yield GemmWorkload(f"Llama {model} {layer} M={m}", m, n, k)
    for model, sizes in LLAMA.items():
        n, k = sizes["gate_up"]
        for m in (4096, 1, 16): yield GemmWorkload(f"Llama {model} gate_up silu M={m}", m, n // 2, k, True)


@emulation("gemm")
def run_emulated(shape: Any, options: Options) -> Row:
    """The product scaled down on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, arch = shape.scale_down(), options.arch
    schedule, whole = choose(small.spec, GPU(arch)), choose(shape.spec, GPU(arch))
    if schedule is None or whole is None: raise NotMeasured("no schedule of ours")
    driver = EmulatedDriver(arch, seed=options.seed)
    made = TABLE.build(small.spec, schedule, GPU(arch, driver.properties.sm_count, driver.clusters))
    launcher = GemmLauncher(driver, made)
    wrong = check_on_emulator(small, driver, partial(launcher.bind_launch, small.spec))
    predicted = predict(shape.spec, whole, arch)
    words = f"{whole}, {1e6 * predicted.seconds:.1f} µs, {predicted.bound}"
    return {**verdict_row(wrong, str(schedule), f"{schedule}; predicted of the whole: {words}"),
            "predicted_s": predicted.seconds}


timing_part("gemm", "matmuls, bfloat16 and fp8, x @ w.T", Column("TFLOP/s"), expected_s=12.0)
