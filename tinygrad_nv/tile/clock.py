"""The clock that times a matmul's kernel where there is a GPU: runtime/clock.py."""
from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.kernel import GemmKernel

if TYPE_CHECKING:
    from tinygrad_nv.ptx.assemble import Assembly


class Clock(Protocol):
    """A GPU that launches kernels. `clusters` are those that it has room for at once."""
    @property
    def clusters(self) -> Clusters: ...

    def seconds(self, kernel: GemmKernel, spec: GemmSpec, made: Assembly | None) -> float:
        """The median of some launches, of what is assembled if that is given."""
