"""Protocol of readers of quantised matrices, and the choice of the reader that a checkpoint needs.

Protocol: `reader_of(quantization_config, name)` is the `Reader` of a config.json's `quantization_config`. For
each linear layer `reader.matrix(layer, (N, K), stored)` says how it is stored, a `StoredMatrix`, or None
where it is not quantised; `stored` has the dtypes (safetensors' names: I32, F8_E4M3, …) and shapes of all
tensors of the checkpoint. Nothing is read before all layers are known to be whole. `matrix.arrays(get)` then
reads, and gives the buffers of its type (types.py). A module of a kind has `reader(config, name)`.

`matrix.cuts` says where rows and columns of a matrix lie in its tensors. By it a rank of a tensor parallel
model reads a part of each tensor, and not all of them (quant/cut.py); `matrix.read(get)` does.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.quant.types import QType, Scale

READERS = {"awq": "awq", "gptq": "gptq", "compressed-tensors": "compressed_tensors", "fp8": "fp8",
           "fbgemm_fp8": "fp8", "modelopt": "fp8", "bitsandbytes": "bitsandbytes", "mxfp4": "mxfp4",
           "gguf": "gguf", "torchao": "torchao"}
ONLINE = "online"   # no checkpoint's quant_method: floats that are quantised as they are read (online.py)
# a tensor by its whole name in the checkpoint; bfloat16 and fp8 are unsigned integers of their bits
Get = Callable[[str], np.ndarray]
Stored = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Activations:
    """How a layer's inputs are quantised before they are multiplied: `element` is "int8" or "e4m3", a scale
    for each block of `scale` (a row is a token). Of static ones the scale is in the checkpoint."""
    element: str
    scale: Scale
    static: bool = False


@dataclass(frozen=True)
class TensorPart:
    """Indices [first, first + count) along an axis of a checkpoint's tensor."""
    axis: int
    first: int
    count: int


GetPart = Callable[[str, TensorPart | None], np.ndarray]    # the same as `Get`, or a part of the tensor


@dataclass(frozen=True)
class Strides:
    """Rows, or columns, of a matrix along an axis of a tensor: each `extent` of them take `count` indices.
    With `numbers`, values are numbers of groups of so many, from 0 on."""
    axis: int
    extent: int = 1
    count: int = 1
    numbers: int = 0


# of each tensor that is cut where rows and columns lie; None where a part of them needs the whole tensor
Cuts = Mapping[str, tuple[Strides | None, Strides | None]]


def along_blocks(scale: Scale, shape: tuple[int, int], stored: tuple[int, ...]
                 ) -> tuple[Strides | None, Strides | None]:
    """Returns where rows and columns of a matrix lie in a tensor of its scales: [rows, columns], [rows] where
    one scale has all columns, or [rows, 1, columns, 1]."""
    rows = Strides(0, scale.rows) if 0 < scale.rows < shape[0] and stored else None
    columns = Strides(2 if len(stored) == 4 else 1, scale.columns) \
        if 0 < scale.columns < shape[1] and len(stored) > 1 else None
    return rows, columns


@dataclass(frozen=True)
class StoredMatrix:
    """How a layer's matrix is stored: its type, the checkpoint's tensors that it takes, and how they become
    the type's buffers. `cuts` None: tensors can only be read whole. `extents` is a tensor that holds N and K,
    "" for none. Of a matrix that is itself a part, `parts` are those of its tensors."""
    type: QType
    tensors: tuple[str, ...]
    arrays: Callable[[Get], dict[str, np.ndarray]]
    activations: Activations | None = None
    cuts: Cuts | None = None
    extents: str = ""
    parts: Mapping[str, TensorPart] = field(default_factory=dict)

    def read(self, get: GetPart) -> dict[str, np.ndarray]:
        """The type's buffers, of no more of the tensors than they need."""
        return self.arrays(lambda name: get(name, self.parts.get(name)))


class Reader(Protocol):
    """Reads the layers of one checkpoint."""

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """How layer `layer` (model.layers.0.self_attn.q_proj), N outputs x K inputs, is stored; None where
        it is not quantised. Raises `WeightError` for what is missing or does not fit."""


def reader_of(config: Mapping[str, Any], name: str) -> Reader:
    """The reader of a `quantization_config`; `name` is the file, for messages. Raises `ModelError`."""
    own = config.get("quant_method") == ONLINE
    module = import_module(f"{__package__}.{ONLINE if own else READERS[require_known(config, name)]}")
    found: Reader = module.reader(config, name)
    return found


def require_known(config: Mapping[str, Any], name: str) -> str:
    """The quant_method. Raises `ModelError` where no reader has it."""
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise ModelError(f"{name}: quant_method is {brief(method)}", f"one of {', '.join(READERS)}",
                         "use the unquantised checkpoint, or one of these kinds")
    return method
