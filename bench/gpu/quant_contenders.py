"""The contenders of matmuls with quantised matrices: ours, bfloat16 (cuBLAS), torch's own quantised matmuls,
and vLLM's, where it is installed.

Protocol: that of gemm_contenders.py. Each contender makes what it multiplies with of a set's buffers in rows
(quant_data.py), so that all have the same matrix. What a contender has no kernel for it says in words.

    bf16        torch.mm, of the dequantised matrix: what quantising gains
    torch       _weight_int4pack_mm, _weight_int8pack_mm; _int_mm and what scales it; _scaled_mm
    Marlin      gptq_marlin_gemm, of int4 and int8; of e4m3 as its fp8 layers have it
    Machete     machete_mm, sm_90
    CUTLASS     cutlass_scaled_mm, of codes times codes
    cuSPARSELt  torch's semi-structured sparse matmul, of 2:4 sparse matrices; bf16 and torch multiply the
                dense matrix there
"""
from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from bench.gpu.gemm_contenders import Buffers, bind_default
from bench.gpu.launch import device
from bench.gpu.parts import NotMeasured, Options, Run, about, contender
from bench.gpu.quant_data import dequantise
from bench.gpu.quant_workloads import TYPES, CodesWorkload, WeightOnly
from bench.gpu.sparse_workloads import SparseWorkload
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.template import GPU

INNER_TILES = 8         # of K that torch packs together


@contender("quant", "ours")
def ours(shape: Any, buffers: Buffers, options: Options) -> Run:
    """Our kernel, by the default schedule."""
    return bind_default(shape.spec, buffers)


@about("quant")
def describe_schedule(shape: Any) -> dict[str, Any]:
    """The schedule that `ours` takes."""
    gpu = device().properties
    return {"schedule": str(choose(shape.spec, GPU(gpu.arch, gpu.sm_count)))}


# **** what a workload is ****

def weight_only(shape: Any) -> str:
    """"int4", "int8" or "fp8" of symmetric weights, "" of others and of codes times codes."""
    if not isinstance(shape, WeightOnly): return ""
    return next((name for name, type in TYPES.items() if type == shape.type), "")


def multiplies_codes(shape: Any) -> str:
    """"int8" or "fp8" with a scale for each row, "blocks", or ""."""
    if isinstance(shape, WeightOnly | SparseWorkload): return ""
    if isinstance(shape, CodesWorkload): return "int8" if shape.int8 else "fp8"
    return "blocks"


# **** torch ****

@contender("quant", "bf16")
def cublas(shape: Any, buffers: Buffers, options: Options) -> Run:
    """Multiplies by the dequantised matrix; by a sparse one with its zeros."""
    import torch
    sparse = isinstance(shape, SparseWorkload)
    if multiplies_codes(shape) or (sparse and not shape.bf16):
        raise NotMeasured("rounds both operands: another matmul")
    sets = [(each["a"].view(shape.m, shape.k),
             each["dense"] if sparse else dequantise(shape.type, each, shape.k).bfloat16(),
             each["out"].view(shape.m, shape.n)) for each in buffers]

    def run(i: int) -> None:
        a, w, out = sets[i]
        torch.mm(a, w.T, out=out)

    return run


@contender("quant", "torch")
def of_torch(shape: Any, buffers: Buffers, options: Options) -> Run:
    """torch's quantised matmuls; what has no `out` is copied there."""
    kind = weight_only(shape)
    if isinstance(shape, SparseWorkload): return _dense_codes(shape, buffers)
    if kind == "int4": return _int4pack(shape, buffers)
    if kind == "int8": return _int8pack(shape, buffers)
    if not multiplies_codes(shape): raise NotMeasured("torch has no such matmul")
    return _int_mm(shape, buffers) if multiplies_codes(shape) == "int8" else _torch_scaled_mm(shape, buffers)


def _int4pack(shape: Any, buffers: Buffers) -> Run:
    """(q − 8) s + z, with z = 0."""
    import torch
    sets = []
    for each in buffers:
        q = each["rows codes"]
        packed = torch._convert_weight_to_int4pack(q[:, ::2] << 4 | q[:, 1::2], INNER_TILES)
        scales = each["rows scales"].bfloat16()
        sets.append((each["a"].view(shape.m, shape.k), packed,
                     torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous(),
                     each["out"].view(shape.m, shape.n)))

    def run(i: int) -> None:
        a, packed, scales, out = sets[i]
        out.copy_(torch._weight_int4pack_mm(a, packed, shape.type.scale.columns, scales))

    return run


def _int8pack(shape: Any, buffers: Buffers) -> Run:
    """Not of every torch's CUDA."""
    import torch
    sets = [(each["a"].view(shape.m, shape.k), each["rows codes"].view(torch.int8),
             each["rows scales"].bfloat16().flatten(), each["out"].view(shape.m, shape.n))
            for each in buffers]

    def run(i: int) -> None:
        a, codes, scales, out = sets[i]
        out.copy_(torch._weight_int8pack_mm(a, codes, scales))

    return run


def _int_mm(shape: Any, buffers: Buffers) -> Run:
    """And kernels that scale its int32, which torch.compile makes one of."""
    import torch
    if shape.m <= 16: raise NotMeasured("_int_mm takes more than 16 rows")
    sets = [(each["a"].view(shape.m, shape.k), each["b"].view(shape.n, shape.k).T, each["x0"],
             each["x1"][:, None], each["out"].view(shape.m, shape.n)) for each in buffers]

    def step(a: Any, b: Any, outputs: Any, rows: Any, out: Any) -> None:
        out.copy_(torch._int_mm(a, b).float() * outputs * rows)

    made = torch.compile(step, dynamic=False)
    made(*sets[0])
    return lambda i: made(*sets[i])


def _torch_scaled_mm(shape: Any, buffers: Buffers) -> Run:
    """Scales of rows; of blocks, which cuBLAS has from CUDA 12.9 on, along the rows of x."""
    import torch
    sets = []
    for each in buffers:
        a, b = each["a"].view(shape.m, shape.k), each["b"].view(shape.n, shape.k).T
        rows, outputs = scales_of(shape, each)
        sets.append((a, b, rows, outputs, each["out"].view(shape.m, shape.n)))

    def run(i: int) -> None:
        a, b, rows, outputs, out = sets[i]
        torch._scaled_mm(a, b, rows, outputs, out_dtype=out.dtype, use_fast_accum=False, out=out)

    return run


def _dense_codes(shape: Any, buffers: Buffers) -> Run:
    """A sparse matrix of 8 bits with its zeros, without scales."""
    import torch
    if shape.bf16: raise NotMeasured("bf16 is this one")
    if shape.int8 and shape.m <= 16: raise NotMeasured("_int_mm takes more than 16 rows")
    unit = torch.ones((), device=buffers[0]["a"].device)
    sets = [(each["a"].view(shape.m, shape.k), each["dense"].T, each["out"].view(shape.m, shape.n))
            for each in buffers]

    def run(i: int) -> None:
        a, b, out = sets[i]
        if shape.int8: out.copy_(torch._int_mm(a, b))
        else: torch._scaled_mm(a, b, unit, unit, out_dtype=out.dtype, use_fast_accum=False, out=out)

    return run


@contender("quant", "cuSPARSELt")
def cusparselt(shape: Any, buffers: Buffers, options: Options) -> Run:
    """torch._cslt_sparse_mm, which torch.sparse's semi-structured tensors call, also of e4m3, which they
    refuse; a copy into `out`. Rows of activations are padded with zeros to a multiple that cuSPARSELt
    takes."""
    import torch
    from torch.sparse.semi_structured import SparseSemiStructuredTensorCUSPARSELT as Semi
    if not isinstance(shape, SparseWorkload): raise NotMeasured("multiplies 2:4 sparse matrices alone")
    if not torch.backends.cusparselt.is_available(): raise NotMeasured("this torch has no cuSPARSELt")
    kind = buffers[0]["dense"].dtype
    more = -shape.m % Semi._DTYPE_SHAPE_CONSTRAINTS[kind].dense_min_cols
    sets = [(torch.nn.functional.pad(each["a"].view(shape.m, shape.k), (0, 0, 0, more)),
             torch._cslt_compress(each["dense"]), each["out"].view(shape.m, shape.n)) for each in buffers]

    def run(i: int) -> None:
        a, w, out = sets[i]
        out.copy_(torch._cslt_sparse_mm(w, a.T, out_dtype=out.dtype, transpose_result=True)[:shape.m])

    return run


def scales_of(shape: Any, one: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the scales of x and of the outputs: [m, 1] and [1, n]; of blocks [m, groups], side by side
    along m, and [groups, n / 128]."""
    if multiplies_codes(shape) != "blocks": return one["x1"][:, None], one["x0"][None]
    x = one["a_scale"].view(shape.m, shape.groups)
    return x.T.contiguous().T, one["b_scale"].view(-1, shape.groups).T


# **** vLLM ****

def require_vllm() -> None:
    """Raises where it is not installed."""
    if find_spec("vllm") is None: raise NotMeasured("vLLM is not installed")


def pack_gptq(codes: Any, bits: int) -> Any:
    """Bytes of codes [n, k] as GPTQ packs them, int32 [k · bits / 32, n]."""
    import torch
    each, columns = 32 // bits, codes.T.int()
    made = torch.zeros(columns.shape[0] // each, columns.shape[1], dtype=torch.int32, device=codes.device)
    for i in range(each): made |= columns[i::each] << (i * bits)
    return made


def gptq(shape: Any, one: dict[str, Any]) -> tuple[Any, Any, int, int]:
    """A symmetric integer matrix as GPTQ has it: codes from 0 on, scales [groups, n], bits, columns of a
    group (-1: all)."""
    bits = shape.type.bits
    codes = one["rows codes"] if bits == 4 else one["rows codes"] ^ 0x80
    return (pack_gptq(codes, bits), one["rows scales"].bfloat16().T.contiguous(), bits,
            shape.type.scale.columns or -1)


@contender("quant", "Marlin")
def marlin(shape: Any, buffers: Buffers, options: Options) -> Run:
    """By the functions of vLLM's layers, which stay as the kernel's arguments change."""
    kind = weight_only(shape)
    if not kind: raise NotMeasured("not one of Marlin's types here")
    require_vllm()
    if kind == "fp8": return _marlin_fp8(shape, buffers)
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils as utils
    from vllm.scalar_type import scalar_types
    sets = []
    for each in buffers:
        codes, scales, bits, group = gptq(shape, each)
        empty = utils.marlin_make_empty_g_idx(codes.device)
        workspace = utils.marlin_make_workspace_new(codes.device)
        sets.append((each, {
            "weight": ops.gptq_marlin_repack(codes, empty, shape.k, shape.n, bits),
            "weight_scale": utils.marlin_permute_scales(scales, shape.k, shape.n, group),
            "weight_zp": empty, "g_idx": empty, "g_idx_sort_indices": empty, "workspace": workspace,
            "wtype": scalar_types.uint4b8 if bits == 4 else scalar_types.uint8b128,
            "output_size_per_partition": shape.n, "input_size_per_partition": shape.k, "is_k_full": True}))

    def run(i: int) -> None:
        each, more = sets[i]
        made = utils.apply_gptq_marlin_linear(each["a"].view(shape.m, shape.k), **more)
        each["out"].view(shape.m, shape.n).copy_(made)

    return run


def _marlin_fp8(shape: Any, buffers: Buffers) -> Run:
    """Returns the run of a layer that vLLM prepares."""
    import torch
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8 as fp8
    sets = []
    for each in buffers:
        layer = torch.nn.Module()
        codes = each["rows codes"].view(torch.float8_e4m3fn).T
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(each["rows scales"].float(), requires_grad=False)
        layer.output_size_per_partition, layer.input_size_per_partition = shape.n, shape.k
        layer.orig_dtype = torch.bfloat16
        fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=True)
        sets.append((each, layer))

    def run(i: int) -> None:
        each, layer = sets[i]
        made = fp8.apply_fp8_marlin_linear(
            input=each["a"].view(shape.m, shape.k), weight=layer.weight, weight_scale=layer.weight_scale,
            workspace=layer.workspace, size_n=shape.n, size_k=shape.k, bias=None)
        each["out"].view(shape.m, shape.n).copy_(made)

    return run


@contender("quant", "Machete")
def machete(shape: Any, buffers: Buffers, options: Options) -> Run:
    """Its own schedule."""
    if weight_only(shape) not in ("int4", "int8"): raise NotMeasured("not one of Machete's types here")
    require_vllm()
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types
    sets = []
    for each in buffers:
        codes, scales, bits, group = gptq(shape, each)
        a = each["a"].view(shape.m, shape.k)
        kind = scalar_types.uint4b8 if bits == 4 else scalar_types.uint8b128
        laid = ops.machete_prepack_B(codes.T.contiguous().T, a.dtype, kind, scales.dtype)
        sets.append((each, {"a": a, "b_q": laid, "b_type": kind, "b_group_scales": scales,
                            "b_group_size": group, "out_type": a.dtype}))

    def run(i: int) -> None:
        each, given = sets[i]
        each["out"].view(shape.m, shape.n).copy_(ops.machete_mm(**given))

    return run


@contender("quant", "CUTLASS")
def cutlass(shape: Any, buffers: Buffers, options: Options) -> Run:
    """vLLM's kernels of codes times codes."""
    if not multiplies_codes(shape): raise NotMeasured("multiplies codes with codes alone")
    require_vllm()
    from vllm import _custom_ops as ops
    sets = [(each["a"].view(shape.m, shape.k), each["b"].view(shape.n, shape.k).T, *scales_of(shape, each),
             each["out"].view(shape.m, shape.n)) for each in buffers]

    def run(i: int) -> None:
        a, b, rows, outputs, out = sets[i]
        out.copy_(ops.cutlass_scaled_mm(a, b, rows, outputs, out.dtype))

    return run
