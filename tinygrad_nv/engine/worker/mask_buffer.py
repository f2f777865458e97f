"""Token masks of structured output, uploaded for the sampler."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.engine.scheduling.scheduler_output import SchedulerOutput
from tinygrad_nv.engine.worker.input_buffer import InputBuffer, InputField


class MaskBuffer:
    """Token masks of samples, allocated on the device with the first batch that has one."""

    def __init__(self, device: str, samples: int, vocab_size: int) -> None:
        self.device, self.samples, self.words = device, samples, -(-vocab_size // 32)
        self.buffer: InputBuffer | None = None

    def tensors(self, samples: int) -> dict[str, Tensor]:
        """uint32 [samples, ⌈vocab / 32⌉]."""
        return self._open().tensors([InputField("masks", (samples, self.words), 0)], dtypes.uint32)

    def send(self, batch: SchedulerOutput, samples: int) -> None:
        """Uploads the token masks of a batch; a sample without one allows every token."""
        buffer = self._open()
        into = buffer.open()[:samples * self.words].view(np.uint32).reshape(samples, self.words)
        given = [sample.mask for seq in batch.seqs for sample in seq.samples]
        for i in range(samples):
            mask = given[i] if i < len(given) else None
            into[i] = 0xFFFFFFFF if mask is None else mask
        buffer.send(samples * self.words)

    def _open(self) -> InputBuffer:
        if self.buffer is None: self.buffer = InputBuffer(self.device, self.samples * self.words)
        return self.buffer

    def close(self) -> None:
        """Frees page-locked memory."""
        if self.buffer is not None: self.buffer.close()
