"""What every endpoint shares: the engine, the model's words, limits, and what is going on.

Protocol: `Service.run(...)` is one request's generation: it gives (choice, `Delta`) pairs of all prompts as
they come, within the time limit, and closes the engine's iterators however it ends, which aborts what still
runs.
"""
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import NVError
from tinygrad_nv.server.errors import APIError, explained
from tinygrad_nv.server.limits import Limits
from tinygrad_nv.server.record import Record

if TYPE_CHECKING:
    from tinygrad_nv.engine.llm import Prompt
    from tinygrad_nv.engine.text.tokenizer import Tokenizer
    from tinygrad_nv.server.metrics import Metrics

T = TypeVar("T")
# texts of more characters are tokenised beside the event loop: about 5 ms of it
INLINE_CHARACTERS = 4096


class Model(Protocol):
    """What the server needs of an `LLM`."""
    defaults: SamplingParams
    length: int

    def encode(self, prompt: Prompt) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
                    /, **extra: Any) -> list[int]: ...
    def require_tokenizer(self) -> Tokenizer: ...


class Engine(Protocol):
    """What the server needs of an `AsyncEngine`."""
    @property
    def failure(self) -> NVError | None: ...
    def generate(self, prompt: list[int], params: SamplingParams, *, request_id: str | None = None,
                 priority: int = 0) -> AsyncIterator[Delta]: ...
    def stats(self) -> Any: ...
    async def stop(self, drain_s: float = 0.0) -> None: ...


@dataclass
class Service:
    """A model that is served under `names`, the first of them its own."""
    engine: Engine
    model: Model
    names: tuple[str, ...]
    limits: Limits
    metrics: Metrics
    keys: frozenset[str] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    active: int = 0         # requests being answered

    def require_name(self, name: str | None) -> str:
        """The name the answer carries. A request without one means the model there is."""
        if name is None or name in self.names: return name or self.names[0]
        raise APIError(404, f"the model {name[:200]!r} is not served here; expected: {', '.join(self.names)}",
                       "model_not_found", "model")

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """`work()`, in a thread if it is about more than a few characters."""
        try: return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)
        except NVError as error: raise explained(error) from error

    async def run(self, prompts: Sequence[list[int]], params: SamplingParams, priority: int,
                  record: Record) -> AsyncGenerator[tuple[int, Delta], None]:
        """Deltas of all prompts with the number of their choice, prompt × n + index."""
        try:
            sources = [self.engine.generate(prompt, params, request_id=f"{record.id}-{at}", priority=priority)
                       for at, prompt in enumerate(prompts)]
        except NVError as error: raise explained(error) from error
        record.params, record.choices = params, len(prompts) * params.n
        record.prompt_tokens = sum(map(len, prompts))
        deadline = asyncio.get_running_loop().time() + self.limits.request_s
        async with contextlib.aclosing(merged(sources)) as deltas:
            while True:
                try:
                    async with asyncio.timeout_at(deadline): at, delta = await anext(deltas)
                except StopAsyncIteration: return
                except TimeoutError as error:
                    raise APIError(504, f"the answer was not complete within {self.limits.request_s:g} s",
                                   "request_timeout") from error
                except NVError as error: raise explained(error) from error
                record.cached_tokens = max(record.cached_tokens, delta.cached_tokens)
                choice = at * params.n + delta.index
                self.metrics.gaps(record.seen(choice, delta))
                if delta.finish_reason == "error":
                    raise explained(delta.error or NVError("the engine could not go on"))
                if delta.finish_reason == "abort":
                    raise APIError(503, "the server stopped before the answer was complete", "aborted")
                yield choice, delta


async def merged(sources: Sequence[AsyncIterator[Delta]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Items of all sources as they come, with their source's number. Closes them at the end."""
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(2 * len(sources))

    async def pump(at: int, source: AsyncIterator[Delta]) -> None:
        try:
            async for delta in source: await queue.put((at, delta))
            await queue.put((at, None))
        except Exception as error: await queue.put((at, error))

    if len(sources) == 1:
        async with closing(sources[0]) as only:
            async for delta in only: yield 0, delta
        return
    tasks = [asyncio.ensure_future(pump(at, source)) for at, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            at, item = await queue.get()
            if isinstance(item, Exception): raise item
            if item is None: left -= 1
            else: yield at, item
    finally:
        for task in tasks: task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            async with closing(source): pass


@contextlib.asynccontextmanager
async def closing(source: AsyncIterator[Delta]) -> AsyncIterator[AsyncIterator[Delta]]:
    """Closes an iterator that can be closed."""
    try: yield source
    finally:
        if close := getattr(source, "aclose", None): await close()
