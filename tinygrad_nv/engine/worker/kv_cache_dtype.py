"""The dtype of keys and values, and the calibration of int8 scales.

Protocol: values are stored in the model's dtype or in one of `CACHE_DTYPES`. 8-bit dtypes have scales, equal
for all pages of a layer's head. fp8 scales are 1, as in vLLM: e4m3 holds up to 448, far more than keys and
values. int8 scales are calibrated: `calibrate_scales` runs some tokens through the model.
"""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.errors import RequestError
from tinygrad_nv.kvcache.store import PageStore
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.paged import PagedBatch, SequenceGroup
from tinygrad_nv.patterns.decode.paged import FLOATS
from tinygrad_nv.tile.expression import short

CACHE_DTYPES = {"float32": dtypes.float32, "bfloat16": dtypes.bfloat16, "float16": dtypes.float16,
                "fp8": dtypes.fp8e4m3, "int8": dtypes.int8}
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16",
                 "fp8_e4m3": "fp8"}


def resolve_kv_cache_dtype(name: str, model: DType) -> DType:
    """The dtype of keys and values for "auto" (the model's) or one of `CACHE_DTYPES`, short forms included.
    """
    if name == "auto": return model
    if (found := CACHE_DTYPES.get(DTYPE_ALIASES.get(name, name))) is None:
        raise RequestError(f"unknown KV cache dtype {name!r}", f"auto, {', '.join(CACHE_DTYPES)}",
                           "change --kv-cache-dtype")
    # attention computes in the dtype of keys and values
    if found in FLOATS and found.itemsize > model.itemsize:
        raise RequestError(f"a KV cache of {name} for a model of {short(model)}",
                           "one that is not wider than the model", "use --kv-cache-dtype auto")
    return found


CALIBRATION_TOKENS = 256    # tokens used to calibrate scales
HEADROOM = 1.25             # factor by which other tokens may exceed the calibration maximum


def calibrate_scales(model: Llama, device: str, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """int8 scales for keys and values of each layer and KV head. The largest magnitude over
    `CALIBRATION_TOKENS` tokens, spaced evenly over the vocabulary and shuffled, times `HEADROOM`, maps to
    127."""
    held = min(CALIBRATION_TOKENS, model.positions) // size
    count = held * size // GROUP * GROUP
    random = np.random.default_rng(0)
    tokens = random.permutation(np.linspace(0, model.config.vocab_size - 1, count).astype(np.int32))
    store = PageStore(model.config, device, model.dtype, held, size)
    def given(x: np.ndarray) -> Tensor: return Tensor(x.astype(np.int32), device=device).realize()
    groups = count // GROUP
    table = given(np.broadcast_to(np.arange(held), (groups, held)))
    group = SequenceGroup(GROUP, table, given(np.arange(GROUP, count + 1, GROUP)))
    batch = PagedBatch((group,), model.rope_tables)
    model.step_paged(given(tokens), batch, store.cache, given(np.zeros(1))).realize()
    def largest(pages: Tensor) -> np.ndarray:
        # on the host: clang takes minutes to compile this reduction for a CPU
        rows = pages.float().numpy().reshape(held * size, -1, model.config.head_dim)[:count]
        most: np.ndarray = np.abs(rows).max((0, 2))
        # a head of zeros or NaN gets scale 1
        return np.where((most > 0) & np.isfinite(most), most * (HEADROOM / 127), 1.0)
    return [(largest(layer.keys), largest(layer.values)) for layer in store.cache.layers]
