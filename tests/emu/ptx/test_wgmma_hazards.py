"""wgmma is asynchronous: each mistake gives its finding, the cured twin none and the right numbers."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.ptx.tensor_case import decode, integers, kinds_found, listed, numbers, words
from tests.support.ptx.wgmma_case import BEGIN, ISSUE, VISIBLE, WAIT, Operands, Tile, Wgmma, image_of, launch
from tinygrad_nv.ptx.emulator import Emulator

CASE = Wgmma(64, 16, "f32", "bf16", "bf16")
REGISTERS = replace(CASE, a_major=None)
FENCE, COMMIT = "wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\n"


def operands(seed: int = 1, case: Wgmma = CASE) -> tuple[Operands, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b = integers(rng, case.a, (64, case.k)), integers(rng, case.b, (case.k, case.n))
    c = rng.integers(-9, 10, (64, case.n))
    return Operands(a, b, words(c, case.d)), decode(a, case.a) @ decode(b, case.b)


def run(body: str, case: Wgmma = CASE, seed: int = 0,
        **options: object) -> tuple[np.ndarray, set[str], list[str]]:
    """D, kinds of findings and their messages."""
    got, report = launch(case, operands(case=case)[0], body, seed, **options)  # type: ignore[arg-type]
    return numbers(got, case.d), kinds_found(report), [finding.message for finding in report.findings]


def right(case: Wgmma = CASE, times: int = 1) -> np.ndarray:
    x, product = operands(case=case)
    return times * product + numbers(x.c, case.d)


ONE = CASE.instruction("%da", "%db") + "\n"
FROM_REGISTERS = REGISTERS.instruction(listed("a", 4), "%db") + "\n"
TOUCH = "add.f32 %d3, %d3, 0f00000000;\n"
NARROW = replace(CASE, n=8).instruction("%da", "%db") + "\n"
BEGIN_ONE = VISIBLE + FENCE + ONE
GOOD = BEGIN_ONE + COMMIT + WAIT
AGAIN = ONE.replace(", 1, 1, 1,", ", 0, 1, 1,")
WAIT_BUT_ONE = "wgmma.wait_group.sync.aligned 1;\n"
READ = "mov.b32 %x, %d5;\n"
FLIP = "xor.b32 %a1, %a1, 0;\n"
WITH_A = FROM_REGISTERS + COMMIT + WAIT
# name → (case, body with the mistake, cured body, words of the finding)
PAIRS = {
    "read before wait": (CASE, BEGIN_ONE + COMMIT + READ + WAIT, GOOD + READ, "is read while"),
    "read after too small a wait": (
        CASE, BEGIN_ONE + COMMIT + WAIT_BUT_ONE + READ + WAIT,
        BEGIN_ONE + COMMIT + COMMIT + WAIT_BUT_ONE + READ + WAIT, "is read while"),
    "read between issue and commit": (
        CASE, BEGIN_ONE + READ + COMMIT + WAIT, VISIBLE + READ + FENCE + ONE + COMMIT + WAIT,
        "is read while"),
    "accumulator written in flight": (
        CASE, BEGIN_ONE + COMMIT + "mov.b32 %d7, 0;\n" + WAIT, GOOD, "an accumulator of a wgmma"),
    "A written in flight": (
        REGISTERS, VISIBLE + FENCE + FROM_REGISTERS + COMMIT + FLIP + WAIT, VISIBLE + FENCE + WITH_A + FLIP,
        "part of A"),
    "no fence at all": (CASE, VISIBLE + ONE + COMMIT + WAIT, GOOD, "without a wgmma.fence"),
    "accumulator written after the fence": (
        CASE, VISIBLE + FENCE + TOUCH + ONE + COMMIT + WAIT, VISIBLE + TOUCH + FENCE + ONE + COMMIT + WAIT,
        "accumulators were written"),
    "A written after the fence": (
        REGISTERS, VISIBLE + FENCE + FLIP + WITH_A, VISIBLE + FLIP + FENCE + WITH_A,
        "registers of A were written"),
    "no fence between stages": (
        CASE, GOOD + TOUCH + AGAIN + COMMIT + WAIT, GOOD + TOUCH + FENCE + AGAIN + COMMIT + WAIT,
        "accumulators were written"),
    "accumulator read after the fence": (
        CASE, VISIBLE + FENCE + READ + ONE + COMMIT + WAIT, VISIBLE + READ + FENCE + ONE + COMMIT + WAIT,
        "accumulators were read"),
    "no fence after a read": (
        CASE, GOOD + READ + AGAIN + COMMIT + WAIT, GOOD + READ + FENCE + AGAIN + COMMIT + WAIT,
        "accumulators were read"),
    "another shape in flight": (
        CASE, BEGIN_ONE + NARROW + COMMIT + WAIT, GOOD + FENCE + NARROW + COMMIT + WAIT, "another shape"),
    "not committed": (CASE, BEGIN_ONE, GOOD, "commit_group and"),
    "not waited for": (CASE, BEGIN_ONE + COMMIT, GOOD, "wait_group is missing"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PAIRS)
def test_hazards_and_their_cures(name: str, seed: int) -> None:
    case, wrong, cured, said = PAIRS[name]
    _, found, messages = run(wrong, case, seed)
    assert "wgmma-hazard" in found
    assert any(said in message for message in messages), messages
    _, found, messages = run(cured, case, seed)
    assert not found, messages


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_is_reported_without_checks(name: str) -> None:
    case, wrong, _, _ = PAIRS[name]
    assert not run(wrong, case, check=False)[1]


def test_accumulators_hold_nan_while_in_flight() -> None:
    got, _, _ = run(VISIBLE + FENCE + ONE + COMMIT + "mov.b32 %x, %d0;\n" + WAIT + "mov.b32 %d1, %x;\n")
    assert np.isnan(got[:, 1::8]).sum() > 0


@pytest.mark.parametrize(("count", "ok"), [(8, True), (9, False)])
def test_more_than_seven_groups_may_stay_pending(count: int, ok: bool) -> None:
    chain = VISIBLE + FENCE + ONE + COMMIT + 8 * COMMIT
    _, found, _ = run(chain + f"wgmma.wait_group.sync.aligned {count};\n" + READ + WAIT)
    assert found == (set() if ok else {"wgmma-hazard"})


def test_chains_stay_in_flight_until_the_last_is_waited_for() -> None:
    chain = VISIBLE + FENCE + 3 * (ONE + COMMIT)
    got, found, _ = run(chain + "wgmma.wait_group.sync.aligned 2;\nwgmma.wait_group.sync.aligned 0;\n")
    assert not found
    np.testing.assert_array_equal(got, right(times=3))
    _, found, _ = run(chain + "wgmma.wait_group.sync.aligned 1;\nmov.b32 %x, %d0;\n" + WAIT)
    assert found == {"wgmma-hazard"}


def test_two_sets_of_accumulators_complete_apart() -> None:
    """The first set may be read when its own group is waited for."""
    other = CASE.instruction("%da", "%db", d="e") + "\n"
    zeros = "".join(f"mov.b32 %e{i}, 0;\n" for i in range(32))
    body = (".reg .b32 %e<33>;\n" + zeros + BEGIN_ONE + COMMIT
            + other + COMMIT + "wgmma.wait_group.sync.aligned 1;\nadd.f32 %d0, %d0, 0f3f800000;\n" + WAIT
            + "add.f32 %d0, %d0, %e0;\n")
    got, found, messages = run(body)
    assert not found, messages
    x, product = operands()
    want = product + numbers(x.c, "f32")
    rows = np.arange(64) % 16 < 8
    want[np.ix_(rows, range(0, 8, 2))] += 1 + product[np.ix_(rows, range(0, 8, 2))]
    np.testing.assert_array_equal(got, want)


def test_operands_are_read_late() -> None:
    """Shared memory overwritten before wait_group: a race, and wrong numbers."""
    smash = "bar.sync 0;\nmov.u32 %s, smem;\nst.shared.b32 [%s], 0x3f803f80;\n"
    body = VISIBLE + FENCE + ONE + COMMIT + smash + WAIT
    got, found, messages = run(body)
    assert any("a wgmma's read" in message and "not ordered" in message for message in messages), messages
    assert (got != right()).any()
    cured = VISIBLE + FENCE + ONE + COMMIT + WAIT + smash
    got, found, messages = run(cured)
    assert not found, messages
    np.testing.assert_array_equal(got, right())


def test_waiting_frees_operands_of_the_whole_warpgroup() -> None:
    """One warp waits and lets another reuse shared memory: wgmma is one operation of four warps."""
    body = (VISIBLE + FENCE + ONE + COMMIT + WAIT
            + "shr.u32 %y, %t, 5;\nsetp.ne.u32 %q, %y, 0;\n@%q bra done;\n"
            "mov.u32 %s, smem;\nst.shared.b32 [%s], 0;\nst.shared.b32 [%s + 6144], 0;\ndone:\n")
    for seed in range(6):
        got, found, messages = run(body, seed=seed)
        assert not found, messages
        np.testing.assert_array_equal(got, right())


def test_operands_must_be_visible() -> None:
    fence, barrier = VISIBLE.splitlines(keepends=True)
    _, found, messages = run(barrier + FENCE + ONE + COMMIT + WAIT)
    assert found == {"proxy-fence"}, messages
    _, found, messages = run(fence + FENCE + ONE + COMMIT + WAIT)
    assert any("a wgmma's read" in message and "not ordered" in message for message in messages), messages


def test_uninitialized_operands() -> None:
    x, _ = operands()
    image = image_of(CASE, x)[:32768 + 4096]  # B has 8192 bytes
    _, report = launch(CASE, x, image=image, smem=65536)
    assert kinds_found(report) == {"uninitialized"}
    assert "as B" in report.findings[0].message


def test_operands_outside_shared_memory() -> None:
    x, _ = operands()
    _, report = launch(CASE, x, image=image_of(CASE, x)[:32768 + 4096])
    assert "out-of-bounds" in kinds_found(report)


@pytest.mark.parametrize(("span", "start"), [(128, 512), (128, 128), (64, 256), (64, 128), (32, 128)])
def test_tiles_must_begin_at_their_pattern(span: int, start: int) -> None:
    x, _ = operands()
    case = replace(CASE, b_span=span)
    left, tile = case.tiles()
    for at, wrong in ((start, True), (1024, False)):
        moved = Tile(tile.start + at, tile.leading, tile.stride, tile.span, tile.major)
        image = np.zeros(65536, np.uint8)
        assert left is not None
        left.place(image, x.a, 16)
        moved.place(image, x.b.T, 16)
        _, report = launch(case, x, image=image, tiles=(left, moved))
        assert kinds_found(report) == ({"misaligned"} if wrong else set()), report.findings


def test_steps_inside_the_span_are_aligned() -> None:
    """K steps of 32 bytes inside a 128-byte span, and M steps of 8 rows."""
    rng = np.random.default_rng(3)
    a, b = integers(rng, "bf16", (64, 64)), integers(rng, "bf16", (64, 64))
    image = np.zeros(98304, np.uint8)
    left, tile = Tile(0, 0, 1024, 128, "k"), Tile(32768, 0, 1024, 128, "k")
    left.place(image, a, 16)
    tile.place(image, b.T, 16)
    body = VISIBLE + FENCE + 4 * (ONE + "add.u64 %da, %da, 2;\nadd.u64 %db, %db, 2;\n") + COMMIT + WAIT
    x = Operands(a[:, :16], b[:16], words(np.zeros((64, 64)), "f32"))
    got, report = launch(CASE, x, body, image=image, tiles=(left, tile))
    assert not report.findings
    np.testing.assert_array_equal(numbers(got, "f32"), decode(a, "bf16") @ decode(b, "bf16"))
    b = integers(rng, "bf16", (16, 64))
    tile.place(image, b.T, 16)
    lower = Tile(32768 + 1024, 0, 1024, 128, "k")
    x = Operands(a[:, :16], b, x.c)
    narrow = replace(CASE, n=56)
    got, report = launch(narrow, replace(x, c=x.c[:, :56]), image=image, tiles=(left, lower))
    assert not report.findings
    np.testing.assert_array_equal(numbers(got, "f32"), decode(a[:, :16], "bf16") @ decode(b[:, 8:], "bf16"))


def test_part_of_a_warpgroup() -> None:
    text = BEGIN.format(results=33).replace(".reqntid 128", ".reqntid 32")
    text += ISSUE.format(instruction=ONE) + WAIT + "ret;\n}"
    emu = Emulator()
    zeros = emu.alloc(np.zeros(32768, np.uint8))
    left, right_tile = CASE.tiles()
    assert left is not None
    arguments = [zeros, zeros, emu.alloc(4), left.descriptor, right_tile.descriptor, 1024]
    report = emu.launch(text, 1, 32, arguments, dynamic_smem=65536)
    assert any("takes four warps" in finding.message for finding in report.findings)


def test_warps_that_issue_different_products() -> None:
    """A warp that waits for a group which another warp of its warpgroup never commits."""
    body = (VISIBLE + "shr.u32 %y, %t, 5;\nsetp.eq.u32 %q, %y, 2;\n@%q bra done;\n" + FENCE + ONE + COMMIT
            + WAIT + "done:\n")
    _, found, messages = run(body)
    assert "wgmma-hazard" in found
    assert any("same wgmma instructions" in message for message in messages), messages
