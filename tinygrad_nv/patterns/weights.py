"""Weights that kernels of ours multiply as they are stored: what models ask before they repack theirs."""
from __future__ import annotations

from tinygrad import Device
from tinygrad.dtype import DType

from tinygrad_nv import config, hooks
from tinygrad_nv.patterns import sparse_gemm
from tinygrad_nv.patterns.grouped_gemm import scaled as scaled_grouped
from tinygrad_nv.patterns.quant_gemm.named import preparation_key
from tinygrad_nv.patterns.scaled_gemm.named import has_kernel
from tinygrad_nv.patterns.target import GPUS, kind_of, target_of
from tinygrad_nv.quant.types import QType, Scale


def multiplies_codes(type: QType, shape: tuple[int, int], element: str, block: Scale,
                     device: str | None) -> bool:
    """Whether `scaled_matmul` is a kernel for a matrix that is `prepared` for codes, with activations that
    are quantised to `element` with scales of blocks."""
    name = Device.canonicalize(device)
    if not hooks.enabled() or not config.get("NV_GEMM"): return False
    return (target := target_of(name)) is not None and has_kernel(type, shape, element, block, target)


def multiplies_grouped_codes(type: QType, shape: tuple[int, int, int], activation: str, dtype: DType,
                             element: str, block: Scale, device: str | None) -> bool:
    """Whether `scaled_grouped_matmul` is a kernel for a stack of matrices, with results of a dtype, and with
    activations that are quantised to `element` with scales of blocks."""
    name = Device.canonicalize(device)
    if not hooks.enabled() or (type, element, block) != (scaled_grouped.BLOCKS, "e4m3", scaled_grouped.ROWS):
        return False
    return (target := target_of(name)) is not None and \
        scaled_grouped.has_kernel(shape, activation, dtype, target)


def multiplies_sparse(dtype: DType, shape: tuple[int, int], device: str | None) -> bool:
    """Whether `sparse_matmul` is a kernel on a GPU for a matrix."""
    name = Device.canonicalize(device)
    if not hooks.enabled() or not config.get("NV_GEMM") or kind_of(name) not in GPUS: return False
    return (target := target_of(name)) is not None and sparse_gemm.has_kernel(dtype, shape, target)


def weights_key(device: str | None) -> str:
    """Returns what `prepare_matrix`, `multiplies_codes` and the like depend on besides a matrix, for keys of
    weights that were repacked."""
    ours = hooks.enabled() and config.get("NV_GEMM")
    return f"{preparation_key(Device.canonicalize(device))}, codes and sparse {'yes' if ours else 'no'}"
