"""How compressed-tensors and ModelOpt write down what a number is quantised to."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.types import Scale

# scales of tokens and of tensors' groups have the shapes of channels' and of groups'
STRATEGIES = ("tensor", "channel", "token", "group", "tensor_group", "block", "attn_head")


@dataclass(frozen=True)
class Scheme:
    """`QuantizationArgs`: integers or floats of `bits`, with the scales' extents; `permuted` is actorder's
    group, `dynamic` scales are those of the numbers at hand, `e8m0` ones powers of two."""
    bits: int
    floats: bool
    strategy: str
    rows: int
    columns: int
    symmetric: bool = True
    dynamic: bool = False
    permuted: bool = False
    e8m0: bool = False

    @staticmethod
    def of(raw: Any, name: str) -> Scheme:
        """Returns the scheme of a config's object. Raises `ModelError`."""
        if not isinstance(raw, Mapping):
            raise ModelError(f"{name} of quantization_config is {brief(raw)}", "an object with num_bits",
                             "use the config.json that was written with these weights")
        kind, strategy = str(raw.get("type") or "int").lower(), _strategy(raw, name)
        if kind not in ("int", "float"): raise _wrong(name, "type", kind, "int or float")
        if not isinstance(bits := raw.get("num_bits", 8), int): raise _wrong(name, "num_bits", bits, "bits")
        rows, columns = {"tensor": (0, 0), "channel": (1, 0), "token": (1, 0), "attn_head": (1, 0)}.get(
            strategy, (0, 0))
        if strategy in ("group", "tensor_group"): rows, columns = 1, _extent(raw, "group_size", name)
        if strategy == "block": rows, columns = _block(raw, name)
        order = str(raw.get("actorder")).lower() in ("group", "dynamic", "true")
        return Scheme(bits, kind == "float", strategy, rows, columns, raw.get("symmetric") is not False,
                      raw.get("dynamic") not in (None, False), order, "uint8" in str(raw.get("scale_dtype")))

    def scale(self, dtype: DType = dtypes.float32) -> Scale:
        """Its scales."""
        return Scale(self.rows, self.columns, dtype)

    @property
    def activations(self) -> Activations | None:
        """The rounding of layers' inputs; None where a matmul takes them as they are: of other bits, with
        zero points or scales of powers of two."""
        plain = self.bits == 8 and self.symmetric and not self.e8m0
        if not plain or self.strategy not in ("tensor", "token", "group"): return None
        return Activations("e4m3" if self.floats else "int8", self.scale(), not self.dynamic)


def cache_of(config: Mapping[str, Any], name: str) -> Activations | None:
    """How keys and values are quantised, of a `quantization_config`: None if they are not, or to anything but
    8 bits without zero points. Scales of static ones are in the checkpoint, of all heads or of each. Raises
    `ModelError`."""
    for key in ("quantization_config", "quantization"):     # once transformers', and hf_quant_config.json's
        if isinstance(inside := config.get(key), Mapping): config = {**inside, **config}
    raw, algorithm = config.get("kv_cache_scheme"), config.get("kv_cache_quant_algo")
    # AutoFP8's word, and ModelOpt's
    if raw == "static" or algorithm == "FP8": return Activations("e4m3", Scale(0, 0), static=True)
    if raw is None: return None
    if not isinstance(raw, Mapping): raise _wrong(name, "kv_cache_scheme", raw, "an object")
    found = Scheme.of(raw, f"{name}: kv_cache_scheme")
    if found.bits != 8 or not found.symmetric or found.e8m0: return None
    if not found.dynamic and found.strategy not in ("tensor", "attn_head"): return None
    return Activations("e4m3" if found.floats else "int8", found.scale(), not found.dynamic)


def _strategy(raw: Mapping[str, Any], name: str) -> str:
    size = raw.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    if (found := str(raw.get("strategy") or inferred).lower()) not in STRATEGIES:
        raise _wrong(name, "strategy", found, f"one of {', '.join(STRATEGIES)}")
    return found


def _extent(raw: Mapping[str, Any], key: str, name: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1: raise _wrong(name, key, value, "columns of a group")
    return value


def _block(raw: Mapping[str, Any], name: str) -> tuple[int, int]:
    found = raw.get("block_structure")
    try:
        rows, columns = (int(x) for x in (found.split("x") if isinstance(found, str) else found or ()))
        if min(rows, columns) > 0: return rows, columns
    except (TypeError, ValueError): pass
    raise _wrong(name, "block_structure", found, "rows and columns of a block")


def _wrong(name: str, key: str, value: object, expected: str) -> ModelError:
    return ModelError(f"{name}: {key} of quantization_config is {brief(value)}", expected,
                      "use the config.json that was written with these weights")
