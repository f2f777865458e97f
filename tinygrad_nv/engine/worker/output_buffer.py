"""Logits and sampled tokens on the device, and their copy to the host.

Protocol: `OutputBuffer` owns the logits of the sampled positions, float32 [samples, width], and the sampled
tokens, int32 [samples]. Each step with samples overwrites them. `deliver` queues the copies that a batch asks
for behind its step, and sets a future's result: tokens, and log probabilities for samples that request them
(of the sampled token, or of the sample's target), from the unfiltered logits, in float64. On a device with a
driver the copies go to page-locked memory, and a reader thread waits for them, so that the next step can be
launched meanwhile. Where ranks have parts of the vocabulary, log probabilities are of gathered rows
(logit_rows.py), and only the rank that answers requests computes them.

`last_token(slot)` is the token that a slot sampled last, for a sequence that starts with it: if the previous
step sampled it, its number on the device as −1 − number; else the token itself, which the host knows.
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

from tinygrad_nv.engine.scheduling.scheduler_output import Logprobs, SamplerOutput, SchedulerOutput
from tinygrad_nv.graphs.inputs import region
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Download, Event, HostMemory
from tinygrad_nv.runtime.memory import write

# sample numbers, the log probabilities that each requests, and the token if it is not the sampled one
LogprobRequests = list[tuple[int, int | tuple[int, ...], int | None]]
NO_SAMPLES = SamplerOutput(np.empty(0, np.int32))     # of a rank that has no logits


class OutputBuffer:
    """Capacity: `samples` samples of a vocabulary, of which logits are of `width` tokens. `answers`: the host
    wants log probabilities."""

    def __init__(self, device: str, samples: int, vocab_size: int, width: int, answers: bool = True) -> None:
        self.device, self.vocab_size, self.width, self.answers = device, vocab_size, width, answers
        self._logits: dict[int, Buffer] = {}    # by number of samples, since most steps have few
        self._tokens = region(device, 4 * samples)
        # the first step gathers from them, also where it takes nothing
        write(self.tokens(samples), 0, memoryview(bytes(4 * samples)))
        # by slot: the step, and the sample's number in it
        self._last: dict[int, tuple[Future[SamplerOutput], int]] = {}
        self._newest: Future[SamplerOutput] | None = None
        self._free: SimpleQueue[tuple[HostMemory, Event]] = SimpleQueue()
        self._given_back = weakref.finalize(self, _give_back, self._free)
        self._reader = ThreadPoolExecutor(1, "nv-reader")

    def logits(self, samples: int) -> Tensor:
        """The logits of a step with `samples` samples."""
        if samples not in self._logits:
            self._logits[samples] = region(self.device, 4 * samples * self.width)
        return view(self._logits[samples], (samples, self.width), dtypes.float32)

    def tokens(self, samples: int) -> Tensor:
        """The first sampled tokens."""
        return view(self._tokens, (samples,), dtypes.int32)

    def memory(self) -> dict[str, Buffer]:
        """The regions on the device, by name."""
        return {"tokens": self._tokens, **{f"logits_{count}": at for count, at in self._logits.items()}}

    def last_token(self, slot: int) -> int:
        """The token a slot sampled last, or −1 − its number on the device."""
        done, number = self._last[slot]
        return -1 - number if done is self._newest else int(done.result().tokens[number])

    def fork(self, source: int, slot: int) -> None:
        """Gives a slot the last token of another."""
        if source in self._last: self._last[slot] = self._last[source]

    def deliver(self, batch: SchedulerOutput, size: int, done: Future[SamplerOutput],
                gathered: Buffer | None = None) -> None:
        """Sets the result of `done` to the tokens of the step just launched, whose shape has `size` samples.
        `gathered` has whole rows of the samples that request log probabilities."""
        samples = [sample for seq in batch.seqs for sample in seq.samples]
        if samples: self._newest = done
        for number, sample in enumerate(samples):
            if sample.slot >= 0: self._last[sample.slot] = done, number
        count = len(samples)
        wanted = [(i, each.logprobs, each.target) for i, each in enumerate(samples)
                  if each.logprobs is not None and self.answers]
        source, at = (self._logits.get(size), [i for i, _, _ in wanted]) if gathered is None else \
            (gathered, list(range(len(wanted))))
        opened = Device[self.device]
        if isinstance(opened, NVDevice):
            self._download(opened, count, source, at, wanted, done)
            return
        opened.synchronize()
        tokens = _words(self._tokens, np.int32)[:count].copy()
        if not wanted:
            done.set_result(SamplerOutput(tokens))
            return
        assert source is not None
        rows = _words(source, np.float32).reshape(-1, self.vocab_size)[at]
        self._reader.submit(_finalize, done, tokens, rows, wanted)

    def _download(self, opened: NVDevice, count: int, source: Buffer | None, at: list[int],
                  wanted: LogprobRequests, done: Future[SamplerOutput]) -> None:
        driver, row_bytes = opened.driver, 4 * self.vocab_size
        first = -(-4 * max(1, count) // 256) * 256
        host, event = self._host_memory(opened, first + len(wanted) * row_bytes)
        if count: driver.submit(Download(host, 0, self._tokens._buf, 4 * count))
        for k, i in enumerate(at):
            assert source is not None
            driver.submit(Download(host, first + k * row_bytes, source._buf + i * row_bytes, row_bytes))
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
            _finalize(done, tokens, rows.reshape(-1, self.vocab_size), wanted)

        if driver.emulated: read()  # the emulator is single-threaded
        else: self._reader.submit(read)

    def _host_memory(self, opened: NVDevice, nbytes: int) -> tuple[HostMemory, Event]:
        """Free page-locked memory of at least `nbytes` bytes, and an event."""
        try: host, event = self._free.get_nowait()
        except Empty: return opened.pool.host(nbytes), opened.driver.event()
        if len(host.view) >= nbytes: return host, event
        host.free()
        return opened.pool.host(nbytes), event

    def close(self) -> None:
        """Waits for queued copies, and frees page-locked memory."""
        self._reader.shutdown()
        self._given_back()


def _give_back(free: SimpleQueue[tuple[HostMemory, Event]]) -> None:
    while not free.empty(): free.get()[0].free()


def _finalize(done: Future[SamplerOutput], tokens: np.ndarray, rows: np.ndarray,
              wanted: LogprobRequests) -> None:
    try:
        found = {i: logprobs(row, int(tokens[i]) if target is None else target, others)
                 for row, (i, others, target) in zip(rows, wanted, strict=True)
                 if not np.isnan(row.max())}
        done.set_result(SamplerOutput(tokens, found))
    except BaseException as error: done.set_exception(error)


def logprobs(logits: np.ndarray, token: int, others: int | tuple[int, ...]) -> Logprobs:
    """Natural log softmax of logits [vocab]: of one token, and of the likeliest, or of some others."""
    exact = logits.astype(np.float64)
    max_logit = exact.max()
    exact -= max_logit + np.log(np.exp(exact - max_logit).sum())
    rank = int((exact > exact[token]).sum()) + 1
    if isinstance(others, int):
        best = np.arange(len(exact))[:others]
        if 0 < others < len(exact): best = np.argpartition(-exact, others - 1)[:others]
        others = tuple(sorted((int(i) for i in best), key=lambda i: (-exact[i], i)))
    return Logprobs(float(exact[token]), rank, tuple((i, float(exact[i])) for i in others))


def view(memory: Buffer, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """The first elements of a region."""
    return Tensor(UOp.from_buffer(memory.view(int(np.prod(shape)), dtype, 0)).reshape(shape))


def _words(memory: Buffer, dtype: Any) -> np.ndarray:
    return np.frombuffer(memory.as_memoryview(force_zero_copy=True), dtype)
