"""A core that counts: sequence i of a request gets tokens 100·i, 100·i + 1, …, one a step."""
from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.outputs import EngineCoreOutput
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.errors import NVError, RequestError


class CountingCore:
    """`calls` records the calls; `crash` is raised by a step, `refuse` by `add`; a step waits for `gate`."""

    def __init__(self, queue_limit: int = 8, step_s: float = 0.0) -> None:
        self.config = EngineConfig(queue_limit=queue_limit)
        self.running: dict[str, tuple[Request, dict[int, int]]] = {}
        self.calls: list[tuple] = []
        self.steps, self.step_s, self.threads = 0, step_s, set[int]()
        self.crash: BaseException | None = None
        self.refuse: NVError | None = None
        self.gate = threading.Event()
        self.gate.set()

    @property
    def has_unfinished(self) -> bool: return bool(self.running)

    def spare_s(self) -> float: return 0.0

    def stats(self) -> SimpleNamespace: return SimpleNamespace(running=len(self.running))

    def add(self, request: Request) -> None:
        self.calls.append(("add", request.id))
        if self.refuse is not None: raise self.refuse
        self.running[request.id] = request, dict.fromkeys(range(request.params.n), 0)

    def abort(self, request: str) -> None:
        self.calls.append(("abort", request))
        del self.running[request]

    def finish(self, request: str, index: int, stop_reason: int | str | None) -> None:
        self.calls.append(("finish", request, index, stop_reason))
        self._end(request, index)

    def _end(self, request: str, index: int) -> None:
        del self.running[request][1][index]
        if not self.running[request][1]: del self.running[request]

    def step(self) -> list[EngineCoreOutput]:
        self.threads.add(threading.get_ident())
        self.gate.wait()
        if self.crash is not None: raise self.crash
        self.steps += 1
        time.sleep(self.step_s)
        made = []
        for name, (request, counts) in list(self.running.items()):
            for index in list(counts):
                counts[index] += 1
                last = counts[index] == request.params.max_tokens
                token = 100 * index + counts[index] - 1
                made.append(EngineCoreOutput(name, index, (token,), finish_reason="length" if last else None))
                if last: self._end(name, index)
        return made


class CountingLLM:
    """As much of an LLM as an AsyncEngine needs: token t is the text of its digits and a space."""

    def __init__(self, core: CountingCore) -> None:
        from tinygrad_nv.engine.sampling import SamplingParams
        from tinygrad_nv.engine.thread import EngineThread
        self.core, self.engine, self.defaults = core, EngineThread(core), SamplingParams(max_tokens=4)
        self.tokenizer, self.adapters, self.ranks = self, None, None
        self.queue_limit = core.config.queue_limit

    def request(self, name: str, prompt, params=None, priority: int = 0, matched: bool = True,
                lora_request=None) -> Request:
        if not prompt: raise RequestError("the prompt is empty")
        return Request(name, list(prompt), self.defaults if params is None else params, priority)

    def decode(self, ids, skip_special_tokens: bool = True) -> str: return "".join(f"{i} " for i in ids)

    def silent(self, token: int) -> bool: return False
