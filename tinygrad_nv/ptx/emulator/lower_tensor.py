"""mma.sync, mma.sp, ldmatrix, stmatrix, movmatrix, wmma. Handlers: csrc/mma.c, csrc/matrix.c.

Protocol: the instruction table has seen to shapes and types; here operands are counted. Shapes are packed as
m | n << 8 | k << 18; element types are numbered as in csrc/dot.c.
"""
from __future__ import annotations

import re

from tinygrad_nv.ptx.emulator.lower_operate import ROUNDINGS
from tinygrad_nv.ptx.emulator.lowering import FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Immediate, Instruction, Operand, Vector

ELEMENTS = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4, "s8": 5, "u8": 6, "s4": 7, "u4": 8, "b1": 9}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1,
        "f64": 64}
RESULTS = {"f32": 0, "f16": 1, "s32": 2}
SATURATE, XOR, SPARSE, SELECTOR = 4, 8, 16, 5
TRANSPOSED = 1
COLUMN_MAJOR = 1
SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)$")


def shape(low: FunctionLowering) -> tuple[int, int, int]:
    """m, n, k of the current instruction."""
    assert low.current is not None
    found = next(found for modifier in low.current.modifiers if (found := SHAPE.match(modifier)))
    m, n, k = map(int, found.groups())
    return m, n, k


def pack_shape(m: int, n: int, k: int) -> int:
    """A shape for Op.more."""
    return m | n << 8 | k << 18


def matrix_types(low: FunctionLowering) -> tuple[str, str, str, str]:
    """Types of D, A, B and C."""
    assert low.current is not None
    d, a, b, c = (x for x in low.current.modifiers if x in BITS or x in RESULTS)
    return d, a, b, c


def registers(low: FunctionLowering, operand: Operand, count: int, kind: str, what: str,
              written: bool = False) -> tuple[int, ...]:
    """The places of a vector of `count` registers (of one register, without braces, too)."""
    places = low.dests(operand, kind) if written else low.sources(operand, kind)
    if len(places) != count: raise low.fail(f"{len(places)} registers for {what}", str(count))
    width = 8 if kind == "f64" else 4
    items = operand.items if isinstance(operand, Vector) else (operand,)
    for item in items:
        if low.width_of(item) == width: continue
        raise low.fail(f"a register of another size for {what}", f"{8 * width} bits")
    return places


def selector(low: FunctionLowering, operand: Operand, most: int) -> int:
    """The sparsity selector: which threads give the metadata."""
    if not isinstance(operand, Immediate) or not 0 <= int(operand.value) <= most:
        raise low.fail("this sparsity selector", f"a constant from 0 to {most}")
    return int(operand.value)


def most_selector(element: str, k: int) -> int:
    """The largest sparsity selector: of four lanes it picks one, a pair, or (only 0 then) all."""
    groups = k // {4: 8, 32: 2}.get(BITS[element], 4)
    return 4 // (groups // 4) - 1


@lowers("mma")
def mma(low: FunctionLowering, instruction: Instruction) -> None:
    """`mma{.sp{::ordered_metadata}}.sync.aligned.SHAPE.row.col{.satfinite}.D.A.B.C d, a, b, c{, e, sel};`."""
    m, n, k = shape(low)
    d, a, b, c = matrix_types(low)
    if (m, n, k, a, b) == (8, 8, 4, "f16", "f16"): return quad(low, instruction, d, c)
    sparse = low.one_of("sp", "sp::ordered_metadata") != ""
    kind = "f64" if d == "f64" else "b32"
    size = 64 if d == "f64" else 32
    counts = (m * n // 32 // (2 if d == "f16" else 1), m * (k // 2 if sparse else k) * BITS[a] // 32 // size,
              n * k * BITS[b] // 32 // size)
    operands = instruction.operands
    if len(operands) != (6 if sparse else 4):
        raise low.fail(f"{len(operands)} operands", "D, A, B, C" + (", metadata, selector" if sparse else ""))
    out = registers(low, operands[0], counts[0], kind, "D", written=True)
    sources = (*registers(low, operands[1], counts[1], kind, "A"),
               *registers(low, operands[2], counts[2], kind, "B"),
               *registers(low, operands[3], counts[0], kind, "C"))
    if d == "f64":
        rounding = ROUNDINGS.index(low.one_of(*ROUNDINGS, default="rn"))
        low.emit("mma_f64", more=pack_shape(m, n, k), flags=rounding, list=out + sources, reads=sources,
                 writes=out)
        return
    flags = RESULTS[d] | SATURATE * low.has("satfinite") | XOR * low.has("xor")
    if sparse:
        sources = (*sources, low.source(operands[4], "b32"))
        flags |= SPARSE | selector(low, operands[5], most_selector(a, k)) << SELECTOR
    low.emit("mma", more=pack_shape(m, n, k), width=ELEMENTS[a], vector=ELEMENTS[b], flags=flags,
             list=out + sources, reads=sources, writes=out)


def quad(low: FunctionLowering, instruction: Instruction, d: str, c: str) -> None:
    """`mma.sync.aligned.m8n8k4.{row,col}.{row,col}.D.f16.f16.C`: Volta's, one for each pair of quads."""
    majors = [modifier for modifier in instruction.modifiers if modifier in ("row", "col")]
    flags = (majors[0] == "col") | (majors[1] == "row") << 1 | (d == "f32") << 2 | (c == "f32") << 3
    operands, words = instruction.operands, {"f32": 8, "f16": 4}
    out = registers(low, operands[0], words[d], "b32", "D", written=True)
    sources = (*registers(low, operands[1], 2, "b32", "A"), *registers(low, operands[2], 2, "b32", "B"),
               *registers(low, operands[3], words[c], "b32", "C"))
    low.emit("mma_quad", flags=flags, list=out + sources, reads=sources, writes=out)


# **** matrices of 8 by 8 ****

def matrix_count(low: FunctionLowering) -> int:
    """How many matrices .x1, .x2 or .x4 says."""
    return int(low.one_of("x1", "x2", "x4")[1:])


@lowers("ldmatrix")
def ldmatrix(low: FunctionLowering, instruction: Instruction) -> None:
    """`ldmatrix.sync.aligned.m8n8.x4{.trans}{.shared}.b16 {…}, [a];`."""
    out, address = instruction.operands
    where = low.address(address)
    places = registers(low, out, matrix_count(low), "b32", "the matrices", written=True)
    reads = (int(where["a"]),) if int(where["a"]) >= 0 else ()
    low.emit("ldmatrix", **where, space=low.space(), list=places, flags=TRANSPOSED * low.has("trans"),
             reads=reads, writes=places)


@lowers("stmatrix")
def stmatrix(low: FunctionLowering, instruction: Instruction) -> None:
    """`stmatrix.sync.aligned.m8n8.x4{.trans}{.shared}.b16 [a], {…};`."""
    address, values = instruction.operands
    where = low.address(address)
    places = registers(low, values, matrix_count(low), "b32", "the matrices")
    reads = (int(where["a"]),) if int(where["a"]) >= 0 else ()
    low.emit("stmatrix", **where, space=low.space(), list=places, flags=TRANSPOSED * low.has("trans"),
             reads=reads + places)


@lowers("movmatrix")
def movmatrix(low: FunctionLowering, instruction: Instruction) -> None:
    """`movmatrix.sync.aligned.m8n8.trans.b16 d, a;`."""
    out, value = instruction.operands
    low.emit("movmatrix", d=low.dest(out), a=low.source(value, "b32"))


# **** wmma ****

def wmma_registers(kind: str, rows: int, columns: int, duplicated: bool) -> int:
    """Registers of a fragment; A and B of f16 keep 16 elements in 8 of them whatever they need."""
    if kind == "f64": return rows * columns // 32
    if duplicated and kind == "f16": return 8
    return max(rows * columns * BITS.get(kind, 32) // 1024, 1)


def _transfer(low: FunctionLowering, fragment: Operand, address: Operand, stride: Operand | None, which: str,
              load: bool) -> None:
    """wmma.load and wmma.store. B is kept as its transpose, so that its runs go along k too."""
    assert low.current is not None
    kind = next(x for x in reversed(low.current.modifiers) if x in BITS or x in RESULTS)
    m, n, k = shape(low)
    rows, columns = {"a": (m, k), "b": (n, k)}.get(which, (m, n))
    column_major = low.has("row") if which == "b" else low.has("col")
    count = wmma_registers(kind, rows, columns, which in "ab")
    where = low.address(address)
    places = registers(low, fragment, count, "f64" if kind == "f64" else "b32", "the fragment", written=load)
    leading = rows if column_major else columns
    step = low.source(stride, "b32") if stride is not None else low.constant(leading, 4)
    reads = (*((int(where["a"]),) if int(where["a"]) >= 0 else ()), step, *(() if load else places))
    bits = 32 if kind in ("s32", "f32") else BITS[kind]
    low.emit("wmma_load" if load else "wmma_store", **where, b=step, space=low.space(), width=bits,
             list=places, flags=COLUMN_MAJOR * column_major, more=rows | columns << 16, reads=reads,
             writes=places if load else ())


@lowers("wmma.load")
def wmma_load(low: FunctionLowering, instruction: Instruction) -> None:
    """`wmma.load.{a|b|c}.sync.aligned.{row|col}.SHAPE{.space}.type {…}, [p]{, stride};`."""
    out, address, *stride = instruction.operands
    _transfer(low, out, address, stride[0] if stride else None, instruction.modifiers[1], True)


@lowers("wmma.store")
def wmma_store(low: FunctionLowering, instruction: Instruction) -> None:
    """`wmma.store.d.sync.aligned.{row|col}.SHAPE{.space}.type [p], {…}{, stride};`."""
    address, values, *stride = instruction.operands
    _transfer(low, values, address, stride[0] if stride else None, "d", False)


@lowers("wmma.mma")
def wmma_mma(low: FunctionLowering, instruction: Instruction) -> None:
    """`wmma.mma{.xor.popc|.and.popc}.sync.aligned.…SHAPE.D.A.B.C{.satfinite}`; f16 names the types
    of D and C alone."""
    kinds = [x for x in instruction.modifiers if x in BITS or x in RESULTS]
    if len(kinds) == 2: kinds = [kinds[0], "f16", "f16", kinds[1]]
    d, a, b, c = kinds
    m, n, k = shape(low)
    operands = instruction.operands
    kind = "f64" if d == "f64" else "b32"
    counts = [wmma_registers(d, m, n, False), wmma_registers(a, m, k, True), wmma_registers(b, n, k, True),
              wmma_registers(c, m, n, False)]
    places = [registers(low, operand, count, kind, what, written=what == "D")
              for operand, count, what in zip(operands, counts, "DABC", strict=True)]
    sources = places[1] + places[2] + places[3]
    fields = {"more": pack_shape(m, n, k), "list": places[0] + sources, "reads": sources, "writes": places[0]}
    if d == "f64":
        low.emit("wmma_mma_f64", **fields)
        return
    low.emit("wmma_mma", width=ELEMENTS[a], vector=ELEMENTS[b],
             imm=counts[1] | counts[2] << 8 | (c == "f16") << 16,
             flags=RESULTS[d] | SATURATE * low.has("satfinite") | XOR * low.has("xor"), **fields)
