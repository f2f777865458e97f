"""The schemes of `tinygrad-nv quantize`, by vLLM's names, and what config.json says of each.

Protocol: a `Scheme` says what numbers there are (rounding.py), the format in which they are stored
(compress.py), and the method that finds them: "rtn" rounds to the nearest, the others look at a layer's
inputs (calibrate.py). `config(scheme, ignored)` is the `quantization_config`: compressed-tensors' unless the
format has one of its own.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad_nv.errors import RequestError

BLOCK = 128     # rows and columns of a block of FP8, as DeepSeek has them
MX_GROUP = 32   # inputs with one scale in MXFP4


@dataclass(frozen=True)
class Scheme:
    """`bits` of "int" or "float" elements, scales of `strategy`: "group" of `group` inputs, "channel" or
    "block". `activations`: the same of a layer's inputs, made while it runs; "" for none, "tensor" for static
    ones. `order` is GPTQ's of columns: "" as they are, "weight" or "group" by their inputs, where "group"
    makes groups of columns that follow each other in that order. `smoothing` is SmoothQuant's exponent.
    `sparse` matrices keep the two of each four inputs that are largest, before they are rounded; 16 bits are
    not rounded. They are stored with their zeros, or with a bitmask (models/bitmask.py)."""
    name: str
    format: str
    bits: int
    strategy: str
    type: str = "int"
    group: int = 0
    symmetric: bool = True
    activations: str = ""
    observer: str = "minmax"
    method: str = "rtn"
    order: str = ""
    smoothing: float = 0.5
    sparse: bool = False
    bitmask: bool = False

    @property
    def is_calibrated(self) -> bool:
        """Whether the numbers depend on a layer's inputs."""
        return self.method != "rtn" or self.activations == "tensor"


SCHEMES = {each.name: each for each in (
    Scheme("w4a16", "pack-quantized", 4, "group", group=128),
    Scheme("w8a16", "pack-quantized", 8, "group", group=128),
    Scheme("w8a8", "int-quantized", 8, "channel", activations="token"),
    Scheme("fp8", "float-quantized", 8, "channel", "float", activations="token"),
    Scheme("fp8-block", "float-quantized", 8, "block", "float", activations="group"),
    Scheme("mxfp4", "mxfp4-pack-quantized", 4, "group", "float", group=MX_GROUP),
    Scheme("2:4", "dense", 16, "channel", "float", sparse=True))}
# names that stand for a scheme, a method and its own format
SHORT = {"awq": "w4a16", "gptq": "w4a16"}
NAMES = (*SCHEMES, *SHORT)
FORMATS = {"compressed-tensors": (), "awq": ("w4a16",), "gptq": ("w4a16", "w8a16"), "fp8": ("fp8-block",),
           "sparse-24-bitmask": ("2:4", "fp8", "w8a8")}
METHODS = {"rtn": (), "awq": ("w4a16", "w8a16"), "gptq": ("w4a16", "w8a16", "w8a8"), "smoothquant": ("w8a8",)}
OBSERVERS = ("minmax", "percentile", "mse")
ORDERS = ("none", "weight", "group")


@dataclass(frozen=True)
class Options:
    """Options of a command line beside the scheme's name; None for what the scheme has."""
    group: int | None = None
    symmetric: bool = True
    observer: str | None = None
    format: str | None = None
    method: str | None = None
    order: str | None = None
    smoothing: float | None = None
    static: bool = False
    sparsity: str | None = None


def scheme_of(name: str, options: Options = Options()) -> Scheme:
    """A scheme with options. Raises `RequestError` for what does not go together."""
    _require_known("scheme", name, NAMES)
    short, name = name if name in SHORT else None, SHORT.get(name, name)
    format = options.format or short or "compressed-tensors"
    method = options.method or short or "rtn"
    _require_known("format", format, FORMATS)
    _require_known("method", method, METHODS)
    for kind, found, places in (("format", format, FORMATS), ("method", method, METHODS)):
        if places[found] and name not in places[found]:
            raise RequestError(f"{kind} {found} of scheme {name}", f"a scheme of {', '.join(places[found])}",
                               f"change --{kind} or --scheme")
    observer = options.observer or ("mse" if method in ("awq", "gptq") else "minmax")
    _require_known("observer", observer, OBSERVERS)
    made, symmetric = SCHEMES[name], options.symmetric and format != "awq"  # AWQ has zero points
    if options.group is not None: made = _with_group(made, options.group)
    if not symmetric and made.format != "pack-quantized":
        raise RequestError(f"zero points in scheme {name}", "w4a16 or w8a16", "leave --asymmetric out")
    if options.static:
        if made.activations != "token":
            raise RequestError(f"static scales of inputs in scheme {name}", "w8a8 or fp8",
                               "leave --static out")
        made = replace(made, activations="tensor")
    if options.sparsity is not None or format == "sparse-24-bitmask":
        made = _sparse(made, options.sparsity, method, format == "sparse-24-bitmask")
    elif format != "compressed-tensors": made = replace(made, format=format)
    return replace(made, symmetric=symmetric, observer=observer, method=method,
                   order=_order(made, method, options.order), smoothing=_smoothing(method, options.smoothing))


def _sparse(scheme: Scheme, sparsity: str | None, method: str, bitmask: bool) -> Scheme:
    """With two of each four inputs."""
    if sparsity not in ("2:4", None): raise RequestError(f"sparsity {sparsity!r}", "2:4", "change --sparsity")
    if method != "rtn" or scheme.format not in ("dense", "int-quantized", "float-quantized"):
        raise RequestError(f"sparsity 2:4 of scheme {scheme.name} by method {method}",
                           "scheme 2:4, w8a8, fp8 or fp8-block, and method rtn", "leave --sparsity out")
    return replace(scheme, sparse=True, bitmask=bitmask)


def _require_known(what: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise RequestError(f"{what} {name!r}", f"one of {', '.join(names)}", f"change --{what}")


def _with_group(scheme: Scheme, group: int) -> Scheme:
    if scheme.strategy != "group" or scheme.type == "float":
        raise RequestError(f"groups of {group} inputs in scheme {scheme.name}", "a scheme with groups",
                           "leave --group-size out")
    if group < 1 or group % 8:
        raise RequestError(f"groups of {group} inputs", "a multiple of 8", "change --group-size")
    return replace(scheme, group=group)


def _order(scheme: Scheme, method: str, order: str | None) -> str:
    """Returns the order of GPTQ's columns."""
    if order is None: return "weight" if method == "gptq" else ""
    _require_known("act-order", order, ORDERS)
    if method != "gptq":
        raise RequestError(f"an order of columns in method {method}", "method gptq", "leave --act-order out")
    if order == "group" and scheme.format != "gptq":     # which compressed-tensors had before 0.20
        raise RequestError("act-order group in format compressed-tensors", "format gptq",
                           "change --act-order to weight, or --format to gptq")
    return "" if order == "none" else order


def _smoothing(method: str, smoothing: float | None) -> float:
    if smoothing is None: return Scheme.smoothing
    if method != "smoothquant":
        raise RequestError(f"smoothing in method {method}", "method smoothquant", "leave --smoothing out")
    if not 0 <= smoothing <= 1:
        raise RequestError(f"smoothing {smoothing:g}", "a number from 0 to 1", "change --smoothing")
    return smoothing


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json."""
    if scheme.format == "awq":
        return {"quant_method": "awq", "bits": scheme.bits, "group_size": scheme.group, "zero_point": True,
                "version": "gemm", "modules_to_not_convert": list(ignored)}
    if scheme.format == "gptq":
        # GPTQModel's way to say which layers are floats; a head is one anyway
        kept: dict[str, Any] = {f"-:{re.escape(name)}$": {} for name in ignored if name != "lm_head"}
        return {"quant_method": "gptq", "bits": scheme.bits, "group_size": scheme.group,
                "desc_act": scheme.order == "group", "sym": scheme.symmetric,
                "checkpoint_format": "gptq_v2", "lm_head": False, **({"dynamic": kept} if kept else {})}
    if scheme.format == "fp8":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": list(ignored)}
    sparsity = {"format": "sparse-24-bitmask" if scheme.bitmask else "dense", "sparsity_structure": "2:4",
                "global_sparsity": 0.5, "targets": ["Linear"], "ignore": list(ignored),
                "registry_requires_subclass": False}
    if scheme.format == "dense": return {"quant_method": "compressed-tensors", "sparsity_config": sparsity}
    weights = {"num_bits": scheme.bits, "type": scheme.type, "strategy": scheme.strategy,
               "symmetric": scheme.symmetric, "dynamic": False, "observer": scheme.observer,
               "group_size": scheme.group or None, "actorder": scheme.order or None,
               "block_structure": [BLOCK, BLOCK] if scheme.strategy == "block" else None}
    if scheme.format == "mxfp4-pack-quantized": weights["scale_dtype"] = weights["zp_dtype"] = "torch.uint8"
    static = scheme.activations == "tensor"
    inputs = {"num_bits": 8, "type": scheme.type, "strategy": scheme.activations, "symmetric": True,
              "dynamic": not static, "observer": "minmax" if static else None, "actorder": None,
              "block_structure": None, "group_size": BLOCK if scheme.activations == "group" else None}
    group = {"targets": ["Linear"], "weights": weights, "output_activations": None,
             "input_activations": inputs if scheme.activations else None}
    return {"quant_method": "compressed-tensors", "format": scheme.format,
            "config_groups": {"group_0": group}, "ignore": list(ignored), "kv_cache_scheme": None,
            "quantization_status": "compressed", **({"sparsity_config": sparsity} if scheme.sparse else {})}
