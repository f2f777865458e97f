"""GGUF's blocks, as llama.cpp writes them.

The quantization_config is made of a file's metadata (models/gguf/): `types` has ggml's number of the type
of each tensor, `heads` the number of heads of projections (q_proj, k_proj) whose rows llama.cpp has ordered.
A tensor is uint8 [N, bytes of a row]. Rows are put into their places block by block.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.errors import ModelError, WeightError, brief
from tinygrad_nv.quant.gguf.blocks import FORMATS, Format, arrays
from tinygrad_nv.quant.readers.reader import Get, Stored, StoredMatrix, Strides


def reader(config: Mapping[str, Any], name: str) -> GGUFReader:
    """The reader of a file's metadata."""
    types, heads = config.get("types"), config.get("heads")
    if not isinstance(types, dict) or not isinstance(heads, dict):
        raise ModelError(f"{name}: quant_method is 'gguf', without the types of tensors", "a GGUF file",
                         "name the .gguf file itself")
    if not all(type(each) is int and each in FORMATS for each in types.values()) or \
            not all(type(each) is int and each > 0 for each in heads.values()):
        raise ModelError(f"{name}: quant_method is 'gguf', with types {brief(types)} and heads "
                         f"{brief(heads)}", "what a GGUF file says", "name the .gguf file itself")
    return GGUFReader(types, heads)


@dataclass(frozen=True)
class GGUFReader:
    """Reads the matrices of one file."""
    types: Mapping[str, int]
    heads: Mapping[str, int]

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """How a layer is stored."""
        name = f"{layer}.weight"
        if name not in self.types or name not in stored: return None
        format, heads = FORMATS[self.types[name]], self.heads.get(layer.rpartition(".")[2])
        if format.type is None: return None     # floats
        columns = stored[name][1][-1] // format.nbytes * format.columns
        if (found := (*stored[name][1][:-1], columns)) != shape:
            raise WeightError(f"{name} is {format.name} of shape {list(found)}", f"shape {list(shape)}",
                              "download the file again, or convert the model anew")
        # rows that are ordered anew are of whole heads, whose size a part does not show
        cuts = {name: (Strides(0), Strides(1, format.columns, format.nbytes))} if heads is None else None
        return StoredMatrix(format.type, (name,), lambda get: _buffers(get, name, format, heads), cuts=cuts)


def row_order(rows: int, heads: int) -> np.ndarray:
    """The row in llama.cpp's order of each row in Hugging Face's: elements i and i + half of a head, which
    rope rotates together, are neighbours there."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _buffers(get: Get, name: str, format: Format, heads: int | None) -> dict[str, np.ndarray]:
    raw = get(name)
    return arrays(format, raw, None if heads is None else row_order(len(raw), heads))
