"""Ours beside the best public kernels: predicted times on one model, in one run. No GPU is needed.

    python bench/timing/table.py [--fast-cu DIR[:INCLUDE…]] [--cutlass DIR[:INCLUDE…]]
                                 [--deepgemm DIR[:INCLUDE…]] [--flash-attention DIR[:INCLUDE…]]
                                 [--flash-attention-2025 DIR[:INCLUDE…]]
                                 [--dry] [--page FILE.md] [PATTERN ...]

Rows are of timing_rows_*.py. DIRs are checkouts of public repositories, each with the folders of headers that
it needs beside; kernels of Triton's need none. Kernels of others are compiled as their authors wrote them and
predicted (ptx/timing/) like ours, which have their default schedules. The record, timing_table.json, keeps
rows of other runs, each with a digest of the model that predicted it, and of a row that is predicted again
the peers of the same model. Nothing was measured here. `--page` writes the record between the two lines MARK
of a page, such as docs/timing.md. Beside GB/s of what memory bounds stands the share of the GPU's HBM
bandwidth, which no kernel exceeds whose data do not lie in L2.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import RESULTS, each, put_between, save, table
from bench.timing import rows_attention as timing_rows_attention
from bench.timing import rows_gemm as timing_rows_gemm
from bench.timing import rows_memory as timing_rows_memory
from bench.timing import rows_moe as timing_rows_moe
from bench.timing import rows_step as timing_rows_step
from bench.timing.gate_cases import GPU_NAME
from bench.timing.measured import read_measured_ratio
from bench.timing.rows import Checkout, Checkouts, Row, ours, total_seconds
from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.timing.gpu import figures

RECORD, ROOT = "timing_table", Path(__file__).resolve().parents[2]
MODULES = (timing_rows_gemm, timing_rows_attention, timing_rows_memory, timing_rows_step,
           timing_rows_moe)
HBM = figures(GPU_NAME).hbm_bytes_per_s / 1e9   # GB/s that reads reach
CHECKOUTS = {"fast_cu": "github.com/pranjalssh/fast.cu", "cutlass": "github.com/NVIDIA/cutlass",
             "deepgemm": "github.com/deepseek-ai/DeepGEMM",
             "flash_attention": "github.com/Dao-AILab/flash-attention at 74b0761f",
             "flash_attention_2025": "the same repository, later"}
MARK = "<!-- timing_table -->"
EARLIER = " †"
Record = dict[str, Any]


@cache
def model() -> str:
    """A digest of what predictions depend on beside the kernels: two of one digest may be compared."""
    whole = hashlib.sha256()
    for path in sorted((ROOT / "tinygrad_nv" / "ptx").rglob("*")):
        if path.suffix in (".py", ".c", ".h", ".toml"): whole.update(path.name.encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def load_records() -> dict[str, Record]:
    """Rows of other runs, by name."""
    file = RESULTS / f"{RECORD}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    return {row["row"]: row for row in known.get("rows", ())}


def predict(row: Row, checkouts: Checkouts, old: Record) -> Record:
    """Microseconds of ours and of each peer, those of peers without a checkout as the same model had them."""
    schedule, launches = ours(row)
    longest = max(launches, key=lambda one: one.seconds)
    peers, failed = dict(old["peers"]) if old.get("model") == model() else {}, {}
    for peer in row.peers:
        if peer.needs and peer.needs not in checkouts: continue
        try: peers[peer.name] = round(1e6 * total_seconds(peer.launched(checkouts)), 3)
        except NVError as error: failed[peer.name] = error.found.splitlines()[0]
    us = round(1e6 * total_seconds(launches, row.pdl), 3)
    found: Record = {"row": str(row), "us": us, "schedule": schedule, "limiter": longest.limiter,
                     "tflops": round(row.flops / us / 1e6, 1),
                     "gbytes_per_s": round(row.nbytes / us / 1e3, 1), "peers": peers, "failed": failed,
                     "model": model()}
    if peers: found |= {"best": (best := min(peers, key=lambda name: peers[name])),
                        "ratio": round(peers[best] / us, 4)}
    return found


def lines(found: Sequence[Record], newest: str) -> Iterator[tuple[str, ...]]:
    """The table: a ratio above 1 says that ours takes less time, modelled, and then as an H100 measured. Rows
    of another state of the model than the `newest` are marked."""
    for row in found:
        mark = EARLIER if row.get("model") != newest else ""
        rate = f"{row['tflops']:.0f} TFLOP/s" if row["tflops"] else \
            f"{row['gbytes_per_s']:.0f} GB/s, {row['gbytes_per_s'] / HBM:.0%}"
        best = row.get("best", "")
        theirs = (f"{row['peers'][best]:.1f}", f"{row['ratio']:.3f}", best) if best else ("", "", "no peer")
        yield (row["row"] + mark, f"{row['us']:.1f}", rate, row["limiter"], *theirs,
               read_measured_ratio(row["row"]))


def markdown(found: Sequence[Record], newest: str) -> str:
    """The same for a page."""
    head = ("", "us", "rate", "limiter", "best peer, us", "ratio, modelled", "best peer", "ratio, measured")
    cells = [head, ("---",) * len(head), *lines(found, newest)]
    return "\n".join(f"| {' | '.join(each)} |" for each in cells)


def checkout(words: str) -> Checkout:
    """Returns the checkout of an option."""
    folders = [Path(one).resolve() for one in words.split(os.pathsep)]
    if missing := [one for one in folders if not one.is_dir()]:
        raise argparse.ArgumentTypeError(f"{missing[0]} is no folder")
    return Checkout(folders[0], tuple(folders[1:]))


def main() -> int:
    """Predicts and compares."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="parts of rows' names (default: all)")
    for name, of in CHECKOUTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=checkout, metavar="DIR[:INCLUDE…]", help=of)
    parser.add_argument("--dry", action="store_true", help="print only")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="put the table there, too")
    given = parser.parse_args()
    checkouts = {name: one for name in CHECKOUTS if (one := getattr(given, name)) is not None}
    rows = [row for module in MODULES for row in module.rows()]
    known, order = load_records(), [str(row) for row in rows]
    wanted = [row for row in rows if not given.patterns or any(p in str(row) for p in given.patterns)]
    found = [predict(row, checkouts, known.get(str(row), {})) for row in each(wanted)]
    columns = "row", "us", "rate", "limiter", "us", "ratio", "best peer", "measured"
    print(table(columns, list(lines(found, model()))))
    for row in found:
        for name, why in row["failed"].items(): print(f"{row['row']}: {name}: {why}", file=sys.stderr)
    known |= {row["row"]: row for row in found}
    all_rows = sorted((row for name, row in known.items() if name in order),
                      key=lambda row: order.index(row["row"]))
    if given.page: put_between(given.page, MARK, markdown(all_rows, model()))
    if not given.dry:
        save(RECORD, {"gpu": GPU_NAME, "model": model(), "rows": all_rows})
    return 0


if __name__ == "__main__": sys.exit(main())
