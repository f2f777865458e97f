"""Activations to codes of 8 bits and scales, as a function known by name.

Protocol. `quantize(x, element, block, scale)` rounds x (…, K) as quant/activations.py says, to int8 or e4m3,
with a scale of each row or of groups of it, or a static one; bit for bit, but for the sign of e4m3's zeros.
It is one kernel with what makes x, where that is made of rows of memory (a norm, silu(gate) · up;
patterns/norm): tile/norm's, with the largest |x| of a row or group as another statistic. With a static scale
it is one with the matmul that x is made of, where there is one (epilogue.py). Else x is stored first.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.epilogue import Unfused
from tinygrad_nv.patterns.index import NotAffine, largest
from tinygrad_nv.patterns.named import Uses, call, lower
from tinygrad_nv.patterns.norm.match import spec_of
from tinygrad_nv.patterns.rewriting import value_in_storage
from tinygrad_nv.patterns.scaled_gemm import epilogue
from tinygrad_nv.patterns.strides import place_rows, symbolic_rows
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.quant.activations import E4M3_MAX, TINY, quantize_activations
from tinygrad_nv.quant.types import Scale
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Sum
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.norm.spec import Computed, NormSpec, Statistic

NAME = "quantize"
F32 = dtypes.float32
Rows = tuple[NormSpec, tuple[UOp, ...], UOp | None]


@dataclass(frozen=True)
class Quantize:
    """x (…, K) to codes, int8 or e4m3 in uint8; and, without a static `scale`, float32 scales of each row, or
    of `columns` of it."""
    element: str
    columns: int = 0
    scale: float | None = None

    @property
    def dtype(self) -> DType:
        """Dtype of codes in the graph."""
        return dtypes.int8 if self.element == "int8" else dtypes.uint8

    @property
    def static(self) -> Constant:
        """The static scale."""
        assert self.scale is not None
        return Constant(max(self.scale, TINY))


def quantize(x: Tensor, element: str, block: Scale,
             scale: float | None = None) -> tuple[Tensor, Tensor | float]:
    """Codes of x, and their scales: (…, groups), the static one, or (1, …) of a whole tensor. Raises
    `SpecError` where rows are no whole groups."""
    if element not in ("int8", "e4m3"): raise SpecError(f"activations of {element}", "int8 or e4m3")
    if block.columns and int(x.shape[-1]) % block.columns:
        raise SpecError(f"groups of {block.columns} of {x.shape[-1]} inputs", "a divisor")
    if scale is None and not block.rows: return quantize_activations(x, element, block)
    # every CONTIGUOUS of a graph is stored, whatever becomes of its users
    while x.uop.op is Ops.CONTIGUOUS: x = Tensor(x.uop.src[0])
    made = call(Quantize(element, block.columns, scale), codes_of, x)
    return made[0], made[1] if scale is None else max(scale, TINY)


def codes_of(what: Quantize, x: Tensor) -> tuple[Tensor, ...]:
    """The same in tinygrad."""
    made = quantize_activations(x.contiguous(), what.element, Scale(1, what.columns), what.scale)
    return made if what.scale is None else made[:1]


# **** kernels ****

def lower_quantize(what: Quantize, target: Target, uses: Uses, x: UOp) -> dict[UOp, UOp]:
    """Returns one kernel, with what makes x where it may. Raises `Unsupported` or `SpecError`."""
    words = ""
    if what.scale is not None:
        codes, words = epilogue.quantize_before(uses, target, lambda value: _codes(what, value, what.static),
                                                what.dtype)
        if codes is not None: return {uses.call.gettuple(0): codes}
    return {uses.call.gettuple(i): made for i, made in enumerate(_of_rows(what, target, x, words))}


def _of_rows(what: Quantize, target: Target, x: UOp, words: str) -> tuple[UOp, ...]:
    """By rows; `words` say why not by a matmul."""
    k, failed = int(x.shape[-1]), ""
    for way in (_rows_of_sources, _rows_in_memory):
        try:
            rows, inputs, symbol = way(x)
            if rows.n != k: raise Unfused(f"rows of {rows.n}, not of {k}")
            chosen = choose(_with_codes(what, rows, k), target)
        except (Unfused, NotAffine, Unsupported, SpecError) as no:
            failed = no.found if isinstance(no, SpecError) else str(no)
            continue
        outputs = [program.Output(x.shape, what.dtype)]
        if what.scale is None:
            outputs.append(program.Output((*x.shape[:-1], k // (what.columns or k)), F32))
        m = rows.m if symbol is None else symbol
        counted: dict[str, Any] = {} if symbol is None else {"rows": symbol, "variables": [symbol]}
        counted["flops"] = chosen.spec.flops // rows.m * m
        text = f", not in the matmul before it: {words}" if words else ""
        return chosen.call(x.device, outputs, inputs, NAME, text, **counted)
    raise Unsupported(failed)


def _rows_of_sources(x: UOp) -> Rows:
    """Returns the rows of what makes x."""
    while (value := value_in_storage(x)) is not x or x.op in (Ops.CONTIGUOUS, Ops.RESHAPE):
        x = value if value is not x else x.src[0]
    return spec_of(x)


def _rows_in_memory(x: UOp) -> Rows:
    """Returns the rows of x in memory."""
    storage, a = place_rows(x)
    m, symbol = prod(largest(extent) for extent in x.shape[:-1]), symbolic_rows(x)
    value = Load(0, x.dtype, a.mn, 1, (), a.offset)
    k = int(x.shape[-1])
    return NormSpec(m, k, (), (Computed(Result(x.dtype, k, 1), value),), (), symbol is not None), \
        (storage,), symbol


def _with_codes(what: Quantize, rows: NormSpec, k: int) -> NormSpec:
    """Rows whose result is codes and scales."""
    (one,), number = rows.results, len(rows.statistics)
    if one.result.n != 1: raise Unfused("a result whose rows are not dense")
    most = Constant(127.5 if what.element == "int8" else E4M3_MAX)
    x, least = one.value.cast(F32), Constant(TINY)
    group = what.columns if what.columns < k else 0
    largest_x = Statistic("max", x.maximum(x * -1.0), group)
    scale: Expression = Apply("div", (Sum(F32, number), most), F32).maximum(least)
    if what.scale is not None: scale = what.static
    codes = _codes(what, x, scale)
    out = replace(one.result, dtype=codes.dtype)
    if what.scale is not None: return replace(rows, results=(Computed(out, codes),))
    count = k // (group or k)
    def fewer(stride: int) -> int: return stride // k * count
    scales = Result(F32, fewer(out.m), 1 if group else 0, tuple(map(fewer, out.batch)), fewer(out.offset))
    return replace(rows, statistics=(*rows.statistics, largest_x),
                   results=(Computed(out, codes), Computed(scales, scale, group)))


def _codes(what: Quantize, x: Expression, scale: Expression) -> Expression:
    quotient = Apply("div", (x.cast(F32), scale), F32)
    if what.element == "e4m3": return quotient.cast(dtypes.fp8e4m3)
    nearest = Apply("round", (quotient,), F32)
    low = nearest.maximum(-128.0)
    return Apply("min", (low, Constant(127.0)), F32).cast(dtypes.int8)


lower(Quantize, NAME, lower_quantize, "NV_NORM", sees_uses=True)
