"""Mixtures of experts that are quantised: matrices bit for bit, logits and tokens of the dequantised model;
repacked weights kept on disk; what is refused."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinygrad import dtypes

from tests.models.test_parity import require_same_answers
from tests.support.models.experts_case import experts, write
from tinygrad_nv.errors import WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.quantised import experts as quantised_experts
from tinygrad_nv.models.quantised import repack_folder

CASES = [("awq", "qwen3-moe"), ("gptq", "mixtral"), ("fp8", "qwen3-moe"), ("ct-int4", "qwen2-moe")]
SLOW = [("gptq-8-bits", "mixtral"), ("ct-int4-zeros", "olmoe"), ("ct-mxfp4", "qwen3-moe"),
        ("ct-fp8-blocks", "qwen3-moe"), ("nf4", "mixtral"), ("modelopt", "olmoe")]
Both = tuple[Path, Path]


def loaded(directory: Path) -> Llama:
    model = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(model, directory)
    return model


def require_same(model: Llama, plain: Path) -> None:
    """Asserts that matrices of experts are those of the plain directory, bit for bit."""
    found, wanted = experts(model), load_file(plain / "model.safetensors")
    assert found.keys() == {name.removesuffix(".weight") for name in wanted if ".experts." in name}
    for name, matrix in found.items():
        assert np.array_equal(matrix, wanted[f"{name}.weight"].numpy()), name


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Both]:
    made: dict[tuple[str, str], Both] = {}

    def make(kind: str, family: str) -> Both:
        if (kind, family) not in made:
            made[kind, family] = write(kind, family, tmp_path_factory.mktemp(kind))
        return made[kind, family]
    return make


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "family"), [*CASES[:2], *(pytest.param(*each, marks=pytest.mark.slow)
                                                           for each in [*CASES[2:], *SLOW])])
def test_logits_and_greedy_tokens(directories: Callable[[str, str], Both], kind: str, family: str):
    quantised, plain = directories(kind, family)
    require_same(loaded(quantised), plain)
    require_same_answers(quantised, plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "family"), [("fp8", "qwen3-moe"), ("ct-int4", "qwen2-moe"),
                                              ("ct-int8", "mixtral")])
def test_matrices_are_the_same(directories: Callable[[str, str], Both], kind: str, family: str):
    quantised, plain = directories(kind, family)
    require_same(loaded(quantised), plain)


def test_inputs_are_rounded_where_transformers_rounds_them(directories: Callable[[str, str], Both]):
    """W8A8 of compressed-tensors: weights of 8 bits, inputs rounded to int8 of each token."""
    model = loaded(directories("ct-int8", "mixtral")[0])
    stack = model.blocks[0].feed_forward.down_stack
    assert stack is not None
    assert stack.activations is not None
    assert stack.activations.element == "int8"


@pytest.mark.slow
def test_some_matrices_at_a_time(directories: Callable[[str, str], Both], monkeypatch: pytest.MonkeyPatch):
    """Chunks of two matrices, and one of what is left."""
    quantised, plain = directories("awq", "qwen3-moe")
    for name in ("LEAST", "MOST"): monkeypatch.setattr(quantised_experts, name, 12000)
    require_same(loaded(quantised), plain)


@pytest.mark.slow
def test_repacked_stacks_are_kept(directories: Callable[[str, str], Both], tmp_path: Path,
                                  monkeypatch: pytest.MonkeyPatch):
    directory, plain = directories("awq", "qwen3-moe")
    monkeypatch.setattr(repack_folder, "root", lambda: tmp_path)
    monkeypatch.setenv("NV_REPACK_CACHE", "1")
    loaded(directory)
    def again(*arguments: object) -> None: raise AssertionError("repacked again")
    monkeypatch.setattr(quantised_experts, "fill", again)
    require_same(loaded(directory), plain)


def changed(directory: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy with other tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (to / name).write_text((directory / name).read_text())
    return to


EXPERT = "model.layers.1.mlp.experts.4.up_proj"


def test_what_is_missing_or_does_not_fit(directories: Callable[[str, str], Both], tmp_path: Path):
    directory = directories("awq", "qwen3-moe")[0]
    with pytest.raises(WeightError, match=f"{EXPERT}.qzeros is I32"):
        loaded(changed(directory, tmp_path, lambda t: t.update(
            {f"{EXPERT}.qzeros": t[f"{EXPERT}.qzeros"][:, 1:].contiguous()})))
    with pytest.raises(WeightError, match=f"{EXPERT}.scales is missing"):
        loaded(changed(directory, tmp_path, lambda t: (t.pop(f"{EXPERT}.scales"), None)[1]))


def test_experts_of_several_types(directories: Callable[[str, str], Both], tmp_path: Path):
    def one_of_floats(tensors: dict[str, torch.Tensor]) -> None:
        for key in ("qweight", "qzeros", "scales"): del tensors[f"{EXPERT}.{key}"]
        tensors[f"{EXPERT}.weight"] = torch.zeros(64, 128)
    directory = changed(directories("awq", "qwen3-moe")[0], tmp_path, one_of_floats)
    with pytest.raises(WeightError) as caught: loaded(directory)
    assert f"not quantised (1): {EXPERT}" in str(caught.value)
    assert "one type for gate and up" in str(caught.value)
