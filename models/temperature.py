"""A factor of queries that grows with their places (Scalable-Softmax, arXiv 2501.19399)."""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor


@dataclass(frozen=True)
class Temperature:
    """Queries at place t are multiplied by 1 + scale · log(1 + ⌊(t + 1) / floor⌋)."""
    floor: float
    scale: float

    def apply(self, q: Tensor, places: Tensor) -> Tensor:
        """Queries at `places`, whose shape is broadcast."""
        steps = ((places.maximum(0) + 1).float() / self.floor).floor()
        return (q * ((steps + 1).log() * self.scale + 1)).cast(q.dtype)
