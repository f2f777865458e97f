"""The templates of a matmul with a 2:4 sparse matrix on GPUs: wgmma/ (sm_90a), mma/."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.sparse_gemm.mma import plan as mma
from tinygrad_nv.tile.sparse_gemm.schedules import SparseMma, SparseWgmma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.sparse_gemm.wgmma import plan as wgmma
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build, legality

C = TypeVar("C", bound=Schedule)


def _whole(own: Callable[[SparseGemmSpec, C, str], Sequence[str]]
           ) -> Callable[[SparseGemmSpec, C, GPU], list[str]]:
    """Why a template cannot have a schedule; empty when it can."""
    def find_problems(spec: SparseGemmSpec, s: C, arch: str) -> tuple[str, ...]:
        return (*epilogue.problems(spec.gemm.epilogue, arch), *own(spec, s, arch))
    return legality(find_problems)


WGMMA = Template("sparse_wgmma", SparseGemmSpec, SparseWgmma, _whole(wgmma.problems), wgmma.candidates,
                 lazy_build("tinygrad_nv.tile.sparse_gemm.wgmma.kernel", "sparse_wgmma"))
MMA = Template("sparse_mma", SparseGemmSpec, SparseMma, _whole(mma.problems), mma.candidates,
               lazy_build("tinygrad_nv.tile.sparse_gemm.mma.kernel", "sparse_mma"))
FAMILY = Family("sparse_gemm", (WGMMA, MMA), choose)
