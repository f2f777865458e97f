"""One side of bench/gpu/run.py --part decode: decode steps of a LLaMA, in a process of its own.

    python bench/gpu/decode_side.py tinygrad|torch '{"hidden_size": …}' BATCH CONTEXT DEVICE

Protocol: the first line of standard output says what the step gives: {"logits": {name: […]}} of the first
sequence, some of them, and {"notes": {name: why it is not there}}. Then each line of standard input, a
number of steps, is answered by {"seconds": {name: of one step}, "joules": {name: of one step}}; joules are of
the whole board, None where NVML does not tell. A step takes a token of each sequence at position CONTEXT,
appends to the cache, gives logits and the greedy next token, which the next step takes; the position stays,
so that every step does the same work.

`tinygrad` is models/llama.py, with tinygrad_nv or, with NV=0, without. `torch` is the same network in torch:
"torch" replays a CUDA graph of eager kernels, "torch.compile" one of compiled ones.

Weights are the same numbers everywhere: element i of parameter number p is
(((i + 7919·p)·2654435761 mod 2^32) >> 16) / 65536 - 1/2, times `SCALE`; weights of norms are 1. Where the
config has "weights", int4 or fp8, those of layers' matrices are rounded to codes times `STEP`: "tinygrad" has
codes and scales, torch the same numbers in bfloat16.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import end_with_parent
from tinygrad_nv.models.config import ModelConfig, parse_config
from tinygrad_nv.runtime.observe.telemetry import Telemetry

FACTOR, STRIDE, SCALE = 2654435761, 7919, 0.05
SHOWN = 32      # logits that are compared
STEP = {"int4": 2.0**-8, "fp8": 2.0**-13}     # the scale of codes: `SCALE` / 2 is 6.4 and 205 of it
Steps = dict[str, Callable[[int], None]]  # name: runs so many steps and waits for them
Said = dict[str, Any]
CACHE_SEED = 1000   # parameter number of the first layer's cache


# **** tinygrad ****

def pack(values: Any, weights: str) -> Any:
    """Returns float32 values [n, k] as a layer's matrix of codes and scales."""
    from tinygrad import Tensor, dtypes

    from bench.gpu.quant_workloads import TYPES
    from tinygrad_nv import functional as F
    from tinygrad_nv.quant.activations import QWeight, e4m3_bits, to_e4m3
    from tinygrad_nv.quant.tensor import QTensor
    from tinygrad_nv.quant.types import buffers
    shape, codes = (int(values.shape[0]), int(values.shape[1])), values / STEP[weights]
    if weights == "fp8": codes = e4m3_bits(to_e4m3(codes))
    else:
        codes = (codes.round() + 8).cast(dtypes.uint8)
        codes = codes[:, ::2] + codes[:, 1::2] * 16
    blocks = buffers(TYPES[weights], *shape)["scales"].shape
    scales = Tensor.full(blocks, STEP[weights], dtype=dtypes.bfloat16, device=values.device).contiguous()
    made = {"codes": codes.contiguous().realize(), "scales": scales.realize()}
    return QWeight(F.prepare_matrix(QTensor(TYPES[weights], shape, made)))


def tinygrad_steps(config: ModelConfig, batch: int, context: int, device: str,
                   weights: str) -> tuple[Steps, Said]:
    """models/llama.py on a device."""
    from tinygrad import Device, Tensor, TinyJit, Variable, dtypes

    from tinygrad_nv.models.dense import DenseKVCache
    from tinygrad_nv.models.llama import Llama
    from tinygrad_nv.models.quantised.layers import projections
    from tinygrad_nv.models.weights import slots

    def fill(shape: tuple[int, ...], number: int) -> Tensor:
        count = 1
        for extent in shape: count *= extent
        i = Tensor.arange(count, dtype=dtypes.uint32).to(device) + STRIDE * number
        return (((i * FACTOR).rshift(16).cast(dtypes.float32) / 65536 - 0.5) * SCALE).reshape(shape)

    capacity = context + 1
    model = Llama(config, dtypes.bfloat16, device, capacity)
    seen: dict[int, Tensor] = {id(slot.tensor): slot.tensor for slot in slots(model).values()}
    linears = {id(each.linear.weight): each.linear for layer in range(config.num_layers)
               for each in projections(model, layer)}
    for number, tensor in enumerate(seen.values()):
        shape = tuple(int(s) for s in tensor.shape)
        if weights and id(tensor) in linears:
            linears[id(tensor)].parts = pack(fill(shape, number), weights),
            continue
        made = Tensor.ones(*shape, device=device) if len(shape) == 1 else fill(shape, number)
        tensor.assign(made.cast(dtypes.bfloat16)).realize()
    cache = DenseKVCache.create(config, capacity, dtypes.bfloat16, batch, device)
    for number, (keys, values) in enumerate(cache.layers):
        made = fill((2, *(int(s) for s in keys.shape)), CACHE_SEED + number).cast(dtypes.bfloat16)
        Tensor.realize(keys.assign(made[0]), values.assign(made[1]))
    token = Tensor([[7 + b] for b in range(batch)], dtype=dtypes.int32, device=device).contiguous().realize()
    logits = Tensor.zeros(batch, config.vocab_size, device=device).contiguous().realize()
    position = Variable("position", 0, capacity - 1).bind(context)

    @TinyJit
    def step(position: Any) -> None:
        found = model.step(token, position, cache)
        Tensor.realize(logits.assign(found),
                       token.assign(found.argmax(-1, keepdim=True).cast(dtypes.int32)))

    step(position)
    first = logits[0, :SHOWN].tolist()

    def steps(count: int) -> None:
        for _ in range(count): step(position)
        Device[device].synchronize()

    return {"tinygrad": steps}, {"logits": {"tinygrad": first}, "notes": {}}


# **** torch ****

def torch_steps(config: ModelConfig, batch: int, context: int, device: str,
                weights: str) -> tuple[Steps, Said]:
    """The same network in torch."""
    import torch

    from tinygrad_nv.models.rope import tables
    c, kind, F = config, torch.bfloat16, torch.nn.functional
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: list[tuple[int, ...]] = [(c.vocab_size, c.hidden_size), (c.hidden_size,)]
    if not c.tied: shapes.append((c.vocab_size, c.hidden_size))
    for _ in range(c.num_layers):
        shapes += [(c.hidden_size,), (c.hidden_size,), (q + 2 * kv, c.hidden_size), (c.hidden_size, q),
                   (2 * c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size)]

    def round_matrix(values: torch.Tensor) -> torch.Tensor:
        codes = values / STEP[weights]
        return (codes.round() if weights == "int4" else codes.to(torch.float8_e4m3fn).float()) * STEP[weights]

    def fill(shape: tuple[int, ...], number: int, in_layer: bool = False) -> torch.Tensor:
        if len(shape) == 1: return torch.ones(shape, dtype=kind, device=device)
        i = torch.arange(torch.Size(shape).numel(), device=device) + STRIDE * number
        values = ((((i * FACTOR) & 0xffffffff) >> 16).float() / 65536 - 0.5) * SCALE
        return (round_matrix(values) if in_layer and weights else values).to(kind).view(shape)

    first_of_layers = len(shapes) - 6 * c.num_layers
    embedding, norm, *rest = [fill(shape, number, number >= first_of_layers)
                              for number, shape in enumerate(shapes)]
    head = embedding if c.tied else rest.pop(0)
    layers = [rest[i:i + 6] for i in range(0, len(rest), 6)]
    caches = [fill((2, batch, c.num_kv_heads, context + 1, c.head_dim), CACHE_SEED + i)
              for i in range(c.num_layers)]
    rotations = tables(c.distinct_ropes[0], context + 1)
    cos, sin = (torch.tensor(t[context], device=device).to(kind) for t in rotations)
    token = torch.tensor([[7 + b] for b in range(batch)], device=device)
    logits = torch.zeros(batch, c.vocab_size, device=device)

    def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + c.norm_eps)).to(kind) * w

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def step() -> None:
        x = embedding[token[:, 0]]
        for (attention_norm, ff_norm, qkv, o, gate_up, down), cache in zip(layers, caches, strict=True):
            heads = rms_norm(x, attention_norm) @ qkv.T
            heads = heads.view(batch, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            a, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
            cache[0, :, :, context], cache[1, :, :, context] = rotate(k), v
            seen = F.scaled_dot_product_attention(rotate(a).unsqueeze(2), cache[0], cache[1],
                                                  enable_gqa=True)
            x = x + seen.reshape(batch, q) @ o.T
            gate, up = (rms_norm(x, ff_norm) @ gate_up.T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ down.T
        logits.copy_((rms_norm(x, norm) @ head.T).float())
        token.copy_(logits.argmax(-1, keepdim=True))

    made: Steps = {}
    said: Said = {"logits": {}, "notes": {}}
    start = token.clone()
    if device != "cpu": torch.cuda.empty_cache()  # other sides need the memory
    for name in ("torch",) if device == "cpu" else ("torch", "torch.compile"):
        token.copy_(start)
        try:
            run = step if name == "torch" else torch.compile(step, dynamic=False)
            with torch.no_grad(): run()
            said["logits"][name] = logits[0, :SHOWN].tolist()
            made[name] = _replays(run, device)
        except Exception as error:  # of the compiler: the other goes on
            if name == "torch": raise
            said["logits"].pop(name, None)
            said["notes"][name] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return made, said


def _replays(run: Callable[[], None], device: str) -> Callable[[int], None]:
    """So many steps, as replays of a CUDA graph where there is a GPU."""
    import torch
    if device == "cpu":
        def eager(count: int) -> None:
            with torch.no_grad():
                for _ in range(count): run()
        return eager
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        run()
        with torch.cuda.graph(graph): run()

    def replays(count: int) -> None:
        for _ in range(count): graph.replay()
        torch.cuda.synchronize()
    return replays


def main() -> None:
    """Says the first logits, then times steps as it is asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("side", choices=("tinygrad", "torch"))
    parser.add_argument("config", type=json.loads, help='the model\'s config.json, as text; also "weights"')
    for name in ("batch", "context"): parser.add_argument(name, type=int)
    parser.add_argument("device")
    given = parser.parse_args()
    end_with_parent()
    device, weights = given.device, given.config.pop("weights", "")
    made = tinygrad_steps if given.side == "tinygrad" else torch_steps
    steps, said = made(parse_config(given.config), given.batch, given.context, device, weights)
    for run in steps.values(): run(3)
    print(json.dumps(said), flush=True)
    gpu = Telemetry(0) if device.lower().startswith("cuda") else None
    for line in sys.stdin:
        found = {name: measure(run, int(line), gpu) for name, run in steps.items()}
        print(json.dumps({"seconds": {name: seconds for name, (seconds, _) in found.items()},
                          "joules": {name: joules for name, (_, joules) in found.items()}}), flush=True)


def measure(run: Callable[[int], None], count: int, gpu: Telemetry | None) -> tuple[float, float | None]:
    """Seconds and joules of a step, of `count` in a row."""
    with gpu.sample() if gpu is not None else nullcontext() as samples:
        begun = time.perf_counter()
        run(count)
        seconds = time.perf_counter() - begun
    joules = samples.joules if samples is not None else None
    return seconds / count, None if joules is None else joules / count


if __name__ == "__main__": main()
