"""FlashAttention-3 beside ours, of timing/hardware.py: predicted from its sources as they are now
(github.com/Dao-AILab/flash-attention, hopper/, with its CUTLASS), which is what ran on the H100. """
from __future__ import annotations

from pathlib import Path

from bench.gpu.attention import Forward
from bench.timing.programs import launches, program
from bench.timing.rows import Checkout
from bench.timing.rows_attention import FLAGS
from tinygrad_nv.ptx.timing.model import Timing

SOURCE = Path(__file__).with_name("fa3_hardware.cu")
WRAPPER = Path(__file__).parents[1] / "gpu"     # fa3.cu lies there


def predict(workload: Forward, there: Checkout) -> Timing:
    """Returns the prediction of its kernel on a workload of bench/gpu/attention.py."""
    made = program(f"fa3_hardware_{workload.d}", SOURCE.read_text(),
                   (there.folder / "hopper", WRAPPER, *there.include),
                   [*FLAGS, f"-DHEAD_DIM={workload.d}"])
    found = launches(made, workload.batch, workload.heads, workload.keys, workload.tokens,
                     int(workload.causal))
    return max(found, key=lambda one: one.seconds)
