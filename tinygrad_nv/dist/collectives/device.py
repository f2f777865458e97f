"""A collective in the graph of a GPU: a program that calls NCCL instead of launching a kernel.

Protocol: `on_device(group, order, …)` adds the program; its launch configuration has a `DeviceCall`. When the
program runs, or becomes part of a CUDA graph, `_make_call` finds the group's communicator and makes the
driver's work (runtime/library_call.py). To tinygrad it is a kernel that reads and writes buffers: eager, in a
TinyJit's graph and in captured steps it is ordered like one, and independent kernels may run beside it.

A group has one communicator for each device of this rank. It is made when a graph first needs it; all ranks
of the group build the same graph, so all of them connect then. `prepare` makes it at once, and what kernels
over the memory of peers need, for steps that were captured by another process.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.dist.collectives import peer_ranks
from tinygrad_nv.dist.group import Group, world
from tinygrad_nv.dist.transports import nccl
from tinygrad_nv.dist.transports.nccl import CollectiveCall, Communicator
from tinygrad_nv.errors import DistError
from tinygrad_nv.patterns import named
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.runtime import library_call
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.library_call import LibraryCall
from tinygrad_nv.runtime.note import Communicates, Note
from tinygrad_nv.tile.launch import LaunchConfig

KINDS = ("CUDA", "EMU")
CALL_BYTES = 128    # of a call as text, that ranks compare


@dataclass(frozen=True)
class DeviceCall:
    """A collective of the group with this key."""
    group: str
    order: CollectiveCall


def serves(device: object) -> bool:
    """Whether collectives of tensors there are NCCL's."""
    return isinstance(device, str) and device.partition(":")[0] in KINDS


def communicator(group: Group, device: str) -> Communicator:
    """The group's for a device of this rank; all ranks of the group ask for theirs. Raises `DistError`."""
    name = Device.canonicalize(device)
    if (found := group.communicators.get(name)) is not None: return found
    opened = _device(name)
    made = nccl.connect(opened.driver, group.rank, group.members, lambda own: _share(group, own),
                        group.struct.timeout_ns / 1e9)
    _keep(group, opened, made)
    return made


def _keep(group: Group, device: DrivenDevice, made: Communicator) -> None:
    """Has the device ask the communicator for errors, until the group is closed."""
    made.agree = lambda order: _agree(group, order)
    group.communicators[device.device] = made
    device.checks.append(made.finish)
    group.closing.append(partial(device.checks.remove, made.finish))


def _device(name: str) -> DrivenDevice:
    """The device of this rank. Raises `DistError`."""
    opened = Device[Device.canonicalize(name)]
    if not isinstance(opened, DrivenDevice):
        raise DistError(f"a collective on {name}, which is tinygrad's own device", "a device of tinygrad_nv",
                        "pip install cuda-python")
    return opened


def _share(group: Group, own: bytes) -> bytes:
    """Returns the bytes of the first rank."""
    said = np.frombuffer(own, np.uint8)
    heard = np.empty_like(said)
    group.run("broadcast", heard, said, said.size, dtypes.uint8, name="NCCL's unique id")
    return heard.tobytes()


def anchor(group: Group, device: str) -> Tensor:
    """Returns the input of a recv: a byte of the device."""
    if (name := Device.canonicalize(device)) not in group.anchors:
        group.anchors[name] = Tensor.zeros(1, dtype=dtypes.uint8, device=name).contiguous().realize()
    return group.anchors[name]


@dataclass(frozen=True)
class DeviceCollective(Communicates):
    """A collective among `ranks` that makes a result of this shape and dtype; `name` is for people.
    `planned`: no other rank is there, and it does not run."""
    call: DeviceCall
    ranks: int
    shape: tuple[int, ...]
    dtype: DType
    name: str
    planned: bool = False

    @property
    def traffic(self) -> tuple[str, int, int]:
        order = self.call.order
        return order.kind, order.nbytes, self.ranks


def split(parent: Group, child: Group, device: str) -> None:
    """Gives a group its communicator by parting that of another, which takes less time than to connect anew:
    all ranks of `parent` call it, each with the group of its part, which has all of its ranks in common."""
    made = communicator(parent, device).split(min(child.members), child.rank, child.members)
    _keep(child, _device(device), made)


def _agree(group: Group, order: CollectiveCall) -> None:
    """Raises `DistError` where other ranks of a group call another collective."""
    own = str(order).encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0")
    every = np.empty(CALL_BYTES * group.size, np.uint8)
    group.run("all_gather", every, np.frombuffer(own, np.uint8), CALL_BYTES, dtypes.uint8,
              name="what ranks call")
    said = [bytes(every[CALL_BYTES * r:CALL_BYTES * (r + 1)]).rstrip(b"\0").decode(errors="replace")
            for r in range(group.size)]
    for r, theirs in enumerate(said):
        if theirs == said[group.rank]: continue
        here, there = group.members[group.rank], group.members[r]
        raise DistError(f"rank {here} calls {order}, rank {there} calls {theirs}",
                        "the same collectives in the same order on all ranks",
                        "see what differs between the programs of these ranks")


def on_device(group: Group, order: CollectiveCall, shape: tuple[int, ...], dtype: DType, x: Tensor, name: str,
              grad: Callable[..., tuple[UOp | None, ...]] | None, *after: Tensor) -> Tensor:
    """The collective on x, which a recv does not read, when `after` are computed."""
    ready(group, order, str(x.device))
    what = DeviceCollective(DeviceCall(group.key, order), group.size, shape, dtype, name, group.planned)

    def of_x(*given: UOp) -> tuple[UOp | None, ...]:
        assert grad is not None
        return grad(*given)[0], *(None for _ in after)  # the others are of what a CPU's kernel takes besides
    return named.call(what, _body, x, *after, grad=of_x if grad is not None else None)[0]


def ready(group: Group, order: CollectiveCall, device: str) -> None:
    """The group can have the collective on a device of this rank. Raises `DistError`."""
    if order.op not in nccl.OPS:
        raise DistError(f"{order.kind} with {order.op!r}", f"one of {', '.join(nccl.OPS)}")
    if not 0 <= order.peer < group.size:
        raise DistError(f"{order.kind} with rank {order.peer}", f"0 to {group.size - 1}")
    nccl.carrier_of(order)
    if group.planned: return
    if order.kind == "all_reduce": prepare(group, device)
    else: communicator(group, device)


def prepare(group: Group, device: str) -> None:
    """The group can load steps with sums on a device of this rank: all ranks of the group call it, before.
    Raises `DistError`."""
    communicator(group, device)
    peer_ranks.open_workspaces(group, _device(device))


def _body(what: DeviceCollective, *given: Tensor) -> tuple[Tensor, ...]:
    return (Tensor(_program(what, *(each.uop for each in given))),)


def _lower(what: DeviceCollective, _: object, *given: UOp) -> tuple[UOp, ...]:
    """In a rewrite: the result is made where it is wanted, without a copy."""
    return (_program(what, *given),)


def _program(what: DeviceCollective, *given: UOp) -> UOp:
    order, why = what.call.order, ""
    if order.kind == "all_reduce" and not what.planned:
        by_peers = peer_ranks.lower(what.call.group, order, what.shape, what.dtype, given[0], what.name)
        if not isinstance(by_peers, str): return by_peers[0]
        why = f"; NCCL: {by_peers}"
    made, = program(order.kind, f"// {what}", str(given[0].device), [Output(what.shape, what.dtype)], given,
                    binary=b"call of a library", nbytes=2 * order.nbytes,
                    note=Note(order.kind, what.name + why, what), launch=LaunchConfig(call=what.call))
    return made


def _make_call(call: DeviceCall, device: str, buffers: Sequence[int]) -> LibraryCall:
    found = [group for group in world().groups if group.key == call.group]
    if not found: raise DistError(f"{call.order} of the group {call.group}", "a group of this process")
    out, given, *_ = buffers
    return communicator(found[0], device).call(call.order, given, out)


library_call.register(DeviceCall, _make_call)
named.lower(DeviceCollective, "collectives", _lower)
