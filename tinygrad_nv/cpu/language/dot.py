"""Products of tiles in C: operands packed as the blocked GEMM packs them, sums in its block of registers.

Protocol: an operand is packed from where it lies: from an array, or, of a block that a load gives, from the
tensor itself. The accumulator is an array of float32 or int32 that the sums are added to
(cpu/gemm/blocked/micro.py).
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.gemm.blocked.blocks import registers
from tinygrad_nv.cpu.gemm.blocked.micro import micro
from tinygrad_nv.cpu.gemm.blocked.pack import packing
from tinygrad_nv.cpu.gemm.layout import PER
from tinygrad_nv.cpu.gemm.schedules import CPUGemm
from tinygrad_nv.cpu.kernel import up
from tinygrad_nv.cpu.language.columns import Columns
from tinygrad_nv.cpu.language.emitter import c_name
from tinygrad_nv.cpu.language.views import View
from tinygrad_nv.tile.gemm.spec import INT8S
from tinygrad_nv.tile.language.bounds import at_least
from tinygrad_nv.tile.language.ir import Op, Value


@dataclass(frozen=True)
class Side:
    """An operand: elements from one row of a, or column of b, to the next, and along k."""
    dtype: DType
    mn: int
    k: int

    @property
    def major(self) -> str:
        """The axis along which elements lie side by side."""
        return "K" if self.k == 1 else "MN" if self.mn == 1 else ""


@dataclass(frozen=True)
class Direct(View):
    """A block of a tensor: how many rows and columns of it are inside, in C."""
    inside: tuple[str, str] = ("", "")

    def transpose(self, order: object) -> Direct:
        """Returns the view with its axes in the other order."""
        return Direct(self.base, self.dtype, self.shape[::-1], self.strides[::-1], self.inside[::-1])


class DotEmitter(Columns):
    """Emits dots."""

    def direct(self, value: Value) -> Direct | None:
        """A block of a tensor as it lies there; None where it has to be written to an array first."""
        op = self.forms[value]
        if not isinstance(op, Op) or op.name != "load_block" or len(value.shape) != 2: return None
        if op.attributes["other"]: return None
        tensor, sizes = self.tensor(op), op.attributes["sizes"]
        axes = [axis for axis, size in enumerate(sizes) if size]
        terms, outside, inside = [f"p_{c_name(tensor.name)}"], list[str](), list[str]()
        for axis, (start, extent, stride) in enumerate(zip(op.operands, tensor.shape, tensor.strides,
                                                           strict=True)):
            first = f"(s64){self.scalar(start)}"
            terms.append(f"{first} * {stride}ll")
            if axis in axes: inside.append(f"({extent} - {first})")
            else: outside.append(f"(u64)({first}) < {extent}")
            if axis in axes and at_least(start, self.facts) < 0: return None
        if outside: inside[0] = f"(({' && '.join(outside)}) ? {inside[0]} : 0)"
        return Direct("(" + " + ".join(terms) + ")", tensor.dtype, value.shape,
                      tuple(tensor.strides[a] for a in axes),
                      (inside[0], inside[1]))

    def do_dot(self, op: Op) -> None:
        a, b, acc = op.operands
        if dtypes.is_float(a.dtype) and a.dtype != b.dtype: return self._convert_mixed(op)
        self._dot(op, self.direct(a) or self.view(a), self.direct(b) or self.view(b), acc)
        return None

    def _convert_mixed(self, op: Op) -> None:
        """Emits copies of two different float8 as float32."""
        a, b, acc = op.operands
        views = []
        for each in (a, b):
            made = self.allocate(dtypes.float32, each.shape)
            with self.loops(each.shape) as (outer, column):
                self.line(made.write(outer, column, self.vector(each, outer, column)))
            views.append(made)
        self._dot(op, views[0], views[1], acc)

    def _dot(self, op: Op, left: View, right: View, acc: Value) -> None:
        (m, k), n = left.shape, right.shape[1]
        kind = self._kind(left.dtype)
        per, number = PER[kind], self.name("")
        rows, columns = registers(m, n, self.isa)
        deep = up(-(-k // per), self.lanes)
        pitch = deep + self.lanes
        flip = kind == "quad" and left.dtype == right.dtype
        free = (left.dtype == dtypes.uint8) != flip
        total = self._accumulator(op, acc)
        whole = op.result.dtype == dtypes.int32
        schedule = CPUGemm(self.isa, 1, m, total.strides[0], k, rows, columns)
        self.functions += [
            packing("a", Side(left.dtype, left.strides[0], left.strides[1]), kind, pitch, flip=flip,
                    suffix=number),
            packing("b", Side(right.dtype, right.strides[1], right.strides[0]), kind, columns, deep,
                    suffix=number),
            micro(schedule, kind, pitch, whole, free, flip, 0, number)]
        mr, nc = up(m, rows), up(n, columns)
        self.stack_bytes += 4 * (mr * pitch + nc * deep)
        with self.braces(""):
            self.line(f"u32 left[{mr * pitch}] __attribute__((aligned(64)));")
            self.line(f"u32 right[{nc * deep}] __attribute__((aligned(64)));")
            if flip: self.line(f"s32 shift[{columns}] __attribute__((aligned(64)));")
            row_count, k_left = self._inside(left, m, k)
            k_right, column_count = self._inside(right, k, n)
            self.line(f"s64 rows_ = {row_count}, columns_ = {column_count}, ka_ = {k_left}, kb_ = {k_right};")
            self.line(f"const s64 deep_ = ka_ < kb_ ? ka_ : kb_, units_ = (deep_ + {per - 1}) / {per};")
            self.line(f"pack_a{number}({left.base}, left, rows_, {mr}, deep_);")
            self.line(f"pack_b{number}({right.base}, right, columns_, {nc}, deep_);")
            with self.braces(f"for (s64 c = 0; c < {nc}; c += {columns})"):
                if flip: self.line(f"shifts{number}(right + c * {deep}, shift, units_);")
                self.line(f"for (s64 i = 0; i < {mr}; i += {rows}) micro{number}(left + i * {pitch}, "
                          f"right + c * {deep}, {total.base} + i * {total.strides[0]} + c, units_, 0"
                          f"{', shift' if flip else ''});")

    def _inside(self, view: View, rows: int, columns: int) -> tuple[str, str]:
        if not isinstance(view, Direct): return str(rows), str(columns)
        made = []
        for extent, there in zip((rows, columns), view.inside, strict=True):
            made.append(f"{there} < 0 ? 0 : {there} < {extent} ? {there} : {extent}")
        return made[0], made[1]

    def _kind(self, dtype: DType) -> str:
        if dtype in INT8S: return "quad" if self.isa.vnni else "fma"
        return "pair" if dtype == dtypes.bfloat16 and self.isa.bf16 else "fma"

    def _accumulator(self, op: Op, acc: Value) -> View:
        """The array that sums are added to, with what it begins with."""
        target = self.targets.get(op.result) or self.allocate(op.result.dtype, op.result.shape)
        form = self.forms[acc]
        if form is not target: self.store_to(target, acc)
        self.forms[op.result] = target
        return target
