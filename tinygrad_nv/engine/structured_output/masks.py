"""Which tokens may be chosen, packed: bit i % 32 of word i // 32 for token i, as `batch.Sample.mask`."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.engine.scheduling.request import Seq


class Masks:
    """Masks of a vocabulary of `size` tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._without: dict[frozenset[int], np.ndarray] = {}

    def without(self, tokens: frozenset[int]) -> np.ndarray:
        """All but these."""
        if (made := self._without.get(tokens)) is None:
            if len(self._without) >= 256: self._without.clear()     # a set of end tokens is a caller's choice
            allowed = np.ones(-(-self.size // 32) * 32, np.uint8)
            allowed[[token for token in tokens if 0 <= token < self.size]] = 0
            made = self._without[tokens] = np.packbits(allowed, bitorder="little").view(np.uint32)
        return made

    def of(self, seq: Seq, place: int, form: np.ndarray | None) -> np.ndarray | None:
        """What may stand at `place` of a sequence, where the form it must have allows `form`. None:
        anything."""
        mask = form
        if place >= seq.ends_at or not seq.ends: return mask
        without = self.without(seq.ends)
        if mask is None: return without
        # a structure that is complete can only end, however few tokens there are
        return both if (both := mask & without).any() else mask
