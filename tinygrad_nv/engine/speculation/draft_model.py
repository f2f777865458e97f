"""A smaller model that guesses the next tokens (speculation.py's proposer).

Protocol: `DraftModel(runner, pool, budget)` has a runner with pages and slots of its own, so it knows nothing
of the larger model's: `propose` computes what it has not seen of each sequence, then a token at a time, all
sequences together. Nothing waits for the device in between: a step begins with the token that the one before
it chose there. Each slot draws with its sequence's own seed, and so with the noise that the verifying step
has, which makes a draft right as often as the two models' tokens agree under the same noise.

Of a draft that was wrong the keys and values are written again when the right tokens come. A sequence that
finds no pages or no slot is not drafted for. A step that fails loses drafts, and nothing else.
"""
from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from tinygrad.dtype import DType

from tinygrad_nv.engine.core import Device
from tinygrad_nv.engine.fit import token_bytes
from tinygrad_nv.engine.opening import optional_tokenizer
from tinygrad_nv.engine.running.runner import Runner
from tinygrad_nv.engine.scheduling.batch import GROUP, Batch, Sample, Sampled, Work
from tinygrad_nv.engine.scheduling.request import Asked, padded
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import ModelError
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.kvcache.table import Table
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.llama import Llama


@dataclass
class _Known:
    """What the device holds of a sequence: keys and values of `written` places, the last of them perhaps of a
    draft that followed `told` tokens."""
    slot: int
    table: Table
    written: int
    told: int = 0
    draft: list[int] = field(default_factory=list)

    def keep(self, tokens: Sequence[int]) -> None:
        """Of what is written, what these tokens have too; the last one is computed again, for what follows
        it."""
        right = 0
        for guessed, token in zip(self.draft, tokens[self.told:], strict=False):
            if guessed != token: break
            right += 1
        if self.told: self.written = min(self.written, self.told + right)
        self.written = min(self.written, len(tokens) - 1)


class DraftModel:
    """Drafts by another model, whose context has `length` tokens. A step of it computes at most `budget` rows
    of prompts."""

    def __init__(self, runner: Device, pool: PagePool, budget: int, length: int) -> None:
        self.runner, self.pool, self.length = runner, pool, length
        self.budget = max(GROUP, budget // GROUP * GROUP)
        self._known: dict[tuple[str, int], _Known] = {}
        self._slots = list(range(runner.max_seqs))

    def propose(self, asked: Sequence[Asked]) -> list[list[int]]:
        """A draft for each, empty for those without pages."""
        drafts: dict[tuple[str, int], list[int]] = {}
        ready = [each for each in asked if self._ready(each)]
        try:
            launched = self._read(ready)
            for step in range(1, max((each.most for each in ready), default=0)):
                if going := [each for each in ready if each.most > step]:
                    launched.append((going, self._launch([self._guess(each, step) for each in going])))
            for those, sampled in launched:
                for each, token in zip(those, sampled.result().tokens.tolist(), strict=True):
                    drafts.setdefault(each.key, []).append(token)
        except Exception:   # whatever a device can think of: tokens do not depend on drafts
            for key in list(self._known): self.forget(key)
            return [[] for _ in asked]
        for each in ready:
            known = self._known[each.key]
            known.told, known.draft = len(each.tokens), drafts[each.key]
            known.written = len(each.tokens) + each.most - 1
        return [drafts.get(each.key, []) for each in asked]

    def close(self) -> None:
        """Gives memory of the host back, once nothing runs."""
        if isinstance(self.runner, Runner): self.runner.close()

    def forget(self, key: tuple[str, int]) -> None:
        """The sequence is over."""
        if (known := self._known.pop(key, None)) is None: return
        known.table.release()
        self._slots.append(known.slot)

    def _ready(self, asked: Asked) -> bool:
        """Pages and a slot for a sequence and its draft, or False."""
        if len(asked.tokens) + asked.most > self.length: return False
        if (known := self._known.get(asked.key)) is None:
            if not self._slots: return False
            table = self.pool.open(asked.tokens)
            known = self._known[asked.key] = _Known(self._slots.pop(), table, table.computed)
            self.runner.begin(known.slot, asked.params, asked.seed, asked.tokens)
        known.keep(asked.tokens)
        rows = len(asked.tokens) - known.written
        if known.table.reserve(max(padded(known.written, rows), len(asked.tokens) + asked.most)): return True
        self.forget(asked.key)
        return False

    def _read(self, asked: Sequence[Asked]) -> list[tuple[list[Asked], Future[Sampled]]]:
        """Computes what was not yet of all sequences; each one's last step chooses a token."""
        launched, left = [], list(asked)
        while left:
            works, done, budget = list[Work](), list[Asked](), self.budget
            for each in left[:]:
                if budget < GROUP: break
                known, end = self._known[each.key], len(each.tokens)
                rows = min(end - known.written, budget)
                budget -= -(-rows // GROUP) * GROUP
                start, known.written = known.written, known.written + rows
                samples = (Sample(rows - 1, known.slot, end),) if known.written == end else ()
                tokens = list(each.tokens[start:known.written])
                works.append(Work(known.slot, start, tokens, tuple(known.table.pages), samples))
                if samples:
                    done.append(each)
                    left.remove(each)
            launched.append((done, self._launch(works)))
        for each in asked:
            table = self._known[each.key].table
            if (new := each.tokens[table.computed:]): table.advance(new)
        return launched

    def _guess(self, asked: Asked, step: int) -> Work:
        """The token after the one that was chosen last."""
        known, place = self._known[asked.key], len(asked.tokens) + step - 1
        return Work(known.slot, place, (), tuple(known.table.pages), (Sample(0, known.slot, place + 1),))

    def _launch(self, works: Sequence[Work]) -> Future[Sampled]:
        return self.runner.launch(Batch(tuple(works), self.pool.take_moves()))


def require_same_words(model: Tokenizer | None, draft: Tokenizer | None, sizes: tuple[int, int]) -> None:
    """Refuses a draft model with another vocabulary: its tokens would mean something else."""
    if model is not None and draft is not None:
        ours, theirs = (each.backend.get_vocab(with_added_tokens=True) for each in (model, draft))
        if ours == theirs: return
        others = sum(ours.get(word) != token for word, token in theirs.items())
        words = f"{others} of its {len(theirs)} tokens are others"
    elif sizes[0] == sizes[1]: return
    else: words = f"it has {sizes[1]} tokens, the model {sizes[0]}"
    raise ModelError(f"the draft model has another vocabulary: {words}", "a smaller model of the same family",
                     "choose another model for --speculative draft:DIR:K, or use ngram:K")


@dataclass(frozen=True)
class DraftFiles:
    """A draft model that is not loaded yet: its directory, and what it takes of the device."""
    directory: Path
    config: ModelConfig
    weight_bytes: int
    token_bytes: int

    @staticmethod
    def read(directory: Path, dtype: DType, config: ModelConfig, tokenizer: Tokenizer | None) -> DraftFiles:
        """A draft model for one of this configuration. Raises `ModelError` for one that cannot be."""
        own = read_config(directory)
        require_same_words(tokenizer, optional_tokenizer(directory)[0], (config.vocab_size, own.vocab_size))
        return DraftFiles(directory, own, own.parameters * dtype.itemsize, token_bytes(own, dtype))

    def load(self, beside: Runner, budget: int) -> DraftModel:
        """The model, with as many pages as the larger one's runner has, and on its thread."""
        dtype, length = beside.model.dtype, min(beside.max_len, self.config.max_positions)
        model = Llama(self.config, dtype, beside.model.device, positions=length)
        weights.load(model, self.directory)
        runner = Runner(model, pages=beside.capacity, page_size=beside.page_size, max_seqs=beside.max_seqs,
                        max_len=length, max_batched_tokens=budget, thread=beside.thread)
        return DraftModel(runner, PagePool(beside.capacity, beside.page_size), budget, length)
