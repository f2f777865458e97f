"""`Loader`: steps of batches, read ahead by a thread.

Protocol: iterating gives a `Step` for each step of the optimiser: one `Batch` a micro-batch, of this rank.
`step.state` is the sampler's state after the step; a `Loader` made with it goes on with the step after. A
thread reads up to `prefetch` steps ahead. What it raises is raised by the iteration, at the step where it
happened. `close()`, or leaving the `with` block, ends the thread.
"""
from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.train.data.batch import Batch, Row, collate
from tinygrad_nv.train.data.dataset import Data
from tinygrad_nv.train.data.sampler import Sampler, SamplerState, share

WAIT = 0.1      # seconds after which a thread that waits for room looks whether it is to end


@dataclass(frozen=True)
class LoaderOptions:
    """`rows`: indices of a micro-batch of one rank (--per-device-train-batch-size); `accumulation`:
    micro-batches of a step. `epochs`: after so many, from the start, there are no more steps; None: no end.
    `pad`: the id of padding. `prefetch`: steps that are read ahead; 0: no thread."""
    rows: int
    accumulation: int = 1
    rank: int = 0
    world: int = 1
    seed: int = 42
    shuffle: bool = True
    drop_last: bool = False
    epochs: int | None = None
    pad: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        for name in ("rows", "accumulation", "world"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} of batches is {value}", "1 or more", "raise it")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank {self.rank} of {self.world}", f"0 to {self.world - 1}", "correct it")
        if self.seed < 0: raise ConfigError(f"--seed {self.seed}", "0 or more", "choose another")

    @property
    def batch(self) -> int:
        """Indices of a step, of all ranks."""
        return self.rows * self.accumulation * self.world


@dataclass(frozen=True)
class Step:
    """`batches`: a rank's micro-batches, all of one shape. `before` and `state`: the sampler's before and
    after the step."""
    batches: tuple[Batch, ...]
    before: SamplerState
    state: SamplerState

    @property
    def epoch(self) -> float:
        """Epochs that are done after the step, with the part of the last."""
        return self.state.epoch + self.state.offset / self.state.rows

    @property
    def loss_tokens(self) -> int:
        """Tokens with loss, of this rank."""
        return sum(batch.loss_tokens for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Tokens that are not padding, of this rank."""
        return sum(batch.tokens for batch in self.batches)


class Loader:
    """The steps of a data set, from `state` on. Raises `DataError` for a state that is of other data."""

    def __init__(self, data: Data, options: LoaderOptions, state: SamplerState | None = None) -> None:
        self.data, self.options = data, options
        self.sampler = Sampler(len(data), options.batch, options.seed, options.shuffle, options.drop_last)
        self.state = state or self.sampler.start    # after the last step that was given out
        self.sampler.require(self.state)
        self._steps = self._read(self.state)
        self._ready: queue.Queue[Step | BaseException | None] = queue.Queue(max(1, options.prefetch))
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimiser in an epoch."""
        return self.sampler.batches

    def __enter__(self) -> Loader: return self

    def __exit__(self, *ignored: object) -> None: self.close()

    def __iter__(self) -> Iterator[Step]: return self

    def __next__(self) -> Step:
        step = next(self._steps, None) if not self.options.prefetch else self._take()
        if step is None: raise StopIteration
        self.state = step.state
        return step

    def close(self) -> None:
        """Ends the thread. The loader gives no more steps."""
        self._over.set()
        if self._thread is not None: self._thread.join()

    def _take(self) -> Step | None:
        """The next step that the thread has read."""
        if self._over.is_set(): return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="training data", daemon=True)
            self._thread.start()
        found = self._ready.get()
        if isinstance(found, Step): return found
        self._over.set()    # nothing comes after an error or the end
        if found is not None: raise found
        return None

    def _run(self) -> None:
        try:
            for step in self._steps:
                if not self._put(step): return
            self._put(None)
        except BaseException as error: self._put(error)     # raised by the iteration

    def _put(self, what: Step | BaseException | None) -> bool:
        """False where the loader was closed first."""
        while not self._over.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(what, timeout=WAIT)
                return True
        return False

    def _read(self, state: SamplerState) -> Iterator[Step]:
        options = self.options
        while options.epochs is None or state.epoch < options.epochs:
            indices, after = self.sampler.next(state)
            shares = share(indices, options.rank, options.world, options.accumulation, options.rows)
            yield Step(tuple(self._batch(each.tolist()) for each in shares), state, after)
            state = after

    def _batch(self, indices: list[int]) -> Batch:
        count, each = self.options.rows, self.data.rows_per_index
        rows: list[Row | None] = [None] * (count * each)
        for number, index in enumerate(indices):
            for which, row in enumerate(self.data.rows(index)): rows[which * count + number] = row
        return collate(rows, self.data.width, self.options.pad)
