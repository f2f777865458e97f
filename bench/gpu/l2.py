"""Gain of an L2 access-policy window: a buffer of X MiB read again and again, with Y MiB of other memory
between.

Contenders, a block of repeats each in turn: no window; the window that `tinygrad_nv/runtime/l2.py` gives X
(hit ratio = what can be set aside / X); the same with hit ratio 1, which NVIDIA's guide warns of once X is
longer. Only the reads of X are timed, by events around each launch, all work being queued before it runs;
`empty_us` is what the events say of a launch that reads nothing, and is left in. Answers are checked: the XOR
of all words.

Without a GPU nothing is measured (exit code 2); `--model` then shows what the policy predicts, labelled so.
"""
from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import each, save, spread, table
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.runtime.driver import Driver, Function, Launch, Properties, Window, integer, pointer
from tinygrad_nv.runtime.emulated.driver import properties
from tinygrad_nv.runtime.l2 import MIB, Range, plan
from tinygrad_nv.tile.gpu import GPUModel, gpu_model_for

THREADS, CTAS_OF_SM, AT_ONCE, PIECE = 256, 8, 4, 16     # loads in flight of a thread; bytes of one
CONTENDERS = ("none", "policy", "ratio 1")
HELPS = 1.05            # times as fast at least, for a window to count as a gain
EVER_MORE = 1 << 50     # bytes a step, so that nothing stays by itself
WARM = 3                # repeats at the beginning of a block that are not counted
WARM_S = 3.0            # seconds of reads before the first block


def reader(arch: str) -> str:
    """`l2_read(out, source, pieces)`: each thread XORs its pieces of 16 bytes, of which it has four in
    flight, and writes one word. L1 is passed over."""
    k = Kernel("l2_read", arch=arch, threads=THREADS)
    out, source, pieces = k.pointer("out"), k.pointer("source"), k.param("pieces", "u32")
    thread = k.ctaid.x * THREADS + k.tid.x
    stride, found = k.nctaid.x * THREADS, k.reg("b32", 0)
    at = k.reg("u32", 0)
    at.set(thread)

    def load(piece: Any) -> list[Any]:
        return k.ld("global", "b32", (source + piece.to("u64") * PIECE).at(), 4, ".cg")

    with k.comment("four at once while there are four"):
        last = k.reg("u32", 0)
        last.set(at + stride * (AT_ONCE - 1))
        with k.while_(lambda: last < pieces):
            loaded = [load(at + stride * i) for i in range(AT_ONCE)]
            for words in loaded:
                for word in words: found ^= word
            at += stride * AT_ONCE
            last += stride * AT_ONCE
    with k.comment("the rest, one by one"), k.while_(lambda: at < pieces):
        for word in load(at): found ^= word
        at += stride
    k.st("global", "b32", (out + thread.to("u64") * 4).at(), found)
    return k.ptx()


# **** predicted ****

@dataclass(frozen=True)
class Predicted:
    """A read of X by the policy's model: seconds without and with a window, and what stays."""
    plain_s: float
    window_s: float
    kept: float
    reason: str


def predict(machine: GPUModel, limits: Properties, nbytes: int, between: int) -> Predicted:
    """Lines that stay come from L2, the others from HBM; without a window none stay unless all do."""
    made = plan(limits, [Range(0, nbytes)], nbytes + between)
    from_l2, from_hbm = nbytes / machine.l2_bytes_per_s, nbytes / machine.hbm_bytes_per_s
    fits = nbytes + between <= limits.l2_bytes
    kept = 1.0 if fits else made.saved_bytes / nbytes
    return Predicted(from_l2 if fits else from_hbm, kept * from_l2 + (1 - kept) * from_hbm, kept, made.reason)


def print_prediction(arch: str, between: int | None, plot: Path | None) -> None:
    """Prints the prediction for the GPU that `arch` stands for."""
    limits = properties(arch)
    machine = gpu_model_for(arch, limits.sm_count)
    between = 2 * limits.l2_bytes if between is None else between
    made = {nbytes: predict(machine, limits, nbytes, between) for nbytes in sizes(limits)}
    rows = [[f"{nbytes / MIB:.1f}", f"{one.plain_s * 1e6:.1f}", f"{one.window_s * 1e6:.1f}",
             f"{one.kept:.0%}", f"{one.plain_s / one.window_s:.2f}"] for nbytes, one in made.items()]
    print(f"PREDICTED, not measured: {machine.name}, {between / MIB:.0f} MiB of other memory between reads")
    print(table(["X MiB", "plain µs", "window µs", "stays", "times as fast"], rows))
    if plot is not None:
        curves = {"predicted": ([n / MIB for n in made], [[p.plain_s / p.window_s] for p in made.values()])}
        plot_ratios(curves, f"predicted for {machine.name}, not measured", plot)


def sizes(limits: Properties, points: int = 16) -> list[int]:
    """From an eighth of L2 to twice, in equal steps of whole MiB, with what can be set aside among them."""
    first, last = limits.l2_bytes // 8, 2 * limits.l2_bytes
    steps = [first + (last - first) * i // (points - 1) for i in range(points)]
    return sorted({step // MIB * MIB for step in steps} | {limits.persisting_l2_limit})


# **** measured ****

class L2Bench:
    """X and Y on a device, and the kernel that reads them."""

    def __init__(self, gpu: Driver, largest: int, between: int, ctas: int = 0, seed: int = 0) -> None:
        self.gpu, self.between = gpu, between
        self.function: Function = gpu.load(reader(gpu.properties.arch).encode()).function("l2_read")
        self.ctas = ctas or gpu.properties.sm_count * CTAS_OF_SM
        self.x, self.y = gpu.alloc(largest), gpu.alloc(max(between, PIECE))
        self.out = gpu.alloc(self.ctas * THREADS * 4)
        self.words = np.random.default_rng(seed).integers(0, 1 << 32, largest // 4, np.uint32)
        gpu.copy_in(self.x, self.words.data.cast("B"))
        gpu.copy_in(self.y, np.zeros(max(between, PIECE), np.uint8).data)

    def close(self) -> None:
        """Gives the memory back."""
        self.gpu.synchronize()
        for address in (self.x, self.y, self.out): self.gpu.free(address)

    def read(self, address: int, nbytes: int, window: Window | None) -> None:
        """Submits a read of so many bytes."""
        args = (pointer(self.out), pointer(address), integer(nbytes // PIECE))
        self.gpu.submit(Launch(self.function, (self.ctas, 1, 1), (THREADS, 1, 1), args, window=window))

    def right(self, nbytes: int) -> bool:
        """Whether the last read was of the first `nbytes` of X."""
        found = np.zeros(self.ctas * THREADS, np.uint32)
        self.gpu.copy_out(found.data.cast("B"), self.out)
        wanted = np.bitwise_xor.reduce(self.words[:nbytes // 4], initial=np.uint32(0))
        return bool(np.bitwise_xor.reduce(found) == wanted)

    def window(self, contender: str, nbytes: int) -> Window | None:
        """Returns the window that a contender's launches carry."""
        if contender == "none": return None
        # the policy's window, also where it says that there is nothing to gain
        window = plan(self.gpu.properties, [Range(self.x, nbytes)], EVER_MORE).window
        assert window is not None, "bytes to read, and L2 to set aside"
        return window if contender == "policy" else replace(window, hit_ratio=1.0)

    @contextlib.contextmanager
    def set_aside(self, contender: str, nbytes: int) -> Iterator[Window | None]:
        """L2 is set aside inside, and given back."""
        window = self.window(contender, nbytes)
        if window is not None:
            self.gpu.set_persisting_l2(min(window.nbytes, self.gpu.properties.persisting_l2_limit))
        try: yield window
        finally:
            self.gpu.synchronize()
            if window is not None: self.gpu.set_persisting_l2(0)

    def block(self, contender: str, nbytes: int, repeats: int) -> list[float]:
        """Seconds of each read of X, one after another, with Y between."""
        pairs = [(self.gpu.event(), self.gpu.event()) for _ in range(repeats + WARM)]
        with self.set_aside(contender, nbytes) as window:
            for start, end in pairs:
                if self.between: self.read(self.y, self.between, window)
                self.gpu.record(start)
                self.read(self.x, nbytes, window)
                self.gpu.record(end)
            self.gpu.wait_for(pairs[-1][1])
            seconds = [self.gpu.ms_between(start, end) * 1e-3 for start, end in pairs]
        if not self.right(nbytes): raise SystemExit(f"{nbytes} bytes, {contender}: a wrong answer")
        return seconds[WARM:]


def warm_up(bench: L2Bench, nbytes: int, seconds: float) -> None:
    """Reads until clocks are those of a busy GPU."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end: bench.block("none", nbytes, 20)


def measure(bench: L2Bench, nbytes: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Contenders in turn, `rounds` blocks of each."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name in CONTENDERS: seconds[name] += bench.block(name, nbytes, repeats)
    ratios = {name: [plain / each for plain, each in zip(seconds["none"], seconds[name], strict=True)]
              for name in CONTENDERS[1:]}
    chosen = plan(bench.gpu.properties, [Range(bench.x, nbytes)], nbytes + bench.between)
    return {"seconds": seconds, "ratios": ratios, "policy": chosen.reason,
            "window": chosen.window is not None}


def crossover(found: dict[int, dict[str, Any]]) -> tuple[int, int] | None:
    """The smallest and the largest X for which the policy's window gains, None where none does."""
    gains = [nbytes for nbytes, one in found.items() if median(one["ratios"]["policy"]) >= HELPS]
    return (min(gains), max(gains)) if gains else None


def row(nbytes: int, one: dict[str, Any]) -> list[str]:
    """A row of the table."""
    rates = [nbytes / median(one["seconds"][name]) / 1e9 for name in CONTENDERS]
    gain = one["ratios"]["policy"]
    return [f"{nbytes / MIB:.1f}", *(f"{rate:.0f}" for rate in rates), f"{median(gain):.2f}", spread(gain),
            "window" if one["window"] else "none"]


HEADER = ["X MiB", *(f"{name} GB/s" for name in CONTENDERS), "times as fast", "spread", "policy says"]
Curves = dict[str, tuple[list[float], list[list[float]]]]


def plot_ratios(curves: Curves, title: str, path: Path) -> None:
    """Times as fast as without a window, over X: medians, with quartiles."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, (x, ratios) in curves.items():
        axes.plot(x, [median(values) for values in ratios], "o-", markersize=3, label=name)
        low, high = ([float(np.quantile(values, q)) for values in ratios] for q in (0.25, 0.75))
        axes.fill_between(x, low, high, alpha=0.2)
    axes.axhline(1, color="gray", linewidth=1)
    axes.set_xlabel("X: MiB read again and again")
    axes.set_ylabel("times as fast as without a window")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def curves_of(found: dict[int, dict[str, Any]]) -> Curves:
    """Returns the curves that `plot_ratios` draws of results."""
    x = [nbytes / MIB for nbytes in found]
    return {name: (x, [one["ratios"][name] for one in found.values()]) for name in CONTENDERS[1:]}


def on_gpu(arguments: argparse.Namespace) -> int:
    """Everything on the GPU, and the files."""
    from tinygrad_nv.runtime.cuda.driver import CUDADriver
    from tinygrad_nv.runtime.observe.telemetry import Telemetry
    gpu = CUDADriver(arguments.gpu)
    limits = gpu.properties
    if not limits.persisting_l2_limit or not limits.window_limit:
        print(f"nothing was measured: {limits.name} sets no L2 aside", file=sys.stderr)
        return 2
    between = 2 * limits.l2_bytes if arguments.between is None else arguments.between
    chosen = sizes(limits, arguments.points)
    bench = L2Bench(gpu, max(chosen), between)
    with Telemetry(arguments.gpu).sample() as samples:
        warm_up(bench, max(chosen), WARM_S)
        empty = median(bench.block("none", 0, arguments.repeats))
        found = {nbytes: measure(bench, nbytes, arguments.rounds, arguments.repeats)
                 for nbytes in each(chosen)}
    bench.close()
    print(table(HEADER, [row(nbytes, one) for nbytes, one in found.items()]))
    gains = crossover(found)
    print(f"a window gains {HELPS:.0%} or more " + (f"from {gains[0] / MIB:.1f} to {gains[1] / MIB:.1f} MiB"
                                                    if gains else "nowhere"))
    slug = limits.name.lower().replace("nvidia ", "").replace(" ", "-")
    path = save(f"l2-{slug}", {"gpu": limits.name, "l2_bytes": limits.l2_bytes, "between_bytes": between,
                               "persisting_l2_limit": limits.persisting_l2_limit, "gains_bytes": gains,
                               "window_limit": limits.window_limit, "empty_us": empty * 1e6,
                               "telemetry": samples.record(), "results": found})
    plot_ratios(curves_of(found), f"{limits.name}, {between / MIB:.0f} MiB of other memory between reads",
                path.with_suffix(".png"))
    return 0


def _mebibytes(text: str) -> int:
    if not text.isdecimal(): raise argparse.ArgumentTypeError(f"{text!r} is not a number of MiB")
    return int(text) * MIB


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, or says that it cannot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--between", type=_mebibytes, metavar="MIB",
                        help="other memory read between two reads (default: twice L2)")
    parser.add_argument("--points", type=int, default=16, help="values of X (default 16)")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each contender (default 20)")
    parser.add_argument("--repeats", type=int, default=30, help="reads in a block (default 30)")
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU (default 0)")
    parser.add_argument("--model", action="store_true", help="what the policy predicts; no GPU is needed")
    parser.add_argument("--arch", default="sm_90a", choices=("sm_80", "sm_89", "sm_90a"),
                        help="with --model: an A100, an L40 or an H100 (default)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="with --model: draw it as well")
    arguments = parser.parse_args(argv)
    if arguments.model:
        print_prediction(arguments.arch, arguments.between, arguments.plot)
        return 0
    from tinygrad_nv.runtime.cuda import api as cuda_api
    if reason := cuda_api.missing(arguments.gpu):
        print(f"nothing was measured, a GPU is needed: {reason}. --model shows what the policy predicts",
              file=sys.stderr)
        return 2
    return on_gpu(arguments)


if __name__ == "__main__": sys.exit(main())
