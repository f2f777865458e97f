"""Scales of 8-bit keys and values of a loaded model: kv_cache_dtype.py says which there are."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.engine.worker.input_buffer import NO_STATES
from tinygrad_nv.engine.worker.kv_cache_dtype import SCHEME_DTYPES, scheme_of
from tinygrad_nv.kvcache.state_store import StateStore
from tinygrad_nv.kvcache.store import HybridCache, PagedCache, PageStore
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.paged import PagedBatch, SequenceGroup

CALIBRATION_TOKENS = 256    # tokens used to calibrate scales
# what the largest magnitude in calibration maps to: others may be 1.25 times as large in int8, 2 times in
# e4m3, which loses no bits by it
CALIBRATED = {dtypes.int8: 127 / 1.25, dtypes.fp8e4m3: 448 / 2}


def cache_scales(model: Llama, dtype: DType, device: str, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """float32 scales of 8-bit keys and values, of each layer and KV head; `size` is a page's."""
    scheme, heads = scheme_of(model.config.quantization), model.config.num_kv_heads
    # scales without a scheme are older AutoFP8's
    same = dtype == (dtypes.fp8e4m3 if scheme is None else SCHEME_DTYPES[scheme.element])
    found = [model.cache_scales.get(i) if same else None for i in model.config.attention_layers]
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
    groups, config = count // GROUP, model.config
    cache: PagedCache | HybridCache = store.cache
    sequences = np.array([(0, count, -1, 0, -1, 0)] + [NO_STATES] * (groups - 1))
    if config.has_states:
        states = StateStore(config.state_shapes(model.dtype), device, 1)
        cache = states.join(store.cache, config.attention_layers, config.num_layers)
    table = to_tensor(np.broadcast_to(np.arange(held), (groups, held)))
    group = SequenceGroup(GROUP, table, to_tensor(np.arange(GROUP, count + 1, GROUP)),
                          to_tensor(sequences) if config.has_states else None)
    batch = PagedBatch((group,), model.rope_tables)
    model.step_paged(to_tensor(tokens), batch, cache, to_tensor(np.zeros(1))).realize()
    def largest(pages: Tensor) -> np.ndarray:
        # on the host: clang takes minutes to compile this reduction for a CPU
        rows = pages.float().numpy().reshape(held * size, -1, model.config.head_dim)[:count]
        most: np.ndarray = np.abs(rows).max((0, 2))
        # a head of zeros or NaN gets scale 1
        return np.where((most > 0) & np.isfinite(most), most / CALIBRATED[dtype], 1.0)
    return [(largest(layer.keys), largest(layer.values)) for layer in store.cache.layers
            if layer.values is not None]
