"""2:4 sparse layers: those of a checkpoint whose config says that it has some (sparsity_structure of
compressed-tensors), on GPUs that multiply them.

Protocol: `candidate(model, shape, type, activations)` says, before anything is read, whether a layer's matrix
may be multiplied as a sparse one. `pack` then makes one of its elements, or gives None where some four
columns of a row have more than two that are not 0: a config says nothing of single layers that a reader could
rely on.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv import functional as F
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.sparse import SparseTensor, compress, two_of_four
from tinygrad_nv.quant.types import E4M3, INT8, TILE, QType

from ..llama import Llama

CHUNK = 1 << 22         # elements that are packed at a time: NumPy makes some ten bytes of each
SIZE = {dtypes.bfloat16: 0x7FFF, dtypes.float16: 0x7FFF, dtypes.fp8e4m3: 0x7F}     # bits but the sign


def candidate(model: Llama, shape: tuple[int, int], type: QType | None = None,
              activations: Activations | None = None) -> bool:
    """Whether a matrix, of the model's dtype or of a type, may be multiplied as a sparse one. Codes are where
    inputs are quantised to the same elements, with scales of whole rows."""
    given = model.config.quantization or {}
    config = given.get("sparsity_config")
    if not isinstance(config, Mapping) or config.get("sparsity_structure") != "2:4": return False
    if type is None: return F.multiplies_sparse(model.dtype, shape, model.device)
    if activations is None or activations.element != type.element.name or activations.scale.columns:
        return False
    plain = type.element in (E4M3, INT8) and type == type.element @ type.scale and not type.scale.columns
    return plain and F.multiplies_sparse(type.element.dtype, shape, model.device)


def pack(dtype: DType, shape: tuple[int, int], elements: np.ndarray, scales: np.ndarray | None,
           device: str | None) -> SparseTensor | None:
    """A sparse matrix of elements [N, K] (bits, or numbers of int8) and scales of rows, None where it is
    none."""
    parts, step = [], max(1, CHUNK // (shape[1] * TILE)) * TILE
    for begin in range(0, shape[0], step):
        raw = elements[begin:begin + step].view(f"u{dtype.itemsize}")
        there = raw != 0 if dtype == dtypes.int8 else raw & SIZE[dtype] != 0
        if (there.reshape(-1, 4).sum(-1, dtype=np.uint8) > 2).any(): return None
        parts.append(compress(raw, two_of_four(there)))
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if scales is not None: arrays["scales"] = scales.astype(np.float32).reshape(shape[0], 1)
    return SparseTensor.of(dtype, shape, arrays, device)
