"""compressed-tensors, of vLLM's llm-compressor: groups of layers, each with a scheme and a format.

Which scheme a layer has: none if `ignore` names it; else that of the first target that does, whole names and
"re:" regular expressions (from the start of a name) before names of classes. A projection is a Linear.

    pack-quantized          weight_packed I32: codes + 2^(bits − 1), 1 to 8 bits without gaps, in a row; zero
                            points in the same way down the rows. Older versions leave the rest of a
                            word empty that no whole code fits in
    int-, float-, naive-quantized      weight I8 or F8_E4M3
    mxfp4-, nvfp4-pack-quantized       weight_packed U8: two E2M1 codes, the first in the lower bits
    mxfp6-pack-quantized    weight_packed U8: four E2M3 codes in three bytes
    mxfp8-quantized         weight F8_E4M3

weight_scale is one for each block of the strategy, of mxfp… E8M0 in U8. NVFP4's are F8_E4M3, and divided by
weight_global_scale. Source: compressed-tensors 0.20.0, compressors/ and utils/match.py.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tinygrad_nv.errors import ModelError, WeightError, brief, shorten
from tinygrad_nv.quant.packing import fields, planes_of
from tinygrad_nv.quant.readers.checks import (
    AGAIN,
    FLOATS,
    check_float,
    check_tensor,
    check_type,
    column_order,
    element_of,
    is_unquantised,
    names,
    patterns_of,
)
from tinygrad_nv.quant.readers.reader import Cuts, Get, Stored, StoredMatrix, Strides, along_blocks
from tinygrad_nv.quant.readers.schemes import Scheme
from tinygrad_nv.quant.types import E2M3, E4M3, INT8, MXFP4, NVFP4, UINT8, QType, Scale
from tinygrad_nv.regexes import Pattern

CLASSES = ("Linear", "Module")      # a projection's, and those above it
# of sparse weights, which are read with their zeros (models/bitmask.py)
SPARSE = ("dense", "sparse-24-bitmask", "sparse-bitmask")
# formats of a config that say nothing of its groups'
MIXED = ("mixed-precision", "fakequant", "dense", None)
# what belongs to a layer, and its matrix does not need
OTHERS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")


@dataclass(frozen=True)
class Group:
    """How layers are stored: their weights' scheme, a name of `FORMATS`, their inputs'."""
    weights: Scheme
    format: str
    inputs: Scheme | None


@dataclass(frozen=True)
class CompressedTensorsReader:
    """Reads layers of the groups their targets name, None for what is not quantised."""
    targets: Mapping[str, Group | None]
    ignore: tuple[str, ...]
    name: str = "config.json"

    def group(self, layer: str) -> Group | None:
        """The group of a layer, None if it is not quantised."""
        if layer in self._ignore_names or any(each.match(layer) for each in self._ignore_patterns.values()):
            return None
        if not self._ignore_names.isdisjoint(CLASSES): return None
        found = layer if layer in self.targets else next(
            (name for name, each in self._patterns.items() if each.match(layer)),
            next((each for each in sorted(CLASSES) if each in self.targets), None))
        return None if found is None else self.targets[found]

    @cached_property
    def _ignore_names(self) -> frozenset[str]: return frozenset(self.ignore)

    @cached_property
    def _ignore_patterns(self) -> dict[str, Pattern]:
        return patterns_of(self.ignore, f"{self.name}: ignore of quantization_config")

    @cached_property
    def _patterns(self) -> dict[str, Pattern]:
        return patterns_of(sorted(self.targets), f"{self.name}: targets of quantization_config")

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`."""
        group = self.group(layer)
        if group is None: _require_no_scales(layer, stored)
        if group is None or is_unquantised(stored, layer, "weight_scale"): return None
        made = FORMATS[group.format].read(group.weights, layer, shape, stored)
        others = [f"{layer}.{name}" for name in OTHERS if f"{layer}.{name}" in stored]
        inputs = group.inputs.activations if group.inputs is not None else None
        return replace(made, tensors=(*made.tensors, *others), activations=inputs)


def _require_no_scales(layer: str, stored: Stored) -> None:
    """Raises `WeightError` of a layer that is not quantised by the config and has scales: a model that was
    saved uncompressed is rounded while it runs."""
    kind, _ = stored.get(f"{layer}.weight", ("", ()))
    if (name := f"{layer}.weight_scale") not in stored or kind not in FLOATS: return
    raise WeightError(f"{name} is there, and quantization_config has the layer as floats (dense)",
                      "scales of quantised layers alone",
                      "save the model again, compressed (save_compressed=True)")


# **** formats ****

def _read_packed(scheme: Scheme, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix:
    (n, k), bits, codes, zeros = shape, scheme.bits, f"{layer}.weight_packed", f"{layer}.weight_zero_point"
    element, shift = element_of(bits, scheme.symmetric)
    check_tensor(stored, codes, ("I32",), *((n, width) for width in _widths(k, bits)))
    scale, scales = _scale(scheme, layer, shape, stored)
    blocks, flat = scale.blocks(n, k), scheme.strategy not in ("group", "channel")
    if not scheme.symmetric and flat: check_tensor(stored, zeros, ("I8",), blocks, (1,), ())
    elif not scheme.symmetric:
        check_tensor(stored, zeros, ("I32",), *((width, blocks[1]) for width in _widths(n, bits)))
    type = check_type(layer, QType(element, scale, shift, zeros=not scheme.symmetric,
                                     permuted=scheme.permuted and blocks[1] > 1), shape)

    def arrays(get: Get, order: np.ndarray | None) -> dict[str, np.ndarray]:
        words = np.ascontiguousarray(get(codes))
        if bits == element.bits and 8 % bits == 0 and order is None:    # laid out like ours
            made = {"codes": words.view(np.uint8)[:, :k * bits // 8]}
        else: made = planes_of(lambda begin, end: _reorder(_fields(words[begin:end], bits, k), order), n, k,
                               element.bits)
        if element is INT8: made["codes"] = made["codes"] ^ np.uint8(128)
        made["scales"] = get(scales).reshape(blocks)
        if scheme.symmetric: return made
        points = get(zeros)
        made["zeros"] = (points.reshape(blocks).view(np.uint8) + np.uint8(1 << (bits - 1)) if flat else
                         np.ascontiguousarray(_fields(np.ascontiguousarray(points.T), bits, n).T))
        return made
    lie = along_blocks(scale, shape, stored[scales][1])
    cuts = {codes: (Strides(0), Strides(1, 32, bits)), scales: lie}
    if not scheme.symmetric: cuts[zeros] = lie if flat else (Strides(0, 32, bits), lie[1])
    return _matrix(type, layer, shape, stored, (codes, scales, *[zeros] * (not scheme.symmetric)), arrays,
                   cuts, f"{layer}.weight_shape")


def _plain(scheme: Scheme, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix:
    codes, zeros, asymmetric = f"{layer}.weight", f"{layer}.weight_zero_point", not scheme.symmetric
    check_tensor(stored, codes, ("F8_E4M3",) if scheme.floats else ("I8",), shape)
    scale, scales = _scale(scheme, layer, shape, stored)
    blocks = scale.blocks(*shape)
    if asymmetric: check_tensor(stored, zeros, ("I8",), blocks, (blocks[0],), ())
    element = E4M3 if scheme.floats else UINT8 if asymmetric else INT8
    type = QType(element, scale, zeros=asymmetric, permuted=scheme.permuted and blocks[1] > 1)
    sign = np.uint8(128 if asymmetric else 0)       # int8 with zero points are uint8 with 128 more of both

    def arrays(get: Get, order: np.ndarray | None) -> dict[str, np.ndarray]:
        found = _reorder(get(codes), order).view(np.uint8)
        made = {"codes": found ^ sign if sign else found, "scales": get(scales).reshape(blocks)}
        if asymmetric: made["zeros"] = get(zeros).reshape(blocks).view(np.uint8) ^ sign
        return made
    lie = along_blocks(scale, shape, stored[scales][1])
    return _matrix(type, layer, shape, stored, (codes, scales, *[zeros] * asymmetric), arrays,
                   {codes: (Strides(0), Strides(1)), scales: lie} | ({zeros: lie} if asymmetric else {}))


def _reader_of_microscaling(type: QType, codes_name: str, kind: str) -> Callable[..., StoredMatrix]:
    """Returns the reader of a type without zero points, whose codes are stored as `kind`."""
    def read(scheme: Scheme, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix:
        n, k = shape
        each = (codes_name, "weight_scale", "weight_global_scale")
        codes, scales, outer = (f"{layer}.{name}" for name in each)
        check_type(layer, type, shape)
        check_tensor(stored, codes, (kind,), (n, k * type.bits // 8))
        check_tensor(stored, scales, ("F8_E4M3",) if type.outer else ("U8", "F8_E8M0"),
                     type.scale.blocks(n, k))
        if type.outer: check_tensor(stored, outer, ("F32",), (1,), ())

        def arrays(get: Get, order: np.ndarray | None) -> dict[str, np.ndarray]:
            found = get(codes)
            made = {"codes": found} if 8 % type.bits == 0 else planes_of(
                lambda begin, end: fields(found[begin:end], type.bits, k), n, k, type.bits)
            made["scales"] = get(scales)
            if type.outer: made["outer"] = get(outer).reshape(1, 1)
            return made
        lie = along_blocks(type.scale, shape, stored[scales][1])
        cuts = {codes: (Strides(0), Strides(1, 8, type.bits)), scales: lie}
        return _matrix(type, layer, shape, stored, (codes, scales, *[outer] * bool(type.outer)), arrays, cuts)
    return read


def _matrix(type: QType, layer: str, shape: tuple[int, int], stored: Stored, tensors: tuple[str, ...],
            arrays: Callable[[Get, np.ndarray | None], dict[str, np.ndarray]], cuts: Cuts,
            extents: str = "") -> StoredMatrix:
    """Returns the matrix with the order of columns, and checks tensors that are beside these."""
    order, points, (_, k) = f"{layer}.weight_g_idx", f"{layer}.weight_zero_point", shape
    more = [name for name in (order, points, extents) if name in stored and name not in tensors]
    if type.permuted or order in stored: check_tensor(stored, order, ("I32", "I64"), (k,))

    def read(get: Get) -> dict[str, np.ndarray]:
        if extents in more and tuple(get(extents).reshape(-1)) != shape:
            raise WeightError(f"{extents} is {get(extents).tolist()}", str(list(shape)), AGAIN)
        if points in more and get(points).any():
            raise WeightError(f"{points} is not 0", "zero points of 0, as symmetric is true",
                              "set symmetric to false in quantization_config")
        if order not in stored: return arrays(get, None)
        groups = get(order)
        if (groups == -1).any(): groups = np.arange(k) // (type.scale.columns or k)     # of no order
        columns = column_order(groups, type.scale.columns or k, type.permuted, order, 'actorder to "group"')
        return arrays(get, columns) | ({} if columns is None else {"order": columns})
    cuts = {**cuts, order: (None, Strides(0, numbers=type.scale.columns or k))}
    return StoredMatrix(type, (*tensors, *more), read, cuts=cuts, extents=extents if extents in more else "")


def _scale(scheme: Scheme, layer: str, shape: tuple[int, int], stored: Stored) -> tuple[Scale, str]:
    """The scales of a matrix, and their tensor's name."""
    name, blocks = f"{layer}.weight_scale", scheme.scale().blocks(*shape)
    flat = [(blocks[0],)] * (blocks[1] == 1) + [()] * (blocks == (1, 1))
    return scheme.scale(check_float(stored, name, blocks, *flat)), name


def _widths(count: int, bits: int) -> tuple[int, int]:
    """Words of `count` codes: without gaps, and where no code crosses a word's end."""
    return -(-count * bits // 32), -(-count // (32 // bits))


def _fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes, uint8 [R, count], of words [R, W]."""
    if words.shape[1] == _widths(count, bits)[0]: return fields(words.view(np.uint8), bits, count)
    each, mask = 32 // bits, np.uint32((1 << bits) - 1)
    made = np.empty((*words.shape, each), np.uint8)
    for i in range(each): made[:, :, i] = words.view(np.uint32) >> np.uint32(i * bits) & mask
    return made.reshape(len(words), -1)[:, :count]


def _reorder(codes: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    return codes if order is None else codes[:, order]


@dataclass(frozen=True)
class Format:
    """The reader of a layer, and the bits of the integers and of the floats it may have."""
    read: Callable[[Scheme, str, tuple[int, int], Stored], StoredMatrix]
    integers: tuple[int, ...] = ()
    floats: tuple[int, ...] = ()


UP_TO_8 = tuple(range(1, 9))
DIVIDED = replace(NVFP4, divided=True)
FORMATS = {
    "pack-quantized": Format(_read_packed, UP_TO_8), "int-quantized": Format(_plain, UP_TO_8),
    "float-quantized": Format(_plain, floats=(8,)), "naive-quantized": Format(_plain, UP_TO_8, (8,)),
    "nvfp4-pack-quantized": Format(_reader_of_microscaling(DIVIDED, "weight_packed", "U8"), floats=(4,)),
    "mxfp4-pack-quantized": Format(_reader_of_microscaling(MXFP4, "weight_packed", "U8"), floats=(4,)),
    "mxfp6-pack-quantized": Format(_reader_of_microscaling(E2M3 @ MXFP4.scale, "weight_packed", "U8"),
                                   floats=(6,)),
    "mxfp8-quantized": Format(_reader_of_microscaling(E4M3 @ MXFP4.scale, "weight", "F8_E4M3"), floats=(8,))}


# **** the config ****

def reader(config: Mapping[str, Any], name: str) -> CompressedTensorsReader:
    """Returns the reader of a `quantization_config`. Raises `ModelError`."""
    inside = config.get("quantization_config")      # so transformers once wrote it
    if isinstance(inside, Mapping): config = {**inside, **config}
    sparsity = config.get("sparsity_config")
    groups = config.get("config_groups", {} if isinstance(sparsity, Mapping) else None)
    if not isinstance(groups, Mapping) or not all(isinstance(each, Mapping) for each in groups.values()):
        raise ModelError(f"{name}: config_groups of quantization_config is {brief(groups)}",
                         "an object of groups, each with targets and weights", AGAIN)
    if isinstance(sparsity, Mapping) and (found := sparsity.get("format", "dense")) not in SPARSE:
        raise ModelError(f"{name}: format of sparsity_config is {brief(found)}",
                         f"one of {', '.join(SPARSE)}", "compress the model again in one of these")
    _require_fused_transforms(config, name)
    targets: dict[str, Group | None] = {}
    for key, raw in groups.items():
        group = _group(raw, config.get("format"), f"{name}: {key}")
        targets |= dict.fromkeys(names(raw, "targets", f"{name}: {key}"), group)
    return CompressedTensorsReader(targets, names(config, "ignore", name), name)


def _require_fused_transforms(config: Mapping[str, Any], name: str) -> None:
    """Transforms (QuIP, SpinQuant) of weights are in the weights that are stored; those of inputs, outputs,
    queries and keys are applied while a model runs, and refused. Raises `ModelError`."""
    found = config.get("transform_config")
    groups = (found.get("config_groups") if isinstance(found, Mapping) else None) or {}
    try: places = [(group, each["location"]) for group, scheme in groups.items()
                   for each in scheme.get("apply") or ()]
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"{name}: transform_config of quantization_config is {brief(found)}",
                         "groups, each with apply, a list of objects with a location", AGAIN) from error
    for group, where in places:
        if where in ("weight_input", "weight_output"): continue
        raise ModelError(f"{name}: transform_config of quantization_config applies {brief(group)} to "
                         f"{shorten(str(where))}",
                         "transforms of weights alone: weight_input, weight_output",
                         "compress the model again without, or with SpinQuant's R1 and R2 only")


def _group(raw: Mapping[str, Any], whole: str | None, name: str) -> Group | None:
    """Returns the group that an object of config_groups describes, where `whole` is the config's format; None
    if its weights are floats. Raises `ModelError`."""
    if not raw.get("weights") or raw.get("format") == "dense": return None
    weights, inputs = (Scheme.of(raw[key], f"{name}.{key}") if raw.get(key) else None
                       for key in ("weights", "input_activations"))
    assert weights is not None
    found = raw.get("format") or (_format(weights, inputs) if whole in MIXED else whole)
    if not isinstance(found, str) or found not in FORMATS:
        raise ModelError(f"{name}: format of quantization_config is {brief(found)}",
                         f"one of {', '.join(FORMATS)}", "compress the model again in one of these")
    format = FORMATS[found]
    if weights.bits not in (format.floats if weights.floats else format.integers):
        wanted = [f"{bits}-bit int" for bits in format.integers] + \
            [f"{bits}-bit float" for bits in format.floats]
        raise ModelError(f"{name}: weights of {found} are {brief(weights.bits)}-bit "
                         f"{'float' if weights.floats else 'int'}", ", ".join(wanted),
                         "compress the model again with one of these")
    return Group(weights, found, inputs)


def _format(weights: Scheme, inputs: Scheme | None) -> str:
    """The format of a group that names none: as the package finds it."""
    if not weights.floats: return "pack-quantized" if inputs is None else "int-quantized"
    if weights.columns == 32 and (weights.bits in (4, 6) or (weights.bits == 8 and weights.e8m0)):
        return f"mxfp{weights.bits}-{'' if weights.bits == 8 else 'pack-'}quantized"
    if (weights.bits, weights.columns) == (4, 16): return "nvfp4-pack-quantized"
    return "naive-quantized" if inputs is None else "float-quantized"
