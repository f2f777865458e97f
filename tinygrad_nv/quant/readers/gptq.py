"""GPTQ, as AutoGPTQ and GPTQModel write it: codes of 2, 3, 4 or 8 bits of a group of inputs.

    qweight   I32 [K · bits / 32, N]         inputs without gaps, the first in the lowest bits
    qzeros    I32 [K / g, N · bits / 32]     zero points of outputs in the same way
    scales    [K / g, N]                     w = (q − z) · s
    g_idx     I32 [K]                        the group of each input; with desc_act in any order

Format "gptq_v2" stores z. "gptq" (v1) stores z − 1: of 3 bits modulo 8, of the others the whole word less
one in each field, so that a field of 0 borrows from the next. Source: GPTQModel 7.7.0, utils/model.py.
`dynamic` (GPTQModel) has settings of single layers by regular expressions; "-:" is of layers that are not
quantised.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.errors import ModelError, WeightError, brief
from tinygrad_nv.quant.packing import fields, planes_of
from tinygrad_nv.quant.readers.checks import (
    AGAIN,
    check_float,
    check_tensor,
    check_type,
    column_order,
    element_of,
    group_size,
    is_unquantised,
    setting,
)
from tinygrad_nv.quant.readers.reader import Get, Stored, StoredMatrix, Strides
from tinygrad_nv.quant.types import QType, Scale
from tinygrad_nv.regexes import compile_pattern, require_few

BITS, FORMATS = (2, 3, 4, 8), ("gptq", "gptq_v2")


@dataclass(frozen=True)
class Settings:
    """Settings of a layer: groups of `group` inputs, 0 for all of them, in any order if `ordered`; `first` is
    what is stored for zero points of 0: −1 in v1, 0 in v2."""
    bits: int
    group: int
    symmetric: bool
    ordered: bool
    first: int

    @staticmethod
    def of(config: Mapping[str, Any], name: str) -> Settings:
        """Returns the settings of a `quantization_config`. Raises `ModelError`."""
        bits = setting(config, "bits", None, BITS, name)
        key = "checkpoint_format" if config.get("checkpoint_format") else "format"
        version = setting({key: str(config.get(key) or "gptq").lower()}, key, "gptq", FORMATS, name)
        symmetric = setting(config, "sym", True, (True, False), name)
        ordered = setting(config, "desc_act", False, (True, False), name)
        return Settings(bits, group_size(config, name), symmetric, ordered, -1 if version == "gptq" else 0)


@dataclass(frozen=True)
class GPTQReader:
    """Reads layers with the settings of `config`, and those of single ones in its `dynamic`."""
    config: Mapping[str, Any]
    name: str

    def settings(self, layer: str) -> Settings | None:
        """Returns the settings of a layer, None of one that is not quantised: the first pattern of `dynamic`
        that fits its name says it. Raises `ModelError`."""
        dynamic, where = self.config.get("dynamic") or {}, f"{self.name}: dynamic of quantization_config"
        require_few(len(dynamic), where)
        for key, more in dynamic.items():
            if not compile_pattern(key.removeprefix("-:").removeprefix("+:"), where).match(layer): continue
            return None if key.startswith("-:") else Settings.of({**self.config, **more}, self.name)
        return Settings.of(self.config, self.name)

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`."""
        settings = self.settings(layer)
        if settings is None or is_unquantised(stored, layer, "qweight"): return None
        return _matrix(settings, layer, shape, stored)


def _matrix(settings: Settings, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix:
    (n, k), bits, group = shape, settings.bits, settings.group
    codes, zeros, scales, order = (f"{layer}.{x}" for x in ("qweight", "qzeros", "scales", "g_idx"))
    groups = -(-k // (group or k))
    check_tensor(stored, codes, ("I32",), (-(-k * bits // 32), n))
    check_tensor(stored, zeros, ("I32",), (groups, -(-n * bits // 32)))
    dtype = check_float(stored, scales, (groups, n))
    indexed = settings.ordered or order in stored
    if indexed: check_tensor(stored, order, ("I32", "I64"), (k,))
    permuted, symmetric = settings.ordered and groups > 1, settings.symmetric
    element, shift = element_of(bits, symmetric)
    type = check_type(layer, QType(element, Scale(1, group, dtype), shift, zeros=not symmetric,
                                     permuted=permuted), shape)

    def arrays(get: Get) -> dict[str, np.ndarray]:
        columns = column_order(get(order), group or k, permuted, order, "desc_act to true") \
            if indexed else None
        made = _codes(get(codes), bits, (n, k), columns)
        if symmetric and bits == 8: made["codes"] ^= np.uint8(128)
        made["scales"] = np.ascontiguousarray(get(scales).T)
        points = _zeros(get(zeros), settings, n)
        if not symmetric: made["zeros"] = np.ascontiguousarray(points.T)
        elif (points != 1 << (bits - 1)).any():
            raise WeightError(f"{zeros} has zero points other than {1 << (bits - 1)}",
                              "the same for all groups, as sym is true",
                              f"set sym to false in quantization_config, or format to one of {FORMATS}")
        if columns is not None: made["order"] = columns
        return made
    groups_of = Strides(0, group) if group else None
    cuts = {codes: (Strides(1), Strides(0, 32, bits)), zeros: (Strides(1, 32, bits), groups_of),
            scales: (Strides(1), groups_of), order: (None, Strides(0, numbers=group or k))}
    return StoredMatrix(type, (codes, zeros, scales, *[order] * indexed), arrays, cuts=cuts)


def _codes(words: np.ndarray, bits: int, shape: tuple[int, int],
           order: np.ndarray | None) -> dict[str, np.ndarray]:
    """`codes` and `high` of words [K · bits / 32, N]."""
    (n, k), whole = shape, 8 % bits == 0 and order is None and shape[1] * bits % 32 == 0
    if whole: return {"codes": np.ascontiguousarray(words.T).view(np.uint8)}    # laid out like ours

    def rows(begin: int, end: int) -> np.ndarray:
        data = np.ascontiguousarray(words[:, begin:end].T).view(np.uint8)
        found = fields(data, bits, k)
        return found if order is None else found[:, order]
    return planes_of(rows, n, k, bits)


def _zeros(words: np.ndarray, settings: Settings, n: int) -> np.ndarray:
    """Zero points, uint8 [R, N], of words [R, N · bits / 32]."""
    bits, ones = settings.bits, sum(1 << i for i in range(0, 32, settings.bits))
    words = np.ascontiguousarray(words).view(np.uint32)
    if bits != 3: words = words - np.uint32(settings.first * ones & 0xFFFFFFFF)
    made = fields(words.view(np.uint8), bits, n)
    return made if bits != 3 else made - np.uint8(settings.first & 255) & np.uint8(7)


def reader(config: Mapping[str, Any], name: str) -> GPTQReader:
    """Returns the reader of a `quantization_config`. Raises `ModelError`."""
    Settings.of(config, name)
    dynamic = config.get("dynamic") or {}
    # null for layers that are not quantised
    if not isinstance(dynamic, Mapping) or not all(
            isinstance(each, Mapping) or key.startswith("-:") for key, each in dynamic.items()):
        raise ModelError(f"{name}: dynamic of quantization_config is {brief(dynamic)}",
                         "an object with settings for each pattern of layers' names", AGAIN)
    return GPTQReader(config, name)
