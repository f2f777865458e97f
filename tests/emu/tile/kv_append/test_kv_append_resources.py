"""What the kernel of an append takes: registers, the width of its accesses; and what is refused."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.decode.spec import Pages, Scales
from tinygrad_nv.tile.kv_append.spec import AppendSpec, Heads, Rope, vector
from tinygrad_nv.tile.kv_append.templates import Append
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


@pytest.mark.parametrize(("arch", "kv"), [(arch, kv) for arch in ("sm_80", "sm_89", "sm_90a")
                                          for kv in (BF16, S8, E4M3, E5M2)
                                          if arch > "sm_80" or kv in (BF16, S8)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_registers(arch: str, kv: DType, interleaved: bool):
    made = TABLE.build(llama(kv, interleaved), Append(), GPU(arch))
    found = assemble(made.ptx, arch).kernels[made.name]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.registers <= 48
    early = [word in made.ptx for word in ("griddepcontrol.wait", "griddepcontrol.launch_dependents")]
    assert [made.pdl, *early] == [arch == "sm_90a"] * 3


def test_accesses_are_of_16_bytes():
    """But for the length, which CTAs of q, keys and values read, the entry of the table, which those of keys
    and values do, and pages of 8 bits: 8."""
    lines, bytes_of = (TABLE.build(each, Append(), GPU("sm_90a")).ptx.splitlines()
                       for each in (llama(), llama(S8)))
    accesses = [line for line in lines if "ld.global" in line or "st.global" in line]
    assert len(accesses) > 10
    assert sum(".v4." not in line for line in accesses) == 3 + 2
    assert any("st.global.v2.b32" in line for line in bytes_of)


@pytest.mark.parametrize(("spec", "count"), [
    (llama(), 8), (llama(d=8), 4), (llama(d=12), 0), (replace(llama(), k=Heads(BF16, 4, 4, 4)), 4),
    (replace(llama(), k=Heads(BF16, 128, 128, 128, 2)), 0), (replace(llama(), rope=Rope(BF16, 12)), 4)])
def test_vectors(spec: AppendSpec, count: int): assert vector(spec) == count


def test_what_no_kernel_can_do():
    with pytest.raises(ScheduleError, match="sm_80 converts nothing"):
        TABLE.build(llama(E4M3), Append(), GPU("sm_80"))
    many = replace(llama(), batch=70000)
    assert TABLE.problems(many, Append(), GPU("sm_90a")) == ["70000 requests, at most 65535"]


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
