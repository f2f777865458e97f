"""Token masks without end tokens, packed as `Sample.mask`: bit i % 32 of word i // 32 for token i."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.engine.scheduling.request import Seq


class TokenMasks:
    """Token masks of a vocabulary of `size` tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._without: dict[frozenset[int], np.ndarray] = {}

    def without(self, tokens: frozenset[int]) -> np.ndarray:
        """The mask of all tokens but these."""
        if (made := self._without.get(tokens)) is None:
            # bounded, since clients choose stop tokens
            if len(self._without) >= 256: self._without.clear()
            allowed = np.ones(-(-self.size // 32) * 32, np.uint8)
            allowed[[token for token in tokens if 0 <= token < self.size]] = 0
            made = self._without[tokens] = np.packbits(allowed, bitorder="little").view(np.uint32)
        return made

    def of(self, seq: Seq, position: int, mask: np.ndarray | None) -> np.ndarray | None:
        """The token mask at `position` of a sequence whose structured output allows `mask`. None allows every
        token."""
        mask = mask
        if position >= seq.min_length or not seq.stop_ids: return mask
        without = self.without(seq.stop_ids)
        if mask is None: return without
        # a complete structured output can only end, even before min_tokens
        return both if (both := mask & without).any() else mask
