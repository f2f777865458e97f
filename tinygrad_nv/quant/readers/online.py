"""Weights of floats, quantised while they are loaded: what `--quantization` does where nothing is.

Names are vLLM's. All are to the nearest, without calibration; inputs, the embedding and the head stay as they
are. A matrix is read and rounded some rows at a time, so that a whole one of float32 is never there.

    fp8, fp8_per_channel        e4m3, scales amax / 448 of each output
    fp8_per_tensor, fp8_per_block       of a matrix; of 128 x 128
    int8, int8_per_channel_weight_only      scales amax / 127 of each output
    bitsandbytes                nf4 (QLoRA, arXiv 2305.14314), scales amax of each 64 inputs of an output
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.activations import E4M3_MAX
from tinygrad_nv.quant.floats import as_float32, to_e4m3
from tinygrad_nv.quant.packing import pack
from tinygrad_nv.quant.readers.checks import AGAIN, check_float, check_type
from tinygrad_nv.quant.readers.reader import Get, Stored, StoredMatrix, Strides
from tinygrad_nv.quant.types import E4M3, INT8, NF4, Element, QType, Scale

CHANNEL, TENSOR, BLOCK, GROUP = Scale(1, 0), Scale(0, 0), Scale(128, 128), Scale(1, 64)
SCHEMES = {"fp8": E4M3 @ CHANNEL, "fp8_per_channel": E4M3 @ CHANNEL, "fp8_per_tensor": E4M3 @ TENSOR,
           "fp8_per_block": E4M3 @ BLOCK, "int8": INT8 @ CHANNEL,
           "int8_per_channel_weight_only": INT8 @ CHANNEL, "bitsandbytes": NF4 @ GROUP}
MOST = {E4M3: E4M3_MAX, INT8: 127.0, NF4: 1.0}      # the largest magnitude of codes
BETWEEN = (np.array(NF4.values[1:], np.float32) + np.array(NF4.values[:-1], np.float32)) / 2
ROWS_BYTES = 1 << 20            # of float32 that are rounded at a time: what is made of them stays in a cache
TINY = np.float32(1e-12)        # the scale of zeros


@dataclass(frozen=True)
class OnlineReader:
    """Quantises every projection of a layer to a type."""
    type: QType

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`."""
        name = f"{layer}.weight"
        if not layer.endswith("_proj"): return None
        check_float(stored, name, shape)
        rows, columns = self.type.scale.rows or shape[0], self.type.scale.columns or shape[1]
        type = check_type(layer, self.type, shape)
        return StoredMatrix(type, (name,), lambda get: quantise(type, name, get),
                            cuts={name: (Strides(0, rows, rows), Strides(1, columns, columns))})


def reader(config: Mapping[str, Any], name: str) -> OnlineReader:
    """Returns the reader of {"scheme": a name of `SCHEMES`}."""
    return OnlineReader(SCHEMES[config["scheme"]])


def quantise(type: QType, name: str, get: Get) -> dict[str, np.ndarray]:
    """Codes and float32 scales of a matrix of floats. Raises `WeightError` where one is not finite."""
    raw = get(name)
    (n, k), rows = raw.shape, type.scale.rows or 1
    count = max(1, ROWS_BYTES // (4 * k) // rows) * rows
    begins = range(0, n, count)
    codes = np.empty((n, k * type.bits // 8), np.int8 if type.element is INT8 else np.uint8)

    def largest(begin: int) -> np.ndarray: return _largest(as_float32(raw[begin:begin + count]), type.scale)

    def round_rows(begin: int) -> None:
        part = slice(begin // rows, -(-min(begin + count, n) // rows)) if type.scale.rows else slice(None)
        each = _spread(scales[part], type.scale, len(raw[begin:begin + count]), k)
        codes[begin:begin + count] = _codes(as_float32(raw[begin:begin + count]) / each, type.element)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        found = np.concatenate(list(threads.map(largest, begins)))
        if not np.isfinite(found).all():
            raise WeightError(f"{name} holds numbers that are not finite", "finite weights", AGAIN)
        if not type.scale.rows: found = found.max(keepdims=True)
        scales = np.maximum(found / np.float32(MOST[type.element]), TINY).reshape(type.scale.blocks(n, k))
        for _ in threads.map(round_rows, begins): pass
    return {"codes": codes, "scales": scales}


def _codes(quotients: np.ndarray, element: Element) -> np.ndarray:
    """The nearest codes of float32 numbers, as they are stored."""
    if element is NF4: return pack(np.searchsorted(BETWEEN, quotients).astype(np.uint8), 4)
    return to_e4m3(quotients) if element is E4M3 else np.rint(quotients)


def _largest(w: np.ndarray, scale: Scale) -> np.ndarray:
    """Magnitudes: of each row, of each block, or of all of the rows."""
    size = np.abs(w)
    if scale == CHANNEL: return np.asarray(size.max(1))
    if scale == TENSOR: return np.asarray(size.max().reshape(1))
    found = np.maximum.reduceat(size, np.arange(0, w.shape[1], scale.columns), 1)
    return np.asarray(found if scale.rows == 1 else
                      np.maximum.reduceat(found, np.arange(0, w.shape[0], scale.rows), 0))


def _spread(scales: np.ndarray, scale: Scale, n: int, k: int) -> np.ndarray:
    """Scales that broadcast to n rows of k columns."""
    if not scale.columns: return scales
    return scales.repeat(scale.rows, 0)[:n].repeat(scale.columns, 1)[:, :k]
