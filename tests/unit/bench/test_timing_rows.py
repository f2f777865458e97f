"""Rows of bench/timing/table.py: each has a name of its own, peers, a spec that a template takes."""
from __future__ import annotations

from collections import Counter

import pytest

from bench.timing import rows_step as timing_rows_step
from bench.timing import table as timing_table
from bench.timing.gate_cases import HOPPER
from bench.timing.rows import Row
from tinygrad_nv.tile.templates import TABLE

ROWS = [row for module in timing_table.MODULES for row in module.rows()]


def test_names_are_unique():
    assert [name for name, count in Counter(map(str, ROWS)).items() if count > 1] == []


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_is_whole(row: Row):
    assert (row.flops > 0) != (row.nbytes > 0)
    # the one peer of quantised matrices waits for CTAs that are not recorded
    assert row.peers or row.family in ("matmul int4", "matmul int8 weights")
    assert len({peer.name for peer in row.peers}) == len(row.peers)
    assert row.launched is not None or TABLE.choose(row.spec, HOPPER) is not None


@pytest.mark.slow
def test_steps_are_what_the_model_lowers_to():
    """Of each layer of LLaMA 3.2 1B eight calls; around them an embedding, a norm, the head and a token."""
    found = timing_rows_step.kernels_of("Llama-3.2-1B", 1, 1024)
    assert len(found) == 16 * 8 + 4
    assert len(set(found)) == 10
