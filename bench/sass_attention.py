"""What a loop of SASS spends on its tensor-core instructions: our attentions beside Triton's.

Nothing runs on a GPU. Triton's kernels are those of attention_peers.py, in tiles and options as its tuner
would try them; ours have the default schedule. Numbers are those of sass_gemm.py; tiles differ, so that "a
unit", instructions for the same work, is what compares. Of a backward pass Triton has two kernels, that make
four products and three of the same extents, ours makes five: the sums of all are below its table. Triton's
own cubin is read: it may have used what our assembler does not.
"""
from __future__ import annotations

import argparse
import math
import re
from dataclasses import asdict, replace
from itertools import product as pairs

import triton
from attention_peers import Flash, compiled
from measure import each, save
from sass_gemm import GemmCase, measured, report
from tinygrad.dtype import dtypes

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.attention.backward_defaults import mma
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band, Rows
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

TOKENS, SM_COUNT = 4096, 132
OURS_PTX = "9.0"    # what our assembler reads; Triton writes newer and uses nothing newer
TILES = {"sm_80": ((128, 64), (128, 32), (64, 64)), "sm_90a": ((128, 128), (128, 64))}
OPTIONS = {"sm_80": ((4, 2), (8, 2), (4, 3), (8, 3)), "sm_90a": ((8, 2), (8, 3), (4, 2))}
BACKWARD_TILES = ((64, 64), (64, 128), (32, 64))
PRODUCTS = {"dk, dv": 4, "dq": 3}


def spec(d: int, causal: bool) -> AttentionSpec:
    """One head of dense rows."""
    rows = Rows(dtypes.bfloat16, d, (0, TOKENS * d, 0))
    return AttentionSpec(TOKENS, TOKENS, d, d, rows, rows, rows, rows, (1, 16, 1), Sum() * (1 / math.sqrt(d)),
                         Band(last=0) if causal else FULL)


def title(causal: bool) -> str:
    """Of a row."""
    return f"forward {'causal' if causal else 'full'}"


def of_ours(d: int, causal: bool, arch: str) -> GemmCase:
    """Our kernel, by the default schedule."""
    schedule = ATTENTION.choose(spec(d, causal), GPU(arch))
    assert schedule is not None
    made = TABLE.build(spec(d, causal), schedule, GPU(arch, SM_COUNT))
    return measured(assemble(made.ptx, arch), made.name, made.dynamic_smem, arch=arch, b_major=title(causal),
                    block=f"d {d}", kernel=f"ours, {schedule}", ours=True)


def of_triton(flash: Flash, arch: str, what: str) -> GemmCase | None:
    """Triton's kernel; None where it takes more shared memory than there is, or its wgmma are serialised."""
    made = compiled(flash, arch)
    if made.metadata.shared > (163 if arch == "sm_80" else 227) * 1024: return None
    text = re.sub(r"\.version \d+\.\d+", f".version {OURS_PTX}", made.asm["ptx"])
    try: assembly = assemble(text, arch)
    except PTXError: return None
    return measured(assembly, made.metadata.name, made.metadata.shared, arch=arch, b_major=what,
                    block=f"d {flash.d}", kernel=str(flash))


def backward_rows(d: int, causal: bool, arch: str) -> list[GemmCase]:
    """Triton's two kernels, then ours, by its default schedule for mma.sync."""
    found = []
    for what, tile, (warps, stages) in pairs(PRODUCTS, BACKWARD_TILES, OPTIONS[arch]):
        peer = Flash(what, d, tile, warps, stages, causal)
        row = of_triton(peer, arch, f"backward {'causal' if causal else 'full'}")
        if row is not None: found.append(replace(row, kernel=f"{peer}, {what}"))
    one = spec(d, causal)
    made = BackwardSpec(replace(one, lse=True), one.q, one.k, one.v)
    schedule = next(s for s in mma(made, GPU(arch)) if not TABLE.problems(made, s, GPU(arch)))
    ours = TABLE.build(made, schedule, GPU(arch))
    return [*found, measured(assemble(ours.ptx, arch), ours.name, ours.dynamic_smem, arch=arch,
                             b_major=found[0].b_major, block=f"d {d}", kernel=f"ours, {schedule}", ours=True)]


def of_all_products(found: list[GemmCase]) -> str:
    """Instructions for a unit of every product of a backward pass."""
    theirs = sum(count * min(row.each for row in found if row.kernel.endswith(f", {what}"))
                 for what, count in PRODUCTS.items())
    ours = next(row for row in found if row.ours)
    return f"  all products: Triton {theirs:.2f} in seven, ours {5 * ours.each:.2f} in five\n"


def rows(d: int, causal: bool, arch: str) -> list[GemmCase]:
    """Triton's, then ours."""
    peers = [Flash("forward", d, tile, warps, stages, causal, arch == "sm_90a")
             for tile, (warps, stages) in pairs(TILES[arch], OPTIONS[arch])]
    found = [of_triton(peer, arch, title(causal)) for peer in peers]
    return [*(row for row in found if row is not None), of_ours(d, causal, arch)]


def main() -> None:
    """Compiles everything and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="print only")
    parser.add_argument("--d", type=int, nargs="*", default=[64, 128, 256], help="(default 64 128 256)")
    parser.add_argument("--backward", type=int, nargs="*", default=[64, 128], help="(default 64 128)")
    arguments = parser.parse_args()
    found = [row for d, causal, arch in each(list(pairs(arguments.d, (False, True), ("sm_80", "sm_90a"))))
             for row in rows(d, causal, arch)]
    print(report(found))
    for d, causal in each(list(pairs(arguments.backward, (False, True)))):
        found += (those := backward_rows(d, causal, "sm_80"))
        print(report(those) + of_all_products(those))
    record = {"triton": triton.__version__, "rows": [{**asdict(row), "each": row.each} for row in found]}
    if not arguments.dry: save("sass_attention", record)


if __name__ == "__main__": main()
