"""Documents packed into rows: logits are those of each alone, and a training step's loss and gradients are
those of transformers of each document in a row of its own."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context

from tests.models.test_train_parity import theirs
from tests.support.models import families
from tinygrad_nv import explain
from tinygrad_nv.errors import ModelError
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.dense import DenseBatch, Documents
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.weights import load, slots
from tinygrad_nv.train import network
from tinygrad_nv.train.data import collate
from tinygrad_nv.train.data.batch import row
from tinygrad_nv.train.objectives import LossOptions, Supervised

LENGTHS = ((5, 1, 40, 2), (33, 7), (48,))   # of documents in rows of 48 tokens: windows are 16
WIDTH = 48
CASES = ["llama", *(pytest.param(case, marks=pytest.mark.slow)
                    for case in ("qwen3", "gemma2", "gpt-oss", "llama4", "deepseek-v3"))]


def documents() -> list[list[np.ndarray]]:
    random = np.random.default_rng(11)
    return [[random.integers(3, 60, n).astype(np.int32) for n in them] for them in LENGTHS]


def objective(directory: Path, width: int = WIDTH) -> Supervised:
    """Of the packed rows, in the buffers."""
    model = network.open_network(directory, dtypes.float32)
    network.extend(model, width)
    made = Supervised(model, len(LENGTHS), width, LossOptions(documents=True))
    packed = [row(np.concatenate(each), None, tuple(map(len, each))) for each in documents()]
    batch = collate(packed, width)
    targets = batch.targets
    made.fill(batch, int((targets != -100).sum()), 0)
    return made


def gradients(made: Supervised) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients by the parameters' names."""
    own = network.parameters(made.model)
    with Context(TRAINING=1):
        loss = made.sums()[0] / made.inputs.count.reshape(())
        return loss, dict(zip(own, loss.gradient(*own.values()), strict=True))


def expected(directory: Path) -> tuple[float, dict[str, np.ndarray]]:
    """transformers' loss, the mean over all tokens, and gradients: a forward pass for each document."""
    model, sums, count = theirs(directory), torch.zeros(()), 0
    for ids in (torch.tensor(each).long() for them in documents() for each in them):
        logits = model(input_ids=ids[None]).logits[0].float()
        sums = sums + torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        count += len(ids) - 1
    loss = sums / count
    loss.backward()
    return loss.item(), {name: each.grad.numpy() for name, each in model.named_parameters()
                         if each.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_packed_is_unpacked(hf_model: Callable[[str], Path], case: str) -> None:
    """The loss within 1e-6, the gradients of every tensor within 1e-5 of the largest."""
    made = objective(hf_model(case))
    loss, found = gradients(made)
    Tensor.realize(loss, *found.values())
    own = network.parameters(made.model)
    by_tensor = {id(own[name]): each.float().numpy() for name, each in found.items()}
    wanted_loss, wanted = expected(hf_model(case))
    assert abs(loss.item() - wanted_loss) <= 1e-6 * wanted_loss
    checked = 0
    for name, slot in slots(made.model).items():
        if name not in wanted or id(slot.tensor) not in by_tensor: continue
        got = by_tensor[id(slot.tensor)][slot.first:slot.first + slot.shape[0]]
        assert np.abs(got - wanted[name]).max() <= 1e-5 * np.abs(wanted[name]).max(), name
        checked += 1
    assert checked >= 9


@pytest.mark.parametrize("case", ["llama", *(pytest.param(case, marks=pytest.mark.slow)
                                             for case in ("gemma2", "gpt-oss"))])
def test_a_step_has_no_matrix_of_scores(hf_model: Callable[[str], Path], case: str) -> None:
    """Attention is two kernels of ours a layer, forward and backward, whose documents have bounds and no
    mask; no other kernel reads or writes as many bytes as the scores of a layer have."""
    made = objective(hf_model(case), width := 256)
    loss, found = gradients(made)
    kernels = explain(loss, *found.values()).kernels
    layers = made.model.config.num_layers
    flash = [each for each in kernels if each.template in ("flash", "flash_backward")]
    assert [each.template for each in flash] == ["flash"] * layers + ["flash_backward"] * layers
    for each in flash: assert "documents" in str(each.spec)
    scores = made.model.config.num_heads * len(LENGTHS) * width**2 * 4
    for each in kernels: assert each in flash or each.bytes < scores, each


PACKED = ((5, 1, 14), (17, 3))    # of documents in two rows
QUICK = ("llama", "qwen3", "mistral", "llama4", "deepseek-v3", "gemma2", "gpt-oss", "mixtral")


def opened(directory: Path) -> Llama:
    model = Llama(read_config(directory), dtypes.float32)
    load(model, directory)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow)
                                  for case in families.CASES])
def test_no_document_sees_another(hf_model: Callable[[str], Path], case: str) -> None:
    """Within 2e-5 of the largest: sums of attention are in another order."""
    model, random = opened(hf_model(case)), np.random.default_rng(3)
    rows = [[random.integers(3, 300, n) for n in row] for row in PACKED]
    tokens = Tensor(np.stack([np.concatenate(row) for row in rows]).astype(np.int32))
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in PACKED])
    segments = np.stack([np.repeat(1 + np.arange(len(row)), row) for row in PACKED])
    documents = Documents(*(Tensor(each.astype(np.int32)) for each in (positions, segments)))
    batch = DenseBatch(0, model.rope_tables, None, documents)
    if families.CASES[case].family in families.KEEPING_STATES:
        with pytest.raises(ModelError, match=r"several documents .* layers that keep states"):
            model.states_of_batch(tokens, batch)
        return
    found = model.logits(model.states_of_batch(tokens, batch)).numpy()
    single = [each for row in rows for each in row]     # filled up: no token sees what comes later
    filled = np.stack([np.pad(each, (0, 20 - len(each)), constant_values=3) for each in single])
    alone, places = model(Tensor(filled.astype(np.int32))).numpy(), [(0, 0), (0, 5), (0, 6), (1, 0), (1, 17)]
    for each, wanted, (i, at) in zip(single, alone, places, strict=True):
        n = len(each)
        assert np.abs(found[i, at:at + n] - wanted[:n]).max() <= 2e-5 * np.abs(wanted[:n]).max()
