"""Division of a register by a constant: exact, and without a division."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.emulator import Emulator

POWERS = (1, 2, 128, 1 << 31)
OTHERS = (3, 5, 6, 7, 43, 100, 641, 6144, 12289, (1 << 16) + 1, (1 << 31) - 1, (1 << 31) + 1, (1 << 32) - 1)


def numbers(divisor: int) -> np.ndarray:
    """Where a quotient changes, and others."""
    last = (1 << 32) // divisor * divisor
    near = [at + by for at in (0, divisor, 7 * divisor, last, last - divisor, 1 << 31, 1 << 32)
            for by in (-1, 0, 1)]
    random = np.random.default_rng(divisor).integers(0, 1 << 32, 107)
    return np.array([*(at for at in near if 0 <= at < 1 << 32), *random], np.uint64)[:128].astype(np.uint32)


@pytest.mark.parametrize("divisor", [*POWERS, *OTHERS])
def test_a_constant_divisor_needs_no_division(divisor: int):
    values = numbers(divisor)
    kb = Kernel("divided", arch="sm_80", threads=128)
    out, given = kb.pointer("out"), kb.pointer("given")
    with kb.if_(kb.tid.x < len(values)):
        number = kb.ld("global", "u32", (given + kb.tid.x.to("u64") * 4).at())[0]
        kb.st("global", "u32", (out + kb.tid.x.to("u64") * 8).at(), [number // divisor, number % divisor])
    assert "div." not in kb.ptx()
    assert "rem." not in kb.ptx()
    emu = Emulator("sm_80")
    found = emu.alloc(8 * len(values))
    emu.launch(kb.ptx(), 1, 128, [found, emu.alloc(values)])
    quotients, rests = found.numpy().view(np.uint32).reshape(-1, 2).T
    np.testing.assert_array_equal(quotients, values // np.uint32(divisor))
    np.testing.assert_array_equal(rests, values % np.uint32(divisor))


@pytest.mark.parametrize("divisor", [1, 2, 128, 1 << 30])
def test_signed_numbers_are_rounded_towards_zero(divisor: int):
    near = [at + by for at in (-divisor, 0, divisor) for by in (-1, 0, 1)]
    values = np.array([*near, -(1 << 31), (1 << 31) - 1, -12345, 12345], np.int32)
    kb = Kernel("divided", arch="sm_80", threads=32)
    out, given = kb.pointer("out"), kb.pointer("given")
    with kb.if_(kb.tid.x < len(values)):
        number = kb.ld("global", "s32", (given + kb.tid.x.to("u64") * 4).at())[0]
        kb.st("global", "s32", (out + kb.tid.x.to("u64") * 8).at(), [number // divisor, number % divisor])
    assert "div." not in kb.ptx()
    emu = Emulator("sm_80")
    found = emu.alloc(8 * len(values))
    emu.launch(kb.ptx(), 1, 32, [found, emu.alloc(values)])
    expected = [(int(each / divisor), each - int(each / divisor) * divisor) for each in values.tolist()]
    assert found.numpy().view(np.int32).reshape(-1, 2).tolist() == [list(each) for each in expected]


def test_what_has_no_shorter_way_is_divided():
    kb = Kernel("divided", arch="sm_80", threads=32)
    signed, wide = kb.tid.x.to("s32"), kb.tid.x.to("u64")
    for value, divisor in ((signed, 3), (signed, -8), (wide, 3), (kb.tid.x, kb.tid.x), (kb.tid.x, 0)):
        _ = value // divisor
    for opcode, count in (("div.s32", 2), ("div.u64", 1), ("div.u32", 2)):
        assert kb.ptx().count(opcode) == count
