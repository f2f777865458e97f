"""Images to rows of the language model's embedding.

Protocol: `run(image)` returns the `EncodedImage` of RGB bytes [height, width, 3] or a file, or of what
`prepare(image)` made of them: that decodes and resizes, in any thread, so that others' steps do not wait for
it. A step is captured for each of `step_sizes` that an image needs: it serves every image of at most so many
rows, as where windows begin and how patches rotate are inputs. The host orders patches by windows, and rows
back (models/qwen_vl/images.py). The last images are kept, so that the next turn of a conversation does not
compute them again. All but `prepare` is for one thread at a time: that which runs the model's steps.
`with_rows` is a prompt whose images have become rows of the embedding.
"""
from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.engine.memory_planning import ACTIVATIONS
from tinygrad_nv.engine.prompts import ParsedPrompt
from tinygrad_nv.engine.vision.images import AnImage, pixels
from tinygrad_nv.engine.vision.prompt import EncodedImage, expand_images, require_placeholders
from tinygrad_nv.engine.worker.captured_step import CapturedStep
from tinygrad_nv.engine.worker.embedding_runner import step_sizes
from tinygrad_nv.errors import RequestError
from tinygrad_nv.models.qwen_vl.config import read_vision
from tinygrad_nv.models.qwen_vl.images import grid_of, patch_rope, patches, window_order, window_starts
from tinygrad_nv.models.qwen_vl.tower import PatchBatch, VisionTower
from tinygrad_nv.models.qwen_vl.weights import load, nbytes, require_vision_sizes
from tinygrad_nv.runtime.memory import allocate, read, write
from tinygrad_nv.runtime.memory_pool import label_allocations

if TYPE_CHECKING:
    from tinygrad_nv.engine.worker.model_runner import ModelRunner
    from tinygrad_nv.models.qwen_vl.images import Grid

KEPT_ROWS = 16384   # of the last images: 224 MiB at a width of 3584


def image_digest(image: np.ndarray) -> bytes:
    """Hashes an image's size and bytes: 32 bytes, equal for equal images alone."""
    made = hashlib.sha256(repr(image.shape).encode())
    made.update(np.ascontiguousarray(image).data)
    return made.digest()


@dataclass(frozen=True)
class PreparedImage:
    """An image with its digest, and its patches and their grid; None of one whose rows were kept then."""
    image: AnImage
    digest: bytes
    patches: tuple[np.ndarray, Grid] | None


class VisionEncoder:
    """The tower of a model, with its captured steps."""

    def __init__(self, tower: VisionTower) -> None:
        self.tower, self.config = tower, tower.config
        self.steps: dict[int, _Step] = {}
        self.kept: OrderedDict[bytes, EncodedImage] = OrderedDict()

    @staticmethod
    def of(directory: Path, dtype: DType, device: str) -> VisionEncoder | None:
        """Returns the encoder of the model in `directory`, without its weights; None of a model that reads
        text alone. Raises `ModelError`, `WeightError`."""
        config = read_vision(directory)
        if config is None: return None
        require_vision_sizes(config, directory)
        return VisionEncoder(VisionTower(config, dtype, device))

    def load(self, directory: Path) -> None:
        """Reads the weights. Raises `WeightError`."""
        load(self.tower, directory)

    @property
    def nbytes(self) -> int:
        """Bytes of the tower's weights."""
        return nbytes(self.tower)

    def forget(self) -> None:
        """Drops the rows of earlier images."""
        self.kept.clear()

    def prepare(self, image: AnImage) -> PreparedImage:
        """See above. Raises `RequestError` for an image of an extreme shape, and a file that is damaged."""
        found = pixels(image)
        digest = image_digest(found)
        return PreparedImage(image, digest, None if digest in self.kept else patches(found, self.config))

    def run(self, image: AnImage | PreparedImage) -> EncodedImage:
        """See above. Raises `RequestError` for an image of an extreme shape."""
        if not isinstance(image, PreparedImage): image = self.prepare(image)
        digest = image.digest
        if (found := self.kept.get(digest)) is not None:
            self.kept.move_to_end(digest)
            return found
        given, grid = image.patches or patches(pixels(image.image), self.config)
        made = self.kept[digest] = EncodedImage(self._step(grid.rows)(given, grid), grid, digest)
        while len(self.kept) > 1 and sum(each.grid.rows for each in self.kept.values()) > KEPT_ROWS:
            self.kept.popitem(last=False)
        return made

    def _step(self, rows: int) -> _Step:
        size = step_sizes(rows)[-1]
        if size not in self.steps: self.steps[size] = _Step(self.tower, size)
        return self.steps[size]


class _Step:
    """The step of at most `size` rows, with its inputs and outputs in memory."""

    def __init__(self, tower: VisionTower, size: int) -> None:
        c = self.config = tower.config
        self.tower, self.size, count = tower, size, size * c.unit
        def empty(*shape: int) -> Tensor: return Tensor.empty(*shape, device=tower.device)
        def ints(extent: int) -> Tensor: return Tensor.empty(extent, dtype=dtypes.int32, device=tower.device)
        with label_allocations(ACTIVATIONS):
            self.patches, self.out = empty(count, c.patch_width), empty(size, c.out)
            pairs = c.hidden // c.heads // 2
            self.batch = PatchBatch(empty(count, pairs), empty(count, pairs), ints(2), ints(size + 1))
            for each in (self.patches, self.out, *vars(self.batch).values()): allocate(each)
        self.captured = CapturedStep(self._compute, lambda: [self.out], str(self.out.device))

    def _compute(self) -> None:
        self.out.assign(self.tower(self.patches, self.batch).cast(dtypes.float32)).realize()

    def __call__(self, patches: np.ndarray, grid: Grid) -> np.ndarray:
        """Rows, float32 [grid.rows, out], in index order."""
        c, order, count = self.config, window_order(grid, self.config), grid.rows * self.config.unit
        rope = patch_rope(grid, c)
        for tensor, data in ((self.patches, patches), (self.batch.cos, rope[0]), (self.batch.sin, rope[1])):
            ordered = data.reshape(grid.rows, -1)[order].reshape(-1)
            padded = np.zeros(int(tensor.numel()), np.float32)
            padded[:ordered.size] = ordered
            write(tensor, 0, padded.data.cast("B"))
        starts = np.full(self.size + 1, count, np.int32)
        found = window_starts(grid, c)
        starts[:len(found)] = found
        write(self.batch.windows, 0, starts.data.cast("B"))
        write(self.batch.images, 0, np.array([0, count], np.int32).data.cast("B"))
        self.captured()
        out = np.empty((grid.rows, c.out), np.float32)
        out[order] = read(self.out, np.float32).reshape(self.size, -1)[:grid.rows]
        return out


def with_rows(parsed: ParsedPrompt, ids: list[int], encoder: VisionEncoder, runner: ModelRunner,
              length: int) -> ParsedPrompt:
    """The prompt of token `ids` with its images inserted, for a context of `length` tokens. Raises
    `RequestError`."""
    config = encoder.config
    require_placeholders(ids, config.image_token, len(parsed.images))
    rows = sum(grid_of(each.shape, config).rows for each in parsed.images)
    if (total := len(ids) + rows - len(parsed.images)) >= length:
        raise RequestError(f"the prompt has {total} tokens, {rows} of them for images, the context holds "
                           f"{length}", f"at most {length - 1}, so that one can be added",
                           "send smaller images, or raise --max-model-len")
    found = [runner.run_now(partial(encoder.run, encoder.prepare(each))) for each in parsed.images]
    ids, inserted = expand_images(ids, found, config.image_token, runner.model.dtype)
    return replace(parsed, ids=ids, inserted=inserted, images=())
