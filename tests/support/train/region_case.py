"""A small network of every kind with a batch of documents, and a step's loss and gradients."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context

from tinygrad_nv.models.llama import Llama
from tinygrad_nv.train import network
from tinygrad_nv.train.adapter import AdapterModel, AdapterOptions
from tinygrad_nv.train.objectives import Inputs, LossOptions, Supervised
from tinygrad_nv.train.regions import Policy, checkpoint
from tinygrad_nv.train.regions.region import checkpoint_blocks

DENSE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
         "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
         "tie_word_embeddings": True, "initializer_range": 0.2}
MIXTURE = DENSE | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
                   "num_experts_per_tok": 2, "tie_word_embeddings": False}


class Case:
    """A network, its batch in memory, and what a step changes."""

    def __init__(self, folder: Path, config: dict[str, object], rows: int = 2, width: int = 16,
                 documents: bool = False, dropout: float | None = None) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        self.model: Llama = network.draw_weights(folder, dtypes.float32, 3)
        self.inputs = Inputs(rows, width, self.model.device)
        random, vocabulary = np.random.default_rng(1), int(self.model.config.vocab_size)
        tokens = random.integers(0, vocabulary, (rows, width)).astype(np.int32)
        first = width // 3
        places = np.r_[np.arange(first), np.arange(width - first)].astype(np.int32)
        for tensor, values in zip(self.inputs.arrays, (
                tokens, np.roll(tokens, -1, 1), np.tile(places, (rows, 1)),
                np.tile((np.arange(width) >= first).astype(np.int32), (rows, 1))), strict=True):
            tensor.assign(Tensor(values)).realize()
        self.inputs.count.assign(Tensor([float(rows * width)])).realize()
        if dropout is None: self.parameters = network.parameters(self.model)
        else:
            adapter = AdapterModel(self.model, AdapterOptions(4, dropout=dropout), self.inputs.number)
            for layer in adapter.layers:    # B of zeros would give A no gradient
                for name, b in layer.b.items():
                    values = random.standard_normal(b.shape).astype(np.float32) / 32
                    layer.b[name] = Tensor(values).realize()
            self.parameters = adapter.parameters
        self.objective = Supervised(self.model, rows, width, LossOptions(documents), self.inputs)

    def region(self, policy: Policy) -> None:
        """Makes the layers regions."""
        checkpoint_blocks(self.model, policy, self.parameters.values())

    def derived(self) -> list[Tensor]:
        """The loss and the gradients, realized."""
        with Context(TRAINING=1):
            loss = self.objective.sums()[0] / self.inputs.count.reshape(())
            made = [loss, *loss.gradient(*self.parameters.values())]
            Tensor.realize(*made)
        return made


def stack(policy: str, layers: int = 8, rows: int = 512, width: int = 16) -> tuple[TinyJit, list[np.ndarray]]:
    """A captured step of feed-forward layers, whose memory is activations for the most part; its results."""
    random = np.random.default_rng(4)
    def drawn(*shape: int) -> Tensor:
        return Tensor(random.standard_normal(shape).astype(np.float32) / 4).realize()
    weights = [(drawn(width, 4 * width), drawn(4 * width, width)) for _ in range(layers)]
    x = drawn(rows, width)

    def step() -> tuple[Tensor, ...]:
        h = x
        for up, down in weights:
            def layer(h: Tensor, up: Tensor = up, down: Tensor = down) -> Tensor:
                inner = (h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).contiguous() @ up
                return (h + inner.silu().contiguous() @ down).contiguous()
            h = checkpoint(layer, policy)(h)
        loss = h.square().mean()
        made = loss, *loss.gradient(*(each for pair in weights for each in pair))
        Tensor.realize(*made)
        return made
    jit = TinyJit(step)
    for _ in range(3): made = jit()
    return jit, [each.numpy() for each in made]
