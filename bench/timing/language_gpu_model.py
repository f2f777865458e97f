"""Kernels in the tile language beside our templates, and Triton's kernels, on a GPU, by the timing model:
nothing here is measured.

    python bench/timing/language_gpu_model.py [--gpu h100] [--only flash] [--triton] [--json]

Protocol: a row is the least of a few schedules' predicted times, and that of the template with the schedule
that it has without tuning. `ratio` is template / language: 0.9 is what the language is to reach. With
`--triton` the same in Triton, compiled here, the least of a few tiles (language_triton.py); `triton_ratio` is
Triton / language: 1.0 is what the language is to reach. Operands are zeros. Flash attention of the standard
library leaves the LSE, too. `--json` puts what was run into the results; rows and columns that were not run
stay.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tinygrad import dtypes

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.kernels_language import matmul as language_matmul
from bench.lib.specs import attention, matmul
from bench.timing.language_rows import Case, Timed, beside, best, empty, more, row, template, triton
from tinygrad_nv.stdlib import attention as flash

RESULTS = Path(__file__).parents[1] / "results" / "language_gpu_model.json"
SCHEDULES = {
    "h100": ((128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4)),
    "a100": ((128, 128, 32, 4, 4), (128, 64, 32, 4, 4), (128, 128, 64, 8, 3), (128, 256, 32, 8, 3))}
FLASH = {"h100": ((128, 128, 64, 8, 3), (128, 64, 64, 8, 3)),
         "a100": ((128, 64, 64, 8, 3), (128, 64, 64, 4, 3), (64, 64, 64, 4, 3))}


def cases() -> Iterator[Case]:
    """Matmuls, attention, and the others."""
    for m, n, k in ((4096, 4096, 4096), (512, 4096, 4096), (8192, 8192, 1024)):
        yield Case(f"gemm {m}x{n}x{k} bf16", partial(_matmul, m, n, k), partial(
            template, matmul(m, n, k, majors="KM", out=dtypes.float32)), triton("matmul", m, n, k))
    for d in (64, 128):
        yield Case(f"flash 16x4096x{d} bf16", partial(_attention, d), partial(
            template, attention(4096, 4096, d, batch=1, heads=16)), triton("attention", 4096, d))
    yield from more()


def _matmul(m: int, n: int, k: int, gpu: str) -> Timed:
    return best(language_matmul, gpu, SCHEDULES[gpu], empty(m, k), empty(k, n))


def _attention(d: int, gpu: str) -> Timed:
    q = empty(1, 16, 4096, d)
    return best(flash.forward, gpu, FLASH[gpu], q, q, q, causal=False, scale=d ** -0.5)


def save(gpu: str, made: list[dict[str, Any]]) -> None:
    """Puts rows into the results, in the order of `cases`."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = {each["case"]: each for each in known.get(gpu, [])}
    for each in made:
        whole = rows.get(each["case"], {}) | each
        if "triton_us" in whole: whole["triton_ratio"] = round(whole["triton_us"] / whole["language_us"], 3)
        rows[each["case"]] = whole
    order = [each.name for each in cases() if each.name in rows]
    RESULTS.write_text(json.dumps({**known, gpu: [rows[name] for name in order]}, indent=1) + "\n")


def main() -> None:
    """Prints the rows of a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="h100", choices=sorted(SCHEDULES))
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--triton", action="store_true", help="Triton's time, too")
    parser.add_argument("--json", action="store_true", help=f"writes {RESULTS.name}, too")
    given = parser.parse_args()
    for case in cases():
        if given.gpu not in case.gpus or given.only not in case.name: continue
        ours, schedule = case.language(given.gpu)
        made = row(case.name, ours, case.template(given.gpu), schedule)
        if given.triton: made = beside(made, case.triton(given.gpu))
        line = (f"{case.name:30s} {ours:9.1f} µs  template {made['template_us']:9.1f} µs  "
                f"ratio {made['ratio']:.2f}")
        if given.triton: line += f"  Triton {made['triton_us']:9.1f} µs  ratio {made['triton_ratio']:.2f}"
        print(f"{line}  {schedule}", flush=True)
        if given.json: save(given.gpu, [made])


if __name__ == "__main__": main()
