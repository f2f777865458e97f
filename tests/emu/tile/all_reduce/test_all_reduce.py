"""All-reduce on 2, 4 and 8 emulated GPUs under the race checker: bits of whole numbers and of random ones,
odd sizes, several rounds, many calls with delays by seed, residual and norm behind it; bugs that are
found."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tests.support.tile.all_reduce_case import BF16, F16, F32, S32, S64, Case, bits
from tinygrad_nv import hooks
from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassemble, disassembler
from tinygrad_nv.tile.all_reduce.cost import candidates, choose
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, Multimem, OneShot, TwoShot
from tinygrad_nv.tile.all_reduce.spec import AllReduceSpec
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

KINDS = (OneShot, TwoShot, Multimem)
WORLDS = (2, 4, 8)
DTYPES = (BF16, F16, F32, S32, S64, dtypes.uint32, dtypes.uint64)
SMALL: dict[str, int] = {"ctas": 2, "threads": 64, "channels": 4, "half_bytes": 768}


def in_turns(values: Iterable[Any], *others: Sequence[Any]) -> list[Any]:
    """Cases of every value with every combination of others: each value with one of them, the rest slow."""
    combined = list(product(*others))
    return [pytest.param(value, *each, marks=[] if number == i % len(combined) else [pytest.mark.slow])
            for i, value in enumerate(values) for number, each in enumerate(combined)]


@pytest.mark.parametrize(("dtype", "kind", "world"), in_turns(DTYPES, KINDS, WORLDS))
def test_whole_numbers_to_the_bit(dtype: DType, kind: type[AllReduceSchedule], world: int) -> None:
    for count, seed in ((1, 1), (263, 2)):
        Case.drawn(AllReduceSpec(world, count, dtype), kind(**SMALL), seed).correct(seed=seed)


@pytest.mark.parametrize("kind", [OneShot, TwoShot])
@pytest.mark.parametrize("world", [3, 8])
def test_random_floats_are_the_same_bits_everywhere(kind: type[AllReduceSchedule], world: int) -> None:
    """The sum in the order of ranks, rounded once, to the bit."""
    for dtype in (BF16, F16, F32):
        Case.drawn(AllReduceSpec(world, 263, dtype), kind(**SMALL), whole=False).correct()


def test_random_floats_in_the_order_of_the_switch() -> None:
    """The same bits everywhere. Of the float64 sum no further than the sum in order of ranks may be: 7
    roundings to float32, of at most the sum of what is added, and one to the dtype."""
    for dtype, unit in ((BF16, 2.0**-9), (F16, 2.0**-12), (F32, 2.0**-24)):
        case = Case.drawn(AllReduceSpec(8, 263, dtype), Multimem(**SMALL), whole=False)
        results = [each[0] for each in case.run(2)[1]]
        assert case.found == []
        assert all(bits(each).tobytes() == bits(results[0]).tobytes() for each in results)
        given = case.given(1)
        exact = sum(each.double() for each in given)
        bound = 7 * 2.0**-24 * sum(each.double().abs() for each in given) + 2 * unit * abs(exact)
        assert ((results[0].double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_several_rounds_and_calls_with_delays(kind: type[AllReduceSchedule]) -> None:
    """2 CTAs of 48 or fewer vectors a round: 3 rounds or more, one call after another."""
    spec = AllReduceSpec(4, 8 * 211 + 5, BF16)
    assert kind(**SMALL).rounds(spec) >= 3
    for seed in range(4): Case.drawn(spec, kind(**SMALL), seed).correct(calls=3, seed=seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=lambda each: each.name)
def test_residual_and_norm(kind: type[AllReduceSchedule], dtype: DType) -> None:
    """Rows shorter and longer than the CTA, more rows than CTAs. An eps that changes every element."""
    for world, rows, columns in ((2, 1, 64), (4, 5, 520), (8, 3, 8)):
        schedule = kind(ctas=2, threads=64, channels=4, half_bytes=8192)
        for whole in (True, False) if kind is not Multimem else (True,):
            spec = AllReduceSpec(world, rows * columns, dtype, columns, eps=0.5)
            Case.drawn(spec, schedule, whole=whole).correct(2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=pytest.mark.slow), F32, S32])
def test_the_reference_of_the_family(dtype: DType) -> None:
    """What the kernels are compared with here is what tile/reference.py computes."""
    for columns in (0, 64) if dtype is not S32 else (0,):
        case = Case.drawn(AllReduceSpec(3, 128, dtype, columns, eps=0.5), OneShot(), whole=False)
        given = {"x": torch.cat(case.x)}
        if case.residual is not None and case.weight is not None:
            given |= {"residual": case.residual, "weight": case.weight}
        with hooks.disabled():
            storages = {name: Tensor(bits(each), device="CPU").bitcast(dtype) for name, each in given.items()}
            results = [each.bitcast(dtypes.uint8).numpy().tobytes() for each in
                       (one.flatten() for one in TABLE.reference(case.spec, storages))]
        right = case.expected()
        assert results[-1] == bits(right[-1]).tobytes()
        if columns: case.norm_close(torch.frombuffer(bytearray(results[0]), dtype=right[0].dtype), right[0])


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_wrap(kind: type[AllReduceSchedule]) -> None:
    """After 2³² rounds."""
    case = Case.drawn(AllReduceSpec(4, 8 * 150 + 3, BF16), kind(**SMALL))
    case.epoch = (1 << 32) - 3
    case.correct(calls=3)


@pytest.mark.parametrize("kind", [TwoShot, Multimem])
@pytest.mark.parametrize("rounds", [(1 << 31) + 5, (1 << 32) - 1])
def test_two_phases_after_many_rounds_of_one(kind: type[AllReduceSchedule], rounds: int) -> None:
    """Arrivals of phase 1 are as old as the last kernel that had one: they are not taken for later ones."""
    case = Case.drawn(AllReduceSpec(4, 8 * 150 + 3, BF16), kind(**SMALL))
    case.epoch = case.behind = rounds
    for seed in (1, 2): case.correct(calls=2, seed=seed)


def test_kinds_in_turns_on_one_workspace() -> None:
    """Each goes on where the one before has left flags and halves, which it shares out in another way."""
    case = Case.drawn(AllReduceSpec(4, 8 * 150 + 3, BF16), OneShot(**SMALL))
    case.others = TwoShot(**SMALL), Multimem(**SMALL), OneShot(**{**SMALL, "ctas": 3})
    case.epoch = case.behind = (1 << 31) - 2
    for seed in range(3): case.correct(calls=6, seed=seed)


def test_other_architectures() -> None:
    """sm_80 and sm_89 have the same templates, without griddepcontrol."""
    for arch in ("sm_80", "sm_89"):
        Case.drawn(AllReduceSpec(2, 100, BF16), OneShot(**SMALL), arch=arch).correct(2)


# **** bugs ****

def kinds_found(kind: type[AllReduceSchedule], edit: tuple[str, str], calls: int = 4) -> set[str]:
    """What is found where a kernel's text is another, with vectors for both warps of each shard."""
    def edited(text: str) -> str: return re.sub(*edit, text)
    case = Case.drawn(AllReduceSpec(4, 8 * 300, BF16), kind(**{**SMALL, "half_bytes": 8192}))
    out: set[str] = set()
    for seed in (1, 2, 3):
        case.run(calls, seed, edited)
        out |= {each.kind for each in case.found}
    return out


BUGS = {
    "the flag is released for the GPU alone": (r"st\.release\.sys", "st.release.gpu"),
    "the flag is acquired for the GPU alone": (r"ld\.acquire\.sys", "ld.acquire.gpu"),
    "the flag is not released": (r"st\.release\.sys", "st.relaxed.sys"),
    "the flag is not acquired": (r"ld\.acquire\.sys", "ld.relaxed.sys"),
    "no barrier before the flag": (r"bar\.sync 0;(\s+@\S+ bra \S+\s+st\.release)", r"\1"),
    "no barrier behind the flag": (
        r"(bra \$while_\d+;\s+\$endwhile_\d+:\s+\$endif_\d+:\s+)bar\.sync 0;", r"\1"),
    "a flag that always holds": (r"setp\.lt\.s32 (\S+), (\S+), 0;", r"setp.lt.s32 \1, \2, -9;"),
    "one half": (r"and\.b32 (\S+), (\S+), 1;", r"and.b32 \1, \2, 0;")}


@pytest.mark.parametrize(("bug", "kind"), in_turns(BUGS, KINDS))
def test_bugs_of_order_are_found(bug: str, kind: type[AllReduceSchedule]) -> None:
    """One half: GPUs leave a call, and write the next one's x where peers still read."""
    found = kinds_found(kind, BUGS[bug])
    # with two phases, phase 1 orders what peers read of x; the sums are not overwritten before phase 0
    if kind is not OneShot and bug == "one half": assert found == set()
    else: assert "race" in found


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_does_not_advance_is_found(kind: type[AllReduceSchedule]) -> None:
    """The second call finds the flags of the first: nothing waits."""
    for place in (64, 68) if kind is not OneShot else (64,):
        assert "race" in kinds_found(kind, (rf"st\.global\.u32 (\[\S+\+{place}\]), \S+;", r""))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_not_told_is_a_deadlock(kind: type[AllReduceSchedule]) -> None:
    """Rank 0 is left out by all: it waits for ever, and so do the others for its next call."""
    edit = (r"(@\S+) bra (\$endif_\d+);(\s+st\.release)",
            r"\1 bra \2;\n setp.eq.u32 %told, %tid_x, 0;\3")
    case = Case.drawn(AllReduceSpec(2, 64, BF16), kind(**SMALL))

    def edited(text: str) -> str:
        text = re.sub(*edit, text).replace("st.release.sys", "@!%told st.release.sys")
        return text.replace("{\n    .reg", "{\n    .reg .pred %told;\n    .reg", 1)
    case.run(2, 1, edited)
    assert {each.kind for each in case.found} == {"deadlock"}
    assert any("of GPU 0, which hold 0" in each.message for each in case.found)


# **** what cannot be ****

@pytest.mark.parametrize(("made", "words"), [
    (lambda: AllReduceSpec(1, 8), "over 1 GPUs"), (lambda: AllReduceSpec(9, 8), "over 9 GPUs"),
    (lambda: AllReduceSpec(2, 0), "of 0 elements"), (lambda: AllReduceSpec(2, 8, dtypes.int8), "of s8"),
    (lambda: AllReduceSpec(2, 8, S32, 8), "RMSNorm of s32"),
    (lambda: AllReduceSpec(2, 9, BF16, 8), "rows of 8")])
def test_specs_that_cannot_be(made: Callable[[], AllReduceSpec], words: str) -> None:
    with pytest.raises(SpecError, match=words): made()


@pytest.mark.parametrize(("spec", "schedule", "words"), [
    (AllReduceSpec(2, 64), OneShot(ctas=5, channels=4), "5 CTAs, and 4 channels"),
    (AllReduceSpec(2, 64), OneShot(channels=65), "65 channels, at most 64"),
    (AllReduceSpec(2, 64), OneShot(threads=48), "48 threads"),
    (AllReduceSpec(2, 64), OneShot(ctas=0), "extents below 1"),
    (AllReduceSpec(2, 64), TwoShot(threads=0), "extents below 1"),
    (AllReduceSpec(2, 64), OneShot(half_bytes=1 << 25), "a workspace of 4294975488 bytes"),
    (AllReduceSpec(2, 64), Multimem(), "multimem on sm_80"),
    (AllReduceSpec(2, 64), OneShot(half_bytes=24), "halves of 24 bytes"),
    (AllReduceSpec(2, 36, BF16, 12), OneShot(), "rows of 12 elements"),
    (AllReduceSpec(2, 4096, BF16, 4096), OneShot(half_bytes=4096), "a row of 8192 bytes"),
    (AllReduceSpec(2, 8192, BF16, 8192), OneShot(threads=32), "at most 8 each")])
def test_schedules_that_cannot_be(spec: AllReduceSpec, schedule: AllReduceSchedule, words: str) -> None:
    gpu = GPU("sm_80" if words.endswith("sm_80") else "sm_90a")
    with pytest.raises(ScheduleError, match=words): TABLE.build(spec, schedule, gpu)


# **** choice ****

def test_choice_by_size_and_world() -> None:
    sizes = (1 << 14, 1 << 18, 1 << 19, 1 << 21, 1 << 25, 1 << 26, 1 << 27)
    chosen = {world: [choose(world, size) for size in sizes] for world in (2, 4, 6, 8)}
    assert chosen[2] == [OneShot] * 6 + [None]
    assert chosen[4] == [OneShot] * 4 + [TwoShot] + [None] * 2
    assert chosen[6] == [OneShot] * 3 + [None] * 4
    assert chosen[8] == [OneShot] * 2 + [None] * 5
    assert [choose(8, size, multicast=True) for size in sizes] == [OneShot] * 2 + [Multimem] * 4 + [None]
    assert choose(4, 1 << 25, multicast=True) is TwoShot
    for world in (1, 9):
        with pytest.raises(SpecError, match=f"an all-reduce over {world} GPUs"): choose(world, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_legal(kind: type[AllReduceSchedule]) -> None:
    for world in range(2, 9):
        for spec in (AllReduceSpec(world, 1), AllReduceSpec(world, 1 << 24, F32),
                     AllReduceSpec(world, 8192, BF16, 8192), AllReduceSpec(world, 64 * 4096, F16, 4096)):
            for schedule in (TABLE.choose(spec, GPU("sm_90a")), *candidates(spec, kind)):
                assert TABLE.problems(spec, schedule, GPU("sm_90a")) == []


# **** machine code ****

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
