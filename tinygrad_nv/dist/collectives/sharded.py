"""Reductions over the devices of one process: what tinygrad makes an ALLREDUCE of (`Tensor.shard`).

Protocol. `rewrite` takes ALLREDUCEs before tinygrad expands these into copies and additions. On GPUs that
address each other's memory, small sums are kernels over that, a program of each GPU (peer_memory.py). The
others become CUSTOM_FUNCTION nodes, and `execute` runs one on all devices at once: on CPUs C adds up the
buffers of all devices in their order, 16-bit floats in float32 with one rounding; on GPUs NCCL does, or what
stands for it on emulated ones (transports/nccl.py). Devices may be cut into groups that reduce apart
(sharding.py), which the node's name says, with the reason of NCCL behind it:
`nv_allreduce:ADD:0,1|2,3#NCCL: …`.

What is not ours stays tinygrad's: GPUs where NCCL is not installed, other reductions than sums and maxima,
dtypes that carry no collective, a result on other devices than the operand's. A TinyJit runs these nodes, and
programs of several devices, between its graphs.
"""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from tinygrad.device import Buffer
from tinygrad.dtype import dtypes
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.dist.transports.library import MOST_RANKS, OPS, TYPES, library
from tinygrad_nv.errors import DistError
from tinygrad_nv.patterns.program import Output, storage
from tinygrad_nv.patterns.rewriting import rebuilt, write_through

NAME = "nv_allreduce"
NAMES = {Ops.ADD: "sum", Ops.MAX: "max"}
Groups = tuple[tuple[int, ...], ...]
# of each device kind: reduces `ins` into `outs`, buffers of the devices of one group
Reduce = Callable[[Sequence[Buffer], Sequence[Buffer], str], None]


def rewrite(sink: UOp) -> UOp:
    """The graph with a call of ours for each ALLREDUCE that can be one."""
    nodes = tuple(sink.toposort(enter_calls=False))
    if not any(node.op is Ops.ALLREDUCE and _is_ours(node) for node in nodes): return sink

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        if node.op is not Ops.ALLREDUCE or not _is_ours(node): return None
        return reduce_sharded(new(node.src[0]), node.arg[0])
    return write_through(rebuilt(nodes, change))


def reduce_sharded(x: UOp, op: Ops, groups: Groups = ()) -> UOp:
    """`x`, which is on several devices, reduced over all of them, or over each of these groups of their
    numbers."""
    register()
    devices, shape = x.device, x.shape
    whole, apart = x.pad_to(x.max_shape).contiguous(), groups or (range(len(devices)),)
    why = ""
    if devices[0].partition(":")[0] != "CPU":
        from tinygrad_nv.dist.collectives import peer_memory  # templates are loaded only where they are used
        made = peer_memory.sum_over(whole, NAMES[op], apart)
        if isinstance(made, UOp): return made.shrink_to(shape)
        why = f"#NCCL: {made}"
    told = "|".join(",".join(map(str, group)) for group in apart)
    out = storage(Output(whole.shape, x.dtype), devices, tensor_level=not hooks.rewriting())
    body = UOp(Ops.CUSTOM_FUNCTION, arg=f"{NAME}:{op.name}:{told}{why}")
    return out.after(body.call(out, whole)).shrink_to(shape)


def can_reduce(x: UOp, op: Ops) -> bool:
    """Whether `reduce_sharded` takes this operand."""
    devices = x.device
    kinds = {each.partition(":")[0] for each in devices} if isinstance(devices, tuple) else set()
    if len(kinds) != 1 or not kinds <= reducers.keys() or op not in NAMES or len(devices) > MOST_RANKS:
        return False
    if kinds == {"CUDA"} and not _has_nccl(): return False
    # NCCL adds no 16-bit integers
    added = set(TYPES) if kinds == {"CPU"} else set(TYPES) - {dtypes.int16, dtypes.uint16}
    return x.dtype in added or x.dtype == dtypes.bool


@functools.cache
def _has_nccl() -> bool:
    """Whether NCCL can be loaded: without it tinygrad reduces."""
    from tinygrad_nv.dist.transports.nccl_api import real
    try: real()
    except DistError: return False
    return True


def _is_ours(node: UOp) -> bool:
    op, devices = node.arg
    return node.src[0].device == devices and can_reduce(node.src[0], op)


def register() -> None:
    """Makes tinygrad run the nodes. Done with the first of them, so that others pay nothing."""
    if not hooks.has_custom_function(NAME):
        hooks.add_custom_function(NAME, execute, lambda call: ((0,), (1,)))


# **** execution ****

def execute(ctx: realize.ExecContext, call: UOp, ast: UOp) -> list[float | None]:
    """Runs a node, as tinygrad's executors do."""
    _, op, told = ast.arg.partition("#")[0].split(":")
    out, given = (_buffers(each) for each in realize.resolve_params(call, ctx.input_uops))
    for group in ([int(number) for number in part.split(",")] for part in told.split("|")):
        reduce = reducers[out[0].device.partition(":")[0]]
        reduce([out[i] for i in group], [given[i] for i in group], NAMES[Ops[op]])
    return []


def _buffers(x: UOp) -> list[Buffer]:
    buffer: Any = x.buffer
    return [each.ensure_allocated() for each in buffer.bufs]


def _on_cpus(outs: Sequence[Buffer], ins: Sequence[Buffer], op: str) -> None:
    addresses = [_address(each) for each in ins]
    dtype = ins[0].dtype if ins[0].dtype != dtypes.bool else dtypes.uint8
    first, *others = (_address(each) for each in outs)
    given = (ctypes.c_void_p * len(addresses))(*addresses)
    library().c.reduce(ctypes.c_void_p(first), given, *map(ctypes.c_uint64, (
        len(addresses), ins[0].size, TYPES.index(dtype), OPS.index(op))))
    for other in others: ctypes.memmove(other, first, ins[0].nbytes)


def _address(buffer: Buffer) -> int:
    """Returns where a buffer of a CPU lies, once its device has done what was given to it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer.as_memoryview(force_zero_copy=True)))


def _on_gpus(outs: Sequence[Buffer], ins: Sequence[Buffer], op: str) -> None:
    from tinygrad_nv.dist.transports import nccl  # NCCL's names are loaded only where it is used
    nccl.reduce(outs, ins, op)


reducers: dict[str, Reduce] = {"CPU": _on_cpus, "CUDA": _on_gpus, "EMU": _on_gpus}
