"""Whole rows of logits, which the host reads, where ranks have parts of the vocabulary.

Protocol: log probabilities are of whole rows (output_buffer.py). `LogitRows.of(batch, samples)` queues a
gather of the rows of the samples that ask for some, and of no others, and gives the memory where they are one
after the other. A gather is a captured step: `gathers(samples)` are those of a step with so many samples.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer

from tinygrad_nv import functional
from tinygrad_nv.engine.scheduling.scheduler_output import SchedulerOutput
from tinygrad_nv.engine.worker.captured_step import CapturedStep
from tinygrad_nv.engine.worker.input_buffer import InputBuffer, InputField
from tinygrad_nv.engine.worker.output_buffer import view
from tinygrad_nv.graphs.inputs import region

FEW = 8     # rows of most steps that have some


@dataclass(frozen=True)
class Rows:
    """A gather of `count` rows of a step with `samples`."""
    samples: int
    count: int

    def __str__(self) -> str: return f"{self.count} rows of {self.samples}"


def gathers(samples: int) -> list[Rows]:
    """Lists the gathers of a step with so many samples: of a few rows, or of all."""
    return [Rows(samples, count) for count in dict.fromkeys((min(FEW, samples), samples))]


class Gathers(Protocol):
    """Ranks that have parts of a vocabulary of `size` tokens (models/parallel.py)."""
    @property
    def size(self) -> int: ...

    def gather(self, x: Tensor) -> Tensor:
        """Gathers [R, size] of the parts of all ranks, which are like x, [R, tokens]."""


class LogitRows:
    """The rows of steps with at most `samples` samples, whose parts are `logits`. `capture` makes a step of a
    function, by its name."""

    def __init__(self, device: str, samples: int, parts: Gathers, logits: Callable[[int], Tensor],
                 capture: Callable[[str, Callable[[], None]], CapturedStep]) -> None:
        self.device, self.samples, self.parts = device, samples, parts
        self.logits, self.capture = logits, capture
        self.steps: dict[Rows, CapturedStep] = {}
        self._rows: dict[int, Buffer] = {}          # by their number
        self._numbers: InputBuffer | None = None    # both allocated when a step is captured

    def of(self, batch: SchedulerOutput, samples: int) -> Buffer | None:
        """Queues the gather of a batch, behind its step: float32 [rows, vocab], None if no sample asks."""
        given = (sample for seq in batch.seqs for sample in seq.samples)
        asking = [number for number, sample in enumerate(given) if sample.logprobs is not None]
        if not asking: return None
        job = next(each for each in gathers(samples) if each.count >= len(asking))
        step = self.step(job)
        self.send(asking, job.count)
        step()
        return self._rows[job.count]

    def step(self, job: Rows) -> CapturedStep:
        """The gather."""
        if job not in self.steps:
            if job.count not in self._rows:
                self._rows[job.count] = region(self.device, 4 * job.count * self.parts.size)
            self._open_numbers()
            self.steps[job] = self.capture(str(job), lambda: self._gather(job))
        return self.steps[job]

    def send(self, numbers: list[int], count: int) -> None:
        """Uploads the numbers of samples, padded to `count`."""
        buffer = self._open_numbers()
        buffer.open()[:count] = numbers + [0] * (count - len(numbers))
        buffer.send(count)

    def _gather(self, job: Rows) -> None:
        numbers = self._open_numbers().tensors([InputField("numbers", (job.count,), 0)])["numbers"]
        into = view(self._rows[job.count], (job.count, self.parts.size), dtypes.float32)
        into.assign(self.parts.gather(functional.embedding(self.logits(job.samples), numbers))).realize()

    def memory(self) -> dict[str, Buffer]:
        """The regions on the device, by name."""
        made = {f"rows_{count}": at for count, at in self._rows.items()}
        return made if self._numbers is None else {**made, "row_numbers": self._numbers.region}

    def _open_numbers(self) -> InputBuffer:
        if self._numbers is None: self._numbers = InputBuffer(self.device, self.samples)
        return self._numbers

    def close(self) -> None:
        """Frees page-locked memory."""
        if self._numbers is not None: self._numbers.close()
