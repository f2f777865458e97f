"""The model runner: runs batches of many sequences as captured steps over pages.

Protocol: `launch(batch)` returns a future of `SamplerOutput` at once. Batches run in launch order on the
runner's thread, the only one that uses tinygrad after the model is loaded. It uploads a batch's inputs
(input_buffer.py) behind its page copies (kvcache/store.py), and replays the graph of its shape and that of
the sampler. On a device with a driver all of this is queued, and another thread waits for the tokens, so the
next batch can be launched before they are known. On a CPU the thread computes.

A step's graph computes the logits of the sampled positions. The sampler's graph samples tokens, which stay on
the device for sequences whose next step starts with a token that the host does not know yet. Graphs are
captured ahead by `warm_up`; its default shapes have room for every batch, so that nothing is captured later.
Without a warm-up they are captured when a shape arrives for which no captured graph has room, or which
arrives often. After an exception the runner stays usable; what the failed step wrote is undefined.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from tinygrad import Device, Tensor
from tinygrad.device import Buffer

from tinygrad_nv.engine.memory_planning import ACTIVATIONS, WEIGHTS
from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP, SamplerOutput, SchedulerOutput, max_samples
from tinygrad_nv.engine.worker.captured_step import CapturedStep
from tinygrad_nv.engine.worker.input_buffer import (
    SAMPLER,
    STEP_GROUPS,
    BatchShape,
    HostBlockTables,
    InputBuffer,
    InputLayout,
    ShapeChoice,
    next_power_of_two,
    table_names,
    write_batch,
)
from tinygrad_nv.engine.worker.kv_cache_dtype import require_scales, resolve_kv_cache_dtype
from tinygrad_nv.engine.worker.logit_rows import LogitRows, Rows
from tinygrad_nv.engine.worker.output_buffer import NO_SAMPLES, OutputBuffer
from tinygrad_nv.engine.worker.sampler_state import SamplerState, SlotFilters
from tinygrad_nv.engine.worker.sampler_steps import MaskBuffer, SamplerSteps
from tinygrad_nv.engine.worker.step_store import StepStore, name_buffers
from tinygrad_nv.engine.worker.warm_up import Job, KeptModel, Progress, WarmUp, default_jobs, with_samplers
from tinygrad_nv.errors import RequestError
from tinygrad_nv.kvcache.groups import CacheGroups, one_group
from tinygrad_nv.kvcache.state_store import StateStore
from tinygrad_nv.kvcache.state_table import PAGES_OF_SEQUENCE
from tinygrad_nv.kvcache.store import HybridCache, PagedCache, PageStore
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.memory_pool import label_allocations
from tinygrad_nv.runtime.observe.ranges import layer, span
from tinygrad_nv.tile.decode.spec import BYTES

if TYPE_CHECKING:   # loaded where several ranks have a model
    from tinygrad_nv.engine.executor.followers import Followers
    from tinygrad_nv.engine.worker.image_inputs import ImageInputs
    from tinygrad_nv.models.llama import Llama
    from tinygrad_nv.models.lora import ModelAdapters
    from tinygrad_nv.models.paged import PagedBatch
    from tinygrad_nv.models.peft import Adapter
    from tinygrad_nv.models.qwen_vl.config import VisionConfig

T = TypeVar("T")


class ModelRunner:
    """`model` over `pages` pages of `page_size` tokens, for at most `max_seqs` sequences of at most `max_len`
    tokens. A step has at most `max_batched_tokens` tokens, plus one for each sequence. Each of `groups` has
    block tables of its own; None: all layers are one group. Runners of one device share a `thread`. Captured
    steps are kept on disk (step_store.py) where `identity` says which weights these are; `directory` may have
    some that came with them. `verifies`: a sequence may sample several tokens in a step, to verify a draft.
    `adapters` are those of the model, if it is served with some. `followers` are runners of other ranks, that
    have other parts of the model: they are told what this one is called for. A `bundled` model has its steps
    and weights, and `model` none: nothing is captured. A model that reads images has `vision`. `states`: how
    many pages of states a model has that keeps such; two for each sequence at least."""

    def __init__(self, model: Llama, *, pages: int, page_size: int = 16, max_seqs: int = 64,
                 max_len: int | None = None, max_batched_tokens: int = 512, kv_dtype: str = "auto",
                 host_pages: int = 0, groups: CacheGroups | None = None,
                 thread: ThreadPoolExecutor | None = None, identity: str = "", verifies: bool = False,
                 directory: Path | None = None, adapters: ModelAdapters | None = None,
                 followers: Followers | None = None, bundled: KeptModel | None = None,
                 vision: VisionConfig | None = None, states: int | None = None) -> None:
        self.adapters, self.followers, self.bundled = adapters, followers, bundled
        self.model, self.page_size, self.max_seqs = model, page_size, max_seqs
        self.device = Device.canonicalize(model.device)
        self.max_len = model.config.max_positions if max_len is None else max_len
        self.vocab_size, self.capacity = model.config.vocab_size, pages
        self.entries = -(-(self.max_len + GROUP - 1) // page_size)
        if model.rope_rows < self.entries * page_size:
            model.rope_rows = self.entries * page_size
            vars(model).pop("rope_tables", None)
        self.groups = groups or one_group(len(model.config.attention_layers))
        least = self.groups.num_pages(self.max_len + GROUP - 1, page_size, max_batched_tokens)
        if pages < least:
            raise RequestError(f"a KV cache of {pages} pages of {page_size} tokens",
                               f"{least} at least: a context of {self.max_len} tokens",
                               "give the cache more memory, or lower --max-model-len")
        if bundled is None:
            # computed here: inside a captured step every replay would compute them
            with label_allocations(WEIGHTS): _ = model.rope_tables
        self.kv_dtype = dtype = resolve_kv_cache_dtype(kv_dtype, model.dtype, model.config.quantization)
        if dtype in BYTES: require_scales(model.config)
        self.store = PageStore(model.config, self.device, dtype, pages, page_size, host_pages, self.groups)
        self.cache: PagedCache | HybridCache = self.store.cache
        self.states: StateStore | None = None
        if model.config.has_states:
            self.states = StateStore(model.config.state_shapes(model.dtype), self.device,
                                     states or PAGES_OF_SEQUENCE * max_seqs)
            self.cache = self.states.join(self.store.cache, model.config.attention_layers,
                                          model.config.num_layers)
        if dtype in BYTES:
            self.store.scale(self._cache_scales() if bundled is None else bundled.cache_scales)
        self.tables = HostBlockTables(max_seqs, self.entries, len(self.groups.windows))
        self.max_batched_tokens, self.verifies = max_batched_tokens, verifies
        self.max_shape = self._max_shape(max_batched_tokens)
        self.images: ImageInputs | None = None
        if vision is not None:
            from tinygrad_nv.engine.worker.image_inputs import ImageInputs
            with label_allocations(ACTIVATIONS):
                self.images = ImageInputs(self.device, self.max_shape.num_tokens, model.config.hidden_size,
                                          model.dtype, vision.sections)
        self.input_buffer = InputBuffer(self.device, self.layout(self.max_shape).num_words)
        with label_allocations(ACTIVATIONS):
            # where ranks have parts of the vocabulary
            self.parts = None if model.parallel is None else model.parallel.parts
            # stages of a pipeline but the last have no logits, and hear of tokens from the host of rank 0
            self.samples_tokens = model.parallel is None or model.parallel.last
            samples, tokens = self.max_shape.samples, range(self.vocab_size)
            if self.parts is not None: tokens = self.parts.tokens
            answers = model.parallel is None or followers is not None
            self.output_buffer = OutputBuffer(self.device, samples, self.vocab_size, len(tokens), answers)
            self.sampler_state = SamplerState(max_seqs, self.vocab_size, self.device, tokens)
        self.masks = MaskBuffer(self.device, samples, tokens)
        self.logit_rows: LogitRows | None = None
        if self.parts is not None and model.parallel is not None and model.parallel.last:
            self.logit_rows = LogitRows(self.device, samples, self.parts, self.output_buffer.logits,
                                        self._capture)
        self.slot_filters = SlotFilters(max_seqs)
        facts = (identity, model.config, model.dtype, model.int8_inputs, model.rope_rows, pages, page_size,
                 max_seqs, self.max_len, self.max_shape, self.groups, dtype)
        # what the slots of adapters hold is no fact: steps read it from memory
        room = () if adapters is None else (adapters.slots, adapters.rank, adapters.dtype)
        rank = () if model.parallel is None else model.parallel.facts
        self.facts: tuple[object, ...] = *facts, *room, *rank, *(() if vision is None else vision.sections)
        self.step_store: StepStore | None = None
        if bundled is not None: self.step_store = bundled.steps(self._buffers)
        elif identity: self.step_store = StepStore.open(self.facts, self.device, self._buffers, directory)
        self.steps: dict[BatchShape, tuple[InputLayout, CapturedStep]] = {}
        self.sampler_steps = SamplerSteps(
            self.sampler_state, self.masks, self.output_buffer, model.parallel, self._sampler_inputs,
            lambda job, sample: self._capture(self.job_name(job), sample))
        self.samplers = self.sampler_steps.steps
        # what a bundle has is read when it is used
        kept = frozenset() if bundled is None else frozenset(bundled.jobs(self))
        self.sampler_steps.kept = kept
        self.shapes = ShapeChoice(self.steps, [each for each in kept if isinstance(each, BatchShape)])
        self.warm = bundled is not None     # after `warm_up` only captured shapes and samplers run
        self.ahead: WarmUp | None = None
        # a GPU's driver does not run in a fork, and ranks have the same steps at any time
        self.forks = self.device == "CPU" and model.parallel is None
        self.failed: BaseException | None = None
        self.thread, self.shares = thread or ThreadPoolExecutor(1, "nv-device"), thread is not None

    def _cache_scales(self) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        from tinygrad_nv.engine.worker.kv_cache_scales import cache_scales
        return cache_scales(self.model, self.kv_dtype, self.device, self.page_size)

    def _max_shape(self, tokens: int) -> BatchShape:
        """The largest shape: every prefill may pad its last group."""
        groups = min(self.max_seqs + -(-tokens // GROUP), STEP_GROUPS[-1] - self.max_seqs)
        least = BatchShape.at_least(self.max_seqs, groups, self.max_seqs, False)
        return replace(least, samples=next_power_of_two(max_samples(self.max_seqs)),
                       adapted=self.adapters is not None)

    # **** called by the engine's thread ****

    def launch(self, batch: SchedulerOutput) -> Future[SamplerOutput]:
        """Runs a batch after those launched before. The future is set when its tokens are on the host."""
        done: Future[SamplerOutput] = Future()
        self._tell("launch", batch)
        self.thread.submit(self._launch, batch, done, self.slot_filters.of(batch))
        return done

    def start_slot(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int],
                   output: Sequence[int] = ()) -> None:
        """Assigns `slot` to a sequence, from the next batch on. `prompt` and `output` count for penalties."""
        self._tell("start_slot", slot, _for_samplers(params), seed, prompt, output)
        self.slot_filters.start_slot(slot, params.filters)
        if self.samples_tokens:
            self.defer(lambda: self.sampler_state.start_slot(slot, params, seed, prompt, output))

    def fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        """Assigns `slot` to a copy of the sequence in `source`, with another seed, from the next batch on. It
        continues with the last token of `source`."""
        self._tell("fork", source, slot, _for_samplers(params), seed)
        self.slot_filters.start_slot(slot, params.filters)
        if self.samples_tokens: self.defer(lambda: self._fork(source, slot, params, seed))

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into an adapter slot, for the next batch on."""
        adapters = self.adapters
        assert adapters is not None, "the model is served without adapters"
        self.defer(lambda: adapters.write(slot, adapter.matrices))

    def warm_up(self, progress: Progress = lambda done, total: None,
                shapes: Iterable[BatchShape] | None = None, defer: bool = False) -> None:
        """Captures what every load needs (`jobs`), or these shapes with their samplers, and calls
        `progress(done, total)` for each. `defer`: only what has room for every batch, and `follow` the rest
        (warm_up.py)."""
        if self.followers is not None: return self._warm_up_all(progress, shapes)
        first, others = self.jobs if shapes is None else (with_samplers(shapes, self.parts is not None), [])
        self.ahead = WarmUp(self, first, others) if defer else WarmUp(self, [*first, *others], [])
        self.ahead(progress)
        self.warm = shapes is None
        if self.step_store is not None and not defer: self.run_now(self.step_store.save)

    def _warm_up_all(self, progress: Progress, shapes: Iterable[BatchShape] | None) -> None:
        """Warms up several ranks, each of which captures all."""
        chosen, followers = None if shapes is None else list(shapes), self.followers
        assert followers is not None

        def check_and_report(done: int, total: int) -> None:
            followers.check()
            progress(done, total)

        def own() -> None:
            self.followers = None
            try: self.warm_up(check_and_report, chosen)
            finally: self.followers = followers
        followers.together(own, "warm_up", chosen)

    def _tell(self, what: str, *arguments: Any) -> None:
        if self.followers is not None: self.followers.tell(what, *arguments)

    def follow(self, progress: Progress, missed: Callable[[int], None] = lambda count: None) -> None:
        """Prepares what `warm_up` has left for later, while batches run."""
        if self.ahead is not None: self.ahead.follow(progress, missed)

    def end_captures(self) -> None:
        """Ends what `follow` has begun, and the fork, which has this process's memory."""
        if self.ahead is not None: self.ahead.close()

    def resume_captures(self) -> None:
        """Has what `end_captures` left prepared while batches run."""
        left = [job for job in self.jobs[1] if job not in self.steps and job not in self.samplers]
        if not self.warm or not left: return
        self.ahead = WarmUp(self, [], left)
        self.ahead(lambda done, total: None)
        self.follow(lambda done, total: None)

    @property
    def jobs(self) -> tuple[list[Job], list[Job]]:
        """Steps and samplers that are captured ahead."""
        return default_jobs(self.max_seqs, self.max_batched_tokens, self.max_shape, self.verifies,
                            self.adapters is not None, self.parts is not None)

    def discard_cache(self) -> None:
        """Gives the memory of the KV cache back, after what was launched."""
        self.run_now(self.store.discard)
        if self.states is not None: self.run_now(self.states.discard)

    def close(self) -> None:
        """Waits for launched batches, and frees page-locked memory. Runners that share the thread of this one
        are closed before."""
        if self.ahead is not None: self.ahead.close()
        if self.step_store is not None: self.run_now(self.step_store.save)
        if self.shares: self.run_now(lambda: None)
        else: self.thread.shutdown()
        for each in (self.output_buffer, self.input_buffer, self.masks, self.store): each.close()
        if self.logit_rows is not None: self.logit_rows.close()

    # **** on the runner's thread ****

    def defer(self, task: Callable[[], None]) -> None: self.thread.submit(self._run_deferred, task)

    def run_now(self, task: Callable[[], T]) -> T: return self.thread.submit(task).result()

    def _run_deferred(self, task: Callable[[], None]) -> None:
        try: task()
        except BaseException as error: self.failed = error  # raised by the next batch

    def _fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        self.sampler_state.fork(source, slot, params, seed)
        self.output_buffer.fork(source, slot)

    def _launch(self, batch: SchedulerOutput, done: Future[SamplerOutput], filters: Filters) -> None:
        try:
            if (failed := self.failed) is not None:
                self.failed = None
                raise failed
            with label_allocations(ACTIVATIONS):
                self.store.copy(batch.copies)
                samples, gathered = self._run(batch, filters) if batch.seqs else (0, None)
                if self.samples_tokens: self.output_buffer.deliver(batch, samples, done, gathered)
                else: done.set_result(NO_SAMPLES)
        except BaseException as error: done.set_exception(self._failure(error))

    def _failure(self, error: BaseException) -> BaseException:
        """Returns the error of a step that failed. A rank that failed in one is no longer where the others
        are: it cannot go on."""
        if (parallel := self.model.parallel) is None: return error
        return parallel.failure(error)

    def _run(self, batch: SchedulerOutput, filters: Filters) -> tuple[int, Buffer | None]:
        """Queues a step. Returns the number of samples of its shape, and rows of logits that were
        gathered."""
        shape = self.shapes.of(BatchShape.of(batch), self.warm)
        if self.warm: filters = self.sampler_steps.serving(filters, shape.samples)
        gathered = None
        layout, step = self._step(shape)
        with span(f"step {shape}"):
            self._send(batch, layout)
            if filters.mask and self.samples_tokens: self.masks.send(batch, shape.samples)
            step()
            if self.logit_rows is not None: gathered = self.logit_rows.of(batch, shape.samples)
            if batch.num_samples and self.samples_tokens: self.sampler_steps.step(shape.samples, filters)()
            if (parallel := self.model.parallel) is not None: parallel.check()
        return shape.samples, gathered

    def _send(self, batch: SchedulerOutput, layout: InputLayout) -> None:
        words = self.input_buffer.open()
        write_batch(words, layout, batch, self.tables, self.output_buffer.last_token)
        if self.images is not None: self.images.write(words, layout, batch)
        self.input_buffer.send(layout.num_words)

    # **** graphs ****

    def capture(self, job: BatchShape | tuple[int, Filters]) -> None:
        """Captures a step or a sampler, and runs it on no device."""
        made = self.sampler_steps.step(*job) if isinstance(job, tuple) else self._step(job)[1]
        made.prepare()

    def prepare(self, job: Job) -> None:
        """Captures a step or a sampler, or reads it, and loads its kernels. A GPU also runs it, as its driver
        loads them then."""
        if not isinstance(job, BatchShape) and not self.samples_tokens: return
        runs = isinstance(Device[self.device], NVDevice)
        # in a fork, the CPU's inputs are those of the process that serves: they are left as they are
        if isinstance(job, tuple):
            made = self.sampler_steps.step(*job)
            if runs and job[1].mask: self.masks.send(SchedulerOutput(()), job[0])
        elif isinstance(job, Rows):
            assert self.logit_rows is not None
            made = self.logit_rows.step(job)
            if runs: self.logit_rows.send([], job.count)
        else:
            layout, made = self._step(job)
            if runs: self._send(SchedulerOutput(()), layout)
        try:
            made.prepare()
            if runs: made()
        except BaseException:   # no batch shall choose it
            if isinstance(job, tuple): del self.samplers[job]
            elif isinstance(job, BatchShape): del self.steps[job]
            elif self.logit_rows is not None: del self.logit_rows.steps[job]
            raise

    def forget_freed(self) -> None:
        """Has new buffers get new memory. A fork calls it: tinygrad keeps freed buffers for others, and what
        the fork wrote to one that both take again, the process that serves would find there."""
        cast(Any, Device[self.device].allocator).cache.clear()

    def job_name(self, job: Job) -> str:
        """The name of a step or a sampler in the store."""
        if isinstance(job, tuple): return f"sampler {job[0]} {job[1]}"
        if isinstance(job, Rows): return str(job)
        return f"step {job}, {job.direct}"

    def samples(self, samples: int) -> bool:
        """Whether there are samplers for all filters of so many samples."""
        return self.sampler_steps.serve_all(samples)

    def _step(self, shape: BatchShape) -> tuple[InputLayout, CapturedStep]:
        if shape not in self.steps:
            layout = self.layout(shape)
            if shape.num_tokens > self.max_shape.num_tokens or layout.num_words > self.input_buffer.limit:
                raise RequestError(f"a batch of {shape}", f"at most {self.max_shape}",
                                   "lower the token budget")
            inputs = self.input_buffer.tensors(layout.fields)
            # memory of the step, also of one that is not traced
            if self.samples_tokens: self.output_buffer.logits(shape.samples)
            self.steps[shape] = layout, self._capture(self.job_name(shape),
                                                      lambda: self._compute(shape, inputs))
        return self.steps[shape]

    def layout(self, shape: BatchShape) -> InputLayout:
        """Returns the layout of a step's inputs."""
        return InputLayout(shape, self.entries, len(self.groups.windows),
                           0 if self.adapters is None else self.adapters.slots, self.images is not None,
                           self.model.config.has_states)

    def _sampler_inputs(self, samples: int) -> dict[str, Tensor]:
        fields = self.layout(BatchShape(samples, 0, samples, True)).fields[:len(SAMPLER)]
        return self.input_buffer.tensors(fields)

    def _compute(self, shape: BatchShape, inputs: dict[str, Tensor]) -> None:
        tokens = inputs["tokens"]
        if shape.decode:
            chosen = self.output_buffer.tokens(self.max_shape.samples)
            with layer("embedding"):
                tokens = (tokens < 0).where(chosen[(-1 - tokens).maximum(0)], tokens).contiguous()
        batches = [self._batch(shape, inputs, group) for group in range(len(self.groups.windows))]
        indices, adapters = inputs.get("logits_indices"), self.adapters
        images = None if self.images is None else self.images.rows(inputs)
        with nullcontext() if adapters is None or not shape.adapted else adapters.of_rows(inputs["adapters"]):
            made = self.model.step_paged(tokens, batches, self.cache, indices, images)
        if (stage := self.model.parallel) is not None and not stage.last:
            made.realize()
            return
        written = [tensor for batch in batches for tensor in batch.written]
        self.output_buffer.logits(shape.samples).assign(made).realize(*written)

    def _batch(self, shape: BatchShape, inputs: dict[str, Tensor], group: int) -> PagedBatch:
        """The sequences of a step, with their block tables of a group of layers."""
        from tinygrad_nv.models.paged import PagedBatch, SequenceGroup
        made, count = [], len(self.groups.windows)
        for kind, rows, tokens in (("decode", shape.decode, 1), ("group", shape.groups, GROUP)):
            if not rows: continue
            table = inputs[table_names(kind, count)[group]]
            made.append(SequenceGroup(tokens, table, inputs[f"{kind}_lengths"],
                                      inputs.get(f"{kind}_states")))
        ropes = self.model.rope_tables
        if self.images is None: return PagedBatch(tuple(made), ropes)
        return PagedBatch(tuple(made), ropes, self.images.ropes(inputs, ropes))

    def _capture(self, name: str, step: Callable[[], None]) -> CapturedStep:
        return CapturedStep(step, lambda: self.sampler_state.assigned_tensors, self.device, self.step_store,
                            name)

    def _buffers(self) -> dict[str, Buffer]:
        """The memory that outlives steps, by name."""
        masks = {} if self.masks.buffer is None else {"masks": self.masks.buffer.region}
        rows = {} if self.logit_rows is None else self.logit_rows.memory()
        if self.images is not None: rows |= name_buffers(images=self.images.table)
        found = {**self._weights_and_pages, **name_buffers(state=self.sampler_state, **masks, **rows,
                                                            **self.output_buffer.memory())}
        if (parallel := self.model.parallel) is None: return found
        from tinygrad_nv.engine.worker.descriptors import Named
        return Named(found, parallel.groups)

    @cached_property
    def _weights_and_pages(self) -> dict[str, Buffer]:
        """Buffers that stay the same, of which a model has many."""
        own = name_buffers(cache=self.cache, inputs=self.input_buffer.region)
        if self.bundled is not None: return {**self.bundled.weights, **own}
        return {**name_buffers(model=self.model, rope=self.model.rope_tables), **own}


def _for_samplers(params: SamplingParams) -> SamplingParams:
    """Parameters without what token masks are made of, which other ranks get: values of structured outputs
    may be of classes that they cannot import."""
    if params.structured_outputs is None: return params
    return replace(params, structured_outputs=None, reasoning=None)
