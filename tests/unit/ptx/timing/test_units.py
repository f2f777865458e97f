"""Which unit an instruction takes: a name that begins like another's is its own."""
from __future__ import annotations

import pytest

from tinygrad_nv.ptx.sass import SASSInstruction
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.units import Unit, cost_of


@pytest.mark.parametrize(("opcode", "modifiers", "unit", "busy"), [
    ("F2FP", ".BF16.F32.PACK_AB", Unit.ALU, 2), ("F2F", ".F64.F32", Unit.XU, 8), ("MUFU", ".EX2", Unit.XU, 8),
    ("I2FP", ".F32.S32", Unit.ALU, 2), ("I2F", ".F64", Unit.XU, 8), ("FFMA", "", Unit.FMA, 1)])
def test_units(opcode: str, modifiers: str, unit: Unit, busy: int):
    found = cost_of(SASSInstruction(0, opcode, modifiers, "R0, R1", "", None), figures("h100"))
    assert (found.unit, found.busy, found.known) == (unit, busy, True)
