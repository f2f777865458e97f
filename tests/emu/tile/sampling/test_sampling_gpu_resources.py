"""What the sampler's kernels take: registers, barriers, the width of their accesses."""
from __future__ import annotations

import pytest

from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.sampling.choice import first, merge_choices, pieces
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, CountSpec, FilterSpec, Number
from tinygrad_nv.tile.sampling.templates import Count, Threshold
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

ARCHES = ("sm_80", "sm_89", "sm_90a")
SIZES = (5, 2048, 32000, 128256)


def threshold(spec: FilterSpec, arch: str) -> TileKernel: return TABLE.build(spec, Threshold(), GPU(arch))


KINDS = {"weighted": lambda size, arch: threshold(FilterSpec(64, size, Number.top_p), arch),
         "counted": lambda size, arch: threshold(FilterSpec(64, size, Number.top_k, True), arch),
         "drawn": lambda size, arch: first(ChoiceSpec(64, size), arch),
         "largest": lambda size, arch: first(ChoiceSpec(1, size, False), arch),
         "keys": lambda size, arch: first(ChoiceSpec(256, size, True, 2 * size), arch),
         "pieces": lambda size, arch: merge_choices(ChoiceSpec(1, size), arch),
         "pieces of a part": lambda size, arch: merge_choices(ChoiceSpec(1, size, True, 2 * size), arch),
         "count": lambda size, arch: TABLE.build(CountSpec(64, 64, size), Count(), GPU(arch))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_spills(kind: str, arch: str):
    for size in SIZES:
        made: TileKernel = KINDS[kind](size, arch)
        found = assemble(made.ptx, arch).kernels[made.name]
        assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
        assert found.registers <= 64
        early = [word in made.ptx for word in ("griddepcontrol.wait", "griddepcontrol.launch_dependents")]
        assert [made.pdl, *early] == [arch == "sm_90a"] * 3


def test_a_pass_meets_twice():
    """And has a vector for each four elements; of what is kept there are four at a time."""
    text = threshold(FilterSpec(1, 4096, Number.top_p), "sm_90a").ptx
    assert text.count("bar.sync") == 2
    assert text.count("ld.global.v4") == 2 + 4  # keys, weights, and what is kept
    assert text.count("add.f32") == 4 * 15 + 16


def test_long_rows_are_chosen_from_in_pieces_until_the_machine_is_full():
    assert [pieces(ChoiceSpec(rows, 128256)) for rows in (1, 8, 64, 256)] == [32, 32, 8, 2]
    assert pieces(ChoiceSpec(1, 4096)) == 1
    made = first(ChoiceSpec(3, 128256), "sm_90a")
    assert (made.grid, made.threads) == ((32, 3, 1), 256)
