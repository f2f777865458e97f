"""Checks that readers make of a checkpoint's tensors before any of them is read."""
from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ModelError, SpecError, WeightError, brief
from tinygrad_nv.quant.readers.reader import Stored
from tinygrad_nv.quant.types import INT8, UINT2, UINT3, UINT4, UINT5, UINT6, UINT8, Element, QType, buffers
from tinygrad_nv.regexes import Pattern, compile_pattern, require_few

# the floats of safetensors
FLOATS = {"F32": dtypes.float32, "F16": dtypes.float16, "BF16": dtypes.bfloat16}
# the smallest unsigned element that holds codes of these bits
UNSIGNED = {1: UINT2, 2: UINT2, 3: UINT3, 4: UINT4, 5: UINT5, 6: UINT6, 7: UINT8, 8: UINT8}
AGAIN = "use the config.json that belongs to these weights, or download the directory again"


def check_tensor(stored: Stored, name: str, kinds: Collection[str], *shapes: tuple[int, ...]) -> str:
    """The dtype of a tensor, which must be one of `kinds`, and have one of the shapes if any are given.
    Raises `WeightError`."""
    extents = dict.fromkeys(str(list(shape)) for shape in shapes)
    wanted = f"{' or '.join(kinds)} {' or '.join(extents)}".strip()
    if name not in stored: raise WeightError(f"{name} is missing", wanted, AGAIN)
    kind, shape = stored[name]
    if kind not in kinds or (shapes and shape not in shapes):
        raise WeightError(f"{name} is {kind} {list(shape)}", wanted, AGAIN)
    return kind


def check_float(stored: Stored, name: str, *shapes: tuple[int, ...]) -> DType:
    """Returns the dtype of a tensor of floats, as tinygrad's, checked as by `check_tensor`."""
    return FLOATS[check_tensor(stored, name, FLOATS, *shapes)]


def is_unquantised(stored: Stored, layer: str, tensor: str) -> bool:
    """Whether a layer has a matrix of floats, and not `tensor`, which quantised layers have."""
    kind, _ = stored.get(f"{layer}.weight", ("", ()))
    return kind in FLOATS and f"{layer}.{tensor}" not in stored


def check_type(layer: str, type: QType, shape: tuple[int, int]) -> QType:
    """The type, if a matrix of that shape can have it. Raises `WeightError`."""
    try: buffers(type, *shape)
    except SpecError as error:
        raise WeightError(f"{layer}, {list(shape)} of {type}: {error.found}", error.expected,
                          "use a checkpoint in which a row of each matrix takes whole bytes") from error
    return type


def element_of(bits: int, symmetric: bool) -> tuple[Element, int]:
    """The element of integers that are stored without a sign, and the shift: 2^(bits − 1) if they are
    symmetric. Of 8 bits these are int8, with that added."""
    if symmetric and bits == 8: return INT8, 0
    return UNSIGNED[bits], 1 << (bits - 1) if symmetric else 0


def setting(config: Mapping[str, Any], key: str, default: Any, accepted: Collection[Any], name: str) -> Any:
    """A value of quantization_config that must be one of `accepted`. Raises `ModelError`."""
    value = config.get(key)
    if value is None: value = default
    if value not in accepted:
        raise ModelError(f"{name}: {key} of quantization_config is {brief(value)}",
                         f"one of {', '.join(map(str, accepted))}", "use a checkpoint of one of these")
    return value


def names(config: Mapping[str, Any], key: str, name: str) -> tuple[str, ...]:
    """A list of layers' names and "re:" regular expressions, empty without one. Raises `ModelError`."""
    found = config.get(key) or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ModelError(f"{name}: {key} of quantization_config is {brief(found)}", "a list of names", AGAIN)
    patterns_of(found, f"{name}: {key} of quantization_config")
    return tuple(found)


def patterns_of(names: Collection[str], where: str) -> dict[str, Pattern]:
    """Returns those of the names that are "re:" regular expressions, in their order. Raises `ModelError`."""
    found = [each for each in names if each.startswith("re:")]
    require_few(len(found), where)
    return {each: compile_pattern(each.removeprefix("re:"), where) for each in found}


def group_size(config: Mapping[str, Any], name: str, default: int = 128) -> int:
    """`group_size`, 0 if a group is all columns. Raises `ModelError`."""
    value = config.get("group_size", default)
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value > 0):
        raise ModelError(f"{name}: group_size of quantization_config is {brief(value)}",
                         "columns of a group, or -1 for all of them", AGAIN)
    return max(value, 0)


def column_order(groups: np.ndarray, size: int, permuted: bool, name: str, wanted: str) -> np.ndarray | None:
    """The columns, int32 [K], in the order of their groups, or None if a type is not `permuted`: `groups`,
    g_idx, has the group of each. Raises `WeightError` unless each group has `size` columns, the last may have
    fewer, and they follow each other if not permuted; `wanted` is the setting that permutes."""
    last = -(-len(groups) // size) - 1
    found = f"groups from {groups.min()} to {groups.max()}"
    if groups.min() >= 0 and groups.max() <= last:
        counts, straight = np.bincount(groups, minlength=last + 1), np.arange(len(groups)) // size
        wrong = np.flatnonzero(counts != np.bincount(straight))
        if not len(wrong):
            if permuted: return np.argsort(groups, kind="stable").astype(np.int32)
            if (groups == straight).all(): return None
            raise WeightError(f"{name} permutes inputs, and quantization_config does not say so",
                              "groups that follow each other", f"set {wanted} in quantization_config")
        found = f"{counts[wrong[0]]} columns of group {wrong[0]}"
    raise WeightError(f"{name} has {found}", f"groups 0 to {last}, of {size} columns each", AGAIN)
