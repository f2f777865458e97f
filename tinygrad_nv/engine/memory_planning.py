"""Whether a model fits into a device's memory, and how many KV cache pages fit beside it. Computed before any
weight is loaded.

Protocol: `require_room` limits the memory that this process may hold, raises if weights and cache cannot fit,
and registers hints with the memory pool that later out-of-memory errors show. A device without a memory pool
of this package (CPU) has no limit here; its own allocator raises. `CacheSize.num_pages` then gives the number
of pages of the KV cache.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinygrad import Device
from tinygrad.dtype import DType

from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.kvcache.groups import CacheGroups
from tinygrad_nv.kvcache.state_table import PAGES_OF_SEQUENCE
from tinygrad_nv.kvcache.store import CACHE
from tinygrad_nv.runtime.memory_pool import check_utilization
from tinygrad_nv.runtime.observe.memory_report import human

if TYPE_CHECKING:
    from tinygrad_nv.models.config import ModelConfig

WEIGHTS, ACTIVATIONS = "weights", "activations"  # labels
MIN_CONTEXT = 2   # one prompt token and one output token
# bytes of the KV cache when neither an option nor a GPU's memory limits it; a CPU commits the memory as pages
# are written
CACHE_BYTES = 2 << 30
STATE_CACHE_BYTES = 1 << 28     # of states after common prefixes; Qwen3-Next's take 75 MiB a prefix
MOST_STATES = 4096
EMPTY_PAGES = 1 << 16  # of a model without attention, whose pages only count tokens
MAX_PAGES = 1 << 20    # the page pool takes about 500 bytes of host memory for each page
ACTIVATION_COPIES = 4   # copies of a step's activations, in every width, that are in memory at a time


def layer_bytes(config: ModelConfig, dtype: DType) -> int:
    """Bytes of keys and values of one token, one layer."""
    return config.kv_shape.elements * dtype.itemsize


def token_bytes(config: ModelConfig, dtype: DType) -> int:
    """Bytes of keys and values of one token, all layers."""
    return len(config.attention_layers) * layer_bytes(config, dtype)


def state_pages(config: ModelConfig, dtype: DType, max_seqs: int, sharing: bool) -> int:
    """Pages of states: what sequences need, and with `sharing` as many more as `STATE_CACHE_BYTES` hold, for
    prefixes. None for a model without states."""
    if not config.has_states: return 0
    more = min(MOST_STATES, STATE_CACHE_BYTES // config.state_bytes(dtype)) if sharing else 0
    return PAGES_OF_SEQUENCE * max_seqs + more


def require_room(device: str, config: ModelConfig, dtype: DType, length: int, capacity: int,
                 utilization: float, bytes_per_token: int = 0, weight_bytes: int = 0) -> None:
    """Raises `OutOfMemoryError` when weights and a cache of `capacity` tokens, for a context of `length`, do
    not fit into the fraction `utilization` of the device. `bytes_per_token` is the size of one cached token,
    `weight_bytes` that of all weights (0: those of `dtype`). Raises `RequestError` for a `utilization`
    outside 0 < x <= 1."""
    fraction, pool = check_utilization(utilization), getattr(Device[device], "pool", None)
    if pool is None: return
    pool.use_at_most(fraction)
    weights = weight_bytes or config.parameters * dtype.itemsize
    bytes_per_token = max(1, bytes_per_token or token_bytes(config, dtype))

    def shorter(shortfall: int) -> str:
        fewer = -(-shortfall // bytes_per_token)
        if length - fewer < MIN_CONTEXT: return ""
        return f"lower --max-model-len by {fewer} tokens, to {length - fewer}"

    def smaller(shortfall: int) -> str:
        if dtype.itemsize == 4 and shortfall <= (weights + bytes_per_token * capacity) // 2:
            return f"use --dtype bfloat16: {human(weights // 2)} of weights"
        most = pool.live_bytes + pool.driver.memory()[0]  # if the whole device were free
        return "" if weights <= most else f"use a smaller model, or a GPU with more than {human(most)} free"

    pool.remedy(CACHE, shorter)
    pool.remedy(WEIGHTS, smaller)
    pool.require({WEIGHTS: weights, CACHE: bytes_per_token * capacity})


def require_weights(device: str, weight_bytes: int, utilization: float) -> None:
    """`require_room` of a model without a cache."""
    fraction, pool = check_utilization(utilization), getattr(Device[device], "pool", None)
    if pool is None: return
    pool.use_at_most(fraction)
    pool.require({WEIGHTS: weight_bytes})


@dataclass(frozen=True)
class CacheSize:
    """Size of a KV cache: pages of `page_size` tokens and `page_bytes` bytes, for `max_seqs` sequences of at
    most `length` tokens, of which a step computes at most `chunk`. `groups`: which layers share a page."""
    page_size: int
    page_bytes: int
    length: int
    max_seqs: int
    groups: CacheGroups
    chunk: int

    @property
    def min_pages(self) -> int:
        """Pages of one sequence of full length. Tokens are computed in groups, so the last group may extend
        past the end."""
        return self.groups.num_pages(self.length + GROUP - 1, self.page_size, self.chunk)

    def num_pages(self, device: str, weights: int, step: int) -> int:
        """Pages that fit beside `weights` bytes of weights and `step` bytes of activations. Without a limit,
        or on an emulated device: enough for all sequences, up to `CACHE_BYTES`."""
        pool, most = getattr(Device[device], "pool", None), self.max_seqs * self.min_pages
        if not self.page_bytes: fitting = min(most, EMPTY_PAGES)
        elif pool is None or pool.driver.emulated: fitting = min(most, CACHE_BYTES // self.page_bytes)
        else: fitting = (min(pool.limit, pool.driver.memory()[0]) - weights - step) // self.page_bytes
        return max(self.min_pages, min(fitting, MAX_PAGES))


def step_bytes(config: ModelConfig, dtype: DType, num_tokens: int, num_samples: int) -> int:
    """Estimated bytes of activations of a step of `num_tokens` tokens and `num_samples` samples."""
    widths = config.hidden_size + config.attention_width + 3 * config.intermediate_size
    made = ACTIVATION_COPIES * (num_tokens * widths * dtype.itemsize + num_samples * config.vocab_size * 4)
    if config.moe is None: return made
    return made + num_tokens * config.moe.activation_bytes(config.hidden_size, dtype.itemsize)
