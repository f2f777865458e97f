"""A request, and the state of its sequences while they wait and run.

Protocol. A `Request` is what somebody asks for; it does not change. `sequences` makes one `Seq` for each of
its n answers. All of them but the first are `branches` of the first until the prompt is computed: then they
are forked off, with tokens, pages and a slot of their own, and none knows the others any more.

Of a `Seq`, `tokens` are prompt and answer as far as the host knows them, `scheduled` counts places whose keys
and values are written, or will be by a step that was launched, and `unknown` tokens are chosen by steps that
the host has not looked at (0 or 1). So `len(tokens) + unknown - scheduled` tokens are still to be computed:
one while it decodes, more after the prompt came or pages were given away.
"""
from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.batch import GROUP
from tinygrad_nv.errors import RequestError
from tinygrad_nv.kvcache.table import Table

PRIORITIES = 1000       # so that an offset of priority is at most this many levels of ageing


class Matcher(Protocol):
    """What a structured answer may go on with, a sequence's own. `mask()` is as `batch.Sample.mask`; None
    allows every token. `masks(draft)` are those before a draft's first token and after each, as far as they
    are allowed. `finished` says that nothing may follow."""

    @property
    def finished(self) -> bool: ...

    def mask(self) -> np.ndarray | None: ...

    def masks(self, draft: Sequence[int]) -> Sequence[np.ndarray | None]: ...

    def accept(self, token: int) -> None: ...


class Asked(NamedTuple):
    """A sequence whose next tokens are to be guessed, at most `most`. `key` is its request's id and its
    index."""
    key: tuple[str, int]
    tokens: Sequence[int]
    most: int
    params: SamplingParams
    seed: int


class Proposer(Protocol):
    """Drafts for speculation: wrong ones cost time, and change no token."""

    def propose(self, asked: Sequence[Asked]) -> Sequence[Sequence[int]]:
        """A draft for each, which may be empty."""

    def forget(self, key: tuple[str, int]) -> None:
        """The sequence is over."""


@dataclass(frozen=True)
class Request:
    """`params.n` answers to `prompt`. A smaller `priority` goes first, as in vLLM. `matchers`: one for each
    answer that must have a structure. Prefixes are shared among requests of equal `salt`."""
    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    arrival_s: float = field(default_factory=time.monotonic)
    matchers: tuple[Matcher, ...] = ()
    salt: bytes = b""


@dataclass(eq=False, slots=True)
class Seq:
    """One answer in the making. `key` orders: a smaller one goes first. `limit`: tokens it may have. From
    `ends_at` tokens on it may end at a token of `ends`. `covered`: places from 0 on whose pages it has to
    itself, `pages` a copy of the block table that is made again when that changes."""
    request: Request
    index: int
    key: tuple[float, int, int]
    seed: int
    tokens: list[int]
    limit: int
    ends: frozenset[int]
    ends_at: int
    matcher: Matcher | None = None
    logprobs: int | None = None
    hosted: bool = False                # its next step needs what this one chose
    drafted: bool = False               # its next tokens may be guessed
    branches: list[Seq] = field(default_factory=list)
    table: Table | None = None
    slot: int = -1
    scheduled: int = 0
    unknown: int = 0
    covered: int = 0
    pages: tuple[int, ...] = ()
    cached: int = -1                    # tokens of the prompt that were there; -1: it never ran
    waiting: bool = False
    forking: bool = False               # the step that chooses its branches' first tokens was launched
    finished: bool = False

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def chosen(self) -> int:
        """Tokens of the answer that the host knows."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def name(self) -> tuple[str, int]:
        """Request and index."""
        return self.request.id, self.index

    def cover(self, end: int, page_size: int) -> bool:
        """Pages for places up to `end`; False if there are too few."""
        if end <= self.covered: return True
        assert self.table is not None
        if not self.table.reserve(end): return False
        self.shown(page_size)
        return True

    def shown(self, page_size: int) -> None:
        """The block table has changed."""
        assert self.table is not None
        self.pages = tuple(self.table.pages)
        self.covered = len(self.pages) * page_size


def padded(start: int, rows: int) -> int:
    """One past the last place that `rows` new tokens from `start` on write."""
    return start + computed_rows(rows)


def computed_rows(rows: int) -> int:
    """Rows that a work of so many tokens takes."""
    return rows if rows == 1 else -(-rows // GROUP) * GROUP


def sequences(request: Request, config: EngineConfig, max_len: int, order: int) -> Seq:
    """The first sequence of a request, with the others as its branches. `order` counts requests."""
    params = request.params
    seed = secrets.randbits(64) if params.seed is None else params.seed
    level = request.priority * config.ageing_s + request.arrival_s
    length = len(request.prompt)
    limit = max_len if params.max_tokens is None else min(length + params.max_tokens, max_len)
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(config.eos))
    # counts of tokens that a penalty needs would have those of a draft that was wrong
    drafted = config.speculation > 0 and not params.filters.penalty
    made = [Seq(request, index, (level, order, index), (seed + index) % (1 << 64), list(request.prompt),
                limit, ends, length + params.min_tokens,
                request.matchers[index] if request.matchers else None, params.logprobs,
                bool(request.matchers) or drafted, drafted)
            for index in range(params.n)]
    made[0].branches = made[1:]
    return made[0]


def check(request: Request, config: EngineConfig, max_len: int, vocab: int) -> None:
    """Raises `RequestError` for a request that can never run."""
    length, n = len(request.prompt), request.params.n
    if not length: raise RequestError("the prompt has no tokens", "at least one token id", "write a prompt")
    for bad in min(request.prompt), max(request.prompt):
        if not 0 <= bad < vocab:
            raise RequestError(f"token id {bad} is not in the vocabulary", f"0 to {vocab - 1}",
                               "use ids of this model's tokenizer")
    request.params.require_vocabulary(vocab)
    if length >= max_len:
        held = "the context holds" if max_len == config.max_len else "the cache of keys and values holds"
        raise RequestError(f"the prompt has {length} tokens, {held} {max_len}",
                           f"at most {max_len - 1}, so that one can be added",
                           "shorten the prompt" if max_len == config.max_len else
                           "shorten the prompt, or give the cache more memory")
    if n > config.max_seqs:
        raise RequestError(f"n is {n}, and {config.max_seqs} sequences run at a time",
                           f"1 to {config.max_seqs}", "ask for fewer answers, or raise --max-num-seqs")
    if not -PRIORITIES <= request.priority <= PRIORITIES:
        raise RequestError(f"priority is {request.priority}", f"-{PRIORITIES} to {PRIORITIES}, smaller first",
                           "change priority")
    if request.params.prompt_logprobs is not None:
        raise RequestError(f"prompt_logprobs is {request.params.prompt_logprobs}",
                           "None: logarithms of probabilities are told of chosen tokens alone",
                           "leave it out; logprobs tells those of the answer")
    assert len(request.matchers) == n or (not request.matchers and request.params.structured is None)
