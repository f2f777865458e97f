"""What a rank reads of a checkpoint: of every family each tensor is a part of the whole network's, together
they are all of it, and no more bytes of the files are read than a rank has."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tinygrad import dtypes

from tests.support.models.families import BASE, CASES
from tests.support.quant.directory_case import KINDS, write
from tests.support.quant.gguf_case import write_model
from tinygrad_nv.errors import ModelError
from tinygrad_nv.models import checkpoint, weights
from tinygrad_nv.models.attention import Attention
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, local_config, names_apart, stage_config
from tinygrad_nv.models.quantised.layers import projections
from tinygrad_nv.quant.activations import QWeight
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
    parallel: Any = None if ranks == 1 else Parallel(Rank(rank, ranks), config, experts=experts)   # type: ignore
    model = Llama(local_config(config, ranks, experts), dtypes.float32, "CPU", parallel=parallel)
    weights.load(model, directory)
    if ranks > 1: return model
    # as a rank has them: each projection by itself
    model.config = replace(config, names=names_apart(config.names))
    for block in model.blocks:
        if isinstance(block.attention, Attention): block.attention.config = model.config
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
        each = -(-len(whole) // (8 * ranks)) * 8    # whole vectors
        return whole[rank * each:(rank + 1) * each]
    if module in ("k_proj", "v_proj", "k_norm") and heads < ranks:
        return np.split(whole, heads)[rank * heads // ranks]
    return np.split(whole, ranks)[rank]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("experts", [False, True], ids=["tp", "ep"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", CASES)
def test_parts(hf_model: Callable[[str], Path], family: str, ranks: int, experts: bool):
    config = read_config(directory := hf_model(family))
    try: local_config(config, ranks, experts)
    except ModelError: pytest.skip("cannot be cut so")
    whole, seen = tensors(network(directory)), set[str]()
    for rank in range(ranks):
        own = tensors(network(directory, ranks, rank, experts))
        seen |= own.keys()
        for name, array in own.items():
            part = expected(whole[name], name, config, ranks, rank, experts, config.qk_norm == "all")
            assert np.array_equal(array, part), (name, rank)
    assert seen == whole.keys()


def wide(directory: Path) -> Path:
    """A llama whose rows are longer than what a file is read in."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**BASE, "hidden_size": 64, "intermediate_size": 4096,
                                         "num_key_value_heads": 4, "head_dim": 1024})
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int):
    """Those of a rank's tensors, of rows and of columns, and none of the others'; so many it has in memory,
    too, within 5 % of its share of matrices and the norms."""
    counted = list[int]()
    fill = checkpoint._fill
    def count(file: Any, target: memoryview, path: str) -> None:
        counted.append(len(target))
        fill(file, target, path)
    monkeypatch.setattr(checkpoint, "_fill", count)
    config = read_config(directory := wide(tmp_path))
    for rank in range(ranks):
        counted.clear()
        model = network(directory, ranks, rank)
        held = sum(int(each.nbytes()) for each in weights.list_loaded(model))
        assert sum(counted) == weights.own_nbytes(model, directory) == held
        assert held == pytest.approx(4 * config.parameters / ranks, rel=0.05)


@pytest.mark.parametrize("kind", ["fbgemm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
    "awq", "gptq", "ct-int8", "ct-fp8", "modelopt", "int8"))])
def test_bytes_that_are_read_of_quantised_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   kind: str):
    """Of files, what reads a rank's part reads half of what reads the model, and has said so before."""
    quantised, _ = write(kind, tmp_path, width=16384 if kind in ("awq", "gptq") else 8192)
    whole, *parts = (read_bytes(monkeypatch, quantised, *which) for which in ((0, 1), (0, 2), (1, 2)))
    for made, said in (whole, *parts): assert made == pytest.approx(said, rel=0.05)
    for made, _ in parts: assert made == pytest.approx(whole[0] / 2, rel=0.05)


def read_bytes(monkeypatch: pytest.MonkeyPatch, directory: Path, rank: int, ranks: int) -> tuple[int, int]:
    """Bytes that are read of files for a rank, and what `load` says of them."""
    counted, totals, fill, load = list[int](), list[int](), checkpoint._fill, weights.load

    def count(file: Any, target: memoryview, path: str) -> None:
        counted.append(len(target))
        fill(file, target, path)

    def loaded(model: Llama, directory: Path) -> None: totals.append(load(model, directory))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_fill", count)
        patch.setattr(weights, "load", loaded)
        network(directory, ranks, rank)
    return sum(counted), totals[0]


@pytest.mark.slow
def test_blocks_of_gguf_files_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """But for queries and keys, whose rows llama.cpp has ordered: few here."""
    (tmp_path / "wide").mkdir()
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**BASE, "hidden_size": 64, "intermediate_size": 8192,
                                         "num_key_value_heads": 4, "head_dim": 16})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
    write_model(path := tmp_path / "model.gguf", tmp_path / "wide", {"token_embd": Kind.F32, "": Kind.Q8_0})
    whole, *parts = (read_bytes(monkeypatch, path, *which) for which in ((0, 1), (0, 2), (1, 2)))
    for made, _ in parts: assert made == pytest.approx(whole[0] / 2, rel=0.05)
    config, every = read_config(path), matrices(network(path))
    for rank in range(2):
        for name, array in matrices(network(path, 2, rank)).items():
            part = expected(every[name], f"{name}.weight", config, 2, rank, False, False)
            assert np.array_equal(array, part), name


def test_experts_of_each_rank(hf_model: Callable[[str], Path]):
    """7 experts of 2 ranks: 4 and 3; of 8 ranks none has enough."""
    config = read_config(directory := hf_model("olmoe"))
    sizes = [len(network(directory, 2, rank, True).blocks[0].feed_forward.own) for rank in range(2)]
    assert sizes == [4, 3]
    with pytest.raises(ModelError, match="7 experts"): local_config(replace(config, num_heads=8), 8, True)


@pytest.mark.parametrize(("family", "ranks", "words"), [
    ("llama", 3, ("num_attention_heads is 4", "a multiple of 3", "--tensor-parallel-size")),
    ("qwen2-moe", 16, ("num_attention_heads is 4",)), ("mistral-narrow", 3, ("a multiple of 3",))])
def test_what_cannot_be_cut(hf_model: Callable[[str], Path], family: str, ranks: int,
                            words: tuple[str, ...]):
    with pytest.raises(ModelError) as raised: local_config(read_config(hf_model(family)), ranks)
    assert [word for word in words if word not in str(raised.value)] == []


def test_layers_that_keep_states_are_not_cut(hf_model: Callable[[str], Path]):
    """Neither among ranks nor into stages."""
    config = read_config(hf_model("lfm2"))
    for cut in (lambda: local_config(config, 2), lambda: stage_config(config, 0, 2)):
        with pytest.raises(ModelError, match="keep states, on several ranks"): cut()
    attention = replace(read_config(hf_model("minimax")), mixers=())
    with pytest.raises(ModelError, match="normalised input, on several ranks"): local_config(attention, 2)


@pytest.mark.parametrize("family", ["qwen2", pytest.param("phi3", marks=pytest.mark.slow),
                                    pytest.param("olmo2", marks=pytest.mark.slow)])
def test_floats_of_gguf_files(hf_model: Callable[[str], Path], tmp_path: Path, family: str):
    """Rows that are ordered anew, columns, norms of all heads."""
    write_model(path := tmp_path / "model.gguf", hf_model(family))
    config, whole = read_config(path), tensors(network(path))
    for rank in range(2):
        for name, array in tensors(network(path, 2, rank)).items():
            part = expected(whole[name], name, config, 2, rank, False, config.qk_norm == "all")
            assert np.array_equal(array, part), name


def matrices(model: Llama) -> dict[str, np.ndarray]:
    """The projections of a network, by their names, in float32."""
    made = {}
    for layer in range(len(model.blocks)):
        found = projections(model, layer)
        for linear in {id(each.linear): each.linear for each in found}.values():
            parts = [each.matrix.dequantize().numpy() if isinstance(each, QWeight) else each.numpy()
                     for each in linear.parts]
            whole = np.concatenate(parts) if parts else linear.weight.numpy()
            made |= {each.name: whole[each.first:each.first + each.rows] for each in found
                     if each.linear is linear}
    return made


# groups of the first three would be cut here; the last two have act order
UNCUT = ("fp8", "ct-fp8-blocks", "nf4", "gptq-3-bits", "gptq-8-bits")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "ct-int8" else pytest.mark.slow)
                                  for kind in KINDS if kind not in UNCUT])
def test_quantised_layers(tmp_path: Path, kind: str):
    """Parts are those of the matrices that a format stands for."""
    quantised, plain = write(kind, tmp_path)
    config, whole = read_config(plain), matrices(network(plain))
    for rank in range(2):
        for name, array in matrices(network(quantised, 2, rank)).items():
            part = expected(whole[name], f"{name}.weight", config, 2, rank, False, False)
            if kind == "ct-nvfp4": array = torch.from_numpy(array).bfloat16().float().numpy()
            assert np.array_equal(array, part), name


@pytest.mark.parametrize("kind", ["ct-int8", pytest.param("gptq", marks=pytest.mark.slow)])
def test_quantised_layers_of_stages(tmp_path: Path, kind: str):
    """The second stage of a pipeline, whose layer 0 is the checkpoint's layer 1, cut over two ranks."""
    quantised, plain = write(kind, tmp_path)
    config, whole = read_config(quantised), matrices(network(plain))
    for rank in range(2):
        parallel: Any = Parallel(Rank(rank, 2), config, pipe=Rank(1, 2))   # type: ignore
        model = Llama(local_config(stage_config(config, 1, 2), 2), dtypes.float32, "CPU", parallel=parallel)
        weights.load(model, quantised)
        for name, array in matrices(model).items():
            there = name.replace(".layers.0.", ".layers.1.")
            part = expected(whole[there], f"{there}.weight", config, 2, rank, False, False)
            assert np.array_equal(array, part), name


def test_a_quantised_embedding_and_head(hf_model: Callable[[str], Path], tmp_path: Path):
    """Blocks of a GGUF file: a rank's rows of a table that is both."""
    write_model(path := tmp_path / "model.gguf", hf_model("qwen2"), {"token_embd": Kind.Q8_0, "": Kind.F32})
    whole = network(path).quantised_embedding
    assert whole is not None
    for rank in range(2):
        model = network(path, 2, rank)
        assert model.quantised_head is not None
        own = model.quantised_head.matrix.dequantize().numpy()
        assert np.array_equal(own, np.split(whole.dequantize().numpy(), 2)[rank])
