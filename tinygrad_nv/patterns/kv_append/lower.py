"""An append of keys and values to a kernel of ours, that writes the pages in place.

Protocol: `lower_kv_append` is what patterns/named.py asks for. Pages are storage, whole and in order, and the
results are that storage after the kernel: assigning them to the pages stores nothing more
(patterns/program.py). New rows are read where they lie, as heads of a projection, or copied where vectors
could not be loaded. """
from __future__ import annotations

from typing import TypeVar

from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.strides import Laid, copy_dense, lay_out
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.decode.spec import Pages, Scales
from tinygrad_nv.tile.kv_append.reference import Arguments, KVAppend
from tinygrad_nv.tile.kv_append.spec import AppendSpec, Heads, Rope

NAME = "kv_append"
T = TypeVar("T")


def lower_kv_append(what: KVAppend, target: Target, *arguments: UOp) -> tuple[UOp, ...]:
    """Returns pages, and q, after the kernel. Raises `Unsupported` where there is none."""
    x = Arguments.of(what, arguments)
    for name, pages in zip(("k_pages", "v_pages"), x.pages, strict=False):
        if not program.is_whole(pages):
            raise Unsupported(f"{name} are no storage of their own, to be written in place")
    new, q = ([_rows(each, target.head_bytes) for each in given] for given in (x.new, x.q))
    scales = [lay_out(each) for each in x.scales]
    spec = _spec(what, x, new, q, scales)
    outputs: list[program.Output | UOp] = [*x.pages]
    outputs += [program.Output(each.shape, each.dtype) for each in x.q]
    inputs = [each.storage for each in (*new, *q)]
    if x.table is not None: inputs.append(x.table)
    inputs += [x.lengths, *x.rope, *(each.storage for each in scales)]
    moved = sum(each.max_numel() * each.dtype.itemsize for each in (*x.new, *x.q))
    return choose(spec, target).call(x.new[0].device, outputs, inputs, nbytes=2 * moved)


def _rows(x: UOp, aligned: int) -> Laid:
    """New rows where they lie, or copied where heads do not begin at multiples of so many bytes."""
    found = lay_out(x)
    fits = found.strides[-1] == 1 and _heads(found).alignment_bytes >= aligned
    return found if fits else copy_dense(x)


def _heads(x: Laid) -> Heads:
    request, row, head, _ = x.strides
    return Heads(x.dtype, request, row, head, x.offset)


def _spec(what: KVAppend, x: Arguments[UOp], new: list[Laid], q: list[Laid],
          scales: list[Laid]) -> AppendSpec:
    stored, *extents, d = map(int, x.pages[0].shape)
    heads, size = extents if x.table is None else extents[::-1]
    batch, rows = map(int, x.new[0].shape[:2])
    widths = [int(each.shape[-1]) for each in x.pages]
    rope = Rope(x.rope[0].dtype, int(x.rope[0].shape[1]), what.interleaved, what.rounded) if x.rope else None
    k_scale, v_scale = _both([_scales(each) for each in scales])
    token, head = (1, size) if x.table is None else (heads, 1)
    k_pages, v_pages = _both([Pages(each.dtype, size * heads * width, token * width, head * width)
                              for each, width in zip(x.pages, widths, strict=True)])
    k, v = _both([_heads(each) for each in new])
    assert k is not None
    assert k_pages is not None
    entries = 1 if x.table is None else int(x.table.shape[1])
    q_heads = int(x.q[0].shape[2]) if q else 0
    return AppendSpec(batch, rows, heads, d, widths[1] if what.values else 0, size, entries, stored, k, v,
                      k_pages, v_pages, rope, _heads(q[0]) if q else None, q_heads, k_scale, v_scale,
                      x.table is not None)


def _both(found: list[T]) -> tuple[T | None, T | None]:
    """Returns the entries for keys and for values, None for those there are not."""
    return (found[0] if found else None), (found[1] if len(found) > 1 else None)


def _scales(x: Laid) -> Scales:
    page, head = x.strides
    return Scales(page, head, x.offset)
