"""Proposer with a draft model: a smaller model that drafts the next tokens.

Protocol: `DraftModelProposer(runner, pool, budget)` has a model runner with its own pages and slots.
`propose` first computes the tokens of each sequence that the draft model has not seen, then drafts token by
token, all sequences in one batch. The host does not wait in between: each step starts with the token sampled
by the step before it, on the device. Each slot samples with its sequence's seed, and so with the noise of the
verifying step. A draft token is accepted as often as both models sample the same token under the same noise.

Keys and values of rejected draft tokens are overwritten when the accepted tokens arrive. A sequence without
pages or a slot gets no draft. A step that fails loses drafts, and nothing else.
"""
from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tinygrad.dtype import DType

from tinygrad_nv.engine.core import Executor
from tinygrad_nv.engine.loading import optional_tokenizer, weights_identity
from tinygrad_nv.engine.memory_planning import token_bytes
from tinygrad_nv.engine.scheduling.request import DraftRequest, pad_end
from tinygrad_nv.engine.scheduling.scheduler_output import (
    GROUP,
    Sample,
    SamplerOutput,
    ScheduledSeq,
    SchedulerOutput,
)
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.engine.worker.kv_cache_dtype import resolve_kv_cache_dtype
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import ModelError
from tinygrad_nv.kvcache.hybrid_table import SequenceTable
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.models import weights
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.tied import load_config

if TYPE_CHECKING:
    from tinygrad_nv.models.config import ModelConfig


@dataclass
class _DraftState:
    """The draft model's state of a sequence: keys and values of `written` positions. Those from position
    `num_known_tokens` on are of the last `draft`."""
    slot: int
    table: SequenceTable
    written: int
    num_known_tokens: int = 0
    draft: list[int] = field(default_factory=list)

    def keep_accepted(self, tokens: Sequence[int]) -> None:
        """Keeps the positions whose tokens equal the accepted ones. The last token is computed again, for its
        logits."""
        num_accepted = 0
        for draft_token, token in zip(self.draft, tokens[self.num_known_tokens:], strict=False):
            if draft_token != token: break
            num_accepted += 1
        if self.num_known_tokens: self.written = min(self.written, self.num_known_tokens + num_accepted)
        self.written = min(self.written, len(tokens) - 1)


class DraftModelProposer:
    """Drafts by a model of context `length`. A step of it prefills at most `budget` tokens."""

    def __init__(self, runner: Executor, pool: PagePool, budget: int, length: int) -> None:
        self.runner, self.pool, self.length = runner, pool, length
        self.budget = max(GROUP, budget // GROUP * GROUP)
        self._states: dict[tuple[str, int], _DraftState] = {}
        self._slots = list(range(runner.max_seqs))

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """A draft for each request, empty for those without pages."""
        drafts: dict[tuple[str, int], list[int]] = {}
        ready = [each for each in requests if self._allocate(each)]
        try:
            launched = self._prefill(ready)
            for step in range(1, max((each.max_tokens for each in ready), default=0)):
                if going := [each for each in ready if each.max_tokens > step]:
                    launched.append((going, self._launch([self._decode(each, step) for each in going])))
            for those, sampled in launched:
                for each, token in zip(those, sampled.result().tokens.tolist(), strict=True):
                    drafts.setdefault(each.key, []).append(token)
        except Exception:   # a device raises arbitrary exceptions, and the output does not depend on drafts
            for key in list(self._states): self.forget(key)
            return [[] for _ in requests]
        for each in ready:
            state = self._states[each.key]
            state.num_known_tokens, state.draft = len(each.tokens), drafts[each.key]
            state.written = len(each.tokens) + each.max_tokens - 1
        return [drafts.get(each.key, []) for each in requests]

    def close(self) -> None:
        """Frees host memory. No step may be running."""
        if isinstance(self.runner, ModelRunner): self.runner.close()

    def forget(self, key: tuple[str, int]) -> None:
        """Drops the state of a finished sequence."""
        if (state := self._states.pop(key, None)) is None: return
        state.table.release()
        self._slots.append(state.slot)

    def _allocate(self, request: DraftRequest) -> bool:
        """Reserves a slot, and pages for the sequence and its draft, or returns False."""
        if len(request.tokens) + request.max_tokens > self.length: return False
        if (state := self._states.get(request.key)) is None:
            if not self._slots: return False
            table = self.pool.open(request.tokens)
            state = self._states[request.key] = _DraftState(self._slots.pop(), table, table.computed)
            self.runner.start_slot(state.slot, request.params, request.seed, request.tokens)
        state.keep_accepted(request.tokens)
        num_tokens = len(request.tokens) - state.written
        end = len(request.tokens) + request.max_tokens
        if state.table.reserve(max(pad_end(state.written, num_tokens), end)): return True
        self.forget(request.key)
        return False

    def _prefill(self, requests: Sequence[DraftRequest]
                 ) -> list[tuple[list[DraftRequest], Future[SamplerOutput]]]:
        """Computes the unseen tokens of all sequences, in chunks. The last chunk of each samples its first
        draft token."""
        launched, left = [], list(requests)
        while left:
            seqs, done, budget = list[ScheduledSeq](), list[DraftRequest](), self.budget
            for each in left[:]:
                if budget < GROUP: break
                state, end = self._states[each.key], len(each.tokens)
                num_tokens = min(end - state.written, budget)
                budget -= -(-num_tokens // GROUP) * GROUP
                start, state.written = state.written, state.written + num_tokens
                samples = (Sample(num_tokens - 1, state.slot, end),) if state.written == end else ()
                tokens = list(each.tokens[start:state.written])
                seqs.append(ScheduledSeq(state.slot, start, tokens, tuple(state.table.pages), samples))
                if samples:
                    done.append(each)
                    left.remove(each)
            launched.append((done, self._launch(seqs)))
        for each in requests:
            table = self._states[each.key].table
            if (new := each.tokens[table.computed:]): table.advance(new)
        return launched

    def _decode(self, request: DraftRequest, step: int) -> ScheduledSeq:
        """The next draft token, after the one sampled last."""
        state, position = self._states[request.key], len(request.tokens) + step - 1
        sample = Sample(0, state.slot, position + 1)
        return ScheduledSeq(state.slot, position, (), tuple(state.table.pages), (sample,))

    def _launch(self, seqs: Sequence[ScheduledSeq]) -> Future[SamplerOutput]:
        return self.runner.launch(SchedulerOutput(tuple(seqs), self.pool.take_copies()))


def require_same_vocabulary(model: Tokenizer | None, draft: Tokenizer | None, sizes: tuple[int, int]) -> None:
    """Raises `ModelError` for a draft model with another vocabulary: its token ids would mean other text."""
    if model is not None and draft is not None:
        ours, theirs = (each.backend.get_vocab(with_added_tokens=True) for each in (model, draft))
        if ours == theirs: return
        others = sum(ours.get(word) != token for word, token in theirs.items())
        words = f"{others} of its {len(theirs)} tokens differ"
    elif sizes[0] == sizes[1]: return
    else: words = f"it has {sizes[1]} tokens, the model {sizes[0]}"
    raise ModelError(f"the draft model has another vocabulary: {words}", "a smaller model of the same family",
                     "choose another model for --speculative draft:DIR:K, or use ngram:K")


@dataclass(frozen=True)
class DraftModelFiles:
    """A draft model that is not loaded yet: its directory and its memory."""
    directory: Path
    config: ModelConfig
    weight_bytes: int
    token_bytes: int

    @staticmethod
    def read(directory: Path, dtype: DType, config: ModelConfig,
             tokenizer: Tokenizer | None) -> DraftModelFiles:
        """Reads the config of a draft model. Raises `ModelError` if it does not match the target model."""
        own = load_config(directory)
        if own.has_states:
            raise ModelError(f"the draft model {directory} has layers that keep states ({own.architecture})",
                             "a draft model of attention alone", "choose another, or --speculative ngram")
        sizes = config.vocab_size, own.vocab_size
        require_same_vocabulary(tokenizer, optional_tokenizer(directory)[0], sizes)
        return DraftModelFiles(directory, own, weights.nbytes(own, dtype, directory),
                               token_bytes(own, resolve_kv_cache_dtype("auto", dtype, own.quantization)))

    def load(self, beside: ModelRunner, budget: int) -> DraftModelProposer:
        """Loads the model, with as many pages as the target model's runner has, on the runner's thread."""
        dtype, length = beside.model.dtype, min(beside.max_len, self.config.max_positions)
        model = Llama(self.config, dtype, beside.model.device, positions=length)
        model.int8_inputs = beside.model.int8_inputs
        weights.load(model, self.directory)
        runner = ModelRunner(model, pages=beside.capacity, page_size=beside.page_size,
                             max_seqs=beside.max_seqs, max_len=length, max_batched_tokens=budget,
                             thread=beside.thread, identity=weights_identity(self.directory))
        return DraftModelProposer(runner, PagePool(beside.capacity, beside.page_size), budget, length)
