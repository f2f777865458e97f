"""Contractions: sums of products, found by their indices.

Protocol. `product` recognises REDUCE(ADD) of a MUL, through movement and casts. A `Side` is an operand as an
index into storage; `sides` makes both from the indices of the sum's element. `contract_sides` reads strides
off them: a range in the left operand only is M, in the right only is N, in both and summed is K, in both and
kept is batch. Ranges that lie as one in all of the operands, the result and the epilogue's loads become one;
M and N keep their largest, and what is left of them is batch, with stride 0 in the other operand.

An operand that cannot be read where it lies (K in two strides, padding, no strides at all) is copied by a
kernel of tinygrad's, if that makes a product and is cheap beside it. `Unsupported` says why there is none.

Casts that lose nothing (halves and fp8 to float32, int8 to int32) are left out, so that the operands have the
dtype they have in memory. Products of halves that are cast to float32 before the sum are taken unrounded, as
tensor cores make them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import GroupOp, Ops, UOp, sint

from tinygrad_nv.patterns.index import Affine, Indices, NotAffine, Space, largest
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import FLOAT16S, FP8, INT8S, MOST_BATCH_DIMENSIONS
from tinygrad_nv.tile.order import is_wanted as in_one_order

COPY_REUSED = 16  # an operand whose elements are used so often may be copied first
Order = Sequence[int]


class Unsupported(Exception):
    """Why a contraction is left to tinygrad; without text, there is nothing to tell. `final`: whatever the
    epilogue."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


# **** the product ****

@dataclass(frozen=True)
class MatmulReduce:
    """REDUCE(ADD) of the product of two tensors. `chain` leads from the sum's input to `mul`; with `strip`,
    exact casts of the operands are left out."""
    total: UOp
    chain: tuple[UOp, ...]
    mul: UOp
    strip: bool

    def indices(self, space: Space, at: Indices) -> Indices:
        """The indices of a product, from those of the sum's input."""
        for node in self.chain:
            if node.op in GroupOp.Movement: at = space.through(node, at)
        return at


def product(total: UOp) -> MatmulReduce | None:
    """The product that a REDUCE sums, if it is one of two tensors."""
    if total.arg[0] is not Ops.ADD or not total.arg[1] or 0 in total.src[0].shape: return None
    chain, node = [], total.src[0]
    while node.op in GroupOp.Movement or node.op is Ops.CAST:
        chain.append(node)
        node = node.src[0]
    if node.op is not Ops.MUL or node.src[0] is node.src[1]: return None
    if any(s.op is Ops.CONST or s.dtype in dtypes.weaks or not s._shape for s in node.src): return None
    known = [_lossless(s, node.dtype) for s in node.src]
    return MatmulReduce(total, tuple(chain), node, known[0] == known[1] or any(
        known[0] in kind and known[1] in kind for kind in (FP8, INT8S)))


def operands(found: MatmulReduce) -> Iterator[UOp]:
    """The values that a product's kernel reads and that are computed before it: these will be stored."""
    for source in found.mul.src:
        node, casts = _descend(source)
        if node.op not in GroupOp.ALU or node.device is None: continue
        for dtype in _path(node, casts, source.dtype if found.strip else None)[1:]: node = node.cast(dtype)
        yield node


def _lossless(node: UOp, dtype: DType) -> DType:
    """The dtype in memory of an operand that is multiplied in `dtype`, without casts that lose nothing."""
    return _path(*_descend(node), dtype)[-1]


def _descend(node: UOp) -> tuple[UOp, list[DType]]:
    """Returns the node that a tensor is a view and cast of, and the dtypes it is cast to, the last first."""
    casts = []
    while node.op in GroupOp.Movement or node.op is Ops.CAST:
        if node.op is Ops.CAST: casts.append(node.dtype)
        node = node.src[0]
    return node, casts


def _path(node: UOp, casts: list[DType], multiplied: DType | None) -> list[DType]:
    """The dtypes that a value goes through, without detours to a wider one and without the last step to the
    one it is multiplied in, if that loses nothing."""
    path = [node.dtype]
    for dtype in reversed(casts):
        if len(path) > 1 and path[-2] == dtype and is_exact(dtype, path[-1]): path.pop()
        elif path[-1] != dtype: path.append(dtype)
    if multiplied is not None and len(path) > 1 and is_exact(path[-2], multiplied): path.pop()
    return path


def is_exact(source: DType, target: DType) -> bool:
    """Whether a cast is one that operands do without."""
    wide = {dtypes.float32: (*FLOAT16S, *FP8), dtypes.int32: INT8S}
    return source in wide.get(target, ())


MULTIPLIED = (dtypes.float32, *FLOAT16S, *FP8)
TAKEN = f"{', '.join(map(short, MULTIPLIED))}, and {' and '.join(map(short, INT8S))} summed in s32"


def arithmetic(found: MatmulReduce, a: DType, b: DType) -> str:
    """Returns what is in the way of the arithmetic; \"\" when nothing is."""
    total, mul = found.total.dtype, found.mul.dtype
    if any(_descend(s)[0].dtype == dtypes.bool for s in found.mul.src): return "an operand is a condition"
    if total in FLOAT16S: return f"the sum is accumulated in {short(total)}"
    if mul in INT8S: return f"products of {short(mul)} wrap around before the sum; cast operands to int32"
    if a in INT8S and b in INT8S and (mul, total) == (dtypes.int32, dtypes.int32): return ""
    casts = [node.dtype for node in found.chain if node.op is Ops.CAST]
    if mul not in MULTIPLIED: return f"no kernel multiplies {short(mul)}; they take {TAKEN}"
    if total != dtypes.float32 or mul in INT8S:
        return f"products of {short(mul)} are summed in {short(total)}; kernels sum them in f32"
    if casts != [dtypes.float32] * (mul != total):
        return f"products of {short(mul)} are rounded before the sum"
    return ""


# **** operands ****

@dataclass(frozen=True)
class Side:
    """An operand: an element of `storage`, whose first dimension begins at a buffer. `source` and `at` are
    the tensor that was multiplied and its indices, which a copy is made from. `copied` elements are written
    by a kernel made for this alone."""
    storage: UOp
    lies: Affine
    source: UOp
    at: Indices
    copied: int = 0

    @property
    def dtype(self) -> DType: return self.storage.dtype

    @property
    def storage_elements(self) -> int:
        """Number of elements in what the operand is a view of."""
        return _numel(_descend(self.source)[0])

    def resolve(self, space: Space) -> Side:
        """Returns the same operand over ranges that are not divided."""
        return replace(self, lies=space.resolve(self.lies))


def side(space: Space, source: UOp, at: Indices, strip: bool, memory: Callable[[UOp], bool]) -> Side:
    """An operand, at the indices of one of its elements. Casts move to the storage, or into the kernel."""
    node, where, casts = source, at, list[DType]()
    level: tuple[UOp, Indices] | None = None
    stuck, flat = False, True
    while not memory(node) and not stuck:
        if node.op is Ops.CAST:
            level = level or (node, where)
            casts.append(node.dtype)
        elif node.op in GroupOp.Movement:
            flat = flat and (level is None or node.op is Ops.RESHAPE)
            try: where = space.through(node, where)
            except NotAffine:
                stuck = True
                continue
        else: break
        node = node.src[0]
    if node.device is None: raise Unsupported("", final=True)  # made of constants
    path = _path(node, casts, source.dtype if strip else None)
    if len(path) == 1 and memory(node): return Side(node, space.lies(node.shape, where), source, at)
    # a cast of a part of something large is made of that part; one of what is computed is the graph's own,
    # which others may use
    if level is not None and len(path) > 1 and (
            _numel(level[0]) < _numel(node) or (flat and len(casts) == 1 and not memory(node))):
        node, where = level
    for dtype in path[1:]: node = node.cast(dtype)
    # what tinygrad takes for storage may be a part of it
    stored = node.contiguous() if node.op in GroupOp.Movement or node.op is Ops.AFTER else node
    return Side(stored, space.lies(node.shape, where), source, at, _numel(node))


def _numel(node: UOp) -> int: return prod(node.max_shape)


def is_storage(node: UOp) -> bool:
    """Whether a node is storage from its beginning."""
    if node.op in (Ops.PARAM, Ops.BUFFER): return node.arg.addrspace is AddrSpace.GLOBAL
    if node.op is Ops.CONTIGUOUS: return node.device is not None  # of a constant, tinygrad stores none
    return node.op is Ops.AFTER and node.has_buffer_identity(after_ok=True)


def pack_side(space: Space, one: Side, order: Order) -> Side | None:
    """An operand copied so that its ranges lie in `order`, the last side by side; None if it is not made of
    whole ranges, or repeats elements of its storage."""
    ranges: list[int] = []
    for extent, index in zip(one.source.shape, map(space.resolve, one.at), strict=True):
        inner = sorted(index.strides, key=index.strides.__getitem__)
        pitches = [prod(largest(space.extents[r]) for r in inner[:i]) for i in range(len(inner))]
        whole = prod(largest(space.extents[r]) for r in inner) == largest(extent)
        if index.offset or not whole or [index.strides[r] for r in inner] != pitches: return None
        ranges += inner[::-1]
    wanted = [r for r in order if r in ranges and one.lies.strides.get(r)]
    if len(set(ranges)) != len(ranges) or _count(space, wanted) > 2 * one.storage_elements: return None
    node = one.source.reshape(tuple(space.extents[r] for r in ranges))
    if node.dtype != one.dtype: node = node.cast(one.dtype)
    # one of each element along dimensions that repeat it
    node = node.shrink_to(tuple(space.extents[r] if r in wanted else 1 for r in ranges))
    kept = [r for r in ranges if r in wanted]
    node = node.reshape(tuple(space.extents[r] for r in kept))
    copy = node.permute(tuple(kept.index(r) for r in wanted)).contiguous()
    lies = space.lies(copy.shape, tuple(Affine(0, {r: 1}) for r in wanted))
    return replace(one, storage=copy, lies=lies, copied=_count(space, wanted))


def _count(space: Space, ranges: Iterable[int]) -> int: return prod(largest(space.extents[r]) for r in ranges)


# **** dimensions ****

@dataclass(frozen=True)
class Dim:
    """A dimension: its extent, and its stride in each thing that is indexed: left, right, result, loads."""
    extent: sint
    strides: tuple[int, ...]

    def join_inner(self, inner: Dim) -> Dim | None:
        """Returns this dimension and one inside it as one, if they lie so everywhere."""
        if isinstance(self.extent, UOp) or isinstance(inner.extent, UOp): return None
        if any(o != inner.extent * i for o, i in zip(self.strides, inner.strides, strict=True)): return None
        return Dim(self.extent * inner.extent, inner.strides)


A, B, OUT, LOADS = 0, 1, 2, 3


@dataclass(frozen=True)
class Contraction:
    """A product in dimensions. Strides of every dimension: left, right, result, loads."""
    a: Side
    b: Side
    m: Dim
    n: Dim
    k: Dim
    batch: tuple[Dim, ...]


def merge_dims(dims: list[Dim], by: tuple[int, ...]) -> list[Dim]:
    """Dimensions, outermost first as `by` says, with those that lie as one made one."""
    made: list[Dim] = []
    for dim in sorted(dims, key=lambda dim: tuple(-dim.strides[i] for i in by)):
        one = made[-1].join_inner(dim) if made else None
        if one is None: made.append(dim)
        else: made[-1] = one
    return made


def contract_sides(space: Space, a: Side, b: Side, out: Affine, loads: list[Affine],
                   parts: bool) -> Contraction:
    """The contraction of two operands, which may have to be copied. With `parts` the right one is the right
    operand whatever the result's order. Raises `Unsupported`."""
    kinds = _kinds(space, a, b, out)
    if not parts and _turns(space, kinds, out):
        a, b = b, a
        kinds = {r: {"m": "n", "n": "m"}.get(kind, kind) for r, kind in kinds.items()}
    reason = ""
    for copies in ((), (A,), (B,), (A, B)):
        if parts and B in copies: continue
        made = _with_copies(space, a, b, kinds, copies)
        if made is None: continue
        try:
            _check_copies(space, *made, kinds)
            return _group_dims(space, *made, out, loads, kinds)
        except Unsupported as no: reason = reason or str(no)
    raise Unsupported(reason)


def _kinds(space: Space, a: Side, b: Side, out: Affine) -> dict[int, str]:
    """Returns the kind of each range, outermost of the result first: m, n, k or batch."""
    kept = sorted(out.strides, key=out.strides.__getitem__, reverse=True)
    summed = [r for r in range(len(space.extents)) if r not in space.divided and r not in out.strides]
    made: dict[int, str] = {}
    for r in (*kept, *summed):
        in_a, in_b = bool(a.lies.strides.get(r)), bool(b.lies.strides.get(r))
        if r in out.strides: made[r] = "batch" if in_a and in_b else "m" if in_a else "n" if in_b else ""
        else: made[r] = "k" if in_a and in_b else ""
    symbols = [r for r in made if isinstance(space.extents[r], UOp)]
    present = set(made.values())
    # in one order a sum of products has the bits of a matmul's: of one row alone the two look alike
    if "k" not in present or not ({"m", "n"} & present or in_one_order()):
        raise Unsupported("", final=True)
    if "" in present: raise Unsupported("a dimension is in neither operand, or summed of one alone")
    if any(made[r] == "k" for r in symbols): raise Unsupported("symbolic K")
    if any(made[r] == "batch" for r in symbols): raise Unsupported("a symbolic batch")
    if len(symbols) > 1: raise Unsupported("more than one symbolic dimension")
    extents = [space.extents[r] for r in symbols]
    if any(isinstance(extent, UOp) and extent.op is not Ops.PARAM for extent in extents):
        raise Unsupported("the number of rows is an expression, not a variable")
    return made


def _turns(space: Space, kinds: dict[int, str], out: Affine) -> bool:
    """Whether the operands change places: rows may be symbolic, columns lie side by side."""
    symbols = [kind for r, kind in kinds.items() if isinstance(space.extents[r], UOp)]
    if symbols: return symbols[0] == "n"
    sides = [r for r, kind in kinds.items() if kind in ("m", "n")]
    return bool(sides) and kinds[min(sides, key=out.strides.__getitem__)] == "m"


def _with_copies(space: Space, a: Side, b: Side, kinds: dict[int, str],
                 copies: tuple[int, ...]) -> tuple[Side, Side] | None:
    """The operands after copying some of them, with K in the order of what was not copied."""
    model = b if A in copies else a
    kept = [r for r in kinds if kinds[r] != "k"]
    order = kept + sorted((r for r in kinds if kinds[r] == "k"), key=lambda r: -model.lies.strides[r])
    made: list[Side] = []
    for number, one in enumerate((a, b)):
        copy = pack_side(space, one, order) if number in copies else one
        if copy is None: return None
        made.append(copy)
    return made[0], made[1]


def _check_copies(space: Space, a: Side, b: Side, kinds: dict[int, str]) -> None:
    """Copies must cost little: each element is used often, or the other operand is no smaller."""
    numels = [_count(space, (r for r, stride in one.lies.strides.items() if stride)) for one in (a, b)]
    for one, other, free in ((a, numels[1], "n"), (b, numels[0], "m")):
        used = _count(space, (r for r, kind in kinds.items() if kind == free))
        if one.copied > 2 * one.storage_elements:
            raise Unsupported(f"a copy of an operand would be {one.copied} elements of "
                                                    f"{one.storage_elements}")
        if one.copied > other and used < COPY_REUSED:
            raise Unsupported(f"an operand would be copied, and each element of it is used {used} times, "
                          f"not {COPY_REUSED}")


def _group_dims(space: Space, a: Side, b: Side, out: Affine, loads: list[Affine],
             kinds: dict[int, str]) -> Contraction:
    indexed = (a.lies, b.lies, out, *loads)
    dims: dict[str, list[Dim]] = {"m": [], "n": [], "k": [], "batch": []}
    for r, kind in kinds.items():
        dims[kind].append(Dim(space.extents[r], tuple(index.strides.get(r, 0) for index in indexed)))
    if any(stride < 0 for group in dims.values() for dim in group for stride in dim.strides):
        raise Unsupported("a flipped dimension")
    m, n, batch = (merge_dims(dims[kind], (OUT,)) for kind in ("m", "n", "batch"))
    if len(k := merge_dims(dims["k"], (A, B))) > 1:
        raise Unsupported(f"K lies in {len(k)} dimensions, not one")
    none = Dim(1, (0,) * len(indexed))
    m, n = m or [none], n or [none]
    # the symbolic one, the largest, of these the innermost
    rows, columns = (max(reversed(group), key=lambda d: (isinstance(d.extent, UOp), largest(d.extent)))
                     for group in (m, n))
    batch = merge_dims(batch + [d for d in (*m, *n) if d is not rows and d is not columns], (OUT,))
    if len(batch) > MOST_BATCH_DIMENSIONS:
        raise Unsupported(f"{len(batch)} dimensions of batch, at most {MOST_BATCH_DIMENSIONS}")
    return Contraction(a, b, rows, columns, k[0], tuple(batch))

