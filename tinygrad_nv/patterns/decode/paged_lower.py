"""Paged attention to kernels of ours: from a named function's arguments to a decode attention.

Protocol: `lower_paged` is what patterns/named.py asks for. Where q, keys, values and scales lie is read off
their indices (patterns/strides.py), so that heads of a projection and halves of one tensor of keys and values
need no copy. Queries are copied where the template cannot read them. What else it cannot do is a near miss,
and the body runs.

More than 8 rows are requests of at most 8: block c of a request's rows is a request of its own, with the
same pages, that ends where the block does. Rows are filled up in front, by rows that are not used; each
block reads its keys again. With a window a row in front would see keys that are behind the request's, whose
pages may be of another request: there the second block begins with rows of the first again instead.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.decode.paged_reference import PagedAttention, apart
from tinygrad_nv.patterns.strides import Laid, copy_dense, lay_out
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.attention.spec import Rows
from tinygrad_nv.tile.decode.spec import MOST_ROWS, DecodeSpec, Pages, Scales
from tinygrad_nv.tile.expression import Expression, Sum, tanh

NAME = "decode"
ROW_BYTES = 8  # of which rows of q begin at multiples: 4 elements of a lane


def lower_paged(what: PagedAttention, target: Target, *arguments: UOp) -> tuple[UOp, ...]:
    """Returns the result of a paged attention by kernels. Raises `Unsupported` or `SpecError` where there are
    none."""
    q, k_pages, v_pages, table, lengths, *more = arguments
    scales, sinks = apart(what, more)
    blocks = RequestBlocks.of(q, what.window)
    queries = blocks.queries(q)
    shapes = tuple(tuple(int(extent) for extent in x.shape) for x in (queries, k_pages, v_pages))
    k, v, *scale = (lay_out(x) for x in (k_pages, v_pages, *scales))
    read = _read(queries, shapes[0][2] // shapes[1][2])
    spec = _spec(what, read, k, v, scale, table, shapes)
    batch, rows, heads, _ = shapes[0]
    inputs = [read.storage, k.storage, *[v.storage] * (not spec.latent), blocks.table(table),
              blocks.lengths(lengths), *(each.storage for each in scale)]
    if sinks is not None: inputs.append(_dense(sinks))
    out = program.Output((batch, rows, heads, shapes[2][3]), q.dtype)
    flops = 2 * batch * heads * rows * spec.longest * (spec.d + spec.d_v)
    (done,) = choose(spec, target).call(q.device, [out], inputs, words=blocks.words, flops=flops)
    return blocks.result(done),


# **** blocks of rows ****

@dataclass(frozen=True)
class RequestBlocks:
    """The rows of a request as `count` blocks of `rows`, with `filled` rows in front that are none; or where
    they are computed `again`, the last of the first block at the beginning of the second."""
    count: int
    rows: int
    filled: int
    again: bool = False

    @staticmethod
    def of(q: UOp, window: int | None) -> RequestBlocks:
        """Returns the blocks of q [B, S_q, H, D]."""
        count = -(-int(q.shape[1]) // MOST_ROWS)
        rows = -(-int(q.shape[1]) // count)
        filled = count * rows - int(q.shape[1])  # fewer than rows
        return RequestBlocks(count, rows, filled, filled > 0 and window is not None)

    @property
    def words(self) -> str:
        """Note on the blocks for a reader."""
        if self.count == 1: return ""
        return f"; {self.count} blocks of {self.rows} rows, each a request of its own"

    def queries(self, q: UOp) -> UOp:
        """q as [B · count, rows, H, D]."""
        if self.count == 1: return q
        filled = q
        if self.again: filled = _join_rows(q, (0, self.rows), (self.rows - self.filled, int(q.shape[1])))
        elif self.filled: filled = q.pad(((0, 0), (self.filled, 0), (0, 0), (0, 0)))
        return filled.reshape((int(q.shape[0]) * self.count, self.rows, *q.shape[2:]))

    def table(self, table: UOp) -> UOp:
        """The table, a row for each block."""
        if self.count == 1: return table
        batch, pages = table.shape
        return table.reshape((batch, 1, pages)).expand((batch, self.count, pages)).reshape((-1, pages)) \
            .contiguous()

    def lengths(self, lengths: UOp) -> UOp:
        """Returns where each block ends: at least 0."""
        if self.count == 1: return lengths
        after = Tensor.arange(self.count - 1, -1, -1) * self.rows
        if self.again: after = after.minimum((self.count - 1) * self.rows - self.filled)  # the first's
        ends = Tensor(lengths).reshape(-1, 1) - after.reshape(1, -1)
        return ends.maximum(0).cast(dtypes.int32).reshape(-1).contiguous().uop

    def result(self, out: UOp) -> UOp:
        """The rows that were asked for, of [B · count, rows, H, D_v]."""
        if self.count == 1: return out
        batch = int(out.shape[0]) // self.count
        whole = out.reshape((batch, self.count * self.rows, *out.shape[2:]))
        if self.again:
            return _join_rows(whole, (0, self.rows), (self.rows + self.filled, self.count * self.rows))
        return whole.shrink((None, (self.filled, self.count * self.rows), None, None))


def _join_rows(x: UOp, *ranges: tuple[int, int]) -> UOp:
    """Some rows of x [B, S, H, D] after others."""
    first, *others = (Tensor(x.shrink((None, each, None, None))) for each in ranges)
    return first.cat(*others, dim=1).uop


# **** specs ****

def _spec(what: PagedAttention, q: Laid, k: Laid, v: Laid, scales: list[Laid], table: UOp,
          shapes: tuple[tuple[int, ...], ...]) -> DecodeSpec:
    """The spec of operands of these shapes: q's, keys' and values'."""
    (batch, rows, heads, d), (_, size, kv_heads, _), (*_, d_v) = shapes
    group = heads // kv_heads
    for name, each in (("keys", k), ("values", v)):
        if each.strides[-1] != 1: raise Unsupported(f"elements of {name} lie {each.strides[-1]} apart")
    out = Rows(q.dtype, heads * d_v, (rows * heads * d_v, group * d_v, d_v))
    k_scale, v_scale = map(_scales, scales) if scales else (None, None)
    return DecodeSpec(batch, kv_heads, group, rows, d, d_v, size, int(table.shape[1]), _rows(q, group),
                      _pages(k), _pages(v), out, k_scale, v_scale, what.window, score(what),
                      chunked=what.chunked, sinks=what.sinks, latent=not scales and _among(v, d_v, k, d))


def _among(v: Laid, d_v: int, k: Laid, d: int) -> bool:
    """Whether values are elements of keys."""
    return v.storage is k.storage and v.strides == k.strides and 0 <= v.offset - k.offset <= d - d_v


def _pages(x: Laid) -> Pages:
    page, token, head, _ = x.strides
    return Pages(x.dtype, page, token, head, x.offset)


def _scales(x: Laid) -> Scales:
    page, head = x.strides
    return Scales(page, head, x.offset)


def score(what: PagedAttention) -> Expression:
    """The score of a sum."""
    scaled = Sum() * what.scale
    if what.softcap is None: return scaled
    return tanh(scaled * (1 / what.softcap)) * what.softcap


def _rows(q: Laid, group: int) -> Rows:
    request, row, head, _ = q.strides
    return Rows(q.dtype, row, (request, group * head, head), q.offset)


def _dense(x: UOp) -> UOp:
    """The storage of numbers side by side, copied where they are not at its beginning."""
    found = lay_out(x)
    return (found if (found.strides, found.offset) == ((1,), 0) else copy_dense(x)).storage


def _read(queries: UOp, group: int) -> Laid:
    """Queries where they lie, or copied where lanes could not load their rows."""
    found = lay_out(queries)
    return found if found.strides[-1] == 1 and _rows(found, group).alignment_bytes >= ROW_BYTES \
        else copy_dense(queries)
