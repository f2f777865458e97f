"""Products of tiles in C: operands packed as the blocked GEMM packs them, sums in its block of registers.

Protocol: an operand is packed from where it lies: from an array, or, of a block that a load gives, from the
tensor itself; one that a loop does not change ahead of it. An array of a whose rows are units already is not
packed. The accumulator is an array of float32 or int32 that the sums are added to
(cpu/gemm/blocked/micro.py).
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.gemm.blocked.blocks import registers
from tinygrad_nv.cpu.gemm.blocked.micro import micro
from tinygrad_nv.cpu.gemm.blocked.pack import packing
from tinygrad_nv.cpu.gemm.layout import PER
from tinygrad_nv.cpu.gemm.schedules import CPUGemm
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import up
from tinygrad_nv.cpu.language.columns import Columns
from tinygrad_nv.cpu.language.emitter import c_name
from tinygrad_nv.cpu.language.grouping import Groups
from tinygrad_nv.cpu.language.strips import Strips
from tinygrad_nv.cpu.language.views import View
from tinygrad_nv.tile.gemm.spec import INT8S
from tinygrad_nv.tile.language.bounds import at_least
from tinygrad_nv.tile.language.ir import Op, Program, TileType, Value
from tinygrad_nv.tile.language.ranges import Ranges


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


@dataclass(frozen=True)
class Left:
    """Operand a in units: where it lies, from a row to the next, and elements along k, in C; `of_strip`: its
    first row is a strip's."""
    base: str
    pitch: int
    depth: str
    of_strip: bool = False


@dataclass(frozen=True)
class Packed:
    """Operands of a dot that are packed: the number of its functions and arrays, rows and columns in
    registers, units of a panel of b and of a row of a."""
    number: str
    kind: str
    rows: int
    columns: int
    deep: int
    pitch: int
    flip: bool
    left: Left | None = None


class DotEmitter(Columns):
    """Emits dots. `strips`: those of the loop that is written."""
    strips: Strips | None = None

    def __init__(self, program: Program, isa: ISA, ranges: Ranges, grouped: Groups) -> None:
        super().__init__(program, isa, ranges, grouped)
        self.packed: dict[Op, Packed] = {}     # dots whose operands are packed ahead of their strips

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
        if _is_mixed(op): return self._convert_mixed(op)
        self._multiply(op, self.packed[op] if op in self.packed else self.pack(op))
        return None

    def _convert_mixed(self, op: Op) -> None:
        """Emits copies of two different float8 as float32."""
        a, b, acc = op.operands
        copies = []
        for each in (a, b):
            copies.append(copy := Value(TileType(dtypes.float32, each.shape)))
            with self.ahead(each):
                self.forms[copy] = made = self.allocate(dtypes.float32, each.shape)
                with self.loops(each.shape) as (outer, column):
                    self.line(made.write(outer, column, self.vector(each, outer, column)))
            if self.outside and each in self.outside.made: self.outside.made.add(copy)
        plain = replace(op, operands=(*copies, acc))
        self._multiply(plain, self.pack(plain))

    def pack(self, op: Op) -> Packed:
        """Emits the packing of operands: of b, and of a where it is not computed strip by strip. What is
        there ahead of the loop is packed there."""
        a, b, _ = op.operands
        (m, k), n, number = a.shape, b.shape[1], self.name("")
        kind = self._kind(a.dtype)
        per, (rows, columns) = PER[kind], self._registers(m, n)
        deep = up(-(-k // per), self.lanes)
        flip = kind == "quad" and a.dtype == b.dtype
        made = Packed(number, kind, rows, columns, deep, deep + self.lanes, flip)
        later = self.strips is not None and a in self.strips.values
        left = None if later else self._pack_left(made, a)
        with self.ahead(b):
            right = self.direct(b) or self.view(b)
            side = Side(b.dtype, right.strides[1], right.strides[0])
            self.functions.append(packing("b", side, kind, columns, deep, suffix=number))
            nc = self._array(f"right{number}", up(n, columns) * deep) // deep
            kb, count = self._inside(right, k, n)
            self.line(f"const s64 kb{number} = {kb};")
            self.line(f"pack_b{number}({right.base}, right{number}, {count}, {nc}, kb{number});")
        depth = f"smaller({left.depth if left else k}, kb{number})"
        self.line(f"const s64 units{number} = ({depth} + {per - 1}) / {per};")
        if flip:
            self._array(f"shift{number}", nc, "s32")
            self.line(f"for (s64 c = 0; c < {nc}; c += {columns}) shifts{number}(right{number} + c * {deep}, "
                      f"shift{number} + c, units{number});")
        return replace(made, left=left)

    def _registers(self, m: int, n: int) -> tuple[int, int]:
        """Rows and columns in registers; of a strip whole times as many rows."""
        if self.strips is None: return registers(m, n, self.isa)
        count = self.strips.count
        rows, columns = registers(count, n, self.isa)
        return max(each for each in range(1, rows + 1) if count % each == 0), columns

    def _array(self, name: str, count: int, kind: str = "u32") -> int:
        self.stack_bytes += 4 * count
        self.line(f"{kind} {name}[{count}] __attribute__((aligned(64)));")
        return count

    def _pack_left(self, packed: Packed, value: Value) -> Left:
        """Emits the packing of a, or finds that it lies as it would be packed."""
        number, m = packed.number, value.shape[0]
        with self.ahead(value):
            view = self.direct(value) or self.view(value)
            strip = self.strip if view.first else None
            if pitch := self._pitch_of_rows(packed, view):
                return Left(view.base, pitch, str(value.shape[1]), strip is not None)
            side = Side(view.dtype, view.strides[0], view.strides[1])
            self.functions.append(packing("a", side, packed.kind, packed.pitch, flip=packed.flip,
                                          suffix=number))
            most = up(strip.count if strip else m, packed.rows)
            self._array(f"left{number}", most * packed.pitch)
            rows, depth = self._inside(view, m, value.shape[1])
            if strip: rows = f"{strip.end} - {strip.row}"
            self.line(f"const s64 ka{number} = {depth};")
            self.line(f"pack_a{number}({view.base}, left{number}, {rows}, {most}, ka{number});")
        return Left(f"left{number}", packed.pitch, f"ka{number}", strip is not None)

    def _pitch_of_rows(self, packed: Packed, view: View) -> int:
        """Units from a row of an array to the next where it need not be packed, else 0."""
        per = PER[packed.kind]
        good = (packed.kind, view.dtype) in (("fma", dtypes.float32), ("pair", dtypes.bfloat16))
        if isinstance(view, Direct) or not good or view.strides[1] != 1 or view.strides[0] % per: return 0
        if view.shape[1] % per or (not view.first and view.shape[0] % packed.rows): return 0
        return view.strides[0] // per

    def _multiply(self, op: Op, packed: Packed) -> None:
        """Emits the sums of the rows that are written now."""
        a, _, acc = op.operands
        number, kind, rows, columns, deep, flip = (packed.number, packed.kind, packed.rows, packed.columns,
                                                   packed.deep, packed.flip)
        m, n = op.result.shape
        left = packed.left or self._pack_left(packed, a)
        free = (a.dtype == dtypes.uint8) != flip
        overwrite = self._is_zero(acc)
        total = self._accumulator(op, acc, overwrite)
        schedule = CPUGemm(self.isa, 1, m, total.strides[0], a.shape[1], rows, columns)
        whole = op.result.dtype == dtypes.int32
        self.functions.append(micro(schedule, kind, left.pitch, whole, free, flip, 0, number))
        first, end = (self.strip.row, self.strip.end) if self.strip else ("0", str(m))
        at = f"(i - {first})" if left.of_strip else "i"
        shift, per = f", shift{number} + c" if flip else "", PER[kind]
        begin, last, skip, units = "0", str(up(n, columns)), "", f"units{number}"
        if self.is_limited(op.result): begin, last = f"{self.low} / {columns} * {columns}", self.high
        if self.is_limited(a):
            skip = f" + {self.low} / {per}"
            # a strip beyond the last row may see nothing of what b has
            units = f"larger(0, smaller({units}, ({self.high} + {per - 1}) / {per}) - {self.low} / {per})"
        row = f"(const word *){left.base} + {at} * {left.pitch}{skip}"
        panel = f"right{number} + c * {deep}{skip and f'{skip} * {columns}'}"
        with self.braces(f"for (s64 c = {begin}; c < {last}; c += {columns})"):
            self.line(f"for (s64 i = {first}; i < {end}; i += {rows}) micro{number}({row}, {panel}, "
                      f"{total.at(['i'], 'c')}, {units}, {int(overwrite)}{shift});")

    def _inside(self, view: View, rows: int, columns: int) -> tuple[str, str]:
        if not isinstance(view, Direct): return str(rows), str(columns)
        made = []
        for extent, there in zip((rows, columns), view.inside, strict=True):
            made.append(f"{there} < 0 ? 0 : {there} < {extent} ? {there} : {extent}")
        return made[0], made[1]

    def _kind(self, dtype: DType) -> str:
        if dtype in INT8S: return "quad" if self.isa.vnni else "fma"
        return "pair" if dtype == dtypes.bfloat16 and self.isa.bf16 else "fma"

    def _is_zero(self, value: Value) -> bool:
        """Whether all elements of a float accumulator are 0."""
        form = self.forms[value]
        while isinstance(form, Op) and form.name == "broadcast":
            value = form.operands[0]
            form = self.forms[value]
        return value in self.zeros

    def _accumulator(self, op: Op, acc: Value, overwrite: bool) -> View:
        """The array that sums are added to, with what it begins with."""
        target = self.targets.get(op.result) or self.allocate(op.result.dtype, op.result.shape)
        if not overwrite and self.forms[acc] is not target: self.store_to(target, acc)
        self.forms[op.result] = target
        return target


def _is_mixed(op: Op) -> bool:
    """Whether a dot is of two dtypes of floats."""
    a, b, _ = op.operands
    return dtypes.is_float(a.dtype) and a.dtype != b.dtype
