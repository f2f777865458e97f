"""The device's side of serving: batches of many sequences as captured steps over pages.

Protocol: `launch(batch)` returns at once with what will be `Sampled`. Batches run in the order of their
launches, on a thread of the runner's own, the only one that touches tinygrad once a model is loaded: it
writes a batch's words (inputs.py), puts the copies of pages before it (kvcache/store.py), and replays
the graph of its shape and that of the sampler. On a device with a driver all of that is queued, and another
thread waits for the tokens: so the next batch may be launched before they are known. On a CPU the thread
computes.

A step's graph gives logits of the rows that are sampled, and the sampler's the tokens, which stay for the
works of the next step that begin with a token the host does not know yet. Graphs are captured ahead by
`warm_up`, or when a shape comes for which no captured one has room, or comes often. After an exception the
runner can be used; what the step had written is as it may be.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from tinygrad import Device, Tensor, dtypes

from tinygrad_nv.engine.fit import ACTIVATIONS, WEIGHTS
from tinygrad_nv.engine.running.graphs import Captured
from tinygrad_nv.engine.running.inputs import SAMPLER, STEPS, Field, Inbox, Layout, Shape, Tables, write
from tinygrad_nv.engine.running.outputs import Outbox
from tinygrad_nv.engine.running.pages import calibrated, stored_dtype
from tinygrad_nv.engine.running.sampler import Slots, counted, next_tokens
from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.scheduling.batch import GROUP, Batch, Sampled
from tinygrad_nv.errors import RequestError
from tinygrad_nv.kvcache.store import PageStore
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.paged import PagedPlace, Part
from tinygrad_nv.runtime.memory_pool import labelled
from tinygrad_nv.runtime.observe.ranges import layer, span

RARE = 8        # times that a shape comes before it is captured, where another has room for it
MOST_ROOM = 4   # of the rows that are needed
T = TypeVar("T")


class Runner:
    """`model` over `pages` pages of `page_size` tokens, for at most `max_seqs` sequences at a time of at most
    `max_len` tokens, and `max_batched_tokens` rows of a step besides one for each sequence. Runners of one
    device share a `thread`."""

    def __init__(self, model: Llama, *, pages: int, page_size: int = 16, max_seqs: int = 64,
                 max_len: int | None = None, max_batched_tokens: int = 512, kv_dtype: str = "auto",
                 host_pages: int = 0, thread: ThreadPoolExecutor | None = None) -> None:
        self.model, self.page_size, self.max_seqs = model, page_size, max_seqs
        self.device = Device.canonicalize(model.device)
        self.max_len = model.config.max_positions if max_len is None else max_len
        self.vocab_size, self.capacity = model.config.vocab_size, pages
        self.entries = -(-(self.max_len + GROUP - 1) // page_size)
        if model.positions < self.entries * page_size:
            model.positions = self.entries * page_size
            vars(model).pop("rope_tables", None)
        if pages < self.entries:
            raise RequestError(f"a KV cache of {pages} pages of {page_size} tokens",
                               f"{self.entries} at least: a context of {self.max_len} tokens",
                               "give the cache more memory, or lower --max-model-len")
        # made here: inside a captured step they would be computed at every replay
        with labelled(WEIGHTS): _ = model.rope_tables
        dtype = stored_dtype(kv_dtype, model.dtype)
        self.store = PageStore(model.config, self.device, dtype, pages, page_size, host_pages)
        if dtype == dtypes.int8: self.store.scale(calibrated(model, self.device, page_size))
        self.tables = Tables(max_seqs, self.entries)
        self.most = self._most(max_batched_tokens)
        self.inbox = Inbox(self.device, Layout(self.most, self.entries).words)
        with labelled(ACTIVATIONS):
            self.outbox = Outbox(self.device, self.most.samples, self.vocab_size)
            self.slots = Slots(max_seqs, self.vocab_size, self.device)
        self.masks = Masks(self.device, self.most.samples, self.vocab_size)
        self.kinds = Kinds(max_seqs)
        self.steps: dict[Shape, tuple[Layout, Captured]] = {}
        self.samplers: dict[tuple[int, Filters], Captured] = {}
        self.rare: Counter[Shape] = Counter()   # how often shapes that are not captured have come
        self.failed: BaseException | None = None
        self.thread = thread or ThreadPoolExecutor(1, "nv-device")

    def _most(self, tokens: int) -> Shape:
        """A shape as large as any: a sequence with rows of its own may fill its last group up."""
        groups = min(self.max_seqs + -(-tokens // GROUP), STEPS[-1] - self.max_seqs)
        fitting = Shape.fitting(self.max_seqs, groups, self.max_seqs, False)
        return Shape(fitting.decode, fitting.groups, max(fitting.samples, GROUP * self.max_seqs), False)

    # **** what is asked for ****

    def launch(self, batch: Batch) -> Future[Sampled]:
        """Runs a batch after those launched before; the result is there when its tokens are."""
        done: Future[Sampled] = Future()
        self.thread.submit(self._launch, batch, done, self.kinds.of(batch))
        return done

    def begin(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int],
              output: Sequence[int] = ()) -> None:
        """From the next batch on `slot` is a sequence that is sampled so; prompt, and what there is of its
        output already, count for penalties."""
        self.kinds.begin(slot, params.filters)
        self._later(lambda: self.slots.begin(slot, params, seed, prompt, output))

    def fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        """From the next batch on `slot` is sampled as `source`, but for the seed, and goes on with its last
        token."""
        self.kinds.begin(slot, params.filters)
        self._later(lambda: self._fork(source, slot, params, seed))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None,
                shapes: Iterable[Shape] | None = None) -> None:
        """Captures these shapes ahead, by default of pure decode steps and a group; `progress(done, total)`
        follows."""
        wanted = list(shapes) if shapes is not None else self.usual_shapes()
        for done, shape in enumerate(wanted):
            progress(done, len(wanted))
            self._now(lambda shape=shape: self._warm(shape))  # type: ignore[misc]
        progress(len(wanted), len(wanted))

    def usual_shapes(self) -> list[Shape]:
        """What every load comes to need: decode steps of each size, chunks of a prompt alone, and chunks
        beside few and many that decode, of sizes with room for those between."""
        decode = [Shape.fitting(1 << i, 0, 0, True) for i in range((self.max_seqs - 1).bit_length() + 1)]
        chunks = [Shape.fitting(0, groups, 1, False) for groups in (1, 2, 4, 8)]
        most = self.most.rows // GROUP - self.most.decode // GROUP
        beside = [Shape.fitting(rows, groups, 2 * rows, False)
                  for rows in sorted({min(GROUP, self.max_seqs), self.max_seqs})
                  for groups in (3, 15, 56) if groups <= most]
        return decode + chunks + list(dict.fromkeys(beside))

    def close(self) -> None:
        """Waits for what was launched, and gives page-locked memory back."""
        self.thread.shutdown()
        for each in (self.outbox, self.inbox, self.masks, self.store): each.close()

    # **** on the device's thread ****

    def _later(self, work: Callable[[], None]) -> None: self.thread.submit(self._queued, work)

    def _now(self, work: Callable[[], T]) -> T: return self.thread.submit(work).result()

    def _queued(self, work: Callable[[], None]) -> None:
        try: work()
        except BaseException as error: self.failed = error  # the next batch says so

    def _fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        self.slots.fork(source, slot, params, seed)
        self.outbox.fork(source, slot)

    def _launch(self, batch: Batch, done: Future[Sampled], filters: Filters) -> None:
        try:
            if (failed := self.failed) is not None:
                self.failed = None
                raise failed
            with labelled(ACTIVATIONS):
                self.store.move(batch.moves)
                self.outbox.deliver(batch, self._run(batch, filters) if batch.works else 0, done)
        except BaseException as error: done.set_exception(error)

    def _run(self, batch: Batch, filters: Filters) -> int:
        """Queues a step; returns for how many samples its shape is."""
        shape = self._serving(Shape.of(batch))
        layout, step = self._step(shape)
        with span(f"step {shape}"):
            write(self.inbox.open(), layout, batch, self.tables, self.outbox.last)
            self.inbox.send(layout.words)
            if filters.mask: self.masks.send(batch, shape.samples)
            step()
            if batch.samples: self._sampler(shape.samples, filters)()
        return shape.samples

    # **** graphs ****

    def _serving(self, shape: Shape) -> Shape:
        """The shape itself, or while it is rare a captured one that has room for it: to capture one takes as
        long as hundreds of small steps (0.3 s against 1 ms for the model in the box)."""
        if shape in self.steps or shape.direct or self.rare[shape] >= RARE: return shape
        self.rare[shape] += 1
        roomy = [each for each in self.steps if each.holds(shape) and each.rows <= MOST_ROOM * shape.rows]
        return min(roomy, key=lambda each: (each.rows, each.samples), default=shape)

    def _warm(self, shape: Shape) -> None:
        layout, step = self._step(shape)
        write(self.inbox.open(), layout, Batch(()), self.tables, self.outbox.last)
        self.inbox.send(layout.words)
        step()
        self._sampler(shape.samples, Filters())()

    def _step(self, shape: Shape) -> tuple[Layout, Captured]:
        if shape not in self.steps:
            layout = Layout(shape, self.entries)
            if shape.rows > self.most.rows or layout.words > self.inbox.limit:
                raise RequestError(f"a batch of {shape}", f"at most {self.most}", "lower the token budget")
            inputs = self.inbox.tensors(layout.fields)
            self.steps[shape] = layout, self._captured(lambda: self._compute(shape, inputs))
        return self.steps[shape]

    def _sampler(self, samples: int, filters: Filters) -> Captured:
        if (samples, filters) not in self.samplers:
            fields = Layout(Shape(samples, 0, samples, True), self.entries).fields[:len(SAMPLER)]
            inputs = self.inbox.tensors(fields)
            if filters.mask: inputs |= self.masks.tensors(samples)
            self.samplers[samples, filters] = self._captured(lambda: self._sample(samples, filters, inputs))
        return self.samplers[samples, filters]

    def _compute(self, shape: Shape, inputs: dict[str, Tensor]) -> None:
        tokens = inputs["tokens"]
        if shape.decode:
            chosen = self.outbox.tokens(self.most.samples)
            with layer("embedding"):
                tokens = (tokens < 0).where(chosen[(-1 - tokens).maximum(0)], tokens).contiguous()
        parts = []
        if shape.decode: parts.append(Part(1, inputs["decode_table"], inputs["decode_lengths"]))
        if shape.groups: parts.append(Part(GROUP, inputs["group_table"], inputs["group_lengths"]))
        place = PagedPlace(tuple(parts), self.model.rope_tables)
        made = self.model.rows(tokens, place, self.store.cache, inputs.get("wanted"))
        self.outbox.logits(shape.samples).assign(made).realize()

    def _sample(self, samples: int, filters: Filters, inputs: dict[str, Tensor]) -> None:
        slots = inputs["slots"]
        with layer("sampler"):
            tokens = next_tokens(self.outbox.logits(samples), filters, self.slots, slots, inputs["places"],
                                 inputs.get("masks"))
            made = [self.outbox.tokens(samples).assign(tokens)]
            if filters.penalty: made.append(counted(self.slots, slots, tokens))
        Tensor.realize(*made)

    def _captured(self, step: Callable[[], None]) -> Captured:
        return Captured(step, lambda: self.slots.written, self.device)


class Kinds:
    """Which filters each slot needs, and so a batch: a number for each kind, since sets of numbers are made
    faster than sets of `Filters`. On the thread of whoever launches."""

    def __init__(self, slots: int) -> None:
        self.known: list[Filters] = [Filters()]
        self.of_slot = [0] * slots
        self.joined: dict[tuple[frozenset[int], bool], Filters] = {}

    def begin(self, slot: int, filters: Filters) -> None:
        """A slot's from now on."""
        if filters not in self.known: self.known.append(filters)
        self.of_slot[slot] = self.known.index(filters)

    def of(self, batch: Batch) -> Filters:
        """What any sample of a batch needs."""
        kinds, masked = set(), False
        for work in batch.works:
            for sample in work.samples:
                kinds.add(self.of_slot[sample.slot])
                masked = masked or sample.mask is not None
        if (made := self.joined.get(key := (frozenset(kinds), masked))) is None:
            made = Filters(mask=masked)
            for kind in kinds: made |= self.known[kind]
            self.joined[key] = made
        return made


class Masks:
    """Packed masks of samples, on the device from the first batch on that has some."""

    def __init__(self, device: str, samples: int, vocab_size: int) -> None:
        self.device, self.samples, self.words = device, samples, -(-vocab_size // 32)
        self.box: Inbox | None = None

    def tensors(self, samples: int) -> dict[str, Tensor]:
        """uint32 [samples, ⌈vocab / 32⌉]."""
        return self._opened().tensors([Field("masks", (samples, self.words), 0)], dtypes.uint32)

    def send(self, batch: Batch, samples: int) -> None:
        """Those of a batch; a sample without one may be any token."""
        box = self._opened()
        into = box.open()[:samples * self.words].view(np.uint32).reshape(samples, self.words)
        given = [sample.mask for work in batch.works for sample in work.samples]
        for i in range(samples):
            mask = given[i] if i < len(given) else None
            into[i] = 0xFFFFFFFF if mask is None else mask
        box.send(samples * self.words)

    def _opened(self) -> Inbox:
        if self.box is None: self.box = Inbox(self.device, self.samples * self.words)
        return self.box

    def close(self) -> None:
        """Gives page-locked memory back."""
        if self.box is not None: self.box.close()
