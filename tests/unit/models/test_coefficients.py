"""Rotary tables against transformers' for every kind we accept, and refusal of the others' fields.
Coefficients of diffusion steps against the schedulers of diffusers, and initial noise against torch."""
from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support.lazy import lazy
from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.models.config import parse_config
from tinygrad_nv.models.diffusion import noise
from tinygrad_nv.models.diffusion.schedulers import SchedulerConfig, plan, read_scheduler
from tinygrad_nv.models.paged import rope_tables
from tinygrad_nv.models.rope import RopeConfig, tables

INTEGERS = {2: dtypes.uint16, 4: dtypes.uint32}

KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 128},
    "llama3.2": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                    "mscale_all_dim": 0.8, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
                 "short_factor": [1.0] * 16, "long_factor": [1 + i / 4 for i in range(16)]},
}


def parameters(kind: str, theta: float) -> dict[str, object]:
    return {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": 256, "rope_parameters": {"rope_theta": theta, **KINDS[kind]}}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_transformers(kind: str, theta: float):
    fields = parameters(kind, theta)
    config = LlamaConfig(**fields)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 256, 64), torch.arange(256)[None])
    ours = tables(parse_config({"architectures": ["LlamaForCausalLM"], **fields}).ropes[0], 256)
    # angles up to 256 rad in float32: 2^-15 rad of rounding between two libraries' pow
    np.testing.assert_allclose(ours[0], cos[0, :, :16].numpy(), atol=2 ** -15, rtol=0)
    np.testing.assert_allclose(ours[1], sin[0, :, :16].numpy(), atol=2 ** -15, rtol=0)


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_changes_beyond_the_trained_length(length: int):
    fields = parameters("longrope", 10000.0)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**fields))
    wanted = theirs(torch.zeros(1, length, 64), torch.arange(length)[None])
    ours = tables(parse_config({"architectures": ["LlamaForCausalLM"], **fields}).ropes[0], length)
    for found, each in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(found, each[0, :, :16].numpy(), atol=2 ** -15, rtol=0)


def test_of_two_original_lengths_the_one_beside_the_parameters_counts():
    fields = {**parameters("yarn", 10000.0), "original_max_position_embeddings": 128}
    # before transformers writes into the parameters
    rope = parse_config({"architectures": ["LlamaForCausalLM"], **fields}).ropes[0]
    cos, _ = LlamaRotaryEmbedding(LlamaConfig(**fields))(torch.zeros(1, 256, 64), torch.arange(256)[None])
    assert rope.original_positions == 128
    np.testing.assert_allclose(tables(rope, 256)[0], cos[0, :, :16].numpy(), atol=2 ** -15, rtol=0)


def test_old_and_new_spellings_are_one_configuration():
    new = parameters("llama3", 500000.0)
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | {
        "rope_theta": 500000.0, "rope_scaling": {**KINDS["llama3"], "type": "llama3"}}
    assert parse_config({"architectures": ["LlamaForCausalLM"], **old}) == parse_config(
        {"architectures": ["LlamaForCausalLM"], **new})


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16])
def test_tables_are_rounded_as_tinygrad_rounds(dtype: DType):
    rope = RopeConfig("default", 10000.0, 64, 512)
    made = rope_tables((rope,), 512, 512, dtype, "CPU")[0]
    for ours, exact in zip(made, tables(rope, 512), strict=True):
        theirs = Tensor(exact, device="CPU").cast(dtype)
        assert (ours.dtype, ours.shape) == (dtype, exact.shape)
        assert np.array_equal(ours.bitcast(INTEGERS[dtype.itemsize]).numpy(),
                              theirs.bitcast(INTEGERS[dtype.itemsize]).numpy())


BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
CLOSE = 1e-3    # of latents: those of diffusers are float32
diffusers = lazy("diffusers")
THEIRS = {"ddim": "DDIMScheduler", "euler": "EulerDiscreteScheduler", "dpm++": "DPMSolverMultistepScheduler"}


def network(x: Any, sin: Any) -> Any:
    """In place of a UNet."""
    return sin(x * 1.3) + 0.1 * x


def after(theirs: Any, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Latents and timesteps of a scheduler of diffusers."""
    theirs.set_timesteps(steps)
    x = torch.tensor(noise.normal(1, (1, 4, 4, 4))) * theirs.init_noise_sigma
    for t in theirs.timesteps:
        made = network(theirs.scale_model_input(x, t), torch.sin)
        x = theirs.step(made, t, x).prev_sample
    return x.numpy(), theirs.timesteps.numpy()


def mine_after(config: SchedulerConfig, steps: int, name: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The same by a plan."""
    made = plan(config, steps, name)
    x, before = noise.normal(1, (1, 4, 4, 4)) * made.noise, 0.0
    for scale, (p, q, c, d, e, f) in zip(made.scales, made.coefficients, strict=True):
        m = network(x * scale, np.sin)
        clean = p * x + q * m
        if made.clip: clean = clean.clip(-made.clip, made.clip)
        x, before = c * x + d * m + e * clean + f * before, clean
    return x, made.timesteps


def check(theirs: Any, steps: int, folder: Path) -> None:
    theirs.save_pretrained(folder)
    x, times = after(theirs, steps)
    got, mine = mine_after(read_scheduler(folder), steps)
    assert len(mine) == steps
    assert np.abs(mine - times).max() < 1e-2
    assert np.abs(got - x).max() < CLOSE


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_schedulers(name, spacing, tmp_path):
    kinds = itertools.product(("epsilon", "v_prediction"), (False, True), (1, 10, 20))
    for prediction, karras, steps in kinds:
        if karras and name == "ddim": continue
        fields: dict[str, Any] = {"prediction_type": prediction, "timestep_spacing": spacing}
        fields["steps_offset"] = int(spacing == "leading")
        if name != "ddim": fields["use_karras_sigmas"] = karras
        check(getattr(diffusers, THEIRS[name])(**BETAS, **fields), steps, tmp_path)


@pytest.mark.parametrize(("name", "fields"), [
    ("ddim", {"beta_schedule": "squaredcos_cap_v2"}),
    ("ddim", {"beta_schedule": "linear", "clip_sample_range": 2.0, "set_alpha_to_one": False}),
    ("ddim", {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction",
              "timestep_spacing": "trailing", "clip_sample": False}),
    ("euler", {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction",
               "timestep_spacing": "trailing"}),
    ("euler", {"final_sigmas_type": "sigma_min"}), ("dpm++", {"final_sigmas_type": "sigma_min"}),
    ("dpm++", {"lower_order_final": False, "final_sigmas_type": "sigma_min"}),
    ("dpm++", {"euler_at_final": True, "final_sigmas_type": "sigma_min"})])
def test_fields(name, fields, tmp_path):
    for steps in (3, 16): check(getattr(diffusers, THEIRS[name])(**BETAS | fields), steps, tmp_path)


def test_another_scheduler_with_the_betas_of_a_file(tmp_path):
    diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1).save_pretrained(tmp_path)
    found = read_scheduler(tmp_path)
    assert (found.name, found.clip) == ("ddim", 0.0)
    theirs = diffusers.EulerDiscreteScheduler.from_pretrained(tmp_path, use_karras_sigmas=True)
    x, times = after(theirs, 10)
    got, mine = mine_after(found, 10, "euler-karras")
    assert np.abs(mine - times).max() < 1e-2
    assert np.abs(got - x).max() < CLOSE


@pytest.mark.parametrize("seed", [0, 42, (1 << 40) + 7])
def test_noise_is_that_of_torch(seed):
    theirs, mine = torch.Generator().manual_seed(seed), noise.Generator(seed)
    for shape in ((1, 4, 8, 8), (3, 17), (4, 5)):       # whole blocks of 16, and others
        assert np.abs(torch.randn(shape, generator=theirs).numpy() - mine.normal(shape)).max() < 1e-6
    # fewer than 16 are drawn in another way
    for shape in ((1,), (4, 1, 1), (1, 5, 3)):
        theirs = torch.Generator().manual_seed(seed)
        assert np.abs(torch.randn(shape, generator=theirs).numpy() - noise.normal(seed, shape)).max() < 1e-6


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_plans_of_any_number_of_steps(spacing):
    """Up to those of the training; where rounding adds one, or an offset goes beyond the last."""
    config = SchedulerConfig(spacing=spacing, offset=1)
    for name in ("ddim", "euler", "dpm++"):
        for steps in (1, 2, 499, 500, 998 - 400 * (name == "dpm++"), 1000 - 400 * (name == "dpm++")):
            made = plan(config, steps, name)
            assert len(made) == len(made.coefficients) == steps
            assert made.timesteps.max() < 1000
            assert np.isfinite(made.coefficients).all()
