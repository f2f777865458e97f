"""The spec of an attention, and what its launch is given, from the indices of everything in it.

Protocol: `make_spec` gets what match.py has read off a graph (`Reading`), and makes the `Found`: the score
without its masks, the dimensions, the band, extents as numbers or as arguments of the launch, and the
storages in the kernel's order. `Unsupported`, `Unfused` and `SpecError` say why there is none.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tinygrad.dtype import DType
from tinygrad.helpers import prod
from tinygrad.uop.ops import UOp, sint

from tinygrad_nv.patterns.attention.dims import MORE, OUT, Dims, K, Q, Ranges, V, arrange_dims
from tinygrad_nv.patterns.attention.mask import Mask, Strides, make_mask, masks, place_below_zero, places
from tinygrad_nv.patterns.attention.score import Score, strip_row_max
from tinygrad_nv.patterns.contraction import Dim, Side, Unsupported
from tinygrad_nv.patterns.epilogue import Unfused
from tinygrad_nv.patterns.index import Affine, Space, largest
from tinygrad_nv.patterns.positions import AffineForm, add_forms, linear
from tinygrad_nv.tile.attention.spec import AttentionSpec, Rows
from tinygrad_nv.tile.expression import Load, loads
from tinygrad_nv.tile.launch import Integer


@dataclass(frozen=True)
class Reading:
    """An attention as a graph has it: score, q, k and v, where the result lies, which ranges count what, and
    the graph's variables by name. `lse` is where the LSE lies, if it is asked for."""
    space: Space
    end: UOp
    score: Score
    sides: tuple[Side, Side, Side]
    out: Affine
    counted: Ranges
    variables: Mapping[str, UOp]
    lse: Affine | None = None


@dataclass(frozen=True)
class Found:
    """A spec with its operands. `integers` are those of the launch, in the spec's order, of `variables`;
    `rows` and `keys` are s_q and s_kv, `forms` they and start over the variables `names`."""
    spec: AttentionSpec
    inputs: tuple[UOp, ...]
    integers: tuple[Integer, ...]
    variables: tuple[UOp, ...]
    rows: sint
    keys: sint
    forms: Mapping[str, AffineForm]
    names: Mapping[str, UOp]


def make_spec(read: Reading, rows: bool) -> Found:
    """The spec of a reading; without `rows`, of one row."""
    space, score = read.space, read.score
    shown, conditions = masks(strip_row_max(score.expression))
    stood = places(shown, *conditions)
    keys = {leaf for r in read.counted.keys for leaf in space.leaves(r)}
    bounding = [space.resolve(p.lies).strides.keys() for p in map(place_below_zero, conditions)
                if p is not None]
    counted = replace(read.counted, compared=frozenset(r for each in bounding if each & keys for r in each))
    entries = [lies for _, lies in score.loads]
    more = [space.resolve(x) for x in (*entries, *(p.lies for p in stood))]
    if read.lse is not None: more.append(space.resolve(read.lse))
    out = space.resolve(read.out)
    dims = arrange_dims(space, read.sides, out, more, counted, rows)
    extras = list(dict.fromkeys(node for node, _ in score.loads))
    listed = [_load(dims, MORE + i, extras.index(node), node, more[i].offset)
              for i, (node, _) in enumerate(score.loads)]
    along = {p: _along(dims, i, more[i - MORE].offset) for i, p in enumerate(stood, MORE + len(entries))}
    mask = make_mask(shown, conditions, along, listed, largest(dims.rows.extent))
    names = read.variables
    forms = _extents(dims, mask, names)
    spec = _spec(dims, mask, read.end, out.offset, forms, names)
    if read.lse is not None: spec = _with_lse(spec, dims, MORE + len(more) - 1)
    varying = {name for form in forms.values() for name, _ in form.factors}
    used = tuple(names[name] for name in sorted(varying))
    integers = tuple(integer(forms[name], used) for name in spec.symbolic)
    return Found(spec, (dims.q.storage, dims.k.storage, dims.v.storage, *extras), integers, used,
                 dims.rows.extent, _extent(forms["s_kv"], names), forms, names)


def integer(form: AffineForm, variables: Sequence[UOp]) -> Integer:
    """A form as an argument of a launch with these variables."""
    factors = dict(form.factors)
    return Integer(form.offset, tuple(factors.get(each.expr, 0) for each in variables))


def _extents(dims: Dims, mask: Mask, names: Mapping[str, UOp]) -> dict[str, AffineForm]:
    """s_q, s_kv and start."""
    def form(extent: sint, what: str) -> AffineForm:
        if (made := linear(extent)) is None: raise Unsupported(f"{what} is no sum of variables", final=True)
        return made
    keys = form(dims.keys.extent, "the number of keys")
    if mask.keys is not None:
        if most(_less(mask.keys, keys), names) > 0:
            if most(_less(keys, mask.keys), names) > 0: raise Unfused("a mask that may end after the keys")
        else: keys = mask.keys
    made = {"s_q": form(dims.rows.extent, "the number of rows"), "s_kv": keys, "start": mask.start}
    for name, least in (("s_kv", 0), ("start", 0)):
        if most(_less(AffineForm(least, ()), made[name]), names) > 0:
            raise Unfused(f"{name} may be below {least}")
    return made


def _less(x: AffineForm, y: AffineForm) -> AffineForm: return add_forms(x, y, -1)


def most(form: AffineForm, names: Mapping[str, UOp]) -> int:
    """The most that a form can be."""
    return form.offset + sum(f * int(names[n].vmax if f > 0 else names[n].vmin) for n, f in form.factors)


def _spec(dims: Dims, mask: Mask, end: UOp, offset: int, forms: dict[str, AffineForm],
          names: Mapping[str, UOp]) -> AttentionSpec:
    most_of = {name: most(form, names) for name, form in forms.items()}
    symbolic = tuple(name for name in ("s_q", "s_kv", "start") if forms[name].factors)
    d, d_v = largest(dims.d.extent), largest(dims.d_v.extent)
    batch = (largest(dims.batch[0].extent), largest(dims.batch[1].extent), largest(dims.batch[2].extent))
    out = _rows(end.dtype, dims.rows, dims, OUT, d_v, offset)
    q = _rows(dims.q.dtype, dims.rows, dims, Q, d, dims.q.lies.offset)
    k = _rows(dims.k.dtype, dims.keys, dims, K, d, dims.k.lies.offset)
    v = _rows(dims.v.dtype, dims.keys, dims, V, d_v, dims.v.lies.offset)
    return AttentionSpec(most_of["s_q"], most_of["s_kv"], d, d_v, q, k, v, out, batch, mask.score, mask.band,
                         most_of["start"], symbolic)


def _rows(dtype: DType, rows: Dim, dims: Dims, i: int, d: int, offset: int) -> Rows:
    # the stride of a single row is free: that of dense rows
    row = rows.strides[i] if largest(rows.extent) > 1 else -(-d // 8) * 8
    return Rows(dtype, row, _strides(dims, i), offset)


def _strides(dims: Dims, i: int) -> tuple[int, int, int]:
    b, kv, group = (dim.strides[i] for dim in dims.batch)
    return b, kv, group


def _with_lse(spec: AttentionSpec, dims: Dims, i: int) -> AttentionSpec:
    """The spec of a kernel that stores the LSE, dense [*batch, s_q], too."""
    widths = (*spec.batch, spec.s_q)
    for axis, dim in enumerate((*dims.batch, dims.rows)):
        if widths[axis] > 1 and dim.strides[i] != prod(widths[axis + 1:]):
            raise Unsupported("a result whose rows lie in another order than its heads")
    return replace(spec, lse=True)


def _load(dims: Dims, i: int, parameter: int, node: UOp, offset: int) -> Load:
    return Load(parameter, node.dtype, dims.rows.strides[i], dims.keys.strides[i], _strides(dims, i), offset)


def _along(dims: Dims, i: int, offset: int) -> Strides:
    return Strides(dims.rows.strides[i], dims.keys.strides[i], _strides(dims, i), offset)


def _extent(form: AffineForm, names: Mapping[str, UOp]) -> sint:
    made: sint = form.offset
    for name, factor in form.factors: made = names[name] * factor + made
    return made


def flops(made: Found) -> sint:
    """Operations of a launch. A band of varying extents has the share of the pairs that its largest has."""
    spec = made.spec
    if not spec.symbolic: return spec.flops
    whole = spec.s_q * spec.s_kv
    pairs = made.rows * made.keys
    share = pairs if spec.pairs == whole else pairs * spec.pairs // whole
    return share * (spec.flops // max(spec.pairs, 1))


def nbytes(spec: AttentionSpec) -> int:
    """Returns the bytes that a kernel reads and writes if it reads nothing twice."""
    def once(strides: tuple[int, ...]) -> int:
        return prod(e for e, s in zip(spec.batch, strides, strict=True) if s)
    total = 0
    for one, count, d in ((spec.out, spec.s_q, spec.d_v), (spec.q, spec.s_q, spec.d),
                          (spec.k, spec.s_kv, spec.d), (spec.v, spec.s_kv, spec.d_v)):
        total += once(one.batch) * count * d * one.dtype.itemsize
    for each in loads(spec.score):
        extents = (spec.s_q if each.m else 1) * (spec.s_kv if each.n else 1)
        total += once(each.batch) * extents * each.dtype.itemsize
    return total
