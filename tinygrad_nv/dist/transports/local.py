"""Reductions over GPUs of this process, by NCCL (ncclCommInitAll).

Protocol: `reduce(outs, ins, op)` puts one all_reduce into the streams of all devices, in a group; it orders
with the devices' other work as kernels do. The communicators of a set of devices are made once.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import Device, dtypes
from tinygrad.device import Buffer

from tinygrad_nv.dist.transports import nccl
from tinygrad_nv.dist.transports.nccl import CollectiveCall, Communicator
from tinygrad_nv.errors import DistError
from tinygrad_nv.runtime.driven import DrivenDevice


def reduce(outs: Sequence[Buffer], ins: Sequence[Buffer], op: str) -> None:
    """The sum or the maximum of `ins` into each of `outs`, buffers of different GPUs."""
    found = communicators(tuple(each.device for each in outs))
    dtype = ins[0].dtype if ins[0].dtype != dtypes.bool else dtypes.uint8
    order = CollectiveCall("all_reduce", ins[0].size, dtype, op, name="shards")
    with nccl.grouped(found[0].nccl, found, str(order)):
        for comm, given, out in zip(found, ins, outs, strict=True):
            comm.driver.submit(comm.call(order, given.get_buf(given.device), out.get_buf(out.device)))


@functools.cache
def communicators(names: tuple[str, ...]) -> tuple[Communicator, ...]:
    """One for each of these devices. Raises `DistError`."""
    devices = [Device[name] for name in names]
    for name, each in zip(names, devices, strict=True):
        if not isinstance(each, DrivenDevice):
            raise DistError(f"a reduction over {name}, which is tinygrad's own device",
                            "devices of tinygrad_nv", "pip install cuda-python")
    made = nccl.connect_all([each.driver for each in devices],
                            [int(name.partition(":")[2] or 0) for name in names])
    for each, comm in zip(devices, made, strict=True): each.checks.append(comm.finish)
    return tuple(made)
