"""Loops in C that are computed strip by strip (strips.py), and columns that masks hide from a strip
(hidden.py)."""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.gemm.blocked.blocks import registers
from tinygrad_nv.cpu.language import kernel as target
from tinygrad_nv.cpu.language.hidden import find_hidden
from tinygrad_nv.cpu.language.strips import WIDE, Strips, find_strips, strip_rows
from tinygrad_nv.language import *
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.language.ir import Op, Program

RANDOM = np.random.default_rng(5)
LEVELS = isa.there()
HERE = isa.of_level("portable")


def attend(q: Any, k: Any, v: Any, T: Any, seen: Any, change: Any = None, add: float = 0.0) -> Any:
    """Attention with a mask of its own, a function of scores, and a number added to all weights of rows that
    see something of a block."""
    acc, m, l = tile.zeros((T.m, T.d), f32), tile.full((T.m,), -INF), tile.zeros((T.m,), f32)
    queries = tile.load(q, T.m, T.d)
    for block in tile.range_n(k.shape[0], T.n):
        s = tile.dot(queries, tile.load(k, block, T.d).T)
        if change is not None: s = change(s)
        s = tile.where(seen(tile.row_index(), tile.col_index(block)), s, -INF)
        if block.stop is not None: s = tile.where(tile.col_index(block) < k.shape[0], s, -INF)
        top = tile.maximum(m, tile.max(s, 1))
        base = tile.where(top == -INF, 0.0, top)
        p, old = tile.exp(s - base[:, None]), tile.exp(m - base)
        if add: p = tile.where((tile.max(s, 1) == -INF)[:, None], 0.0, p + add)
        acc = tile.dot(tile.cast(p, v.dtype), tile.load(v, block, T.d), acc * old[:, None])
        m, l = top, l * old + tile.sum(p, 1)
    return acc / tile.where(l == 0.0, 1.0, l)[:, None]


@kernel.schedule(Schedule(block=(80, 64)))
def causal(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    return attend(q, k, v, tile.context(), lambda r, c: c <= r + 3)


@kernel.schedule(Schedule(block=(80, 64)))
def window(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    return attend(q, k, v, tile.context(), lambda r, c: (c <= r) & (c > r - 40))


@kernel.schedule(Schedule(block=(80, 64)))
def capped(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    return attend(q, k, v, tile.context(), lambda r, c: c <= r, lambda s: 3.0 * tile.tanh(s / 3.0))


@kernel.schedule(Schedule(block=(80, 64)))
def lifted(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    return attend(q, k, v, tile.context(), lambda r, c: c <= r, add=0.5)


@kernel.schedule(Schedule(block=(80, 64)))
def shaped(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    return attend(q, k, v, tile.context(), lambda r, c: c * c <= r)


@kernel.schedule(Schedule(block=(80, 64)))
def wrap(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    """The sums of all rows but the first wrap around: these see everything."""
    return attend(q, k, v, tile.context(), lambda r, c: r + (2**31 - 1) < c)


@kernel.schedule(Schedule(block=(80, 64)))
def fold(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    """The second 40 rows have the indices of the first."""
    index = tile.broadcast_to(tile.arange(40)[:, None], (2, 40, 1)).reshape(80, 1)
    return attend(q, k, v, tile.context(), lambda r, c: index <= c)


@kernel.schedule(Schedule(block=(80, 64)))
def repeat(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    """All columns have the index 0."""
    return attend(q, k, v, tile.context(), lambda r, c: tile.arange(1)[:, None] < 1)


def arrays(rows: int, keys: int, d: int) -> list[np.ndarray]:
    return [RANDOM.standard_normal((each, d)).astype(np.float32) for each in (rows, keys, keys)]


def tensors(arrays: list[np.ndarray], dtype: Any) -> list[Tensor]:
    return [Tensor(x).cast(dtype).realize() for x in arrays]


def loop(made: Program) -> Op: return next(op for op in made.body.walk() if op.name == "for")


def strips(made: Program) -> Strips | None: return find_strips(loop(made), HERE)


def run_at(made: Program, level: str, given: list[np.ndarray], out: np.ndarray) -> np.ndarray:
    """The result of a kernel for an instruction set."""
    own = dict(zip("qkv", given, strict=True))
    arrays = (own.get(each.name, out) for each in made.tensors)
    load(target.build(made, isa.of_level(level)))(*arrays, threads=1)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fn", [causal, window, capped, lifted, shaped, wrap, fold, repeat],
                         ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(("rows", "keys", "d"), [(80, 64, 32), (173, 150, 40), (90, 300, 17), (161, 64, 16)])
def test_attention(level: str, fn: Any, rows: int, keys: int, d: int):
    """Rows and keys that end within a strip or a block, heads of any size."""
    given = arrays(rows, keys, d)
    made = fn.program(*tensors(given, f32))
    assert strips(made) is not None
    got = run_at(made, level, given, np.full((rows, d), 7.0, np.float32))
    np.testing.assert_allclose(got, fn.interpret(*tensors(given, f32)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=str)
@pytest.mark.parametrize("fn", [causal, window], ids=lambda fn: fn.__name__)
def test_operands_of_every_width(dtype: Any, fn: Any):
    """Pairs of bfloat16 have an odd number of columns, too."""
    given = tensors(arrays(173, 150, 33), dtype)
    np.testing.assert_allclose(fn(*given).numpy(), fn.interpret(*given), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(("fn", "bounds"), [(causal, 1), (window, 2), (capped, 1), (lifted, 0), (shaped, 0),
                                            (wrap, 1), (fold, 0), (repeat, 0)],
                         ids=lambda one: getattr(one, "__name__", str(one)))
def test_columns_that_are_hidden(fn: Any, bounds: int):
    """Masks bound columns where they compare indices, and where what they hide adds nothing."""
    made = fn.program(*tensors(arrays(240, 256, 16), f32))
    found, makers = strips(made), {each: op for op in made.body.walk() for each in op.results}
    assert found is not None
    hidden = find_hidden(loop(made).regions[0], found, makers, HERE.lanes)
    assert len(hidden.bounds if hidden else ()) == bounds


def test_hidden_columns_are_not_multiplied():
    """Of a strip above the diagonal nothing is read, NaN included: strips have 16 rows at most."""
    given = arrays(80, 64, 16)
    want = causal.interpret(*tensors(given, f32))[:16]
    for each in given[1:]: each[32:] = np.nan
    got = run_at(causal.program(*tensors(given, f32)), LEVELS[-1], given, np.zeros((80, 16), np.float32))
    np.testing.assert_allclose(got[:16], want, rtol=1e-5, atol=1e-6)


@kernel.schedule(Schedule(block=(64, 64)))
def mix(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"], *, axis: int) -> OTile["S", "D", f32]:
    """Sums of columns are subtracted from rows, or those of rows from columns."""
    T = tile.context()
    acc = tile.zeros((T.m, T.d), f32)
    for block in tile.range_n(k.shape[0], T.n):
        s = tile.dot(tile.load(q, T.m, T.d), tile.load(k, block, T.d).T)
        more = tile.sum(s, axis)
        acc = tile.dot(s - (more if axis else more[:, None]), tile.load(v, block, T.d), acc)
    return acc


@kernel.schedule(Schedule(block=(64, 64)))
def turned(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    """What a dot makes is what the next one multiplies by."""
    T = tile.context()
    acc = tile.zeros((T.m, T.d), f32)
    for block in tile.range_n(k.shape[0], T.n):
        s = tile.dot(tile.load(q, T.m, T.d), tile.load(k, block, T.d).T)
        acc = tile.dot(tile.load(v, block, tile.block(0, 64)), s, acc) if T.d == T.n else acc
    return acc


@kernel.schedule(Schedule(block=(64, 64)))
def stored(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"], out: OTile["S", "N", f32]):
    T = tile.context()
    for block in tile.range_n(k.shape[0], T.n):
        s = tile.dot(tile.load(q, T.m, T.d), tile.load(k, block, T.d).T)
        out[T.m, block] = tile.exp(s * 0.1)


@pytest.mark.parametrize(("fn", "more"), [(mix, {"axis": 0}), (mix, {"axis": 1}), (turned, {}), (stored, {})],
                         ids=lambda one: getattr(one, "__name__", str(one)))
def test_rows_that_belong_together(fn: Any, more: dict[str, int]):
    """No strips where an operation reads several rows of a score, or the loop stores."""
    given = tensors(arrays(128, 128, 64), f32)
    assert strips(fn.program(*given, **more)) is None
    np.testing.assert_allclose(fn(*given, **more).numpy(), fn.interpret(*given, **more), rtol=1e-3, atol=1e-2)


def test_what_a_loop_reads_is_packed_ahead_of_it():
    text = causal.source(*tensors(arrays(80, 256, 16), f32)).rpartition("NOINLINE void body")[2]
    before, _, inside = text.partition("for (s32")
    assert "pack_a" in before
    assert "pack_a" not in inside
    assert len(re.findall("pack_b", inside)) == 2


@kernel.schedule(Schedule(block=(64, 64)))
def converted(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    """The left operand changes from iteration to iteration in a loop within a loop."""
    T = tile.context()
    acc = tile.zeros((T.m, T.d), f32)
    for turn in tile.range(3):
        own = tile.load(q, T.m, T.d) * tile.cast(turn, f32)
        for block in tile.range_n(k.shape[0], T.n):
            s = tile.exp(tile.dot(own, tile.load(k, block, T.d).T) * 0.1)
            acc = tile.dot(s, tile.load(v, block, T.d), acc)
    return acc


def test_a_loop_within_a_loop():
    given = tensors(arrays(100, 100, 32), f32)
    np.testing.assert_allclose(converted(*given).numpy(), converted.interpret(*given), rtol=1e-4, atol=1e-3)


@kernel.schedule(Schedule(block=(64, 64)))
def masked(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"], *,
           again: float) -> OTile["S", "D", f32]:
    """Scores are masked in a branch, and read again behind it."""
    T = tile.context()
    acc = tile.zeros((T.m, T.d), f32)
    for block in tile.range_n(k.shape[0], T.n):
        s = tile.dot(tile.load(q, T.m, T.d), tile.load(k, block, T.d).T)
        seen = tile.where(tile.col_index(block) <= tile.row_index(), s, 0.25)
        if again: seen = seen + s * again
        acc = tile.dot(seen, tile.load(v, block, T.d), acc)
    return acc


@pytest.mark.parametrize("again", [0.0, 2.0])
def test_a_branch_writes_in_place_what_nothing_else_reads(again: float):
    given = tensors(arrays(128, 128, 32), f32)
    np.testing.assert_allclose(masked(*given, again=again).numpy(), masked.interpret(*given, again=again),
                               rtol=1e-4, atol=1e-3)
    assert ("else {\n}" in masked.source(*given, again=again)) == (not again)


@kernel(grid=(2,))
def count_beyond(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"], out: OTile["S", f32]):
    """What lies beyond the keys is 0, of which the power is 1."""
    rows = tile.block(tile.program_id(0) * 64, 64)
    out[rows] = tile.sum(tile.exp(tile.dot(q[rows, :], k[tile.block(0, 128), :].T)), 1) + v[0, 0]


@pytest.mark.parametrize("level", LEVELS)
def test_columns_beyond_an_operand_are_zero(level: str):
    given = arrays(128, 20, 16)
    got = run_at(count_beyond.program(*tensors(given, f32)), level, given, np.zeros(128, np.float32))
    np.testing.assert_allclose(got, count_beyond.interpret(*tensors(given, f32)), rtol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_strips_keep_units_busy(level: str):
    """Two units of four cycles have ten sums at least."""
    own = isa.of_level(level)
    rows, columns = registers(strip_rows(own), WIDE, own)
    assert strip_rows(own) % rows == 0
    assert rows * columns >= 10 * own.lanes


@kernel(grid=(3,))
def spread(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"], out: OTile["S", "D", f32],
           late: OTile["S", "D", f32], total: OTile["S", f32], *, ahead: int, summed: bool):
    """Stores blocks of 80 rows, once more `ahead` rows earlier, or with means of a block."""
    rows = tile.block(tile.program_id(0) * 80, 80)
    first = rows - ahead if ahead else rows
    acc = tile.zeros((80, k.shape[1]), f32)
    for block in tile.range_n(k.shape[0], 64):
        s = tile.exp(tile.dot(q[rows, :], k[block, :].T) * 0.1)
        acc = tile.dot(s, v[block, :], acc)
    out[rows, :] = acc
    late[first, :] = acc * 2.0 + tile.sum(acc, 0)[None, :] / 80 if summed else acc * 2.0
    total[rows] = tile.sum(acc, 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("ahead", "summed"), [(0, False), (20, False), (-20, False), (0, True)])
def test_strips_end_where_stores_do(level: str, ahead: int, summed: bool):
    """Rows beyond the last are computed where an earlier place is written too, or a sum reads them: what lies
    beyond q is 0, of which the power is 1."""
    given = arrays(170, 128, 32)
    own = dict(zip("qkv", given, strict=True))
    made = spread.program(*tensors(given, f32), ahead=ahead, summed=summed)
    written = {name: np.zeros(shape, np.float32)
               for name, shape in (("out", (170, 32)), ("late", (170, 32)), ("total", 170))}
    load(target.build(made, isa.of_level(level)))(*(own.get(each.name, written.get(each.name))
                                                    for each in made.tensors), threads=1)
    want = spread.interpret(*tensors(given, f32), ahead=ahead, summed=summed)
    for name, each in zip(("out", "late", "total"), want, strict=True):
        np.testing.assert_allclose(written[name], each, rtol=2e-5, atol=1e-4)


def test_strips_end_with_the_last_row():
    """The strips of a block end with the tensor's rows, where its rows alone are stored."""
    given = tensors(arrays(170, 128, 32), f32)
    for summed in (False, True):
        text = spread.source(*given, ahead=0, summed=summed).rpartition("NOINLINE void body")[2]
        assert ("smaller(80, 170 - " in text) != summed
    whole = tensors(arrays(240, 128, 32), f32)
    assert "smaller(80, " not in spread.source(*whole, ahead=0, summed=False)


@kernel(grid=(2,))
def ended(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"], ends: KTile["E", int32],
          out: OTile["S", "D", f32], total: OTile["S", f32], *, shift: int, more: int):
    """Stores rows ahead of the first of `ends`, sums of those ahead of the second; `more`: the last rows
    too."""
    rows, end, other = tile.block(tile.program_id(0) * 80, 80), ends[0], ends[1]
    acc = tile.zeros((80, k.shape[1]), f32)
    for block in tile.range_n(k.shape[0], 64):
        s = tile.exp(tile.dot(q[rows, :], k[block, :].T) * 0.1)
        acc = tile.dot(s, v[block, :], acc)
    seen, counted = rows.indices + shift < end, rows.indices + shift < other
    if more: seen = seen | (rows.indices >= q.shape[0] - more)
    tile.store(out, acc, rows, tile.block(0, k.shape[1]), mask=seen[:, None])
    tile.store(total, tile.sum(acc, 1), rows, mask=counted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("ends", "shift", "more"), [
    ((0, 0), 0, 0), ((17, 90), 0, 0), ((90, 17), 0, 0), ((200, 3), 0, 0), ((30, 30), -9, 0),
    ((5, 5), 2**31 - 1, 0), ((5, 5), 0, 20)])
def test_rows_that_a_mask_ends(level: str, ends: tuple[int, int], shift: int, more: int):
    """Numbers of memory say how many; sums that wrap around, and an `or`, let later rows be stored."""
    given = [*arrays(150, 128, 32), np.array(ends, np.int32)]
    own = dict(zip(("q", "k", "v", "ends"), given, strict=True))
    rows = [*tensors(given[:3], f32), Tensor(given[3]).realize()]
    made = ended.program(*rows, shift=shift, more=more)
    written = {"out": np.zeros((150, 32), np.float32), "total": np.zeros(150, np.float32)}
    load(target.build(made, isa.of_level(level)))(*(own.get(each.name, written.get(each.name))
                                                    for each in made.tensors), threads=1)
    want = ended.interpret(*rows, shift=shift, more=more)
    for got, each in zip(written.values(), want, strict=True):
        np.testing.assert_allclose(got, each, rtol=2e-5, atol=1e-4)
    text = ended.source(*rows, shift=shift, more=more).rpartition("NOINLINE void body")[2]
    assert "larger(end" in text
