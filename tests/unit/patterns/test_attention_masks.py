"""Attention in graphs: masks, scores and extents that vary, as its spec has them. Nothing runs."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from tinygrad.uop.ops import UOp

from tests.support.patterns.attention_graph import (
    CAUSAL,
    F32,
    SCALED,
    B,
    D,
    H,
    S,
    T,
    attended,
    by_hand,
    found,
    of,
    operands,
    positions,
    scores,
    use,
)
from tinygrad_nv import Tensor, Variable, dtypes
from tinygrad_nv.patterns.attention.fitted import fit_form
from tinygrad_nv.patterns.positions import AffineForm, linear
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.expression import loads, show


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None: use(monkeypatch)


# **** masks ****

MASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Band, int, int]] = {
    "causal": (lambda r, c: c <= r, CAUSAL, 0, S),
    "causal, turned": (lambda r, c: r >= c, CAUSAL, 0, S),
    "strictly before": (lambda r, c: c < r, Band(last=-1), 0, S),
    "not after": (lambda r, c: (c > r).logical_not(), CAUSAL, 0, S),
    "at the end": (lambda r, c: c <= r + (S - T), CAUSAL, S - T, S),
    "window": (lambda r, c: (c <= r) & (c > r - 7), Band(-6, 0), 0, S),
    "window by distance": (lambda r, c: (r - c >= 0) & (r - c < 7), Band(-6, 0), 0, S),
    "window at the end": (lambda r, c: (c <= r + 16) & (c > r + 9), Band(-6, 0), 16, S),
    "around": (lambda r, c: (c - r < 4) & (r - c < 4), Band(-6, 0), 3, S),
    "from": (lambda r, c: c >= r, Band(first=0), 0, S),
    "twice": (lambda r, c: (c * 2 <= r * 2 + 1), CAUSAL, 0, S),
    "keys": (lambda r, c: c < 17, FULL, 0, 17),
    "keys and causal": (lambda r, c: (c < 17) & (c <= r), CAUSAL, 0, 17),
    "in floats": (lambda r, c: c.float() <= r.float(), CAUSAL, 0, S),
    "all": (lambda r, c: c >= 0, FULL, 0, S),
}


@pytest.mark.sampled(21)
@pytest.mark.parametrize("name", [name for name in MASKS if name != "all"])
@pytest.mark.parametrize("applied", ["where", "added", "filled"])
def test_masks_that_are_bands(name: str, applied: str):
    condition, band, start, keys = MASKS[name]
    seen = condition(*positions())
    x, v = scores()
    if applied == "where": x = seen.where(x, -float("inf"))
    elif applied == "added": x = x + seen.where(0, -float("inf"))
    else: x = x.masked_fill(seen.logical_not(), -float("inf"))
    spec = found(attended(x, v))
    assert (spec.band, spec.start, spec.s_kv) == (band, start, keys)
    assert show(spec.score) == "(sum * 0.125)"


def test_of_two_ends_the_nearer_counts():
    x, v = scores()
    r, c = positions()
    seen = (c <= r + 5) & (c <= r) & (c > r - 9) & (c > r - 7)
    assert found(attended(seen.where(x, -float("inf")), v)).band == Band(-6, 0)


def test_triangles_of_the_library():
    x, v = scores()
    full = Tensor.full((T, S), -float("inf"), buffer=False)
    assert found(attended(x + full.triu(1), v)).band == CAUSAL
    seen = Tensor.ones(T, S, dtype=dtypes.bool, buffer=False).tril()
    assert found(attended(seen.where(x, -float("inf")), v)).band == CAUSAL
    q, k, v = operands()
    assert found(q.scaled_dot_product_attention(k, v, is_causal=True)).band == CAUSAL


def ones(*shape: int) -> Tensor: return Tensor.ones(*shape, buffer=False)


TRIANGLES: dict[str, Callable[[Tensor], Tensor]] = {
    "== 0": lambda x: x.masked_fill(ones(T, S).tril() == 0, -float("inf")),
    "integers": lambda x: x.masked_fill(ones(T, S).int().tril() == 0, -float("inf")),
    "bool()": lambda x: ones(T, S).tril().bool().where(x, -float("inf")),
    "not": lambda x: x.masked_fill(ones(T, S).tril().bool().logical_not(), -float("inf")),
    "> 0": lambda x: (ones(T, S).tril() > 0).where(x, -float("inf")),
    "one minus": lambda x: x.masked_fill((1 - ones(T, S).tril()).bool(), -float("inf")),
    "of a slice": lambda x: x.masked_fill(ones(1, 1, 64, 64).tril()[:, :, :T, :S] == 0,
                                          -float("inf"))}


@pytest.mark.parametrize("name", TRIANGLES)
def test_triangles_of_numbers_are_bands(name: str):
    """What decides is one of two constants."""
    x, v = scores()
    spec = found(attended(TRIANGLES[name](x), v))
    assert (spec.band, spec.score) == (CAUSAL, SCALED)


def test_a_mask_before_the_scale():
    q, k, v = operands()
    rows, columns = positions()
    x = (columns <= rows).where((q @ k.transpose(-1, -2)).float(), -float("inf")) * 0.125
    spec = found(attended(x, v))
    assert (spec.band, show(spec.score)) == (CAUSAL, "(sum * 0.125)")


@pytest.mark.parametrize("long", [300, 1000])
def test_positions_of_long_sequences(long: int):
    q, k, v = of(1, 1, long, D), of(1, 1, long, D), of(1, 1, long, D)
    assert found(q.scaled_dot_product_attention(k, v, is_causal=True)).band == CAUSAL


def test_a_prefix_that_all_see_is_a_condition():
    x, v = scores()
    rows, columns = positions()
    spec = found(attended(((columns <= rows) | (columns < 5)).where(x, -float("inf")), v))
    assert spec.band == FULL
    assert show(spec.score).startswith("where(or((((n - m) + -1) < 0), ((n + -5) < 0)), (sum * 0.125)")


def test_blocks_of_a_sequence_are_bands_and_conditions():
    """A band, and beside it a condition in memory."""
    x, v = scores()
    rows, columns = positions()
    seen = (columns <= rows) & of(B, 1, 1, S, dtype=dtypes.bool)
    spec = found(attended(seen.where(x, -float("inf")), v))
    assert spec.band == CAUSAL
    (load,) = loads(spec.score)
    assert (load.dtype, load.m, load.n, load.batch) == (dtypes.bool, 0, 1, (S, 0, 0))


def test_masks_in_memory():
    q, k, v = operands()
    for mask, strides in ((of(T, S), (S, 1, (0, 0, 0))), (of(H, T, S), (S, 1, (0, T * S, 0))),
                          (of(B, 1, 1, S), (0, 1, (S, 0, 0))),
                          (of(T, S, dtype=dtypes.bool), (S, 1, (0, 0, 0))),
                          (of(B, H, T, S, dtype=F32), (S, 1, (0, T * S, 0)))):
        spec = found(q.scaled_dot_product_attention(k, v, attn_mask=mask))
        (load,) = loads(spec.score)
        assert (load.m, load.n, load.batch, load.dtype) == (*strides, mask.dtype)
        assert spec.band == FULL


def test_conditions_of_values_in_memory():
    """Documents packed into one sequence."""
    x, v = scores()
    mine, theirs = of(B, 1, T, 1, dtype=dtypes.int32), of(B, 1, 1, S, dtype=dtypes.int32)
    spec = found(attended((mine == theirs).where(x, -float("inf")), v))
    assert [(load.m, load.n) for load in loads(spec.score)] == [(1, 0), (0, 1)]


def test_large_negative_numbers_are_no_hidden_columns():
    """Rows that see nothing are not the same."""
    x, v = scores()
    rows, columns = positions()
    spec = found(attended((columns <= rows).where(x, -1e9), v))
    assert spec.band == FULL
    assert "-1e+09" in show(spec.score)


# **** scores ****

def test_soft_caps():
    x, v = scores()
    spec = found(attended((x / 30).tanh() * 30, v))
    assert "exp2" in show(spec.score)
    assert show(spec.score).endswith("* 30)")


def test_alibi():
    x, v = scores()
    rows, columns = positions()
    spec = found(attended(x + of(H, 1, 1, dtype=F32) * (columns - rows).float(), v))
    assert show(spec.score) == "((sum * 0.125) + (x0[b] * (n - m).f32))"
    assert spec.batch == (B, H, 1)


def test_biases_are_loaded():
    x, v = scores()
    spec = found(attended(x + of(H, T, S), v))
    (load,) = loads(spec.score)
    assert (load.batch, load.m, load.n) == ((0, T * S, 0), S, 1)


def test_terms_of_a_row_alone_do_not_matter():
    x, v = scores()
    spec = found(attended(x - x.max(-1, keepdim=True) * 0.5, v))
    assert show(spec.score) == "(sum * 0.125)"


# **** symbolic ****

def symbolic(rows: int | UOp, start: UOp, window: int | None = None, heads: int = 2) -> Tensor:
    """A step over a cache: rows at start, start + 1, …"""
    q, cache = of(1, H, 16, D)[:, :, :rows], of(2, 1, heads, 128, D)[:, :, :, :start + rows]
    k, v = cache[0], cache[1]
    x = q.reshape(1, heads, H // heads, rows, D) @ k.unsqueeze(2).transpose(-1, -2) * 0.125
    r, c = Tensor.arange(rows).reshape(rows, 1) + start, Tensor.arange(start + rows).reshape(1, start + rows)
    seen = c <= r if window is None else (c <= r) & (c > r - window)
    return seen.where(x, -float("inf")).softmax(-1) @ v.unsqueeze(2)


def bound(name: str, least: int, most: int) -> UOp: return Variable(name, least, most).bind(least)


def test_a_start_that_varies():
    spec = found(symbolic(8, bound("start", 0, 100)))
    assert (spec.symbolic, spec.s_q, spec.s_kv, spec.start) == (("s_kv", "start"), 8, 108, 100)
    assert (spec.band, spec.score, spec.batch) == (CAUSAL, SCALED, (1, 2, 2))


def test_rows_and_a_start_that_vary():
    spec = found(symbolic(bound("rows", 1, 16), bound("start", 0, 100)))
    assert (spec.symbolic, spec.s_q, spec.s_kv, spec.start) == (("s_q", "s_kv", "start"), 16, 116, 100)
    assert spec.band == CAUSAL


def test_a_window_of_a_varying_start():
    assert found(symbolic(8, bound("start", 0, 100), 5)).band == Band(-4, 0)
    spec = found(symbolic(1, bound("start", 0, 100), 5))
    assert (spec.s_q, spec.band.first, spec.symbolic) == (1, -4, ("s_kv", "start"))


def test_keys_that_vary():
    n = bound("n", 1, 64)
    q, k, v = of(1, H, 8, D), of(1, H, 64, D)[:, :, :n], of(1, H, 64, D)[:, :, :n]
    spec = found(by_hand(q, k, v))
    assert (spec.symbolic, spec.s_kv, spec.band) == (("s_kv",), 64, FULL)


def test_a_mask_that_ends_the_keys():
    """A whole cache, of which so many are written."""
    n = bound("n", 1, S)
    x, v = scores()
    _, columns = positions()
    spec = found(attended((columns < n).where(x, -float("inf")), v))
    assert (spec.symbolic, spec.s_kv, spec.band) == (("s_kv",), S, FULL)


# **** positions ****

def test_positions_are_fitted():
    assert fit_form(Tensor.arange(9).uop) == AffineForm(0, (1,))
    assert fit_form(Tensor.arange(3, 90, 7).uop) == AffineForm(3, (7,))
    assert fit_form(Tensor.arange(20, 0, -2).uop) == AffineForm(20, (-2,))
    assert fit_form((Tensor.arange(40) * Tensor.arange(40)).uop) is None
    assert fit_form(Tensor.arange(700).uop) == AffineForm(0, (1,))
    assert fit_form((Tensor.arange(9).float() + 1).uop) == AffineForm(1, (1,))
    # what wraps, is cut or is rounded is not affine, though it is before that
    assert fit_form((Tensor.arange(300).cast(dtypes.uint8) + 1).uop) is None
    assert fit_form(((Tensor.arange(9) * 0.5).cast(dtypes.int32) * 2).uop) is None
    assert fit_form((Tensor.arange(4000).cast(dtypes.float16) + 1).uop) is None


def test_extents_of_variables():
    n, m = Variable("n", 1, 9), Variable("m", 1, 9)
    assert linear(5) == AffineForm(5, ())
    assert linear(n * 2 + m + 3) == AffineForm(3, (), (("m", 1), ("n", 2)))
    assert linear(n * m) is None


