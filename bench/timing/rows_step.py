"""Rows of timing/table.py of whole decode steps of LLaMA 3.2 1B and 3.1 8B, as graphs.

Ours are the launches that models/llama.py lowers to on the emulated device, with a greedy token, found by
`explain` without running them; each spec is predicted once, then all stand in a row with PDL. Peers: the same
row without PDL, and Triton's best kernel for each operation of the network, unfused where Triton's are,
without PDL.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from tinygrad import Tensor, dtypes

from bench.gpu.decode import MODELS
from bench.lib import memory_peers as kernels
from bench.timing import rows_memory as memory
from bench.timing.gate_cases import GPU_NAME, HOPPER
from bench.timing.rows import Checkouts, Launches, Peer, Row, total_seconds
from bench.timing.triton_times import Array, predict
from tinygrad_nv.explain import explain
from tinygrad_nv.kvcache.store import LayerPages, PagedCache
from tinygrad_nv.models.config import ModelConfig, parse_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.paged import PagedBatch, SequenceGroup
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.tile.emulated import timings
from tinygrad_nv.tile.templates import TABLE

DEVICE, PAGE = "EMU", 16
BATCHES, CONTEXTS = (1, 16), (1024, 8192)
TILES = ((32, 4, 3), (64, 4, 2))


# **** ours ****

@lru_cache
def kernels_of(name: str, batch: int, context: int) -> tuple[tuple[Any, Any], ...]:
    """Spec and schedule of each call of a step, in order. Weights and pages have no memory."""
    c, pages = parse_config(MODELS[name]), context // PAGE
    model = Llama(c, dtypes.bfloat16, DEVICE, context)

    def empty(*shape: int, dtype: Any = dtypes.bfloat16) -> Tensor:
        return Tensor.empty(*shape, dtype=dtype, device=DEVICE)
    model.__dict__["rope_tables"] = (empty(context, c.head_dim // 2), empty(context, c.head_dim // 2)),
    stored = batch * pages, PAGE, c.num_kv_heads, c.head_dim
    cache = PagedCache(tuple(LayerPages(empty(*stored), empty(*stored)) for _ in range(c.num_layers)))
    group = SequenceGroup(1, empty(batch, pages, dtype=dtypes.int32), empty(batch, dtype=dtypes.int32))
    logits = model.step_paged(empty(batch, dtype=dtypes.int32), PagedBatch((group,), model.rope_tables),
                              cache)
    found = explain(logits.argmax(-1).cast(dtypes.int32)).kernels
    assert all(each.template for each in found), "a kernel of tinygrad's in the step"
    return tuple((each.spec, each.schedule) for each in found if each.spec is not None)


@lru_cache
def time_launches(spec: Any, schedule: Any) -> tuple[Timing, ...]:
    """Returns the launches of a call."""
    return tuple(timings(TABLE.build(spec, schedule, HOPPER), spec, GPU_NAME))


def step(name: str, batch: int, context: int) -> tuple[str, Launches]:
    """All launches."""
    launches = [one for call in kernels_of(name, batch, context) for one in time_launches(*call)]
    return f"{len(launches)} launches, PDL", launches


# **** Triton's ****

def best(variants: Sequence[Any]) -> Launches:
    """The launches of the fastest."""
    return min((variant({}) for variant in variants), key=total_seconds)


@lru_cache
def matmul(m: int, n: int, k: int) -> Launches:
    """Fastest of split and unsplit ones."""
    return best([partial(memory.gemv, m, n, k, kernel) for kernel in
                 (memory.ONE if m == 1 else memory.SOME)])


def add_residual(m: int, n: int, _: Checkouts) -> Launches:
    """A residual."""
    given = {name: Array("bf16", (m, n)) for name in ("out", "x", "y")}
    return [predict(kernels.add_residual, given, (m, n // 1024), {"N": n, "BLOCK": 1024}, num_warps=4)]


@lru_cache
def of_triton(name: str, batch: int, context: int) -> tuple[Timing, ...]:
    """The network, operation by operation."""
    c: ModelConfig = parse_config(MODELS[name])
    hidden, heads, group = c.hidden_size, c.num_kv_heads, c.num_heads // c.num_kv_heads
    norm = best([partial(memory.row_by_row, kernels.rms_norm, batch, hidden, "w", warps) for warps in (4, 8)])
    appended = best([partial(memory.append_kv, batch, context // PAGE, warps, heads, group, c.head_dim)
                     for warps in (1, 2)])
    attended = best([partial(memory.attend, batch, context, tile, splits, heads, group, c.head_dim)
                     for tile in TILES for splits in memory.split_counts(batch, context, heads)])
    gated = best([partial(memory.silu_and_mul, batch, c.intermediate_size, block, 4)
                  for block in (512, 1024)])
    plus = add_residual(batch, hidden, {})
    layer = [*norm, *matmul(batch, (group + 2) * heads * c.head_dim, hidden), *appended, *attended,
             *matmul(batch, hidden, c.num_heads * c.head_dim), *plus,
             *norm, *matmul(batch, 2 * c.intermediate_size, hidden), *gated,
             *matmul(batch, hidden, c.intermediate_size), *plus]
    first = best([partial(memory.gather_rows, batch, hidden, 1024, 4)])
    last = best([partial(memory.largest, batch, False, cut, 8) for cut in (16, 64)])
    return (*first, *layer * c.num_layers, *norm, *matmul(batch, c.vocab_size, hidden), *last)


def rows() -> Iterator[Row]:
    """By model, batch, context."""
    for name in MODELS:
        c = parse_config(MODELS[name])
        for batch in BATCHES:
            for context in CONTEXTS:
                def without(_: Checkouts, given: Any = (name, batch, context)) -> Launches:
                    return step(*given)[1]

                def triton(_: Checkouts, given: Any = (name, batch, context)) -> Launches:
                    return of_triton(*given)
                cache = 4 * batch * context * c.num_layers * c.num_kv_heads * c.head_dim
                embedding = 0 if c.tied else c.vocab_size * c.hidden_size
                yield Row("decode step", f"{name}, batch {batch}, {context} tokens", None,
                          (Peer("the step without PDL", without), Peer("Triton's best kernels", triton)),
                          nbytes=2 * (c.parameters - embedding) + cache,
                          launched=partial(step, name, batch, context), pdl=True)
