"""Ranks that have parts of a vocabulary, in one process: each a thread, which waits for the others where a
collective is. One runs at a time."""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from tinygrad import Tensor

from tests.support.engine.sampler_case import V, union
from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.worker.sampler import count_tokens, next_tokens
from tinygrad_nv.engine.worker.sampler_state import SamplerState
from tinygrad_nv.models.parallel import ALIGNED


@dataclass
class Exchange:
    """What `count` ranks say at their collectives."""
    count: int
    turn: threading.Condition = field(default_factory=threading.Condition)
    said: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def exchanged(self, number: int, rank: int, x: Tensor) -> list[Tensor]:
        """What all say at their collective of this number."""
        found = self.said.setdefault(number, [None] * self.count)
        found[rank] = x
        self.turn.notify_all()
        assert self.turn.wait_for(lambda: all(each is not None for each in found), 60)
        return [each for each in found if each is not None]


@dataclass
class FakeParts:
    """A rank's. `sent` are the bytes that each rank sends, by kind of collective."""
    exchange: Exchange
    rank: int
    size: int
    sent: Counter[str] = field(default_factory=Counter)
    number: int = 0

    @property
    def tokens(self) -> range:
        each = -(-self.size // (self.exchange.count * ALIGNED)) * ALIGNED
        return range(self.rank * each, self.rank * each + each)

    def rows(self, count: int) -> slice:
        each, left = divmod(count, self.exchange.count)
        return slice(0, count) if left else slice(self.rank * each, self.rank * each + each)

    def whole_rows(self, x: Tensor) -> Tensor:
        own = self.rows(int(x.shape[0]))
        found = self._of_all("rows", x, int(x[own].numel()))
        return Tensor.cat(*(each[own] for each in found), dim=-1)[:, :self.size].contiguous()

    def of_all_rows(self, x: Tensor, count: int) -> Tensor:
        return x if int(x.shape[0]) == count else Tensor.cat(*self._of_all("tokens", x))

    def most(self, x: Tensor) -> Tensor:
        return Tensor.stack(*self._of_all("most", x)).max(0)

    def own(self, x: np.ndarray) -> np.ndarray:
        """What this rank has of rows of logits."""
        made = np.full((len(x), len(self.tokens)), -np.inf, np.float32)
        mine = x[:, self.tokens.start:self.tokens.stop]
        made[:, :mine.shape[1]] = mine
        return made

    def own_words(self, masks: np.ndarray) -> np.ndarray:
        """The words of masks that have this rank's tokens; others allow everything."""
        first, end = self.tokens.start // 32, -(-self.tokens.stop // 32)
        made = np.full((len(masks), end - first), 0xFFFFFFFF, np.uint32)
        mine = masks[:, first:end]
        made[:, :mine.shape[1]] = mine
        return made

    def _of_all(self, kind: str, x: Tensor, sent: int | None = None) -> list[Tensor]:
        """What all ranks have, of which each gets `sent` elements of each other."""
        x, self.number = x.contiguous(), self.number + 1
        self.sent[kind] += (int(x.numel()) if sent is None else sent) * x.dtype.itemsize
        return self.exchange.exchanged(self.number, self.rank, x)


class PartsCase:
    """As `Case` of sampler_case.py, over `ranks` parts. `tokens` requires all ranks to have the same."""

    def __init__(self, ranks: int, rows: Sequence[SamplingParams], size: int = V, seen: Sequence[int] = (),
                 said: Sequence[int] = (), device: str | None = None) -> None:
        exchange = Exchange(ranks)
        self.filters, self.device = union(rows), device
        self.parts = [FakeParts(exchange, rank, size) for rank in range(ranks)]
        self.states = [SamplerState(len(rows) + 2, size, device, each.tokens) for each in self.parts]
        self.order = np.random.default_rng(len(rows)).permutation(len(rows)).astype(np.int32)
        for state in self.states:
            for slot, params in zip(self.order.tolist(), rows, strict=True):
                state.start_slot(slot, params, params.seed or 0, seen, said)

    def tokens(self, logits: np.ndarray, positions: int | Sequence[int] = 0, filters: Filters | None = None,
               masks: np.ndarray | None = None, count: bool = False) -> list[int]:
        """The rows' next tokens; `count` counts them."""
        wanted = filters or self.filters
        at = np.broadcast_to(np.array(positions, np.int32), len(logits)).copy()

        def lazy(part: FakeParts, state: SamplerState) -> Tensor:
            slots, places = (Tensor(each, device=self.device) for each in (self.order, at))
            masked = None if masks is None else Tensor(part.own_words(masks), device=self.device)
            return next_tokens(Tensor(part.own(logits), device=self.device), wanted, state, slots, places,
                               masked, part)
        made = self._together(lazy)
        found = [each.tolist() for each in made]
        assert all(each == found[0] for each in found), found
        if count:
            for state, tokens in zip(self.states, made, strict=True):
                count_tokens(state, Tensor(self.order, device=self.device), tokens).realize()
        return found[0]

    def _together(self, run: Callable[[FakeParts, SamplerState], Tensor]) -> list[Tensor]:
        turn = self.parts[0].exchange.turn

        def rank(part: FakeParts, state: SamplerState) -> Tensor:
            with turn: return run(part, state)
        with ThreadPoolExecutor(len(self.parts)) as ranks:
            made = list(ranks.map(rank, self.parts, self.states))
        self.parts[0].exchange.said.clear()
        for each in self.parts: each.number = 0
        return made
