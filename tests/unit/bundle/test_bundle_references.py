"""Weights that lie in a checkpoint's files as they lie in memory are found, others are not."""
from __future__ import annotations

from pathlib import Path

from tinygrad_nv import LLM
from tinygrad_nv.engine.bundled import references
from tinygrad_nv.engine.bundled.capture import bytes_of


def test_matrices_that_are_joined_are_pieces(tiny: Path) -> None:
    with LLM(tiny, device="CPU") as llm:
        found = references.ranges(llm.model, tiny)
        at = llm.model.blocks[0].attention.qkv.weight.uop.buffer  # type: ignore[union-attr]
        key = id(at.base), at.offset, at.nbytes
        content = bytes_of(at)
        assert len(references.confirm(found[key], tiny, content)) == 3
        changed = bytearray(content)
        changed[-1] ^= 1
        assert references.confirm(found[key], tiny, memoryview(changed)) == []


def test_another_dtype_is_not_referred_to(tiny: Path) -> None:
    with LLM(tiny, "bfloat16", device="CPU") as llm: assert references.ranges(llm.model, tiny) == {}
