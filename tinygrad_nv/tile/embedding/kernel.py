"""Rows of a table by number (spec.py), copied. For sm_80 and later.

    each team of threads has a token, a thread up to `DEEP` pieces of the row, of 16 bytes where rows allow:
        wait for the kernel before
        read the token, count from the end what is below 0
        load the pieces; of no row they are 0
        the kernel after may begin
        store
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.embedding.spec import EmbeddingSpec
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

PIECES = {16: ("b32", 4), 8: ("b32", 2), 4: ("b32", 1), 2: ("b16", 1)}  # bytes: a load's registers
DEEP = 4
CTA = 256               # threads, less where there are fewer pieces
FEW, FEW_CTA = 264 * CTA, 128   # pieces of all tokens that are spread as thinly as that: two CTAs an SM
NO_ROW = 0xFFFFFFFF


def embedding(spec: EmbeddingSpec, schedule: Schedule, gpu: GPU) -> TileKernel:
    """The kernel of a table. Parameters in this order: out; weight; tokens; u32 tokens, where they are
    symbolic."""
    piece = next(nbytes for nbytes in PIECES if spec.row_bytes % nbytes == 0)
    pieces = spec.row_bytes // piece
    few = spec.tokens.count * pieces <= FEW
    cta = FEW_CTA if few else CTA
    team = min(cta, 1 << (pieces - 1).bit_length())
    deep = 1 if few else min(DEEP, -(-pieces // team))
    tokens = max(32 // team, min(cta // team, spec.tokens.count))  # of a CTA
    tokens = 1 << (tokens - 1).bit_length()
    kb = Kernel("embedding", arch=gpu.arch, threads=team * tokens)
    _write(kb, spec, team, tokens, piece, deep)
    grid = (-(-spec.tokens.count // tokens), -(-pieces // (team * deep)), 1)
    return TileKernel("embedding", kb.ptx(), grid, team * tokens, rows_of_cta=tokens, pdl=kb.hopper)


def _write(kb: Kernel, spec: EmbeddingSpec, team: int, tokens: int, piece: int, deep: int) -> None:
    out, weight, numbers = (kb.pointer(name) for name in ("out", "weight", "tokens"))
    count = kb.param("m", "u32") if spec.symbolic else kb.reg("u32", spec.tokens.count)
    row_bytes = spec.row_bytes
    with kb.comment("this thread's token and pieces"):
        token, lane = kb.ctaid.x * tokens + kb.tid.x // team, kb.tid.x % team
        there = token < count
        first = (kb.ctaid.y * (team * deep) + lane) * piece
        number = kb.reg("s64", -1 - spec.rows)
        at = token_place(kb, spec, numbers, token)
        if kb.hopper: kb.wait_for_previous_grid()
        kind = f"s{8 * spec.tokens.dtype.itemsize}"
        short = number if kind == "s64" else kb.reg("s32", -1 - spec.rows)
        kb.emit(f"ld.global.{kind}", short, at.at(), guard=there)
        if kind == "s32": number = short.to("s64")
        row = kb.select(number < 0, number + spec.rows, number, "s64")
        known = kb.reg("pred")
        kb.emit("setp.lt.u64", known, _to_unsigned(kb, row), spec.rows)
    source = weight + _to_unsigned(kb, row) * row_bytes + first.to("u64")
    target = advance(kb, out, token, row_bytes) + first.to("u64")
    kind, registers = PIECES[piece]
    vector = f".v{registers}" if registers > 1 else ""
    loaded, whole = [], row_bytes % (deep * team * piece) == 0
    with kb.comment("the row"):
        for i in range(deep):
            inside = None if whole else first + i * team * piece < row_bytes
            words = kb.regs(kind, registers, 0)
            kb.emit(f"ld.global{vector}.{kind}", words if vector else words[0], source.at(i * team * piece),
                   guard=known if inside is None else known & inside)
            loaded.append((words, there if inside is None else there & inside))
        if kb.hopper: kb.launch_dependents()
        for i, (words, guard) in enumerate(loaded):
            kb.emit(f"st.global{vector}.{kind}", target.at(i * team * piece), words if vector else words[0],
                   guard=guard)


def _to_unsigned(kb: Kernel, value: Value) -> Value:
    """An s64 as u64: what is below 0 is beyond every row."""
    made = kb.reg("u64")
    kb.emit("mov.b64", made, value)
    return made


def token_place(kb: Kernel, spec: EmbeddingSpec, tokens: Value, token: Value) -> Value:
    """Returns the address at which a token's number lies: u64."""
    size, rest = spec.tokens.dtype.itemsize, token
    at = tokens + spec.tokens.offset * size if spec.tokens.offset else tokens
    if len(spec.tokens.extents) == 1: return advance(kb, at, token, spec.tokens.strides[0] * size)
    for extent, stride in reversed(list(zip(spec.tokens.extents, spec.tokens.strides, strict=True))):
        at = advance(kb, at, rest % extent, stride * size)
        rest = rest // extent
    return at


def load_row_index(kb: Kernel, spec: EmbeddingSpec, at: Value, there: Value | None = None) -> Value:
    """The row that the number at `at` means, u32; beyond all rows where it is of none, or not `there`."""
    wide = spec.tokens.dtype.itemsize == 8
    kind = "s64" if wide else "s32"
    number, row = kb.reg(kind, -1 - spec.rows), kb.reg("u32")
    kb.emit(f"ld.global.{kind}", number, at.at(), guard=there)
    kb.emit(f"add.{kind}", number, number, spec.rows, guard=number < 0)
    if not wide:
        kb.emit("mov.b32", row, number)     # below 0: at least 1 << 31
        return row
    bits, known = kb.reg("u64"), kb.reg("pred")
    kb.emit("mov.b64", bits, number)
    kb.emit("setp.lt.u64", known, bits, spec.rows)
    return kb.select(known, bits.to("u32"), NO_ROW, "u32")
