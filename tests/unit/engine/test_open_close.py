"""Opening and closing a model keeps nothing of it."""
from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tinygrad_nv.cli import DEFAULT_MODEL

# Prints, after each of a few models has been opened, asked and closed: resident bytes, the number of live
# buffers and the bytes of the allocated ones, bytes of freed buffers that tinygrad keeps, references to
# tensors, and objects that the garbage collector knows.
SCRIPT = """
import gc, json, sys
from dataclasses import replace
from pathlib import Path
from tinygrad import Device
from tinygrad.device import Buffer
from tinygrad.tensor import all_tensors
from tinygrad_nv import LLM
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured

def cycle(pages):
    llm = LLM(DEFAULT_MODEL, max_num_seqs=4, num_pages=pages, device="CPU", **json.loads(sys.argv[1]))
    free = SamplingParams(temperature=0, max_tokens=4)
    # one after the other: which prompts meet in a step, and so its buffers, is otherwise a matter of time
    llm.generate(["Once"], [free])
    llm.generate(["x"], [replace(free, structured_outputs=Structured(choice=["yes"]))])
    llm.close()

def left():
    gc.collect()
    live = [each for each in gc.get_objects() if type(each) is Buffer]
    kept = Device["CPU"].allocator.cache
    return {"resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4096, "buffers": len(live),
            "allocated": sum(each.nbytes for each in live if each.is_allocated() and each._base is None),
            "kept": sum(size * len(freed) for (size, _), freed in kept.items()),
            "tensors": len(all_tensors), "objects": len(gc.get_objects())}

for pages in [int(each) for each in sys.argv[2:]]:
    cycle(pages)
    print(json.dumps(left()), flush=True)
"""
MODEL_BYTES = 2_200_000     # of the model in the box, at least


def left_after(pages: list[int], **options: object) -> list[dict[str, int]]:
    """What is left after each cycle, in a process of its own."""
    arguments = [sys.executable, "-c", SCRIPT, json.dumps(options), *map(str, pages)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_nothing_left(after: list[dict[str, int]]) -> None:
    """From the third cycle on: no buffer and no reference more, at most 20 objects a cycle, and at most 1 MB
    a cycle resident (measured: 0.1, and 5.7 while weights and the tokenizer's table were kept)."""
    first, last, cycles = after[2], after[-1], len(after) - 3
    for name in ("buffers", "allocated", "kept", "tensors"): assert last[name] <= first[name], (name, after)
    assert last["allocated"] < 100_000, "some scalars"
    assert last["objects"] - first["objects"] <= 20 * cycles, after
    assert last["resident"] - first["resident"] <= 1_000_000 * cycles, after


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_model_that_is_closed_leaves_nothing():
    """Nor do pages of other sizes: tinygrad keeps freed buffers for others of the same size."""
    after = left_after([64, 64, 64, 64, 64, 64, 80])
    require_nothing_left(after[:-1])
    assert after[-1]["kept"] < MODEL_BYTES / 2, after


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("speculative", ["ngram:4", f"draft:{DEFAULT_MODEL}:4"], ids=["ngram", "draft"])
def test_drafts_leave_nothing(speculative: str):
    """As without them."""
    require_nothing_left(left_after([64] * 8, speculative=speculative))
