"""The program of rows on the emulated GPU, checks on: against float64, whole numbers to the bit, NaN,
edges, odd sizes and alignments, rows that do not fit in registers; and checkers that fail. What kernels
take: registers, accesses, sectors, one barrier a statistic."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType

from tests.support.tile.norm_case import (
    BF16,
    F16,
    F32,
    S32,
    argmax,
    arguments,
    built,
    checked,
    gated,
    launched,
    layer,
    lies,
    of,
    plan,
    reference,
    rms,
    softmax,
)
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.expression import Load, Position, Sum
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.norm import program
from tinygrad_nv.tile.norm.spec import Computed, NormSpec, Statistic
from tinygrad_nv.tile.programs import trace_spec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

ARCHES = ("sm_80", "sm_90a")
FORMS = {"rms": rms, "layer": layer, "softmax": softmax, "argmax": argmax, "silu·mul": gated}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_as_exact_as_float32(form: str, dtype: DType, arch: str):
    """A team of several warps, one of a part of a warp, and vectors of single elements."""
    for seed, (m, n) in enumerate(((2, 520), (5, 64), (3, 77))): checked(FORMS[form](m, n, dtype), arch, seed)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_forms_of_rms(dtype: DType, arch: str):
    for more in ({"gemma": True}, {"residual": True}, {"gap": 3}, {"gap": 8, "offset": 8}, {"offset": 1}):
        checked(rms(3, 264, dtype, **more), arch)


@pytest.mark.parametrize("seed", range(5))
def test_every_order_of_warps_gives_the_same_bits(seed: int):
    spec = rms(2, 1400, BF16)
    operands = arguments(spec)
    first, other = (launched(spec, operands, "sm_90a", each)[0][0] for each in (0, seed))
    assert torch.equal(first, other)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_generated(data: st.DataObject):
    form = data.draw(st.sampled_from(sorted(FORMS)))
    m, n = data.draw(st.integers(1, 9)), data.draw(st.integers(2, 700))
    dtype = data.draw(st.sampled_from([F32, F16, BF16]))
    gap = {} if form == "silu·mul" else {"gap": data.draw(st.sampled_from([0, 1, 2, 8]))}
    checked(FORMS[form](m, n, dtype, **gap), data.draw(st.sampled_from(ARCHES)), data.draw(st.integers(0, 9)))


def total(m: int, n: int, batch: tuple[int, ...] = (), symbolic: bool = False) -> NormSpec:
    """x + Σ x · 2, and x − max x in int32, of rows between others of a batch."""
    size = n * m
    strides = (size * 10, size * 3)[:len(batch)]
    x = Load(0, F32, n, 1, strides)
    out = Result(F32, n, 1, strides)
    return NormSpec(m, n, (Statistic("add", x), Statistic("max", x.cast(S32))),
                    (Computed(out, x + Sum() * 2.0), Computed(replace(out, dtype=S32),
                                                              x.cast(S32) - Sum(S32, 1))), batch, symbolic)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("m", "n", "batch"), [(3, 40, ()), (9, 33, (2,)), (2, 600, (2, 3)), (40, 4, ())])
def test_whole_numbers_are_exact(m: int, n: int, batch: tuple[int, ...], arch: str):
    checked(total(m, n, batch), arch, exact=True)


@pytest.mark.parametrize("m", [1, 4, 9])
def test_rows_may_be_fewer(m: int):
    for n in (36, 300): checked(total(9, n, (2,), symbolic=True), "sm_90a", exact=True, m=m)


def test_elements_know_where_they_are():
    """Positions along each dimension, and a number of the row that is loaded."""
    x, r = Load(0, S32, 40, 1, (400,)), Load(1, S32, 1, 0, (10,))
    value = x + Position("n") * 3 + Position("m") * 5 + Position(0) * 7 + r
    for statistics in ((), (Statistic("add", x),)):
        shown = value + Sum(S32) if statistics else value
        spec = NormSpec(10, 40, statistics, (Computed(Result(S32, 40, 1, (400,)), shown),), (2,))
        checked(spec, "sm_80", exact=True)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_nan_and_infinity(dtype: DType, arch: str):
    """A maximum is of numbers; a row of nothing else has no element that is the largest."""
    spec = argmax(6, 70, dtype)
    operands = arguments(spec)
    x = operands[0].view(6, 70)
    x[0, [3, 40, 69]] = 9.0
    x[1, 69] = torch.inf
    x[2, 5] = torch.nan
    x[3] = torch.nan
    x[4] = -torch.inf
    found = launched(spec, operands, arch)[0][0].flatten().tolist()
    assert found == [3, 69, int(x[2].float().nan_to_num(-torch.inf).argmax()), 70, 0, int(x[5].argmax())]
    spec = softmax(6, 70, dtype)
    found = launched(spec, operands, arch)[0][0]
    for n in (64, 70):      # a maximum of nothing but NaN
        row = lies(dtype, n)
        nothing = of(2, n, (Statistic("max", row),), Sum(dtype))
        alone = launched(nothing, {0: torch.full_like(operands[0][:2 * n], torch.nan)}, arch)[0][0]
        assert alone.eq(-torch.inf).all()
    nans = found.isnan().all(-1).tolist()
    assert nans == [False, True, True, True, True, False]  # inf − inf, and as in a sum


LONG = (softmax(1, 4 * 2048 * 4 + 2048 + 12), rms(2, 40000, F32, residual=True), argmax(3, 50001),
        softmax(2, 128256), layer(1, 20000, BF16))


def test_rows_that_do_not_fit_are_read_again():
    """A loop over whole groups of chunks, and what is left, some of it guarded."""
    for spec in LONG:
        assert plan(spec, "sm_80").columns < spec.n
        checked(spec, "sm_80")
    one = lies(F32, 40000)
    spec = of(1, 40000, (Statistic("add", one),), one + Sum())
    checked(spec, "sm_80", exact=True)


def test_a_few_long_rows_whose_statistics_are_exact_lie_in_the_registers_of_a_cluster():
    assert [plan(spec, "sm_90a").cluster for spec in LONG] == [1, 1, 8, 1, 1]
    assert [plan(argmax(rows, 50001), "sm_90a").cluster for rows in (9, 25)] == [4, 1]
    for spec in (argmax(3, 50001), argmax(2, 128256, BF16), batched_argmax(5, 2, 40002)):
        checked(spec, "sm_90a", exact=True)


def batched_argmax(batch: int, m: int, n: int) -> NormSpec:
    """The largest and its place, numbers of a row beside elements."""
    x = Load(0, F32, n, 1, (m * n,))
    most, elements = Result(F32, 1, 0, (m,)), Result(F32, n, 1, (m * n,))
    results = Computed(most, Sum()), Computed(elements, x - Sum())
    return NormSpec(m, n, (Statistic("max", x),), results, (batch,))


@pytest.mark.parametrize("spoilt", [("barrier.cluster.wait.aligned;", ""), ("max.f32", "min.f32")])
def test_what_is_wrong_in_a_cluster_is_found(spoilt: tuple[str, str]):
    with pytest.raises(AssertionError): checked(argmax(2, 60000), "sm_90a", exact=True, spoilt=spoilt)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["rms", "layer", "softmax"])
def test_a_row_has_the_same_bits_beside_any_others(form: str):
    """Alone, among few and among many, and wherever it stands."""
    for n in (100, 264, 1100):
        many = FORMS[form](300, n, BF16)
        operands = arguments(many)
        among = launched(many, operands, "sm_90a")[0][0]
        for first, count in ((0, 1), (170, 1), (290, 5)):
            some = operands | {0: operands[0][first * n:(first + count) * n]}
            assert torch.equal(launched(FORMS[form](count, n, BF16), some, "sm_90a")[0][0],
                               among[first:first + count])


@pytest.mark.parametrize("n", [200, 256])
def test_a_row_with_wider_weights_has_the_same_bits_beside_others(n: int):
    """One row shares a program with its weights, several do not: vectors are of the widest."""
    def of_rows(m: int) -> NormSpec:
        wide, w = lies(BF16, n).cast(F32), Load(1, F32, 0, 1)
        return of(m, n, (Statistic("add", wide * wide),), (wide * (Sum() * (1 / n) + 1e-5).reciprocal() * w))
    operands = arguments(of_rows(300))
    among = launched(of_rows(300), operands, "sm_90a")[0][0]
    for count in (1, 2, 4):
        some = operands | {0: operands[0][:count * n]}
        assert torch.equal(launched(of_rows(count), some, "sm_90a")[0][0], among[:count])


def test_when_weights_are_loaded_changes_no_bits(monkeypatch: pytest.MonkeyPatch):
    """Few rows have them loaded ahead of the statistics, if registers allow."""
    many, texts = layer(4, 5120, BF16), set[str]()
    operands, found = arguments(many), list[torch.Tensor]()
    for few in (264, 1):
        monkeypatch.setattr(program, "FEW_ROWS", few)
        trace_spec.cache_clear()
        found.append(launched(many, operands, "sm_90a")[0][0])
        texts.add(built(many, "sm_90a").ptx)
    trace_spec.cache_clear()
    assert len(texts) == 2
    assert torch.equal(*found)


@pytest.mark.parametrize("n", [18432, 28672])
def test_groups_of_long_rows_have_a_kernel(n: int):
    x, scale = lies(BF16, n).cast(F32), Sum(F32)
    spec = NormSpec(2, n, (Statistic("max", x.maximum(x * -1.0), 128),),
                    (Computed(Result(F32, n, 1), x * (scale + 1.0).reciprocal()),
                     Computed(Result(F32, n // 128, 1), scale, 128)))
    for arch in BUILT:
        made = built(spec, arch)
        assert assemble(made.ptx, arch).kernels[made.name].spill_store_bytes == 0


def test_what_has_no_kernel_is_refused_in_words():
    apart = Load(0, F32, 1, 64)
    for spec, words in ((of(4, 64, (Statistic("add", apart),), apart + Sum()), "elements of x0 lie apart"),
                        (rms(1, (1 << 17) + 4), "several programs are faster")):
        schedule = plan(rms(4, 64), "sm_80")
        with pytest.raises(ScheduleError, match=words): TABLE.build(spec, schedule, GPU("sm_80"))
        assert TABLE.choose(spec, GPU("sm_80")) is None


def test_a_schedule_of_other_rows_is_refused():
    """Its sums would have another order."""
    with pytest.raises(ScheduleError, match="norm blocks of 4x128, 4 warps is not one of"):
        TABLE.build(rms(9, 64), plan(rms(9, 128), "sm_80"), GPU("sm_80"))


@pytest.mark.parametrize("spoilt", [("bar.sync 0;", ""), ("max.f32", "min.f32"), ("add.f32", "sub.f32")])
def test_the_checks_can_fail(spoilt: tuple[str, str]):
    """Without its barrier the race is found; other sums are seen."""
    with pytest.raises(AssertionError): checked(softmax(2, 600), "sm_80", spoilt=spoilt)


def test_the_reference_can_fail():
    spec = rms(2, 64)
    operands = arguments(spec)
    right, plain = (reference(spec, operands, float32=each)[0] for each in (False, True))
    assert 0 < (right - plain).abs().max() < 1e-6
    assert (right - reference(layer(2, 64), arguments(layer(2, 64)))[0]).abs().max() > 1e-2


# **** what kernels take ****

BUILT = ("sm_80", "sm_89", "sm_90a")
KINDS = {"rms": rms, "layer": layer, "softmax": softmax, "argmax": argmax, "silu·mul": gated,
         "gemma": lambda m, n, dtype: rms(m, n, dtype, gemma=True),
         "residual": lambda m, n, dtype: rms(m, n, dtype, residual=True)}
REGISTERS, THREADS = 65536, 2048  # of an SM


@pytest.mark.sampled(30)
@pytest.mark.parametrize("arch", BUILT)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize(("m", "n"), [(1, 4096), (4096, 4096), (8192, 128), (1, 40000)])
def test_nothing_spills_and_enough_threads_have_room(form: str, dtype: DType, arch: str, m: int, n: int):
    """A third of an SM's threads, or one CTA of the largest."""
    spec = KINDS[form](m, n, dtype)
    made = built(spec, arch)
    found = assemble(made.ptx, arch).kernels[made.name]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    ctas = REGISTERS // (-(-found.registers // 8) * 8 * made.threads)
    assert ctas * made.threads >= THREADS // 4
    assert made.pdl == (arch == "sm_90a")


def lines(spec: NormSpec, words: str, arch: str = "sm_90a") -> list[str]:
    made = built(spec, arch)
    return [line for line in made.ptx.splitlines() if words in line]


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_accesses_are_of_16_bytes(form: str, dtype: DType):
    """But for a number of a row."""
    spec = KINDS[form](512, 4096, dtype)
    for words in ("ld.global", "st.global"):
        found = lines(spec, words)
        assert all(".v4." in line for line in found) or (form, words) == ("argmax", "st.global")


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize(("dtype", "n"), [(F32, 1024), (BF16, 1024), (BF16, 64)], ids=str)
def test_sectors_are_those_of_the_elements(form: str, dtype: DType, n: int):
    """Every sector that is asked for is used whole (by several rows, of weights), and a row is read once."""
    spec = KINDS[form](8, n, dtype)
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
    text = built(spec, "sm_90a").ptx
    assert text.index("prefetch.global.L2") < text.index("griddepcontrol.wait") < text.index("ld.global")
    asked = [site for site in checked(spec, "sm_90a").stats.sites if site.opcode == "prefetch.global.L2"]
    assert sum(site.threads for site in asked) == 3 * 2 * 4096 * 2 // 128
    assert lines(layer(4096, 4096, BF16), "prefetch") == lines(spec, "prefetch", "sm_80") == []


def test_a_plan_in_words():
    assert [str(plan(spec, "sm_90a")) for spec in (rms(4096, 4096, BF16), rms(9, 64), gated(1, 14336, BF16),
                                                   softmax(1, 100000), argmax(1, 100000))] == [
        "norm blocks of 1x4096, 8 warps", "norm blocks of 8x64, 4 warps", "norm blocks of 1x2048, 8 warps",
        "norm blocks of 1x16384, 32 warps", "norm blocks of 1x12500, clusters of 8, 8 warps"]
