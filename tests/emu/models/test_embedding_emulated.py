"""An encoder in bfloat16 on the emulator: a captured graph of kernels without a finding."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tinygrad_nv.engine.llm import LLM

FIELDS = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
          "num_attention_heads": 4, "max_position_embeddings": 16}


@pytest.mark.slow
def test_embeddings_on_the_emulator(tmp_path: Path):
    """Within 1.5 × the error of the same model on a CPU."""
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(**FIELDS)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float("LayerNorm.weight" in name), 0.3)
    model.save_pretrained(tmp_path)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    texts, errors = [[5, 9, 33, 2, 60], [7]], {}
    with torch.no_grad():
        exact = np.stack([model(torch.tensor([text]))[0][0].mean(0).numpy() for text in texts])
    for device in ("EMU", "CPU"):
        llm = LLM(tmp_path, "bfloat16", 8, device, max_num_batched_tokens=8)
        made = [np.array([each.outputs.embedding for each in llm.embed(texts)]) for _ in range(2)]
        assert np.array_equal(*made)
        errors[device] = np.square(made[0] - exact).mean() ** 0.5
        assert llm.embedder is not None
        if device == "EMU": assert llm.embedder.runner.steps[8].captured.graphs
        llm.close()
    assert errors["EMU"] <= 1.5 * errors["CPU"]
