"""Whether a model fits into a device's memory, answered before anything is loaded.

Protocol: `require_room` sets how much of the device this process may hold, refuses what cannot fit, and tells
the device's pool how weights and cache could be smaller, for the words of a shortage later on. A device
without a pool of ours (CPU) has no limit here, and refuses by itself.
"""
from __future__ import annotations

from tinygrad import Device
from tinygrad.dtype import DType

from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.runtime.memory_pool import check_utilization
from tinygrad_nv.runtime.memory_report import human

WEIGHTS, CACHE, ACTIVATIONS = "weights", "KV cache", "activations"  # labels
LEAST_CONTEXT = 2   # a token of the prompt and one after it


def token_bytes(config: ModelConfig, dtype: DType) -> int:
    """Bytes of keys and values of one token, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def require_room(device: str, config: ModelConfig, dtype: DType, length: int, capacity: int,
                 utilization: float) -> None:
    """Raises `OutOfMemoryError` when weights and a cache of `capacity` tokens, for a context of `length`, do
    not fit into `utilization` of the device; `RequestError` when that is no part of 1."""
    part, pool = check_utilization(utilization), getattr(Device[device], "pool", None)
    if pool is None: return
    pool.use_at_most(part)
    weights, token = config.parameters * dtype.itemsize, token_bytes(config, dtype)

    def shorter(short: int) -> str:
        fewer = -(-short // token)
        if length - fewer < LEAST_CONTEXT: return ""
        return f"lower --max-model-len by {fewer} tokens, to {length - fewer}"

    def smaller(short: int) -> str:
        if dtype.itemsize == 4 and short <= (weights + token * capacity) // 2:
            return f"use --dtype bfloat16: {human(weights // 2)} of weights"
        most = pool.live_bytes + pool.driver.memory()[0]  # with all of the device to be had
        return "" if weights <= most else f"use a smaller model, or a GPU with more than {human(most)} free"

    pool.remedy(CACHE, shorter)
    pool.remedy(WEIGHTS, smaller)
    pool.require({WEIGHTS: weights, CACHE: token * capacity})
