"""Samplers as captured steps: one for a number of samples and a set of filters.

Protocol: `step(samples, filters)` samples from the logits of a step with so many samples. `serving(filters,
samples)` is the set of filters, of those captured ahead, that serves a batch with these.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.engine.sampling import Filters
from tinygrad_nv.engine.scheduling.scheduler_output import SchedulerOutput
from tinygrad_nv.engine.worker.captured_step import CapturedStep
from tinygrad_nv.engine.worker.input_buffer import InputBuffer, InputField
from tinygrad_nv.engine.worker.output_buffer import OutputBuffer
from tinygrad_nv.engine.worker.sampler_state import SamplerState
from tinygrad_nv.engine.worker.warm_up import FILTER_SETS, GENERAL_FILTERS, PART_FILTER_SETS
from tinygrad_nv.runtime.observe.ranges import layer

if TYPE_CHECKING:   # loaded where several ranks have a model
    from tinygrad_nv.models.parallel import Parallel


class MaskBuffer:
    """Token masks of samples, allocated on the device with the first batch that has one: the words of a mask
    that have `tokens`."""

    def __init__(self, device: str, samples: int, tokens: range) -> None:
        self.device, self.samples, self.first = device, samples, tokens.start // 32
        self.words = -(-tokens.stop // 32) - self.first
        self.buffer: InputBuffer | None = None

    def tensors(self, samples: int) -> dict[str, Tensor]:
        """uint32 [samples, words]."""
        return self._open().tensors([InputField("masks", (samples, self.words), 0)], dtypes.uint32)

    def send(self, batch: SchedulerOutput, samples: int) -> None:
        """Uploads the token masks of a batch; a sample without one allows every token."""
        buffer = self._open()
        into = buffer.open()[:samples * self.words].view(np.uint32).reshape(samples, self.words)
        given = [sample.mask for seq in batch.seqs for sample in seq.samples]
        for i in range(samples):
            mask = given[i] if i < len(given) else None
            if mask is None: into[i] = 0xFFFFFFFF
            else:
                own = mask[self.first:self.first + self.words]
                into[i, :len(own)] = own    # what follows is beyond the vocabulary
        buffer.send(samples * self.words)

    def _open(self) -> InputBuffer:
        if self.buffer is None: self.buffer = InputBuffer(self.device, self.samples * self.words)
        return self.buffer

    def close(self) -> None:
        """Frees page-locked memory."""
        if self.buffer is not None: self.buffer.close()


class SamplerSteps:
    """Samplers of logits in `output`. `inputs(samples)` are their slots and positions; `capture(samples,
    filters, function)` makes a step of a function."""

    def __init__(self, state: SamplerState, masks: MaskBuffer, output: OutputBuffer,
                 parallel: Parallel | None, inputs: Callable[[int], dict[str, Tensor]],
                 capture: Callable[[tuple[int, Filters], Callable[[], None]], CapturedStep]) -> None:
        self.state, self.masks, self.output, self.parallel = state, masks, output, parallel
        self.parts = None if parallel is None else parallel.parts
        self.inputs, self.capture = inputs, capture
        self.steps: dict[tuple[int, Filters], CapturedStep] = {}
        self.kept: frozenset[object] = frozenset()      # that are read when they are used

    def serving(self, filters: Filters, samples: int) -> Filters:
        """The first that has all of these and is captured; these themselves if there is none."""
        sets = FILTER_SETS if self.parts is None else PART_FILTER_SETS
        captured = (each for each in sets if (samples, each) in self.steps or (samples, each) in self.kept)
        return next((each for each in captured if each | filters == each), filters)

    def serve_all(self, samples: int) -> bool:
        """Whether there are samplers for all filters of so many samples."""
        return all((samples, filters) in self.steps for filters in GENERAL_FILTERS)

    def step(self, samples: int, filters: Filters) -> CapturedStep:
        """The sampler."""
        if (key := (samples, filters)) not in self.steps:
            inputs = self.inputs(samples)
            self.output.logits(samples)
            if filters.mask: inputs |= self.masks.tensors(samples)
            self.state.allocate(filters)
            self.steps[key] = self.capture(key, lambda: self._sample(samples, filters, inputs))
        return self.steps[key]

    def _have_same_tokens(self, samples: int, filters: Filters) -> bool:
        """Whether all ranks of the stage have the same tokens already, as each has been sent those of the
        others.
        """
        return self.parts is None or not filters.ordering or self.parts.rows(samples) != slice(0, samples)

    def _sample(self, samples: int, filters: Filters, inputs: dict[str, Tensor]) -> None:
        from tinygrad_nv.engine.worker.sampler import count_tokens, next_tokens
        slots = inputs["slots"]
        with layer("sampler"):
            tokens = next_tokens(self.output.logits(samples), filters, self.state, slots, inputs["positions"],
                                 inputs.get("masks"), self.parts)
            if self.parallel is not None and not self._have_same_tokens(samples, filters):
                tokens = self.parallel.agree_on(tokens)
            made = [self.output.tokens(samples).assign(tokens)]
            if filters.penalty: made.append(count_tokens(self.state, slots, tokens))
        Tensor.realize(*made)
