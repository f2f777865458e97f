"""Lists the collectives of a graph.

Protocol: `collectives_of(*tensors)` lists the collectives that realizing these tensors runs, on CPUs and on
GPUs.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.dist.collectives.device import DeviceCollective
from tinygrad_nv.dist.collectives.kernel import Collective
from tinygrad_nv.dist.collectives.peer_norm import ReduceNorm


def collectives_of(*tensors: Tensor) -> list[Collective]:
    """The collectives that these tensors depend on and that have not run yet, each once."""
    sink = UOp.sink(*(each.uop for each in tensors))
    named = (node.arg.aux for node in sink.toposort(enter_calls=False) if node.op is Ops.FUNCTION)
    return [_on_cpu(each) for each in named if isinstance(each, Collective | DeviceCollective | ReduceNorm)]


def _on_cpu(what: Collective | DeviceCollective | ReduceNorm) -> Collective:
    """A collective of a GPU as that of a CPU is written."""
    if isinstance(what, Collective): return what
    group, order = (what.group, what.order) if isinstance(what, ReduceNorm) else \
        (what.call.group, what.call.order)
    return Collective(order.kind, what.shape, what.dtype, 2 * order.nbytes, what.name,
                      group.partition("/")[0])
