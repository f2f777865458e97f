"""Groups of layers that share block tables, for models that have layers with different sliding windows.

Protocol: a page holds some tokens of `layers_per_page` layers, of one group. Layers of a group have equal
windows. Each group has a block table for each sequence (hybrid_table.py), and pages of all groups have the
same number of bytes, so one pool serves all: pages that a window leaves behind go to any group. (vLLM's
hybrid KV cache manager divides layers in the same way.) Layer number i of each group lies in the same tensor
(`PageStore`); which pages of it are a group's say the block tables.

With more layers in a page there are fewer tables, and more of a page is unused where a group has fewer
layers. `cache_groups` chooses the number with which a sequence of full length takes the fewest bytes. All
layers in one page is one of the choices: then pages are freed only where every layer has a window.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# block tables of a sequence. Over 8192 tokens the host takes 0.4 µs a token for one, 4.6 µs for seven, to
# reserve, advance, prune and copy them (measured); a step uploads 4 bytes for each page that a table may have
MAX_GROUPS = 8


@dataclass(frozen=True)
class CacheGroups:
    """`windows` of the groups (None: all keys), and of each layer its group and its place in a page,
    below `layers_per_page`."""
    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    layers_per_page: int

    def num_pages(self, tokens: int, page_size: int, chunk: int) -> int:
        """Pages that a sequence of `tokens` tokens holds at most, where a step computes at most `chunk`."""
        return sum(num_pages(tokens, window, page_size, chunk) for window in self.windows)


def num_pages(tokens: int, window: int | None, page_size: int, chunk: int) -> int:
    """Pages of one group. Those behind the window of a chunk's first token are freed before the chunk is
    computed; the first page and the last may be partly used."""
    most = -(-tokens // page_size)
    return most if window is None else min(most, -(-(window + chunk) // page_size) + 2)


def one_group(layers: int) -> CacheGroups:
    """All layers in one group, which keeps all pages."""
    return _make_groups((None,) * layers, layers)


def cache_groups(windows: Sequence[int | None], length: int, page_size: int) -> CacheGroups:
    """The groups of layers with these windows, for sequences of at most `length` tokens."""
    if not windows: return CacheGroups((None,), (), 0)      # of a model without attention
    choices = [_make_groups(windows, count) for count in range(len(windows), 0, -1)]
    def size(each: CacheGroups) -> int: return each.layers_per_page * each.num_pages(length, page_size, 1)
    return min((each for each in choices if len(each.windows) <= MAX_GROUPS), key=size)


def _make_groups(windows: Sequence[int | None], layers_per_page: int) -> CacheGroups:
    """Returns groups of at most so many layers. One group of all layers has the widest of their windows."""
    if layers_per_page == len(windows):
        widest = None if None in windows else max(each for each in windows if each is not None)
        return CacheGroups((widest,), tuple((0, i) for i in range(len(windows))), layers_per_page)
    groups: list[int | None] = []
    places: list[tuple[int, int]] = []
    newest: dict[int | None, tuple[int, int]] = {}
    for window in windows:
        group, at = newest.get(window, (0, layers_per_page))
        if at == layers_per_page:
            group, at = len(groups), 0
            groups.append(window)
        places.append((group, at))
        newest[window] = group, at + 1
    return CacheGroups(tuple(groups), tuple(places), layers_per_page)
