"""Documents packed into rows: logits are those of each document alone."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.support.models import families
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.dense import DenseBatch, Documents
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.weights import load

LENGTHS = ((5, 1, 14), (17, 3))    # of documents in two rows
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
    rows = [[random.integers(3, 300, n) for n in row] for row in LENGTHS]
    tokens = Tensor(np.stack([np.concatenate(row) for row in rows]).astype(np.int32))
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in LENGTHS])
    segments = np.stack([np.repeat(1 + np.arange(len(row)), row) for row in LENGTHS])
    documents = Documents(*(Tensor(each.astype(np.int32)) for each in (positions, segments)))
    batch = DenseBatch(0, model.rope_tables, None, documents)
    found = model.logits(model.states_of_batch(tokens, batch)).numpy()
    single = [each for row in rows for each in row]     # filled up: no token sees what comes later
    filled = np.stack([np.pad(each, (0, 20 - len(each)), constant_values=3) for each in single])
    alone, places = model(Tensor(filled.astype(np.int32))).numpy(), [(0, 0), (0, 5), (0, 6), (1, 0), (1, 17)]
    for each, wanted, (row, at) in zip(single, alone, places, strict=True):
        n = len(each)
        assert np.abs(found[row, at:at + n] - wanted[:n]).max() <= 2e-5 * np.abs(wanted[:n]).max()
