"""Whether a model fits into a device's memory, and how much is left for its cache, answered before anything
is loaded.

Protocol: `require_room` sets how much of the device this process may hold, refuses what cannot fit, and tells
the device's pool how weights and cache could be smaller, for the words of a shortage later on. A device
without a pool of ours (CPU) has no limit here, and refuses by itself. `Cache.pages` then says how many pages
of keys and values there shall be.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Device
from tinygrad.dtype import DType

from tinygrad_nv.engine.scheduling.batch import GROUP
from tinygrad_nv.kvcache.store import CACHE
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.runtime.memory_pool import check_utilization
from tinygrad_nv.runtime.observe.memory_report import human

WEIGHTS, ACTIVATIONS = "weights", "activations"  # labels
LEAST_CONTEXT = 2   # a token of the prompt and one after it
# what keys and values take where nobody says and nothing limits them: a CPU has them in memory as they are
# written
CACHE_BYTES = 2 << 30
MOST_PAGES = 1 << 20    # a page costs the host some 500 bytes of books
ROW_COPIES = 4          # of a step's rows, in every width, that are in memory at a time


def token_bytes(config: ModelConfig, dtype: DType) -> int:
    """Bytes of keys and values of one token, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def require_room(device: str, config: ModelConfig, dtype: DType, length: int, capacity: int,
                 utilization: float, token: int = 0) -> None:
    """Raises `OutOfMemoryError` when weights and a cache of `capacity` tokens of `token` bytes (0: those of
    `dtype`), for a context of `length`, do not fit into `utilization` of the device; `RequestError` when that
    is no part of 1."""
    part, pool = check_utilization(utilization), getattr(Device[device], "pool", None)
    if pool is None: return
    pool.use_at_most(part)
    weights, token = config.parameters * dtype.itemsize, token or token_bytes(config, dtype)

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


@dataclass(frozen=True)
class Cache:
    """Pages of `page_size` tokens and `page_bytes` bytes each, all layers, for contexts of `length` tokens of
    which `max_seqs` run at a time."""
    page_size: int
    page_bytes: int
    length: int
    max_seqs: int

    @property
    def least(self) -> int:
        """Pages of one sequence: rows are computed in groups, the last of which may go past its end."""
        return -(-(self.length + GROUP - 1) // self.page_size)

    def pages(self, device: str, weights: int, step: int) -> int:
        """What is left of the device after so many bytes of weights, and of a step's activations. Where
        nothing limits it, or the device is emulated, as many as all sequences need, in `CACHE_BYTES`."""
        pool, most = getattr(Device[device], "pool", None), self.max_seqs * self.least
        if pool is None or pool.driver.emulated: fitting = min(most, CACHE_BYTES // self.page_bytes)
        else: fitting = (min(pool.limit, pool.driver.memory()[0]) - weights - step) // self.page_bytes
        return max(self.least, min(fitting, MOST_PAGES))


def step_bytes(config: ModelConfig, dtype: DType, rows: int, samples: int) -> int:
    """About what a step of so many rows needs besides weights and cache."""
    widths = config.hidden_size + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widths += 3 * config.intermediate_size
    return ROW_COPIES * (rows * widths * dtype.itemsize + samples * config.vocab_size * 4)
