"""The device's side of serving: batches of many sequences as captured steps over pages.

Protocol: `launch(batch)` returns at once with what will be `Sampled`. Batches run in the order of their
launches, on a thread of the runner's own, the only one that touches tinygrad once a model is loaded: it
writes a batch's words (runner_inputs.py), puts the copies of pages before it (runner_pages.py), and replays
the graph of its shape and that of the sampler. On a device with a driver all of that is queued, and another
thread waits for the tokens: so the next batch may be launched before they are known. On a CPU the thread
computes.

A step's graph gives logits of the rows that are sampled, and the sampler's the tokens; it also keeps them by
slot, for works that begin with a token the host does not know yet. Graphs are captured when a shape first
comes, or ahead by `warm_up`. After an exception the runner can be used; what the step had written is as it
may be.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.device import Buffer
from tinygrad.uop.ops import UOp

from tinygrad_nv.engine.batch import GROUP, Batch, Sampled
from tinygrad_nv.engine.fit import ACTIVATIONS, WEIGHTS
from tinygrad_nv.engine.runner_inputs import STEPS, Inbox, Layout, Shape, Tables, write
from tinygrad_nv.engine.runner_pages import PageStore
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import RequestError
from tinygrad_nv.graphs.inputs import region
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.paged import PagedPlace, Part
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Download
from tinygrad_nv.runtime.memory_pool import labelled
from tinygrad_nv.runtime.ranges import layer, span

T = TypeVar("T")


class Runner:
    """`model` over `pages` pages of `page_size` tokens, for at most `max_seqs` sequences at a time of at most
    `max_len` tokens, and `max_batched_tokens` rows of a step besides one for each sequence."""

    def __init__(self, model: Llama, *, pages: int, page_size: int = 16, max_seqs: int = 64,
                 max_len: int | None = None, max_batched_tokens: int = 512, kv_dtype: str = "auto",
                 host_pages: int = 0) -> None:
        self.model, self.page_size, self.max_seqs = model, page_size, max_seqs
        self.device = Device.canonicalize(model.device)
        self.max_len = model.config.max_positions if max_len is None else max_len
        self.vocab_size, self.capacity = model.config.vocab_size, pages
        self.entries = -(-(self.max_len + GROUP - 1) // page_size)
        if model.positions < self.entries * page_size:
            model.positions = self.entries * page_size
            vars(model).pop("rope_tables", None)
        self.store = PageStore(model.config, self.device, model.dtype, pages, page_size, host_pages)
        # made here: inside a captured step they would be computed at every replay
        with labelled(WEIGHTS): _ = model.rope_tables
        self.tables = Tables(max_seqs, self.entries)
        self.most = self._most(max_batched_tokens)
        self.inbox = Inbox(self.device, Layout(self.most, self.entries))
        with labelled(ACTIVATIONS):
            self.logits = region(self.device, 4 * self.most.samples * self.vocab_size)
            self.chosen = region(self.device, 4 * self.most.samples)
            self.last = Tensor.zeros(max_seqs + 1, dtype=dtypes.int32, device=self.device).contiguous()
            self.last.realize()
        self.steps: dict[Shape, tuple[Layout, Any]] = {}
        self.samplers: dict[int, Any] = {}
        self.thread = ThreadPoolExecutor(1, "nv-device")
        self.reader = ThreadPoolExecutor(1, "nv-reader")

    def _most(self, tokens: int) -> Shape:
        """A shape as large as any: a sequence with rows of its own may fill its last group up."""
        groups = self.max_seqs + -(-tokens // GROUP)
        fitting = Shape.fitting(self.max_seqs, min(groups, STEPS[-1] - self.max_seqs), self.max_seqs, False)
        return Shape(fitting.decode, fitting.groups, max(fitting.samples, GROUP * self.max_seqs), False)

    # **** what is asked for ****

    def launch(self, batch: Batch) -> Future[Sampled]:
        """Runs a batch after those launched before; the result is there when its tokens are."""
        done: Future[Sampled] = Future()
        self.thread.submit(self._launch, batch, done)
        return done

    def begin(self, slot: int, params: SamplingParams, seed: int, tokens: Sequence[int]) -> None:
        """From the next batch on `slot` is a sequence that is sampled so; `tokens` count for penalties."""

    def fork(self, source: int, slot: int, seed: int) -> None:
        """From the next batch on `slot` is sampled as `source`, with another seed."""
        self._later(lambda: self._fork(source, slot))

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
        """What every load comes to need: decode steps of each size, and chunks of a prompt alone."""
        decode = [Shape.fitting(1 << i, 0, 0, True) for i in range((self.max_seqs - 1).bit_length() + 1)]
        return decode + [Shape.fitting(0, groups, 1, False) for groups in (1, 2, 4, 8)]

    def close(self) -> None:
        """Waits for what was launched, and gives page-locked memory back."""
        self.thread.shutdown()
        self.reader.shutdown()
        self.inbox.close()
        self.store.close()

    # **** on the device's thread ****

    def _later(self, work: Callable[[], None]) -> None: self.thread.submit(work)

    def _now(self, work: Callable[[], T]) -> T: return self.thread.submit(work).result()

    def _launch(self, batch: Batch, done: Future[Sampled]) -> None:
        try:
            self.store.move(batch.moves)
            count = batch.samples
            if batch.works: self._run(batch)
            self._deliver(count, done)
        except BaseException as error: done.set_exception(error)

    def _run(self, batch: Batch) -> None:
        shape = Shape.of(batch)
        if shape.rows > self.most.rows or Layout(shape, self.entries).words > self.inbox.limit:
            raise RequestError(f"a batch of {shape}", f"at most {self.most}", "lower the token budget")
        layout, step = self._step(shape)
        with span(f"step {shape}"):
            write(self.inbox.open(), layout, batch, self.tables)
            self.inbox.send(layout.words)
            self._replay(step)
            if batch.samples: self._replay(self._sampler(shape.samples))

    def _deliver(self, count: int, done: Future[Sampled]) -> None:
        """Reads what was chosen, when it is."""
        opened = Device[self.device]
        if not isinstance(opened, NVDevice):
            opened.synchronize()
            words = np.frombuffer(self.chosen.as_memoryview(force_zero_copy=True), np.int32)
            done.set_result(Sampled(words[:count].copy()))
            return
        driver = opened.driver
        host, event = opened.pool.host(4 * max(1, count)), driver.event()
        driver.submit(Download(host, 0, self.chosen._buf, 4 * max(1, count)))
        driver.record(event)
        def read() -> None:
            try:
                driver.wait_for(event)
                done.set_result(Sampled(np.frombuffer(host.view, np.int32)[:count].copy()))
            except BaseException as error: done.set_exception(error)
            finally: host.free()
        if driver.emulated: read()  # the emulation is for one thread
        else: self.reader.submit(read)

    def _fork(self, source: int, slot: int) -> None: ...

    # **** graphs ****

    def _warm(self, shape: Shape) -> None:
        layout, step = self._step(shape)
        write(self.inbox.open(), layout, Batch(()), self.tables)
        self.inbox.send(layout.words)
        self._replay(step)
        self._replay(self._sampler(shape.samples))

    def _step(self, shape: Shape) -> tuple[Layout, Any]:
        if shape not in self.steps:
            layout = Layout(shape, self.entries)
            inputs = self.inbox.tensors(layout)
            self.steps[shape] = layout, capturing(lambda: self._compute(shape, inputs))
        return self.steps[shape]

    def _sampler(self, samples: int) -> Any:
        if samples not in self.samplers:
            fields = Layout(Shape(samples, 0, samples, True), self.entries).fields
            inputs = {each.name: self.inbox.tensor(each) for each in fields[:2]}
            self.samplers[samples] = capturing(lambda: self._sample(samples, inputs))
        return self.samplers[samples]

    def _compute(self, shape: Shape, inputs: dict[str, Tensor]) -> None:
        tokens = inputs["tokens"]
        known = (tokens < 0).where(self.last[(-1 - tokens).maximum(0)], tokens).contiguous()
        parts = []
        if shape.decode: parts.append(Part(1, inputs["decode_table"], inputs["decode_lengths"]))
        if shape.groups: parts.append(Part(GROUP, inputs["group_table"], inputs["group_lengths"]))
        place = PagedPlace(tuple(parts), self.model.rope_tables)
        made = self.model.rows(known, place, self.store.cache, inputs.get("wanted"))
        view(self.logits, (shape.samples, self.vocab_size), dtypes.float32).assign(made).realize()

    def _sample(self, samples: int, inputs: dict[str, Tensor]) -> None:
        with layer("sampler"):
            tokens = view(self.logits, (samples, self.vocab_size), dtypes.float32).argmax(-1)
            tokens = tokens.cast(dtypes.int32).contiguous()
            mine = Tensor.arange(self.max_seqs + 1).reshape(-1, 1) == inputs["slots"].reshape(1, -1)
            # of several samples of a slot the last is kept
            latest = mine.where(Tensor.arange(samples) + 1, 0).max(1)
            last = (latest > 0).where(tokens[(latest - 1).maximum(0)], self.last)
        chosen = view(self.chosen, (samples,), dtypes.int32).assign(tokens)
        Tensor.realize(chosen, self.last.assign(last))

    def _replay(self, jit: Any) -> None:
        """One run of a captured step. After an exception, also Ctrl-C, it is captured again."""
        before = self.last.uop
        try:
            with labelled(ACTIVATIONS), span("capture" if jit.captured is None else "replay"): jit()
        except BaseException:
            # an assignment that was written down but not run would get into the next capture
            self.last.uop = before
            if jit.captured is None: recapture(jit)
            raise


def view(memory: Buffer, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A Tensor over the first bytes of memory."""
    return Tensor(UOp.from_buffer(memory.view(int(np.prod(shape)), dtype, 0)).reshape(shape))


def capturing(step: Callable[[], None]) -> Any:
    """A TinyJit that captures on its first call.

    TinyJit runs its first call eagerly, for functions that set something up; these set up nothing, and that
    run would schedule every kernel a second time (1.5 s of a 4 s start for the model in the box).
    """
    return recapture(TinyJit(step))


def recapture(jit: Any) -> Any:
    """The TinyJit, to capture on its next call."""
    jit.reset()
    jit.cnt = 1
    return jit
