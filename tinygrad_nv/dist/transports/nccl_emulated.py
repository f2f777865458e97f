"""NCCL's functions for emulated devices.

Protocol: `EmulatedNCCL` has NCCL's functions (nccl_api.py: FUNCTIONS), with their arguments, on memory of
emulated devices. A communicator belongs to the thread's current device when it is made, as with CUDA. Ranks
of several processes share memory as CPU ranks do (csrc/shared.c): the unique id is the path of the first
rank's memory. Ranks of one process (ncclCommInitAll) connect at the end of a group.

An emulated stream runs its work at once, so a call here has moved its bytes when it returns, where NCCL's
call returns before. Errors while bytes move (ranks that call different collectives, a rank that aborted)
become the communicator's asynchronous error, not the result of the call, as with NCCL.
"""
from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinygrad import dtypes

from tinygrad_nv.dist.transports.library import (
    ABORTED,
    KINDS,
    MISMATCH,
    MOST_RANKS,
    OK,
    OPS,
    Call,
    GroupStruct,
    count_bytes,
    library,
)
from tinygrad_nv.dist.transports.library import TYPES as ALL_TYPES
from tinygrad_nv.dist.transports.nccl_api import (
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    REMOTE_ERROR,
    SUCCESS,
    TYPES,
)
from tinygrad_nv.dist.transports.nccl_api import OPS as OP_NUMBERS
from tinygrad_nv.dist.transports.shared import SLOT_BYTES, group_bytes, map_memory, without_name
from tinygrad_nv.runtime.emulated.driver import CURRENT, EmulatedDriver

VERSION = 22800
WAIT_NS = 1 << 62   # as NCCL, it waits until it is aborted
WORDS = {SUCCESS: "no error", INVALID_ARGUMENT: "invalid argument", INVALID_USAGE: "invalid usage",
         REMOTE_ERROR: "remote process exited or there was a network error",
         IN_PROGRESS: "operation in progress"}
BYTE = TYPES[dtypes.uint8]
DTYPES = {number: dtype for dtype, number in TYPES.items()}
OP_NAMES = {number: name for name, number in OP_NUMBERS.items()}


@dataclass(eq=False)
class Communicator:
    """One rank of one. `structs` are csrc/group.h's, one for sends, which run beside what receives."""
    device: EmulatedDriver
    rank: int
    size: int
    clique: object = None           # of ranks of one process
    structs: tuple[GroupStruct, ...] = ()
    memory: mmap.mmap | None = None
    error: int = SUCCESS
    words: str = ""
    held: list[int] = field(default_factory=list)   # descriptors that others map

    def fail(self, error: int, words: str) -> None:
        """Keeps the first error."""
        if self.error in (SUCCESS, IN_PROGRESS): self.error, self.words = error, words


@dataclass(frozen=True)
class Queued:
    """A call in a group: addresses of 0 are of no memory."""
    to: Communicator
    kind: str
    given: int
    out: int
    count: int
    type: int
    op: int = 0
    peer: int = 0

    @property
    def text(self) -> str:
        return f"{self.kind} of {self.count} {DTYPES[self.type].name}"


class EmulatedNCCL:
    """The library."""

    def __init__(self) -> None:
        self.communicators: dict[int, Communicator] = {}
        self.numbers = itertools.count(1)
        self.own = threading.local()    # depth and queue of a group
        self.served: dict[str, int] = {}    # descriptors of memory that ranks connect by
        self.last = b""

    # **** communicators ****

    def ncclGetVersion(self, version: Any) -> int:
        version._obj.value = VERSION
        return SUCCESS

    def ncclGetErrorString(self, result: int) -> bytes:
        return WORDS.get(result, "unknown result code").encode()

    def ncclGetLastError(self, comm: int) -> bytes:
        found = self.communicators.get(comm)
        return found.words.encode() if found is not None else self.last

    def ncclGetUniqueId(self, made: Any) -> int:
        made = made._obj
        descriptor, path = without_name(group_bytes(MOST_RANKS))
        self.served[path] = descriptor
        ctypes.memset(ctypes.byref(made), 0, ctypes.sizeof(made))
        ctypes.memmove(ctypes.byref(made), path.encode(), len(path))
        return SUCCESS

    def ncclCommInitRankConfig(self, comm: Any, size: int, unique: Any, rank: int, config: Any) -> int:
        made = Communicator(CURRENT.device, rank, size, error=IN_PROGRESS)
        comm._obj.value = self._keep(made)
        path = bytes(unique).rstrip(b"\0").decode()
        return self._connecting(made, path, blocking=bool(config._obj.blocking))

    def _connecting(self, made: Communicator, path: str, blocking: bool) -> int:
        """Maps the memory and waits for the others, in a thread unless it may block."""
        try: made.memory = map_memory(path, group_bytes(made.size))
        except OSError as error:
            made.fail(REMOTE_ERROR, f"{path}: {error.strerror}")
            return SUCCESS
        shared = ctypes.addressof(ctypes.c_char.from_buffer(made.memory))
        made.structs = tuple(GroupStruct(rank=made.rank, size=made.size, timeout_ns=WAIT_NS, shared=shared,
                                         slot_bytes=SLOT_BYTES, run=library().address("shared_run"))
                             for _ in range(2))

        def connect() -> None:
            here = ctypes.create_string_buffer(4 * made.size)
            _move(made, "all_gather", here, here, 1, BYTE)
            if path in self.served: os.close(self.served.pop(path))     # all have mapped it
            if made.error == IN_PROGRESS: made.error = SUCCESS
        if blocking: connect()
        else: threading.Thread(target=connect, daemon=True).start()
        return SUCCESS if blocking else IN_PROGRESS

    def ncclCommInitAll(self, comms: Any, count: int, devices: Any) -> int:
        """`devices` are emulated ones: no numbers stand for them."""
        clique = object()
        for i in range(count): comms[i] = self._keep(Communicator(devices[i], i, count, clique))
        return SUCCESS

    def ncclCommSplit(self, comm: int, color: int, key: int, made: Any, config: Any) -> int:
        """All ranks of the communicator call it; those of a color, by their keys, are one."""
        parent = self.communicators[comm]
        mine, every = (ctypes.c_int64 * 2)(color, key), (ctypes.c_int64 * (2 * parent.size))()
        if not _move(parent, "all_gather", every, mine, 2, TYPES[dtypes.int64]): return SUCCESS
        pairs = [(every[2 * r], every[2 * r + 1], r) for r in range(parent.size)]
        members = [r for _, _, r in sorted(pair for pair in pairs if pair[0] == color)]
        child = Communicator(parent.device, members.index(parent.rank), len(members), error=IN_PROGRESS)
        made._obj.value = self._keep(child)
        path = ctypes.create_string_buffer(128)
        if child.rank == 0: self.ncclGetUniqueId(ctypes.byref(path))
        paths = ctypes.create_string_buffer(128 * parent.size)
        if not _move(parent, "all_gather", paths, path, 128, BYTE): return SUCCESS
        at = 128 * members[0]
        return self._connecting(child, paths.raw[at:at + 128].rstrip(b"\0").decode(), blocking=False)

    def _keep(self, made: Communicator) -> int:
        self.communicators[number := next(self.numbers)] = made
        return number

    def ncclCommGetAsyncError(self, comm: int, result: Any) -> int:
        result._obj.value = self.communicators[comm].error
        return SUCCESS

    def ncclCommAbort(self, comm: int) -> int:
        found = self.communicators[comm]
        for each in found.structs:
            each.abort = 1
            # the first word of the memory (csrc/shared.c): the others hear of it, as over a network
            all_abort = ctypes.c_uint64.from_address(each.shared)
            all_abort.value = all_abort.value or found.rank + 1
        found.fail(REMOTE_ERROR, "the communicator was aborted")
        return SUCCESS

    def ncclCommFinalize(self, comm: int) -> int: return SUCCESS

    def ncclCommDestroy(self, comm: int) -> int:
        del self.communicators[comm]
        return SUCCESS

    def ncclCommRegister(self, comm: int, buffer: int, nbytes: int, handle: Any) -> int:
        self.communicators[comm].device.memory_at(buffer, nbytes, "a registration")
        handle._obj.value = buffer
        self.communicators[comm].held.append(buffer)
        return SUCCESS

    def ncclCommDeregister(self, comm: int, handle: Any) -> int:
        self.communicators[comm].held.remove(handle.value if hasattr(handle, "value") else handle)
        return SUCCESS

    # **** collectives ****

    def ncclAllReduce(self, given: int, out: int, count: int, kind: int, op: int, comm: int, _: int) -> int:
        return self._call(comm, "all_reduce", given, out, count, kind, op=op)

    def ncclReduceScatter(self, given: int, out: int, count: int, kind: int, op: int, comm: int,
                          _: int) -> int:
        return self._call(comm, "reduce_scatter", given, out, count, kind, op=op)

    def ncclAllGather(self, given: int, out: int, count: int, kind: int, comm: int, _: int) -> int:
        return self._call(comm, "all_gather", given, out, count, kind)

    def ncclAlltoAll(self, given: int, out: int, count: int, kind: int, comm: int, _: int) -> int:
        return self._call(comm, "all_to_all", given, out, count, kind)

    def ncclBroadcast(self, given: int, out: int, count: int, kind: int, root: int, comm: int, _: int) -> int:
        return self._call(comm, "broadcast", given, out, count, kind, peer=root)

    def ncclSend(self, given: int, count: int, kind: int, peer: int, comm: int, _: int) -> int:
        return self._call(comm, "send", given, 0, count, kind, peer=peer)

    def ncclRecv(self, out: int, count: int, kind: int, peer: int, comm: int, _: int) -> int:
        return self._call(comm, "recv", 0, out, count, kind, peer=peer)

    def _call(self, comm: int, what: str, given: int, out: int, count: int, kind: int, op: int = 0,
                peer: int = 0) -> int:
        found = self.communicators[comm]
        if kind not in DTYPES or op not in OP_NAMES or not 0 <= peer < found.size: return INVALID_ARGUMENT
        call = Queued(found, what, given, out, count, kind, op, peer)
        if getattr(self.own, "depth", 0): self.own.queue.append(call)
        else: return self._run([call])
        return SUCCESS

    # **** groups ****

    def ncclGroupStart(self) -> int:
        self.own.depth = getattr(self.own, "depth", 0) + 1
        if self.own.depth == 1: self.own.queue = []
        return SUCCESS

    def ncclGroupEnd(self) -> int:
        self.own.depth -= 1
        return self._run(self.own.queue) if not self.own.depth else SUCCESS

    def _run(self, calls: Sequence[Queued]) -> int:
        """All calls of a group: those of one process run together, sends run beside what receives."""
        local = [call for call in calls if call.to.clique is not None]
        if local and (result := self._run_local(local)) != SUCCESS: return result
        sends = [call for call in calls if call.kind == "send" and call.to.clique is None]
        others = [call for call in calls if call.kind != "send" and call.to.clique is None]
        if not others or not sends:
            any(map(_run, (*sends, *others)))
            return SUCCESS
        beside = threading.Thread(target=lambda: any(map(_run, sends)))
        beside.start()
        any(map(_run, others))
        beside.join()
        return SUCCESS

    def _run_local(self, calls: Sequence[Queued]) -> int:
        """Collectives of ranks of this process: the first of all ranks, then the second."""
        by_clique: dict[object, dict[int, list[Queued]]] = {}
        for call in calls: by_clique.setdefault(call.to.clique, {}).setdefault(call.to.rank, []).append(call)
        for ranks in by_clique.values():
            size = next(iter(ranks.values()))[0].to.size
            counts = {len(each) for each in ranks.values()}
            if len(ranks) != size or len(counts) != 1:
                self.last = f"a group has calls of {len(ranks)} of {size} ranks of this process".encode()
                return INVALID_USAGE
            for together in zip(*(ranks[r] for r in range(size)), strict=True):
                if (result := self._together(together)) != SUCCESS: return result
        return SUCCESS

    def _together(self, calls: Sequence[Queued]) -> int:
        first = calls[0]
        if len({(c.kind, c.count, c.type, c.op) for c in calls}) > 1:
            for call in calls: call.to.fail(INVALID_USAGE, " and ".join(each.text for each in calls))
            return SUCCESS
        if first.kind != "all_reduce":
            self.last = f"{first.kind} among ranks of one process".encode()
            return INVALID_USAGE
        nbytes = first.count * DTYPES[first.type].itemsize
        given = [_address(call.to, call.given, nbytes, call.text) for call in calls]
        outs = [_address(call.to, call.out, nbytes, call.text) for call in calls]
        library().c.reduce(ctypes.c_void_p(outs[0]), (ctypes.c_void_p * len(given))(*given), *map(
            ctypes.c_uint64, (len(given), first.count, _type(first.type), OPS.index(OP_NAMES[first.op]))))
        for out in outs[1:]: ctypes.memmove(out, outs[0], nbytes)
        return SUCCESS


# **** bytes ****

def _type(number: int) -> int: return ALL_TYPES.index(DTYPES[number])


def _address(to: Communicator, address: int, nbytes: int, what: str) -> int:
    """Returns where bytes of the device lie in this process."""
    return int(to.device.memory_at(address, nbytes, what).ctypes.data)


def _run(call: Queued) -> bool:
    """Runs a call; whether what follows it has to be left."""
    to = call.to
    reads, writes = count_bytes(call.kind, call.count * DTYPES[call.type].itemsize, to.size)
    given = _address(to, call.given, reads, call.text) if call.given else 0
    out = _address(to, call.out, writes, call.text) if call.out else 0
    return not _move(to, call.kind, out, given, call.count, call.type, call.op, call.peer)


def _move(to: Communicator, kind: str, out: Any, given: Any, count: int, number: int, op: int = 0,
           peer: int = 0) -> bool:
    """Moves the bytes; whether it went well. What went wrong is kept with the communicator."""
    if to.error not in (SUCCESS, IN_PROGRESS): return False
    struct = to.structs[1 if kind == "send" else 0]
    call = Call(KINDS.index(kind), count, _type(number), OPS.index(OP_NAMES[op]), peer, 0)
    library().c.collective(ctypes.byref(struct), ctypes.byref(call), _pointer(out), _pointer(given))
    if struct.status == OK: return True
    other = f"rank {struct.culprit}"
    if struct.status == MISMATCH:
        own, theirs = (f"{KINDS[c.kind]} of {c.count} {ALL_TYPES[c.type].name}"
                       for c in (struct.current, struct.theirs))
        to.fail(INVALID_USAGE, f"rank {to.rank} calls {own}, {other} calls {theirs}")
    elif struct.status == ABORTED and struct.culprit != to.rank: to.fail(REMOTE_ERROR, f"{other} gave up")
    else: to.fail(REMOTE_ERROR, "the communicator was aborted")
    return False


def _pointer(place: Any) -> Any:
    return ctypes.c_void_p(place) if isinstance(place, int) else ctypes.byref(place)
