"""Adapters beside PEFT: the same start and data give the same losses and matrices, on weights as they are
and on quantised ones (QLoRA)."""
from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes

from tests.models.test_train_parity import ROWS, WIDTH, batches, counted, optimizer, their_loss, theirs
from tests.support.quant.directory_case import KINDS, write
from tests.support.quant.gguf_case import write_model
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.quantised.experts import stacks
from tinygrad_nv.models.quantised.layers import matrices, projections
from tinygrad_nv.train import network
from tinygrad_nv.train.adapter import AdapterModel, AdapterOptions
from tinygrad_nv.train.export import save_adapter
from tinygrad_nv.train.objectives import Inputs, Supervised
from tinygrad_nv.train.step import Step

STEPS, LR = 20, 1e-3


def adapted(directory: Path, options: AdapterOptions) -> tuple[Supervised, AdapterModel]:
    model = network.open_network(directory, dtypes.float32)
    network.extend(model, WIDTH)
    inputs = Inputs(ROWS, WIDTH, model.device)
    return Supervised(model, ROWS, WIDTH, inputs=inputs), AdapterModel(model, options, inputs.number)


@pytest.mark.parametrize(("case", "targets", "rslora"), [
    ("llama", ("q_proj", "v_proj"), False), ("lfm3", ("q_proj", "g_proj"), False),
    pytest.param("qwen3", ("all-linear",), True, marks=pytest.mark.slow)])
def test_adapters_are_those_of_peft(hf_model: Callable[[str], Path], tmp_path: Path, case: str,
                                    targets: tuple[str, ...], rslora: bool) -> None:
    """Losses of 20 steps within 1e-5, matrices within 1e-4 of the largest; saved, they give PEFT's logits."""
    options = AdapterOptions(4, 8, targets=targets, rslora=rslora)
    objective, adapter = adapted(hf_model(case), options)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(targets) if len(targets) > 1 else targets[0],
                        use_rslora=rslora)
    model = get_peft_model(theirs(hf_model(case)), config)
    own = {name.replace(".default", ""): each for name, each in model.named_parameters()
           if each.requires_grad}
    assert set(own) == set(adapter.parameters)
    for name, tensor in adapter.parameters.items():
        with torch.no_grad(): own[name].copy_(torch.tensor(tensor.numpy()))
    step = Step(objective, optimizer(adapter.parameters))
    adam = torch.optim.AdamW(own.values(), LR, weight_decay=0)
    for batch in batches()[:STEPS]:
        loss = their_loss(model, batch)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        adam.step()
        np.testing.assert_allclose(step([batch], counted(batch)).loss, loss.item(), rtol=1e-5)
    for name, tensor in adapter.parameters.items():
        wanted = own[name].detach().numpy()
        assert np.abs(tensor.numpy() - wanted).max() <= 1e-4 * np.abs(wanted).max(), name
    save_adapter(tmp_path, adapter.matrices(), 4, 8, rslora=rslora)
    loaded = PeftModel.from_pretrained(theirs(hf_model(case)), tmp_path).eval()
    ids = torch.tensor(batches()[0].ids).long()
    with torch.no_grad(): a, b = loaded(ids).logits, model.eval()(ids).logits
    assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.slow
def test_the_base_stays(hf_model: Callable[[str], Path]) -> None:
    """And `without` gives its loss, adapters trained or not."""
    objective, adapter = adapted(hf_model("llama"), AdapterOptions(2, targets=("down_proj",)))
    before = objective.model.blocks[0].feed_forward.down.weight.numpy().copy()
    batch = batches()[0]
    objective.fill(batch, 1, 0)
    with adapter.without(): base = objective.sums()[0].item()
    assert objective.sums()[0].item() == base, "B is 0"
    step = Step(objective, optimizer(adapter.parameters))
    for each in batches()[:3]: step([each], counted(each))
    objective.fill(batch, 1, 0)
    assert objective.sums()[0].item() < base
    with adapter.without(): assert objective.sums()[0].item() == base
    np.testing.assert_array_equal(objective.model.blocks[0].feed_forward.down.weight.numpy(), before)


def test_a_name_that_no_layer_has(hf_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--lora-target-modules query"):
        adapted(hf_model("llama"), AdapterOptions(targets=("query",)))


QUANTISED_STEPS, TARGETS = 8, ('q_proj', 'v_proj')


def opened(directory: Path, quantization: str | None = None) -> tuple[Supervised, AdapterModel]:
    model = network.open_network(directory, dtypes.float32, quantization=quantization)
    network.require_trainable(model, adapter=True, fp8=False)
    network.whole_head(model)
    network.extend(model, WIDTH)
    inputs = Inputs(ROWS, WIDTH, model.device)
    options = AdapterOptions(4, 8, targets=TARGETS)
    return Supervised(model, ROWS, WIDTH, inputs=inputs), AdapterModel(model, options, inputs.number)


def of_peft(start: dict[str, np.ndarray], plain: Path, dtype: torch.dtype
            ) -> tuple[list[float], dict[str, np.ndarray]]:
    """PEFT's losses of 8 steps, and its matrices after them."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS))
    model = get_peft_model(theirs(plain), config).to(dtype)
    own = {name.replace(".default", ""): each for name, each in model.named_parameters()
           if each.requires_grad}
    assert set(own) == set(start)
    for name, each in start.items():
        with torch.no_grad(): own[name].copy_(torch.tensor(each))
    adam, losses = torch.optim.AdamW(own.values(), LR, weight_decay=0), []
    for batch in batches()[:QUANTISED_STEPS]:
        losses.append(loss := their_loss(model, batch))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        adam.step()
    return [each.item() for each in losses], {name: each.detach().numpy() for name, each in own.items()}


def held_to_peft(objective: Supervised, adapter: AdapterModel, plain: Path) -> None:
    """Losses of 8 steps within 1e-5. Matrices within 1e-4 of the largest, or within 4 times what PEFT's of
    float32 differ from those of float64: AdamW makes steps of one size of gradients that nearly cancel."""
    start = {name: each.numpy() for name, each in adapter.parameters.items()}
    wanted, exact = of_peft(start, plain, torch.float64)
    rounded = of_peft(start, plain, torch.float32)[1]
    step = Step(objective, optimizer(adapter.parameters))
    found = [step([batch], counted(batch)).loss for batch in batches()[:QUANTISED_STEPS]]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    def error(matrices: dict[str, np.ndarray]) -> float:
        return max(float(np.abs(matrices[name] - each).max() / np.abs(each).max())
                   for name, each in exact.items())
    ours = error({name: each.numpy() for name, each in adapter.parameters.items()})
    assert ours <= max(1e-4, 4 * error(rounded)), (ours, error(rounded))


@pytest.mark.parametrize("kind", [
    "nf4", *(pytest.param(each, marks=pytest.mark.slow) for each in KINDS
            if each not in ("nf4", "ct-nvfp4"))])   # the plain weights of NVFP4 are rounded to bfloat16
def test_quantised_checkpoints(kind: str, tmp_path: Path) -> None:
    """Of formats that round inputs in serving, training rounds none."""
    quantised, plain = write(kind, tmp_path)
    held_to_peft(*opened(quantised), plain)


def dequantised(objective: Supervised, source: Path, into: Path) -> Path:
    """A directory with what a model's quantised matrices stand for."""
    model, tensors = objective.model, load_file(source / "model.safetensors")
    for layer in range(len(model.blocks)):
        for part in projections(model, layer):
            rows = np.concatenate([each.matrix.dequantize().numpy() for each in part.linear.parts])
            tensors[f"{part.name}.weight"] = torch.tensor(rows[part.first:part.first + part.rows])
    shutil.copytree(source, into)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.mark.parametrize("name", ["bitsandbytes", pytest.param("fp8_per_block", marks=pytest.mark.slow)])
def test_quantised_as_they_are_read(hf_model: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    objective, adapter = opened(hf_model("llama"), name)
    assert len(matrices(objective.model)) >= 4 * len(objective.model.blocks)
    held_to_peft(objective, adapter, dequantised(objective, hf_model("llama"), tmp_path / "plain"))


@pytest.mark.slow
def test_blocks_of_gguf(hf_model: Callable[[str], Path], tmp_path: Path) -> None:
    """With a head and an embedding in blocks, beside a file of the numbers that they stand for."""
    def losses(plain: bool) -> list[float]:
        path = tmp_path / str(plain) / "model.gguf"
        path.parent.mkdir()
        write_model(path, hf_model("llama"), GGMLQuantizationType.Q8_0, plain=plain)
        objective, adapter = opened(path.parent)
        assert (objective.model.quantised_head is None) == plain
        step = Step(objective, optimizer(adapter.parameters))
        return [step([each], counted(each)).loss for each in batches()[:QUANTISED_STEPS]]
    np.testing.assert_allclose(losses(False), losses(True), rtol=1e-5)


@pytest.mark.slow
def test_experts(hf_model: Callable[[str], Path]) -> None:
    """Gradients go through experts of 8 bits: losses within 1e-5 of those of experts and matrices of the
    numbers that they stand for, adapters within 2e-4 of the largest: two
    ways of float32, each within 1e-4."""
    def losses(objective: Supervised, adapter: AdapterModel) -> list[float]:
        step = Step(objective, optimizer(adapter.parameters))
        return [step([each], counted(each)).loss for each in batches()[:QUANTISED_STEPS]]
    quantised, plain = opened(hf_model("qwen2-moe"), "int8"), opened(hf_model("qwen2-moe"))
    assert stacks(quantised[0].model)
    for layer, (own, other) in enumerate(zip(quantised[0].model.blocks, plain[0].model.blocks, strict=True)):
        for part, to in zip(projections(quantised[0].model, layer), projections(plain[0].model, layer),
                            strict=True):
            whole = Tensor.cat(*(each.matrix.dequantize() for each in part.linear.parts))
            to.linear.weight.assign(whole).realize()
        for name in ("gate_up", "down") if isinstance(own.feed_forward, MixtureOfExperts) else ():
            stack, weight = getattr(own.feed_forward, f"{name}_stack"), getattr(other.feed_forward, name)
            assert (weight - stack.matrix.dequantize().reshape(weight.shape)).abs().max().item() > 0
            weight.assign(stack.matrix.dequantize().reshape(weight.shape)).realize()
    found, wanted = losses(*quantised), losses(*plain)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for name, each in plain[1].parameters.items():
        gap = np.abs(quantised[1].parameters[name].numpy() - each.numpy()).max()
        assert gap <= 2e-4 * np.abs(each.numpy()).max(), name
