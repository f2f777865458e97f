"""Random models of every family, written by transformers' own save_pretrained."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from families import BASE, CASES


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a case, written on first use."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            case = CASES[name]
            torch.manual_seed(len(name))
            network = getattr(transformers, f"{case.family}ForCausalLM")
            model = network(network.config_class(**{**BASE, **case.fields}))
            for parameter_name, parameter in model.named_parameters():
                # biases and norms are born 0 and 1, which would hide a bias or a norm that is not applied
                mean = 1.0 if "norm" in parameter_name else 0.0
                if parameter.ndim == 1: torch.nn.init.normal_(parameter, mean, 0.3)
            # a bias of choices, born 0
            for buffer_name, buffer in model.named_buffers():
                if "e_score_correction_bias" in buffer_name: torch.nn.init.normal_(buffer, 0.0, 0.3)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name], **case.save)
        return made[name]
    return make
