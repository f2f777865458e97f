"""What kernels of rows take: registers, the width of their accesses, sectors; one barrier a statistic."""
from __future__ import annotations

import pytest
from tinygrad.dtype import DType

from tests.support.tile.norm_case import BF16, F16, F32, argmax, checked, gated, layer, rms, softmax
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.norm.templates import Norm
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

ARCHES = ("sm_80", "sm_89", "sm_90a")
FORMS = {"rms": rms, "layer": layer, "softmax": softmax, "argmax": argmax, "silu·mul": gated,
         "gemma": lambda m, n, dtype: rms(m, n, dtype, gemma=True),
         "residual": lambda m, n, dtype: rms(m, n, dtype, residual=True)}
REGISTERS, THREADS = 65536, 2048  # of an SM


@pytest.mark.sampled(30)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "n"), [(1, 4096), (4096, 4096), (8192, 128), (1, 40000)])
def test_nothing_spills_and_enough_threads_have_room(form: str, dtype: DType, arch: str, m: int, n: int):
    """A third of an SM's threads, or one CTA of the largest."""
    spec = FORMS[form](m, n, dtype)
    made = TABLE.build(spec, Norm.of(spec, arch), GPU(arch))
    found = assemble(made.ptx, arch).kernels[made.name]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    ctas = REGISTERS // (-(-found.registers // 8) * 8 * made.threads)
    assert ctas * made.threads >= THREADS // 4
    assert made.pdl == (arch == "sm_90a")


def lines(spec: NormSpec, words: str, arch: str = "sm_90a") -> list[str]:
    made = TABLE.build(spec, Norm.of(spec, arch), GPU(arch))
    return [line for line in made.ptx.splitlines() if words in line]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_accesses_are_of_16_bytes(form: str, dtype: DType):
    """But for a number of a row."""
    spec = FORMS[form](512, 4096, dtype)
    for words in ("ld.global", "st.global"):
        found = lines(spec, words)
        assert all(".v4." in line for line in found) or (form, words) == ("argmax", "st.global")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "n"), [(F32, 1024), (BF16, 1024), (BF16, 64)], ids=str)
def test_sectors_are_those_of_the_elements(form: str, dtype: DType, n: int):
    """Every sector that is asked for is used whole (by several rows, of weights), and a row is read once."""
    spec = FORMS[form](8, n, dtype)
    report = checked(spec, "sm_90a")
    accesses = [site for site in report.stats.sites if site.opcode.startswith(("ld.global", "st.global"))]
    for site in accesses[:-1] if form == "argmax" else accesses:
        assert site.sectors <= site.threads // 2, site
    x = sum(site.threads * 16 for site in accesses if site.opcode.startswith("ld"))
    operands = {"rms": 2, "layer": 3, "silu·mul": 2, "gemma": 2, "residual": 3}.get(form, 1)
    assert x == operands * 8 * n * dtype.itemsize
    assert not report.stats.bank_conflicts


def test_a_statistic_takes_one_barrier():
    spec = layer(1, 4096, BF16)
    assert len(lines(spec, "bar.sync")) == 2
    assert lines(layer(64, 128, BF16), "bar.sync") == []


def test_weights_are_asked_for_before_the_kernel_ahead_has_ended():
    """By the one thread of a line, where rows are few."""
    spec = layer(3, 4096, BF16)
    text = TABLE.build(spec, Norm.of(spec, "sm_90a"), GPU("sm_90a")).ptx
    assert text.index("prefetch.global.L2") < text.index("griddepcontrol.wait") < text.index("ld.global")
    asked = [site for site in checked(spec, "sm_90a").stats.sites if site.opcode == "prefetch.global.L2"]
    assert sum(site.threads for site in asked) == 3 * 2 * 4096 * 2 // 128
    assert lines(layer(4096, 4096, BF16), "prefetch") == lines(spec, "prefetch", "sm_80") == []


def test_a_plan_in_words():
    assert str(Norm.of(rms(4096, 4096, BF16))) == "norm 256 threads a row, 2 x 8 elements a thread"
    assert str(Norm.of(rms(9, 64))) == "norm 16 threads a row, 1 x 4 elements a thread, 8 rows a CTA"
    assert str(Norm.of(gated(1, 14336, BF16))) == \
        "norm 256 threads a row, 1 x 8 elements a thread, 7 CTAs a row"
    assert str(Norm.of(softmax(1, 100000))).endswith("read again")
