"""The mma.sync template of attention on the emulator: heads, bands, layouts and schedules; what is exact
comes out bit for bit."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from attention_case import arguments, attention, launched, matrix, near, run
from attention_exact import equal_scores_are_a_mean, one_column_is_its_value
from flash_mma_case import BF16, CAUSAL, F16, F32, SMALL, close, scheduled
from tinygrad.dtype import DType

from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

# **** heads ****

@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("d", [8, 16, 32, 40, 64, 72, 80, 96, 128, 136, 192, 256])
def test_heads(d: int, dtype: DType):
    """The band is a window that begins and ends within blocks; 200 keys are 7 blocks."""
    close(attention(40, 200, d, dtype, band=Band(-90, 3), start=100, lse=True), seed=d % 4)
    close(attention(40, 200, d, dtype, out=F32), seed=d % 4)


@pytest.mark.parametrize(("d", "d_v"), [(64, 128), (128, 64), (192, 128), (72, 40), (16, 256), (24, 8)])
def test_values_of_another_width_than_keys(d: int, d_v: int):
    close(attention(50, 150, d, d_v=d_v, band=CAUSAL, start=90, heads=2, lse=True))


@pytest.mark.parametrize("out", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_architectures_and_results(arch: str, out: DType):
    close(attention(70, 130, 64, F16, out=out, heads=2, group=2, lse=True), arch=arch)


# **** bands ****

@pytest.mark.parametrize("start", [0, 1, 31, 33, 150])
@pytest.mark.parametrize("band", [CAUSAL, Band(-40, 0), Band(-31, 0), Band(None, 20), Band(-10, None),
                                  Band(5, 60), Band(None, -7), Band(-70, -33)], ids=str)
def test_bands(band: Band, start: int):
    """Rows may see nothing: zeros, and l = −inf."""
    spec = attention(70, 170, 32, band=band, start=start, lse=True)
    close(spec, scheduled(64, 32, 4, 3), seed=start % 4)


def test_columns_that_no_row_sees_are_not_read():
    """Keys and values beyond the band are NaN, within the last block too."""
    spec = attention(40, 300, 64, band=CAUSAL, start=150)
    given = arguments(spec)
    spoilt = {name: storage.clone() for name, storage in given.items()}
    for name in "kv": matrix(spec, spoilt, name)[..., 190:, :] = torch.nan
    near(spec, given, run(TABLE.build(spec, scheduled(64, 64, 4), GPU("sm_80")), spec, spoilt))


def test_blocks_that_no_row_sees_are_skipped():
    """Bytes copied: each of 8 blocks of rows sees its own keys and those before; of a window, two blocks."""
    rows, nbytes = 256, 32 * 64 * 2
    found = {}
    for band in (FULL, CAUSAL, Band(-31, 0)):
        spec = attention(rows, rows, 64, band=band)
        _, report = launched(TABLE.build(spec, SMALL, GPU("sm_80")), spec, arguments(spec), "sm_80")
        found[band] = report.stats.asynchronous_bytes - rows * 64 * 2
    assert found == {FULL: 64 * 2 * nbytes, CAUSAL: 36 * 2 * nbytes, Band(-31, 0): 15 * 2 * nbytes}


# **** exact ****

@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_a_row_that_sees_one_column_is_its_value(dtype: DType):
    one_column_is_its_value(lambda spec: TABLE.build(spec, SMALL, GPU("sm_80")), "sm_80", dtype)


@pytest.mark.parametrize("band", [FULL, Band(-63, 0)], ids=["full", "window"])
def test_equal_scores_are_a_mean(band: Band):
    equal_scores_are_a_mean(lambda spec: TABLE.build(spec, SMALL, GPU("sm_80")), "sm_80", band)


def test_a_rows_bits_do_not_depend_on_other_rows():
    spec = attention(37, 170, 64, heads=2, lse=True)
    given = arguments(spec)
    alone = replace(spec, s_q=5)
    few = run(TABLE.build(alone, SMALL, GPU("sm_80")), alone, given | {"l": given["l"][:10].clone()})
    many = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given)
    assert torch.equal(few[0], many[0][..., :5, :])
    assert few[1] is not None
    assert many[1] is not None
    assert torch.equal(few[1], many[1][..., :5])


# **** layouts ****

@pytest.mark.parametrize("order", ["bhr", "brh"])
@pytest.mark.parametrize("gap", [0, 2, 4, 8])
def test_layouts(order: str, gap: int):
    """Rows aligned to 4 bytes and more, heads in either order, shared by a group."""
    close(attention(40, 130, 40, batch=2, heads=2, group=3, order=order, gap=gap, lse=True))


def test_offsets():
    spec = attention(40, 130, 64)
    offsets = {"q": 8, "k": 2, "v": 4, "out": 1}
    close(replace(spec, **{name: replace(getattr(spec, name), offset=at) for name, at in offsets.items()}))


# **** schedules ****

@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_rings(stages: int):
    """At least `stages` + 2 blocks, and fewer blocks than stages."""
    for s_kv in (16 * (stages + 2), 16 * stages * 3 - 5, 16):
        close(attention(20, s_kv, 64), scheduled(32, 16, 2, stages))


@pytest.mark.parametrize("schedule", [
    scheduled(128, 32, 8), scheduled(128, 16, 4), scheduled(16, 128, 1), scheduled(64, 16, 2),
    scheduled(96, 32, 2), scheduled(256, 32, 16), scheduled(256, 16, 16), scheduled(48, 64, 1, 3)], ids=str)
def test_blocks_and_warps(schedule: FlashMma):
    for d, d_v in ((48, 32), (16, 8), (128, 64)):
        close(attention(140, 300, d, d_v=d_v, band=CAUSAL, start=130, lse=True), schedule)


@pytest.mark.parametrize("seed", range(4))
def test_interleavings(seed: int):
    """Warps run in another order for every seed."""
    close(attention(128, 256, 64, F16, heads=2, band=CAUSAL, start=64), scheduled(128, 32, 4, 3), seed=seed)


def test_on_hopper_memory_is_touched_after_the_kernel_before():
    """And the next kernel may begin when the last copies are there."""
    made = TABLE.build(attention(64, 128, 64), SMALL, GPU("sm_90a"))
    wait, done = (made.ptx.index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
    assert made.pdl
    copies = [found.start() for found in re.finditer(r"cp\.async\.cg", made.ptx)]
    assert wait < copies[0] < copies[-1] < done < made.ptx.index("st.global")
    assert not TABLE.build(attention(64, 128, 64), SMALL, GPU("sm_80")).pdl
