"""A mixture of experts on several ranks, each with some whole: what they add is what one device has."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.functional import Policy
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.layer_config import MoEConfig
from tinygrad_nv.models.rope import RopeConfig

HIDDEN, WIDTH, EXPERTS, TOKENS = 32, 16, 5, 9


def block(k: int, own: range | None = None) -> MixtureOfExperts:
    """Of random weights, or the experts `own` of them."""
    moe, random = MoEConfig(EXPERTS, WIDTH, Policy(k), (True,)), np.random.default_rng(2)
    config = ModelConfig("MixtralForCausalLM", 320, HIDDEN, WIDTH, 1, 2, 2, 16, 64,
                         (RopeConfig("default", 1e4, 16, 64),), windows=(None,), moe=moe)
    made = MixtureOfExperts(config, moe, dtypes.float32, "CPU", own)
    def normal(*shape: int) -> np.ndarray: return random.standard_normal(shape).astype(np.float32)
    router, gate_up, down = normal(EXPERTS, HIDDEN), normal(EXPERTS, 2 * WIDTH, HIDDEN), \
        normal(EXPERTS, HIDDEN, WIDTH)
    made.router = Tensor(router, device="CPU").realize()
    made.gate_up, made.down = (
        Tensor(each[made.own.start:made.own.stop].reshape(-1, each.shape[-1]), device="CPU").realize()
        for each in (gate_up, down))
    return made


@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_over_ranks(k: int):
    """Of one expert for each token the bits are the same: ranks that do not have it add 0. Of several they
    are added in another order."""
    x = Tensor(np.random.default_rng(3).standard_normal((1, TOKENS, HIDDEN)).astype(np.float32), device="CPU")
    whole = block(k)(x).numpy()
    parts = [block(k, own)(x).numpy() for own in (range(3), range(3, EXPERTS))]
    if k > 1:       # k - 1 additions of numbers of about this size, twice
        most = 4 * (k - 1) * 2.0 ** -23 * (np.abs(parts).max(0) + np.abs(whole).max())
        assert np.all(np.abs(parts[0] + parts[1] - whole) <= most)
        return
    assert all(bool((each == 0).all(-1).any()) for each in parts)
    assert np.array_equal(parts[0] + parts[1], whole)
