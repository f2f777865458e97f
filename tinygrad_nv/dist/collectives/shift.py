"""`shift`: every rank sends to the one behind it and receives from the one before, in a circle.

Protocol: on GPUs a send and a receive of NCCL are one group. On CPUs one kernel sends and receives. A send
may end only when it is received, so ranks that send upwards send first and the others receive first: of any
circle of ranks some are of each kind.
"""
from __future__ import annotations

from math import prod

from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv.dist.collectives.device import on_device, serves
from tinygrad_nv.dist.collectives.functions import extents, require_cpu, title
from tinygrad_nv.dist.collectives.kernel import Collective
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.transports.nccl import CollectiveCall
from tinygrad_nv.patterns.named import call
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.runtime.note import Note

# a SEND reads `in`, a RECV writes `out`
TEXT = """typedef unsigned char u8; typedef unsigned long long u;
typedef int (*function)(u, const u *, void *, const void *);
void collective_shift(u8 *out, const u8 *in, const u *first, const u *second, const u8 *after) {
  ((function)first[0])(first[1], first + 2, out, in);
  ((function)second[0])(second[1], second + 2, out, in);
}
"""


def shift(x: Tensor, group: Group, by: int = 1, name: str = "", after: Tensor | None = None) -> Tensor:
    """Returns what rank `r - by` of the group has, on each rank r, in a circle. Its gradient is shifted back.
    It runs after `after` is computed."""
    if group.size == 1 or by % group.size == 0: return x
    shape, told = extents(x), title(f"shift by {by}", group, name)

    def back(grad: UOp, _: UOp) -> tuple[UOp | None, ...]:
        return shift(Tensor(grad), group, -by, name=f"gradient of {name}").uop, None, None, None
    if serves(x.device):
        calls = CollectiveCall("shift", prod(shape), x.dtype, peer=by % group.size, name=name)
        behind = [] if after is None else [after.contiguous()]
        return on_device(group, calls, shape, x.dtype, x.contiguous(), told, back, *behind)
    require_cpu("shift", x, "a tensor on a GPU or the CPU")
    to, source = (group.rank + by) % group.size, (group.rank - by) % group.size
    sends, receives = (group.descriptor(kind, prod(shape), x.dtype, peer=peer, name=name)
                       for kind, peer in (("send", to), ("recv", source)))
    order = (sends, receives) if to > group.rank else (receives, sends)
    what = Collective("shift", shape, x.dtype, 2 * prod(shape) * x.dtype.itemsize, told, group.name)
    first = order[0] if after is None else after.contiguous()
    return call(what, _call, x.contiguous(), *order, first, grad=back)[0]


def _call(what: Collective, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    made = program("collective_shift", TEXT, str(x.device), [Output(what.shape, what.dtype)],
                   [x.uop, *(each.uop for each in more)], nbytes=what.nbytes, note=Note(what.kind, what.name))
    return (Tensor(made[0]),)
