"""What a step leaves on the device, and how the host comes to know it.

Protocol: `Outbox` owns logits of the rows that are sampled, float32 [samples, vocab], and the tokens chosen
of them, int32 [samples], which each step that samples writes anew. `deliver` puts what a batch asks for into
order behind its step, and settles a future when it is there: tokens, and logarithms of probabilities of
samples that want them, by their logits as they are before any filter, in float64. On a device with a driver
the bytes go to page-locked memory, and a thread of the outbox waits for them, so that the next step may be
launched meanwhile.

`last(slot)` is the token that a slot has chosen last, for a work that begins with it: where that was in the
step before, the token's number on the device, as −1 − number; else the token, which the host has been told.
"""
from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.uop.ops import UOp

from tinygrad_nv.engine.scheduling.batch import Batch, Logprobs, Sampled
from tinygrad_nv.graphs.inputs import region
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Download, Event, HostMemory

Asked = list[tuple[int, int]]   # samples that want logarithms, and of how many tokens


class Outbox:
    """Room for at most `samples` samples of a vocabulary."""

    def __init__(self, device: str, samples: int, vocab_size: int) -> None:
        self.device, self.vocab_size = device, vocab_size
        self._logits: dict[int, Buffer] = {}    # by samples of a step: few steps have many
        self._tokens = region(device, 4 * samples)
        self._chosen: dict[int, tuple[Future[Sampled], int]] = {}  # by slot: in which step, its number there
        self._newest: Future[Sampled] | None = None
        self._free: SimpleQueue[tuple[HostMemory, Event]] = SimpleQueue()
        self._given_back = weakref.finalize(self, _give_back, self._free)
        self._reader = ThreadPoolExecutor(1, "nv-reader")

    def logits(self, samples: int) -> Tensor:
        """Those of a step with so many."""
        if samples not in self._logits:
            self._logits[samples] = region(self.device, 4 * samples * self.vocab_size)
        return _view(self._logits[samples], (samples, self.vocab_size), dtypes.float32)

    def tokens(self, samples: int) -> Tensor:
        """The first tokens."""
        return _view(self._tokens, (samples,), dtypes.int32)

    def last(self, slot: int) -> int:
        """The token a slot has chosen last, or where it is."""
        done, number = self._chosen[slot]
        return -1 - number if done is self._newest else int(done.result().tokens[number])

    def fork(self, source: int, slot: int) -> None:
        """A slot goes on with the token of another."""
        if source in self._chosen: self._chosen[slot] = self._chosen[source]

    def deliver(self, batch: Batch, size: int, done: Future[Sampled]) -> None:
        """Settles `done` with what the step just launched, for `size` samples, has chosen."""
        samples = [sample for work in batch.works for sample in work.samples]
        if samples: self._newest = done
        for number, sample in enumerate(samples): self._chosen[sample.slot] = done, number
        asked = [sample.logprobs for sample in samples]
        count, wanted = len(asked), [(i, most) for i, most in enumerate(asked) if most is not None]
        opened = Device[self.device]
        if isinstance(opened, NVDevice):
            self._download(opened, count, size, wanted, done)
            return
        opened.synchronize()
        tokens = _words(self._tokens, np.int32)[:count].copy()
        if not wanted:
            done.set_result(Sampled(tokens))
            return
        rows = _words(self._logits[size], np.float32).reshape(-1, self.vocab_size)[[i for i, _ in wanted]]
        self._reader.submit(_settle, done, tokens, rows, wanted)

    def _download(self, opened: NVDevice, count: int, size: int, wanted: Asked,
                  done: Future[Sampled]) -> None:
        driver, row_bytes = opened.driver, 4 * self.vocab_size
        first = -(-4 * max(1, count) // 256) * 256
        host, event = self._memory(opened, first + len(wanted) * row_bytes)
        if count: driver.submit(Download(host, 0, self._tokens._buf, 4 * count))
        for k, (i, _) in enumerate(wanted):
            source = self._logits[size]._buf + i * row_bytes
            driver.submit(Download(host, first + k * row_bytes, source, row_bytes))
        driver.record(event)

        def read() -> None:
            try:
                driver.wait_for(event)
                tokens = np.frombuffer(host.view, np.int32, count).copy()
                rows = np.frombuffer(host.view, np.float32, len(wanted) * self.vocab_size, first).copy()
            except BaseException as error:
                done.set_exception(error)
                return
            finally: self._free.put((host, event))
            _settle(done, tokens, rows.reshape(-1, self.vocab_size), wanted)

        if driver.emulated: read()  # the emulation is for one thread
        else: self._reader.submit(read)

    def _memory(self, opened: NVDevice, nbytes: int) -> tuple[HostMemory, Event]:
        """Page-locked memory of so many bytes that nobody reads, and an event."""
        try: host, event = self._free.get_nowait()
        except Empty: return opened.pool.host(nbytes), opened.driver.event()
        if len(host.view) >= nbytes: return host, event
        host.free()
        return opened.pool.host(nbytes), event

    def close(self) -> None:
        """Waits for what is to be delivered, and gives page-locked memory back."""
        self._reader.shutdown()
        self._given_back()


def _give_back(free: SimpleQueue[tuple[HostMemory, Event]]) -> None:
    while not free.empty(): free.get()[0].free()


def _settle(done: Future[Sampled], tokens: np.ndarray, rows: np.ndarray, wanted: Asked) -> None:
    try:
        found = {i: logprobs(row, int(tokens[i]), most)
                 for row, (i, most) in zip(rows, wanted, strict=True) if tokens[i] < rows.shape[1]}
        done.set_result(Sampled(tokens, found))
    except BaseException as error: done.set_exception(error)


def logprobs(logits: np.ndarray, token: int, most: int) -> Logprobs:
    """Natural logarithms of the softmax of logits [vocab]: of a token, and of the `most` likeliest."""
    exact = logits.astype(np.float64)
    top = exact.max()
    exact -= top + np.log(np.exp(exact - top).sum())
    rank = int((exact > exact[token]).sum()) + 1
    best = np.argpartition(-exact, most - 1)[:most] if 0 < most < len(exact) else np.arange(len(exact))[:most]
    order = sorted((int(i) for i in best), key=lambda i: (-exact[i], i))
    return Logprobs(float(exact[token]), rank, tuple((i, float(exact[i])) for i in order))


def _view(memory: Buffer, shape: tuple[int, ...], dtype: Any) -> Tensor:
    return Tensor(UOp.from_buffer(memory.view(int(np.prod(shape)), dtype, 0)).reshape(shape))


def _words(memory: Buffer, dtype: Any) -> np.ndarray:
    return np.frombuffer(memory.as_memoryview(force_zero_copy=True), dtype)
