"""Coefficients of steps against the schedulers of diffusers, and initial noise against torch."""
from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.lazy import lazy
from tinygrad_nv.models.diffusion import noise
from tinygrad_nv.models.diffusion.schedulers import SchedulerConfig, plan, read_scheduler

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
CLOSE = 1e-3    # of latents: those of diffusers are float32
diffusers = lazy("diffusers")
KINDS = {"ddim": "DDIMScheduler", "euler": "EulerDiscreteScheduler", "dpm++": "DPMSolverMultistepScheduler"}


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
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_schedulers(name, spacing, tmp_path):
    kinds = itertools.product(("epsilon", "v_prediction"), (False, True), (1, 10, 20))
    for prediction, karras, steps in kinds:
        if karras and name == "ddim": continue
        fields: dict[str, Any] = {"prediction_type": prediction, "timestep_spacing": spacing}
        fields["steps_offset"] = int(spacing == "leading")
        if name != "ddim": fields["use_karras_sigmas"] = karras
        check(getattr(diffusers, KINDS[name])(**BETAS, **fields), steps, tmp_path)


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
    for steps in (3, 16): check(getattr(diffusers, KINDS[name])(**BETAS | fields), steps, tmp_path)


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
