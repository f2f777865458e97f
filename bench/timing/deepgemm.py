"""DeepGEMM's fp8 matmuls with block scales as judges of the timing model.

github.com/deepseek-ai/DeepGEMM at a6d97a1, its first release, which published this table: e4m3 operands, a
scale for 1 x 128 of A and for 128 x 128 of B, promoted to float32 every 128 of K; TFLOP/s on an H800 SXM,
which computes like an H100 SXM, of the kernel's own duration. Its Python chooses tiles, and is called for
that; its kernel is compiled by nvcc. Fitted: both rows of 2112 columns and few rows (coalesced). Its tests
make the operands just before, so that some of those below 20 MB lie in L2, which the model does not know. """
from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.timing.judges import Judged, to_ptx
from tinygrad_nv.ptx.emulator import Emulator, TensorMap
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.timing.model import Timing

SMS, BLOCK_K = 132, 128
GROUP_ROWS = 128    # to which rows of a group are padded
PUBLISHED = {(64, 2112, 7168): 206, (64, 24576, 1536): 289, (64, 32768, 512): 219, (64, 7168, 16384): 336,
             (64, 4096, 7168): 287, (64, 7168, 2048): 295, (128, 2112, 7168): 352, (128, 24576, 1536): 535,
             (128, 32768, 512): 358, (128, 7168, 16384): 645, (128, 4096, 7168): 533, (128, 7168, 2048): 510,
             (4096, 2112, 7168): 1058, (4096, 24576, 1536): 990, (4096, 32768, 512): 590,
             (4096, 7168, 16384): 1358, (4096, 4096, 7168): 1304, (4096, 7168, 2048): 1025}
FITTED = {(64, 2112, 7168), (128, 2112, 7168)}
FLAGS = ("--expt-relaxed-constexpr", "--expt-extended-lambda", "-Wno-deprecated-declarations")


@dataclass(frozen=True)
class Config:
    """Configuration that DeepGEMM chooses: rows and columns of a tile, stages, CTAs that a tile of A goes to,
    and bytes of shared memory."""
    rows: int
    columns: int
    stages: int
    multicast: int
    shared_bytes: int


def config(source: Path, m: int, n: int, k: int, grouped: bool = False) -> Config:
    """Its own choice: the functions of its Python that need no torch, run. `grouped`: rows of groups lie
    padded, one after the other."""
    text = ast.parse((source / "deep_gemm" / "jit_kernels" / "gemm.py").read_text())
    wanted = ("is_tma_multicast_legal", "get_smem_size", "get_best_configs")
    text.body = [node for node in text.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    space: dict[str, object] = {"cell_div": lambda a, b: -(-a // b), "Tuple": tuple,
                                "get_m_alignment_for_contiguous_layout": lambda: GROUP_ROWS}
    exec(compile(text, "gemm.py", "exec"), space)
    found = space["get_best_configs"]
    assert callable(found)
    return Config(*found(m, n, k, 1, SMS, is_grouped_contiguous=grouped))


def compile_kernel(source: Path, include: Sequence[Path], n: int, k: int, made: Config,
                   groups: int = 0) -> str:
    """The PTX of the kernel for these extents; of `groups` matrices."""
    kind = f"{groups or 1}, {made.stages}, {made.multicast}, GemmType::" + \
        ("GroupedContiguous" if groups else "Normal")
    return to_ptx(f"""#include <stdexcept>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cudaTypedefs.h>
#define PFN_cuTensorMapEncodeTiled PFN_cuTensorMapEncodeTiled_v12000
#include "deep_gemm/fp8_gemm.cuh"
using namespace deep_gemm;
void go(__nv_bfloat16 *d, float *s, CUtensorMap m) {{
    Gemm<{n}, {k}, {made.rows}, {made.columns}, {BLOCK_K}, {kind}>::run(
        d, s, nullptr, 1, m, m, m, m, 0, {SMS}, {made.shared_bytes});
}}
""", (source / "deep_gemm" / "include", *include), FLAGS)


def predict(source: Path, include: Sequence[Path], m: int, n: int, k: int, gpu: str) -> Timing:
    """A launch of its kernel on operands in the emulator's memory."""
    made = config(source, m, n, k)
    text = compile_kernel(source, include, n, k, made)
    emu = Emulator("sm_90a", check=False)
    groups = -(-k // BLOCK_K)
    a, b = (emu.alloc(np.zeros((rows, k), np.uint8)) for rows in (m, n))
    d = emu.alloc(np.zeros((m, n), np.uint16))
    scales_a = emu.alloc(np.zeros((groups, -(-m // 4) * 4), np.float32))
    scales_b = emu.alloc(np.zeros((-(-n // BLOCK_K), groups), np.float32))
    maps = (TensorMap.of_tiles(a, (made.rows, BLOCK_K), "128B"),
            TensorMap.of_tiles(b, (made.columns, BLOCK_K), "128B"),
            TensorMap.of_tiles(scales_a, (1, made.rows)),
            TensorMap.of_tiles(d, (made.rows, made.columns), dtype="bf16"))
    return _launch(emu, text, made, [d, scales_b, 0, m, *maps], gpu)


def predict_grouped(source: Path, include: Sequence[Path], counts: np.ndarray, n: int, k: int,
                    gpu: str) -> Timing:
    """A launch of its kernel for groups of so many rows, each padded to whole tiles; groups without rows have
    none."""
    tiles, groups = -(-counts // GROUP_ROWS), -(-k // BLOCK_K)
    m, of_row = int(tiles.sum()) * GROUP_ROWS, np.repeat(np.arange(len(counts)), tiles * GROUP_ROWS)
    made = config(source, m, n, k, grouped=True)
    text = compile_kernel(source, include, n, k, made, len(counts))
    emu = Emulator("sm_90a", check=False)
    a, b, d = emu.zeros(m * k), emu.zeros(len(counts) * n * k), emu.zeros(2 * m * n)
    scales_a, scales_b = emu.zeros(4 * groups * m), emu.zeros(4 * len(counts) * -(-n // BLOCK_K) * groups)
    maps = (TensorMap.of_tiles(a.ptr, (made.rows, BLOCK_K), "128B", (m, k), (k,), "u8"),
            TensorMap.of_tiles(b.ptr, (made.columns, BLOCK_K), "128B", (len(counts) * n, k), (k,), "u8"),
            TensorMap.of_tiles(scales_a.ptr, (1, made.rows), "none", (groups, m), (4 * m,), "f32"),
            TensorMap.of_tiles(d.ptr, (made.rows, made.columns), "none", (m, n), (2 * n,), "bf16"))
    layout = emu.alloc(of_row.astype(np.int32))
    return _launch(emu, text, made, [d, scales_b, layout, m, *maps], gpu)


def _launch(emu: Emulator, text: str, made: Config, arguments: Sequence[object], gpu: str) -> Timing:
    entry = next(name for name in parse(text).functions if "fp8_gemm_kernel" in name)
    threads = 128 * (2 if made.rows == 64 else 3)
    found = emu.launch(text, SMS, threads, list(arguments), entry, made.multicast, made.shared_bytes,
                       timing=gpu, keep=False).timing
    assert found is not None
    return found


def judge(source: Path, include: Sequence[Path]) -> Iterator[Judged]:
    """Each row of its table."""
    for (m, n, k), tflops in PUBLISHED.items():
        timing = predict(source, include, m, n, k, "h100")
        yield Judged("DeepGEMM", f"DeepGEMM {m} x {n} x {k}", tflops, 2 * m * n * k / timing.seconds / 1e12,
                     (m, n, k) in FITTED)
