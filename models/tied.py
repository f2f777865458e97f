"""Heads that are tied to the embedding, and those that only config.json says are.

Protocol: `load_config(directory)` is `read_config` for a network whose weights are loaded: a stored head
that differs from the embedding is not tied to it, in spite of tie_word_embeddings, as transformers 5 has it.
"""
from __future__ import annotations

import functools
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor

from tinygrad_nv.errors import WeightError
from tinygrad_nv.runtime.memory import allocate, read

from .checkpoint import FLOAT_BYTES, ITEM_BYTES, Checkpoint, TensorEntry, dtype_of, open_checkpoint
from .config import ModelConfig, read_config
from .fit import EMBEDDING, HEAD, decoder_sizes, require_sizes
from .multimodal import language_entries

if TYPE_CHECKING:
    from .llama import Llama

CHUNK = 8 << 20     # bytes that are compared at a time


def load_config(directory: Path) -> ModelConfig:
    """See above. Raises `ModelError`, `WeightError`."""
    config = read_config(directory)
    entries = language_entries(open_checkpoint(directory).entries, config.names.spell)
    require_sizes(decoder_sizes(replace(config, tied=True)), entries, directory)
    own = config.tied and _is_own_head(directory, entries)
    return replace(config, tied=False) if own else config


def untie(model: Llama, directory: Path) -> None:
    """Gives a tied network a head of its own, if the directory has one. Raises `WeightError` for a rank's
    part of a network."""
    if not has_own_head(directory): return
    if model.parallel is not None:
        raise WeightError(f"the weights in {directory} have an {HEAD} that is not {EMBEDDING}, and "
                          "tie_word_embeddings is true", "a head equal to the embedding, or none",
                          "set tie_word_embeddings to false in config.json")
    model.config = replace(model.config, tied=False)
    model.head = Tensor.empty(*model.embedding.shape, dtype=model.dtype, device=model.device)


def has_own_head(directory: Path) -> bool:
    """Whether a directory has a head that differs from the embedding."""
    return _is_own_head(directory, language_entries(open_checkpoint(directory).entries))


def _is_own_head(directory: Path, entries: dict[str, TensorEntry]) -> bool:
    embedding, head = entries.get(EMBEDDING), entries.get(HEAD)
    if embedding is None or head is None or embedding.file_offset == head.file_offset: return False
    if not {embedding.dtype, head.dtype} <= FLOAT_BYTES.keys(): return False    # quantised
    if (embedding.shape, embedding.dtype) != (head.shape, head.dtype): return True
    times = tuple(os.stat(entry.file_offset[0]).st_mtime_ns for entry in (embedding, head))
    return not _equal(directory, embedding, head, times)


# compared when the configuration is read, and when the weights are
@functools.lru_cache(4)
def _equal(directory: Path, one: TensorEntry, other: TensorEntry, times: tuple[int, ...]) -> bool:
    count, checkpoint = math.prod(other.shape), open_checkpoint(directory)
    # strided tensors are read whole, as rows of the one may not be those of the other
    whole = other.strides is not None or one.strides is not None
    step = max(count, 1) if whole else CHUNK // ITEM_BYTES[other.dtype]
    return all(np.array_equal(_elements(checkpoint, one, begin, min(begin + step, count)),
                              _elements(checkpoint, other, begin, min(begin + step, count)))
               for begin in range(0, count, step))


def _elements(checkpoint: Checkpoint, entry: TensorEntry, begin: int, end: int) -> np.ndarray:
    """Bits of elements [begin, end) of an entry, as unsigned integers."""
    elements = Tensor.empty(end - begin, dtype=dtype_of(entry.dtype), device="CPU")
    allocate(elements)
    checkpoint.read_into(entry, begin, end, elements, 0)
    return read(elements, np.dtype(f"u{ITEM_BYTES[entry.dtype]}")).copy()   # the memory goes with the tensor
