"""Random tiny models on a model runner, and the state of their sequences."""
from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP, Sample, ScheduledSeq, SchedulerOutput
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageCopy
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.rope import RopeConfig
from tinygrad_nv.runtime.memory import host_bytes

SIZE, PAGES, LENGTH = 8, 64, 40     # tokens of a page, pages, tokens of a sequence
PLAIN = ModelConfig("LlamaForCausalLM", 96, 32, 48, 2, 4, 2, 8, 64,
                    (RopeConfig("default", 10000.0, 8, 64),) * 2, windows=(None, None))


def network(device: str | None = None, dtype: Any = dtypes.float32, **fields: Any) -> Llama:
    """A random model."""
    config = replace(PLAIN, **fields)
    made = Llama(config, dtype, device)
    random = np.random.default_rng(zlib.crc32(repr(config).encode()))
    def fill(x: Tensor | None, scale: float, mean: float = 0.0) -> None:
        if x is None: return
        numbers = (random.standard_normal(x.shape) * scale + mean).astype(np.float32)
        x.assign(Tensor(numbers, device=device).cast(dtype)).realize()
    fill(made.embedding, 1.0)
    if made.head is not made.embedding: fill(made.head, 1.0)
    fill(made.norm.weight, 0.1, 1.0)
    for block in made.blocks:
        attention, forward = block.attention, block.feed_forward
        for linear in (attention.qkv, attention.output, forward.gate_up, forward.down):
            fill(linear.weight, 0.3)
            fill(linear.bias, 0.3)
        for norm in (block.attention_norm, block.feed_forward_norm, attention.q_norm, attention.k_norm):
            if norm is not None: fill(norm.weight, 0.1, 1.0)
    return made


def poison(runner: ModelRunner) -> None:
    """Makes all pages NaN."""
    for tensor in runner.store.tensors:
        memory = host_bytes(tensor)
        assert memory is not None
        np.frombuffer(memory, np.uint8)[:] = 0xFF


def poison_pages(runner: ModelRunner, pages: list[int]) -> None:
    for view in runner.store.views: view[pages] = 0xFF


@dataclass
class Sequence:
    """A sequence: its tokens, how many are computed, its pages, one group of layers after the other."""
    slot: int
    tokens: list[int]
    prompt: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    unread: int = 0     # tokens that the host has not processed


class Driver:
    """Runs sequences on a model runner, at random."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner, self.random = runner, np.random.default_rng(seed)
        self.free = [int(page) for page in self.random.permutation(runner.capacity)]
        self.copies: list[PageCopy] = []
        self.sequences: list[Sequence] = []

    def add(self, prompt: int) -> Sequence:
        tokens = [int(token) for token in self.random.integers(0, self.runner.vocab_size, prompt)]
        made = Sequence(len(self.sequences), tokens, prompt)
        self.sequences.append(made)
        return made

    def reserve(self, sequence: Sequence, num_positions: int) -> None:
        """Pages for so many positions, in a new list."""
        groups = len(self.runner.groups.windows)
        count = len(sequence.pages) // groups
        missing = -(-num_positions // self.runner.page_size) - count
        if missing <= 0: return
        sequence.pages = [page for group in range(groups)
                          for page in (*sequence.pages[group * count:(group + 1) * count],
                                       *(self.free.pop() for _ in range(missing)))]

    def entry(self, sequence: Sequence, num_tokens: int, copies: tuple[Sequence, ...] = ()) -> ScheduledSeq:
        """The next tokens of a sequence. The last known token is sampled from, also for copies."""
        start = sequence.computed
        new = tuple(sequence.tokens[start:start + num_tokens])
        samples: tuple[Sample, ...] = ()
        if start + num_tokens == len(sequence.tokens):
            samples = tuple(Sample(num_tokens - 1, each.slot, start + num_tokens)
                            for each in (sequence, *copies))
        self.reserve(sequence, start + (1 if num_tokens == 1 else GROUP * -(-num_tokens // GROUP)))
        sequence.computed += num_tokens
        if num_tokens == 1 and start >= sequence.prompt: new = ()    # it is on the device
        return ScheduledSeq(sequence.slot, start, new, sequence.pages, samples)

    def fork(self, source: Sequence) -> Sequence:
        """A copy of a sequence with copied pages; it is sampled with the next entry of `source`, and has
        computed all tokens but the last."""
        made = self.add(0)
        made.tokens, made.prompt, made.computed = list(source.tokens), source.prompt, source.computed
        for page in source.pages:
            made.pages = [*made.pages, self.free.pop()]
            self.copies.append(PageCopy(CopyKind.DEVICE_TO_DEVICE, page, made.pages[-1]))
        return made

    def run(self, *seqs: ScheduledSeq) -> None:
        """Runs a step, and appends the sampled tokens."""
        batch = SchedulerOutput(seqs, tuple(self.copies))
        self.copies = []
        chosen = self.runner.launch(batch).result(60).tokens
        samples = [sample for entry in seqs for sample in entry.samples]
        assert len(samples) == len(chosen)
        for sample, token in zip(samples, chosen, strict=True):
            self.sequences[sample.slot].tokens.append(int(token))

    def drive(self, steps: int) -> None:
        """Random steps over the sequences, in random chunks."""
        for _ in range(steps):
            seqs = []
            for sequence in self.sequences:
                left = len(sequence.tokens) - sequence.computed
                if left and len(sequence.tokens) < LENGTH and self.random.random() < 0.8:
                    seqs.append(self.entry(sequence, int(self.random.integers(1, min(left, 11) + 1))))
            if seqs: self.run(*seqs)

    def check(self, model: Llama, tolerance: float = 1e-3) -> None:
        """Each token has the largest logit of the whole context, up to rounding."""
        for sequence in self.sequences:
            assert len(sequence.tokens) > sequence.prompt
            wanted = model(Tensor([sequence.tokens], dtype=dtypes.int32, device=model.device)).float().numpy()
            for position in range(sequence.prompt, len(sequence.tokens)):
                logits = wanted[0, position - 1]
                sampled = logits[sequence.tokens[position]]
                assert sampled >= logits.max() - tolerance, (sequence.slot, position)
