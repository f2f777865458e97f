"""What a model's keys and values are stored in.

Protocol: numbers are stored as the model has them, or in what `KINDS` has: 8 bits take scales, the same for
all pages of a layer's head. Those of fp8 are 1, as in vLLM: e4m3 holds 448, and attention's keys and values
are far smaller. int8 has no such range: `calibrated` looks at what some tokens give.
"""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.engine.scheduling.batch import GROUP
from tinygrad_nv.errors import RequestError
from tinygrad_nv.kvcache.store import PageStore
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.paged import PagedPlace, Part
from tinygrad_nv.patterns.decode.paged import FLOATS
from tinygrad_nv.tile.expression import short

KINDS = {"float32": dtypes.float32, "bfloat16": dtypes.bfloat16, "float16": dtypes.float16,
         "fp8": dtypes.fp8e4m3, "int8": dtypes.int8}
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp8_e4m3": "fp8"}


def stored_dtype(name: str, model: DType) -> DType:
    """The dtype of keys and values for "auto" (the model's) or one of `KINDS`, short forms included."""
    if name == "auto": return model
    if (found := KINDS.get(SHORT.get(name, name))) is None:
        raise RequestError(f"unknown KV cache dtype {name!r}", f"auto, {', '.join(KINDS)}",
                           "change --kv-cache-dtype")
    # attention is computed in the dtype of keys and values
    if found in FLOATS and found.itemsize > model.itemsize:
        raise RequestError(f"a KV cache of {name} for a model of {short(model)}",
                           "one that is not wider than the model", "use --kv-cache-dtype auto")
    return found


SAMPLED = 256           # tokens that scales are found with
HEADROOM = 1.25         # by which other tokens may exceed them


def calibrated(model: Llama, device: str, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scales of int8 for keys and values of each layer and key head: the largest number that `SAMPLED` tokens
    give, taken at even distances from the whole vocabulary and in no order, times `HEADROOM`, is 127."""
    held = min(SAMPLED, model.positions) // size
    count = held * size // GROUP * GROUP
    random = np.random.default_rng(0)
    tokens = random.permutation(np.linspace(0, model.config.vocab_size - 1, count).astype(np.int32))
    store = PageStore(model.config, device, model.dtype, held, size)
    def given(x: np.ndarray) -> Tensor: return Tensor(x.astype(np.int32), device=device).realize()
    groups = count // GROUP
    table = given(np.broadcast_to(np.arange(held), (groups, held)))
    part = Part(GROUP, table, given(np.arange(GROUP, count + 1, GROUP)))
    place = PagedPlace((part,), model.rope_tables)
    model.rows(given(tokens), place, store.cache, given(np.zeros(1))).realize()
    def largest(pages: Tensor) -> np.ndarray:
        # on the host: clang takes minutes over the kernel that this would be on a CPU
        rows = pages.float().numpy().reshape(held * size, -1, model.config.head_dim)[:count]
        most: np.ndarray = np.abs(rows).max((0, 2))
        # a head of zeros alone, or of what is no number, has some scale
        return np.where((most > 0) & np.isfinite(most), most * (HEADROOM / 127), 1.0)
    return [(largest(layer.keys), largest(layer.values)) for layer in store.cache.layers]
