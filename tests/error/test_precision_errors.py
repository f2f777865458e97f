"""Recipes of precision: what is refused, in words."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinygrad import dtypes

from tinygrad_nv import Tensor
from tinygrad_nv.errors import ConfigError, SpecError
from tinygrad_nv.functional import Fp8Linear, fp8_linear
from tinygrad_nv.numerics import (
    DelayedScaling,
    Float8CurrentScaling,
    HighPrecision,
    LossScaling,
    PrecisionRecipe,
)
from tinygrad_nv.train import network
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.network import in_fp8
from tinygrad_nv.train.optimizers import StateOptions


@pytest.mark.parametrize(("make", "words"), [
    (lambda: LossScaling(0.0), "init_scale 0.0"),
    (lambda: LossScaling(growth_factor=1.0), "growth_factor 1.0"),
    (lambda: LossScaling(backoff_factor=1.0), "backoff_factor 1.0"),
    (lambda: LossScaling(growth_interval=0), "growth_interval 0"),
    (lambda: DelayedScaling("e5m2"), r"(?s)fp8_format 'e5m2'.*hybrid, e4m3"),
    (lambda: DelayedScaling(amax_history_len=0), "amax_history_len 0"),
    (lambda: DelayedScaling(amax_compute_algo="mean"), r"(?s)amax_compute_algo 'mean'.*max, most_recent"),
    (lambda: DelayedScaling(margin=100), "margin 100"),
    (lambda: PrecisionRecipe(dtypes.int8), "weights of"),
    (lambda: PrecisionRecipe(dtypes.float16, master=False), "weights of float16 without master weights"),
    (lambda: StateOptions(loss_scaling=LossScaling(), skip_nonfinite=False),
     "loss_scaling without skip_nonfinite"),
    (lambda: TrainingArguments(precision="fp8"), r"(?s)--precision fp8.*fp8_delayed, fp8_current, fp8_block"),
    (lambda: TrainingArguments(precision="fp8_block", dtype="float16"),
     r"(?s)--dtype float16 with --precision fp8_block.*weights of bfloat16.*leave --dtype out"),
    (lambda: TrainingArguments(precision="bfloat16_sr", zero_stage=1),
     "--precision bfloat16_sr with --zero-stage 1"),
    (lambda: TrainingArguments(precision="fp8_delayed", zero_stage=3),
     r"(?s)--precision fp8_delayed with --zero-stage 3.*--zero-stage 2 or less"),
    (lambda: TrainingArguments(fp8_exclude=("*",)), r"(?s)--fp8-exclude with --precision float32.*fp8_block"),
    (lambda: TrainingArguments(precision="fp8_delayed", fp8_margin=99), "margin 99"),
    (lambda: TrainingArguments(precision="fp8_delayed", fp8_amax_compute_algo="least"),
     "--fp8-amax-compute-algo least"),
    (lambda: TrainingArguments(precision="fp8_delayed", fp8_format="e5m2"), r"(?s)--fp8-format e5m2.*hybrid"),
])
def test_words(make: Callable[[], Any], words: str):
    with pytest.raises(ConfigError, match=words): make()


def test_rules_that_leave_nothing(tmp_path: Path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
              "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = network.draw_weights(tmp_path, dtypes.float32, 0)
    with pytest.raises(ConfigError, match=r"(?s)FP8 without a matrix.*q_proj: excluded by \*.*lm_head"):
        in_fp8(model, Float8CurrentScaling(), HighPrecision(("*",)))
    with pytest.raises(ConfigError, match=r"(?s)--fp8-exclude down_proj, which names no matrix.*"
                                          r"model.layers.0.self_attn.q_proj"):
        in_fp8(model, Float8CurrentScaling(), HighPrecision(("down_proj",)))


@pytest.mark.parametrize(("how", "x", "w", "scales", "meter", "words"), [
    (Fp8Linear(), (4, 32), (16, 48), None, 9, r"x of shape \(4, 32\), w of \(16, 48\)"),
    (Fp8Linear(), (4, 40), (16, 40), None, 9, r"(?s)a matrix of \(16, 40\) in FP8.*multiples of 16"),
    (Fp8Linear("e3m4"), (4, 32), (16, 32), None, 9, r"(?s)formats e3m4, e5m2.*e4m3, e5m2"),
    (Fp8Linear(blocks=True), (4, 32), (16, 32), (1, 1, 1), 9, "scales of tensors with blocks"),
    (Fp8Linear(), (4, 32), (16, 32), None, 8, r"a meter of float \(8,\)")])
def test_layers(how: Fp8Linear, x: tuple[int, ...], w: tuple[int, ...], scales: tuple[int, ...] | None,
                meter: int, words: str):
    given = None if scales is None else tuple(Tensor.ones(n) for n in scales)
    with pytest.raises(SpecError, match=words):
        fp8_linear(how, Tensor.ones(*x), Tensor.ones(*w), given, Tensor.zeros(meter))
