"""A prompt's images, as steps read them.

Protocol: `expanded(ids, images, token)` repeats the placeholder `token` of each image as often as the image
has rows, and returns the `PromptImages` beside the ids. Chunked prefill, a preemption or a shared prefix
start anywhere: a step asks for the rows and positions of the tokens that it computes. Tokens behind the
prompt go on after the largest position (models/qwen_vl/images.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from tinygrad.dtype import DType

from tinygrad_nv.errors import RequestError
from tinygrad_nv.models.paged import round_to
from tinygrad_nv.models.qwen_vl.images import prompt_positions

if TYPE_CHECKING:
    from tinygrad_nv.models.qwen_vl.images import Grid


@dataclass(frozen=True)
class EncodedImage:
    """`rows` float32 [rows, hidden] of the language model's embedding, as `grid` has them; `digest` is that
    of the image's bytes."""
    rows: np.ndarray
    grid: Grid
    digest: bytes


@dataclass(frozen=True, eq=False)
class PromptImages:
    """`rows` [rows, hidden] of the embedding, in the model's dtype (bfloat16 as its bits); `numbers` int32
    [tokens]: the row that stands for a prompt token, −1 for none; `positions` int32 [3, tokens]. `digests`:
    32 bytes of each image, and `starts` its first row, with the number of rows at the end."""
    rows: np.ndarray
    numbers: np.ndarray
    positions: np.ndarray
    digests: tuple[bytes, ...]
    starts: tuple[int, ...]

    def digests_of(self, first: int, end: int) -> bytes:
        """Returns the digests of the images that have rows among the tokens first … end − 1: keeps pages of
        other images apart in the prefix cache."""
        found = self.numbers[first:end]
        if not len(found := found[found >= 0]): return b""
        images = np.searchsorted(self.starts, found[[0, -1]], side="right")
        return b"".join(self.digests[images[0] - 1:images[1]])

    def numbers_of(self, start: int, count: int) -> np.ndarray:
        """The rows of tokens start … start + count − 1, int32 [count]."""
        out = np.full(count, -1, np.int32)
        found = self.numbers[start:start + count]
        out[:len(found)] = found
        return out

    def positions_of(self, start: int, count: int) -> np.ndarray:
        """The positions of tokens start … start + count − 1, int32 [3, count]."""
        known, length = self.positions[:, start:start + count], self.positions.shape[1]
        first = int(self.positions.max()) + 1 + max(start, length) - length
        behind = np.broadcast_to(first + np.arange(count - known.shape[1]), (3, count - known.shape[1]))
        return np.concatenate([known, behind], axis=1)


def require_placeholders(ids: Sequence[int], token: int, count: int) -> None:
    """Raises `RequestError` unless a prompt has as many placeholders as images."""
    if (found := list(ids).count(token)) == count: return
    raise RequestError(f"a prompt with {found} image placeholders (token {token}) and {count} images",
                       "a placeholder for each image: <|vision_start|><|image_pad|><|vision_end|>",
                       "write one where each image belongs, or send messages with image parts")


def expand_images(ids: Sequence[int], images: Sequence[EncodedImage], token: int,
             dtype: DType) -> tuple[list[int], PromptImages]:
    """Returns the tokens with one for each row of the images, and the images, as described above."""
    counts = iter(each.grid.rows for each in images)
    tokens = [each for one in ids for each in ([one] if one != token else [token] * next(counts))]
    is_image = np.array(tokens) == token
    numbers = np.where(is_image, np.cumsum(is_image) - 1, -1).astype(np.int32)
    rows = round_to(np.concatenate([each.rows for each in images]), dtype)
    starts = tuple(accumulate((each.grid.rows for each in images), initial=0))
    positions = prompt_positions(is_image, [each.grid for each in images])
    return tokens, PromptImages(rows, numbers, positions, tuple(each.digest for each in images), starts)
