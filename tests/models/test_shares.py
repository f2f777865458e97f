"""What a rank reads of a checkpoint: of every family each tensor is a part of the whole network's, together
they are all of it, and no more bytes of the files are read than a rank has."""
from __future__ import annotations

import builtins
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from directory_case import KINDS, write
from families import CASES
from safetensors.numpy import load_file, save_file
from tinygrad import dtypes
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, local_config, names_apart
from tinygrad_nv.models.shares import own_nbytes

from tinygrad_nv.errors import ModelError, WeightError
from tinygrad_nv.runtime.memory import read

ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3", "sinks",
        "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj", "w2")


@dataclass(frozen=True)
class Rank:
    """A rank that calls no collective."""
    rank: int
    size: int


def network(directory: Path, ranks: int = 1, rank: int = 0, experts: bool = False) -> Llama:
    """A rank's part of a model, with its weights; of one rank the model."""
    config = read_config(directory)
    parallel: Any = None if ranks == 1 else Parallel(Rank(rank, ranks), config, experts)   # type: ignore
    if ranks == 1: config = replace(config, names=names_apart(config.names))
    model = Llama(local_config(config, ranks, experts), dtypes.float32, "CPU", parallel=parallel)
    weights.load(model, directory)
    return model


def tensors(model: Llama) -> dict[str, np.ndarray]:
    """What a network has, by the names of a checkpoint."""
    made = {}
    for name, slot in weights.slots(model).items():
        every = read(slot.tensor, np.float32).reshape(-1)
        first = slot.offset // 4
        made[name] = every[first:first + int(np.prod(slot.shape))].reshape(slot.shape).copy()
    return made


def expected(whole: np.ndarray, name: str, config: ModelConfig, ranks: int, rank: int, experts: bool,
             all_heads: bool) -> np.ndarray:
    """A rank's part of a tensor of the whole network."""
    module, kind = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1], name.split(".")[-1]
    if experts and ".experts." in name: return whole
    if module in COLUMNS:
        if kind == "bias": return whole if rank == 0 else np.zeros_like(whole)
        return np.split(whole, ranks, 1)[rank]
    cut = module in ROWS or (all_heads and module in ("q_norm", "k_norm"))
    if not cut: return whole
    heads = config.num_kv_heads
    if module in ("embed_tokens", "lm_head"):
        each = -(-len(whole) // ranks)
        return whole[rank * each:(rank + 1) * each]
    if module in ("k_proj", "v_proj", "k_norm") and heads < ranks:
        return np.split(whole, heads)[rank * heads // ranks]
    return np.split(whole, ranks)[rank]


FUSED = ("phi3", "gpt-oss", "llama4")


@pytest.fixture(scope="module")
def directory(hf_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
              ) -> Callable[[str], Path]:
    return hf_model


@pytest.mark.parametrize("experts", [False, True], ids=["tp", "ep"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", CASES)
def test_parts(hf_model: Callable[[str], Path], family: str, ranks: int, experts: bool):
    config = read_config(directory := hf_model(family))
    try: local_config(config, ranks, experts)
    except ModelError: pytest.skip("cannot be cut so")
    whole, seen = tensors(network_of_one(directory)), set[str]()
    for rank in range(ranks):
        own = tensors(network(directory, ranks, rank, experts))
        seen |= own.keys()
        for name, array in own.items():
            part = expected(whole[name], name, config, ranks, rank, experts, config.qk_norm == "all")
            assert np.array_equal(array, part), (name, rank)
    assert seen == whole.keys()
