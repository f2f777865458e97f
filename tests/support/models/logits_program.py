"""A rank of networks of tests: their logits, which rank 0 holds to those of one device.

Arguments: directories of models, with "+ep" behind those whose experts stay whole. Exits with 1 where logits
differ by more than sums in another order may."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.dist.group import Group, init
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, local_config

UNIT = 2.0 ** -24
SUMS = 4            # that a layer has one after the other: before and after its attention, up and down


def bound(config: ModelConfig) -> float:
    """How far logits may be apart, of the largest: each sum of n numbers n · 2^-24 (Higham, Accuracy and
    stability of numerical algorithms, 4.2), of which ranks change the order."""
    width = max(config.intermediate_size, config.hidden_size, config.num_heads * config.head_dim)
    return (SUMS * config.num_layers + 1) * width * UNIT


def logits(directory: Path, tokens: Tensor, group: Group | None, experts: bool = False) -> np.ndarray:
    """Of a rank's part of a network, or of the whole one."""
    config = read_config(directory)
    if group is None: model = Llama(config, dtypes.float32, "CPU")
    else:
        model = Llama(local_config(config, group.size, experts), dtypes.float32, "CPU",
                      parallel=Parallel(group, config, experts=experts))
    weights.load(model, directory)
    found: np.ndarray = model(tokens).numpy()
    return found


def main() -> int:
    world, failed = init(), 0
    for argument in sys.argv[1:]:
        directory, experts = Path(argument.removesuffix("+ep")), argument.endswith("+ep")
        config = read_config(directory)
        random = np.random.default_rng(1)
        tokens = Tensor(random.integers(3, config.vocab_size, (2, 24)), dtype=dtypes.int32)
        made = logits(directory, tokens, world.group(), experts)
        if world.rank: continue
        right = logits(directory, tokens, None)
        error, most = np.abs(made - right).max() / np.abs(right).max(), bound(config)
        same = bool((made.argmax(-1) == right.argmax(-1)).all())
        fine = error <= most and same
        failed |= not fine
        print(f"{argument}: {'right' if fine else 'WRONG'}, {error:.1e} of {most:.1e}", flush=True)
    return failed


if __name__ == "__main__": raise SystemExit(main())
