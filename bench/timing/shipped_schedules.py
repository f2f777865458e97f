"""Writes tinygrad_nv/tile/shipped.json: schedules of matmuls of common models, by the timing model.

    python bench/timing/shipped_schedules.py [--gpu NAME …] [--beam N]

Matmuls of Llama 3.1 8B in bfloat16, of a batch of 16 requests and of 2048 tokens of prompts. An entry is
modelled for one GPU, nothing is measured; about a minute each. Entries that the file has are not made again.
"""
from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.tile import database
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.tune import tune

GPUS = ("h100", "h200", "a100", "l40s")
ROWS = (16, 2048)
# columns and length of sums: q|k|v, output, gate|up, down
MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", nargs="*", default=GPUS, choices=GPUS)
    parser.add_argument("--beam", type=int, default=1)
    arguments = parser.parse_args()
    for name, m, (n, k) in itertools.product(arguments.gpu, ROWS, MATRICES):
        named, spec = figures(name), dense(m, n, k, "bf16")
        gpu = GPU(named.arch, named.sms, model=name)
        if database.find_shipped(spec, named.arch, gpu) is not None: continue
        best = next(each for each in tune(spec, gpu, arguments.beam) if each.seconds is not None)
        entry = database.Entry(database.tuning_key(spec), named.arch, database.toolchain(), best.schedule,
                               float(best.seconds or 0), "modelled", name, database.origin())
        there = database.parse(database.SHIPPED.read_text(), database.SHIPPED)
        database.SHIPPED.write_text(database.dump([*there, entry]))
        print(f"{name}: {spec}: {best.schedule}", flush=True)


if __name__ == "__main__": main()
