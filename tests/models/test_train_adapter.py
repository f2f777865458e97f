"""Adapters beside PEFT: the same start and data give the same losses and matrices, and PEFT loads them."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tinygrad import dtypes

from tests.models.test_train_parity import ROWS, WIDTH, batches, counted, optimizer, their_loss, theirs
from tinygrad_nv.errors import ConfigError
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
    ("llama", ("q_proj", "v_proj"), False),
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
