"""Two forms of attention's operands that a graph of ATen hides: a cache that is written in place, and key
heads that serve several query heads.

Protocol. `simplify(graph)` rewrites a graph of ATen:

    index_copy(cache, 2, arange(T) + start, rows)     cache [B, H, capacity, D]
        becomes `append`: T rows written in place (functional.kv_append), where scatter reads all of the cache
    view(clone(expand(unsqueeze(k, 2))))              [B, H_kv, S, D] as [B, H, S, D], an operand of attention
        becomes k: attention shares a key head among query heads itself

An `append` writes over its cache, so the cache must be an argument of the graph that torch wants overwritten
by that very result, and that nothing else reads. A cache that is made in the graph is written likewise.
"""
from __future__ import annotations

from typing import Any

import torch
from tinygrad import Tensor, dtypes
from torch.fx import Graph, Node

from tinygrad_nv import functional
from tinygrad_nv.torch.lowering.table import TABLE, Out, overload

ATTENTION = overload("_scaled_dot_product_flash_attention_for_cpu.default")
INDEX_COPY, COPY = overload("index_copy.default"), overload("copy_.default")
CONSTANTS = tuple(map(overload, ("zeros.default", "full.default", "new_zeros.default", "zeros_like.default")))
VIEWS = tuple(map(overload, ("view.default", "_unsafe_view.default", "reshape.default")))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def append(cache: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """The cache [B, H, capacity, D] with rows [B, H, T, D] at the T places [T], which follow each other."""
    batch = cache.shape[0]
    lengths = (places[-1:] + 1).cast(dtypes.int32).expand(batch)
    rows = rows.cast(cache.dtype).transpose(1, 2)
    return functional.kv_append(cache, None, rows, None, None, lengths)[0]


def _append(out: Out, cache: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    # a constant has no memory that could be written
    return append(cache.clone() if cache.uop.is_virtual else cache, places, rows)


TABLE[append] = _append


def simplify(graph: Graph) -> list[Node]:
    """Rewrites a graph in place. Returns the caches that are written in place."""
    made_in_place = []
    for node in list(graph.nodes):
        if node.target is ATTENTION: _share_heads(node)
        elif node.target is INDEX_COPY and _appends(node):
            cache, _, places, rows = node.args
            with graph.inserting_before(node):
                made = graph.call_function(append, (cache, places, rows))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            made_in_place.append(made)
    graph.eliminate_dead_code()
    return made_in_place


def _share_heads(node: Node) -> None:
    """Gives attention the key heads that were repeated for it."""
    found = [_before_repeat(each) for each in node.args[1:3]]
    if None in found or not all(isinstance(each, Node) for each in node.args[:3]): return
    q, k, v = _shape(node.args[0]), *map(_shape, found)
    if k[1] == v[1] and q[1] % k[1] == 0: node.args = (node.args[0], *found, *node.args[3:])


def _before_repeat(node: Any) -> Node | None:
    """Returns the node that was repeated over heads, [B, H_kv, S, D], if one was."""
    chain = [node]
    for wanted in (VIEWS, (overload("clone.default"),), (overload("expand.default"),),
                   (overload("unsqueeze.default"),)):
        if not isinstance(chain[-1], Node) or chain[-1].target not in wanted: return None
        chain.append(chain[-1].args[0])
    view, _, expand, unsqueeze, source = chain
    b, h, s, d = shape = _shape(source)
    wide = _shape(expand)
    fits = unsqueeze.args[1] == 2 and len(shape) == 4 and wide == (b, h, wide[2], s, d)
    return source if fits and _shape(view) == (b, h * wide[2], s, d) else None


def _appends(node: Node) -> bool:
    """Whether an index_copy writes rows that follow each other into a cache that may be overwritten."""
    cache, dim, places, _rows = node.args
    if dim != 2 or len(_shape(cache)) != 4 or cache.meta["val"].dtype not in FLOATS: return False
    if not _successive(places) or not cache.meta["val"].is_contiguous(): return False
    others = [user for user in cache.users if user is not node]
    if cache.target in CONSTANTS: return True
    return cache.op == "placeholder" and len(others) == 1 and others[0].target is COPY \
        and others[0].args == (cache, node)


def _successive(places: Any) -> bool:
    """arange(T) + start."""
    if not isinstance(places, Node) or places.target is not overload("add.Tensor"): return False
    first, start = places.args[:2]
    if not (isinstance(first, Node) and first.target is overload("arange.default")): return False
    return not places.kwargs and (not isinstance(start, Node) or start.meta["val"].numel() == 1)


def _shape(node: Any) -> tuple[Any, ...]: return tuple(node.meta["val"].shape)
