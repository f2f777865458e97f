"""A training step of a LLaMA on the emulator: its attention forward and backward are kernels of ours, and its
gradients are as near to float64 as those of bfloat16 on the CPU."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.models.config import parse_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import AttentionSpec

CONFIG = {"architectures": ["MistralForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
          "vocab_size": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0,
          "sliding_window": 20, "tie_word_embeddings": False}


def trained(device: str, dtype: object) -> tuple[Llama, Tensor, list[Tensor]]:
    """A model of given weights, its loss, and the gradients of its first layer's attention."""
    model = Llama(parse_config(CONFIG), dtype, device)  # type: ignore[arg-type]
    random = np.random.default_rng(3)
    weights = [model.embedding, model.head, model.norm.weight]
    for block in model.blocks:
        weights += [block.attention.qkv.weight, block.attention.output.weight, block.attention_norm.weight,
                    block.feed_forward.gate_up.weight, block.feed_forward.down.weight,
                    block.feed_forward_norm.weight]
    for weight in weights:
        values = random.normal(1.0 if len(weight.shape) == 1 else 0.0, 0.15, weight.shape)
        weight.replace(Tensor(values.astype(np.float32)).to(device).cast(dtype).contiguous().realize())
    tokens = Tensor(random.integers(0, 32, (2, 41)).astype(np.int32), device=device)
    logits = model(tokens[:, :-1]).float()
    loss = logits.sparse_categorical_crossentropy(tokens[:, 1:])
    first = model.blocks[0].attention
    return model, loss, loss.gradient(first.qkv.weight, first.output.weight)


@pytest.fixture(scope="module")
def exact() -> list[np.ndarray]:
    _, loss, gradients = trained("CPU", dtypes.float32)
    return [each.numpy().astype(np.float64) for each in (loss, *gradients)]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_step(arch: str, exact: list[np.ndarray], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMU_ARCH", arch)
    device = f"EMU:{ {'sm_80': 80, 'sm_90a': 90}[arch]}"
    _, loss, gradients = trained(device, dtypes.bfloat16)
    kernels = explain(loss, *gradients).kernels
    assert len(kernels) <= 62
    assert len(explain(loss).kernels) <= 27
    assert sum(isinstance(kernel.spec, AttentionSpec) for kernel in kernels) == 2
    assert sum(isinstance(kernel.spec, BackwardSpec) for kernel in kernels) == 2
    Tensor.realize(loss, *gradients)
    _, usual_loss, usual = trained("CPU", dtypes.bfloat16)
    for got, plain, want in zip((loss, *gradients), (usual_loss, *usual), exact, strict=True):
        found, by_plain = (each.float().numpy().astype(np.float64) for each in (got, plain))
        bound = 2 * np.abs(by_plain - want).max() + 2.0**-8 * np.abs(want)
        assert (np.abs(found - want) <= bound).all()


def test_kernels_of_a_step_on_a_cpu():
    _, loss, gradients = trained("CPU", dtypes.float32)
    kernels = explain(loss, *gradients).kernels
    assert len(kernels) <= 60
    assert len(explain(loss).kernels) <= 27
    assert sum(isinstance(kernel.spec, AttentionSpec) for kernel in kernels) == 2
    assert sum(isinstance(kernel.spec, BackwardSpec) for kernel in kernels) == 2
