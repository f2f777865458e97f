"""Pages of states: what a step begins with is what was left after its tokens, no page is written by two
sequences or read by one while another writes it, prefixes are found at borders, and nothing is lost."""
from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tinygrad_nv.kvcache.hybrid_table import HybridTable
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.kvcache.state_table import NONE, PAGES_OF_SEQUENCE, StatePages

SIZE = 4


@dataclass
class Device:
    """A pool whose pages hold the tokens that their states stand for, in the place of states."""
    pool: PagePool
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)         # in the batch being assembled, by any sequence
    written: dict[int, int] = field(default_factory=dict)

    def step(self, name: int, table: HybridTable, tokens: list[int], start: int, end: int,
             known: bool = True) -> None:
        """A step of a sequence. Steps of one batch see what earlier batches wrote."""
        assert table.reserve(end)
        if known: table.advance(tokens[table.computed:end])
        found = table.step_states(start, end)
        assert found is not None
        if start: assert self.held[found.source] == tuple(tokens[:start])
        else: assert found.source == NONE
        assert self.written.get(found.source, name) == name, "a page that another sequence writes"
        self.read.add(found.source)
        for page, length in ((found.kept, start + found.border), (found.target, end)):
            if page == NONE: continue
            assert page not in self.written, "a page that is written twice"
            assert page == found.source or page not in self.read, "a page that another sequence reads"
            self.written[page] = name
            self.held[page] = tuple(tokens[:length])

    def launch(self) -> None:
        """Ends the batch."""
        self.pool.take_copies()
        self.read, self.written = set(), {}


def make_pool(sequences: int = 3, more: int = 4, sharing: bool = True, host_pages: int = 0) -> PagePool:
    states = StatePages(PAGES_OF_SEQUENCE * sequences + more, sequences, SIZE, sharing)
    return PagePool(256, SIZE, host_pages=host_pages, sharing=sharing, states=states)


def open_table(pool: PagePool, tokens: list[int]) -> HybridTable:
    table = pool.open(tokens)
    assert isinstance(table, HybridTable)
    return table


def require_conserved(pool: PagePool, tables: list[HybridTable]) -> None:
    assert pool.states is not None
    pool.states.assert_conserved(table.states for table in tables)


def test_a_prompt_in_chunks_keeps_its_borders():
    device = Device(make_pool())
    tokens = list(range(11))
    table = open_table(device.pool, tokens)
    for start, end in ((0, 6), (6, 8), (8, 9), (9, 10), (10, 11)):
        device.step(0, table, tokens, start, end)
        device.launch()
    again = open_table(device.pool, tokens)
    assert again.computed == 8, "the border before the last token"
    device.step(1, again, tokens, 8, 11)
    other = open_table(device.pool, [*range(5), 9, 9, 9, 9])
    assert other.computed == 4
    require_conserved(device.pool, [table, again, other])


def test_a_prefix_of_the_batch_being_assembled_is_not_found():
    device = Device(make_pool())
    tokens = list(range(9))
    first = open_table(device.pool, tokens)
    device.step(0, first, tokens, 0, 8)
    second = open_table(device.pool, tokens)
    assert second.computed == 0
    device.launch()
    assert open_table(device.pool, tokens).computed == 8


def test_a_border_that_a_step_begins_with_is_kept():
    """Its tokens are not known to the host yet."""
    device = Device(make_pool())
    tokens = list(range(9))
    table = open_table(device.pool, tokens)
    for start, end in ((0, 8), (8, 9)):
        device.step(0, table, tokens, start, end, known=False)
        device.launch()
    table.advance(tokens)
    assert open_table(device.pool, tokens).computed == 8


def test_forgotten_prefixes_are_not_found():
    device = Device(make_pool())
    tokens = list(range(9))
    table = open_table(device.pool, tokens)
    device.step(0, table, tokens, 0, 8)
    device.launch()
    device.pool.forget_prefixes()
    assert open_table(device.pool, tokens).computed == 0
    assert device.pool.states is not None
    assert not device.pool.states.device.by_hash
    require_conserved(device.pool, [table])


def test_states_are_not_offloaded():
    pool = make_pool(host_pages=16)
    device, tokens = Device(pool), list(range(9))
    table = open_table(pool, tokens)
    device.step(0, table, tokens, 0, 8)
    assert not table.offload()
    device.launch()
    device.step(0, table, tokens, 8, 9)
    require_conserved(pool, [table])


def test_without_sharing_states_stay_where_they_are():
    pool = make_pool(sharing=False)
    table, pages = open_table(pool, []), set()
    for t in range(20):
        assert table.reserve(t + 1)
        table.advance([t])
        found = table.step_states(t, t + 1)
        assert found is not None
        pages.add(found.target)
        pool.take_copies()
    assert len(pages) == 1


def test_borders_are_not_kept_where_pages_are_short():
    device = Device(make_pool(sequences=1, more=0))
    tokens = list(range(40))
    table = open_table(device.pool, tokens)
    for t in range(40):
        device.step(0, table, tokens, t, t + 1)
        device.launch()
        require_conserved(device.pool, [table])


@pytest.mark.parametrize("more", range(6))
def test_all_sequences_go_on_from_borders_at_once(more: int):
    """Each holds what it has found, takes a page to write, and would keep another border."""
    count = 4
    device = Device(make_pool(sequences=count, more=more))
    prompts = [[10 * i + j for j in range(SIZE)] + [1, 2, 3, 4, 5, 6] for i in range(count)]
    for i, tokens in enumerate(prompts):
        table = open_table(device.pool, tokens)
        device.step(i, table, tokens, 0, SIZE)
        device.launch()
        table.release()
    tables = [open_table(device.pool, tokens) for tokens in prompts]
    for i, (table, tokens) in enumerate(zip(tables, prompts, strict=True)):
        start = table.states.newest if table.states is not None else 0
        device.step(i, table, tokens, start, len(tokens))
    device.launch()
    require_conserved(device.pool, tables)


def test_a_fork_reads_the_states_of_its_source():
    device = Device(make_pool())
    tokens = list(range(6))
    table = open_table(device.pool, tokens)
    device.step(0, table, tokens, 0, 6)
    device.launch()
    fork = table.fork()
    device.step(0, table, [*tokens, 7], 6, 7)
    device.step(1, fork, [*tokens, 8], 6, 7)
    device.launch()
    device.step(0, table, [*tokens, 7, 1], 7, 8)
    device.step(1, fork, [*tokens, 8, 1], 7, 8)
    require_conserved(device.pool, [table, fork])


def test_a_failed_batch_leaves_the_border_before_it():
    """In the prefix cache: a sequence of the batch begins again. One that waited stays where it was."""
    device = Device(make_pool())
    tokens, others = list(range(12)), list(range(20, 29))
    table, waiting = open_table(device.pool, tokens), open_table(device.pool, others)
    device.step(0, table, tokens, 0, 5)     # keeps the border after 4
    device.step(1, waiting, others, 0, 8)
    device.launch()
    failed = device.pool.batch
    device.step(0, table, tokens, 5, 9)
    device.launch()
    device.pool.recover(failed, [table, waiting])
    assert (table.computed, waiting.computed) == (0, 8)
    device.step(0, table, tokens, 0, 9)
    device.step(1, waiting, others, 8, 9)
    require_conserved(device.pool, [table, waiting])
    assert open_table(device.pool, tokens).computed == 4, "what the failed batch wrote is not found"


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_steps(seed: int):
    draw = random.Random(seed)
    device = Device(make_pool(sequences=4, more=draw.randrange(6), sharing=bool(seed % 5)))
    prompts = [[draw.randrange(3) for _ in range(draw.randrange(1, 30))] for _ in range(3)]
    running: dict[int, tuple[HybridTable, list[int]]] = {}
    forks = 0
    for number in range(200):
        if len(running) < 4 and draw.random() < 0.3:
            tokens = list(draw.choice(prompts)) + [draw.randrange(3) for _ in range(draw.randrange(3))]
            running[number] = open_table(device.pool, tokens), tokens
        for name, (table, tokens) in list(running.items()):
            assert table.states is not None
            start = table.states.newest
            if start >= len(tokens): tokens.append(draw.randrange(3))
            if draw.random() < 0.7:
                device.step(name, table, tokens, start, draw.randint(start + 1, len(tokens)),
                            known=draw.random() < 0.8)
            elif draw.random() < 0.1:
                table.release()
                del running[name]
            elif len(running) < 4 and start and table.computed == start and draw.random() < 0.2:
                forks += 1
                running[1000 + forks] = table.fork(), list(tokens)
        device.launch()
        for table, tokens in running.values():      # tokens that the host learns late
            assert table.states is not None
            table.advance(tokens[table.computed:table.states.newest])
        require_conserved(device.pool, [table for table, _ in running.values()])
    for table, _ in running.values(): table.release()
    device.launch()
    require_conserved(device.pool, [])
