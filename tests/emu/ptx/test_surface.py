"""Every row of the instruction table is emulated: it lowers to handlers that exist, and runs to an end on
registers full of garbage, where it may give findings and nothing worse."""
from __future__ import annotations

import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx import isa
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.isa.forms import Form

FORMS = [form for form in isa.FORMS if form.lowest(next(iter(form.opcodes())), "sm_90a", ()) is not None]


def instances(form: Form) -> list[str]:
    """One instruction for each opcode and operand list of a row."""
    return list(dict.fromkeys(isa.example(form, modifiers, i, optional) for modifiers in form.opcodes()
                              for i in range(len(form.operands)) for optional in (True, False)))


def module(lines: list[str], entry: str = "k") -> str:
    """A kernel with one instruction a line, from line 8."""
    body = "\n".join(lines)
    registers = " ".join(isa.REGISTERS.split("\n"))
    return (f".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry {entry}(.param .u64 p)\n"
            f".maxntid 128\n{{\n{registers}\n{body}\nLABEL: ret;\nTABLE: .branchtargets LABEL, LABEL;\n}}\n")


@pytest.mark.sampled(84)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.text.replace(" ", ""))
def test_a_row_runs(form: Form):
    for line in instances(form):
        emu = Emulator(step_limit=20_000)
        try: emu.launch(module([line]), 1, 128, [0])
        except PTXError as error: pytest.fail(f"{line}\n{error}")
