"""Masks of loops over blocks (masks.py): which loops end early, and that nothing else changes. Programs are
run by the interpreter, with the pass and without."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language import attention as A
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import linear as L
from tinygrad_nv.tile.language import memory as M
from tinygrad_nv.tile.language import program as P
from tinygrad_nv.tile.language import reductions as R
from tinygrad_nv.tile.language.interpret import run
from tinygrad_nv.tile.language.ir import Op, Program, TensorParameter
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.language.values import cast

F32, S32, U32 = dtypes.float32, dtypes.int32, dtypes.uint32
ROWS, COLUMNS, D = 16, 16, 8


def program(fn: Any, queries: int, keys: int, **more: Any) -> Program:
    tensors = [TensorParameter("o", F32, (queries, D), True), TensorParameter("q", F32, (queries, D)),
               TensorParameter("k", F32, (keys, D)), TensorParameter("v", F32, (keys, D))]
    given = {each.name: M.TensorRef(each) for each in tensors}
    return P.trace_program(fn, {**given, **more}, tensors, TileSchedule(), (-(-queries // ROWS),), None)


def plain(monkeypatch: pytest.MonkeyPatch, fn: Any, *sizes: int, **more: Any) -> Program:
    with monkeypatch.context() as patch:
        patch.setattr(P, "clamp_masks", lambda made: made)
        return program(fn, *sizes, **more)


def loop(made: Program) -> Op: return next(op for op in made.body.walk() if op.name == "for")


def minima(made: Program) -> list[Any]:
    return [op.result for op in made.body.ops if op.name == "apply" and op.attributes["fn"] == "min"]


def arrays(made: Program) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {each.name: random.integers(-3, 4, each.shape).astype(np.float32) for each in made.tensors}


def same(made: Program, slow: Program) -> None:
    given = arrays(made)
    np.testing.assert_array_equal(run(made, given)["o"], run(slow, given)["o"])


COUNTERS = {
    "reduce": lambda s: R.reduce(E.zeros((ROWS, 4), F32), 1, lambda a, b: a + b + 1.0)[:, None],
    "xor": lambda s: cast(E.fill((ROWS, 1), 5, S32) ^ E.fill((ROWS, 1), 3, S32), F32),
    # -448 for -inf
    "e4m3": lambda s: E.where(cast(cast(R.max_(s, 1), dtypes.fp8e4m3), F32) == -E.INF, 0.0, 1.0)[:, None],
    # 0 in float32
    "subnormal": lambda s: E.where(E.zeros((ROWS, 1), F32) < E.fill((ROWS, 1), 1e-60, F32), 0.0, 1.0),
}


def online_step(m, l, s, axis=1):
    """Returns maxima and sums after a block, its probabilities, and what sums before it are scaled by."""
    top = E.maximum(m, R.max_(s, 1))
    base = E.where(top == -E.INF, 0.0, top)
    p, old = E.exp2_nonpositive(s - base[:, None]), E.exp2_nonpositive(m - base)
    return top, l * old + R.sum_(p, axis), p, old


def causal(s, rows, block): return E.where(A.col_index(block) <= A.row_index(rows), s, -E.INF)


def online(q, k, v, o, shift=0, strict=False, counted="", start=0.0, mixed=False, stored=False):
    rows = C.block(C.program_id(0) * ROWS, ROWS)
    acc, m, l = E.fill((ROWS, D), start), E.fill((ROWS,), -E.INF), E.zeros((ROWS,), F32)
    times = E.zeros((ROWS, 1), F32)
    for block in K.blocks(k.shape[0], COLUMNS):
        s = L.dot(q[rows, :], k[block, :].T)
        seen = A.col_index(block) < A.row_index(rows) + shift if strict else \
            A.col_index(block) <= A.row_index(rows) + shift
        s = E.where(seen, s, -E.INF)
        if counted: times = times + (COUNTERS[counted](s) if counted in COUNTERS else 1.0)
        if mixed: times = times + R.sum_(E.where(s == -E.INF, 1.0, 0.0), 0)[:, None]
        if stored: o[rows, :] = acc
        m, l, p, old = online_step(m, l, s)
        acc = L.dot(p, v[block, :], acc * old[:, None])
    o[rows, :] = acc / E.where(l == 0, 1.0, l)[:, None] + times


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 5, -15, -16, 40])
@pytest.mark.parametrize(("queries", "keys"), [(48, 48), (48, 80), (50, 33)])
def test_attention_ends_with_the_diagonal(monkeypatch: pytest.MonkeyPatch, queries: int, keys: int,
                                          shift: int, strict: bool) -> None:
    made = program(online, queries, keys, shift=shift, strict=strict)
    slow = plain(monkeypatch, online, queries, keys, shift=shift, strict=strict)
    assert loop(made).operands[1] in minima(made)
    assert any(op.name == "if" for op in loop(made).regions[0].ops)
    same(made, slow)


def test_masked_blocks_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in them reaches nothing, which it does without the bound."""
    made, slow = program(online, 48, 48), plain(monkeypatch, online, 48, 48)
    given = arrays(made)
    given["k"][16:] = given["v"][16:] = np.nan
    assert np.isfinite(run(made, given)["o"][:16]).all()
    assert np.isnan(run(slow, given)["o"][:16]).any()


def seeds(q, k, v, o):
    rows = C.block(C.program_id(0) * ROWS, ROWS)
    acc, m, l = E.zeros((ROWS, D), F32), E.fill((ROWS,), -E.INF), E.zeros((ROWS,), F32)
    for block in K.blocks(k.shape[0], COLUMNS):
        S = L.dot(q[rows, :], k[block, :].T) * 0.5
        A.mask_causal(S, A.row_index(rows), A.col_index(block))
        p, m_c, l_c = A.softmax_online(S)
        acc, m, l = A.softmax_accumulate(acc, m, l, p, v[block, :], m_c, l_c)
    o[rows, :] = acc / l[:, None]


@pytest.mark.parametrize(("queries", "keys"), [(48, 48), (40, 40), (32, 70)])
def test_mask_causal_and_softmax_online(monkeypatch: pytest.MonkeyPatch, queries: int, keys: int) -> None:
    made, slow = program(seeds, queries, keys), plain(monkeypatch, seeds, queries, keys)
    assert loop(made).operands[1] is not loop(slow).operands[1]
    assert loop(made).operands[1] in minima(made)
    same(made, slow)


@pytest.mark.parametrize("what", [{"counted": "one"}, *({"counted": each} for each in COUNTERS),
                                  {"start": 1.0}, {"mixed": True}, {"stored": True}],
                         ids=lambda each: "-".join(map(str, *each.items())))
def test_loops_whose_iterations_do_something(monkeypatch: pytest.MonkeyPatch, what: dict[str, Any]) -> None:
    """They count, begin with sums, mix rows, or store: the loop goes to its end. Blocks wholly inside go
    without the mask all the same."""
    made, slow = program(online, 48, 48, **what), plain(monkeypatch, online, 48, 48, **what)
    assert minima(made) == []
    same(made, slow)


def two_maxima(q, k, v, o):
    rows = C.block(C.program_id(0) * ROWS, ROWS)
    acc, m = E.zeros((ROWS, D), F32), E.fill((ROWS,), -E.INF)
    for block in K.blocks(k.shape[0], COLUMNS):
        s = causal(L.dot(q[rows, :], k[block, :].T), rows, block)
        m = E.maximum(m, R.max_(s + 1.0, 1))
        acc = acc + R.max_(s, 1)[:, None]
    o[rows, :] = acc + m[:, None]


def of_other_scores(q, k, v, o):
    rows = C.block(C.program_id(0) * ROWS, ROWS)
    acc, m = E.zeros((ROWS, D), F32), E.fill((ROWS,), -E.INF)
    for block in K.blocks(k.shape[0], COLUMNS):
        s = L.dot(q[rows, :], k[block, :].T)
        m = E.maximum(m, R.max_(causal(s, rows, block), 1))
        acc = L.dot(E.exp2(s), v[block, :], acc)
    o[rows, :] = acc + m[:, None]


def of_other_rows(q, k, v, o):
    """A row without a key has probabilities of others in its sum, which -inf for its maximum forgets."""
    rows = C.block(C.program_id(0) * ROWS, ROWS)
    m, l = E.fill((ROWS,), -E.INF), E.zeros((ROWS,), F32)
    for block in K.blocks(k.shape[0], COLUMNS):
        s = L.dot(q[rows, :], k[block, :].T)
        s = E.where(A.col_index(block) <= A.row_index(rows) - 8, s, -E.INF)
        m, l = online_step(m, l, s, 0)[:2]
    o[rows, :] = E.zeros((ROWS, D), F32) + l[:, None]


def of_large_maxima(q, k, v, o):
    """What a maximum is multiplied by makes it infinite: inf - inf is not 0."""
    rows = C.block(C.program_id(0) * ROWS, ROWS)
    m, t = E.fill((ROWS,), -E.INF), E.zeros((ROWS,), F32)
    for block in K.blocks(k.shape[0], COLUMNS):
        s = causal(L.dot(q[rows, :], k[block, :].T), rows, block)
        top = E.maximum(m, R.max_(s, 1))
        t = t + E.where(m == -E.INF, 0.0, E.where(top * 1e38 - m * 1e38 != 0.0, 1.0, 0.0))
        m = top
    o[rows, :] = E.zeros((ROWS, D), F32) + t[:, None]


def of_a_factor_of_0(q, k, v, o):
    """1e-12 is 0 in float16: -inf becomes NaN."""
    rows = C.block(C.program_id(0) * ROWS, ROWS)
    m, l = E.fill((ROWS,), -E.INF), E.zeros((ROWS,), F32)
    for block in K.blocks(k.shape[0], COLUMNS):
        s = causal(cast(L.dot(q[rows, :], k[block, :].T), dtypes.float16), rows, block)
        s = cast(s * 1e-12, F32)
        m, l = online_step(m, l, s)[:2]
    o[rows, :] = E.zeros((ROWS, D), F32) + l[:, None]


@pytest.mark.parametrize("fn", [two_maxima, of_other_scores, of_other_rows, of_large_maxima,
                                of_a_factor_of_0])
def test_scores_that_reach_results_by_another_way(monkeypatch: pytest.MonkeyPatch,
                                                  fn: Callable[..., None]) -> None:
    made, slow = program(fn, 48, 48), plain(monkeypatch, fn, 48, 48)
    assert minima(made) == []
    same(made, slow)


MOST = 2**31 - 1


def behind(rows, block): return A.col_index(block) > MOST
def up_to(rows, block): return A.col_index(block) <= MOST


def unsigned(rows, block):
    columns = E.zeros((ROWS, COLUMNS), U32) + cast(block.start, U32)
    return columns - 32 < E.fill((ROWS, COLUMNS), 5, U32)


@pytest.mark.parametrize("seen", [behind, up_to, unsigned])
def test_bounds_that_do_not_fit_int32(monkeypatch: pytest.MonkeyPatch, seen: Callable[..., Any]) -> None:
    """2^31 is no int32, and an unsigned difference wraps."""
    def sums(q, k, v, o):
        rows = C.block(C.program_id(0) * ROWS, ROWS)
        m, l = E.fill((ROWS,), -E.INF), E.zeros((ROWS,), F32)
        for block in K.blocks(C.program_id(0) * ROWS + ROWS, COLUMNS):
            s = E.where(seen(rows, block), L.dot(q[rows, :], k[block, :].T), -E.INF)
            m, l = online_step(m, l, s)[:2]
        o[rows, :] = E.zeros((ROWS, D), F32) + l[:, None]
    made, slow = program(sums, 48, 48), plain(monkeypatch, sums, 48, 48)
    same(made, slow)


def test_the_bound_is_ahead_of_the_loop_and_names_its_line() -> None:
    made = program(online, 48, 48)
    bound = next(op for op in made.body.ops if loop(made).operands[1] in op.results)
    assert bound.line is not None
    assert bound.line.file == __file__
    assert "if" in str(made)
