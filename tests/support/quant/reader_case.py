"""What tests of readers share: a checkpoint's tensors in memory, and what is read of them."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tinygrad.dtype import dtypes

from tinygrad_nv.quant.readers.reader import Activations, Stored, StoredMatrix, reader_of
from tinygrad_nv.quant.tensor import QTensor

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
         torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.int8: "I8", torch.uint8: "U8",
         torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"}
# what NumPy has no dtype for is read as its bits
BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8,
        torch.float8_e8m0fnu: torch.uint8}
LAYER = "model.layers.0.mlp.up_proj"
Tensors = Mapping[str, torch.Tensor]


def layer_of(tensors: Tensors, layer: str = LAYER) -> dict[str, torch.Tensor]:
    """A layer's tensors by their names in the checkpoint."""
    return {f"{layer}.{name}": tensor for name, tensor in tensors.items()}


def stored_of(tensors: Tensors) -> Stored:
    """What a checkpoint's headers say of them."""
    return {name: (NAMES[each.dtype], tuple(each.shape)) for name, each in tensors.items()}


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """As a checkpoint gives it."""
    return tensor.contiguous().view(BITS.get(tensor.dtype, tensor.dtype)).numpy()


def matrix_of(config: Mapping[str, Any], tensors: Tensors, shape: tuple[int, int],
              layer: str = LAYER) -> StoredMatrix | None:
    """How a layer is stored in a checkpoint of these tensors."""
    return reader_of(config, "config.json").matrix(layer, shape, stored_of(tensors))


def read(config: Mapping[str, Any], tensors: Tensors, shape: tuple[int, int],
         layer: str = LAYER) -> tuple[QTensor, Activations | None]:
    """A layer as it is in memory, and how its inputs are quantised. It must take only what it names."""
    found = matrix_of(config, tensors, shape, layer)
    assert found is not None
    arrays = found.arrays(lambda name: array_of({each: tensors[each] for each in found.tensors}[name]))
    return QTensor.of(found.type, shape, arrays, "CPU"), found.activations


def same(found: QTensor, wanted: torch.Tensor) -> bool:
    """Whether a matrix is dequantised, in the dtype of `wanted`, to its bits."""
    dtype = {torch.float32: dtypes.float32, torch.float16: dtypes.float16, torch.bfloat16: dtypes.bfloat16}
    kind, bits = dtype[wanted.dtype], {2: dtypes.uint16, 4: dtypes.uint32}[wanted.itemsize]
    made = found.dequantize(kind).contiguous().realize().bitcast(bits).numpy()
    return made.shape == wanted.shape and made.tobytes() == array_of(wanted).tobytes()
