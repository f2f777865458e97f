"""Low-rank adapters that are trained (LoRA, arXiv 2106.09685): what PEFT makes of `LoraConfig`.

Protocol: `AdapterModel(model, options)` gives each linear layer that `options` names an A (r, in), drawn
from U(−1/√in, 1/√in) as PEFT does, and a B (out, r) of zeros, float32. A layer then gives

    y = x Wᵀ + scale · (dropout(x) Aᵀ) Bᵀ          scale = alpha / r, or alpha / √r (rsLoRA, arXiv 2312.03732)

where W, of floats or quantised (QLoRA, arXiv 2305.14314), stays as it is. `parameters` are the A and B by
PEFT's names, `matrices()` what `save_adapter` takes. Inside `without()` layers are as before.

Dropout is drawn from a counter: the number of the micro-batch, the layer and the element decide. A run that
goes on from a checkpoint, and a layer that is computed again, draw the same.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from tinygrad import Tensor
from tinygrad.helpers import TRAINING

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.functional import dropout
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.lora import adaptable
from tinygrad_nv.models.quantised.layers import Projection

ALL = "all-linear"


@dataclass(frozen=True)
class AdapterOptions:
    """PEFT's: `targets` are ends of names of layers (q_proj), or all-linear."""
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL,)
    rslora: bool = False
    seed: int = 42

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def names(self, layer: str) -> bool:
        """Whether a layer has an adapter."""
        return any(each == ALL or layer == each or layer.endswith("." + each) for each in self.targets)


class LayerAdapter:
    """Adapter of one `Linear`, whose projections are `parts`, in order: A and B of those that have one."""

    def __init__(self, parts: tuple[Projection, ...], options: AdapterOptions, random: np.random.Generator,
                 salt: int, number: Tensor) -> None:
        self.options, self.salt, self.number, self.active = options, salt, number, True
        self.parts = [(part.name, part.rows) for part in parts]
        self.a, self.b = dict[str, Tensor](), dict[str, Tensor]()
        device = parts[0].linear.weight.device
        for part in parts:
            if not options.names(part.name): continue
            inputs = part.shape[1]
            bound = 1 / math.sqrt(inputs)
            drawn = random.uniform(-bound, bound, (options.rank, inputs)).astype(np.float32)
            self.a[part.name] = Tensor(drawn, device=device).realize()
            self.b[part.name] = Tensor.zeros(part.rows, options.rank, device=device).contiguous().realize()

    def addend(self, x: Tensor) -> Tensor | None:
        """Returns what the adapter adds for x (…, in); None for nothing."""
        if not self.a or not self.active: return None
        inner = x.float()
        if TRAINING and self.options.dropout:
            salt = self.salt + 4096 * self.options.seed     # of a layer: models have fewer than 4096
            inner = dropout(inner, self.options.dropout, self.number, salt).contiguous()
        made = []
        for name, rows in self.parts:
            if name in self.a:
                low = (inner @ self.a[name].T).contiguous()
                made.append((low @ self.b[name].T) * self.options.scale)
            else: made.append(Tensor.zeros(*x.shape[:-1], rows, device=x.device))
        return (made[0] if len(made) == 1 else Tensor.cat(*made, dim=-1)).cast(x.dtype)


class AdapterModel:
    """The adapters of a model. `number`, uint32 (1), is that of the micro-batch. Experts and latent attention
    have none. Raises `ConfigError` for a target that names no layer."""

    def __init__(self, model: Llama, options: AdapterOptions, number: Tensor) -> None:
        self.options, random = options, np.random.default_rng(options.seed)
        self.layers = list[LayerAdapter]()
        every = adaptable(model)
        for salt, (_, found) in enumerate(groupby(every, key=lambda each: id(each.linear))):
            parts = tuple(found)
            made = parts[0].linear.adapters = LayerAdapter(parts, options, random, salt, number)
            self.layers.append(made)
        for target in options.targets:
            if not any(AdapterOptions(targets=(target,)).names(each.name) for each in every):
                known = sorted({each.name.rpartition(".")[2] for each in every})
                raise ConfigError(f"--lora-target-modules {target}, which names no layer",
                                  ", ".join([*known, ALL] if known else ["a model with other layers than "
                                            "experts and latent attention"]), "choose from these")

    @property
    def parameters(self) -> dict[str, Tensor]:
        """A and B by PEFT's names."""
        return {f"base_model.model.{name}.lora_{letter}.weight": tensor for layer in self.layers
                for letter, own in (("A", layer.a), ("B", layer.b)) for name, tensor in own.items()}

    def matrices(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each layer by its name."""
        return {name: (a, layer.b[name]) for layer in self.layers for name, a in layer.a.items()}

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """Layers that are built inside have no adapter."""
        for layer in self.layers: layer.active = False
        try: yield
        finally:
            for layer in self.layers: layer.active = True
