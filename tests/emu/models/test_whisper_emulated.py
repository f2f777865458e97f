"""Whisper in bfloat16 on the emulator: captured graphs of kernels without a finding, and its tokens."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context

from tests.support.models import whisper_case as case
from tinygrad_nv import explain
from tinygrad_nv.engine.worker.speech_runner import SpeechRunner
from tinygrad_nv.models.whisper import weights
from tinygrad_nv.models.whisper.config import read_whisper_config
from tinygrad_nv.models.whisper.network import Whisper

FIELDS: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 24,
                          "max_target_positions": 16, "num_mel_bins": 16, "vocab_size": 320,
                          "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
C = 1.5     # another order of sums


def runner(directory: Path, device: str) -> SpeechRunner:
    config = read_whisper_config(directory)
    assert config is not None
    network = Whisper(config, dtypes.bfloat16, device)
    weights.load(network, directory)
    return SpeechRunner(network, 2)


def test_whisper_on_the_emulator(tmp_path: Path):
    """Logits of a prompt, and of a step of two sequences, with at most 1.5 × the error of a CPU's. Attention,
    matmuls and norms are templates."""
    model = case.save(tmp_path, 1, **FIELDS)
    features = np.random.default_rng(0).normal(size=(2, 48, 16)).astype(np.float32)
    tokens = np.array([[258, 266, 5, 9], [258, 266, 40, 7]])
    with torch.no_grad():
        exact = model(input_features=torch.tensor(features).transpose(1, 2),
                      decoder_input_ids=torch.tensor(tokens)).logits.numpy()
    errors = {}
    for device in ("EMU", "CPU"):
        made = runner(tmp_path, device)
        for slot in range(2): made.encode(slot, features[slot])
        started = [made.start(slot, tokens[slot, :3], 0) for slot in range(2)]
        step = made.step([0, 1], tokens[:, 3], [4, 4])
        found = np.stack([*np.concatenate(started), *step])
        wanted = np.stack([*exact[0, [0, 2]], *exact[1, [0, 2]], *exact[:, 3]])
        errors[device] = np.square(found - wanted).mean() ** 0.5
        if device == "EMU":
            captured = [each.captured for each in made.steps.values()]
            assert all(each is not None and each.graphs for each in captured)
            given = Tensor(features[:1], device=device).cast(dtypes.bfloat16).contiguous()
            kernels = str(explain(made.model.encoder(given)))
            assert [name for name in ("gemm", "flash", "norm") if name not in kernels] == []
        made.close()
    assert errors["EMU"] <= C * errors["CPU"]


@pytest.mark.slow
@pytest.mark.parametrize("tf32", [False, True])
def test_float32_on_the_emulator(tmp_path: Path, tf32: bool):
    """Without 16-bit templates tinygrad's kernels take the place of matmuls: the same logits. With tf32 they
    are templates that cut operands to 10 bits of mantissa."""
    model = case.save(tmp_path, 1, **FIELDS)
    features = np.random.default_rng(0).normal(size=(48, 16)).astype(np.float32)
    config = read_whisper_config(tmp_path)
    assert config is not None
    network = Whisper(config, dtypes.float32, "EMU")
    weights.load(network, tmp_path)
    with torch.no_grad():
        wanted = model(input_features=torch.tensor(features).T[None],
                       decoder_input_ids=torch.tensor([[258, 266, 5]])).logits[0].numpy()
    with Context(ALLOW_TF32=int(tf32)):
        made = SpeechRunner(network, 1)
        made.encode(0, features)
        found = made.start(0, [258, 266, 5], 0)
        given = Tensor(features[None], device="EMU").contiguous()
        assert ("mma" in str(explain(made.model.encoder(given)))) == tf32
        made.close()
    away = np.abs(found - wanted[[0, 2]]).max()
    assert away < (2.0**-8 * np.abs(wanted).max() if tf32 else 2e-4)
    assert not tf32 or away > 1e-6      # something was cut
