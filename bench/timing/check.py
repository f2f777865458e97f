"""Predicted times beside published ones, of kernels that others wrote.

    python bench/timing/check.py [--fast-cu DIR] [--deepgemm DIR] [--flash-attention DIR] [--small]
                                 [--include DIR ...] [--plot FILE.png] [--dry]

DIRs are checkouts of public repositories, at the commits that timing/fast_cu.py, timing/deepgemm.py and
timing/fa3.py name. Each kernel is compiled by nvcc (in PATH, or of NVIDIA's wheels), its launch predicted
(ptx/timing/), and compared with what its authors published. Headers that a repository has as submodules, and
CCCL where nvcc lacks it, come by `--include`; of two with one name the first counts, so each repository may
be judged in a run of its own: rows of the others are kept. Nothing runs on a GPU, and nothing of the
repositories is kept. Rows that are "fitted" were used to choose figures in ptx/timing/gpus/h100.toml, and
judge nothing.

`--small` needs no checkout:

* Triton: TFLOP/s of the tutorial's attention on an H100, head size 128, no mask, 16384 tokens in all and 2048
  columns (github.com/pytorch/benchmark, pull request 2391 of July 2024), beside FlashAttention-3 in the same
  run. That machine had FlashAttention-3 4 to 9 % below its own paper, and Triton's is judged as many times as
  fast. attention_peers.py has the same kernel, compiled by the Triton that is here, which may be newer; that
  benchmark tried its tiles, of which the best of `FLASHES` counts.
* Microbenchmarks: cycles of wgmma and mma.sync on Hopper, of one SM, turned into TFLOP/s of an H100 at its
  clock. `FITTED` were used to choose figures.
"""
from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.calibrate_constants import MEASURES
from bench.gpu.calibrate_players import ModelPlayer
from bench.lib.attention_peers import Flash
from bench.lib.measure import RESULTS, save, table
from bench.timing import deepgemm as timing_deepgemm
from bench.timing import fa3 as timing_fa3
from bench.timing import fast_cu as timing_fast_cu
from bench.timing.gate_cases import GPU_NAME
from bench.timing.judges import Judged, agreement
from bench.timing.rows_attention import ALL, COLUMNS, of_flash
from tinygrad_nv.ptx.timing.gpu import figures

RECORD = "timing_check"
FAMILIES = ("fast.cu", "DeepGEMM", "FlashAttention-3", "Triton", "microbenchmarks")
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
# tokens: TFLOP/s of Triton's, and of FlashAttention-3 in the same run
TRITON = {512: (328.882, 430.32), 1024: (389.723, 517.099), 2048: (433.721, 565.544),
          4096: (458.359, 590.233), 8192: (470.732, 614.234), 16384: (476.753, 620.73)}
FLASHES = (((128, 128), 8, 3), ((128, 64), 4, 3), ((64, 64), 4, 3))
# what gpu/calibrate.py measures: operations of a warpgroup's or an SM's instruction, and cycles of it, of
# Johnsonms/NVIDIA-Hopper-Benchmark (H100), W. Luo et al. 2024 (H800), and a H200
K16 = 2 * 64 * 16
MICRO = {"wgmma m64n8k16 bf16 SS": (8 * K16, 18.9), "wgmma m64n16k16 bf16 SS": (16 * K16, 20.9),
         "wgmma m64n32k16 bf16 SS": (32 * K16, 25.1), "wgmma m64n32k16 bf16 RS": (32 * K16, 16.9),
         "wgmma m64n64k16 bf16 SS": (64 * K16, 33.3), "wgmma m64n128k16 bf16 SS": (128 * K16, 65.8),
         "wgmma m64n256k16 bf16 SS": (256 * K16, 131.5), "wgmma m64n256k16 bf16 RS": (256 * K16, 131.3),
         "wgmma m64n8k16 bf16, 1 and a wait": (8 * K16, 57.7),
         "wgmma m64n8k16 bf16, 4 and a wait": (4 * 8 * K16, 113.5),
         "wgmma m64n8k16 bf16, 8 and a wait": (8 * 8 * K16, 185.5),
         "mma.sync m16n8k16 bf16, 1 warp, ILP 1": (2 * 16 * 8 * 16, 24.1),
         "mma.sync m16n8k16 bf16 of an SM": (2 * 16 * 8 * 16, 1.5),
         "mma.sync m16n8k32 s8, 1 warp, ILP 1": (2 * 16 * 8 * 32, 24.0),
         "mma.sync m16n8k32 s8 of an SM": (2 * 16 * 8 * 32, 1.504)}
FITTED = {"wgmma m64n8k16 bf16 SS", "wgmma m64n16k16 bf16 SS", "wgmma m64n32k16 bf16 SS",
          "wgmma m64n32k16 bf16 RS", "wgmma m64n64k16 bf16 SS", "wgmma m64n128k16 bf16 SS",
          "wgmma m64n8k16 bf16, 1 and a wait", "mma.sync m16n8k16 bf16, 1 warp, ILP 1",
          "mma.sync m16n8k16 bf16 of an SM"}


def judge_small() -> Iterator[Judged]:
    """Yields the rows that need no checkout: Triton's tutorial attention, and microbenchmarks."""
    paper = dict(zip(timing_fa3.TOKENS, timing_fa3.PUBLISHED[128, False], strict=True))
    for tokens, (tflops, beside) in TRITON.items():
        best = min(of_flash(Flash("forward", 128, *each), tokens).seconds for each in FLASHES)
        yield Judged("Triton", f"Triton d 128 {tokens}", tflops * paper[tokens] / beside,
                     4 * ALL * tokens * COLUMNS / best / 1e12)
    gpu = figures(GPU_NAME)
    for name, (operations, cycles) in MICRO.items():
        rate = operations * gpu.sms * gpu.clock_hz / 1e12
        found = MEASURES[name].value(ModelPlayer(gpu))
        yield Judged("microbenchmarks", name, rate / cycles, rate / found, name in FITTED)


def rows_of(found: Sequence[Judged]) -> Iterator[tuple[str, ...]]:
    """The table."""
    for row in found:
        yield (row.name + (" (fitted)" if row.fitted else ""), f"{row.published:.0f}", f"{row.predicted:.0f}",
               f"{row.error:+.1%}")


def plot(found: Sequence[Judged], file: Path) -> None:
    """Predicted against published, on logarithmic axes."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6, 6))
    for family, color in zip(FAMILIES, COLORS, strict=True):
        for fitted, marker in ((False, "o"), (True, "x")):
            some = [(row.published, row.predicted) for row in found
                    if row.family == family and row.fitted == fitted]
            if some: axes.loglog(*zip(*some, strict=True), marker, color=color, markersize=5,
                                 label=f"{family}, fitted" if fitted else family)
    ends = [60, 1600]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xlabel="published, TFLOP/s", ylabel="predicted, TFLOP/s", title="H100 SXM: published by others")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def load_rows() -> list[Judged]:
    """Rows of the record there is."""
    file = RESULTS / f"{RECORD}.json"
    return [Judged(**row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []


def summary(found: Sequence[Judged]) -> dict[str, dict[str, float]]:
    """How far off the rows that judge are, of each family and all together."""
    groups = {family: [row for row in found if row.family == family] for family in FAMILIES}
    return {name: agreement(rows) for name, rows in {**groups, "together": list(found)}.items() if rows}


def main() -> int:
    """Compiles, predicts, compares."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    for name, module in (("fast-cu", timing_fast_cu), ("deepgemm", timing_deepgemm),
                         ("flash-attention", timing_fa3)):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=f"a checkout: {module.__name__}.py")
    parser.add_argument("--small", action="store_true", help="what needs no checkout")
    parser.add_argument("--include", type=Path, action="append", default=[], metavar="DIR",
                        help="further headers, such as CUTLASS's and CCCL's")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw predicted against published")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    chosen = ((timing_fast_cu, args.fast_cu), (timing_deepgemm, args.deepgemm),
              (timing_fa3, args.flash_attention))
    found = list(itertools.chain.from_iterable(module.judge(folder, args.include)
                                               for module, folder in chosen if folder))
    if args.small: found += judge_small()
    new = {row.family for row in found}
    rows = sorted([*found, *(row for row in load_rows() if row.family not in new)],
                  key=lambda row: FAMILIES.index(row.family))
    print(table(("TFLOP/s", "published", "predicted", "error"), list(rows_of(rows))))
    for name, each in (result := summary(rows)).items():
        print(f"{name}: {each['rows']} rows judge, mean error {each['mape']:.1%}, worst {each['worst']:.1%}, "
              f"rank correlation {each['rank']:.3f}")
    if args.plot: plot(rows, args.plot)
    if not args.dry: save(RECORD, {"gpu": "h100", "rows": [vars(row) for row in rows], "agreement": result})
    return 0


if __name__ == "__main__": raise SystemExit(main())
