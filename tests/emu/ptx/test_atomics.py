"""atom and red: every operation and type against numpy and torch, order among threads, and
synchronisation."""
from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.ptx.kernel_texts import found, run, sound, words
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator

RNG = np.random.default_rng(2)
SHARED = ".shared .align 16 .b8 cell[64];\n"
DTYPES = {"u": np.uint32, "s": np.int32, "b": np.uint32}
INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor}
CASES = [(op, kind) for op in ("min", "max") for kind in ("u32", "s32", "u64", "s64")]
CASES += [("add", kind) for kind in ("u32", "s32", "u64")]
CASES += [(op, kind) for op in ("and", "or", "xor") for kind in ("b32", "b64")]


def dtype_of(kind: str) -> np.dtype:
    """The numpy type of a PTX integer type."""
    return np.dtype(("i" if kind[0] == "s" else "u") + str(int(kind[1:]) // 8))


def integers(kind: str, count: int) -> np.ndarray:
    """Random elements of the whole range."""
    info = np.iinfo(dtype_of(kind))
    return RNG.integers(info.min, info.max, count, dtype_of(kind), endpoint=True)


def body(opcode: str, bits: int, space: str) -> str:
    """Each thread applies its element of %a1 to the first of %a0 (or to its copy in shared memory) and
    stores what was there to %a2."""
    register, size, shared = "%d" if bits == 64 else "%r", bits // 8, "shared" in space
    old, mine, seen = f"{register}3", f"{register}4", f"{register}5"
    copy = f"ld.global.b{bits} {old}, [%a0]; st.shared.b{bits} [cell], {old}; bar.sync 0;"
    back = f"ld.shared.b{bits} {old}, [cell]; st.global.b{bits} [%a0], {old};"
    return f"""{copy if shared else ""}
        mad.wide.u32 %d1, %t, {size}, %a1; mad.wide.u32 %d2, %t, {size}, %a2; ld.global.b{bits} {mine}, [%d1];
        {opcode} {seen}, [{"cell" if shared else "%a0"}], {mine};
        bar.sync 0; setp.ne.u32 %p1, %t, 0; @%p1 bra DONE; {back if shared else ""}
        DONE: st.global.b{bits} [%d2], {seen};"""


@pytest.mark.sampled(22)
@pytest.mark.parametrize("space", [".global", ".shared", "", ".shared::cluster"])
@pytest.mark.parametrize(("operation", "kind"), CASES)
def test_integers_in_every_space(operation: str, kind: str, space: str) -> None:
    """64 threads on one element: the end is that of any order; each sees what some order leaves before it."""
    first, values = integers(kind, 1), integers(kind, 64)
    emu = Emulator(seed=3)
    a, b, c = emu.alloc(first), emu.alloc(values), emu.alloc(values.nbytes)
    text = body(f"atom{space}.{operation}.{kind}", int(kind[1:]), space)
    sound(run(text, a, b, c, emu=emu, block=64, variables=SHARED))
    expected = functools.reduce(INTEGERS[operation], values, first)
    assert np.array_equal(words(a, dtype_of(kind)), expected)
    old = words(c, dtype_of(kind))
    assert first[0] in old
    if operation in ("add", "xor"):  # the chain of old values visits every thread once
        chain, at = first[0], {int(v): i for i, v in enumerate(old)}
        for _ in range(64): chain = INTEGERS[operation](chain, values[at[int(chain)]])
        assert chain == expected[0]


def test_red_changes_memory_alone() -> None:
    emu = Emulator()
    a = emu.alloc(np.zeros(2, np.uint32))
    sound(run("""red.global.add.u32 [%a0], %t; red.relaxed.gpu.global.max.s32 [%a0+4], %t;
                 atom.global.or.b32 _, [%a0+4], 64;""", a, emu=emu))
    assert words(a).tolist() == [496, 95]


def test_shared_memory_of_another_cta() -> None:
    """All threads of a cluster of two add to a word of rank 0's shared memory."""
    emu = Emulator()
    a = emu.alloc(np.zeros(1, np.uint32))
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    sound(run(f"""or.b32 %r3, %t, %c; setp.eq.u32 %p1, %r3, 0; @%p1 st.shared.u32 [cell], 1000; {meet}
        mov.u32 %r1, cell; and.b32 %r1, %r1, 0xffffff; mad.lo.u32 %r2, %c, 100, %t;
        red.shared::cluster.add.u32 [%r1], %r2; {meet}
        @%p1 ld.shared.u32 %r4, [cell]; @%p1 st.global.u32 [%a0], %r4;""", a, emu=emu, grid=2, cluster=2,
              variables=SHARED))
    assert words(a)[0] == 1000 + 2 * 496 + 3200


def test_exchange_and_compare_and_swap() -> None:
    emu = Emulator()
    a, b = emu.alloc(np.array([100, 7], np.uint32)), emu.alloc(4 * 32)
    sound(run("""add.u32 %r1, %t, 1; mad.wide.u32 %d1, %t, 4, %a1;
                 atom.global.exch.b32 %r2, [%a0], %r1; atom.global.cas.b32 %r3, [%a0+4], 7, %r1;
                 st.global.u32 [%d1], %r2;""", a, b, emu=emu))
    last, swapped = words(a)
    assert sorted([*words(b).tolist(), int(last)]) == sorted([100,
                                                              *range(1, 33)])  # nothing lost, nothing twice
    assert 1 <= swapped <= 32


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_exactly_one_thread_swaps(kind: str) -> None:
    emu = Emulator(seed=5)
    letter, size = {"b16": ("h", 2), "b32": ("r", 4), "b64": ("d", 8)}[kind], int(kind[1:]) // 8
    r = letter[0]
    a, b = emu.alloc(np.zeros(size, np.uint8)), emu.alloc(np.zeros(32, np.uint32))
    sound(run(f"""cvt.u{kind[1:]}.u32 %{r}1, %t; add.u{kind[1:]} %{r}1, %{r}1, 1; mov.b{kind[1:]} %{r}9, 0;
        atom.global.cas.{kind} %{r}2, [%a0], %{r}9, %{r}1; cvt.u32.u{kind[1:]} %r3, %{r}2;
        mad.wide.u32 %d1, %t, 4, %a1; st.global.u32 [%d1], %r3;""", a, b, emu=emu))
    winner = int.from_bytes(a.numpy().tobytes(), "little")
    assert sorted(words(b).tolist()) == [0] + [winner] * 31
    assert 1 <= winner <= 32


def test_the_seed_chooses_the_order_of_lanes() -> None:
    winners = set()
    for seed in range(8):
        emu = Emulator(seed=seed)
        a = emu.alloc(np.zeros(1, np.uint32))
        run("add.u32 %r1, %t, 1; atom.global.cas.b32 %r2, [%a0], 0, %r1;", a, emu=emu)
        winners.add(int(words(a)[0]))
    assert len(winners) > 3


def test_inc_and_dec_wrap() -> None:
    emu = Emulator()
    a, b = emu.alloc(np.array([0, 0, 50], np.uint32)), emu.alloc(4 * 32)
    sound(run("""atom.global.inc.u32 %r1, [%a0], 9; atom.global.dec.u32 %r2, [%a0+4], 9;
                 red.global.dec.u32 [%a0+8], 20;
                 mad.wide.u32 %d1, %t, 4, %a1; st.global.u32 [%d1], %r1;""", a, b, emu=emu))
    # inc: 0 … 9, 0 …; dec from 0: 9 … 0, 9 …; dec from 50: 20, then down to 0 and 20 again
    assert words(a).tolist() == [32 % 10, (0 - 32) % 10, (20 - 31) % 21]
    assert sorted(words(b).tolist()) == sorted(i % 10 for i in range(32))


def test_128_bits() -> None:
    emu = Emulator()
    first = np.array([1, 2, 3, 4], np.uint64)
    a, b = emu.alloc(first), emu.alloc(32)
    sound(run("""mov.b64 %d1, 10; mov.b64 %d2, 20; mov.b128 %q1, {%d1, %d2};
        atom.global.exch.b128 %q2, [%a0], %q1; st.global.b128 [%a1], %q2;
        mov.b64 %d5, 3; mov.b64 %d6, 5; mov.b128 %q3, {%d5, %d6};
        atom.global.cas.b128 %q4, [%a0+16], %q3, %q1;
        mov.b64 %d6, 4; mov.b128 %q3, {%d5, %d6}; atom.global.cas.b128 %q4, [%a0+16], %q3, %q1;
        st.global.b128 [%a1+16], %q4;""", a, b, emu=emu, block=1))
    assert words(a, np.uint64).tolist() == [10, 20, 10, 20]
    assert words(b, np.uint64).tolist() == [1, 2, 3, 4]


# **** floating point ****

def test_float_sums_are_exact_on_integers() -> None:
    for kind, dtype, letter in (("f32", np.float32, "r"), ("f64", np.float64, "d")):
        emu = Emulator()
        values = RNG.integers(-1000, 1000, 64).astype(dtype)
        size = values.itemsize
        a, b = emu.alloc(np.zeros(1, dtype)), emu.alloc(values)
        sound(run(f"mad.wide.u32 %d1, %t, {size}, %a1; ld.global.b{8 * size} %{letter}2, [%d1]; "
                  f"red.global.add.{kind} [%a0], %{letter}2;", a, b, emu=emu, block=64))
        assert words(a, dtype)[0] == values.sum()


def test_global_f32_flushes_subnormals_and_shared_does_not() -> None:
    tiny = np.array([3, 0x80000005, 0x00800000, 0x80800001],
                    np.uint32)   # subnormals, and normals whose sum is one
    emu = Emulator()
    a, b = emu.alloc(tiny), emu.alloc(16)
    sound(run("""ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%a0];
        st.shared.b32 [cell], %r1; st.shared.b32 [cell+4], %r3;
        red.shared.add.f32 [cell], %r2; red.shared.add.f32 [cell+4], %r4;
        red.global.add.f32 [%a0], %r2; red.global.add.f32 [%a0+8], %r4;
        ld.shared.v2.b32 {%r5, %r6}, [cell]; st.global.v2.b32 [%a1], {%r5, %r6};""", a, b, emu=emu, block=1,
              variables=SHARED))
    assert words(a)[[0, 2]].tolist() == [0, 0x80000000]
    assert words(b)[:2].tolist() == [0x80000002, 0x80000001]


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_sums_round_once(kind: str, dtype: torch.dtype) -> None:
    """Random bits of both signs and all exponents against torch, which rounds each sum once."""
    codes = RNG.integers(0, 1 << 16, (2, 2048), dtype=np.uint16)
    x, y = (torch.from_numpy(c.view(np.int16)).view(dtype) for c in codes)
    expected = (x + y).view(torch.int16).numpy().view(np.uint16)
    nan = torch.isnan(x + y).numpy()
    for opcode, per in ((f"atom.global.add.noftz.{kind} %h2, [%d1], %h1;", 1),
                        (f"atom.global.add.noftz.{kind}x2 %r2, [%d1], %r1;", 2)):
        emu = Emulator()
        a, b = emu.alloc(codes[0]), emu.alloc(codes[1])
        register, size = "h" if per == 1 else "r", 2 * per
        sound(run(f"""mov.u32 %r9, %ntid.x; mad.lo.u32 %r9, %c, %r9, %t; mad.wide.u32 %d1, %r9, {size}, %a0;
                      mad.wide.u32 %d2, %r9, {size}, %a1; ld.global.b{8 * size} %{register}1, [%d2];
                      {opcode}""", a, b, emu=emu, grid=16 // per, block=128))
        got = words(a, np.uint16)
        assert np.array_equal(got[~nan], expected[~nan])
        assert (got[nan] == 0x7fff).all()


@pytest.mark.parametrize(("opcode", "kind", "count", "packed"), [
    ("add", "f32", 2, 1), ("add", "f32", 4, 1), ("add.noftz", "f16", 8, 1), ("add.noftz", "bf16", 4, 1),
    ("add.noftz", "f16x2", 4, 2), ("max.noftz", "bf16x2", 2, 2), ("min.noftz", "f16", 2, 1)])
def test_vectors(opcode: str, kind: str, count: int, packed: int) -> None:
    """Integer values in floats: exact, and the order does not matter."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind.removesuffix("x2")]
    first, values = torch.from_numpy(RNG.integers(-9, 9, (2, count * packed))).to(dtype)
    size = first.element_size() * packed
    letter, ways = ("r" if size == 4 else "h"), min(count, 4)
    given, old = ([f"%{letter}{base + i}" for i in range(count)] for base in (0, 8 if letter == "h" else 16))
    emu = Emulator()
    buffers = [emu.alloc(t.contiguous().view(torch.uint8).numpy()) for t in (first, values)]
    out = emu.alloc(buffers[0].nbytes)
    text = ""
    for at in range(0, count, ways):
        text += f"ld.global.v{ways}.b{8 * size} {{{', '.join(given[at:at + ways])}}}, [%a1+{size * at}];"
    vector = f"{opcode}.v{count}.{kind}"
    text += f"atom.global.{vector} {{{', '.join(old)}}}, [%a0], {{{', '.join(given)}}};"
    for at in range(0, count, ways):
        text += f"st.global.v{ways}.b{8 * size} [%a2+{size * at}], {{{', '.join(old[at:at + ways])}}};"
    sound(run(f"{text} red.global.{vector} [%a0], {{{', '.join(given)}}};", *buffers, out, emu=emu, block=1))
    once = {"add": torch.add, "max": torch.maximum, "min": torch.minimum}[opcode.split(".")[0]]
    expected = once(once(first, values), values)
    assert buffers[0].numpy().tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()
    assert out.numpy().tobytes() == first.contiguous().view(torch.uint8).numpy().tobytes()


def test_half_min_and_max_of_nan_and_zeros() -> None:
    nan, pz, nz, one = 0x7e00, 0x0000, 0x8000, 0x3c00
    emu = Emulator()
    a = emu.alloc(np.array([nan, one, pz, nz, nan, one, pz, nz], np.uint16))
    sound(run("""mov.b16 %h1, 0x3c00; mov.b16 %h2, 0x7e00; mov.b16 %h3, 0x8000; mov.b16 %h4, 0;
        red.global.min.noftz.v4.f16 [%a0], {%h1, %h2, %h3, %h4};
        red.global.max.noftz.v4.f16 [%a0+8], {%h1, %h2, %h3, %h4};""", a, emu=emu, block=1))
    assert words(a, np.uint16).tolist() == [one, one, nz, nz, one, one, pz, pz]


# **** synchronisation ****

LOCK = """LOCK: atom.global.gpu{acquire}.cas.b32 %r1, [%a0], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra LOCK;
    ld.global.u32 %r2, [%a1]; add.u32 %r2, %r2, 1; st.global.u32 [%a1], %r2;
    atom.global.gpu{release}.exch.b32 %r3, [%a0], 0;"""


@pytest.mark.parametrize("seed", range(3))
def test_a_spin_lock_protects_plain_data(seed: int) -> None:
    emu = Emulator(seed=seed)
    a, b = emu.alloc(np.zeros(1, np.uint32)), emu.alloc(np.zeros(1, np.uint32))
    sound(run(LOCK.format(acquire=".acquire", release=".release"), a, b, emu=emu, grid=16, block=1))
    assert words(b)[0] == 16


def test_a_relaxed_lock_does_not() -> None:
    for acquire, release in ((".relaxed", ".release"), (".acquire", ".relaxed"), ("", "")):
        emu = Emulator()
        a, b = emu.alloc(np.zeros(1, np.uint32)), emu.alloc(np.zeros(1, np.uint32))
        found(run(LOCK.format(acquire=acquire, release=release), a, b, emu=emu, grid=16, block=1), "race")


LAST = """mad.wide.u32 %d1, %c, 4, %a1; add.u32 %r1, %c, 1; st.global.u32 [%d1], %r1; {fence}
    atom{order}.global.inc.u32 %r2, [%a0], 7; {fence} setp.ne.u32 %p1, %r2, 7; @%p1 bra DONE;
    mov.u32 %r3, 0; mov.u32 %r4, 0;
    SUM: mad.wide.u32 %d2, %r4, 4, %a1; ld.global.u32 %r5, [%d2]; add.u32 %r3, %r3, %r5; add.u32 %r4, %r4, 1;
    setp.lt.u32 %p2, %r4, 8; @%p2 bra SUM; st.global.u32 [%a2], %r3;
    DONE:"""


@pytest.mark.parametrize(("order", "fence", "ok"),
                         [(".acq_rel.gpu", "", True), ("", "membar.gl;", True), ("", "", False),
                                                    ("", "fence.acq_rel.gpu;", True), (".release.gpu", "",
                                                                                       False),
                                                    (".acquire.gpu", "", False)])
def test_the_last_cta_sums_what_all_wrote(order: str, fence: str, ok: bool) -> None:
    emu = Emulator()
    a, b, c = emu.alloc(np.zeros(1, np.uint32)), emu.alloc(32), emu.alloc(np.zeros(1, np.uint32))
    report = run(LAST.format(order=order, fence=fence), a, b, c, emu=emu, grid=8, block=1)
    if ok: sound(report)
    else: found(report, "race")
    if ok: assert words(c)[0] == 36
    assert words(a)[0] == 0


def test_plain_and_atomic_accesses_race() -> None:
    emu = Emulator()
    a = emu.alloc(np.zeros(1, np.uint32))
    found(run("setp.eq.u32 %p1, %c, 0; @%p1 st.global.u32 [%a0], 1; @!%p1 red.global.add.u32 [%a0], 1;", a,
              emu=emu, grid=2,
              block=1), "race")
    sound(run("red.global.add.u32 [%a0], 1;", a, emu=emu, grid=2, block=64))


# **** what is wrong ****

def test_findings() -> None:
    emu = Emulator()
    a, b = emu.alloc(np.zeros(4, np.uint32)), emu.alloc(16)
    found(run("red.global.add.u32 [%a0+16], 1;", a, emu=emu, block=1), "out-of-bounds",
          "atomic access of 4 bytes")
    found(run("red.global.add.u64 [%a0+4], 1;", a, emu=emu, block=1), "misaligned")
    found(run("red.global.add.v4.f32 [%a0+16], {%r1, %r1, %r1, %r1};", a, emu=emu, block=1), "out-of-bounds",
          "16 bytes")
    found(run("red.global.add.u32 [%a0], 1;", b, emu=emu, block=1), "uninitialized")
    assert words(a).tolist() == [0] * 4


@pytest.mark.parametrize(("text", "message"), [
    ("atom.global.add.b32 %r1, [%a0], 1;", "no instruction"),
    ("atom.global.min.f32 %r1, [%a0], %r2;", "no instruction"),
    ("atom.global.u32 %r1, [%a0], 1;", "no instruction"),
    ("atom.local.add.u32 %r1, [%a0], 1;", "no instruction"),
    ("atom.global.cas.b32 %r1, [%a0], 1;", "no new value"),
    ("red.global.add.v4.f32 [%a0], {%r1, %r2};", "2 registers")])
def test_what_ptx_does_not_allow(text: str, message: str) -> None:
    emu = Emulator()
    with pytest.raises(PTXError, match=message): run(text, emu.alloc(16), emu=emu, block=1)
