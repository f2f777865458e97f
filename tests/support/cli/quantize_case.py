"""Directories that `tinygrad-nv quantize` has written, by transformers and by this package."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tinygrad import Tensor, dtypes
from transformers import AutoModelForCausalLM

from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama

IDS = [5, 17, 80, 33, 2, 9, 120]


def loaded(directory: Path) -> Llama:
    """The model, in float32."""
    model = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(model, directory)
    return model


def logits(directory: Path, ids: Sequence[int] = IDS) -> np.ndarray:
    return loaded(directory)(Tensor([list(ids)], dtype=dtypes.int32, device="CPU")).numpy()


def same_layers(directory: Path) -> np.ndarray:
    """Asserts that linear layers of block 1 give what transformers' give, given the same; its logits."""
    given = dict[str, tuple[torch.Tensor, torch.Tensor]]()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        model.get_submodule(f"model.layers.1.{name}").register_forward_hook(
            lambda module, x, y, name=name: given.update({name: (x[0], y)}))
    with torch.no_grad(): wanted = model(torch.tensor([IDS])).logits.numpy()
    block = loaded(directory).blocks[1]
    for name, linear in (("self_attn.q_proj", block.attention.qkv),
                         ("self_attn.o_proj", block.attention.output),
                         ("mlp.down_proj", block.feed_forward.down)):
        x, y = given[name]
        made = linear(Tensor(x.numpy(), device="CPU")).numpy()[..., :y.shape[-1]]
        np.testing.assert_allclose(made, y.numpy(), atol=2e-6 * float(y.abs().max()), rtol=0)
    return wanted
