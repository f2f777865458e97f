"""One side of bench/gpu/run.py --part step: steps of training, in a process of its own.

    python bench/gpu/step_side.py ours|torch|torch.compile DIRECTORY ROWS TOKENS DEVICE

Protocol: as decode_side.py, where the numbers that are compared are the losses of the first `FIRST` steps. A
step takes the next of `FIRST` batches of random tokens, the same everywhere; loss and norm of gradients are
read by the host after each.

`ours` is what `tinygrad-nv train` runs in bfloat16: float32 master weights, clipped gradients, AdamW. `torch`
is transformers' network with SDPA attention in autocast to bfloat16 over float32 weights, clip_grad_norm_ and
fused AdamW; `torch.compile` compiles the network.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.decode_side import measure
from bench.lib.measure import end_with_parent
from tinygrad_nv.runtime.observe.telemetry import Telemetry

FIRST, RATE, NORM = 6, 1e-3, 1.0
Step = Callable[[np.ndarray], float]    # takes a batch, gives its loss


def ours(directory: Path, size: tuple[int, int], device: str) -> Step:
    """`tinygrad-nv train`'s, on the default device."""
    from tinygrad import dtypes

    from tinygrad_nv.train import network
    from tinygrad_nv.train.data import Batch
    from tinygrad_nv.train.objectives import Supervised
    from tinygrad_nv.train.optimizers import StateOptions, adamw
    from tinygrad_nv.train.step import Step as Captured
    model = network.open_network(directory, dtypes.bfloat16)
    network.extend(model, size[1])
    adam = adamw(network.parameters(model), RATE, options=StateOptions(max_grad_norm=NORM))
    step = Captured(Supervised(model, *size), adam)
    positions, ones = np.tile(np.arange(size[1], dtype=np.int32), (size[0], 1)), np.ones(size, np.int32)
    return lambda ids: step([Batch(ids, ids, positions, ones)], size[0] * (size[1] - 1)).loss


def torch_step(directory: Path, size: tuple[int, int], device: str, compiled: bool = False) -> Step:
    """torch's, with its compiler or without."""
    import torch
    import transformers
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                                          attn_implementation="sdpa").to(device).train()
    adam = torch.optim.AdamW(model.parameters(), RATE, fused=True, weight_decay=0.0)

    def loss_of(tokens: torch.Tensor) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss
    forward = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step(ids: np.ndarray) -> float:
        adam.zero_grad()
        loss = forward(torch.from_numpy(ids).long().to(device))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        adam.step()
        return float(loss.item() + 0 * norm.item())
    return step


def main() -> None:
    """Says the first losses, then times steps as it is asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("side", choices=("ours", "torch", "torch.compile"))
    parser.add_argument("directory", type=Path, help="of the model")
    for name in ("rows", "tokens"): parser.add_argument(name, type=int, help="of a step")
    parser.add_argument("device")
    given = parser.parse_args()
    end_with_parent()
    who, size, device = given.side, (given.rows, given.tokens), given.device
    if who == "ours": step = ours(given.directory, size, device)
    else: step = torch_step(given.directory, size, device, who == "torch.compile")
    vocabulary = json.loads((given.directory / "config.json").read_text())["vocab_size"]
    random = np.random.default_rng(0)
    batches = [random.integers(3, vocabulary, size).astype(np.int32) for _ in range(FIRST)]
    print(json.dumps({"logits": {who: [step(ids) for ids in batches]}, "notes": {}}), flush=True)

    def steps(count: int) -> None:
        for i in range(count): step(batches[i % FIRST])
    gpu = Telemetry(0) if device.lower().startswith("cuda") else None
    for line in sys.stdin:
        seconds, joules = measure(steps, int(line), gpu)
        print(json.dumps({"seconds": {who: seconds}, "joules": {who: joules}}), flush=True)


if __name__ == "__main__": main()
