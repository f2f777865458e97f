"""Chosen warps' instructions as they are executed, with the values of their operands in the first active
lane.

Protocol: C calls `Tracer.call` before an instruction runs; what it wrote is shown at the warp's next call.
"""
from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from tinygrad_nv.ptx.emulator.lowering import WIDTHS
from tinygrad_nv.ptx.emulator.program import OP, Program
from tinygrad_nv.ptx.syntax import Address, Operand, Pair, Register, Vector

if TYPE_CHECKING:
    from tinygrad_nv.ptx.emulator.native import Library


@dataclass(frozen=True)
class Trace:
    """Settings of what `launch(trace=…)` prints: instructions of `warps` of CTA number `cta` (None: all
    CTAs), to `file` (None: standard error)."""
    cta: int | None = 0
    warps: Sequence[int] = (0,)
    file: TextIO | None = None


class Tracer:
    """Prints what a `Trace` asks for. `warps` is a mask, 0 when nothing is traced."""

    def __init__(self, program: Program, ops: bytes, library: Library, text: str,
                 trace: Trace | bool | None) -> None:
        chosen = Trace() if trace is True else trace or None
        self.program, self.ops, self.library = program, ops, library
        self.lines = text.splitlines() if chosen else []
        self.cta = -1 if chosen is None or chosen.cta is None else chosen.cta
        self.warps = sum({1 << w for w in chosen.warps}) if chosen else 0
        self.file = (chosen.file if chosen else None) or sys.stderr
        self.machine: Any = None
        self.base = ctypes.cast(ctypes.c_char_p(ops), ctypes.c_void_p).value or 0
        # what a warp's last instruction wrote, and its lane
        self.after: dict[int, tuple[list[Register], int]] = {}

    def call(self, warp: int, op: int, mask: int) -> None:
        """Before `op` runs for the lanes of `mask`."""
        record = self.program.ops[(op - self.base) // OP.size]
        self.results(warp)
        if not record.counts: return
        instruction = self.program.function.body[record.source]
        lane = (mask & -mask).bit_length() - 1
        written: list[Register] = []
        read: list[Register] = []
        for number, operand in enumerate(instruction.operands):
            (written if number == 0 and not isinstance(operand, Address) else read).extend(registers(operand))
        cta = self.library.c.warp_number(self.machine, ctypes.c_void_p(warp))
        number = self.library.c.warp_id(ctypes.c_void_p(warp))
        values = ", ".join(f"{r.name}={self.value(warp, r, lane)}" for r in read)
        print(f"cta {cta} warp {number} {mask:08x} {record.line:5}: {self.lines[record.line - 1].strip()}"
              + (f"  // {values}" if values else ""), file=self.file)
        self.after[warp] = written, lane

    def results(self, warp: int) -> None:
        """Prints what the warp's last instruction wrote."""
        written, lane = self.after.pop(warp, ([], 0))
        if written: print(f"{'':24}→ " + ", ".join(f"{r.name}={self.value(warp, r, lane)}" for r in written),
                          file=self.file)

    def finish(self) -> None:
        """At the end of a launch: registers are gone."""
        self.after.clear()

    def value(self, warp: int, register: Register, lane: int) -> str:
        """A register of one lane, in hexadecimal and as a float where it is one."""
        place = self.program.registers.get(register.name,
                                           self.program.registers.get(register.name.removeprefix("%")))
        if place is None: return "?"
        at = self.library.c.warp_registers(ctypes.c_void_p(warp)) + place
        kind = "u32" if register.kind == "special" else register.kind
        if kind == "pred": return str(struct.unpack("<I", ctypes.string_at(at, 4))[0] >> lane & 1)
        width = 8 if WIDTHS[kind] >= 8 else 4
        raw = ctypes.string_at(at + width * lane, width)
        bits = int.from_bytes(raw, "little")
        if kind == "f32": return f"{struct.unpack('<f', raw)[0]:g}"
        if kind == "f64": return f"{struct.unpack('<d', raw)[0]:g}"
        return f"{bits:#x}"


def registers(operand: Operand) -> list[Register]:
    """The registers an operand names."""
    if isinstance(operand, Register): return [operand]
    if isinstance(operand, Pair): return registers(operand.first) + registers(operand.second)
    if isinstance(operand, Vector): return [r for item in operand.items for r in registers(item)]
    if isinstance(operand, Address):
        base = [operand.base] if isinstance(operand.base, Register) else []
        return base + (registers(operand.coordinates) if operand.coordinates else [])
    return []
