"""Predicted times beside published ones, of kernels that others wrote.

    python bench/timing/check.py [--fast-cu DIR] [--deepgemm DIR] [--flash-attention DIR] [--small]
                                 [--include DIR ...] [--plot FILE.png] [--dry]

DIRs are checkouts of public repositories, at the commits that timing/fast_cu.py, timing/deepgemm.py and
timing/fa3.py name. Each kernel is compiled by nvcc (in PATH, or of NVIDIA's wheels), its launch predicted
(ptx/timing/), and compared with what its authors published. Headers that a repository has as submodules, and
CCCL where nvcc lacks it, come by `--include`; of two with one name the first counts, so each repository may
be judged in a run of its own: rows of the others are kept. Nothing runs on a GPU, and nothing of the
repositories is kept. `--small`: Triton's tutorial and microbenchmarks (timing/small_judges.py), which
need no checkout. Rows that are "fitted" were used to choose figures in ptx/timing/gpus/h100.toml, and
judge nothing. """
from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import RESULTS, save, table
from bench.timing import deepgemm as timing_deepgemm
from bench.timing import fa3 as timing_fa3
from bench.timing import fast_cu as timing_fast_cu
from bench.timing import small_judges as timing_small_judges
from bench.timing.judges import Judged, agreement

RECORD = "timing_check"
FAMILIES = ("fast.cu", "DeepGEMM", "FlashAttention-3", "Triton", "microbenchmarks")
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


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
    if args.small: found += timing_small_judges.judge()
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
