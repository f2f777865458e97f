"""Samples of a model that is being trained.

Protocol: `Continuation(model, width)` continues a prompt in rows of `width` tokens, computing all of it again
for each token: slow, and without a cache beside the training state. Greedy.
"""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, TinyJit, dtypes

from tinygrad_nv.functional import embedding
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.runtime.memory import write


class Continuation:
    """Continues token ids by the likeliest tokens."""

    def __init__(self, model: Llama, width: int) -> None:
        self.model, self.width = model, width
        self.ids = Tensor.zeros(1, width, dtype=dtypes.int32, device=model.device).contiguous().realize()
        self.place = Tensor.zeros(1, dtype=dtypes.int32, device=model.device).contiguous().realize()
        self._next = TinyJit(self._likeliest)

    def __call__(self, ids: list[int], count: int, ends: tuple[int, ...]) -> list[int]:
        """At most `count` tokens after `ids`, up to one of `ends`."""
        made = list(ids[-(self.width - 1):])
        begin = len(made)
        while len(made) < self.width and len(made) - begin < count:
            row = np.zeros(self.width, np.int32)
            row[:len(made)] = made
            write(self.ids, 0, row.data.cast("B"))
            write(self.place, 0, np.array([len(made) - 1], np.int32).data.cast("B"))
            made.append(int(self._next().item()))
            if made[-1] in ends: break
        return made[begin:]

    def _likeliest(self) -> Tensor:
        hidden = self.model.hidden_states(self.ids)[0]
        return self.model.logits(embedding(hidden, self.place)).argmax(-1).realize()
