"""The part of `LLM` that generates: `generate`, `chat`, `beam_search`, `stream` and `complete`.

Protocol: `_run(requests)` submits requests to the core's thread, a few more than run at a time, and yields
their deltas; the methods collect those.
"""
from __future__ import annotations

import itertools
import queue
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeAlias, cast

from tinygrad_nv.engine.beam_search import BeamSearchOutput, BeamSearchParams, Search
from tinygrad_nv.engine.llm_prompts import PromptMethods
from tinygrad_nv.engine.lora.request import LoRARequest, one_for_each
from tinygrad_nv.engine.metrics import Latencies
from tinygrad_nv.engine.outputs import Delta, EngineCoreOutput
from tinygrad_nv.engine.prompts import Prompt, as_prompts, require_messages
from tinygrad_nv.engine.request_output import RequestOutput, RequestOutputBuilder
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.text.earlier_calls import with_arguments
from tinygrad_nv.engine.text.output_processor import OutputProcessor
from tinygrad_nv.engine.text.tokenizer import Message, Tools
from tinygrad_nv.engine.thread import Engine
from tinygrad_nv.engine.vllm_arguments import require_no_adapter
from tinygrad_nv.errors import RequestError

Lora: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None


class GenerationMethods(PromptMethods):
    """How `LLM` generates."""
    engine: Engine
    latencies: Latencies
    log_stats: bool
    _request_numbers: itertools.count[int]
    _enqueued: list[Request]

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool | Callable[..., Any] = True, lora_request: Lora = None,
                 priority: int | Sequence[int] | None = None,
                 tokenization_kwargs: Mapping[str, Any] | None = None,
                 mm_processor_kwargs: Mapping[str, Any] | None = None,
                 progress: Callable[[int, int], None] = lambda done, total: None) -> list[RequestOutput]:
        """Answers to one prompt or to a list of them, in order. `sampling_params`, `lora_request` and
        `priority` are for all, or a list with one for each. `tokenization_kwargs` say how texts become tokens
        (prompts.py). `progress(done, total)` counts finished prompts; so does a bar of tqdm on a terminal,
        where that is installed, or what `use_tqdm` makes. Raises `RequestError` at once for a bad prompt; an
        answer that fails later has finish reason "error"."""
        requests = self._requests(prompts, sampling_params, lora_request, priority, tokenization_kwargs,
                                  mm_processor_kwargs)
        with progress_bar(use_tqdm, len(requests)) as advance:
            return self._answers(requests, progress, advance)

    def enqueue(self, prompts: Prompt | Sequence[Prompt],
                sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                lora_request: Lora = None, priority: int | Sequence[int] | None = None,
                use_tqdm: bool | Callable[..., Any] = True,
                tokenization_kwargs: Mapping[str, Any] | None = None,
                mm_processor_kwargs: Mapping[str, Any] | None = None) -> list[str]:
        """Keeps the requests of a `generate` for `wait_for_completion`, and returns their ids."""
        self._enqueued += (made := self._requests(prompts, sampling_params, lora_request, priority,
                                                  tokenization_kwargs, mm_processor_kwargs))
        return [each.id for each in made]

    def enqueue_chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
                     sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                     use_tqdm: bool | Callable[..., Any] = True, lora_request: Lora = None,
                     priority: int | Sequence[int] | None = None, *,
                     tokenization_kwargs: Mapping[str, Any] | None = None,
                     mm_processor_kwargs: Mapping[str, Any] | None = None, **template: Any) -> list[str]:
        """Keeps the requests of a `chat` for `wait_for_completion`, and returns their ids. `template`: the
        arguments of `chat` that are about its template."""
        return self.enqueue(self._conversations(messages, **template), sampling_params, lora_request,
                            priority, use_tqdm, tokenization_kwargs, mm_processor_kwargs)

    def wait_for_completion(self, output_type: Any = None, *,
                            use_tqdm: bool | Callable[..., Any] = True) -> list[RequestOutput]:
        """Runs the requests of `enqueue`, and returns their answers in order."""
        requests, self._enqueued = self._enqueued, []
        with progress_bar(use_tqdm, len(requests)) as advance:
            return self._answers(requests, lambda done, total: None, advance)

    def _requests(self, prompts: Prompt | Sequence[Prompt],
                  params: SamplingParams | Sequence[SamplingParams] | None, lora: Lora,
                  priority: int | Sequence[int] | None, tokenization: Mapping[str, Any] | None,
                  processor: Mapping[str, Any] | None) -> list[Request]:
        """The requests of a call, checked."""
        many = as_prompts(prompts)
        if processor:
            raise RequestError(f"mm_processor_kwargs is {processor!r:.200}", "none: a model's files say how "
                               "it reads images", "leave mm_processor_kwargs out")
        alike = params is None or isinstance(params, SamplingParams | Mapping)
        each = cast(list[SamplingParams | None], [params] * len(many) if alike else [*params])  # type: ignore
        first = [*priority] if isinstance(priority, Iterable) else [priority or 0] * len(many)
        for name, given in (("sampling_params", each), ("priorities", first)):
            if len(given) != len(many):
                raise RequestError(f"{len(given)} {name} for {len(many)} prompts",
                                   "one for all, or one for each", "pass as many")
        if tokenization: many = [self.tokenize_as_told(prompt, tokenization) for prompt in many]
        return [self.request(self._name(), prompt, its, before, lora_request=adapter)
                for prompt, its, before, adapter in
                zip(many, each, first, one_for_each(lora, len(many)), strict=True)]

    def _answers(self, requests: Sequence[Request], progress: Callable[[int, int], None],
                 advance: Callable[[], None]) -> list[RequestOutput]:
        builders = [RequestOutputBuilder(request, self.log_stats) for request in requests]
        outputs: dict[int, RequestOutput] = {}
        for at, delta in self._run(requests):
            builders[at].push(delta)
            if not builders[at].is_finished: continue
            outputs[at] = builders[at].output()
            self.latencies.add(outputs[at])
            progress(len(outputs), len(builders))
            advance()
        if self.engine.failure is not None: raise self.engine.failure
        return [outputs[at] for at in range(len(builders))]

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
             use_tqdm: bool | Callable[..., Any] = True, lora_request: Lora = None,
             priority: int | Sequence[int] | None = None, chat_template: str | None = None,
             chat_template_content_format: str = "auto", add_generation_prompt: bool = True,
             continue_final_message: bool = False, tools: Tools | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None,
             tokenization_kwargs: Mapping[str, Any] | None = None,
             mm_processor_kwargs: Mapping[str, Any] | None = None) -> list[RequestOutput]:
        """Answers to a conversation, or to a list of them, as `generate` gives them. The chat template is the
        model's, or `chat_template` (a template, or the name of one of the model's), with `tools` and
        variables of `chat_template_kwargs`, which the other arguments come before.
        `chat_template_content_format`: "string" or "openai" where "auto" shall not find out whether the
        template reads texts or lists of parts. Arguments of earlier tool calls may be JSON texts, as the API
        has them."""
        prompts = self._conversations(messages, chat_template, chat_template_content_format,
                                      add_generation_prompt, continue_final_message, tools,
                                      chat_template_kwargs)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request,
                             priority=priority, tokenization_kwargs=tokenization_kwargs,
                             mm_processor_kwargs=mm_processor_kwargs)

    def _conversations(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
                       chat_template: str | None = None, chat_template_content_format: str = "auto",
                       add_generation_prompt: bool = True, continue_final_message: bool = False,
                       tools: Tools | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
                       ) -> list[Prompt]:
        """The prompts of a `chat`."""
        several = not messages or not isinstance(messages[0], Mapping)
        form = None if chat_template_content_format == "auto" else chat_template_content_format
        own = {"tools": tools, "chat_template": chat_template, "content_format": form,
               "add_generation_prompt": add_generation_prompt,
               "continue_final_message": continue_final_message}
        given = {name: each for name, each in own.items() if each is not None}
        extra = {**(chat_template_kwargs or {}), **given}
        tools = extra.pop("tools", None) or ()
        many = [require_messages(each) for each in (messages if several else [messages])]
        return [self.render_conversation([*map(with_arguments, each)], tools, extra, local=True)
                for each in many]

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams,
                    lora_request: None = None, use_tqdm: bool | Callable[..., Any] = False,
                    concurrency_limit: int | None = None) -> list[BeamSearchOutput]:
        """The best beams of one prompt or of a list of them (beam_search.py), of `concurrency_limit` prompts
        at a time. Each round is a batch of all beams, whose earlier tokens are in the prefix cache."""
        require_no_adapter(lora_request)
        many = [self.request(self._name(), prompt, params.sampling) for prompt in as_prompts(prompts)]
        for each in many:
            if len(each.prompt) + params.max_tokens > self.length:
                raise RequestError(f"the prompt has {len(each.prompt)} tokens, and max_tokens is "
                                   f"{params.max_tokens}", f"at most {self.length} together, the context",
                                   "shorten the prompt, or lower max_tokens")
        size, made = concurrency_limit or max(1, len(many)), list[BeamSearchOutput]()
        with progress_bar(use_tqdm, len(many)) as advance:
            for first in range(0, len(many), size):
                made += self._search(many[first:first + size], params)
                for _ in many[first:first + size]: advance()
        return made

    def _search(self, prompts: Sequence[Request], params: BeamSearchParams) -> list[BeamSearchOutput]:
        searches = [Search(each.prompt, params, self.eos) for each in prompts]
        for _ in range(params.max_tokens):
            requests = [replace(prompt, id=self._name(), prompt=beam.tokens)
                        for prompt, search in zip(prompts, searches, strict=True) for beam in search.beams]
            if not requests: break
            answers = iter(self._answers(requests, lambda done, total: None, lambda: None))
            for search in searches:
                outputs = [next(answers).outputs[0] for _ in search.beams]
                if (error := next((each.error for each in outputs if each.error), None)) is not None:
                    raise error
                search.extend([found for each in outputs for found in each.logprobs or ()])
        made = [BeamSearchOutput(search.best()) for search in searches]
        for beam in (beam for each in made for beam in each.sequences):
            if self.tokenizer: beam.text = self.tokenizer.decode(beam.tokens, params.skip_special_tokens)
        return made

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *,
               lora_request: LoRARequest | None = None) -> Iterator[Delta]:
        """Yields text as it is generated. Raises `RequestError` at once for a bad prompt, and the error of an
        answer that fails later. Closing the iterator aborts the request."""
        return self._stream(self.request(self._name(), prompt, params, lora_request=lora_request))

    def complete(self, prompt: Prompt, params: SamplingParams | None = None,
                 on_delta: Callable[[Delta], None] = lambda _: None, *,
                 lora_request: LoRARequest | None = None) -> RequestOutput:
        """The whole answer to one prompt, or its n answers; `on_delta` is called with each delta."""
        request = self.request(self._name(), prompt, params, lora_request=lora_request)
        builders = RequestOutputBuilder(request, self.log_stats)
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
        following, ahead = iter(requests), 2 * self.engine.max_seqs
        try:
            for request in itertools.islice(following, ahead): self.engine.submit(request, inbox.put)
            while open_:
                for chosen in inbox.get():
                    if (entry := open_.get(chosen.request)) is None: continue
                    at, processor = entry
                    if (delta := processor.process(chosen)) is None: continue
                    if delta.finish_reason is not None and chosen.finish_reason is None:
                        self.engine.finish(chosen.request, chosen.index, delta.stop_reason)
                    if processor.is_finished:
                        del open_[chosen.request]
                        for request in itertools.islice(following, 1): self.engine.submit(request, inbox.put)
                    yield at, delta
        finally:
            for name in open_: self.engine.abort(name)

    def _name(self) -> str: return str(next(self._request_numbers))


@contextmanager
def progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Callable[[], None]]:
    """Yields what counts one more. True is tqdm's own bar, on a terminal alone; a callable makes another."""
    make = use_tqdm if callable(use_tqdm) else _tqdm() if use_tqdm and sys.stderr.isatty() else None
    if make is None:
        yield lambda: None
        return
    bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
    try: yield lambda: bar.update(1)
    finally: bar.close()


def _tqdm() -> Callable[..., Any] | None:
    try: return cast(Callable[..., Any], import_module("tqdm").tqdm)
    except ModuleNotFoundError: return None
