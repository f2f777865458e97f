"""A prompt whose images have become rows of the embedding. Loaded with the first prompt that has some."""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tinygrad_nv.engine.prompts import ParsedPrompt
from tinygrad_nv.engine.vision.encoder import VisionEncoder
from tinygrad_nv.engine.vision.prompt import expand_images, require_placeholders
from tinygrad_nv.errors import RequestError
from tinygrad_nv.models.qwen_vl.images import grid_of

if TYPE_CHECKING:
    from tinygrad_nv.engine.worker.model_runner import ModelRunner


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
