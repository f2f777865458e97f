"""Token masks of structured output, uploaded for the sampler."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.engine.scheduling.scheduler_output import SchedulerOutput
from tinygrad_nv.engine.worker.input_buffer import InputBuffer, InputField


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
