"""Why no template has a matmul on a GPU, in words for a reader."""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.tile.gemm.analytic import analytic
from tinygrad_nv.tile.gemm.candidates import starts
from tinygrad_nv.tile.gemm.schedules import Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


def why_not(spec: GemmSpec, gpu: GPU) -> str:
    """Returns what each template says of the schedule it likes best; "" where one takes it."""
    if analytic(spec, gpu.arch) is not None: return ""
    if gpu.arch not in SMEM_BYTES: return TABLE.problems(spec, Gemv(), gpu)[0]
    said: dict[str, Sequence[str]] = {}
    for s in (*starts(spec, gpu), Gemv()):  # gemv has none for many rows
        found = TABLE.problems(spec, s, gpu)
        if s.template not in said or len(found) < len(said[s.template]): said[s.template] = found
    return "; ".join(f"{template}: {', '.join(found)}" for template, found in said.items())
