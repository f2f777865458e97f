"""Comparisons and selections of integers on the emulator, and forms of arithmetic that PTX does not have."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.ptx.lanewise import UNSIGNED, apply, apply1, integers, typed
from tinygrad_nv.errors import PTXError

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")


def widths(kind: str) -> int:
    """Bits of a type."""
    return int(kind[1:])


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b}


def comparisons(kind: str) -> list[str]:
    """Those the type has."""
    if kind[0] == "b": return ["eq", "ne"]
    return [*list(COMPARISONS)[:6], *(list(COMPARISONS)[6:] if kind[0] == "u" else [])]


@pytest.mark.parametrize("kind", [*INTEGERS, "b16", "b32", "b64"])
def test_comparisons(kind: str) -> None:
    """setp and set of integers, each comparison, with Boolean operations and both destinations."""
    n = widths(kind)
    a, b = integers(n, 256, 1), integers(n, 256, 2)
    b[::3] = a[::3]
    c = np.arange(256) % 2 == 0
    for name in comparisons(kind):
        want = np.array([COMPARISONS[name](typed(int(x), kind), typed(int(y), kind)) for x,
                         y in zip(a, b, strict=True)])
        body = (f"setp.{name}.{kind} %d0, %s0, %s1; setp.{name}.and.{kind} %d1|%d2, %s0, %s1, %s2;"
                f"setp.{name}.or.{kind} %d3, %s0, %s1, !%s2; setp.{name}.xor.{kind} _|%d4, %s0, %s1, %s2;"
                f"set.{name}.u32.{kind} %d5, %s0, %s1; set.{name}.and.f32.{kind} %d6, %s0, %s1, %s2;")
        got = apply(body, [a, b, c], [np.bool_] * 5 + [np.uint32] * 2)
        wanted = (want, want & c, ~want & c, want | ~c, ~want ^ c)
        for result, expected in zip(got, wanted, strict=False):
            assert np.array_equal(result.astype(np.bool_), expected), name
        assert np.array_equal(got[5], np.where(want, 0xffffffff, 0))
        assert np.array_equal(got[6], np.where(want & c, 0x3f800000, 0))


@pytest.mark.parametrize("kind", ["b16", "s32", "u64", "f32", "f64"])
def test_selections(kind: str) -> None:
    """selp by a predicate, slct by a sign; -0 counts as positive, NaN as negative."""
    n = widths(kind)
    a, b, p = integers(n, 256, 1), integers(n, 256, 2), np.arange(256) % 3 == 0
    by = integers(32, 256, 3)
    by[:4] = (0x80000000, 0x7fc00000, 0x80000001, 0)
    body = (f"selp.{kind} %d0, %s0, %s1, %s2; slct.{kind}.s32 %d1, %s0, %s1, %s3;"
            f"slct.{kind}.f32 %d2, %s0, %s1, %s3;"
            f"slct.ftz.{kind}.f32 %d3, %s0, %s1, %s3;")
    got = apply(body, [a, b, p, by], [UNSIGNED[n // 8]] * 4)
    numbers, ints = by.view(np.float32), by.view(np.int32)
    flushed = np.where(np.abs(numbers) < 2.0**-126, np.float32(0), numbers)
    for result, choice in zip(got, (p, ints >= 0, numbers >= 0, flushed >= 0), strict=True):
        assert np.array_equal(result, np.where(choice, a, b))


# **** errors ****

@pytest.mark.parametrize("line", ["add.f32x2 %d0, %s0, %s0", "mul.s32 %d0, %s0, %s0", "add.s64 %d0, %s0, %s0",
                                  "add.rn.s32 %d0, %s0, %s0", "add.s32 %d0, %s0",
                                  "bfe.b32 %d0, %s0, %s0, %s0",
                                  "setp.num.s32 %q0, %s0, %s0", "setp.s32 %q0, %s0, %s0",
                                  "add.s32 5, %s0, %s0",
                                  "redux.sync.min.b32 %d0, %s0, -1", "cvt.f32.e4m3 %d0, %s0",
                                  "mov.b64 %w0, {%s0}",
                                  "frobnicate.b32 %d0, %s0"])
def test_what_does_not_exist(line: str) -> None:
    """Forms and operands that PTX does not have are refused with their line."""
    with pytest.raises(PTXError) as error: apply1(f"{line};", np.zeros(1, np.uint32), result=np.uint32)
    assert error.value.line > 0
    assert line.split()[0] in str(error.value)
