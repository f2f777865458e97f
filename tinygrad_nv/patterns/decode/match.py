"""Attentions of few rows and many keys: decode attentions, which divide the keys.

Protocol: `choose_decode` makes of a `Found` (attention/spec.py) what tile/decode, or
cpu/decode/kernel.py, takes, or None, which leaves it to flash attention. The keys of a request are a
contiguous cache; how many there are is what the last row sees: an argument of the launch where it varies.
Rows beside each other end at it, as a causal mask has them; without one all rows see all keys, and are to a
kernel what query heads are. """
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.attention.spec import Found, integer, most
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.positions import AffineForm, add_forms
from tinygrad_nv.patterns.target import Chosen, Target, choose
from tinygrad_nv.tile import order
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec, Band, Rows
from tinygrad_nv.tile.decode.spec import MOST_ROWS, DecodeSpec, Pages
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, walk

MOST_PACKED = 64   # rows of a key head in one CTA: four warps of 16
FEWEST_KEYS = 128  # of the smallest split
KEYS_OF_ROW = 16   # of a split, for each row that it has


def is_decode(rows: int, group: int, keys: int) -> bool:
    """Whether so many rows of `group` query heads are better divided along `keys` than along rows.

    Flash attention has a CTA for each query head, and each goes through all keys. For one request of 8 key
    heads with 4 query heads each that is 32 CTAs for the 132 multiprocessors of an H100, which read each key
    4 times; of 32 rows one in each block of 16 counts. A decode kernel packs the group · rows rows of a key
    head into one CTA, as long as they are at most 4 warps · 16 = 64, so that each key is read once, and has a
    CTA for each split of the keys: 8 key heads of 4096 keys with 128 elements are 8 · 8 splits of 512. What
    it costs is a second launch, of some microseconds, and what splits leave each other: group · rows · d_v
    floats. A split therefore has 128 KiB of keys and values for each 16 rows, or more
    (tile/decode/templates.py), of heads with 128 elements 16 keys a row: with no more keys than that, or than
    128, nothing would be divided, and a CTA of flash attention reads all it needs in less time than a launch
    takes. How many requests there are does not count: bits would depend on it."""
    packed = rows * group
    return rows <= MOST_ROWS and packed <= MOST_PACKED and keys > max(FEWEST_KEYS, KEYS_OF_ROW * packed)


def is_decode_on_cpu(rows: int, group: int, keys: int) -> bool:
    """Whether they are on a CPU: there keys are read once for all rows of a key head by decode attention, and
    once for each query head by flash attention, which is the faster the more rows there are."""
    return rows <= MOST_ROWS and rows * group <= MOST_PACKED


BETTER = {"gpu": is_decode, "cpu": is_decode_on_cpu}


def choose_decode(made: Found, target: Target) -> Chosen | None:
    """Returns the decode attention that an attention is, where that is better: never where sums have one
    order."""
    if order.is_wanted(): return None
    spec = _rows_to_heads(made.spec)
    if spec.lse or spec.is_ragged or spec.kept < KEEP_ALL or "s_q" in spec.symbolic: return None
    if spec.sinks is not None and spec is not made.spec: return None  # of heads that are rows now
    if (seen := _visible_length(spec.band, spec.s_q, made.forms)) is None: return None
    length, window = seen
    longest = most(length, made.names)
    # rows must end with the keys: beyond that they would see no key
    if most(add_forms(length, made.forms["s_kv"], -1), made.names) > 0: return None
    keys = longest if window is None else min(longest, window + spec.s_q - 1)
    if not BETTER[target.kind](spec.s_q, spec.batch[2], keys): return None
    if (score := _score(spec, length, made.forms["start"])) is None: return None
    integers = (integer(length, made.variables),) if made.variables else ()
    try: return choose(_spec(spec, longest, bool(integers), window, score), target, integers)
    except (SpecError, Unsupported): return None


def _rows_to_heads(spec: AttentionSpec) -> AttentionSpec:
    """Rows that see the same as query heads, where that makes fewer rows."""
    b, heads, group = spec.batch
    if not spec.band.full or spec.s_q <= group or "s_q" in spec.symbolic: return spec
    def exchange(rows: Rows) -> Rows:
        return replace(rows, row=rows.batch[2], batch=(*rows.batch[:2], rows.row))
    return replace(spec, s_q=group, batch=(b, heads, spec.s_q), q=exchange(spec.q), out=exchange(spec.out),
                   score=_exchange_axes(spec.score))


def _exchange_axes(node: Expression) -> Expression:
    if isinstance(node, Position) and node.axis in ("m", 2): return Position(2 if node.axis == "m" else "m")
    if isinstance(node, Load):
        b, heads, group = node.batch or (0, 0, 0)
        return replace(node, m=group, batch=(b, heads, node.m))
    if isinstance(node, Apply): return replace(node, args=tuple(map(_exchange_axes, node.args)))
    return node


def _visible_length(band: Band, rows: int, forms: Mapping[str, AffineForm]) -> tuple[AffineForm,
                                                                                     int | None] | None:
    """How many keys the last row sees, counted from 0, and the window; None where that is not all."""
    if band.last is not None:
        window = None if band.first is None else band.last - band.first + 1
        length = add_forms(forms["start"], AffineForm(rows + band.last, ()))
    else:
        length, window = forms["s_kv"], None
        if band.first is not None:
            reach = add_forms(add_forms(length, forms["start"], -1), AffineForm(-band.first, ()))
            if rows > 1 or reach.factors: return None
            window = reach.offset
    return None if window is not None and window < 1 else (length, window)


def _score(spec: AttentionSpec, length: AffineForm, start: AffineForm) -> Expression | None:
    """The score with places for rows: row r stands at length − s_q + r."""
    axes = {node.axis for node in walk(spec.score) if isinstance(node, Position)}
    if "m" in axes and spec.band.last is None: return None
    if "start" in axes and length.factors != start.factors: return None
    apart = start.offset - (length.offset - spec.s_q)
    return _shift_rows(spec.score, spec.s_q - length.offset if not length.factors else None, apart)


def _shift_rows(node: Expression, first: int | None, apart: int) -> Expression:
    """Row r is the place t and `first`, or t − start where that varies; the start is `apart` from ours."""
    if node == Position("m"):
        if first is None: return Position("m") - Position("start")
        return Position("m") + first if first else node
    if node == Position("start"): return node + apart if apart else node
    if isinstance(node, Apply):
        return replace(node, args=tuple(_shift_rows(x, first, apart) for x in node.args))
    return node


def _spec(spec: AttentionSpec, longest: int, varies: bool, window: int | None,
          score: Expression) -> DecodeSpec:
    b, heads, group = spec.batch
    causal = spec.s_q == 1 or spec.band.last is not None
    return DecodeSpec(b, heads, group, spec.s_q, spec.d, spec.d_v, longest, 1, spec.q, _pages(spec.k),
                      _pages(spec.v), spec.out, None, None, window, score, False,
                      "argument" if varies else "most", causal, sinks=spec.sinks is not None)


def _pages(rows: Rows) -> Pages: return Pages(rows.dtype, rows.batch[0], rows.row, rows.batch[1], rows.offset)
