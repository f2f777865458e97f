"""Runs Whisper's steps, captured: a window through the encoder, a prompt, and one token of many sequences.

Protocol: a sequence has one of `max_seqs` slots, with pages of its own for its tokens and for keys and values
of its window; nothing is shared, and nothing grows beyond what the slot has. `encode(slot, features)` writes
those of cross-attention. `start(slot, prompt, at)` computes a prompt from its first token on, and returns
logits of the token `at` and of the last one. `step(slots, tokens, lengths)` appends one token to each of
several sequences, and returns logits. A step has one of `sizes` sequences, a prompt one of `PROMPTS` tokens;
padding neither writes nor attends. Without `capture` steps run eagerly. One thread at a time.

(The engine of decoders, worker/model_runner.py, has one set of pages that grow, and knows what a sequence
computed by its tokens, which prefix caching, preemption and offload rely on. A window's keys and values are
known by no tokens, and all sequences end within 448: slots with all their pages are simpler, and as batched.)
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tinygrad import Device, Tensor, dtypes

from tinygrad_nv.engine.memory_planning import ACTIVATIONS
from tinygrad_nv.engine.worker.captured_step import CapturedStep
from tinygrad_nv.engine.worker.input_buffer import InputBuffer, InputField
from tinygrad_nv.kvcache.store import PageStore
from tinygrad_nv.models.whisper.network import SpeechBatch, Whisper
from tinygrad_nv.runtime.memory import allocate, read
from tinygrad_nv.runtime.memory_pool import label_allocations

PAGE = 16               # tokens
PROMPTS = (8, 32, 128, 512)
ALIGNED = 64            # words


class SpeechRunner:
    """`model` for at most `max_seqs` sequences."""

    def __init__(self, model: Whisper, max_seqs: int, capture: bool = True) -> None:
        config = model.config
        self.model, self.max_seqs, self.capture = model, max_seqs, capture
        self.device = Device.canonicalize(model.device)
        self.entries, self.cross_entries = (-(-n // PAGE) for n in (config.max_tokens, config.positions))
        self.own, self.cross = (PageStore(config.pages, self.device, model.dtype, max_seqs * entries, PAGE)
                                for entries in (self.entries, self.cross_entries))
        self.tables, self.cross_tables = (
            np.arange(max_seqs * entries, dtype=np.int32).reshape(max_seqs, entries)
            for entries in (self.entries, self.cross_entries))
        powers = [1 << k for k in range((max_seqs - 1).bit_length())]
        self.sizes = [*powers, max_seqs]
        self.prompts = [n for n in PROMPTS if n < config.max_tokens] + [config.max_tokens]
        self.steps: dict[tuple[str, int], _Step] = {}

    def encode(self, slot: int, features: np.ndarray) -> None:
        """Keys and values of a window, float32 [frames, mels], for a slot."""
        self._step("encode", 1)({"features": features[None].astype(np.float32).view(np.int32),
                                 "table": self.cross_tables[[slot]],
                                 "lengths": [self.model.config.positions]})

    def start(self, slot: int, prompt: Sequence[int], at: int) -> np.ndarray:
        """float32 [2, vocab]: logits of the prompt's token `at`, and of its last."""
        count = len(prompt)
        size = next(n for n in self.prompts if n >= count)
        front = size - count
        return self._step("prompt", size)({
            "tokens": np.pad(prompt, (front, 0)), "positions": np.pad(np.arange(count), (front, 0)),
            "table": self.tables[[slot]], "lengths": [count],
            "cross_table": np.broadcast_to(self.cross_tables[slot], (size, self.cross_entries)),
            "cross_lengths": np.pad([self.model.config.positions] * count, (front, 0)),
            "rows": [front + at, size - 1]})

    def step(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
        """float32 [sequences, vocab]: logits of one new token of each. `lengths` count it."""
        count = len(slots)
        size = next(n for n in self.sizes if n >= count)
        rows, after = [*slots, *[slots[0]] * (size - count)], (0, size - count)
        padded = np.pad(lengths, after)
        return self._step("token", size)({
            "tokens": np.pad(tokens, after), "positions": np.maximum(padded - 1, 0),
            "table": self.tables[rows], "lengths": padded, "cross_table": self.cross_tables[rows],
            "cross_lengths": np.where(padded, self.model.config.positions, 0)})[:count]

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Captures all steps but those of long prompts. `progress(done, total)` is called for each."""
        jobs = [("encode", 1), ("prompt", self.prompts[0]), *(("token", size) for size in self.sizes)]
        for done, (kind, size) in enumerate(jobs):
            progress(done, len(jobs))
            self._step(kind, size).prepare()
        progress(len(jobs), len(jobs))

    def close(self) -> None:
        """Frees page-locked memory."""
        for step in self.steps.values(): step.inputs.close()
        for store in (self.own, self.cross): store.close()

    # **** steps ****

    def _step(self, kind: str, size: int) -> _Step:
        if (kind, size) not in self.steps:
            compute = {"encode": self._encode, "prompt": self._prompt, "token": self._decode}[kind]
            rows = {"encode": 0, "prompt": 2, "token": size}[kind]
            self.steps[kind, size] = _Step(self, self._shapes(kind, size), compute, rows)
        return self.steps[kind, size]

    def _shapes(self, kind: str, size: int) -> dict[str, tuple[int, ...]]:
        config = self.model.config
        if kind == "encode":
            return {"features": (1, config.frames, config.mels), "table": (1, self.cross_entries),
                    "lengths": (1,)}
        seqs = 1 if kind == "prompt" else size
        return {"tokens": (size,), "positions": (size,), "table": (seqs, self.entries), "lengths": (seqs,),
                "cross_table": (size, self.cross_entries), "cross_lengths": (size,),
                **({"rows": (2,)} if kind == "prompt" else {})}

    def _encode(self, given: Mapping[str, Tensor]) -> None:
        model = self.model
        encoded = model.encoder(given["features"].cast(model.dtype).contiguous())
        Tensor.realize(*model.decoder.cross(encoded, given["table"], given["lengths"], self.cross.cache))

    def _prompt(self, given: Mapping[str, Tensor]) -> Tensor: return self._tokens(given, given["rows"])

    def _decode(self, given: Mapping[str, Tensor]) -> Tensor: return self._tokens(given, None)

    def _tokens(self, given: Mapping[str, Tensor], rows: Tensor | None) -> Tensor:
        new = int(given["tokens"].shape[0]) // int(given["lengths"].shape[0])
        batch = SpeechBatch(new, *(given[name] for name in ("table", "lengths", "cross_table",
                                                            "cross_lengths")))
        return self.model.decoder(given["tokens"], given["positions"], batch, self.own.cache,
                                  self.cross.cache, rows)


class _Step:
    """A step of one size, with its inputs and its logits, `rows` of them, in memory."""

    def __init__(self, runner: SpeechRunner, shapes: Mapping[str, tuple[int, ...]],
                 compute: Callable[[Mapping[str, Tensor]], Tensor | None], rows: int) -> None:
        fields, words = [], 0
        for name, shape in shapes.items():
            fields.append(InputField(name, shape, words))
            words += -(-int(np.prod(shape)) // ALIGNED) * ALIGNED
        self.fields, self.words, self.compute = fields, words, compute
        self.logits: Tensor | None = None
        with label_allocations(ACTIVATIONS):
            self.inputs = InputBuffer(runner.device, words)
            if rows:
                self.logits = Tensor.empty(rows, runner.model.config.vocab_size, device=runner.device)
                allocate(self.logits)
        self.given = {each.name: self.inputs.tensors(
            [each], dtypes.float32 if each.name == "features" else dtypes.int32)[each.name]
            for each in fields}
        self.captured = CapturedStep(self._run, lambda: [] if self.logits is None else [self.logits],
                                     runner.device) if runner.capture else None

    def _run(self) -> None:
        made = self.compute(self.given)
        if self.logits is not None and made is not None: self.logits.assign(made).realize()

    def prepare(self) -> None:
        """Captures the step, if it is to be captured."""
        if self.captured is not None: self.captured.prepare()

    def __call__(self, values: Mapping[str, np.ndarray | Sequence[int]]) -> np.ndarray:
        """Runs the step. Returns a copy of its logits, if it has some."""
        words = self.inputs.open()
        for each in self.fields:
            words[each.offset:each.offset + each.size] = np.asarray(values[each.name]).reshape(-1)
        self.inputs.send(self.words)
        with label_allocations(ACTIVATIONS): (self.captured or self._run)()
        if self.logits is None: return np.empty(0, np.float32)
        return read(self.logits, np.float32).reshape(self.logits.shape).copy()
