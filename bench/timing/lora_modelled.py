"""Predicted cost of adapters on an H100: decode steps of LLaMA 3.1 8B in bfloat16 whose sequences have 8
different ones, beside those without. No GPU is needed; figures are modelled, not measured.

    python bench/timing/lora_modelled.py [--adapters 8] [--ranks 16] [--batches 8,16] [--context 1024]

Launches are those that models/llama.py lowers to on the emulated device, found by `explain`, as in
timing/rows_step.py; each spec is predicted once, then all of a step stand in a row with PDL. A step is one of
two layers, and the second layer as often as the model has more. Left out are some small kernels of tinygrad's
that sort rows by adapter, once a step.
"""
from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinygrad import Tensor, dtypes

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.decode import MODELS
from bench.timing.gate_cases import GPU_NAME
from bench.timing.rows import total_seconds
from bench.timing.rows_step import DEVICE, PAGE, time_launches
from tinygrad_nv.explain import explain
from tinygrad_nv.kvcache.store import LayerPages, PagedCache
from tinygrad_nv.models.config import parse_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.lora import ModelAdapters
from tinygrad_nv.models.paged import PagedBatch, SequenceGroup

MODEL = "Llama-3.1-8B"


def launches(layers: int, batch: int, context: int, adapters: int, rank: int) -> list[tuple[Any, Any]]:
    """Spec and schedule of each call of a step of so many layers. Weights and pages have no memory."""
    c, pages = replace(parse_config(MODELS[MODEL]), num_layers=layers), context // PAGE
    model = Llama(c, dtypes.bfloat16, DEVICE, context)
    slots = ModelAdapters(model, adapters, rank, dtypes.bfloat16) if adapters else None

    def empty(*shape: int, dtype: Any = dtypes.bfloat16) -> Tensor:
        return Tensor.empty(*shape, dtype=dtype, device=DEVICE)
    model.__dict__["rope_tables"] = (empty(context, c.head_dim // 2), empty(context, c.head_dim // 2)),
    stored = batch * pages, PAGE, c.num_kv_heads, c.head_dim
    cache = PagedCache(tuple(LayerPages(empty(*stored), empty(*stored)) for _ in range(layers)))
    group = SequenceGroup(1, empty(batch, pages, dtype=dtypes.int32), empty(batch, dtype=dtypes.int32))
    with nullcontext() if slots is None else slots.of_rows(empty(batch, dtype=dtypes.int32)):
        logits = model.step_paged(empty(batch, dtype=dtypes.int32), PagedBatch((group,), model.rope_tables),
                                  cache)
    found = explain(logits.argmax(-1).cast(dtypes.int32)).kernels
    return [(each.spec, each.schedule) for each in found if each.spec is not None]


@lru_cache
def step(batch: int, context: int, adapters: int = 0, rank: int = 16) -> tuple[float, float]:
    """Microseconds of a step, and of one of its layers."""
    one, two = (1e6 * total_seconds([each for call in launches(layers, batch, context, adapters, rank)
                                     for each in time_launches(*call)], pdl=True) for layers in (1, 2))
    return one + (parse_config(MODELS[MODEL]).num_layers - 1) * (two - one), two - one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    def numbers(text: str) -> list[int]: return [int(each) for each in text.split(",")]
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--ranks", type=numbers, default=[16])
    parser.add_argument("--batches", type=numbers, default=[8, 16])
    parser.add_argument("--context", type=int, default=1024)
    given = parser.parse_args()
    print(f"{MODEL} on {GPU_NAME}, modelled\n"
          "rank  sequences  layer without, with   step without, with   rates with / without")
    for rank in given.ranks:
        for batch in given.batches:
            base, own = step(batch, given.context), step(batch, given.context, given.adapters, rank)
            shown = [f"{base[i]:6.{i}f} us  {own[i]:6.{i}f} us" for i in (1, 0)]
            print(f"{rank:4}  {batch:9}  {'   '.join(shown)}   {base[0] / own[0]:.3f}", flush=True)


if __name__ == "__main__": main()
