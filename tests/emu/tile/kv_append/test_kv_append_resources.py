"""What the kernel of an append takes: registers, width of accesses, blocks; and what is refused."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.isa import PORTABLE
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.decode.spec import Pages, Scales
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.kv_append.spec import AppendSpec, Heads, Rope
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, S8, E4M3, E5M2 = dtypes.bfloat16, dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2


def llama(kv: DType = BF16, interleaved: bool = False, heads: int = 8, d: int = 128) -> AppendSpec:
    """One token of each request of a Llama 3 8B, whose q, k and v lie in one projection."""
    lies = Heads(BF16, 48 * d, 48 * d, d)
    pages = Pages(kv, 16 * heads * d, heads * d, d)
    scales = Scales(heads, 1) if kv.itemsize == 1 else None
    return AppendSpec(4, 1, heads, d, d, 16, 512, 4096, replace(lies, offset=32 * d),
                      replace(lies, offset=40 * d), pages, pages, Rope(BF16, d // 2, interleaved), lies, 32,
                      scales, scales)


def build(spec: AppendSpec, arch: str) -> TileKernel:
    gpu = GPU(arch)
    return TABLE.build(spec, TABLE.choose(spec, gpu), gpu)


@pytest.mark.parametrize(("arch", "kv"), [(arch, kv) for arch in ("sm_80", "sm_89", "sm_90a")
                                          for kv in (BF16, S8, E4M3, E5M2)
                                          if arch > "sm_80" or kv in (BF16, S8)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_registers(arch: str, kv: DType, interleaved: bool):
    made = build(llama(kv, interleaved), arch)
    found = assemble(made.ptx, arch).kernels[made.name]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.registers <= 64
    early = [word in made.ptx for word in ("griddepcontrol.wait", "griddepcontrol.launch_dependents")]
    assert [made.pdl, *early] == [arch == "sm_90a"] * 3


def test_accesses_are_of_16_bytes():
    """But for the length, which programs of q, keys and values read, the entry of the table, which those of
    keys and values do, and pages of 8 bits: 8."""
    lines, bytes_of = (build(each, "sm_90a").ptx.splitlines() for each in (llama(), llama(S8)))
    accesses = [line for line in lines if "ld.global" in line or "st.global" in line]
    assert len(accesses) > 10
    assert sum(".v4." not in line for line in accesses) == 3 + 2
    assert any("st.global.v2.b32" in line for line in bytes_of)


def test_what_is_whole_needs_no_guard():
    """But for stores to pages, of which there may be none."""
    guarded = [line.strip() for line in build(llama(), "sm_90a").ptx.splitlines() if line.strip()[:2] == "@%"]
    assert guarded
    assert all("st.global" in line for line in guarded)


@pytest.mark.parametrize(("spec", "width"), [
    (replace(llama(), k=Heads(BF16, 6144, 6144, 128, 4100)), 8),
    (replace(llama(), k=Heads(BF16, 6144, 6144, 128, 4098)), 4),
    (replace(llama(), rope=Rope(BF16, 11)), 2)], ids=str)
def test_what_is_not_aligned_is_read_in_parts(spec: AppendSpec, width: int):
    """The narrowest loads of new rows and angles, in bytes."""
    found = {8: "ld.global.v2.b32", 4: "ld.global.b32", 2: "ld.global.b16"}
    text = build(spec, "sm_90a").ptx
    assert [opcode in text for at, opcode in found.items() if at <= width] == [at == width for at in found
                                                                               if at <= width]


def test_what_no_kernel_can_do():
    schedule = TABLE.choose(llama(), GPU("sm_90a"))
    with pytest.raises(ScheduleError, match="8-bit floats: conversions begin with sm_89, this is sm_80"):
        TABLE.build(llama(E4M3), schedule, GPU("sm_80"))
    many = replace(llama(), batch=70000)
    assert TABLE.problems(many, schedule, GPU("sm_90a")) == ["70000 programs along z, at most 65535"]


def test_blocks():
    """Few rows are spread over many programs, whose latency counts; a CPU's program has a whole row."""
    few, many = (TABLE.choose(replace(llama(), batch=batch), GPU("sm_80")) for batch in (4, 2048))
    assert (few.columns, few.warps, many.columns, many.warps) == (1024, 4, 1024, 1)
    assert TABLE.choose(llama(), CPU(PORTABLE, 1)).columns == 48 * 128


@pytest.mark.parametrize(("change", "words"), [
    ({"rope": None}, "q of 32 heads"), ({"q": None}, "q of 32 heads"), ({"heads": 0}, "heads=0"),
    ({"rope": Rope(BF16, 65)}, "a rotation of 130 elements of 128"),
    ({"k": Heads(S8, 1, 1, 1)}, "rows of s8"),
    ({"k_scale": Scales(8, 1)}, "scales with bf16"), ({"v_pages": Pages(S8, 1, 1, 1)}, "no scales with s8"),
    ({"k_pages": Pages(dtypes.int32, 1, 1, 1)}, "pages of s32")])
def test_specs_that_are_none(change: dict, words: str):
    with pytest.raises(SpecError, match=words): replace(llama(), **change)


def test_a_spec_in_words():
    assert str(llama(S8, True)) == \
        "append 4x1, 8 heads, d 128, bf16 → s8, pages of 16, rope 128 interleaved, q of 32 heads"
