"""`LLM`: a model directory, ready to generate.

Protocol: `LLM(directory)` loads the model, or raises for one it cannot run. `generate(prompts, params)`
answers all prompts as one batch, and returns `RequestOutput`s in their order. `stream(prompt, params)` yields
the `Delta`s of one answer, and `complete` collects them. Any thread may call these, several at a time.

If a caller fails, Ctrl-C included, its requests are aborted and the model stays usable: the core runs in its
own thread (thread.py), and text is made in the caller's.
"""
from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, cast

from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.embedding.embedder import open_embedder
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.loading import (
    context_length,
    generation_defaults,
    open_device,
    optional_tokenizer,
    resolve_dtype,
    with_quantization,
)
from tinygrad_nv.engine.lora.request import LoRAConfig, LoRARequest, one_for_each
from tinygrad_nv.engine.lora.serving import open_adapters, with_adapter
from tinygrad_nv.engine.memory_planning import CacheSize, layer_bytes, require_room, step_bytes
from tinygrad_nv.engine.outputs import Delta, EmbeddingRequestOutput, EngineCoreOutput
from tinygrad_nv.engine.progress_bar import progress_bar
from tinygrad_nv.engine.prompts import ParsedPrompt, Prompt, as_prompts, flattened, parse, text_or_tokens
from tinygrad_nv.engine.request_output import RequestOutput, RequestOutputBuilder
from tinygrad_nv.engine.sampling import SamplingParams, fresh_seed
from tinygrad_nv.engine.scheduling.request import Matcher, Request, check_request
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.engine.speculation.draft_model import DraftModelFiles
from tinygrad_nv.engine.speculation.ngram import NgramProposer, parse_speculative
from tinygrad_nv.engine.structured_output.matcher import GrammarCompiler
from tinygrad_nv.engine.structured_output.token_rules import TokenRules, word_tokens
from tinygrad_nv.engine.text.output_processor import OutputProcessor
from tinygrad_nv.engine.text.tokenizer import Message, Tokenizer, Tools
from tinygrad_nv.engine.thread import EngineThread
from tinygrad_nv.engine.vllm_arguments import from_vllm, gib, require_no_adapter, whole
from tinygrad_nv.engine.worker.kv_cache_dtype import resolve_kv_cache_dtype
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import ConfigError, RequestError, TokenizerError
from tinygrad_nv.kvcache.groups import cache_groups
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.quantised import sparse_savings
from tinygrad_nv.models.quantised_experts import idle_bytes
from tinygrad_nv.runtime.memory import sweep
from tinygrad_nv.runtime.memory_pool import UTILIZATION

GIB = 1 << 30
Lora: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
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
    one that generates (models/embedding_model.py); embedding models `embed` alone. Seeds of requests without
    one come from `seed`, or are random. `tokenizer` is a directory with another tokenizer. With `enable_lora`
    requests may have adapters of ranks up to `max_lora_rank`, of which `max_loras` run at a time and
    `max_cpu_loras` stay in host memory, in `lora_dtype` (engine/lora/). `stage(name)` is called at the end of
    each stage of loading. Other arguments of vLLM's `LLM` are taken, or refused
    (vllm_arguments.py)."""

    def __init__(self, model: str | Path, dtype: str = "auto", max_model_len: int | None = None,
                 device: str | None = None, progress: Callable[[int, int], None] | None = None,
                 gpu_memory_utilization: float = UTILIZATION, *, max_num_seqs: int | None = 64,
                 max_num_batched_tokens: int | None = 512, kv_cache_dtype: str = "auto",
                 page_size: int | None = 16, num_pages: int | None = None, kv_cache_bytes: int | None = None,
                 swap_space: float | None = 0, enable_prefix_caching: bool | None = True,
                 max_queue: int = 1024, overlap: bool = True, speculative: str | None = None,
                 quantization: str | None = None, task: str | None = "auto",
                 tokenizer: str | Path | None = None, seed: int | None = None, enable_lora: bool = False,
                 max_loras: int = 4, max_lora_rank: int = 16, max_cpu_loras: int | None = None,
                 lora_dtype: str = "auto",
                 stage: Callable[[str], None] = lambda name: None, **vllm: Any) -> None:
        own = from_vllm(vllm, frozenset(signature(LLM).parameters))
        page_size, num_pages = own.get("page_size", page_size), own.get("num_pages", num_pages)
        kv_cache_bytes, task = own.get("kv_cache_bytes", kv_cache_bytes), own.get("task", task or "auto")
        speculative = own.get("speculative", speculative)
        # vLLM's defaults are None
        max_num_seqs = whole("max_num_seqs", max_num_seqs, 64)
        max_num_batched_tokens = whole("max_num_batched_tokens", max_num_batched_tokens, 512)
        page_size = whole("block_size", page_size, 16)
        if not isinstance(max_model_len, int | None): whole("max_model_len", max_model_len, 0)
        swap_space, enable_prefix_caching = gib("swap_space", swap_space), enable_prefix_caching is not False
        self._seeds = fresh_seed if seed is None else partial(Random(seed).getrandbits, 32)
        sweep()
        self._request_numbers = itertools.count()
        self.directory, self.device = Path(model), open_device(device)
        stage("open device")
        self.embedder = open_embedder(
            self.directory, self.device, task, {"speculative": speculative, "quantization": quantization,
                                                "enable_lora": enable_lora or None},
            dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_queue=max_queue,
            max_num_batched_tokens=max_num_batched_tokens, progress=progress, stage=stage,
            gpu_memory_utilization=gpu_memory_utilization)
        if self.embedder is not None:
            if tokenizer is not None:
                raise ConfigError("another tokenizer for an embedding model", "the model's", "leave it out")
            self.defaults, self.length = SamplingParams(), self.embedder.length
            self.tokenizer, self.tokenizer_error = self.embedder.tokenizer, self.embedder.tokenizer_error
            return
        self.config = with_quantization(quantization, read_config(self.directory), self.directory)
        self.dtype = resolve_dtype(dtype, self.config, self.directory, self.device)
        self.length = context_length(self.config, self.dtype, max_model_len)
        self.defaults, self.eos = generation_defaults(self.directory, self.config)
        self.tokenizer, self.tokenizer_error = optional_tokenizer(Path(tokenizer or self.directory))
        speculative_config = None if speculative is None else parse_speculative(speculative)
        lora = None if not enable_lora else LoRAConfig.of(
            self.config, self.dtype, self.device, max_loras=max_loras, max_lora_rank=max_lora_rank,
            max_cpu_loras=max_cpu_loras, lora_dtype=lora_dtype)
        engine = EngineConfig(max_seqs=max_num_seqs, max_batched_tokens=max_num_batched_tokens,
                              max_len=self.length, queue_limit=max_queue, overlap=overlap, eos=self.eos,
                              num_speculative_tokens=speculative_config.tokens if speculative_config else 0,
                              max_adapters=lora.slots if lora else 0)
        draft = None
        if speculative_config is not None and speculative_config.model is not None:
            draft = DraftModelFiles.read(speculative_config.model, self.dtype, self.config, self.tokenizer)
        stored = resolve_kv_cache_dtype(kv_cache_dtype, self.dtype, self.config.quantization)
        groups = cache_groups(self.config.windows, self.length, page_size)
        token = layer_bytes(self.config, stored) * groups.layers_per_page
        token += draft.token_bytes if draft else 0
        cache = CacheSize(page_size, page_size * token, self.length, max_num_seqs, groups,
                          max_num_batched_tokens)
        if num_pages is None and kv_cache_bytes is not None: num_pages = kv_cache_bytes // cache.page_bytes
        self._weight_bytes = weights.nbytes(self.config, self.dtype, self.directory)
        self._adapter_bytes = 0 if lora is None else lora.nbytes(Llama(self.config, self.dtype, self.device))
        num_pages = self._pages(num_pages, cache, token, draft, gpu_memory_utilization)
        host_pages = int(swap_space * GIB) // cache.page_bytes
        self.model = Llama(self.config, self.dtype, self.device, positions=self.length)
        # float32 that is asked for by name stays what it is
        self.model.int8_inputs |= dtype == "auto"
        stage("read files")
        weights.load(self.model, self.directory, progress)
        self.adapters = None if lora is None else open_adapters(self.model, lora)
        stage("load weights")
        self.runner = ModelRunner(self.model, pages=num_pages, page_size=page_size, max_seqs=max_num_seqs,
                                  max_len=self.length, max_batched_tokens=max_num_batched_tokens,
                                  kv_dtype=kv_cache_dtype, host_pages=host_pages, groups=groups,
                                  adapters=self.adapters.model if self.adapters else None)
        pool = PagePool(num_pages, page_size, host_pages=host_pages, sharing=enable_prefix_caching,
                        windows=groups.windows)
        self.draft_model = None if draft is None else draft.load(self.runner, max_num_batched_tokens)
        proposer = self.draft_model or (NgramProposer() if speculative_config else None)
        self.core = EngineCore(self.runner, pool, engine, proposer)
        self.engine = EngineThread(self.core)
        stage("pages")

    def _pages(self, asked: int | None, cache: CacheSize, token: int, draft: DraftModelFiles | None,
               utilization: float) -> int:
        """Pages of the KV cache: as many as were asked for, or as fit beside weights and a step. Raises where
        there is no room."""
        pages = cache.min_pages if asked is None else asked
        held = self._weight_bytes + self._adapter_bytes
        require_room(self.device, self.config, self.dtype, self.length, pages * cache.page_size, utilization,
                     token, held)
        if asked is not None: return asked
        step = step_bytes(self.config, self.dtype, cache.chunk + cache.max_seqs, cache.max_seqs)
        return cache.num_pages(self.device, held + (draft.weight_bytes if draft else 0), step)

    def __enter__(self) -> LLM: return self

    def __exit__(self, *_: object) -> None: self.close()

    def close(self) -> None:
        """Ends running requests, and frees host memory. Nothing can be generated afterwards."""
        if self.embedder is not None: return self.embedder.close()
        self.engine.close()
        self.runner.close()
        if self.draft_model is not None: self.draft_model.close()
        if "grammars" in self.__dict__: self.grammars.close()

    def warm_up(self, params: SamplingParams, prompt_tokens: int) -> None:
        """Compiles and captures what an answer to a prompt of this length needs, by generating one."""
        budget = self.core.config.max_batched_tokens // GROUP * GROUP
        parts = {min(prompt_tokens, budget), prompt_tokens % budget if prompt_tokens > budget else 0} - {0}
        made = replace(params, max_tokens=2, min_tokens=0, seed=0, stop=(), stop_token_ids=(),
                       ignore_eos=True)
        for count in parts:
            # a prefix cache hit would run another graph
            request = replace(self.request(name := self._name(), [0] * count, made), salt=name.encode())
            for _ in self._stream(request): pass

    @property
    def streamed_bytes(self) -> int:
        """`step_weight_bytes` of one sequence."""
        return self.step_weight_bytes(1)

    def step_weight_bytes(self, sequences: int) -> int:
        """Bytes of weights that a decode step of so many sequences reads: every parameter, but no more than a
        few rows of an embedding that is not the head, and of experts only those that a token has, as many as
        are expected (`MoEConfig.distinct`)."""
        held = self._weight_bytes - sparse_savings(self.model)
        held -= idle_bytes(self.model, sequences)
        if self.config.tied: return held
        table, dense = self.model.quantised_embedding, self.config.vocab_size * self.config.hidden_size
        return held - (dense * self.dtype.itemsize if table is None else table.nbytes)

    # **** prompts ****

    def tokenize(self, prompt: Prompt, truncate_prompt_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context; with
        `truncate_prompt_tokens` its last ones."""
        if self.embedder is not None:
            return self.embedder.encode(text_or_tokens(prompt), truncate_prompt_tokens)
        parsed = parse(prompt)
        limit = self.length - 1 if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if parsed.messages is not None: parsed = self.conversation(parsed.messages)
        if parsed.ids is not None: ids = parsed.ids if limit is None else parsed.ids[-limit:]
        elif not parsed.text:
            raise RequestError("the prompt is empty", "at least one character", "write a prompt")
        elif limit is not None: ids = self.require_tokenizer().encode_truncated(parsed.text, limit, "left")
        else:
            self.require_tokenizer().require_fitting(parsed.text, self.length)
            ids = self.require_tokenizer().encode(parsed.text)
        if not ids:
            raise RequestError("the prompt has no tokens", "at least one token id", "pass a longer prompt")
        if bad := [i for i in ids if not 0 <= i < self.config.vocab_size]:
            raise RequestError(f"token id {bad[0]} is not in the vocabulary",
                               f"0 to {self.config.vocab_size - 1}", "use ids of this model's tokenizer")
        if len(ids) >= self.length:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context holds {self.length}",
                               f"at most {self.length - 1}, so that one can be added",
                               "shorten the prompt or raise --max-model-len")
        return ids

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises the error of loading it if there is none."""
        if self.tokenizer is None: raise self.tokenizer_error or TokenizerError("no tokenizer")
        return self.tokenizer

    def encode_chat(self, messages: Sequence[Message], tools: Tools = (), /, **extra: Any) -> list[int]:
        """Token ids of a conversation, through the model's chat template. `tools` and `extra` are variables
        of the template."""
        made = self.conversation(messages, tools, **extra)
        self.require_tokenizer().require_fitting(made.text or "", self.length)
        return self.tokenize(made)

    def conversation(self, messages: Sequence[Message], tools: Tools = (), /, **extra: Any) -> ParsedPrompt:
        """A conversation as a prompt: its text and token ids. Parts of a content are joined by new lines."""
        self._require_generator()
        text = self.require_tokenizer().render([*map(flattened, messages)], tools, **extra)
        return ParsedPrompt(text, self.require_tokenizer().encode(text, special=False))

    def _require_generator(self) -> None:
        if self.embedder is None: return
        raise RequestError(f"{self.directory} makes embeddings, and generates no text",
                           "a causal language model", "call embed(prompts)")

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler and cache of structured output grammars."""
        return GrammarCompiler(self.require_tokenizer(), self.config.vocab_size, self.eos)

    def matchers(self, params: SamplingParams) -> tuple[Matcher, ...]:
        """A matcher for each answer if not every token may follow; compiling a new grammar takes up to
        seconds. Raises `RequestError` for a grammar that cannot be enforced."""
        if not params.masked: return ()
        constraint = params.structured_outputs
        made = [None if constraint is None else self.grammars.matcher(constraint) for _ in range(params.n)]
        if params.allowed_token_ids is None and not params.bad_words: return tuple(filter(None, made))
        words = word_tokens(self.require_tokenizer(), params.bad_words) if params.bad_words else ()
        return tuple(TokenRules(self.config.vocab_size, self.eos, params.allowed_token_ids, words, each)
                     for each in made)

    def request(self, name: str, prompt: Prompt, params: SamplingParams | None = None,
                priority: int = 0, matched: bool = True, lora_request: LoRARequest | None = None) -> Request:
        """A checked request for the core; its parameters have a seed, and `matched` its matchers."""
        self._require_generator()
        params = self.defaults if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params of type {type(params).__name__}", "SamplingParams",
                               "pass SamplingParams(…)")
        params.require_vocabulary(self.config.vocab_size)
        if params.stop: self.require_tokenizer()
        if params.seed is None: params = replace(params, seed=self._seeds())
        parsed = parse(prompt)
        if parsed.messages is not None: parsed = replace(self.conversation(parsed.messages), salt=parsed.salt)
        made = Request(name, self.tokenize(parsed, params.truncate_prompt_tokens), params, priority,
                       salt=parsed.salt.encode(errors="surrogatepass"), text=parsed.text)
        check_request(made, self.core.config, self.length, self.config.vocab_size)
        made = with_adapter(self.adapters, made, lora_request)
        return replace(made, matchers=self.matchers(params)) if matched else made

    # **** answers ****

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool | Callable[..., Any] = True, lora_request: Lora = None,
                 priority: Sequence[int] | None = None,
                 progress: Callable[[int, int], None] = lambda done, total: None) -> list[RequestOutput]:
        """Answers to one prompt or to a list of them, in order. `sampling_params` and `lora_request` are for
        all, or a list with one for each, as `priority` is. `progress(done, total)` counts finished prompts;
        so does a bar of tqdm on a terminal, where that is installed, or what `use_tqdm` makes. Raises
        `RequestError` at once for a bad prompt; an answer that fails later has finish reason "error"."""
        many, params = as_prompts(prompts), sampling_params
        loras = one_for_each(lora_request, len(many))
        alike = params is None or isinstance(params, SamplingParams | Mapping)
        each = cast(list[SamplingParams | None], [params] * len(many) if alike else [*params])  # type: ignore
        for name, given in (("sampling_params", each), ("priorities", priority)):
            if given is not None and len(given) != len(many):
                raise RequestError(f"{len(given)} {name} for {len(many)} prompts",
                                   "one for all, or one for each", "pass as many")
        requests = [self.request(self._name(), prompt, its, first, lora_request=lora) for
                    prompt, its, first, lora in
                    zip(many, each, priority or [0] * len(many), loras, strict=True)]
        with progress_bar(use_tqdm, len(many)) as advance: return self._answers(requests, progress, advance)

    def _answers(self, requests: Sequence[Request], progress: Callable[[int, int], None],
                 advance: Callable[[], None]) -> list[RequestOutput]:
        builders = [RequestOutputBuilder(request) for request in requests]
        done = 0
        for at, delta in self._run(requests):
            builders[at].push(delta)
            if not builders[at].finished: continue
            progress(done := done + 1, len(builders))
            advance()
        if self.engine.failure is not None: raise self.engine.failure
        return [one.output() for one in builders]

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             use_tqdm: bool | Callable[..., Any] = True, lora_request: Lora = None,
             tools: Tools | None = None, chat_template: str | None = None,
             chat_template_content_format: str = "auto", add_generation_prompt: bool = True,
             continue_final_message: bool = False,
             chat_template_kwargs: Mapping[str, Any] | None = None) -> list[RequestOutput]:
        """Answers to a conversation, or to a list of them, as `generate` gives them. The chat template is the
        model's or `chat_template`, with `tools` and `chat_template_kwargs`."""
        several = not messages or not isinstance(messages[0], Mapping)
        extra = {**(chat_template_kwargs or {}), "chat_template": chat_template,
                 "add_generation_prompt": add_generation_prompt,
                 "continue_final_message": continue_final_message}
        prompts = [self.conversation(each, tools or (), **extra)
                   for each in cast(Sequence[Sequence[Message]], messages if several else [messages])]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None,
              normalize: bool | None = None, dimensions: int | None = None, use_tqdm: bool = True,
              lora_request: None = None) -> list[EmbeddingRequestOutput]:
        """The embeddings of one prompt or of a list of them, in order. Prompts are cut off after
        `truncate_prompt_tokens` tokens (-1: what the context holds); vectors have length 1 if `normalize`
        says so (None: the model), and the first `dimensions` elements. Raises `RequestError`."""
        require_no_adapter(lora_request)
        if self.embedder is None:
            raise RequestError(f"{self.directory} was loaded to generate text", "an embedding model",
                               'load it with LLM(directory, task="embed")')
        return self.embedder.embed([*map(text_or_tokens, as_prompts(prompts))],
                                   truncate_prompt_tokens=truncate_prompt_tokens,
                                   normalize=normalize, dimensions=dimensions)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *,
               lora_request: LoRARequest | None = None) -> Iterator[Delta]:
        """Yields text as it is generated. Raises `RequestError` at once for a bad prompt, and the error of an
        answer that fails later. Closing the iterator aborts the request."""
        return self._stream(self.request(self._name(), prompt, params, lora_request=lora_request))

    def complete(self, prompt: Prompt, params: SamplingParams | None = None,
                 on_delta: Callable[[Delta], None] = lambda _: None) -> RequestOutput:
        """The whole answer to one prompt, or its n answers; `on_delta` is called with each delta."""
        builders = RequestOutputBuilder(request := self.request(self._name(), prompt, params))
        for delta in self._stream(request):
            on_delta(delta)
            builders.push(delta)
        return builders.output()

    def _stream(self, request: Request) -> Iterator[Delta]:
        for _, delta in self._run([request]):
            if delta.error is not None: raise delta.error
            yield delta

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Delta]]:
        """Deltas of all requests, with the number of their request. A caller that stops iterating aborts
        them."""
        inbox = queue.SimpleQueue[list[EngineCoreOutput]]()
        open_ = {request.id: (at, OutputProcessor(self.tokenizer, request.prompt, request.params))
                 for at, request in enumerate(requests)}
        # other callers share the queue: submit enough to fill every slot, and no more
        following, ahead = iter(requests), 2 * self.core.config.max_seqs
        try:
            for request in itertools.islice(following, ahead): self.engine.submit(request, inbox.put)
            while open_:
                for chosen in inbox.get():
                    if (entry := open_.get(chosen.request)) is None: continue
                    at, processor = entry
                    if (delta := processor.process(chosen)) is None: continue
                    if delta.finish_reason is not None and chosen.finish_reason is None:
                        self.engine.finish(chosen.request, chosen.index, delta.stop_reason)
                    if processor.finished:
                        del open_[chosen.request]
                        for request in itertools.islice(following, 1): self.engine.submit(request, inbox.put)
                    yield at, delta
        finally:
            for name in open_: self.engine.abort(name)

    def _name(self) -> str: return f"local-{next(self._request_numbers)}"
