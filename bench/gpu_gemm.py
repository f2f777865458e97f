"""The part "gemm" of bench/gpu.py: TFLOP/s of ours, torch (cuBLAS), Triton, torch.compile, tinygrad.

x @ w.T, bfloat16, operands uniform in [-1, 1]: cubes, the layers of Llama 8B and 70B, and few rows; then gate
and up with silu between them, which torch.compile fuses too. GB/s counts each operand and the result once.
Contenders are in gemm_contenders.py.

With --emulate: what the emulator counts of each product scaled down, whose result must be right, and what the
cost model predicts of the whole.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gemm_contenders  # noqa: F401 (registers them)
from gpu_parts import MOST_SETS, Column, Options, Row, Run, emulated, timing_part, workloads
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.cost import predict
from tinygrad_nv.tile.expression import Sum, silu
from tinygrad_nv.tile.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.templates import build

LLAMA = {"8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
         "70B": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)}}
FEW = (1, 2, 4, 8, 16, 32, 64)
CHECKED = 64        # rows that are compared with float64


@dataclass(frozen=True)
class Shape:
    """A product with a name; `gated`: silu(x @ gate.T) * (x @ up.T), with gate and up in one matrix."""
    name: str
    m: int
    n: int
    k: int
    gated: bool = False

    def __str__(self) -> str: return self.name

    @property
    def spec(self) -> GemmSpec:
        """x @ w.T of bfloat16."""
        kind, ends = dtypes.bfloat16, {}
        if self.gated:
            ends = {"parts": 2, "part": self.n * self.k,
                    "epilogue": (silu(Sum()) * Sum(dtypes.float32, 1)).cast(kind)}
        return GemmSpec(self.m, self.n, self.k, Operand(kind, self.k, 1), Operand(kind, self.k, 1),
                        Result(kind, self.n, 1), **ends)  # type: ignore[arg-type]

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
        return 2.0 * (self.m * self.k + self.columns * self.k + self.m * self.n)

    def scaled(self, by: int = 16) -> Shape:
        """Smaller, for the emulator: few rows stay as they are."""
        m = self.m if self.m <= 64 else max(self.m // by, 64)
        return Shape(self.name, m, max(self.n // by, 64), max(self.k // by, 256), self.gated)

    def given(self, device: str) -> list[dict[str, Any]]:
        """Storages by name, as many sets as exceed twice the L2 cache."""
        import torch
        l2 = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
        def uniform(size: int) -> torch.Tensor:
            return (torch.rand(size, device=device) * 2 - 1).bfloat16()
        return [{"out": torch.empty(self.m * self.n, device=device, dtype=torch.bfloat16),
                 "a": uniform(self.m * self.k), "b": uniform(self.columns * self.k)}
                for _ in range(min(MOST_SETS, max(2, int(2 * l2 // self.nbytes) + 1)))]

    def wrong(self, given: list[dict[str, Any]], run: Run) -> str:
        """Set 0 against float64, on a few rows: as near as bfloat16 allows, every element written."""
        import torch
        given[0]["out"].fill_(torch.nan)
        run(0)
        return self.unlike(given[0])

    def unlike(self, given: dict[str, Any]) -> str:
        """How the result in these storages is not the product; "" when it is."""
        import torch
        rows = min(self.m, CHECKED)
        sums = given["a"].view(self.m, -1)[:rows].double() @ given["b"].view(self.columns, -1).double().T
        noise = self.k**0.5 * 2.0**-14
        exact, bound = sums, 2.0**-8 * sums.abs() + noise
        if self.gated:
            gate, up = sums[:, :self.n], sums[:, self.n:]
            exact = torch.nn.functional.silu(gate) * up
            bound = 2.0**-6 * exact.abs() + (2.0**-8 + noise) * (1 + gate.abs() + up.abs())
        got = given["out"].view(self.m, -1)
        if bool(got.isnan().any()): return "elements of the result were not written"
        off = (got[:rows].double() - exact).abs()
        if bool((off <= bound).all()): return ""
        at = int((off - bound).argmax())
        return (f"element {at}: {got[:rows].flatten()[at].item():g}, exactly {exact.flatten()[at].item():g}, "
                f"allowed {bound.flatten()[at].item():g}")


@workloads("gemm")
def shapes() -> Iterator[Shape]:
    """All products."""
    for size in (8192, 4096, 6144, 2048, 1024): yield Shape(f"{size}³", size, size, size)
    for model, sizes in LLAMA.items():
        for layer, (n, k) in sizes.items():
            for m in (4096, *FEW): yield Shape(f"Llama {model} {layer} M={m}", m, n, k)
    for model, sizes in LLAMA.items():
        n, k = sizes["gate_up"]
        for m in (4096, 1, 16): yield Shape(f"Llama {model} gate_up silu M={m}", m, n // 2, k, True)


@emulated("gemm")
def counted(shape: Any, options: Options) -> Row:
    """The product scaled down on the emulated driver."""
    from gemm_launch import Launcher

    from tinygrad_nv.runtime.emulated import EmulatedDriver
    small, arch = shape.scaled(), options.arch
    schedule, whole = choose(small.spec, arch), choose(shape.spec, arch)
    assert schedule is not None
    assert whole is not None
    driver = EmulatedDriver(arch, seed=options.seed)
    given = small.given("cpu")[0]
    addresses = {name: driver.alloc(tensor.nbytes) for name, tensor in given.items()}
    for name in ("a", "b"): driver.copy_in(addresses[name], memoryview(_bytes(given[name])))
    Launcher(driver, build(small.spec, schedule, arch)).bound(small.spec, addresses)(None)
    out = bytearray(given["out"].nbytes)
    driver.copy_out(memoryview(out), addresses["out"])
    given["out"].view(-1).copy_(_tensor(out))
    guess, wrong = predict(shape.spec, whole, arch), small.unlike(given)
    return {"status": "disagrees" if wrong else "emulated", "schedule": str(schedule),
            "why": f"ours: {wrong}" if wrong else f"{schedule}; predicted of the whole: {whole}, "
            f"{1e6 * guess.seconds:.1f} µs, {guess.bound}", "predicted_s": guess.seconds}


def _bytes(tensor: Any) -> bytes:
    import torch
    return bytes(tensor.view(torch.uint8).numpy())


def _tensor(data: bytearray) -> Any:
    import torch
    return torch.frombuffer(data, dtype=torch.bfloat16)


timing_part("gemm", "matrix products, bfloat16, x @ w.T", Column("TFLOP/s"), expected_s=12.0)
