"""Service that endpoints share: engine, tokenizer, limits, and the records of requests.

Protocol: `Service.run(...)` is the generation of one request. It yields (choice, `Delta`) pairs of all
prompts as they are generated, within the time limit, and closes the engine's iterators at the end, which
aborts unfinished sequences.
"""
from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tinygrad_nv import collection
from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.prompts import ParsedPrompt
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.text.template_budget import OutOfTime, brief
from tinygrad_nv.engine.vision.prompt import PromptImages
from tinygrad_nv.errors import NVError, RequestError
from tinygrad_nv.server.errors import APIError, api_error
from tinygrad_nv.server.limits import BodyBudget, RequestLimits
from tinygrad_nv.server.media_budget import MediaBudget
from tinygrad_nv.server.origins import Hosts
from tinygrad_nv.server.parsers.table import AUTO, REASONING, TOOLS, detect
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.response_store import ResponseStore
from tinygrad_nv.server.usage import Usage
from tinygrad_nv.server.workers import INLINE, INLINE_BYTES, apart, aside
from tinygrad_nv.version import __version__

if TYPE_CHECKING:
    import numpy as np

    from tinygrad_nv.engine.embedding.batching import EmbeddingEngine
    from tinygrad_nv.engine.image_engine import ImageEngine
    from tinygrad_nv.engine.lora.request import LoRARequest
    from tinygrad_nv.engine.prompts import Prompt, TextOrTokens
    from tinygrad_nv.engine.speech.batching import SpeechEngine
    from tinygrad_nv.engine.speech.outputs import Segment
    from tinygrad_nv.engine.speech.params import TranscriptionParams
    from tinygrad_nv.engine.speech.recording import Recording
    from tinygrad_nv.engine.text.tokenizer import Tokenizer
    from tinygrad_nv.models.classifier import Classifier
    from tinygrad_nv.server.adapters import AdapterNames
    from tinygrad_nv.server.metrics import Metrics
    from tinygrad_nv.server.sleeping import SleepingLLM
    from tinygrad_nv.server.tracing import Tracer

T = TypeVar("T")
SLOW_S = 0.03     # processor time of a chat template and a short text, which take 1 to 5 ms


class ServedModel(Protocol):
    """The part of `LLM` that the server uses."""
    defaults: SamplingParams
    length: int
    eos: tuple[int, ...]

    def tokenize(self, prompt: TextOrTokens, truncate_prompt_tokens: int | None = None,
                 truncation_side: str = "left") -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
                    /, **extra: Any) -> list[int]: ...
    def require_tokenizer(self) -> Tokenizer: ...


class ImageReader(Protocol):
    """The part of `LLM` that reads images of prompts."""
    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
                     /, **extra: Any) -> ParsedPrompt: ...
    def with_images(self, parsed: ParsedPrompt,
                    truncate_prompt_tokens: int | None = None) -> ParsedPrompt: ...


class EmbeddingClient(Protocol):
    """The part of `Embedder` that the server uses."""
    @property
    def classifier(self) -> Classifier | None: ...
    @property
    def width(self) -> int: ...
    def encode(self, prompt: TextOrTokens, most: int | None = None) -> list[int]: ...
    def require_dimensions(self, dimensions: int | None) -> None: ...
    def encode_pairs(self, firsts: Sequence[str], seconds: Sequence[str], most: int | None = None,
                     step: Callable[[], None] = lambda: None) -> Sequence[Sequence[int]]: ...
    def submit(self, prompts: Sequence[Sequence[int]], every: bool = False) -> list[Future[np.ndarray]]: ...
    def finish(self, pooled: Sequence[np.ndarray], normalize: bool | None = None,
               dimensions: int | None = None) -> np.ndarray: ...


class SpeechClient(Protocol):
    """The part of `Transcriber` that the server uses."""
    @property
    def engine(self) -> SpeechEngine: ...
    def recording(self, audio: np.ndarray, params: TranscriptionParams | None = None,
                  on_segment: Callable[[Segment], None] = lambda segment: None) -> Recording: ...


class EngineClient(Protocol):
    """The part of `AsyncEngine` that the server uses."""
    @property
    def failure(self) -> NVError | None: ...
    def generate(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None,
                 priority: int = 0, lora_request: LoRARequest | None = None) -> AsyncIterator[Delta]: ...
    def stats(self) -> Any: ...
    async def refresh_stats(self) -> None: ...
    async def stop(self, drain_s: float = 0.0) -> None: ...


class EmbeddingEngineClient(EngineClient):
    """`engine` of an embedding model, as the server uses one that generates."""

    def __init__(self, engine: EmbeddingEngine) -> None: self.engine = engine

    @property
    def failure(self) -> NVError | None: return None

    def generate(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None,
                 priority: int = 0, lora_request: LoRARequest | None = None) -> AsyncIterator[Delta]:
        raise RequestError("the model makes embeddings", "a prompt to embed", "POST /v1/embeddings")

    def stats(self) -> Any: return self.engine.stats()

    async def refresh_stats(self) -> None: """They are always current."""

    async def stop(self, drain_s: float = 0.0) -> None: await self.engine.stop(drain_s)


@dataclass(frozen=True)
class Parsers:
    """How answers are parsed: names of parsers/table.py, or "auto" for what the chat template asks for, or
    "none". Without `auto_tool_choice`, tools need a tool choice that forces a call."""
    reasoning: str = AUTO
    tools: str = AUTO
    auto_tool_choice: bool = True
    trust_request_template: bool = False

    def names_for(self, template: str) -> tuple[str, str]:
        """Returns the names of the parsers of reasoning and of tool calls."""
        return (detect(REASONING, template) if self.reasoning == AUTO else self.reasoning,
                detect(TOOLS, template) if self.tools == AUTO else self.tools)

    def require_auto(self) -> None:
        """Raises `APIError` 400 where the server was started without automatic tool choice."""
        if self.auto_tool_choice: return
        raise APIError(400, "tools with tool_choice 'auto', and the server was started with "
                       "--no-enable-auto-tool-choice; expected: 'none', 'required' or a function's name",
                       "unsupported", "tool_choice")


@dataclass(frozen=True)
class CORS:
    """Rights of pages of other origins, as their browsers ask: "*" is any origin, method or header."""
    origins: tuple[str, ...] = ("*",)
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass
class Service:
    """A model served under `names`, the first of which is its own. `embedder` is set for an embedding model,
    which serves /v1/embeddings alone."""
    engine: EngineClient
    model: ServedModel
    names: tuple[str, ...]
    limits: RequestLimits
    metrics: Metrics
    keys: frozenset[str] = frozenset()
    embedder: EmbeddingClient | None = None
    parsers: Parsers = field(default_factory=Parsers)
    cors: CORS = field(default_factory=CORS)
    hosts: Hosts = field(default_factory=Hosts)     # that it answers for
    shared_prefixes: bool = False   # requests with different keys share prefixes
    tokenizer_info: bool = False    # whether /tokenizer_info is served
    scale_out: bool = False         # whether the endpoints of scale_out/ are
    # requests of /inference/v1/generate, by owner and id, and what ends them
    generating: dict[tuple[str, str], list[asyncio.Event]] = field(default_factory=dict)
    prompt_details: bool = False    # usage tells of tokens that the prefix cache had
    root: str | None = None         # the model's path, in /v1/models
    fingerprint: str = f"tinygrad-nv-{__version__}"     # of what computes an answer
    strict: bool = False            # fields without effect are errors
    force_usage: bool = False       # each chunk of a stream has its usage
    ids_for_texts: bool = False     # log probabilities have "token_id:5" for texts, unless requests say
    ignored: set[str] = field(default_factory=set)      # such fields that were logged
    body_budget: BodyBudget = field(default_factory=BodyBudget)
    media: MediaBudget = field(default_factory=MediaBudget)     # of all requests
    responses: dict[str, ResponseStore] = field(default_factory=dict)   # by the owner of a request
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    active: int = 0         # requests being answered
    slow_template: bool = False     # the model's took long for a short text
    adapters: AdapterNames | None = None
    sleeping: SleepingLLM | None = None     # where clients may have it sleep
    tracer: Tracer | None = None
    images: ImageEngine | None = None       # of a model that makes images, and does nothing else
    speech: SpeechClient | None = None      # of a model that transcribes, and does nothing else
    vision: ImageReader | None = None       # of a model that reads images

    def owner(self, key: str) -> str:
        """The owner of requests with a key: a keyed hash of it, where there are several keys, else ""."""
        return hmac.digest(self.secret, key.encode(), "sha256").hex() if len(self.keys) > 1 else ""

    def responses_of(self, record: Record) -> ResponseStore:
        """The kept responses of a request's owner."""
        return self.responses.setdefault(record.owner, ResponseStore())

    def usage(self, record: Record, reasons: bool = False) -> Usage:
        """Tokens of a request so far; those of reasoning where its parser `reasons`."""
        return Usage(record.prompt_tokens, record.output_tokens,
                     record.cached_tokens if self.prompt_details else None,
                     record.reasoning_tokens if reasons else None)

    def require_name(self, name: str | None) -> str:
        """The model name for the response. A request without one gets the served model; an adapter's name is
        one, too."""
        if not name or name in self.names: return name or self.names[0]
        if self.adapters is not None and self.adapters.find(name) is not None: return name
        every = (*self.names, *(self.adapters.names if self.adapters is not None else ()))
        raise APIError(404, f"the model {name[:200]!r} is not served here; expected: {', '.join(every)}",
                       "model_not_found", "model")

    def add_defaults(self, data: dict[str, Any]) -> None:
        """Gives a request's body the fields that the server was started with."""
        if self.force_usage and data.get("stream") is True:
            data["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if self.ids_for_texts and data.get("return_tokens_as_token_ids") is None:
            data["return_tokens_as_token_ids"] = True

    def require_embedder(self) -> EmbeddingClient:
        """The embedding model. Raises `APIError` 404 for one that generates."""
        if self.embedder is not None: return self.embedder
        self.require_generator()
        raise APIError(404, f"{self.names[0]} generates text; expected: an embedding model; to fix: start "
                       "the server with --task embed, which makes embeddings of the last token's hidden "
                       "state", "unsupported_task")

    def require_generator(self) -> None:
        """Raises `APIError` 404 for an embedding model, and for one that transcribes or makes images."""
        for there, words in ((self.speech, "transcribes recordings; to fix: POST /v1/audio/transcriptions"),
                             (self.images, "makes images; to fix: POST /v1/images/generations")):
            if there is not None:
                raise APIError(404, f"{self.names[0]} {words}, or serve another model", "unsupported_task")
        if self.embedder is None: return
        makes, path = ("makes embeddings", "/v1/embeddings") if self.embedder.classifier is None else \
            ("classifies texts", "/classify or /score")
        raise APIError(404, f"{self.names[0]} {makes}, and generates no text; to fix: POST "
                       f"{path}, or serve a causal language model", "unsupported_task")

    def require_images(self) -> ImageEngine:
        """The model that makes images. Raises `APIError` 404 for others."""
        if self.images is not None: return self.images
        raise APIError(404, f"{self.names[0]} makes no images; to fix: serve a directory of Stable Diffusion",
                       "unsupported_task")

    def require_speech(self) -> SpeechClient:
        """The model that transcribes. Raises `APIError` 404 for others."""
        if self.speech is not None: return self.speech
        raise APIError(404, f"{self.names[0]} transcribes no recordings; to fix: serve a Whisper model",
                       "unsupported_task")

    def no_classifier(self) -> APIError:
        """404: the embedding model has no head for classification."""
        return APIError(404, f"{self.names[0]} makes embeddings, and has no head for classification; to fix: "
                        "POST /v1/embeddings or /score, or serve a model for sequence classification",
                        "unsupported_task")

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `APIError` 400 if there is none."""
        try: return self.model.require_tokenizer()
        except NVError as error: raise api_error(error) from error

    async def read(self, record: Record, task: Callable[[], T], more: int = 0) -> T:
        """`task()`, which reads the fields of a body, and `more` bytes: in a thread for many."""
        def read() -> T:
            with collection.pause(): return task()
        return await aside(record.size + more, read, INLINE_BYTES)

    async def aside(self, size: int, task: Callable[[], T]) -> T:
        """`task()`, in a thread for long texts."""
        try: return await aside(size, task)
        except NVError as error: raise api_error(error) from error

    async def render(self, size: int, task: Callable[[], T], by_client: bool) -> T:
        """`task()`, which renders a chat template: apart from other texts for a client's template, after the
        model's own was slow, and again where it is slow for a short text."""
        def run_timed() -> T:
            began = time.thread_time()
            try: return task()
            finally: self.slow_template = size <= INLINE and time.thread_time() - began > SLOW_S
        if not by_client and not self.slow_template:
            with contextlib.suppress(OutOfTime):
                return await self.aside(size, (lambda: brief(run_timed)) if size <= INLINE else run_timed)
        try: return await apart(task if by_client else run_timed)
        except NVError as error: raise api_error(error) from error

    async def run(self, prompts: Sequence[list[int]], params: SamplingParams, priority: int,
                  record: Record, salt: str = "",
                  images: PromptImages | None = None) -> AsyncGenerator[tuple[int, Delta], None]:
        """Deltas of all prompts with the number of their choice, prompt × n + index, by the adapter that
        `record.model` names, if it does. A single prompt may have `images`."""
        # nor does the time to the first token tell what others asked
        if record.owner and not self.shared_prefixes: salt = f"{record.owner}:{salt}"
        lora = None if self.adapters is None else self.adapters.find(record.model)
        more: dict[str, Any] = {} if lora is None else {"lora_request": lora}
        try:
            sources = [self.engine.generate(ParsedPrompt(ids=prompt, salt=salt, inserted=images), params,
                                            request_id=f"{record.id}-{at}", priority=priority, **more)
                       for at, prompt in enumerate(prompts)]
        except NVError as error: raise api_error(error) from error
        record.params, record.choices = params, len(prompts) * params.n
        record.prompt_tokens = sum(map(len, prompts))
        with contextlib.closing(Deadline(self.limits.request_s)) as deadline:
            async with contextlib.aclosing(merge_streams(sources)) as deltas:
                while True:
                    try:
                        with deadline: at, delta = await anext(deltas)
                    except StopAsyncIteration: return
                    except TimeoutError as error:
                        raise APIError(504, f"the answer was not complete within {self.limits.request_s:g} s",
                                       "request_timeout") from error
                    except NVError as error: raise api_error(error) from error
                    record.cached_tokens = max(record.cached_tokens, delta.cached_tokens)
                    choice = at * params.n + delta.index
                    self.metrics.inter_token_latencies(record.count_delta(choice, delta))
                    if delta.finish_reason == "error":
                        raise api_error(delta.error or NVError("the engine could not continue"))
                    if delta.finish_reason == "abort":
                        raise APIError(503, "the server stopped before the answer was complete", "aborted")
                    yield choice, delta


class Deadline:
    """A limit of the time of many waits, by one timer: `asyncio.timeout` takes one for each wait.

    Protocol: `with deadline: await …` raises `TimeoutError` where the time is over, or when it comes to be.
    `close` ends the timer."""

    def __init__(self, seconds: float) -> None:
        self._over, self._cancelled, self._before = False, False, 0
        self._task: asyncio.Task[Any] | None = None     # the task that waits
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def __enter__(self) -> None:
        if self._over: raise TimeoutError
        self._task = task = asyncio.current_task()
        assert task is not None
        self._before = task.cancelling()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        task, self._task = self._task, None
        assert task is not None
        # others may have cancelled the task as well
        if self._cancelled and task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _end(self) -> None:
        self._over, self._cancelled = True, self._task is not None
        if self._task is not None: self._task.cancel()

    def close(self) -> None:
        """Ends the timer."""
        self._timer.cancel()


async def merge_streams(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they arrive, with the number of their source. Closes the sources at the end."""
    queue: asyncio.Queue[tuple[int, T | Exception | None]] = asyncio.Queue(2 * len(sources))

    async def pump(at: int, source: AsyncIterator[T]) -> None:
        try:
            async for item in source: await queue.put((at, item))
            await queue.put((at, None))
        except Exception as error: await queue.put((at, error))

    if len(sources) == 1:
        async with closing(sources[0]) as only:
            async for item in only: yield 0, item
        return
    tasks = [asyncio.ensure_future(pump(at, source)) for at, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            at, found = await queue.get()
            if isinstance(found, Exception): raise found
            if found is None: left -= 1
            else: yield at, found
    finally:
        for task in tasks: task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            async with closing(source): pass


@contextlib.asynccontextmanager
async def closing(source: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Closes an iterator if it can be closed."""
    try: yield source
    finally:
        if close := getattr(source, "aclose", None): await close()
