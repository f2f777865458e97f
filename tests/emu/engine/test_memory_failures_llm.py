"""DEV=EMU: memory that runs out at each allocation of a language model in turn, and the model after that."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.patterns.on_emu import emu  # noqa: F401
from tests.support.runtime.failing_memory import every_allocation, failing, holdings
from tinygrad_nv import LLM, Device, SamplingParams
from tinygrad_nv.errors import OutOfMemoryError

pytestmark = pytest.mark.usefixtures("frozen")

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def small(make_model) -> Path: return make_model(num_hidden_layers=1)


def test_every_allocation_of_a_language_model(small: Path):
    """Weights, cache, activations, arenas of the captured steps."""
    def answered() -> np.ndarray:
        llm = LLM(small, device="EMU", max_model_len=32, max_num_seqs=1)
        return np.array(llm.complete([5, 9, 20], PARAMS).token_ids)
    assert every_allocation(answered, again=False) >= 20


def test_a_language_model_goes_on_after_a_failure(small: Path):
    """The failure is in a step or its capture; the model is as it was before, and answers."""
    wanted = LLM(small, device="EMU", max_model_len=32, max_num_seqs=1).complete([5, 9, 20], PARAMS).token_ids
    llm = LLM(small, device="EMU", max_model_len=32, max_num_seqs=1)
    before = holdings("EMU")
    for n in range(1, 100):
        with failing(Device["EMU"].driver, n) as count:
            try: found = llm.complete([5, 9, 20], PARAMS).token_ids
            except OutOfMemoryError as error: found, label = None, error.label
        if found is not None: break
        assert label in ("activations", "graphs")
        assert set(holdings("EMU")) == set(before)
    assert found == wanted
    assert not count.refused
    assert n > 1
