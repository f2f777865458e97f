"""Dots by wgmma: of a warpgroup's rows of the left operand with its columns of the right one. For sm_90a.

Protocol: operands are `SharedTile`s with the swizzle of their rows, which descriptors describe as those of
tile/layout.py; a left operand of 16 bits may be in registers. Groups of four warps stand 64 rows apart,
and, where there are more of them than rows, share the columns. Sums of 8-bit floats, of which wgmma keeps
about 14 bits, are added to float32 after 128 of K.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.ptx.builder.hopper import descriptor_bits
from tinygrad_nv.tile.fragments import NAMES
from tinygrad_nv.tile.language.gpu.convert import Writer
from tinygrad_nv.tile.language.gpu.dots import GROUP_ROWS, DotPlan, Role
from tinygrad_nv.tile.language.gpu.layout import bits_of
from tinygrad_nv.tile.language.gpu.staged import SharedOperand
from tinygrad_nv.tile.layout import K_BYTES

WARPGROUP = 128
PROMOTED_K = 128
FP8 = (dtypes.fp8e4m3, dtypes.fp8e5m2)


def types_of(a: DType, b: DType) -> str:
    """The types of a wgmma."""
    total = "s32" if a in (dtypes.int8, dtypes.uint8) else "f32"
    return f"{total}.{NAMES[a]}.{NAMES[b]}"


class GroupOperand:
    """An operand in shared memory, as a warpgroup reads it: descriptors of 64 rows, or of its columns."""

    def __init__(self, writer: Writer, plan: DotPlan, found: SharedOperand, role: Role) -> None:
        self.kb, self.tile, self.size = writer.kb, found.tile, found.dtype.itemsize
        self.mn_major = role.mn_major
        kb, groups = writer.kb, plan.groups_n if role.side else plan.groups_m
        at = found.address(writer)
        own = GROUP_ROWS if role.side == 0 else plan.columns // plan.groups_n
        if groups > 1: at = at + group_number(writer, plan, role.side) * self.at_mn(own)
        column = self.tile.rows * self.tile.span
        bits = descriptor_bits(column if self.mn_major else 0, 8 * self.tile.span, f"{self.tile.span}B")
        low = (at & 0x3FFFF) >> 4
        self.low = low | (bits & 0xFFFFFFFF) if bits & 0xFFFFFFFF else low
        self.high = kb.reg("u32", bits >> 32)

    def at_mn(self, mn: int) -> int:
        """Bytes before row or column `mn`."""
        if not self.mn_major: return mn * self.tile.span
        inner = self.tile.span // self.size
        return mn // inner * self.tile.rows * self.tile.span + mn % inner * self.size

    def at_step(self, step: int) -> int:
        """Bytes before the K of a step."""
        if self.mn_major: return step * (K_BYTES // self.size) * self.tile.span
        byte, span = step * K_BYTES, self.tile.span
        return byte // span * self.tile.rows * span + byte % span

    def descriptor(self, mn: int, step: int) -> Register:
        """Returns the descriptor of what begins `mn` after the warpgroup's own, in a step."""
        made, offset = self.kb.reg("b64"), self.at_mn(mn) + self.at_step(step)
        self.kb.emit("mov.b64", made, [self.low + (offset >> 4) if offset else self.low, self.high])
        return made


def group_number(writer: Writer, plan: DotPlan, side: int) -> Register:
    """The warpgroup's number along the rows, or along the columns, of the result."""
    kb = writer.kb
    with writer.threads.prelude():
        made = kb.reg("u32")     # the same in all lanes: ptxas keeps what redux gives in uniform registers
        kb.emit("redux.sync.min.u32", made, kb.tid.x // WARPGROUP, -1)
        if side: return made >> plan.groups_m.bit_length() - 1 if plan.groups_m > 1 else made
        return made & plan.groups_m - 1


Left = GroupOperand | Mapping[tuple[int, int], Sequence[Register]]     # registers by rows and step


def issue(writer: Writer, plan: DotPlan, kinds: tuple[DType, DType], sums: Mapping[int, Register], left: Left,
          right: GroupOperand, fresh: bool, steps: range, some: Sequence[int] | None = None) -> None:
    """wgmmas of some steps, and of the 64 rows that begin at `some` of a warpgroup's; `fresh`: the sums have
    been nothing. They are waited for elsewhere."""
    writer.kb.wgmma_fence()
    _emit(writer, plan, kinds, sums, left, right, fresh, steps, some)
    writer.kb.wgmma_commit()


def halves_of(steps: int) -> list[range]:
    """Steps in the groups of `issue_in_halves`."""
    half = -(-steps // 2)
    return [range(at, min(at + half, steps)) for at in range(0, steps, half)]


def issue_in_halves(writer: Writer, plan: DotPlan, kinds: tuple[DType, DType], sums: Mapping[int, Register],
                    left: Mapping[tuple[int, int], Sequence[Register]], right: GroupOperand,
                    later: int) -> None:
    """All wgmmas, of a left operand in registers, in two groups, while those of the iteration before are in
    flight: `later` groups that were issued behind a group's own of that iteration may stay there. An operand
    is moved behind the wait: ptxas waits for all groups where registers were written ahead of the last wait
    (C7513)."""
    kb = writer.kb
    for steps in halves_of(plan.depth // plan.step):
        kb.wgmma_wait(later)
        moved = {at: [kb.reg("b32", each) for each in four] for at, four in left.items() if at[1] in steps}
        kb.wgmma_fence()
        _emit(writer, plan, kinds, sums, moved, right, False, steps)
        kb.wgmma_commit()


def _emit(writer: Writer, plan: DotPlan, kinds: tuple[DType, DType], sums: Mapping[int, Register], left: Left,
          right: GroupOperand, fresh: bool, steps: range, some: Sequence[int] | None = None) -> None:
    kb, layout, columns = writer.kb, plan.layout(writer.threads.bits), bits_of(plan.n)
    width = plan.columns // plan.groups_n
    trans = (isinstance(left, GroupOperand) and left.mn_major, right.mn_major)
    shape = f"m64n{width}k{K_BYTES // kinds[0].itemsize}"
    rows = {}
    for m in range(0, plan.m, GROUP_ROWS * plan.groups_m) if some is None else some:
        places = [layout.numbers.get(m + 8 * (i >> 1 & 1) << columns | 8 * (i >> 2) + (i & 1), -1)
                  for i in range(width // 2)]
        rows[m] = [sums[i] if i in sums else kb.reg(types_of(*kinds)[:3]) for i in places]
    for step in steps:
        b = right.descriptor(0, step)
        for m, acc in rows.items():
            a = left.descriptor(m, step) if isinstance(left, GroupOperand) else left[m, step]
            kb.wgmma(shape, types_of(*kinds), acc, a, b, not fresh or step > steps.start, trans=trans)
