"""The sampler's templates on the emulated GPU, checks on: selections to the bit, draws against float64. What
kernels take: registers, barriers, the width of their accesses."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.engine.selection_case import above, counted_rows, hard_rows, near_targets, weighted_rows
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.tile.kernel import Chain, TileKernel
from tinygrad_nv.tile.sampling import program as choosing
from tinygrad_nv.tile.sampling.spec import NUMBERS, ChoiceSpec, CountSpec, FilterSpec, Number
from tinygrad_nv.tile.sampling.top_k import program as counting
from tinygrad_nv.tile.sampling.top_p import program as weighing
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

ARCHES = ("sm_80", "sm_90a")
GUARD = 77


def launched(made: TileKernel, arch: str, out: np.ndarray, *inputs: np.ndarray, seed: int = 0) -> np.ndarray:
    """What becomes of `out`. Nothing may be found, and nothing else is written."""
    emu = Emulator(arch, seed=seed)
    place = emu.alloc(np.concatenate([out.reshape(-1), np.full(3, GUARD, out.dtype)]))
    held = [emu.alloc(each) for each in inputs]
    report = emu.launch(made.ptx, made.grid, made.threads, [place, *held])
    assert report.findings == [], "\n".join(map(str, report.findings))
    found = place.numpy().view(out.dtype)
    assert (found[-3:] == GUARD).all()
    for each, given in zip(held, inputs, strict=True):
        assert each.numpy().tobytes() == given.tobytes()
    return found[:-3].reshape(out.shape).copy()


def filtered(spec: FilterSpec, x: np.ndarray, weights: np.ndarray, targets: np.ndarray, arch: str,
             seed: int = 0) -> np.ndarray:
    numbers = np.full((spec.rows, NUMBERS), np.nan, np.float32)
    numbers[:, spec.number] = targets
    rows = [np.broadcast_to(each, (spec.rows, spec.size)).copy()
            for each in (x, *[weights] * (not spec.counted))]
    out = np.full((spec.rows, spec.size), GUARD, np.float32)
    made = default(spec, arch)
    return launched(made, arch, out, *rows, numbers, seed=seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("alike", [False, True], ids=["weighted", "counted"])
@pytest.mark.parametrize("size", [5, 300, 512])
def test_a_filter_is_exact_where_a_sum_is_nearly_the_target(arch: str, alike: bool, size: int):
    x, weights, targets, kept = near_targets(size, alike, 2)
    spec = FilterSpec(len(targets), size, Number.top_p, alike)
    found = filtered(spec, x, weights, targets, arch)
    np.testing.assert_array_equal(found.view(np.uint32), kept.view(np.uint32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("size", "wrong"), [
    (2601, ()), (2604, ()), (2700, ("CROWD", 1e9)), (2800, ("UNDER", 2.0)), (2900, ("OVER", 0.3))])
def test_the_mass_is_found_wherever_it_lies(arch: str, size: int, wrong: tuple[str, float],
                                            monkeypatch: pytest.MonkeyPatch):
    """Rows are too long to be held; estimates are right, have too many logits within, or are wrong."""
    monkeypatch.setattr(weighing, "THREADS", 128)
    if wrong: monkeypatch.setattr(weighing, *wrong)
    x, weights, targets, kept = weighted_rows(size)
    some = slice(1, None, 5) if wrong else slice(None, None, 2)
    x, weights, targets, kept = x[some], weights[some], targets[some], kept[some]
    found = filtered(FilterSpec(len(x), size, Number.top_p), x, weights, targets, arch)
    np.testing.assert_array_equal(found.view(np.uint32), kept.view(np.uint32))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("size", [513, 2600])
def test_the_largest_are_counted_wherever_they_lie(size: int, arch: str, monkeypatch: pytest.MonkeyPatch):
    """Rows are held in registers, or are not, or have several of their largest at one place of blocks."""
    monkeypatch.setattr(counting, "THREADS", 128)
    x, targets, kept = counted_rows(size, 512)
    found = filtered(FilterSpec(len(x), size, Number.top_k, True), x, x, targets, arch)
    np.testing.assert_array_equal(found.view(np.uint32), kept.view(np.uint32))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2048, 2050, 9000])
def test_large_filters(size: int):
    x, weights, targets, kept = near_targets(size, False, 1)
    spec = FilterSpec(len(targets), size, Number.top_p)
    found = filtered(spec, x, weights, targets, "sm_90a")
    np.testing.assert_array_equal(found.view(np.uint32), kept.view(np.uint32))


@pytest.mark.parametrize("seed", range(4))
def test_every_order_of_warps_keeps_the_same(seed: int):
    x, weights, targets, kept = near_targets(260, False, 1)
    found = filtered(FilterSpec(len(targets), 260, Number.top_k), x, weights, targets, "sm_90a", seed)
    np.testing.assert_array_equal(found.view(np.uint32), kept.view(np.uint32))


def words(seed: int, place: int, size: int) -> np.ndarray:
    """Words of Threefry-2x32-20 of counters (0 …, place), low and high in turn."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    key = [np.uint32(high), np.uint32(low ^ high ^ 0x1BD11BDA), np.uint32(low)]
    pairs = -(-size // 2)
    a, b = np.arange(pairs, dtype=np.uint32) + key[2], np.full(pairs, place, np.uint32) + key[0]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            a = a + b
            b = a ^ (b << np.uint32(turn) | b >> np.uint32(32 - turn))
        a, b = a + key[i % 3], b + key[(i + 1) % 3] + np.uint32(i + 1)
    return np.stack([a, b], 1).reshape(-1)[:size]


def noise(seed: int, place: int, size: int) -> np.ndarray:
    return -np.log(-np.log(((words(seed, place, size) >> 9) + 0.5) * 2.0 ** -23))


def chosen(spec: ChoiceSpec, x: np.ndarray, params: list[SamplingParams], places: np.ndarray, arch: str,
           seed: int = 0) -> list[int]:
    """Tokens, or the keys of a part."""
    cut = pieces(spec, arch)
    given = [np.stack([each.numbers(each.seed or 0) for each in params]), places] if spec.draw else []
    made = default(spec, arch)
    out = np.full(spec.rows, GUARD, np.int32 if spec.first is None else np.uint64)
    if cut == 1: return launched(made, arch, out, x, *given, seed=seed).tolist()
    best = launched(made.first, arch, np.full((spec.rows, cut), GUARD, np.uint64), x, *given, seed=seed)
    return launched(made.second, arch, out, best).tolist()


def default(spec: FilterSpec | ChoiceSpec | CountSpec, arch: str) -> TileKernel | Chain:
    """The kernel of the default schedule, or both."""
    return TABLE.build(spec, TABLE.choose(spec, GPU(arch)), GPU(arch))


def pieces(spec: ChoiceSpec, arch: str = "sm_90a") -> int: return TABLE.choose(spec, GPU(arch)).groups


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are some of a row that is short."""
    monkeypatch.setattr(choosing, "PIECE", 300)
    monkeypatch.setattr(choosing, "WIDTH", 128)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("draw", [False, True])
def test_the_first_of_equals_is_chosen_and_nan_is_told(arch: str, draw: bool, small_pieces: None):
    size = 800
    x = np.full((5, size), -3, np.float32)
    x[0, [250, 378, 700]], x[1, 600], x[1, 13], x[3] = 5, 0.0, -0.0, -np.inf
    x[2, 790], x[4, 0] = np.nan, np.array(0xFFC00000, np.uint32).view(np.float32)
    places = np.zeros(5, np.int32)
    made = chosen(ChoiceSpec(5, size, draw), x, [SamplingParams(temperature=0)] * 5, places, arch)
    assert made == [250, 13, size, 0, size]
    if draw:
        drawn = chosen(ChoiceSpec(5, size), x, [SamplingParams()] * 5, places, arch)
        assert drawn[2:] == [size, 0, size]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("draw", [False, True])
@pytest.mark.parametrize(("size", "part"), [(800, 400), (801, 268)], ids=["vectors", "elements"])
def test_parts_of_a_row_choose_as_the_whole_does(arch: str, draw: bool, size: int, part: int,
                                                 small_pieces: None):
    """With pieces and without; equals in two parts, NaN in one, nothing left in any."""
    x, places = hard_rows(size), np.arange(9, 15, dtype=np.int32)
    params = [SamplingParams(seed=3 + i) for i in range(len(x))]
    params[0] = SamplingParams(temperature=0)
    keys = []
    for start in range(0, size, part):
        own = x[:, start:start + part].copy()
        made = chosen(ChoiceSpec(*own.shape, draw, start), own, params, places, arch)
        keys.append(made)
        if not draw: assert [each >> 32 for each in made] == above(own)
    tokens = [size if (most := max(each)) >> 32 == 0xFFFFFFFF else ~most & 0xFFFFFFFF
              for each in zip(*keys, strict=True)]
    assert tokens == chosen(ChoiceSpec(len(x), size, draw), x, params, places, arch)


def test_noise_is_exact_where_a_uniform_number_is_nearly_one(monkeypatch: pytest.MonkeyPatch):
    """The largest noise there is: as of the hardware's logarithm, which gives 0 there, it would be infinite.
    Row i has so much less on all tokens but 0 that 0 is chosen if its noise is at least exact − 1e-4 · i."""
    seed, place = next((seed, int(at)) for seed in range(400)
                       for at in [np.argmax(words(seed, 3, 1 << 14))] if words(seed, 3, 1 << 14)[at] >> 9
                       >= (1 << 23) - 200)
    size = place + 1
    exact = noise(seed, 3, size)
    x = np.full((3, size), -np.inf, np.float32)
    x[:, place] = 0
    other = int(np.argmin(np.where(np.arange(size) == place, np.inf, abs(exact))))
    for i, more in enumerate((-1e-4, 0.0, 1e-4)): x[i, other] = exact[place] - exact[other] + more
    made = chosen(ChoiceSpec(3, size), x, [SamplingParams(seed=seed)] * 3, np.full(3, 3, np.int32), "sm_90a")
    assert (made[0], made[2]) == (place, other)


def test_a_tokens_rank_does_not_depend_on_the_order_of_threads():
    x = np.random.default_rng(0).standard_normal((2, 900)).astype(np.float32)
    made = [chosen(ChoiceSpec(2, 900), x, [SamplingParams(seed=4)] * 2, np.zeros(2, np.int32), "sm_90a", seed)
            for seed in range(3)]
    assert made[0] == made[1] == made[2]


BUILT = ("sm_80", "sm_89", "sm_90a")
SIZES = (5, 2048, 32000, 128256)


KINDS = {"weighted": lambda size, arch: default(FilterSpec(64, size, Number.top_p), arch),
         "counted": lambda size, arch: default(FilterSpec(64, size, Number.top_k, True), arch),
         "drawn": lambda size, arch: default(ChoiceSpec(64, size), arch),
         "largest": lambda size, arch: default(ChoiceSpec(1, size, False), arch),
         "keys": lambda size, arch: default(ChoiceSpec(256, size, True, 2 * size), arch),
         "count": lambda size, arch: default(CountSpec(64, 64, size), arch)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", BUILT)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_spills(kind: str, arch: str):
    for size in SIZES:
        both = KINDS[kind](size, arch)
        for made in (both.first, both.second) if isinstance(both, Chain) else (both,):
            found = assemble(made.ptx, arch).kernels[made.name]
            assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
            assert found.registers * made.threads <= 1 << 16
            early = [word in made.ptx for word in ("griddepcontrol.wait", "griddepcontrol.launch_dependents")]
            assert [made.pdl, *early] == [arch == "sm_90a"] * 3


def test_long_rows_are_chosen_from_in_pieces_until_the_machine_is_full():
    assert [pieces(ChoiceSpec(rows, 128256)) for rows in (1, 8, 64, 256)] == [32, 32, 8, 2]
    assert pieces(ChoiceSpec(1, 4096)) == 1
    made = default(ChoiceSpec(3, 128256), "sm_90a").first
    assert (made.grid, made.threads) == ((3, 32, 1), 256)
