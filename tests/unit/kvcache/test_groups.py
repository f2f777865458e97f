"""Groups of layers, and the pages that a sequence holds with them."""
from __future__ import annotations

import random

import pytest

from tinygrad_nv.kvcache.groups import MAX_GROUPS, CacheGroups, cache_groups
from tinygrad_nv.kvcache.pool import PagePool

GEMMA3_27B = tuple(None if i % 6 == 5 else 1024 for i in range(62))
PAGE = 16


def most_pages(groups: CacheGroups, tokens: int, chunk: int) -> int:
    """The most pages that a sequence holds between its steps, of a prompt in chunks."""
    pool = PagePool(400, PAGE, windows=groups.windows)
    table, most = pool.open([]), 0
    for start in range(0, tokens, chunk):
        new = range(start, min(start + chunk, tokens))
        assert table.reserve(start + len(new))
        most = max(most, pool.stats().in_use)
        table.advance(new)
        table.prune_window(table.computed)
    pool.assert_conserved([table])
    return most


@pytest.mark.parametrize(("windows", "length", "expected", "layers"), [
    ((None,) * 3, 4096, (None,), 3), ((512,) * 4, 4096, (512,), 4),
    # of two windows neither of which is much shorter than the context
    ((4096, None) * 4, 4096, (None,), 8),
    ((128, None) * 12, 4096, (128, None), 12),
    (GEMMA3_27B, 131072, (1024,) * 5 + (None, 1024), 10),
    # one layer of 28: a page of all of them would hold one layer of the group without a window
    ((512,) * 27 + (None,), 4096, (512, 512, 512, 512, 512, 512, 512, None), 4)])
def test_layers_in_groups(windows: tuple[int | None, ...], length: int, expected: tuple[int | None, ...],
                          layers: int):
    made = cache_groups(windows, length, PAGE)
    assert (sorted(made.windows, key=str), made.layers_per_page) == (sorted(expected, key=str), layers)


@pytest.mark.parametrize("seed", range(40))
def test_every_layer_has_a_place_of_its_own(seed: int):
    draw = random.Random(seed)
    windows = tuple(draw.choice([None, None, 64, 100, 1000]) for _ in range(draw.randint(1, 40)))
    made = cache_groups(windows, length := draw.choice([100, 1000, 30000]), PAGE)
    assert len(set(made.places)) == len(windows) == len(made.places)
    assert len(made.windows) <= MAX_GROUPS
    for window, (group, place) in zip(windows, made.places, strict=True):
        own = made.windows[group]
        assert own is None or (window is not None and own >= window)
        assert 0 <= place < made.layers_per_page
    # never more than with all layers in one group
    assert made.layers_per_page * made.num_pages(length, PAGE, 1) <= len(windows) * -(-length // PAGE)


@pytest.mark.parametrize("chunk", [1, 40, 256])
@pytest.mark.parametrize("windows", [(None,), (100,), (100, None), (64, 500, None)])
def test_a_sequence_holds_no_more_pages_than_counted(windows: tuple[int | None, ...], chunk: int):
    groups = CacheGroups(windows, (), 1)
    for tokens in (1, 99, 1024):
        assert most_pages(groups, tokens, chunk) <= groups.num_pages(tokens, PAGE, chunk)
    assert most_pages(groups, 1024, chunk) >= groups.num_pages(1024, PAGE, chunk) - 3 * len(windows)
