"""Matrix products on a GPU: TFLOP/s and GB/s of ours, torch (cuBLAS), Triton and tinygrad alone.

By NVIDIA's protocol: operands uniform in [-1, 1], buffers taken in turns that together exceed twice the L2
cache, warmed until the power is steady (about 3 s), more than 1000 products of each contender or the time
budget. Contenders take turns in one run, a burst each; the ratio to cuBLAS is of bursts beside each other,
with its spread. x @ w.T, bfloat16: cubes, the layers of Llama 8B and 70B, and few rows. GB/s counts each
operand and the result once.

Without a GPU nothing is timed (exit code 2); `--emulate` then shows, for the same products scaled down, what
the emulator counts and, for the full size, what the cost model predicts.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gemm_cuda import NEEDED, architecture, missing
from measure import RESULTS, each, save, spread, table
from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.assemble import ARCHITECTURES
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.cost import predict
from tinygrad_nv.tile.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.templates import build

WARM_S, STEADY = 3.0, 0.02          # at least; the last five readings of power are as near as this
BURST_S, LEAST = 0.02, 1000         # a turn of one contender; products of each, unless time is up
LLAMA = {"8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
         "70B": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)}}
FEW = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Shape:
    """A product with a name."""
    name: str
    m: int
    n: int
    k: int

    def __str__(self) -> str: return self.name

    @property
    def spec(self) -> GemmSpec:
        """x @ w.T of bfloat16."""
        kind = dtypes.bfloat16
        return GemmSpec(self.m, self.n, self.k, Operand(kind, self.k, 1), Operand(kind, self.k, 1),
                        Result(kind, self.n, 1))

    @property
    def nbytes(self) -> int:
        """Each operand and the result once."""
        return 2 * (self.m * self.k + self.n * self.k + self.m * self.n)

    def scaled(self, by: int = 16) -> Shape:
        """Smaller, for the emulator: few rows stay as they are."""
        m = self.m if self.m <= 64 else max(self.m // by, 64)
        return Shape(self.name, m, max(self.n // by, 64), max(self.k // by, 256))


def shapes(only: str) -> list[Shape]:
    """Those whose name contains `only`."""
    found = [Shape(f"{size}³", size, size, size) for size in (1024, 2048, 4096, 6144, 8192)]
    layers = [(f"Llama {model} {layer}", n, k) for model, sizes in LLAMA.items()
              for layer, (n, k) in sizes.items()]
    found += [Shape(f"{name} M={m}", m, n, k) for name, n, k in layers for m in (4096, *FEW)]
    return [shape for shape in found if only in shape.name]


# **** on a GPU ****

def buffers(shape: Shape) -> list[dict[str, torch.Tensor]]:
    """Operands and results, as many sets as exceed twice the L2 cache."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = min(64, max(2, 2 * l2 // shape.nbytes + 1))
    def uniform(size: int) -> torch.Tensor:
        return (torch.rand(size, device="cuda") * 2 - 1).bfloat16()
    return [{"out": torch.empty(shape.m * shape.n, device="cuda", dtype=torch.bfloat16),
             "a": uniform(shape.m * shape.k), "b": uniform(shape.n * shape.k)} for _ in range(count)]


def burst(run: Callable[[int], None], sets: int, count: int) -> float:
    """Seconds of one product, of `count` in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for i in range(count): run(i % sets)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


class Meter:
    """Power and clocks by NVML; zeros without nvidia-ml-py."""

    def __init__(self) -> None:
        self.nvml: Any = import_module("pynvml") if find_spec("pynvml") else None
        if self.nvml is None: return
        self.nvml.nvmlInit()
        self.handle = self.nvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())

    def watts(self) -> float:
        """What the GPU takes now."""
        return self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3 if self.nvml else 0.0

    def clocks(self) -> dict[str, int]:
        """MHz."""
        if not self.nvml: return {}
        ask = self.nvml.nvmlDeviceGetClockInfo
        return {"sm_mhz": ask(self.handle, self.nvml.NVML_CLOCK_SM),
                "memory_mhz": ask(self.handle, self.nvml.NVML_CLOCK_MEM)}


def warmed(run: Callable[[int], None], sets: int, count: int, meter: Meter) -> float:
    """Runs until power is steady, at most five times as long as it should take; the last reading."""
    begun, readings = time.perf_counter(), [0.0]
    while (spent := time.perf_counter() - begun) < 5 * WARM_S:
        burst(run, sets, count)
        readings = [*readings[-4:], meter.watts()]
        if spent > WARM_S and max(readings) - min(readings) <= STEADY * max(readings): break
    return readings[-1]


def compared(shape: Shape, budget_s: float, meter: Meter, alone: bool) -> dict[str, Any]:
    """Every contender on one product, in turns."""
    import gemm_contenders as contenders
    given, arch = buffers(shape), architecture()
    mine, schedule = contenders.ours(shape.spec, given, arch)
    runs = {"ours": mine, "torch": contenders.cublas(shape.spec, given)}
    agree(shape, given, runs)
    tried = contenders.triton_runs(shape.spec, given, arch)
    trials = {name: min(burst(run, len(given), 10) for _ in range(3)) for name, run in tried.items()}
    quickest = min(trials, key=lambda name: trials[name], default="")
    if quickest: runs["Triton"] = tried[quickest]
    counts = {name: max(1, round(BURST_S / burst(run, len(given), 10))) for name, run in runs.items()}
    watts = warmed(mine, len(given), counts["ours"], meter)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    begun = time.perf_counter()
    while len(seconds["ours"]) < 5 or (time.perf_counter() - begun < budget_s and any(
            len(done) * counts[name] < LEAST for name, done in seconds.items())):
        for name, run in runs.items(): seconds[name].append(burst(run, len(given), counts[name]))
    clocks = meter.clocks()
    if alone: seconds["tinygrad"] = contenders.tinygrad_alone(shape.m, shape.n, shape.k, min(budget_s, 2.0))
    return {"m": shape.m, "n": shape.n, "k": shape.k, "schedule": str(schedule), "triton": quickest,
            "predicted_s": predict(shape.spec, schedule, arch).seconds, "watts": watts, **clocks,
            "products": {name: len(done) * counts.get(name, 10) for name, done in seconds.items()},
            "seconds": seconds}


def agree(shape: Shape, given: list[dict[str, torch.Tensor]], runs: dict[str, Callable[[int], None]]) -> None:
    """Ours is as near to float64 (on a few rows) as the rounding of bfloat16 allows."""
    rows = min(shape.m, 64)
    a, b = given[0]["a"].view(shape.m, -1)[:rows].double(), given[0]["b"].view(shape.n, -1).double()
    exact = a @ b.T
    for name, run in runs.items():
        given[0]["out"].fill_(torch.nan)
        run(0)
        got = given[0]["out"].view(shape.m, -1)[:rows].double()
        bound = 2.0**-8 * exact.abs() + shape.k**0.5 * 2.0**-14
        if not bool(((got - exact).abs() <= bound).all()): raise SystemExit(f"{shape.name}: {name} is wrong")


def rates(shape: Shape, seconds: float) -> tuple[float, float]:
    """TFLOP/s and GB/s."""
    return shape.spec.flops / seconds / 1e12, shape.nbytes / seconds / 1e9


HEADER = ["", "ours TFLOP/s", "GB/s", "torch TFLOP/s", "Triton", "tinygrad", "ours / torch", "spread",
          "schedule"]


def row(shape: Shape, result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    seconds = result["seconds"]
    tflops = {name: f"{rates(shape, median(done))[0]:.1f}" for name, done in seconds.items() if done}
    ratios = [theirs / mine for mine, theirs in zip(seconds["ours"], seconds["torch"], strict=True)]
    return [shape.name, tflops["ours"], f"{rates(shape, median(seconds['ours']))[1]:.0f}", tflops["torch"],
            tflops.get("Triton", ""), tflops.get("tinygrad", ""), f"{median(ratios):.3f}", spread(ratios),
            result["schedule"]]


def plotted(results: dict[str, dict[str, Any]], path: Path) -> None:
    """The ratio to cuBLAS of every product, with its spread."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.22 * len(results)))
    for i, result in enumerate(results.values()):
        pairs = zip(result["seconds"]["ours"], result["seconds"]["torch"], strict=True)
        ratios = [theirs / mine for mine, theirs in pairs]
        axes.plot([min(ratios), max(ratios)], [i, i], color="tab:green", linewidth=1)
        axes.plot([median(ratios)], [i], "o", color="tab:green", markersize=4)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_yticks(range(len(results)), list(results), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("speed relative to cuBLAS (torch), bfloat16")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def timed(arguments: argparse.Namespace) -> None:
    """Everything on the GPU, and the files."""
    meter, results = Meter(), {}
    for shape in shapes(arguments.only):
        results[shape.name] = compared(shape, arguments.budget, meter, not arguments.without_tinygrad)
        print(table(HEADER, [row(shape, results[shape.name])]), flush=True)
    print(table(HEADER, [row(shape, results[shape.name]) for shape in shapes(arguments.only)]))
    gpu = torch.cuda.get_device_name()
    slug = gpu.lower().replace("nvidia ", "").replace(" ", "-")
    save(f"gemm-{slug}", {"gpu": gpu, "cuda": torch.version.cuda, "torch": torch.__version__,
                          "driver": driver(meter), "results": results})
    plotted(results, RESULTS / f"gemm-{slug}.png")


def driver(meter: Meter) -> str:
    """The driver's version."""
    return str(meter.nvml.nvmlSystemGetDriverVersion()) if meter.nvml else ""


# **** without one ****

def emulated(only: str, arch: str) -> Iterator[list[str]]:
    """What the emulator counts of each product scaled down, and what the cost model predicts of the whole."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "emu"))
    case = import_module("gemm_case")
    for shape in each(list(shapes(only))):
        small, whole = shape.scaled(), choose(shape.spec, arch)
        schedule = choose(small.spec, arch)
        assert schedule is not None
        assert whole is not None
        given = case.arguments(small.spec, most=1)
        _, report = case.launched(build(small.spec, schedule, arch), small.spec, given, arch, check=False)
        stats, guess = report.stats, predict(shape.spec, whole, arch)
        yield [shape.name, f"{small.m}x{small.n}x{small.k}", str(schedule), f"{stats.warp_instructions}",
               f"{stats.tensor_flops / small.spec.flops:.2f}", f"{stats.l2_bytes / small.nbytes:.1f}",
               str(sum(stats.bank_conflicts.values())), str(whole), f"{1e6 * guess.seconds:.1f}",
               f"{rates(shape, guess.seconds)[0]:.0f}", f"{rates(shape, guess.seconds)[1]:.0f}", guess.bound]


EMULATED = ["counted:", "scaled to", "its schedule", "warp instr", "tensor flops / needed",
            "L2 / least bytes", "conflicts", "predicted: schedule of the whole", "µs", "TFLOP/s", "GB/s",
            "bound"]


def main() -> int:
    """Times on a GPU, or says what that needs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="products whose name contains this")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for a product (default 4)")
    parser.add_argument("--without-tinygrad", action="store_true", help="leave out tinygrad's own kernels")
    parser.add_argument("--emulate", action="store_true", help="counters and predictions, without a GPU")
    parser.add_argument("--arch", default="sm_90a", choices=ARCHITECTURES, help="of --emulate")
    arguments = parser.parse_args()
    if not list(shapes(arguments.only)): parser.error(f"no product's name contains {arguments.only!r}")
    if arguments.emulate:
        print(table(EMULATED, list(emulated(arguments.only, arguments.arch))))
        return 0
    if why := missing():
        print(f"nothing to time on: {why}\n  needed: {NEEDED}\n  without: bench/gemm.py --emulate shows the "
              "emulator's counters and the cost model's predictions", file=sys.stderr)
        return 2
    timed(arguments)
    return 0


if __name__ == "__main__": sys.exit(main())
