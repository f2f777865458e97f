"""Matmuls of rows with the matrices of their groups, in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.spec import ALPHA, GROUP, LIMIT, GroupedGemmSpec, ScaledGroupedGemmSpec
from tinygrad_nv.tile.reference import Argument, Given, Results, compute_dtype, dense, gather, round_to


def arguments(spec: GroupedGemmSpec | GroupedOuterSpec) -> tuple[Argument, ...]:
    """out, x, w, their scales where they have them, offsets, then those there are of order, weights, bias; of
    sums of outer products out, y, x, offsets, and the order if there is one."""
    if isinstance(spec, GroupedOuterSpec): return _outer_arguments(spec)
    out = Argument("out", spec.out, (dense(spec.rows, spec.columns),), "out")
    matrix = (spec.k, spec.n) if spec.transposed else (spec.n, spec.k)
    given = [Argument("x", spec.dtype, (dense(spec.x_rows, spec.k),)),
             Argument("w", spec.matrix, (dense(spec.groups, *matrix),))]
    if isinstance(spec, ScaledGroupedGemmSpec):
        places = dense(spec.x_rows, spec.k_groups), dense(spec.groups, spec.n_groups, spec.k_groups)
        given += [Argument(f"scale_{name}", dtypes.float32, (place,))
                  for name, place in zip("xw", places, strict=True)]
    given.append(_offsets(spec))
    if spec.has_order: given.append(_order(spec))
    if spec.weighted: given.append(Argument("weights", dtypes.float32, (dense(spec.rows),)))
    if spec.biased: given.append(Argument("bias", spec.out, (dense(spec.groups, spec.n),)))
    return out, *given


def reference(spec: GroupedGemmSpec | GroupedOuterSpec, given: Given, exact: bool = False) -> Results:
    """[rows, columns]; of sums of outer products [groups, n, k]."""
    wide = compute_dtype(dtypes.float32, exact)
    x = {each.name: gather(given[each.name], each.places[0]) for each in arguments(spec)[1:]}
    x = {name: each if each.dtype == dtypes.int32 else each.cast(wide) for name, each in x.items()}
    if isinstance(spec, GroupedOuterSpec):
        made = sum_outer_products(spec, x["y"], x["x"], x["offsets"], x.get("order"))
        return made if exact else round_to(made, spec.dtype),
    if isinstance(spec, ScaledGroupedGemmSpec): x |= _scale_operands(spec, x)
    made = multiply_groups(spec, x["x"], x["w"], x["offsets"], x.get("order"), x.get("weights"),
                           x.get("bias"))
    return made if exact else round_to(made, spec.out),


def _scale_operands(spec: ScaledGroupedGemmSpec, x: Given) -> dict[str, Tensor]:
    """Operands times their scales: products of a group of K have a scale in common, so that sums differ in
    roundings alone."""
    def wide(scales: Tensor, axis: int, extent: int) -> Tensor:
        long = scales.repeat_interleave(GROUP, axis)
        return long.shrink(tuple((0, extent) if i == axis % long.ndim else None for i in range(long.ndim)))
    of_x, of_w = (wide(x[f"scale_{name}"], -1, spec.k) for name in "xw")
    return {"x": (x["x"] * of_x).contiguous(), "w": (x["w"] * wide(of_w, -2, spec.n)).contiguous()}


def multiply_groups(spec: GroupedGemmSpec, x: Tensor, w: Tensor, offsets: Tensor, order: Tensor | None = None,
               weights: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The results, before they are rounded, in float32, or in float64 of such tensors."""
    wide = compute_dtype(dtypes.float32, x.dtype == dtypes.float64)
    if spec.transposed: w = w.transpose(1, 2)
    group, inside = groups(spec.rows, offsets)
    rows = x[order // spec.gather] if spec.gather and order is not None else x
    made = (rows.contiguous().unsqueeze(1).cast(wide) * w[group].cast(wide)).sum(-1)
    if bias is not None: made = made + bias[group].cast(wide)
    made = activate(spec.activation, made)
    if weights is not None and order is not None: made = made * weights[order].cast(wide).unsqueeze(-1)
    made = inside.unsqueeze(-1).where(made, 0)
    return made if not spec.scatter or order is None else made.contiguous()[inverse(order)]


def groups(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each row, and whether it has one."""
    numbers = Tensor.arange(rows, dtype=dtypes.int32).to(offsets.device)
    group = (offsets[1:].unsqueeze(0) <= numbers.unsqueeze(1)).sum(-1, dtype=dtypes.int32)
    last = int(offsets.shape[0]) - 2
    return group.minimum(last).contiguous(), (group <= last) & (numbers >= offsets[0])


def activate(name: str, x: Tensor) -> Tensor:
    """act(gate) · up of gate | up, (R, N): (R, N / 2)."""
    if not name: return x
    gate, up = x.split(int(x.shape[-1]) // 2, dim=-1)
    if name == "swiglu_clamped":
        gate, up = gate.minimum(LIMIT), up.maximum(-LIMIT).minimum(LIMIT)
        return (up + 1) * (gate * (gate * ALPHA).sigmoid())
    if name == "silu": return gate.silu() * up
    return (gate.gelu() if name == "gelu_tanh" else 0.5 * gate * (1 + (gate * 0.5 ** 0.5).erf())) * up


def _outer_arguments(spec: GroupedOuterSpec) -> tuple[Argument, ...]:
    out = Argument("out", spec.dtype, (dense(spec.groups, spec.n, spec.k),), "out")
    given = [Argument("y", spec.dtype, (dense(spec.of_y, spec.n),)),
             Argument("x", spec.dtype, (dense(spec.of_x, spec.k),)),
             _offsets(spec)]
    if spec.has_order: given.append(_order(spec))
    return out, *given


def _offsets(spec: GroupedGemmSpec | GroupedOuterSpec) -> Argument:
    even = tuple(group * spec.rows // spec.groups for group in range(spec.groups + 1))
    return Argument("offsets", dtypes.int32, (dense(spec.groups + 1),), values=range(1), usual=even)


def _order(spec: GroupedGemmSpec | GroupedOuterSpec) -> Argument:
    return Argument("order", dtypes.int32, (dense(spec.rows),), values=range(1), usual=range(spec.rows))


def sum_outer_products(spec: GroupedOuterSpec, y: Tensor, x: Tensor, offsets: Tensor,
           order: Tensor | None = None) -> Tensor:
    """Sums of outer products, before they are rounded, in float32, or in float64 of such tensors: one kernel,
    which keeps no products."""
    wide = compute_dtype(dtypes.float32, x.dtype == dtypes.float64)
    group, inside = groups(spec.rows, offsets)
    if order is not None:
        y = y[order // spec.gather_y] if spec.gather_y else y
        x = x[order // spec.gather_x] if spec.gather_x else x
    own = inside.where(group, -1).unsqueeze(1) == Tensor.arange(spec.groups, dtype=dtypes.int32).to(x.device)
    both = y.contiguous().cast(wide).reshape(spec.rows, 1, spec.n, 1) * x.contiguous().cast(wide).reshape(
        spec.rows, 1, 1, spec.k)
    return own.contiguous().reshape(spec.rows, spec.groups, 1, 1).where(both, 0).sum(0)


def inverse(order: Tensor) -> Tensor:
    """The place of each slot in the order."""
    numbers = Tensor.arange(int(order.shape[0]), dtype=dtypes.int32).to(order.device)
    own = order.unsqueeze(0) == numbers.unsqueeze(1)
    return own.where(numbers, 0).sum(-1, dtype=dtypes.int32).contiguous()
