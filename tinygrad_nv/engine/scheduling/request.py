"""A request, and the state of its sequences while they wait and run.

Protocol. A `Request` is immutable. `new_sequences` makes one `Seq` for each of its n answers. All but the
first are `branches` of the first until the prompt is computed. Then they are forked off, with their own
tokens, pages and slot, and are independent.

Of a `Seq`, `tokens` are prompt and output as far as the host knows them. `num_scheduled` counts positions
whose keys and values are written, or will be by a launched step. `num_in_flight` tokens (0 or 1) are sampled
by steps whose output has not been processed. So `len(tokens) + num_in_flight - num_scheduled` tokens remain
to compute: one while the sequence decodes, more after its prompt arrived or after a preemption.
"""
from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP, Logprobs
from tinygrad_nv.errors import RequestError
from tinygrad_nv.kvcache.hybrid_table import SequenceTable

if TYPE_CHECKING:
    from tinygrad_nv.engine.lora.request import LoRARequest
    from tinygrad_nv.engine.vision.prompt import PromptImages
    from tinygrad_nv.models.peft import Adapter

MAX_PRIORITY = 1000     # bounds how long a request may be overtaken: at most so many levels of ageing


class Matcher(Protocol):
    """The grammar state of one structured output. `mask()` is the token mask of the next token, as in
    `Sample.mask`; None allows every token. `masks(draft)` are the masks before the draft's first token and
    after each token, as far as the draft is allowed. `is_finished`: no token may follow."""

    @property
    def is_finished(self) -> bool: ...

    def mask(self) -> np.ndarray | None: ...

    def masks(self, draft: Sequence[int]) -> Sequence[np.ndarray | None]: ...

    def accept(self, token: int) -> None: ...


class DraftRequest(NamedTuple):
    """A sequence to draft at most `max_tokens` tokens for. `key`: its request's id and its index."""
    key: tuple[str, int]
    tokens: Sequence[int]
    max_tokens: int
    params: SamplingParams
    seed: int


class Proposer(Protocol):
    """Proposes draft tokens. Wrong drafts cost time, and never change the output."""

    def propose(self, asked: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """A draft for each request; it may be empty."""

    def forget(self, key: tuple[str, int]) -> None:
        """Drops the state of a finished sequence."""


@dataclass(frozen=True)
class Request:
    """`params.n` answers to `prompt`. A smaller `priority` runs first, as in vLLM. `matchers`: one for each
    answer if not every token may follow. Prefixes are shared only between requests of equal `salt`. `text`:
    the prompt's, if it has one. `adapter` changes the model for it; its digest is in the salt. Rows of
    `images` stand for tokens of the prompt; their digests are in the hashes of pages."""
    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    arrival_s: float = field(default_factory=time.monotonic)
    matchers: tuple[Matcher, ...] = ()
    salt: bytes = b""
    text: str | None = None
    adapter: Adapter | None = None
    lora: LoRARequest | None = None     # which asked for the adapter
    images: PromptImages | None = None


@dataclass(eq=False, slots=True)
class Seq:
    """One answer in progress. `key` is its place in the queues: a smaller one runs first. `max_length`:
    tokens it may have, prompt included. From `min_length` tokens on it may end at a token of `stop_ids`.
    `num_reserved`: positions from 0 on whose pages no other sequence shares. `block_table`: a copy of the
    table's pages, replaced whenever the table changes."""
    request: Request
    index: int
    key: tuple[float, int, int]
    seed: int
    tokens: list[int]
    max_length: int
    stop_ids: frozenset[int]
    min_length: int
    matcher: Matcher | None = None
    logprobs: int | tuple[int, ...] | None = None
    needs_sync: bool = False            # its next step needs this step's token on the host
    can_draft: bool = False             # speculative decoding is allowed for it
    branches: list[Seq] = field(default_factory=list)
    table: SequenceTable | None = None
    slot: int = -1
    adapter_slot: int = -1              # while it has a slot
    num_scheduled: int = 0
    num_in_flight: int = 0
    num_reserved: int = 0
    block_table: tuple[int, ...] = ()
    num_cached: int = -1                # prompt tokens found in the prefix cache; -1: never ran
    # of the prompt's tokens but the first, as far as they are known; None: not asked for
    prompt_logprobs: list[Logprobs] | None = None
    num_scored: int = 0                 # of these, those that a launched step computes, too
    waiting: bool = False
    forking: bool = False               # the step that samples its branches' first tokens is launched
    finished: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that the host knows."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def shareable_tokens(self) -> Sequence[int]:
        """The tokens whose keys and values may come from the prefix cache: not those before a prompt token
        whose log probability must be computed, and none of a prompt that is to be computed as a whole."""
        found = self.prompt_logprobs
        if found is None and self.request.params.skip_reading_prefix_cache: return ()
        if found is None or len(found) >= self.num_prompt_tokens - 1: return self.tokens
        return self.tokens[:len(found) + 1]

    def logits_range(self, start: int, end: int) -> range:
        """The tokens start … end − 1 whose logits tell the log probability of the next prompt token, and
        that no launched step computes."""
        if self.prompt_logprobs is None: return range(0)
        return range(max(start, self.num_scored), min(end, self.num_prompt_tokens - 1))

    @property
    def name(self) -> tuple[str, int]:
        """Request id and index."""
        return self.request.id, self.index

    def reserve(self, end: int, page_size: int) -> bool:
        """Reserves pages for positions below `end`; False if the pool is out of pages."""
        if end <= self.num_reserved: return True
        assert self.table is not None
        if not self.table.reserve(end): return False
        self.refresh_block_table(page_size)
        return True

    def refresh_block_table(self, page_size: int) -> None:
        """Copies the block table after it changed."""
        assert self.table is not None
        self.block_table = tuple(self.table.pages)
        self.num_reserved = self.table.num_entries * page_size


def pad_end(start: int, num_tokens: int) -> int:
    """Returns one past the last position that `num_tokens` new tokens from `start` on write, padding
    included."""
    return start + pad_tokens(num_tokens)


def pad_tokens(num_tokens: int) -> int:
    """Returns the tokens computed for `num_tokens` new ones: whole groups, unless it is one."""
    return num_tokens if num_tokens == 1 else -(-num_tokens // GROUP) * GROUP


def new_sequences(request: Request, config: EngineConfig, max_len: int, arrival_number: int) -> Seq:
    """The first sequence of a request, with the others as its branches. `arrival_number` counts requests."""
    params = request.params
    assert len(request.matchers) == params.n or (not request.matchers and not params.needs_masks)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    offset = request.priority * config.ageing_s + request.arrival_s
    length = len(request.prompt)
    max_length = max_len if params.max_tokens is None else min(length + params.max_tokens, max_len)
    eos = frozenset[int]() if params.ignore_eos else frozenset(config.eos)
    stop_ids = frozenset(params.stop_token_ids) | eos
    # rejected draft tokens would stay in the token counts that penalties use
    can_draft = config.num_speculative_tokens > 0 and not params.filters.penalty
    made = [Seq(request, index, (offset, arrival_number, index), (seed + index) % (1 << 64),
                list(request.prompt), max_length, stop_ids, length + params.min_tokens,
                request.matchers[index] if request.matchers else None,
                tuple(params.logprob_token_ids) if params.logprob_token_ids else params.logprobs,
                bool(request.matchers) or can_draft, can_draft)
            for index in range(params.n)]
    made[0].branches = made[1:]
    if params.prompt_logprobs is not None: made[0].prompt_logprobs = []
    return made[0]


def check_request(request: Request, config: EngineConfig, max_len: int, vocab: int) -> None:
    """Raises `RequestError` for a request that can never run."""
    length, n = len(request.prompt), request.params.n
    if not length: raise RequestError("the prompt has no tokens", "at least one token id", "write a prompt")
    for bad in min(request.prompt), max(request.prompt):
        if not 0 <= bad < vocab:
            raise RequestError(f"token id {bad} is out of vocabulary", f"0 to {vocab - 1}",
                               "use ids of this model's tokenizer")
    request.params.require_vocabulary(vocab)
    if length >= max_len:
        holder = "the context holds" if max_len == config.max_len else "the cache of keys and values holds"
        raise RequestError(f"the prompt has {length} tokens, {holder} {max_len}",
                           f"at most {max_len - 1}, so that one can be added",
                           "shorten the prompt" if max_len == config.max_len else
                           "shorten the prompt, or give the cache more memory")
    if n > config.max_seqs:
        raise RequestError(f"n is {n}, and {config.max_seqs} sequences run at a time",
                           f"1 to {config.max_seqs}", "ask for fewer answers, or raise --max-num-seqs")
    whole = isinstance(request.priority, int) and not isinstance(request.priority, bool)
    if not whole or not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise RequestError(f"priority is {request.priority!r}",
                           f"-{MAX_PRIORITY} to {MAX_PRIORITY}, smaller first", "change priority")
    if request.adapter is not None and not config.max_adapters:
        raise RequestError(f"a request with adapter {request.adapter.name!r}, and the model has none",
                           "a request without", "load the model with enable_lora=True")
