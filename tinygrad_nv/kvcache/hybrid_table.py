"""The block tables of a sequence whose layers are in several groups (groups.py), and its states where it has
some (state_table.py).

Protocol: a `HybridTable` has a `BlockTable` for each group, and the operations of one. All tables have
entries for the same tokens. An operation succeeds for all groups, or changes nothing. So a group with a
window frees pages behind it, and the pool gives them to any group, while groups without one keep theirs.

`pages` are the entries of all groups, one group after the other, equally many of each. Pages are dropped from
the last token to the first, of all groups together: a prefix that lost a page of one group is of no use in
the others. States have pages of their own. They are not offloaded: what lies on the host could not go on
without them.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

from tinygrad_nv.kvcache import offload
from tinygrad_nv.kvcache.block_table import PRUNED, BlockTable, share_prefix
from tinygrad_nv.kvcache.offload import TieredPages
from tinygrad_nv.kvcache.prefix_hashes import PrefixHashes
from tinygrad_nv.kvcache.state_table import StatePages, StateStep, StateTable


class HybridTable:
    """A sequence's block tables, `groups`, and its `states`. Created by `pool.open`."""
    __slots__ = ("groups", "pool", "prefix", "states")

    def __init__(self, pool: TieredPages, prefix: PrefixHashes, states: StatePages | None = None) -> None:
        self.pool, self.prefix = pool, prefix
        self.states = None if states is None else StateTable(states, prefix)
        self.groups = tuple(BlockTable(pool, prefix, group) for group in range(len(pool.windows)))

    @property
    def computed(self) -> int:
        """Tokens advanced over."""
        return self.groups[0].computed

    @property
    def pages(self) -> list[int]:
        """Entries of all groups; none while offloaded."""
        return [] if self.is_offloaded else list(chain.from_iterable(each.pages for each in self.groups))

    @property
    def num_entries(self) -> int:
        """Entries of each group."""
        return self.groups[0].num_entries

    @property
    def pruned(self) -> int:
        """Pruned entries of all groups."""
        return sum(each.pruned for each in self.groups)

    @property
    def unpruned_pages(self) -> list[int]:
        """The pages that are not pruned."""
        return [page for each in self.groups for page in each.unpruned_pages]

    @property
    def host_pages(self) -> list[int]:
        """The host's pages, while offloaded."""
        return [page for each in self.groups for page in each.host_pages]

    @property
    def is_offloaded(self) -> bool:
        """Whether the pages are on the host."""
        return any(each.host_pages for each in self.groups)

    # **** before and after a step ****

    def share(self, tokens: Sequence[int]) -> None:
        """`BlockTable.share`."""
        states = None if self.states is None else self.states.pool
        share_prefix(self.groups, tokens, states)
        if self.states is not None: self.states.share(self.computed)

    def num_missing_pages(self, tokens: int, start: int | None = None) -> int:
        """How many pages `reserve` would take; of an offloaded table, `restore` and then `reserve`."""
        return sum(each.num_missing_pages(tokens, start) for each in self.groups)

    def reserve(self, tokens: int, start: int | None = None) -> bool:
        """`BlockTable.reserve`."""
        if self.num_missing_pages(tokens, start) > self.pool.available: return False
        for each in self.groups:
            reserved = each.reserve(tokens, start)
            assert reserved, "pages that were available"
        return True

    def advance(self, tokens: Sequence[int]) -> None:
        """`BlockTable.advance`."""
        for each in self.groups: each.advance(tokens)
        if self.states is not None: self.states.register(self.full_tokens)

    @property
    def full_tokens(self) -> int:
        """Tokens that the hashes of pages cover, or may."""
        return self.computed // self.pool.page_size * self.pool.page_size

    def step_states(self, start: int, end: int) -> StateStep | None:
        """The pages of states of a step that computes tokens start … end − 1, None without states."""
        return None if self.states is None else self.states.step(start, end, self.full_tokens)

    # **** fork, prune, truncate ****

    def fork(self) -> HybridTable:
        """`BlockTable.fork`."""
        for each in self.groups: each.hash_tail()
        made = HybridTable(self.pool, self.prefix.copy())
        if self.states is not None: made.states = self.states.fork(made.prefix)
        for each, other in zip(self.groups, made.groups, strict=True): each.copy_to(other)
        return made

    def prune_window(self, position: int) -> None:
        """`BlockTable.prune_window`."""
        for each in self.groups: each.prune_window(position)

    def truncate(self, tokens: int) -> None:
        """`BlockTable.truncate`."""
        if tokens < self.computed:
            for each in self.groups: each.require_visible(tokens)
        assert self.states is None or tokens == self.states.newest, "states of other tokens"
        for each in self.groups: each.truncate(tokens)

    def rollback(self, batch: int) -> None:
        """`BlockTable.rollback`."""
        count = min(each.num_valid_pages(batch) for each in self.groups)
        if self.states is not None:
            count = self.states.last_valid(count * self.pool.page_size, batch) // self.pool.page_size
            self.states.keep(count * self.pool.page_size)
        if not all(each.keep_pages(count) for each in self.groups): self.release()

    def release(self) -> None:
        """`BlockTable.release`."""
        memory = self.pool.host if self.is_offloaded else self.pool.device
        memory.drop(page for _, page in self._last_first())
        for each in self.groups: each.clear()
        if self.states is not None: self.states.release()

    # **** offload ****

    def offload(self) -> bool:
        """`BlockTable.offload`."""
        if self.states is not None: return False
        order = self._last_first()[::-1]
        made = offload.offload(self.pool, [page for _, page in order])
        if made is None: return False
        for each in self.groups: each.pages = [PRUNED] * each.pruned
        for (group, _), page in zip(order, made, strict=True): self.groups[group].host_pages.append(page)
        return True

    def restore(self) -> bool:
        """`BlockTable.restore`."""
        order = self._last_first()[::-1]
        made = offload.restore(self.pool, [page for _, page in order])
        if made is None: return False
        for each in self.groups: each.pages, each.host_pages = [PRUNED] * each.pruned, []
        for (group, _), page in zip(order, made, strict=True): self.groups[group].pages.append(page)
        return True

    def _last_first(self) -> list[tuple[int, int]]:
        """Each group and page that is held, of either memory, from the last token to the first."""
        entries = [(each.pruned + i, group, page) for group, each in enumerate(self.groups)
                   for i, page in enumerate(each.memory()[1])]
        entries.sort(reverse=True)
        return [(group, page) for _, group, page in entries]


SequenceTable: TypeAlias = BlockTable | HybridTable
