"""The sampler's kernels on the CPU against their bodies, bit by bit, and the tokens that come of them."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.support.engine.sampler_case import Case, logits_of
from tests.support.engine.selection_case import above, counted_rows, hard_rows, near_targets, weighted_rows
from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.target import host
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.worker.sampler import count_tokens
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.sampling import choose_part, choose_tokens, largest, tally_tokens
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.sampling.reference import token_of
from tinygrad_nv.tile.sampling.spec import NUMBERS, ChoiceSpec, CountSpec, FilterSpec, Number
from tinygrad_nv.tile.sampling.top_p import program as weighing
from tinygrad_nv.tile.templates import TABLE

LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512) if not isa.why_not(each.level)]
RNG = np.random.default_rng
pytestmark = pytest.mark.usefixtures("cpu_device")


def filtered(spec: FilterSpec, level: isa.ISA, x: np.ndarray, weights: np.ndarray, targets: np.ndarray,
             parts: int = 1, order: tuple[int, ...] | None = None) -> np.ndarray:
    """The bits of what a filter keeps; nothing is written behind it."""
    numbers = np.full((spec.rows, NUMBERS), np.nan, np.float32)
    numbers[:, spec.number] = targets
    target = replace(host(), isa=level)
    made = TABLE.build(spec, replace(TABLE.choose(spec, target), parts=parts), target)
    out = np.full(spec.rows * spec.size + 3, 77, np.float32)
    work = [np.full(made.workspace_bytes // 4, 77, np.uint32)] * bool(made.workspace_bytes)
    given = (x,) if spec.counted else (x, weights)
    rows = [np.broadcast_to(each, (spec.rows, spec.size)).copy() for each in given]
    load(made)(out, *work, *rows, numbers, order=order)
    assert (out[-3:] == 77).all()
    return out[:-3].view(np.uint32).reshape(spec.rows, spec.size)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("size", [5, 300, 1200])
def test_a_filter_is_exact_where_a_sum_is_nearly_the_target(level: isa.ISA, size: int):
    """Rows that are held, and one that is searched."""
    for alike in (False, True):
        x, weights, targets, kept = near_targets(size, alike)
        spec = FilterSpec(len(targets), size, Number.top_p, alike)
        for parts, order in ((1, None), (3, (2, 0, 1))):
            found = filtered(spec, level, x, weights, targets, parts, order)
            np.testing.assert_array_equal(found, kept.view(np.uint32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("size", [129, 1500, 9001])
def test_the_mass_is_found_wherever_it_lies(level: isa.ISA, size: int):
    x, weights, targets, kept = weighted_rows(size)
    found = filtered(FilterSpec(len(x), size, Number.top_p), level, x, weights, targets)
    np.testing.assert_array_equal(found, kept.view(np.uint32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("size", [129, 700, 9000])
def test_the_largest_are_counted_wherever_they_lie(level: isa.ISA, size: int):
    """Of rows that few blocks hold, of others, and of others whose largest share a place of blocks."""
    x, targets, kept = counted_rows(size, 128 if size < 9000 else 512)
    found = filtered(FilterSpec(len(x), size, Number.top_k, True), level, x, x, targets)
    np.testing.assert_array_equal(found, kept.view(np.uint32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "wrong"), [
    (1400, ("OVER", 0.3)), (1401, ("UNDER", 2.0)), (1402, ("CROWD", 1e9)), (1403, ("ROUNDS", 0))])
def test_an_estimate_that_is_wrong_is_given_up(size: int, wrong: tuple[str, float],
                                               monkeypatch: pytest.MonkeyPatch):
    """One that is too high, too low, or has too many logits within: sums of units tell."""
    monkeypatch.setattr(weighing, *wrong)
    x, weights, targets, kept = weighted_rows(size)
    found = filtered(FilterSpec(len(x), size, Number.top_p), host().isa, x, weights, targets)
    np.testing.assert_array_equal(found, kept.view(np.uint32))


def numbers_of(params: list[SamplingParams]) -> Tensor:
    return Tensor(np.stack([each.numbers(each.seed or 0) for each in params])).realize()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "alike"), [
    (129, False), *(pytest.param(n, alike, marks=pytest.mark.slow) for n in (1, 129, 2048, 32000)
                    for alike in (False, True) if (n, alike) != (129, False))])
def test_kernels_have_the_bits_of_their_bodies(size: int, alike: bool):
    x = Tensor(np.stack([logits_of(seed, size=size) for seed in range(3)])).realize()
    weights = x.softmax(-1).realize()
    drawn = [SamplingParams(top_k=k, top_p=p, seed=k << 40)
             for k, p in ((5, 0.1), (size // 2 + 1, 0.9), (0, 0.999999))]
    greedy, numbers = replace(drawn[1], temperature=0), numbers_of(drawn)
    places = Tensor([77, 0, 78], dtype=dtypes.int32).realize()

    def results() -> list[np.ndarray]:
        kept = largest(x, None if alike else weights, numbers, Number.top_k if alike else Number.top_p)
        choices = [choose_tokens(x, numbers_of([drawn[0], greedy, drawn[2]]), places),
                   choose_tokens(x, None, places)]
        return [kept.bitcast(dtypes.uint32).numpy(), *(each.numpy() for each in choices)]
    counted = explain(largest(x, None, numbers, Number.top_k))
    assert [k.template for k in counted.kernels] == ["counted_threshold"]
    assert [k.template for k in explain(choose_tokens(x, numbers, places)).kernels] == ["choice"]
    ours = results()
    with disabled(): theirs = results()
    for a, b in zip(ours, theirs, strict=True): np.testing.assert_array_equal(a, b)


def choose(spec: ChoiceSpec, level: isa.ISA, cut: int, logits: np.ndarray, *given: np.ndarray, parts: int = 1,
           order: tuple[int, ...] | None = None) -> np.ndarray:
    """What a choice makes in so many pieces of each row; nothing is written behind it."""
    target = replace(host(), isa=level)
    made = TABLE.build(spec, replace(TABLE.choose(spec, target), groups=cut, parts=parts), target)
    out = np.full(spec.rows + 1, 77, np.int32 if spec.first is None else np.uint64)
    if cut == 1: load(made)(out, logits, *given, order=order)
    else:
        between = np.full(2 * spec.rows * cut, 77, np.uint32)
        load(made.first)(between, logits, *given, order=order)
        load(made.second)(out, between)
    assert out[-1] == 77
    return out[:-1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(5, 1001), (1, 30000)])
def test_choices_do_not_depend_on_parts(level: isa.ISA, rows: int, size: int):
    spec, logits = ChoiceSpec(rows, size), RNG(0).standard_normal((rows, size)).astype(np.float32)
    # thrice the largest, at one place of two blocks and in different pieces
    logits[0, [size // 2, size // 2 + 320, size - 1]] = 50
    params = [SamplingParams(seed=7 + row, temperature=0 if row == 0 else 1) for row in range(rows)]
    numbers = np.stack([each.numbers(each.seed or 0) for each in params])
    places = np.arange(9, 9 + rows, dtype=np.int32)
    made = [choose(spec, level, parts, logits, numbers, places, parts=parts, order=order).tolist()
            for parts, order in ((1, None), (2, (1, 0)), (3, (2, 0, 1)))]
    assert made[0][0] == size // 2
    assert made[1] == made[2] == made[0]


def test_a_row_is_cut_in_pieces_for_threads():
    pieces = [TABLE.choose(spec, replace(host(), threads=4)).groups for spec in
              (ChoiceSpec(1, 1 << 17), ChoiceSpec(1, 1 << 14), ChoiceSpec(2, 1 << 17), ChoiceSpec(4, 1 << 17),
               ChoiceSpec(1, 1 << 17, False))]
    assert pieces == [4, 2, 2, 1, 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("draw", [False, True])
def test_what_is_no_number_is_told(cut: int, draw: bool):
    size = 20000
    x = np.zeros((1, size), np.float32)
    x[0, 19000] = np.nan
    given = [numbers_of([SamplingParams()]).numpy(), np.zeros(1, np.int32)] if draw else []
    assert choose(ChoiceSpec(1, size, draw), host().isa, cut, x, *given).tolist() == [size]
    numbers = numbers_of([SamplingParams()]) if draw else None
    with disabled(): assert choose_tokens(Tensor(x), numbers, Tensor([0], dtype=dtypes.int32)).item() == size


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("draw", [False, True])
@pytest.mark.parametrize("cut", [1, 2])
def test_parts_of_a_row_choose_as_the_whole_does(level: isa.ISA, draw: bool, cut: int):
    """Of vocabulary parts; with pieces and without."""
    size, part = (30000, 20008) if cut > 1 else (301, 104)
    x, keys = hard_rows(size), []
    numbers = np.stack([SamplingParams(seed=3 + i).numbers(3 + i) for i in range(len(x))])
    given = (numbers, np.arange(9, 9 + len(x), dtype=np.int32)) if draw else ()
    for first in range(0, size, part):
        own = x[:, first:first + part].copy()
        keys.append(choose(ChoiceSpec(*own.shape, draw, first), level, cut, own, *given))
        if not draw: assert (keys[-1] >> np.uint64(32)).tolist() == above(own)
    most = np.max(keys, 0)
    tokens = np.where(most >> np.uint64(32) == 0xFFFFFFFF, size, ~most & np.uint64(0xFFFFFFFF))
    assert tokens.tolist() == choose(ChoiceSpec(*x.shape, draw), level, cut, x, *given).tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("draw", [False, True])
def test_the_key_of_a_part_has_the_bits_of_its_body(draw: bool):
    size, first = 300, 148
    x = Tensor(hard_rows(size)[:, first:].copy()).realize()
    params = [SamplingParams(seed=i << 40, temperature=0.7 * (i % 3)) for i in range(6)]
    places = Tensor(list(range(6)), dtype=dtypes.int32).realize()
    numbers = numbers_of(params) if draw else None

    def results() -> list[object]: return [choose_part(x, numbers, places, first).tolist(),
                                           token_of(choose_part(x, numbers, places, first), size).tolist()]
    assert [k.template for k in explain(choose_part(x, numbers, places, first)).kernels] == ["choice"]
    ours = results()
    with disabled(): assert results() == ours
    with pytest.raises(SpecError, match="begins at element 3"): choose_part(x, numbers, places, 3)


def test_tokens_are_counted_in_place():
    counts = Tensor.zeros(4, 40).contiguous().realize()
    rows, tokens = Tensor([2, -1, 0, 9], dtype=dtypes.int32), Tensor([39, 1, 40, 3], dtype=dtypes.int32)
    rows, tokens = rows.realize(), tokens.realize()
    made = counts.assign(tally_tokens(counts, rows, tokens))
    assert [k.template for k in explain(made).kernels] == ["count"]
    made.realize()
    expected = np.zeros((4, 40), np.float32)
    expected[2, 39] = 1
    np.testing.assert_array_equal(counts.numpy(), expected)
    with disabled(): np.testing.assert_array_equal(tally_tokens(counts, rows, tokens).numpy(), 2 * expected)


ALL = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
                     frequency_penalty=0.3, presence_penalty=-0.2, logit_bias={3: 2.0})


def kernels(params: SamplingParams, count: bool = False) -> list[str]:
    case, R = Case([params] * 3, 129), 3
    logits, places = Tensor.empty(R, 129).realize(), Tensor.empty(R, dtype=dtypes.int32).realize()
    made = case.made(logits, places)
    if count: made = count_tokens(case.state, case.rows, made)
    return [k.template or "tinygrad" for k in explain(made).kernels]


def test_a_sampler_is_few_kernels():
    """Numbers are gathered, logits divided by temperatures; a filter is one more, of probabilities two.
    Penalties and biases are gathered too, and tinygrad copies the numbers then."""
    drawn = ["embedding", "tinygrad", "choice"]
    assert kernels(SamplingParams(temperature=0.0)) == ["choice"]
    assert kernels(SamplingParams()) == drawn
    assert kernels(SamplingParams(top_k=4)) == [*drawn[:2], "counted_threshold", "choice"]
    assert kernels(SamplingParams(top_p=0.9)) == [*drawn[:2], "norm", "threshold", "choice"]
    assert kernels(SamplingParams(min_p=0.1)) == [*drawn[:2], "norm", "choice"]
    apply_penalties = kernels(SamplingParams(temperature=0, presence_penalty=1), True)
    assert apply_penalties == ["embedding", "embedding", "tinygrad", "choice", "count"]
    everything = kernels(ALL, True)
    assert everything[-6:] == ["counted_threshold", "norm", "threshold", "norm", "choice", "count"]
    assert len(everything) <= 11


def test_nothing_to_choose_from_is_refused():
    for made in (lambda: FilterSpec(1, 0, Number.top_k), lambda: ChoiceSpec(0, 1),
                 lambda: CountSpec(1, 1, 0)):
        with pytest.raises(SpecError, match="one or more"): made()
