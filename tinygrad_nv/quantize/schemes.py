"""The schemes of `tinygrad-nv quantize`, by vLLM's names, and what config.json says of each.

Protocol: a `Scheme` says how elements are rounded (rounding.py), and the format in which they are stored
(compress.py). `config(scheme, ignored)` is the `quantization_config`: compressed-tensors' unless the format
has one of its own.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad_nv.errors import RequestError

COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized")
BLOCK = 128     # rows and columns of a block of FP8, as DeepSeek has them


@dataclass(frozen=True)
class Scheme:
    """`bits` of "int" or "float" elements, scales of `strategy`: "group" of `group` inputs, "channel" or
    "block". `activations`: the same of a layer's inputs, made while it runs; "" for none."""
    name: str
    format: str
    bits: int
    strategy: str
    type: str = "int"
    group: int = 0
    symmetric: bool = True
    activations: str = ""
    observer: str = "minmax"


SCHEMES = {each.name: each for each in (
    Scheme("w4a16", "pack-quantized", 4, "group", group=128),
    Scheme("w8a16", "pack-quantized", 8, "group", group=128),
    Scheme("w8a8", "int-quantized", 8, "channel", activations="token"),
    Scheme("fp8", "float-quantized", 8, "channel", "float", activations="token"),
    Scheme("fp8-block", "float-quantized", 8, "block", "float", activations="group"))}
FORMATS = {"compressed-tensors": (), "awq": ("w4a16",), "gptq": ("w4a16", "w8a16"), "fp8": ("fp8-block",)}
OBSERVERS = ("minmax", "percentile", "mse")


def scheme_of(name: str, group: int | None = None, symmetric: bool = True, observer: str = "minmax",
              format: str = "compressed-tensors") -> Scheme:
    """A scheme with settings of a command line. Raises `RequestError` for what does not go together."""
    if name not in SCHEMES:
        raise RequestError(f"scheme {name!r}", f"one of {', '.join(SCHEMES)}", "change --scheme")
    made = SCHEMES[name]
    if format not in FORMATS:
        raise RequestError(f"format {format!r}", f"one of {', '.join(FORMATS)}", "change --format")
    if FORMATS[format] and name not in FORMATS[format]:
        raise RequestError(f"format {format} of scheme {name}", f"a scheme of {', '.join(FORMATS[format])}",
                           "change --format or --scheme")
    if observer not in OBSERVERS:
        raise RequestError(f"observer {observer!r}", f"one of {', '.join(OBSERVERS)}", "change --observer")
    if group is not None and made.strategy != "group":
        raise RequestError(f"groups of {group} inputs in scheme {name}", "a scheme with groups",
                           "leave --group-size out")
    if group is not None and (group < 1 or group % 8):
        raise RequestError(f"groups of {group} inputs", "a multiple of 8", "change --group-size")
    if not symmetric and made.format != "pack-quantized":
        raise RequestError(f"zero points in scheme {name}", "w4a16 or w8a16", "leave --asymmetric out")
    if format != "compressed-tensors": made = replace(made, format=format)
    return replace(made, group=group or made.group, symmetric=symmetric, observer=observer)


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """What config.json has as `quantization_config`."""
    if scheme.format == "awq":
        return {"quant_method": "awq", "bits": scheme.bits, "group_size": scheme.group, "zero_point": True,
                "version": "gemm", "modules_to_not_convert": list(ignored)}
    if scheme.format == "gptq":
        return {"quant_method": "gptq", "bits": scheme.bits, "group_size": scheme.group, "desc_act": False,
                "sym": scheme.symmetric, "checkpoint_format": "gptq_v2", "lm_head": False}
    if scheme.format == "fp8":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": list(ignored)}
    weights = {"num_bits": scheme.bits, "type": scheme.type, "strategy": scheme.strategy,
               "symmetric": scheme.symmetric, "dynamic": False, "observer": scheme.observer,
               "group_size": scheme.group or None, "actorder": None,
               "block_structure": [BLOCK, BLOCK] if scheme.strategy == "block" else None}
    inputs = {"num_bits": 8, "type": scheme.type, "strategy": scheme.activations, "symmetric": True,
              "dynamic": True, "observer": None, "actorder": None, "block_structure": None,
              "group_size": BLOCK if scheme.activations == "group" else None}
    group = {"targets": ["Linear"], "weights": weights, "output_activations": None,
             "input_activations": inputs if scheme.activations else None}
    return {"quant_method": "compressed-tensors", "format": scheme.format,
            "config_groups": {"group_0": group}, "ignore": list(ignored), "kv_cache_scheme": None,
            "quantization_status": "compressed"}
