"""How much longer a decode step's graph takes to schedule with the search for named functions, attention and
matmuls.

    python bench/cpu/match_time.py [--layers 32] [--repeat 9] [--dry]

A LLaMA of small dimensions and real depth on DEV=EMU; nothing runs. Each repetition schedules the same graph
anew (no schedule cache) by tinygrad alone and with the rewrites, one after the other. Three times: tinygrad's
scheduling without the rewrites, with them, and the rewrites alone. Kernels are made once, before: making one
belongs to compiling. Seconds are those of the processor; the ratios to the first do not change with a slower
machine.
"""
from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tinygrad import Tensor, UOp, Variable, dtypes
from tinygrad.helpers import Context
from tinygrad.schedule import create_linear_with_vars
from tinygrad.tensor import transform_to_call

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import each, save, spread, table
from tinygrad_nv import hooks
from tinygrad_nv.models.config import ModelConfig, RopeConfig
from tinygrad_nv.models.dense import DenseKVCache
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.patterns import registered
from tinygrad_nv.runtime.note import note_of


def decode(layers: int) -> Tensor:
    """The logits of one token at a bound position."""
    rope = RopeConfig("default", 10000.0, 16, 128)
    config = ModelConfig("LlamaForCausalLM", 256, 64, 128, layers, 4, 2, 16, 128, (rope,) * layers,
                         windows=(None,) * layers)
    model = Llama(config, dtypes.bfloat16, "EMU")
    cache = DenseKVCache.create(config, 128, dtypes.bfloat16, device="EMU")
    token = Tensor.empty(1, 1, dtype=dtypes.int32, device="EMU")
    return model.step(token, Variable("position", 0, 127).bind(5), cache)[0]


def time_schedule(tensor: Tensor) -> tuple[float, UOp]:
    """Seconds to schedule, and the schedule."""
    call = transform_to_call(UOp.sink(tensor.uop))[0]
    gc.collect()
    begun = time.process_time()
    linear, _ = create_linear_with_vars(call)
    return time.process_time() - begun, linear


def time_rewrite(rewrite: Callable[[UOp], UOp], seconds: list[float]) -> Callable[[UOp], UOp]:
    """A rewrite that notes how long it took."""
    def fn(sink: UOp) -> UOp:
        begun = time.process_time()
        made = rewrite(sink)
        seconds.append(time.process_time() - begun)
        return made
    return fn


def main() -> None:
    """Schedules the step again and again, and writes the result."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--layers", type=int, default=32, help="of the model (default 32)")
    parser.add_argument("--repeat", type=int, default=9, help="times each is scheduled (default 9)")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    os.environ["NV_GEMM"] = os.environ["NV_ATTENTION"] = "1"
    lists = tuple(list[float]() for _ in registered.REWRITES)
    attending = lists[[one.name for one in registered.REWRITES].index("attention")]
    registered.remove()
    for one, seconds in zip(registered.REWRITES, lists, strict=True):
        hooks.add_rewrite(one.name, time_rewrite(one.fn, seconds), *one.keys)
    tensor, alone, joined = decode(args.layers), list[float](), list[float]()
    with Context(SCACHE=0, CAPTURING=0, DEBUG=0):
        with hooks.disabled(): kernels = len(time_schedule(tensor)[1].src)
        _, linear = time_schedule(tensor)
        ours = sum(note_of(call.src[0]) is not None for call in linear.src)
        for each_s in lists: each_s.clear()
        for _ in each(range(args.repeat)):
            with hooks.disabled(): alone.append(time_schedule(tensor)[0])
            joined.append(time_schedule(tensor)[0])
    matching = [sum(each_s) for each_s in zip(*lists, strict=True)]
    share = [one / other for one, other in zip(matching, alone, strict=True)]
    whole = [one / other for one, other in zip(joined, alone, strict=True)]
    rows = [("tinygrad alone, s", f"{median(alone):.2f}", spread(alone), str(kernels)),
            ("with the rewrites, s", f"{median(joined):.2f}", spread(joined),
             f"{len(linear.src)}, {ours} ours"),
            ("the rewrites, s", f"{median(matching):.2f}", spread(matching), ""),
            ("of these attention, s", f"{median(attending):.2f}", spread(attending), ""),
            ("the rewrites / tinygrad alone", f"{median(share):.3f}", spread(share), ""),
            ("with / tinygrad alone", f"{median(whole):.3f}", spread(whole), "")]
    print(table((f"{args.layers} layers", "median", "spread", "kernels"), rows))
    record = {"layers": args.layers, "repeat": args.repeat, "kernels": kernels,
              "kernels_with": len(linear.src), "ours": ours, "alone_s": alone, "with_s": joined,
              "rewrite_s": matching,
              "attention_s": attending, "rewrite_share": median(share), "with_ratio": median(whole)}
    if not args.dry: save("match_time", record)


if __name__ == "__main__": main()
