"""Communicators of NCCL: one for a group of ranks and a device of this one.

Protocol: `connect(driver, rank, members, share, timeout_s)` connects to the other ranks; `share` carries the
unique id of the first rank to all. `Communicator.enqueue` puts one collective into a stream; `call` is the
same as work of the driver interface (runtime/library_call.py). Neither waits for the device. `check` raises
the errors that happened there: the device calls it when the host has waited for the device, and the watchdog
may call it at any time. After an error a communicator cannot be used; `abort`, which any thread may call,
ends its kernels that wait.

NCCL does not compare the calls of ranks: if they differ it waits for ever, or mixes their data. If `agree` is
set, it compares them before NCCL is called: each collective of a graph when the graph is made, an eager one
the first time.

Memory that a graph's collectives use is registered with NCCL for as long as the graph lives. NCCL carries no
16-bit integers: these are sent as bytes, and not added.

`reduce` is a sum or a maximum over GPUs of this process, without ranks.
"""
from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinygrad import Device, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from tinygrad_nv.dist.transports.library import count_bytes
from tinygrad_nv.dist.transports.nccl_api import (
    ALL_TO_ALL_VERSION,
    IN_PROGRESS,
    NCCL,
    OPS,
    SUCCESS,
    TYPES,
    Config,
    UniqueId,
    real,
)
from tinygrad_nv.errors import DistError
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.driver import Driver, Event
from tinygrad_nv.runtime.library_call import LibraryCall

if TYPE_CHECKING:
    from tinygrad_nv.dist.transports.nccl_emulated import EmulatedNCCL

TIMEOUT_S = 600.0   # of devices of one process
REDUCTIONS = ("all_reduce", "reduce_scatter")
LINES = {"all_reduce": "ncclAllReduce", "reduce_scatter": "ncclReduceScatter", "all_gather": "ncclAllGather",
         "broadcast": "ncclBroadcast"}


@dataclass(frozen=True)
class CollectiveCall:
    """A collective: `count` is of elements, all of them of all_reduce, broadcast, send and recv, those of one
    rank otherwise. `peer` is the root, the other rank of send and recv, or by how many ranks is shifted;
    `name` that of the tensor."""
    kind: str
    count: int
    dtype: DType
    op: str = "sum"
    peer: int = 0
    name: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of `count` elements."""
        return self.count * self.dtype.itemsize

    def __str__(self) -> str:
        peer = f", {'by' if self.kind == 'shift' else 'rank'} {self.peer}" if self.peer else ""
        how = (f", {self.op}" if self.op != "sum" else "") + peer
        return f"{self.kind} of {self.name or 'a tensor'}, {self.count} {self.dtype.name}{how}"


@dataclass(frozen=True)
class Last:
    """A collective that was given to a stream: its number, when (CLOCK_MONOTONIC), and an event after it if
    there is one."""
    number: int
    order: CollectiveCall
    since: float
    event: Event | None = None


_emulated: EmulatedNCCL | None = None


def library(driver: Driver) -> NCCL:
    """The NCCL of a device. Raises `DistError` where there is none."""
    global _emulated
    if not driver.emulated: return real()
    # numpy and the emulator are loaded only where they are used
    from tinygrad_nv.dist.transports.nccl_emulated import EmulatedNCCL
    if _emulated is None: _emulated = EmulatedNCCL()
    return NCCL(_emulated)


def carrier_of(order: CollectiveCall) -> tuple[int, int]:
    """NCCL's number of the type that carries a collective, and how many of it. Raises `DistError`."""
    if order.dtype in TYPES: return TYPES[order.dtype], order.count
    if order.kind in REDUCTIONS or order.dtype not in (dtypes.int16, dtypes.uint16):
        raise DistError(f"{order.kind} of {order.dtype.name}", f"one of {', '.join(t.name for t in TYPES)}",
                        "cast before, and back after")
    return TYPES[dtypes.uint8], order.nbytes


class Communicator:
    """A rank's end of a communicator. `members` are its ranks as messages name them."""

    def __init__(self, nccl: NCCL, handle: int, driver: Driver, rank: int, members: Sequence[int],
                 timeout_s: float) -> None:
        self.nccl, self.handle, self.driver = nccl, handle, driver
        self.rank, self.members, self.timeout_s = rank, tuple(members), timeout_s
        self.aborted, self.why = False, DistError("the communicator was given up")
        self.given: Last | None = None  # what it was given last, since the host waited
        self.latest: Last | None = None     # what it was ever given last
        self.numbers = itertools.count(1)
        # raises where other ranks call something else
        self.agree: Callable[[CollectiveCall], None] | None = None
        self.agreed = set[CollectiveCall]()
        self.registered: dict[tuple[int, int], weakref.ref[Registration]] = {}
        self.lock = threading.Lock()

    @property
    def size(self) -> int: return len(self.members)

    def __str__(self) -> str:
        return f"rank {self.members[self.rank]} of ranks {'-'.join(map(str, self.members))}"

    # **** collectives ****

    def enqueue(self, order: CollectiveCall, given: int, out: int, stream: int) -> None:
        """Puts a collective into a stream. Addresses of what is not there are 0. Raises `DistError`."""
        kind, count = carrier_of(order)
        self.begin(order)
        if order.kind in REDUCTIONS:
            self._call(LINES[order.kind], order, given, out, count, kind, OPS[order.op], self.handle, stream)
        elif order.kind == "all_gather":
            self._call(LINES[order.kind], order, given, out, count, kind, self.handle, stream)
        elif order.kind == "broadcast":
            self._call(LINES[order.kind], order, given, out, count, kind, order.peer, self.handle, stream)
        elif order.kind == "send":
            self._call("ncclSend", order, given, count, kind, order.peer, self.handle, stream)
        elif order.kind == "recv":
            self._call("ncclRecv", order, out, count, kind, order.peer, self.handle, stream)
        elif order.kind == "shift":     # a group: neither waits for the other
            with self.group(str(order)):
                for function, place, by in (("ncclSend", given, order.peer), ("ncclRecv", out, -order.peer)):
                    self.nccl.call(function, place, count, kind, (self.rank + by) % self.size, self.handle,
                                   stream, handle=self.handle)
        elif self.nccl.version >= ALL_TO_ALL_VERSION:
            self._call("ncclAlltoAll", order, given, out, count, kind, self.handle, stream)
        else:
            with self.group(str(order)):
                for r in range(self.size):
                    args = count, kind, r, self.handle, stream
                    self.nccl.call("ncclSend", given + r * order.nbytes, *args, handle=self.handle)
                    self.nccl.call("ncclRecv", out + r * order.nbytes, *args, handle=self.handle)

    def begin(self, order: CollectiveCall) -> None:
        """A collective of this rank's device begins, of NCCL or of a kernel. Raises `DistError`."""
        self.check()
        if self.agree is not None and order not in self.agreed: self.agree_on(order)
        self.note(order)

    def _call(self, function: str, order: CollectiveCall, *args: int) -> None:
        if self.nccl.call(function, *args, handle=self.handle) == IN_PROGRESS: self._finish(str(order))

    def group(self, doing: str) -> AbstractContextManager[None]:
        """A group: the calls inside are one."""
        return grouped(self.nccl, [self], doing)

    def _finish(self, doing: str) -> None:
        self.nccl.finish(self._state, self.handle, f"{self}: {doing}", self.timeout_s)

    def _state(self) -> int:
        """Its asynchronous error. Raises `DistError` when it was given up: it is not there then."""
        with self.lock:
            if self.aborted: raise self.why
            return self.nccl.async_error(self.handle)

    def call(self, order: CollectiveCall, given: int, out: int) -> LibraryCall:
        """The work that a collective is on these addresses. A send makes a byte, by which it is found in the
        graph, and a recv does not look at what it is given."""
        reads, writes = count_bytes(order.kind, order.nbytes, self.size)
        used = [(given, reads)] if reads else [], [(out, writes)] if writes else []
        made = 1 if order.kind == "send" else writes
        return LibraryCall(
            f"{order} among ranks {'-'.join(map(str, self.members))}", tuple(used[0]), ((out, made),),
            lambda stream: self.enqueue(order, given, out, stream),
            lambda: self._hold(order, (*used[0], *used[1])),
            lambda event, replay: self.note(order, event, replay))

    def _hold(self, order: CollectiveCall, used: Sequence[tuple[int, int]]) -> object:
        """Returns what a graph with this collective holds. Its calls come in its order, which all ranks must
        share: they say what they call, each time, while eager ones say so once."""
        if self.agree is not None: self.agree_on(order)
        return [self.registration(*each) for each in used]

    def agree_on(self, order: CollectiveCall) -> None:
        """Has the ranks compare what they call."""
        self.agreed.add(order)
        if self.agree is not None and order.kind not in ("send", "recv"): self.agree(order)

    def note(self, order: CollectiveCall, event: Event | None = None, new: bool = True) -> None:
        """Notes what the watchdog is told when it asks."""
        number = next(self.numbers) if new or self.given is None else self.given.number
        self.given = self.latest = Last(number, order, time.clock_gettime(time.CLOCK_MONOTONIC), event)

    @property
    def last(self) -> Last | None:
        """Collective that it was given last, None once that is done."""
        found = self.given
        if found is not None and found.event is not None and self.driver.has_passed(found.event): return None
        return found

    def registration(self, address: int, nbytes: int) -> Registration:
        """Memory that NCCL may use without copies of its own, while this is held."""
        with self.lock:
            known = self.registered.get((address, nbytes))
            if known is not None and (found := known()) is not None: return found
            made = Registration(self, address, nbytes)
            self.registered[address, nbytes] = weakref.ref(made)
            return made

    # **** errors ****

    def check(self) -> None:
        """Raises `DistError` if it has failed."""
        result = self._state()
        if result in (SUCCESS, IN_PROGRESS): return
        doing = f"#{self.given.number} {self.given.order}" if self.given else "between collectives"
        raise self.nccl.failure(f"{self}: {doing}", result, self.handle)

    def finish(self) -> None:
        """Notes that the host has waited for the device: raises what it failed in."""
        self.check()
        self.given = None

    def abort(self, why: DistError | None = None) -> None:
        """Ends what waits in its kernels, from another thread too."""
        with self.lock:
            if self.aborted: return
            # in this order: who sees the second raises the first
            self.why, self.aborted = why or self.why, True
        self.nccl.call("ncclCommAbort", self.handle)

    def close(self) -> None:
        """Gives it back once the device has done what it holds."""
        with self.lock:
            if self.aborted: return
            self.aborted = True
        if self.nccl.async_error(self.handle) != SUCCESS: self.nccl.call("ncclCommAbort", self.handle)
        else:
            with self.driver.inside():
                if self.nccl.call("ncclCommFinalize", self.handle) == IN_PROGRESS:
                    self.nccl.finish(lambda: self.nccl.async_error(self.handle), self.handle,
                                     f"{self}: the end", self.timeout_s)
                self.nccl.call("ncclCommDestroy", self.handle)

    # **** parts ****

    def split(self, color: int, key: int, members: Sequence[int]) -> Communicator:
        """All ranks call it: those of one color are a communicator of their own, in the order of keys, made
        from this one's connections. `members` are those of this rank's color."""
        handle, config = ctypes.c_void_p(), Config.make(split_share=True)
        with self.driver.inside():
            self.nccl.call("ncclCommSplit", self.handle, color, key, ctypes.byref(handle),
                           ctypes.byref(config), handle=self.handle)
            self._finish("a split")
            assert handle.value is not None
            rank = list(members).index(self.members[self.rank])
            made = Communicator(self.nccl, handle.value, self.driver, rank, members, self.timeout_s)
            made._finish("a split")
        return made


class Registration:
    """Memory that is registered with a communicator until this goes."""

    def __init__(self, to: Communicator, address: int, nbytes: int) -> None:
        handle = ctypes.c_void_p()
        to.nccl.call("ncclCommRegister", to.handle, address, nbytes, ctypes.byref(handle), handle=to.handle)
        self.end = weakref.finalize(self, _deregister, weakref.ref(to), handle)
        self.end.atexit = False


def _deregister(to: weakref.ref[Communicator], handle: ctypes.c_void_p) -> None:
    if (found := to()) is not None and not found.aborted and handle.value:
        found.nccl.call("ncclCommDeregister", found.handle, handle)


class grouped:
    """Calls inside are one, of several communicators too: none of them waits for another."""

    def __init__(self, nccl: NCCL, communicators: Sequence[Communicator], doing: str) -> None:
        self.nccl, self.communicators, self.doing = nccl, communicators, doing

    def __enter__(self) -> None: self.nccl.call("ncclGroupStart")

    def __exit__(self, kind: object, *_: object) -> None:
        result = self.nccl.call("ncclGroupEnd")
        if kind is None and result == IN_PROGRESS:
            for each in self.communicators: each._finish(self.doing)


BroadcastBytes = Callable[[bytes], bytes]   # (those of the first rank) -> the same on every rank


def connect(driver: Driver, rank: int, members: Sequence[int], share: BroadcastBytes,
            timeout_s: float) -> Communicator:
    """Returns this rank's communicator over the device of `driver`, once all ranks have come. Raises
    `DistError`."""
    nccl = library(driver)
    unique = UniqueId.from_buffer_copy(share(nccl.unique_id() if rank == 0 else bytes(128)))
    handle, config = ctypes.c_void_p(), Config.make()
    with driver.inside():
        nccl.call("ncclCommInitRankConfig", ctypes.byref(handle), len(members), unique, rank,
                  ctypes.byref(config))
        assert handle.value is not None
        made = Communicator(nccl, handle.value, driver, rank, members, timeout_s)
        try: made._finish("connecting to the other ranks")
        except DistError:
            made.abort()
            raise
    return made


def connect_all(drivers: Sequence[Driver], ordinals: Sequence[int]) -> list[Communicator]:
    """Communicators of devices of this process, one for each."""
    nccl = library(drivers[0])
    handles = (ctypes.c_void_p * len(drivers))()
    devices = drivers if drivers[0].emulated else (ctypes.c_int * len(drivers))(*ordinals)
    nccl.call("ncclCommInitAll", handles, len(drivers), devices)
    return [Communicator(nccl, handle, driver, i, range(len(drivers)), TIMEOUT_S)
            for i, (handle, driver) in enumerate(zip(handles, drivers, strict=True))]


def reduce(outs: Sequence[Buffer], ins: Sequence[Buffer], op: str) -> None:
    """Puts the sum or the maximum of `ins` into each of `outs`, buffers of different GPUs of this process:
    one all_reduce in the streams of all devices, in a group; it orders with the devices' other work as
    kernels do."""
    found = communicators(tuple(each.device for each in outs))
    dtype = ins[0].dtype if ins[0].dtype != dtypes.bool else dtypes.uint8
    order = CollectiveCall("all_reduce", ins[0].size, dtype, op, name="shards")
    with grouped(found[0].nccl, found, str(order)):
        for comm, given, out in zip(found, ins, outs, strict=True):
            comm.driver.submit(comm.call(order, given.get_buf(given.device), out.get_buf(out.device)))


@functools.cache
def communicators(names: tuple[str, ...]) -> tuple[Communicator, ...]:
    """Communicators of these devices, made once for a set (ncclCommInitAll). Raises `DistError`."""
    devices = [Device[name] for name in names]
    for name, each in zip(names, devices, strict=True):
        if not isinstance(each, DrivenDevice):
            raise DistError(f"a reduction over {name}, which is tinygrad's own device",
                            "devices of tinygrad_nv", "pip install cuda-python")
    made = connect_all([each.driver for each in devices],
                       [int(name.partition(":")[2] or 0) for name in names])
    for each, comm in zip(devices, made, strict=True): each.checks.append(comm.finish)
    return tuple(made)
