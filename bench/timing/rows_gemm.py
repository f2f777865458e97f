"""Rows of timing/table.py: matmuls beside CUTLASS's, fast.cu's, DeepGEMM's and Triton's.

CUTLASS: bench/timing/cutlass_gemm.cu, ping-pong and cooperative, by tile and cluster, on main of 2025 (4.x).
fast.cu: kernels 10 and 11. DeepGEMM at a6d97a1: its fp8 matmul has block scales; it stands beside ours with
the same, and beside ours without. All promote sums to float32 every 128 of K.

float16 times matrices of 4- and 8-bit integers has no peer: of a launch a few CTAs are recorded, and those of
Marlin (Frantar et al. 2024) wait in a loop for CTAs that are not. sass_quant.py has its main loop's
instructions beside ours.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path

from bench.lib import gemm_peers
from bench.lib.gemm_peers import Peer as TritonGemm
from bench.lib.specs import E4M3, F16, QTYPES, blocks, matmul, quant_matmul
from bench.timing import deepgemm as timing_deepgemm
from bench.timing import fast_cu as timing_fast_cu
from bench.timing import programs as timing_programs
from bench.timing.gate_cases import GPU_NAME
from bench.timing.rows import Checkouts, Launches, Peer, Row
from bench.timing.triton_times import Array, predict
from tinygrad_nv.quant.types import nbytes

SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), *((m, 8192, 8192) for m in (16, 32, 64, 128, 256, 512)))
FP8, FP8_BLOCKS = (4096, 7168, 16384), ((4096, 4096, 7168), (4096, 7168, 2048), (128, 7168, 16384),
                                        (64, 7168, 2048))
FEW = 64           # rows up to which the matrix's bytes bound it
QUANT_SHAPES = (*((m, 8192, 8192) for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)), (1, 4096, 4096),
                (1, 28672, 4096), (1, 4096, 14336), (16, 4096, 14336))
BF16 = "bf16"
# tiles, CTAs of a cluster, ping-pong
LARGE = ((128, 256, 2, False), (128, 128, 2, True), (64, 256, 2, True), (256, 128, 2, False))
SMALL = ((64, 64, 1, True), (64, 128, 1, True), (128, 128, 1, True), (128, 128, 2, False))
TRITON_LARGE = (("persistent", (128, 256, 64), 8, 3), ("descriptors", (128, 256, 64), 8, 3),
                ("pointers", (128, 256, 64), 8, 3), ("descriptors", (128, 128, 64), 4, 4))
TRITON_SMALL = (("descriptors", (64, 64, 64), 4, 6), ("descriptors", (64, 128, 64), 4, 4),
                ("descriptors", (128, 128, 64), 4, 4), ("pointers", (16, 64, 128), 4, 4),
                ("pointers", (32, 64, 128), 4, 4), ("pointers", (64, 64, 64), 4, 4))


def of_cutlass(kernel: tuple[int, int, int, bool], m: int, n: int, k: int, checkouts: Checkouts) -> Launches:
    rows, columns, cluster, pingpong = kernel
    there = checkouts["cutlass"]
    text = Path(__file__).with_name("cutlass_gemm.cu").read_text()
    flags = [f"-DROWS={rows}", f"-DCOLUMNS={columns}", f"-DCLUSTER={cluster}", *["-DPINGPONG"] * pingpong]
    made = timing_programs.program("cutlass_gemm", text, (there.folder / "include", *there.include), flags)
    return timing_programs.launches(made, m, n, k)


def of_fast_cu(number: int, n: int, checkouts: Checkouts) -> Launches:
    there = checkouts["fast_cu"]
    text = f'{timing_fast_cu.HEAD}#include "examples/matmul/matmul_{number}.cuh"\n' + """
int main(int argc, char **argv)
{
    int const n = atoi(argv[1]);
    bf16 *a, *b, *out;
    cudaMalloc(&a, 2l * n * n), cudaMalloc(&b, 2l * n * n), cudaMalloc(&out, 2l * n * n);
    """ + f"runKernel{number}(n, n, n, a, b, out, nullptr);\n    return int(cudaDeviceSynchronize());\n}}\n"
    made = timing_programs.program(f"fast_cu_{number}", text.replace("#define cudaCheck(x) (x)", CHECK),
                                   (there.folder, *there.include))
    return timing_programs.launches(made, n)


CHECK = "#include <cstdlib>\n#include <cassert>\n#define cudaCheck(x) (x)"


def of_deepgemm(m: int, n: int, k: int, checkouts: Checkouts) -> Launches:
    there = checkouts["deepgemm"]
    return [timing_deepgemm.predict(there.folder, there.include, m, n, k, GPU_NAME)]


def of_triton(peer: TritonGemm, m: int, n: int, k: int, checkouts: Checkouts) -> Launches:
    boxes = gemm_peers.blocks(peer) if peer.descriptors else ((), (), ())
    shapes = zip("abc", ((m, k), (n, k) if peer.descriptors or peer.kind == "persistent" else (k, n), (m, n)),
                 boxes, strict=True)
    given: dict[str, Array | int] = {name: Array(BF16, shape, box) for name, shape, box in shapes}
    given |= {"M": m, "N": n, "K": k}
    fixed = gemm_peers.constants(peer)
    strides = {"stride_am": k, "stride_ak": 1, "stride_bk": 1, "stride_bn": k, "stride_cm": n}
    fn = gemm_peers.KERNELS[peer.kind]
    given |= {name: size for name, size in strides.items() if name in fn.arg_names and name not in fixed}
    tiles = -(-m // peer.block[0]) * -(-n // peer.block[1])
    return [predict(fn, given, (min(tiles, fixed.get("CTAS", tiles)),), fixed, num_warps=peer.warps,
                    num_stages=peer.stages)]


def rows() -> Iterator[Row]:
    """bf16 by shape, fp8, then integers."""
    for m, n, k in SHAPES:
        large = m > 512
        peers = [Peer(f"CUTLASS {'ping-pong' if each[3] else 'cooperative'} {each[0]}x{each[1]}, cluster "
                      f"{each[2]}", partial(of_cutlass, each, m, n, k), "cutlass")
                 for each in (LARGE if large else SMALL)]
        peers += [Peer(f"fast.cu {number}", partial(of_fast_cu, number, n), "fast_cu")
                  for number in ((10, 11) if large else ())]
        kinds = [TritonGemm(kind, block, warps, stages, "K") for kind, block, warps, stages in
                 (TRITON_LARGE if large else TRITON_SMALL) if block[0] < 2 * max(m, 16)]
        peers += [Peer(f"{each}, {'x'.join(map(str, each.block))}", partial(of_triton, each, m, n, k))
                  for each in kinds]
        yield Row("matmul bf16", f"{m} x {n} x {k}", matmul(m, n, k), tuple(peers), 2 * m * n * k)
    yield Row("matmul e4m3", "4096 x 7168 x 16384", matmul(*FP8, E4M3),
              (Peer("DeepGEMM, block scales", partial(of_deepgemm, *FP8), "deepgemm"),),
              2 * prod(FP8))
    for extents in (FP8, *FP8_BLOCKS):
        yield Row("matmul e4m3, block scales", " x ".join(map(str, extents)), blocks(*extents),
                  (Peer("DeepGEMM", partial(of_deepgemm, *extents), "deepgemm"),), 2 * prod(extents))
    yield from quant_rows()


def quant_rows() -> Iterator[Row]:
    """float16 times matrices of int4 in groups, then of int8."""
    for name, family, shapes in (("int4", "matmul int4", QUANT_SHAPES),
                                 ("int8", "matmul int8 weights", [(m, 8192, 8192) for m in (1, 16, 1024)])):
        for m, n, k in shapes:
            few, type = m <= FEW, QTYPES[name]
            yield Row(family, f"{m} x {n} x {k}", quant_matmul(type, m, n, k, F16), (),
                      0 if few else 2 * m * n * k, nbytes(type, n, k) + 2 * m * (n + k) if few else 0)
