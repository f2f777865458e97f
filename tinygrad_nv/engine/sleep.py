"""Sleep: a loaded model that gives memory back, and keeps its place for captured steps.

Protocol: as vLLM's. `sleep(level)` ends running requests and gives back the KV cache; with level 2 the
weights, too. Requests are refused until `wake_up()`, which reads the weights again, from the files of the
model as they are then. `wake_up(tags)` wakes a part, "weights" or "kv_cache": the model takes requests when
both are awake. Addresses stay, so that captured steps do, and the prefix cache is empty. A model that waits
for its requests (mode "wait") counts as asleep; `wake_up` ends that sleep, which raises.

A fork that captures steps ahead (worker/warm_up.py) shares the memory, which would stay its own: `sleep` ends
it, and `wake_up` starts another for what is left.

Memory is given back on a CPU under Linux, where weights are host memory already: level 1 keeps them where
they are. Quantised weights, which are repacked while they are loaded, stay at level 1.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv.engine.thread import EngineThread
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import ConfigError, EngineError
from tinygrad_nv.runtime.memory import discard, discards

WEIGHTS, CACHE = TAGS = ("weights", "kv_cache")
MODES = ("abort", "wait")


@dataclass(frozen=True)
class SleepingModel:
    """A model that sleeps with others, the files of its weights, and how its prefix cache is emptied."""
    runner: ModelRunner
    directory: Path
    forget_prefixes: Callable[[], None]


class Sleeper:
    """The sleep of an engine's models: the one that it serves, and a draft model. Any thread may call it."""

    def __init__(self, engine: EngineThread, models: Sequence[SleepingModel]) -> None:
        self.engine, self.models, self._lock = engine, models, threading.Lock()
        self.asleep, self._discarded = frozenset[str](), False
        self._resumed = 0       # how often the engine was

    def require_memory(self, level: int = 1) -> None:
        """Raises `ConfigError` where a device or a model cannot give memory back."""
        device = self.models[0].runner.device
        if not discards(device):
            raise ConfigError(f"sleep(level={level}) of a model on {device}, whose captured steps hold its "
                              "memory by address", "a model on the CPU, under Linux",
                              "close() it, and load it again later")
        quantised = [each.directory for each in self.models if each.runner.model.config.quantization]
        if level == 2 and quantised:
            raise ConfigError(f"sleep(level=2), and the weights of {quantised[0]} are quantised: they were "
                              "repacked when they were loaded", "level 1, which keeps weights",
                              "use level 1, or close() the model and load it again later")

        if level == 2 and any(each.runner.bundled is not None for each in self.models):
            raise ConfigError("sleep(level=2), and the weights are those of a bundle, in one memory",
                              "level 1, which keeps weights",
                              "use level 1, or close() the model and load it again later")

    def sleep(self, level: int, mode: str) -> None:
        """Ends requests, and gives memory back. Raises `ConfigError`, and `EngineError` where the model was
        woken up before that."""
        if type(level) is not int or level not in (1, 2):
            raise ConfigError(f"sleep(level={level!r})", "1: give back the KV cache, or 2: weights, too",
                              "change level")
        if mode not in MODES:
            raise ConfigError(f"sleep(mode={mode!r})", "abort: running requests end now, or wait: when they "
                              "are done", "change mode")
        self.require_memory(level)
        with self._lock:
            refusal = EngineError("the model sleeps, and takes no requests", "one that is awake",
                                  "call wake_up(), or POST /wake_up")
            paused, resumed = self.engine.pause(refusal, mode == "abort"), self._resumed
            self.asleep = frozenset(TAGS)
        with suppress(CancelledError): paused.result()  # without the lock: `wake_up` may be called
        with self._lock:
            if resumed != self._resumed:
                raise EngineError("the model was woken up before it slept: its requests were not done",
                                  "requests that end first", 'call sleep() again, or with mode="abort"')
            self._discard(weights=level == 2)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Wakes parts, all without `tags`. Does nothing for those that are awake. Raises `ConfigError`,
        `WeightError`."""
        if unknown := [each for each in tags or () if each not in TAGS]:
            raise ConfigError(f"wake_up(tags={list(tags or ())}), and nothing is called {unknown[0]!r}",
                              ", ".join(TAGS), "change tags")
        with self._lock:
            waking = self.asleep if tags is None else self.asleep & set(tags)
            if WEIGHTS in waking and self._discarded: self._read()
            self.asleep -= waking
            if waking and not self.asleep:
                for each in self.models: each.runner.resume_captures()
                self._resumed += 1
                self.engine.resume()

    def _discard(self, weights: bool) -> None:
        """Gives back what has not been woken since."""
        for each in self.models: each.runner.end_captures()
        for each in self.models:
            self.engine.call(each.forget_prefixes)
            if CACHE in self.asleep: each.runner.discard_cache()
            if weights and WEIGHTS in self.asleep:
                from tinygrad_nv.models.weights import list_loaded
                discard(list_loaded(each.runner.model))
        self._discarded |= weights and WEIGHTS in self.asleep

    def _read(self) -> None:
        from tinygrad_nv.models.weights import read_again
        for each in self.models: read_again(each.runner.model, each.directory)
        self._discarded = False
