"""Choice of the captured step that a batch runs in.

Protocol: `ShapeChoice(captured).of(shape, warm)` is the shape itself, or a larger captured one that has room:
always after a warm-up, else while the shape is rare. A capture takes as long as hundreds of small steps (0.3
s against 1 ms with the bundled model). `kept` are shapes that a bundle has, which count as captured.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tinygrad_nv.engine.worker.input_buffer import BatchShape

CAPTURE_AFTER = 8   # uses of a shape before it is captured, if a larger captured shape serves it
MAX_PADDING = 4     # a larger shape serves a batch if it has at most so many times its tokens


class ShapeChoice:
    """The choice among `captured` shapes, which grow, and `kept` ones."""

    def __init__(self, captured: Collection[BatchShape], kept: Collection[BatchShape] = ()) -> None:
        self.captured, self.kept = captured, kept
        self.uses: Counter[BatchShape] = Counter()     # of shapes that are not captured

    def of(self, shape: BatchShape, warm: bool) -> BatchShape:
        """The shape that a batch of this one runs in."""
        if shape in self.captured or shape in self.kept: return shape
        if not warm and (shape.direct or self.uses[shape] >= CAPTURE_AFTER): return shape
        self.uses[shape] += 1
        larger = [each for each in {*self.captured, *self.kept} if each.has_room_for(shape)
                  and (warm or each.num_tokens <= MAX_PADDING * shape.num_tokens)]
        return min(larger, key=lambda each: (each.num_tokens, each.samples), default=shape)
