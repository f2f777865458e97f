"""`LLM`: a model directory, ready to generate.

Protocol: `LLM(directory)` loads the model, or raises for one it cannot run. `generate(prompts, params)`
answers all prompts as one batch, and returns `RequestOutput`s in their order. `stream(prompt, params)` yields
the `Delta`s of one answer, and `complete` collects them. Any thread may call these, several at a time.

If a caller fails, Ctrl-C included, its requests are aborted and the model stays usable: the core runs in its
own thread (thread.py), and text is made in the caller's.
"""
from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from tinygrad_nv import config
from tinygrad_nv.bundle.container import is_bundle
from tinygrad_nv.engine.core import EngineStats
from tinygrad_nv.engine.engine_plan import EnginePlan
from tinygrad_nv.engine.executor.plan import (
    PageBudget,
    RunnerPlan,
    load_weights,
    make_runner,
    pages_of,
    token_bytes_of,
    weight_bytes_of,
)
from tinygrad_nv.engine.generation_config import GenerationConfig
from tinygrad_nv.engine.llm_generation import GenerationMethods
from tinygrad_nv.engine.llm_pooling import PoolingMethods
from tinygrad_nv.engine.load_options import LoadOptions
from tinygrad_nv.engine.loading import (
    context_length,
    open_device,
    optional_tokenizer,
    resolve_dtype,
    with_quantization,
)
from tinygrad_nv.engine.lora.request import LoRAConfig
from tinygrad_nv.engine.lora.serving import ServedAdapters, open_adapters
from tinygrad_nv.engine.memory_planning import state_pages
from tinygrad_nv.engine.metrics import Latencies, Metric, metrics
from tinygrad_nv.engine.sampling import MAX_LOGPROBS, SamplingParams, fresh_seed
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.engine.sleep import Sleeper, SleepingModel
from tinygrad_nv.engine.speculation.ngram import parse_speculative
from tinygrad_nv.engine.thread import Engine, EngineThread
from tinygrad_nv.engine.vllm_arguments import (
    MOST_BLOCK,
    flag,
    from_vllm,
    gib,
    most_logprobs,
    optional_whole,
    whole,
)
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.kvcache.groups import cache_groups
from tinygrad_nv.models.config import is_generative, read_architectures
from tinygrad_nv.models.multimodal import QWEN_VL
from tinygrad_nv.runtime.memory import sweep
from tinygrad_nv.runtime.memory_pool import UTILIZATION
from tinygrad_nv.runtime.programs import Compilations
from tinygrad_nv.tile.order import SETTING

if TYPE_CHECKING:   # loaded where several ranks have a model
    from tinygrad_nv.engine.embedding.embedder import Embedder
    from tinygrad_nv.engine.executor.ranks import ParallelRanks
    from tinygrad_nv.engine.vision.encoder import VisionEncoder

GIB = 1 << 30


class LLM(GenerationMethods, PoolingMethods):
    """A loaded model. `model` is a Hugging Face directory or a GGUF file; `progress(done, total)` reports
    bytes of weights. This process uses at most the fraction `gpu_memory_utilization`, 0 < x <= 1, of a GPU's
    memory; no effect on a CPU.

    At most `max_num_seqs` sequences run at a time, and a step computes at most `max_num_batched_tokens`
    tokens. Keys and values are stored as `kv_cache_dtype` ("auto": the checkpoint's, else the model's;
    float32, float16, bfloat16, int8, fp8, fp8_e5m2) in `num_pages` pages of `page_size` tokens, or as many as
    fit into `kv_cache_bytes` (default: what is left of a GPU). `swap_space` GiB of host memory hold
    offloaded pages. Prompts with a common prefix share pages (`enable_prefix_caching`). `speculative`,
    ngram:K or draft:DIR:K (speculation/ngram.py), turns on speculative decoding, which does not change the
    output. How weights are quantised says the checkpoint, and `quantization` checks that; weights that are
    not quantised it quantises while they are loaded (fp8, int8). `task` "embed" makes an embedding model of
    one that generates (models/embedding_model.py); embedding models `embed` alone. Seeds of requests
    without one come from `seed`, or are random. `tokenizer` is a directory with another tokenizer. With
    `enable_lora` requests may have adapters of ranks up to `max_lora_rank`, of which `max_loras` run at a
    time (4, or `max_cpu_loras` where that is less) and `max_cpu_loras` stay in host memory, in
    `lora_dtype` (engine/lora/). `tensor_parallel_size` ranks have each layer together, in
    `pipeline_parallel_size` stages (engine/executor/), with `enable_expert_parallel` whole experts each.
    `data_parallel_size` replicas of the model, each on ranks of its own, share requests; limits of
    sequences, tokens and pages are those of each replica. `stage(name)` is called at the end of each
    stage of loading. `model` may be a bundle (engine/bundled/), whose limits are those it was compiled
    for; `required_key` is a file with the public key that has to have signed it, `weights` the directory
    of files that it refers to. `generation_config` and `override_generation_config` say where sampling
    defaults come from (generation_config.py). `chat_template`, a file, a template or the name of one of
    the model's, is that of `chat`. Without `disable_log_stats` outputs have `metrics`. Requests may ask
    for `max_logprobs` log probabilities, at most 20. Other arguments of vLLM's `LLM` are taken, or
    refused (vllm_arguments.py)."""

    def __init__(self, model: str | Path, dtype: str = "auto", max_model_len: int | None = None,
                 device: str | None = None, progress: Callable[[int, int], None] | None = None,
                 gpu_memory_utilization: float = UTILIZATION, *, max_num_seqs: int | None = 64,
                 max_num_batched_tokens: int | None = 512, kv_cache_dtype: str = "auto",
                 page_size: int | None = 16, num_pages: int | None = None, kv_cache_bytes: int | None = None,
                 swap_space: float | None = 0, enable_prefix_caching: bool | None = True,
                 max_queue: int = 1024, overlap: bool = True, speculative: str | None = None,
                 quantization: str | None = None, task: str | None = "auto",
                 tokenizer: str | Path | None = None, seed: int | None = None, enable_lora: bool = False,
                 max_loras: int | None = None, max_lora_rank: int = 16,
                 max_cpu_loras: int | None = None,
                 lora_dtype: str = "auto", tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1,
                 enable_expert_parallel: bool = False, data_parallel_size: int = 1,
                 required_key: Path | None = None, weights: Path | None = None,
                 chat_template: str | Path | None = None, disable_log_stats: bool = True,
                 max_logprobs: int | None = MAX_LOGPROBS,
                 stage: Callable[[str], None] = lambda name: None, **vllm: Any) -> None:
        if config.overridden(SETTING):
            raise ConfigError("LLM inside `with deterministic():`, which holds for this thread alone",
                              f"{SETTING}=1: steps run in a thread of their own",
                              f'set os.environ["{SETTING}"] = "1" before the model is loaded')
        own = from_vllm(vllm, frozenset(signature(LLM).parameters))
        if not isinstance(max_model_len, int | None): whole("max_model_len", max_model_len, 0)
        options = LoadOptions(
            dtype, max_model_len, progress, stage, gpu_memory_utilization,
            # vLLM's defaults are None
            whole("max_num_seqs", max_num_seqs, 64),
            whole("max_num_batched_tokens", max_num_batched_tokens, 512), kv_cache_dtype,
            whole("block_size", own.get("page_size", page_size), 16, MOST_BLOCK),
            optional_whole("num_pages", own.get("num_pages", num_pages)),
            optional_whole("kv_cache_memory_bytes", own.get("kv_cache_bytes", kv_cache_bytes)),
            int(gib("swap_space", swap_space) * GIB),
            flag("enable_prefix_caching", enable_prefix_caching, True), max_queue, overlap,
            own.get("speculative", speculative), quantization, None if tokenizer is None else Path(tokenizer),
            {"max_loras": max_loras, "max_lora_rank": max_lora_rank, "max_cpu_loras": max_cpu_loras,
             "lora_dtype": lora_dtype} if enable_lora else None,
            whole("tensor_parallel_size", tensor_parallel_size, 1),
            whole("pipeline_parallel_size", pipeline_parallel_size, 1),
            flag("enable_expert_parallel", enable_expert_parallel, False),
            whole("data_parallel_size", data_parallel_size, 1),
            (own.get("generation_config"), own.get("override_generation_config")))
        self._world_size, self._num_replicas = options.world_size, options.data_parallel_size
        self._seeds = fresh_seed if seed is None else partial(Random(seed).getrandbits, 32)
        sweep()
        self._request_numbers, self.latencies = itertools.count(), Latencies()
        self._enqueued, self.log_stats = list[Request](), not disable_log_stats
        self.max_logprobs = most_logprobs(max_logprobs, MAX_LOGPROBS)
        self.compilations = Compilations()
        self.directory, self.device = Path(model), open_device(device)
        self.bundle = None
        if is_bundle(self.directory):
            from tinygrad_nv.engine.bundled.opened import BundledModel
            self.bundle = BundledModel.open(self.directory, self.device, required_key, weights)
            self.directory = self.bundle.directory
        elif required_key is not None:
            raise ConfigError(f"a signature is required, and {model} is no bundle", "a signed bundle",
                              "compile one: tinygrad-nv compile MODEL -o model.tnv --sign-key KEY")
        stage("open device")
        self.ranks: ParallelRanks | None = None
        self.adapters: ServedAdapters | None = None
        self.vision: VisionEncoder | None = None
        self.embedder = self._open_embedder(own.get("task", task or "auto"), options)
        if self.embedder is None:
            try: self._open_generator(options)
            except BaseException:
                if self.ranks is not None: self.ranks.close()
                raise
        else:
            if options.lora is not None:
                raise ConfigError("enable_lora is True, and the model makes embeddings",
                                  "a model that generates", "leave enable_lora out")
            self.defaults, self.length = SamplingParams(), self.embedder.length
            self.tokenizer, self.tokenizer_error = self.embedder.tokenizer, self.embedder.tokenizer_error
        if chat_template is not None:
            self.tokenizer = self.require_tokenizer().with_template(str(chat_template))

    def _open_embedder(self, task: str, options: LoadOptions) -> Embedder | None:
        """The model, if it makes embeddings. Bundles are of models that generate."""
        if task in ("auto", "generate") and (self.bundle is not None or is_generative(self.directory)):
            return None
        from tinygrad_nv.engine.embedding.embedder import open_embedder
        return open_embedder(self.directory, self.device, task, options)

    def _open_generator(self, options: LoadOptions) -> None:
        """Loads a model that generates, with its pages."""
        o = options if self.bundle is None else self.bundle.options(options)
        if self.bundle is None:
            from tinygrad_nv.models.tied import load_config as read  # looks into the weights
        else:
            from tinygrad_nv.models.config import read_config as read
        self.config = with_quantization(o.quantization, read(self.directory), self.directory)
        self.dtype = resolve_dtype(o.dtype, self.config, self.directory, self.device)
        self.length = context_length(self.config, self.dtype, o.max_model_len)
        generation = GenerationConfig.read(self.directory, self.config, *o.generation)
        self.defaults, self.eos, self.limit = generation.defaults, generation.eos, generation.limit
        self.tokenizer, self.tokenizer_error = optional_tokenizer(o.tokenizer or self.directory)
        speculation = None if o.speculative is None else parse_speculative(o.speculative)
        if self.config.has_states: speculation = None   # drafts that are rejected would stay in states
        engine = o.engine_config(self.length, self.eos, speculation.tokens if speculation else 0)
        self.queue_limit = engine.queue_limit
        # of several replicas, AsyncEngine limits all together
        if o.data_parallel_size > 1: engine = replace(engine, queue_limit=sys.maxsize)
        if o.world_size > 1:
            from tinygrad_nv.engine.executor.ranks import ParallelRanks
            self.ranks = ParallelRanks.open(o, self.config)
        lora = None if o.lora is None else LoRAConfig.of(self.config, self.dtype, self.device, **o.lora)
        if lora is not None: engine = replace(engine, max_adapters=lora.slots)
        draft = None
        if speculation is not None and speculation.model is not None:
            from tinygrad_nv.engine.speculation.draft_model import DraftModelFiles
            draft = DraftModelFiles.read(speculation.model, self.dtype, self.config, self.tokenizer)
        how = EnginePlan(engine, o.enable_prefix_caching, draft, o.tokenizer or self.directory)
        plan = RunnerPlan(self.directory, self.config, self.dtype.name, self.device, self.length, 0,
                          o.page_size, o.max_num_seqs, o.max_num_batched_tokens, o.kv_cache_dtype, 0,
                          cache_groups(self.config.attention_windows, self.length, o.page_size),
                          # float32 that is asked for by name stays what it is
                          speculation is not None, o.dtype == "auto", o.tensor_parallel_size,
                          o.pipeline_parallel_size, o.enable_expert_parallel,
                          state_pages(self.config, self.dtype, o.max_num_seqs, o.enable_prefix_caching))
        page_bytes = o.page_size * token_bytes_of(0, plan, draft)      # 0 without attention
        asked = o.num_pages
        if asked is None and page_bytes and o.kv_cache_bytes is not None:
            asked = o.kv_cache_bytes // page_bytes
        self._weight_bytes = weight_bytes_of(0, plan) if self.bundle is None else self.bundle.weight_bytes
        self._adapter_bytes = 0 if lora is None else lora.nbytes(self.config, self.dtype, self.device)
        if self.ranks is None and self.bundle is None and QWEN_VL in read_architectures(self.directory):
            from tinygrad_nv.engine.vision.encoder import VisionEncoder
            self.vision = VisionEncoder.of(self.directory, self.dtype, self.device)
        held = self._weight_bytes + self._adapter_bytes + (0 if self.vision is None else self.vision.nbytes)
        budget = PageBudget(asked, o.gpu_memory_utilization)
        own = partial(pages_of, 0, plan, budget, held, draft)
        pages = own() if self.ranks is None else self.ranks.pages(own, plan, budget, how)
        plan = replace(plan, num_pages=pages, host_pages=o.swap_bytes // page_bytes if page_bytes else 0)
        if self.ranks is not None: self.runner = self.ranks.load(plan, how, o.progress, o.stage)
        elif self.bundle is not None: self.runner = self.bundle.runner(plan, o.progress, o.stage)
        else:
            model = load_weights(plan, self.config, None, o.progress, o.stage)
            self.adapters = None if lora is None else open_adapters(model, lora)
            if self.vision is not None: self.vision.load(self.directory)
            self.runner = make_runner(plan, model, directory=self.directory,
                                      adapters=self.adapters.model if self.adapters else None,
                                      vision=None if self.vision is None else self.vision.config)
        self.model = self.runner.model
        opened = how.open(plan, self.runner)
        self.core, self.draft_model = opened.core, opened.draft_model
        self.draft_directory = None if draft is None else draft.directory
        self.thread = EngineThread(self.core)
        self.engine: Engine = self.thread if self.ranks is None else self.ranks.engine(self.thread)
        self.compilations = Compilations()
        o.stage("pages")

    def __enter__(self) -> LLM: return self

    def __exit__(self, *_: object) -> None: self.close()

    def close(self) -> None:
        """Ends running requests, and frees host memory. Nothing can be generated afterwards."""
        if self.embedder is not None: return self.embedder.close()
        try:
            self.engine.close()
            if self.draft_model is not None: self.draft_model.close()
            self.runner.close()
            self.structured_outputs.close()
        finally:
            if self.ranks is not None: self.ranks.close()

    def reset_mm_cache(self) -> None:
        """Drops what was computed of earlier images."""
        if self.vision is not None: self.vision.forget()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Counts the ranks that have the model; without `include_dp` those of one replica."""
        return self._world_size if include_dp else self._world_size // self._num_replicas

    def get_metrics(self) -> list[Metric]:
        """Statistics, as vLLM's metric objects (metrics.py)."""
        stats = self._stats_now() if self.embedder is None else self.embedder.engine.stats()
        return metrics(stats, self.latencies, str(self.directory if self.bundle is None
                                                  else self.bundle.bundle.path))

    def _stats_now(self) -> EngineStats:
        if self.ranks is not None: self.ranks.refresh_stats()
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. True, as nothing prevents it."""
        if self.embedder is None: self.engine.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Gives memory back (sleep.py): the KV cache; with level 2 the weights, too. Running requests end,
        with mode "wait" when they are done, and others are refused until `wake_up`."""
        self.sleeper.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes requests again. `tags`, "weights" and "kv_cache", wake one after the other."""
        self.sleeper.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether a part of the model sleeps."""
        return self.embedder is None and bool(self.sleeper.asleep)

    @cached_property
    def sleeper(self) -> Sleeper:
        """The sleep of this model. Raises `ConfigError` for one that makes embeddings."""
        if self.embedder is not None:
            raise ConfigError("sleep() of a model that makes embeddings, which has no KV cache",
                              "a model that generates", "close() it, and load it again later")
        if self.ranks is not None:
            raise ConfigError("sleep() of a model that several ranks have", "a model of one rank",
                              "close() it, and load it again later")
        models = [SleepingModel(self.runner, self.directory, self.core.reset_prefix_cache)]
        if (draft := self.draft_model) is not None:
            assert isinstance(draft.runner, ModelRunner)
            assert self.draft_directory is not None
            models.append(SleepingModel(draft.runner, self.draft_directory, draft.pool.forget_prefixes))
        return Sleeper(self.thread, models)

    @property
    def runners(self) -> list[ModelRunner]:
        """Runner of the model, and that of the draft model, if there is one."""
        drafts = [] if self.draft_model is None else [self.draft_model.runner]
        return [self.runner, *(each for each in drafts if isinstance(each, ModelRunner))]

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Captures the steps that every load needs, on all ranks; `follow` prepares the others."""
        if self.ranks is not None: progress = self.ranks.check_ranks(progress)
        with nullcontext() if self.ranks is None else self.ranks.together("warm_up"):
            for each in self.runners: each.warm_up(progress, defer=True)

    def follow(self, progress: Callable[[int, int], None], missed: Callable[[int], None]) -> None:
        """Prepares what `capture` has left for later, while requests run."""
        for each in self.runners: each.follow(progress, missed)
        if self.ranks is not None: self.ranks.tell("follow")

    def ready(self) -> None:
        """Counts compilations from now on."""
        self.compilations = Compilations()
        if self.ranks is None: return
        self.ranks.tell("ready")
        self.ranks.refresh_stats()

    def compilations_after_ready(self) -> int:
        """Counts compilations and captures since then, on all replicas; on others than that of rank 0 as of
        `metrics`, or the last `refresh_stats` of the ranks."""
        return self.compilations.since() + (0 if self.ranks is None else self.ranks.compilations())

    def warm_up(self, params: SamplingParams, prompt_tokens: int) -> None:
        """Compiles and captures what an answer to a prompt of this length needs, by generating one on each
        replica: of equal requests each gets one."""
        budget = self.core.config.max_batched_tokens // GROUP * GROUP
        parts = {min(prompt_tokens, budget), prompt_tokens % budget if prompt_tokens > budget else 0} - {0}
        made = replace(params, max_tokens=2, min_tokens=0, seed=0, stop=[], stop_token_ids=[],
                       ignore_eos=True)
        for count in parts:
            # a prefix cache hit would run another graph
            every = [replace(self.request(name := self._name(), [0] * count, made), salt=name.encode())
                     for _ in range(1 if self.ranks is None else self.ranks.num_replicas)]
            for _, delta in self._run(every):
                if delta.error is not None: raise delta.error

    @property
    def metrics(self) -> dict[str, float]:
        """Statistics of the engine (core.py), and `compilations_after_ready`: what was compiled and captured
        since the model was loaded and, if it was, warmed up."""
        stats = {} if self.embedder is not None else vars(self._stats_now())
        return {**stats, "compilations_after_ready": self.compilations_after_ready()}

    @property
    def streamed_bytes(self) -> int:
        """`step_weight_bytes` of one sequence."""
        return self.step_weight_bytes(1)

    def step_weight_bytes(self, sequences: int) -> int:
        """Bytes of weights that a decode step of so many sequences reads: every parameter, but no more than a
        few rows of an embedding that is not the head, and of experts only those that a token has, as many as
        are expected (`MoEConfig.distinct`)."""
        if self.bundle is not None: held = self._weight_bytes - self.bundle.sparse_bytes
        else:
            from tinygrad_nv.models.quantised.experts import idle_bytes
            from tinygrad_nv.models.quantised.layers import sparse_savings
            held = self._weight_bytes - sparse_savings(self.model) - idle_bytes(self.model, sequences)
        if self.config.tied: return held
        table, dense = self.model.quantised_embedding, self.config.vocab_size * self.config.hidden_size
        return held - (dense * self.dtype.itemsize if table is None else table.nbytes)
