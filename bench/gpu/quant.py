"""The part "quant" of bench/gpu/run.py: matmuls with quantised matrices, TFLOP/s and GB/s.

Weight-only: x @ w.T of bfloat16 activations and int4 (groups of 128), int8 and e4m3 (a scale for each output)
at the layers of Llama 8B and 70B, from one row to 4096; and other types at one layer: zero points (AWQ),
MXFP4, Q4_K, NF4. Codes times codes: int8 and e4m3 with a scale for each row and each output (W8A8, FP8), and
e4m3 with scales of 1 x 128 and 128 x 128. 2:4 sparse matrices of bfloat16, e4m3 and int8: TFLOP/s counts the
zeros. GB/s counts codes, scales, activations and the result once.
Contenders are in quant_contenders.py.

Every row of a result is compared with float32, one of 16 with float64.

With --emulate: each matmul scaled down on the emulator, two sets in turns, whose results must be right.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tinygrad.dtype import dtypes

from bench.gpu import quant_contenders  # noqa: F401 (registers them)
from bench.gpu.compare import check_on_emulator
from bench.gpu.gemm import LLAMA, GemmWorkload
from bench.gpu.launch import GemmLauncher
from bench.gpu.parts import Column, NotMeasured, Options, Row, emulation, timing_part, verdict_row, workloads
from bench.gpu.quant_workloads import TYPES, CodesWorkload, WeightOnly
from bench.gpu.sparse_workloads import SparseWorkload
from tinygrad_nv.quant import types
from tinygrad_nv.quant.types import QType, per_group_scale
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

OTHERS = {"AWQ": QType(types.UINT4, per_group_scale(128, dtypes.float16), zeros=True), "MXFP4": types.MXFP4,
          "Q4_K": types.Q4_K, "NF4": types.NF4 @ per_group_scale(64)}
CODES = {"W8A8": types.INT8, "FP8": types.E4M3}
SPARSE = {"2:4 bf16": dtypes.bfloat16, "2:4 FP8": dtypes.fp8e4m3, "2:4 INT8": dtypes.int8}
ROWS = (1, 16, 64, 128, 1024, 4096)
LAYERS = (("8B", "qkv"), ("8B", "gate_up"), ("8B", "down"), ("70B", "o"))
SOME_LAYERS, SOME_ROWS = LAYERS[1:3], (1, 64, 1024)


@workloads("quant")
def shapes() -> Iterator[WeightOnly | CodesWorkload | GemmWorkload | SparseWorkload]:
    """All matmuls."""
    for kind, type in TYPES.items():
        for model, layer in LAYERS if kind == "int4" else SOME_LAYERS:
            for m in ROWS: yield WeightOnly(f"{kind} {model} {layer} M={m}", type, m, *LLAMA[model][layer])
    n, k = LLAMA["8B"]["gate_up"]
    for kind, type in OTHERS.items():
        for m in SOME_ROWS: yield WeightOnly(f"{kind} 8B gate_up M={m}", type, m, n, k)
    for model, layer in SOME_LAYERS:
        n, k = LLAMA[model][layer]
        for m in ROWS:
            for kind, element in CODES.items():
                yield CodesWorkload(f"{kind} {model} {layer} M={m}", element, m, n, k)
            yield GemmWorkload(f"FP8 blocks {model} {layer} M={m}", m, n, k, fp8=True, blocks=True)
    n, k = LLAMA["8B"]["gate_up"]
    for kind, dtype in SPARSE.items():
        for m in (*SOME_ROWS, 4096): yield SparseWorkload(f"{kind} 8B gate_up M={m}", dtype, m, n, k)


@emulation("quant")
def run_emulated(shape: Any, options: Options) -> Row:
    """The matmul scaled down on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, arch = shape.scale_down(), options.arch
    schedule, whole = choose(small.spec, GPU(arch)), choose(shape.spec, GPU(arch))
    if schedule is None or whole is None: raise NotMeasured(TABLE.why_not(shape.spec, GPU(arch)))
    driver = EmulatedDriver(arch, seed=options.seed)
    made = TABLE.build(small.spec, schedule, GPU(arch, driver.properties.sm_count, driver.clusters))
    launcher = GemmLauncher(driver, made)
    wrong = check_on_emulator(small, driver, partial(launcher.bind_launch, small.spec))
    return verdict_row(wrong, str(schedule), f"{schedule}; of the whole: {whole}")


timing_part("quant", "matmuls with quantised matrices", Column("TFLOP/s"), expected_s=6.0)
