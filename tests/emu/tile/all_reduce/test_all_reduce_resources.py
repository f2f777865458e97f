"""What all-reduce kernels are as machine code: no spills, room for their CTAs, and all loads of peers under
way before the first of them is used."""
from __future__ import annotations

import re

import pytest
from tinygrad.dtype import DType

from tests.support.tile.all_reduce_case import BF16, F16, F32, S32, S64
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassemble, disassembler
from tinygrad_nv.tile.all_reduce.cost import candidates
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, Multimem, OneShot, TwoShot
from tinygrad_nv.tile.all_reduce.spec import AllReduceSpec
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

KINDS = (OneShot, TwoShot, Multimem)


def built(kind: type[AllReduceSchedule], spec: AllReduceSpec, arch: str = "sm_90a") -> TileKernel:
    made: TileKernel = TABLE.build(spec, candidates(spec, kind)[0], GPU(arch))
    return made


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, S32, S64], ids=lambda each: each.name)
@pytest.mark.parametrize("world", [2, 8])
def test_nothing_spills(kind: type[AllReduceSchedule], dtype: DType, world: int) -> None:
    """One CTA of 512 threads has 128 registers a thread."""
    specs = [AllReduceSpec(world, 1 << 16, dtype), AllReduceSpec(world, 10007, dtype)]
    if dtype in (BF16, F16, F32): specs.append(AllReduceSpec(world, 8192 * 64, dtype, 8192))
    for spec in specs:
        made = built(kind, spec)
        found = assemble(made.ptx, "sm_90a").kernels[made.name]
        assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
        assert found.registers <= 128


@pytest.mark.sampled(1)
@pytest.mark.skipif(disassembler() is None, reason="no disassembler")
@pytest.mark.parametrize("columns", [0, 8192])
def test_loads_of_all_peers_are_under_way_together(columns: int) -> None:
    """Behind the barrier that follows the flags: 8 loads of 16 bytes, and the residual, before any sum."""
    made = built(OneShot, AllReduceSpec(8, 8192 * 8, BF16, columns))
    text = disassemble(assemble(made.ptx, "sm_90a").cubin)
    behind = text[text.index("BAR.SYNC", text.index("STRONG.SYS")):]
    loads = re.findall(r"LDG\.E\.128", behind[:behind.index("FADD")])
    assert len(loads) == (9 if columns else 8)
    assert not re.findall(r"LDL|STL", text)
