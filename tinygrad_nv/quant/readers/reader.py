"""What reads quantised matrices, and which reader a checkpoint needs.

Protocol: `reader_of(quantization_config, name)` is the `Reader` of a config.json's `quantization_config`. For
each linear layer `reader.matrix(layer, (N, K), stored)` says how it is stored, a `StoredMatrix`, or None
where it is not quantised; `stored` has the dtypes (safetensors' names: I32, F8_E4M3, …) and shapes of all
tensors of the checkpoint. Nothing is read before all layers are known to be whole. `matrix.arrays(get)` then
reads, and gives the buffers of its type (types.py). A module of a kind has `reader(config, name)`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from tinygrad_nv.errors import ModelError
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
class StoredMatrix:
    """How a layer's matrix is stored: its type, the checkpoint's tensors that it takes, and how they become
    the type's buffers."""
    type: QType
    tensors: tuple[str, ...]
    arrays: Callable[[Get], dict[str, np.ndarray]]
    activations: Activations | None = None


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
        raise ModelError(f"{name}: quant_method is {method!r}", f"one of {', '.join(READERS)}",
                         "use the unquantised checkpoint, or one of these kinds")
    return method
