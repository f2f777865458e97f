"""How long it takes to produce code for a product: ours from spec to cubin, beside Triton's compiler.

Ours: the schedule is chosen, the kernel written, ptxas run; the tile is fixed to the one Triton is given, so
that both make the same kernel. Triton: `triton.compile` with an empty cache, its own ptxas included. Both in
one process with everything imported and one compilation of each done before; they take turns. Every
repetition has a product of another K and an empty directory for what is cached, so that nothing is found
anywhere. "ptxas" is the assembler's share in each; "one ptxas" is the ratio if Triton used our assembler.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib import gemm_peers
from bench.lib.gemm_peers import Peer
from bench.lib.measure import each, save, spread, table
from bench.timing import sass_gemm
from tinygrad_nv.ptx.assemble import assemble, require_ptxas
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

WANTED = 1 / 3
FRESH = count(4096, 64)  # extents along K
TRITON_FLAGS = ("-lineinfo", "--regAllocOptLevel=2")


@dataclass(frozen=True)
class Case:
    """The same product and tile on both sides."""
    arch: str
    schedule: GemmSchedule
    peer: Peer

    def __str__(self) -> str:
        block = "x".join(map(str, self.peer.block))
        majors = sass_gemm.MAJORS[self.peer.b_major]
        return f"{self.arch} {self.peer.dtype} {majors} {block}, Triton with {self.peer.kind}"


def cases() -> list[Case]:
    """mma.sync and wgmma; of Triton's kernels the simplest and the fastest."""
    ampere = Mma().block(128, 128).k(32).stages(3)
    hopper = Wgmma().block(128, 256)
    return [Case("sm_80", ampere, Peer("pointers", (128, 128, 32), 4, 3, "K")),
            Case("sm_80", ampere, Peer("pointers, masked", (128, 128, 32), 4, 3, "MN")),
            Case("sm_90a", hopper.stages(3), Peer("pointers", (128, 256, 64), 8, 3, "K")),
            Case("sm_90a", hopper.stages(3), Peer("descriptors", (128, 256, 64), 8, 3, "K")),
            Case("sm_90a", hopper.stages(3), Peer("warp-specialised", (128, 256, 64), 4, 3, "K"))]


@contextmanager
def empty_caches() -> Iterator[None]:
    """Directories for both caches with nothing in them."""
    names = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_ALWAYS_COMPILE")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
        os.environ |= {"XDG_CACHE_HOME": ours, "TRITON_CACHE_DIR": theirs, "TRITON_ALWAYS_COMPILE": "1"}
        try: yield
        finally:
            for name, value in before.items():
                if value is None: del os.environ[name]
                else: os.environ[name] = value


def ours(case: Case) -> dict[str, float]:
    """Seconds of each step, for a K that none had before."""
    spec = sass_gemm.spec(case.peer.b_major, case.peer.dtype, k=next(FRESH))
    begun = time.perf_counter()
    choose(spec, GPU(case.arch))
    chosen = time.perf_counter()
    made = TABLE.build(spec, case.schedule, GPU(case.arch))
    written = time.perf_counter()
    assemble(made.ptx, case.arch)
    ended = time.perf_counter()
    return {"whole": ended - begun, "choice": chosen - begun, "writing": written - chosen,
            "ptxas": ended - written}


def theirs(case: Case) -> dict[str, float]:
    """Seconds of Triton's compiler, and of its ptxas alone, run once more on its PTX."""
    begun = time.perf_counter()
    made = gemm_peers.compile_kernel(case.peer, case.arch)
    whole = time.perf_counter() - begun
    own = assembling(triton_ptxas(case.arch), made.ptx, case.arch, TRITON_FLAGS)
    other = assembling(require_ptxas(), made.readable, case.arch)
    return {"whole": whole, "ptxas": own, "one ptxas": whole - own + other}


def triton_ptxas(arch: str) -> Path:
    """The assembler that Triton takes."""
    return Path(get_ptxas(gemm_peers.ARCHS[arch]).path)


def assembling(ptxas: Path, text: str, arch: str, flags: tuple[str, ...] = ()) -> float:
    """Seconds of an assembler."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(text)
        command = [str(ptxas), "-v", *flags, f"--gpu-name={arch}", str(source), "-o", f"{source}.cubin"]
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - begun


def measure(case: Case, repeat: int) -> dict[str, Any]:
    """Both sides in turn, after one of each that does not count."""
    done: dict[str, list[dict[str, float]]] = {"ours": [], "triton": []}
    for turn in range(repeat + 1):
        with empty_caches():
            pair = ours(case), theirs(case)
        if turn:
            for side, seconds in zip(done.values(), pair, strict=True): side.append(seconds)
    columns = {side: {name: [run[name] for run in runs] for name in runs[0]} for side, runs in done.items()}
    turns = zip(columns["ours"]["whole"], columns["triton"]["whole"], strict=True)
    ratios = [mine / other for mine, other in turns]
    same = median(columns["ours"]["whole"]) / median(columns["triton"]["one ptxas"])
    return {**columns, "ratios": ratios, "ratio": median(ratios), "ratio_with_one_ptxas": same}


def row(title: str, result: dict[str, Any]) -> list[str]:
    """A row of the table: milliseconds."""
    def cell(side: str, name: str) -> str: return f"{1e3 * median(result[side][name]):.0f}"
    return [title, *(cell("ours", name) for name in ("whole", "choice", "writing", "ptxas")),
            *(cell("triton", name) for name in ("whole", "ptxas")), f"{result['ratio']:.2f}",
            spread(result["ratios"]), f"{result['ratio_with_one_ptxas']:.2f}"]


def main() -> None:
    """Measures every case and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=9, help="compilations of each product (default 9)")
    parser.add_argument("--dry", action="store_true", help="print only")
    arguments = parser.parse_args()
    results = {str(case): measure(case, arguments.repeat) for case in each(cases())}
    header = ["ms", "ours", "choice", "writing", "ptxas", "Triton", "its ptxas", "ratio", "spread",
              "one ptxas"]
    print(table(header, [row(title, result) for title, result in results.items()]))
    print(f"wanted: a ratio of at most {WANTED:.2f}")
    record = {"triton": triton.__version__, "ptxas": str(version(require_ptxas())),
              "triton_ptxas": version(triton_ptxas("sm_90a")), "wanted": WANTED,
              "repeat": arguments.repeat, "python": sys.version.split()[0], "results": results}
    if not arguments.dry: save("compile_time", record)


def version(ptxas: Path) -> str:
    """An assembler's release."""
    said = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, check=True).stdout
    return next(line.strip() for line in said.splitlines() if "release" in line)


if __name__ == "__main__": main()
