"""Context parallel training: each rank of a group has a part of the tokens of every row.

Protocol: all ranks of a group read the same rows. `ContextPart(group, width, device)` says which columns of
rows of `width` tokens this rank has: chunks r and 2 n − 1 − r of 2 n, the order of a causal ring attention
(dist/train/ring_attention.py), in which all ranks compute as much. Rows are padded to whole chunks. Labels
are shifted before rows are cut, so that each token keeps the one it predicts. Layers run on the part as on a
row, with rotations of its places, and attention goes round the ranks. Every rank has the sums of its own
tokens: their sums over ranks are those of whole rows, and so are those of gradients.

`require(config, arguments)` refuses models and options whose attention is another. Source: Ring Attention,
arXiv 2310.01889; Llama 3, arXiv 2407.21783, section 3.3.2.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.train.ring_attention import ring_attention
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.runtime.memory import write

if TYPE_CHECKING:
    from tinygrad_nv.train.arguments import TrainingArguments


class ContextPart:
    """This rank's tokens of rows of `width` tokens: `columns` of rows that are padded to `padded` tokens, and
    their `places` in memory, int32 (T,). It is the `SequencePart` of a `DenseBatch`."""

    def __init__(self, group: Group, width: int, device: str | None) -> None:
        self.group, chunks = group, 2 * group.size
        each = -(-width // chunks)
        self.padded = each * chunks
        self.columns = np.concatenate([np.arange(first * each, (first + 1) * each)
                                       for first in (group.rank, chunks - 1 - group.rank)])
        # tables of rotations have rows of places up to the width; those of padding do not matter
        places = np.minimum(self.columns, width - 1).astype(np.int32)
        self.places = Tensor.empty(len(places), dtype=dtypes.int32, device=device).is_param_(False)
        write(self.places, 0, places.data.cast("B"))

    def cut(self, rows: np.ndarray) -> np.ndarray:
        """Returns this rank's columns of rows [rows, padded]."""
        return rows[:, self.columns]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None) -> Tensor:
        """The causal attention of q (B, H, T, D) over the keys and values of all ranks, (B, H_kv, T, D)."""
        return ring_attention(q, k, v, self.group, scale=scale, softcap=softcap)


def require(config: ModelConfig, arguments: TrainingArguments) -> None:
    """Raises `ConfigError` for what ring attention cannot compute."""
    found = None
    if arguments.method != "sft": found = f"--method {arguments.method}, whose rows are whole"
    elif arguments.packing: found = "--packing, whose rows have several documents"
    elif config.latent is not None: found = "latent attention"
    elif any(window is not None for window in config.windows): found = "attention in a sliding window"
    elif config.has_states: found = "layers that keep states"
    elif config.sinks: found = "attention with sinks"
    if found is None: return
    raise ConfigError(f"--context-parallel-size {arguments.context_parallel_size} and {found}",
                      "causal attention over whole rows of one document", "leave one of them out")
