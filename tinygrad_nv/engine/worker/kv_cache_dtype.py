"""The dtype of keys and values, and the scales of 8-bit ones.

Protocol: values are stored in the model's dtype or in one of `CACHE_DTYPES`; "auto" is what the checkpoint's
kv_cache_scheme says, else the model's dtype. 8-bit dtypes have scales, equal for all pages of a layer's head,
from the first of these that there is:

    the checkpoint's  where its scheme has the dtype that is used
    calibrated        int8's, and e4m3's where the scheme says dynamic: some tokens run through the model
    1                 of fp8, as in vLLM: e4m3 holds up to 448, e5m2 up to 57344, far more than most keys and
                      values
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.errors import RequestError
from tinygrad_nv.kvcache.store import PageStore
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.paged import PagedBatch, SequenceGroup
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
CALIBRATION_TOKENS = 256    # tokens used to calibrate scales
# what the largest magnitude in calibration maps to: others may be 1.25 times as large in int8, 2 times in
# e4m3, which loses no bits by it
CALIBRATED = {dtypes.int8: 127 / 1.25, dtypes.fp8e4m3: 448 / 2}


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


def cache_scales(model: Llama, dtype: DType, device: str, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """float32 scales of 8-bit keys and values, of each layer and KV head; `size` is a page's."""
    scheme, heads = scheme_of(model.config.quantization), model.config.num_kv_heads
    # scales without a scheme are older AutoFP8's
    same = dtype == (dtypes.fp8e4m3 if scheme is None else SCHEME_DTYPES[scheme.element])
    found = [model.cache_scales.get(i) if same else None for i in range(model.config.num_layers)]
    if all(found): others = []
    elif dtype == dtypes.int8 or (same and scheme is not None and not scheme.static):
        others = calibrate_scales(model, dtype, device, size)
    else: others = [(np.ones(heads), np.ones(heads))] * len(found)
    return [each or others[i] for i, each in enumerate(found)]


def calibrate_scales(model: Llama, dtype: DType, device: str,
                      size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Measures scales of each layer and KV head by the largest magnitude over `CALIBRATION_TOKENS` tokens,
    spaced evenly over the vocabulary and shuffled."""
    held = min(CALIBRATION_TOKENS, model.rope_rows) // size
    count = held * size // GROUP * GROUP
    random = np.random.default_rng(0)
    tokens = random.permutation(np.linspace(0, model.config.vocab_size - 1, count).astype(np.int32))
    store = PageStore(model.config, device, model.dtype, held, size)
    def to_tensor(x: np.ndarray) -> Tensor: return Tensor(x.astype(np.int32), device=device).realize()
    groups = count // GROUP
    table = to_tensor(np.broadcast_to(np.arange(held), (groups, held)))
    group = SequenceGroup(GROUP, table, to_tensor(np.arange(GROUP, count + 1, GROUP)))
    batch = PagedBatch((group,), model.rope_tables)
    model.step_paged(to_tensor(tokens), batch, store.cache, to_tensor(np.zeros(1))).realize()
    def largest(pages: Tensor) -> np.ndarray:
        # on the host: clang takes minutes to compile this reduction for a CPU
        rows = pages.float().numpy().reshape(held * size, -1, model.config.head_dim)[:count]
        most: np.ndarray = np.abs(rows).max((0, 2))
        # a head of zeros or NaN gets scale 1
        return np.where((most > 0) & np.isfinite(most), most / CALIBRATED[dtype], 1.0)
    return [(largest(layer.keys), largest(layer.values)) for layer in store.cache.layers
            if layer.values is not None]
