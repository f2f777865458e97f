"""The dtype of keys and values, and the scales of 8-bit ones.

Protocol: values are stored in the model's dtype or in one of `CACHE_DTYPES`; "auto" is what the checkpoint's
kv_cache_scheme says, else the model's dtype. 8-bit dtypes have scales, equal for all pages of a layer's head,
from the first of these that there is:

    the checkpoint's  where its scheme has the dtype that is used
    calibrated        int8's, and e4m3's where the scheme says dynamic: some tokens run through the model
    1                 of fp8, as in vLLM: e4m3 holds up to 448, e5m2 up to 57344, far more than most keys and
                      values

kv_cache_scales.py computes them.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import RequestError
from tinygrad_nv.tile.decode.spec import KINDS
from tinygrad_nv.tile.expression import short

if TYPE_CHECKING:
    from tinygrad_nv.models.config import ModelConfig
    from tinygrad_nv.quant.readers.reader import Activations

CACHE_DTYPES = {"float32": dtypes.float32, "bfloat16": dtypes.bfloat16, "float16": dtypes.float16,
                "fp8": dtypes.fp8e4m3, "fp8_e5m2": dtypes.fp8e5m2, "int8": dtypes.int8}
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16",
                 "fp8_e4m3": "fp8"}
# an element of a checkpoint's scheme as a dtype
SCHEME_DTYPES = {"e4m3": dtypes.fp8e4m3, "int8": dtypes.int8}


def scheme_of(quantization: Mapping[str, Any] | None) -> Activations | None:
    """How a checkpoint says that keys and values are quantised; None if it does not. Raises `ModelError`."""
    if quantization is None: return None
    from tinygrad_nv.quant.readers.schemes import cache_of
    return cache_of(quantization, "config.json")


def resolve_kv_cache_dtype(name: str, model: DType, quantization: Mapping[str, Any] | None = None) -> DType:
    """The dtype of keys and values for "auto" (the checkpoint's, else the model's) or for one of
    `CACHE_DTYPES`, short forms included. Raises `RequestError`."""
    scheme = scheme_of(quantization)
    if name == "auto": return model if scheme is None else SCHEME_DTYPES[scheme.element]
    if (found := CACHE_DTYPES.get(DTYPE_ALIASES.get(name, name))) is None:
        raise RequestError(f"unknown KV cache dtype {name!r}",
                           f"auto, {', '.join(CACHE_DTYPES)} (fp8_e4m3 is fp8)", "change --kv-cache-dtype")
    # attention computes in the dtype of keys and values
    if found in KINDS and found.itemsize > model.itemsize:
        raise RequestError(f"a KV cache of {name} for a model of {short(model)}",
                           "one that is not wider than the model", "use --kv-cache-dtype auto")
    return found


def require_scales(config: ModelConfig) -> None:
    """Raises `RequestError` for a model whose cache has no form of 8 bits."""
    if config.latent is None: return
    raise RequestError("a KV cache of 8 bits for multi-head latent attention", "latents of 16 or 32 bits",
                       "use --kv-cache-dtype bfloat16")
