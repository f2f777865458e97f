"""Heads, widths and dtypes of what a KV cache holds of a token in one layer."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVShape:
    """`heads` key heads with keys of `keys` elements and values of `values`. Without elements of their own
    values are the last elements of the keys, as those of a latent cache (patterns/decode/paged.py)."""
    heads: int
    keys: int
    values: int

    @property
    def elements(self) -> int:
        """Number of elements of a token."""
        return self.heads * (self.keys + self.values)
