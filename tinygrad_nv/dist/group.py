"""Groups of ranks that call collectives together.

Protocol: `World` has all ranks, as this process knows them: which rank it is, how ranks were started, and
which transport carries bytes. `world.group(members)` makes a group; all members call it, in the same order,
and get a `Group` each. A group has a structure that C fills in while a collective runs (csrc/group.h):
`current()` is the collective that runs, `check()` raises the error of one that failed, `abort()` ends one
that waits. After an error a group cannot be used any more.

A collective in a graph is one C call (collectives/functions.py) with a `descriptor` as its last argument: a
Tensor of 8 words that says which function, which group, and what to do. So one kernel is compiled for all
collectives, and a graph or a captured step that is read from disk gets this process's addresses.
"""
from __future__ import annotations

import ctypes
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.dist.store import Store, Watch
from tinygrad_nv.dist.transports import mpi, shared
from tinygrad_nv.dist.transports.library import (
    ABORTED,
    FAILED,
    KINDS,
    LATE,
    MISMATCH,
    MOST_RANKS,
    OK,
    OPS,
    TYPES,
    Call,
    GroupStruct,
    library,
)
from tinygrad_nv.dist.watchdog import Watchdog
from tinygrad_nv.errors import DistError, NVError
from tinygrad_nv.runtime.memory import write

DESCRIPTOR = "collective"   # names of descriptors begin with it
WAIT_S = 1e9    # a collective waits so long by itself
LEAVE_S = 5.0   # at the end, for other ranks to close this rank's memory

if TYPE_CHECKING:
    from tinygrad_nv.dist.transports.nccl import Communicator, Last


@dataclass(frozen=True)
class Operation:
    """A collective: its number in the group, its name, the tensor that it is for, and elements that are sent.
    `started_s` is of time.monotonic()."""
    number: int
    name: str
    tensor: str
    count: int
    dtype: str
    started_s: float

    def __str__(self) -> str:
        return f"{self.name} #{self.number} of {self.tensor} {self.dtype}[{self.count}]"


class Group:
    """Ranks `members` (of the world) that call collectives together; this one is `rank` of `size`."""

    def __init__(self, name: str, members: Sequence[int], rank: int, timeout_s: float) -> None:
        self.name, self.members, self.rank, self.size = name, tuple(members), rank, len(members)
        self.struct = GroupStruct(rank=rank, size=self.size, timeout_ns=int(timeout_s * 1e9))
        self.struct.run = library().address("alone_run")
        self.transport = "alone"
        self.planned = False        # no rank is there: graphs are scheduled alone
        self.why: DistError | None = None
        self.held: Any = None       # what the transport needs to be kept
        self.tags: list[str] = []   # names of tensors
        self.flags: dict[int, Tensor] = {}
        self.descriptors: dict[tuple[int, ...], Tensor] = {}
        self.key = name             # another for each group of a world
        self.communicators: dict[str, Communicator] = {}    # of GPUs of this rank (collectives/device.py)
        self.anchors: dict[str, Tensor] = {}
        self.peers: dict[str, Any] = {}     # what their kernels share (collectives/peer_ranks.py)
        self.closing: list[Callable[[], object]] = []   # called at the end: devices outlive the group

    def __repr__(self) -> str: return f"Group({self.name}: rank {self.rank} of {self.size})"

    def descriptor(self, kind: str, count: int, dtype: DType, op: str = "sum", peer: int = 0,
                   name: str = "") -> Tensor:
        """The words that a kernel calls a collective with, uint64 (8,) on the CPU. Raises `DistError`."""
        if dtype not in TYPES:
            raise DistError(f"{kind} of {dtype.name}", f"one of {', '.join(each.name for each in TYPES)}",
                            "cast before, and back after")
        if op not in OPS: raise DistError(f"{kind} with {op!r}", f"one of {', '.join(OPS)}")
        if not 0 <= peer < self.size: raise DistError(f"{kind} with rank {peer}", f"0 to {self.size - 1}")
        if kind in ("send", "recv") and peer == self.rank:
            raise DistError(f"{kind} of rank {peer} with itself", "another rank")
        if name not in self.tags: self.tags.append(name)
        if self.transport == "mpi": mpi.check_size(kind, count, dtype)
        key = KINDS.index(kind), count, TYPES.index(dtype), OPS.index(op), peer, self.tags.index(name)
        if key not in self.descriptors:
            words = [library().address("collective"), ctypes.addressof(self.struct), *key]
            self.descriptors[key] = _in_memory(np.array(words, np.uint64), dtypes.uint64)
        return self.descriptors[key]

    def descriptors_by_name(self) -> dict[str, Tensor]:
        """Returns the descriptors that there are, by names that mean the same in another process."""
        made = {}
        for (kind, count, dtype, op, peer, tag), each in self.descriptors.items():
            words = [KINDS[kind], str(count), TYPES[dtype].name, OPS[op], str(peer), self.tags[tag]]
            made["/".join([DESCRIPTOR, self.name, *words])] = each
        return made

    def descriptor_of(self, name: str) -> Tensor:
        """The one of such a name."""
        kind, count, dtype, op, peer, tag = name.split("/", 7)[2:]
        found = next(each for each in TYPES if each.name == dtype)
        return self.descriptor(kind, int(count), found, op, int(peer), tag)

    def is_rank(self, rank: int) -> Tensor:
        """1 on this rank of the group, 0 on others, float32 (1,) on the CPU: a value in memory, so that all
        ranks build the same graph."""
        if rank not in self.flags:
            self.flags[rank] = _in_memory(np.array([rank == self.rank], np.float32), dtypes.float32)
        return self.flags[rank]

    def run(self, kind: str, out: np.ndarray, given: np.ndarray, count: int, dtype: DType, op: str = "sum",
            peer: int = 0, name: str = "") -> None:
        """A collective on arrays, now; `out` is other memory than `given`. Raises `DistError`."""
        assert out.flags.c_contiguous and given.flags.c_contiguous, "elements one after the other"  # noqa: PT018
        call = Call(KINDS.index(kind), count, TYPES.index(dtype), OPS.index(op), peer, 0)
        library().c.collective(ctypes.byref(self.struct), ctypes.byref(call),
                               ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(given.ctypes.data))
        self.check()

    def current(self) -> Operation | None:
        """Returns the collective that this rank is in: None between collectives."""
        s = self.struct
        return self._by_device() if s.begun == s.ended or s.status else self.last()

    def _by_device(self) -> Operation | None:
        """The one that a GPU of this rank is at."""
        last = next(filter(None, (each.last for each in list(self.communicators.values()))), None)
        if last is None: return None
        return self._of_device(last)

    def last(self) -> Operation | None:
        """The collective that this rank has begun last."""
        s = self.struct
        found = [self._operation(s.current, self._num_begun, s.since / 1e9)] if s.begun else []
        found += [self._of_device(each.latest) for each in self.communicators.values() if each.latest]
        return max(found, key=lambda each: each.started_s, default=None)

    @property
    def _num_begun(self) -> int:
        """How many collectives this rank has begun, those of its devices with them: the same on ranks that
        have begun the same."""
        of_devices = (each.latest for each in self.communicators.values())
        return self.struct.begun + sum(each.number for each in of_devices if each)

    def _of_device(self, last: Last) -> Operation:
        order = last.order
        return Operation(self._num_begun, order.kind, order.name or "a tensor", order.count, order.dtype.name,
                         last.since)

    def failure(self) -> DistError | None:
        """Returns the error of a collective that has returned, or None."""
        try: self.check()
        except DistError as error: return error
        return None

    def check(self) -> None:
        """Raises `DistError` if a collective has failed."""
        s = self.struct
        if s.status == OK:
            for each in list(self.communicators.values()): each.check()
            return
        if self.why is not None: raise self.why
        own = self._operation(s.current, s.begun, s.since / 1e9)
        other = f"rank {self.members[s.culprit]}"
        if s.status == MISMATCH:
            raise DistError(f"rank {self.members[self.rank]} calls {own}, {other} calls "
                            f"{self._operation(s.theirs, s.begun, 0, named=False)}",
                            "the same collectives in the same order on all ranks",
                            "see what differs between the programs of these ranks")
        if s.status == LATE:
            raise DistError(f"{other} did not come to {own} within {s.timeout_ns / 1e9:g} s", "",
                            "see what it does, or raise NV_DIST_TIMEOUT")
        if s.status == ABORTED:
            raise DistError(f"{own} was given up, as {other} gave up" if s.culprit != self.rank
                            else f"{own} was given up")
        assert s.status == FAILED
        raise DistError(f"the transport failed in {own}")

    def end(self, why: DistError) -> None:
        """Ends a collective that waits, from another thread; `check` raises why."""
        self.why = why
        self.abort()

    def abort(self) -> None:
        """Ends a collective that waits, from another thread. One of MPI waits on."""
        self.struct.abort = 1
        for each in list(self.communicators.values()): each.abort(self.why)

    def close(self) -> None:
        """Gives back what the group has, once its devices have done what they hold. Memory that other ranks
        may have open (`World.leave_peers`) stays until the process ends."""
        for each in self.workspaces: each.forget()
        self.peers.clear()
        for communicator in list(self.communicators.values()): communicator.close()
        self.abort()
        while self.closing: self.closing.pop()()

    @property
    def workspaces(self) -> list[Any]:
        """Workspaces of its devices whose kernels use the memory of peers."""
        return [each for each in self.peers.values() if not isinstance(each, str)]

    def _operation(self, call: Call, number: int, since: float, named: bool = True) -> Operation:
        # another rank numbers its names itself
        name = self.tags[call.tag] if named and call.tag < len(self.tags) else ""
        return Operation(number, KINDS[call.kind], name or "a tensor", int(call.count),
                         TYPES[call.type].name, since)


def _in_memory(x: np.ndarray, dtype: DType) -> Tensor:
    """A Tensor of these elements, at once: `realize` would become part of a step that is being captured."""
    made = Tensor.empty(*x.shape, dtype=dtype, device="CPU")
    write(made, 0, x.data.cast("B"))
    return made


@dataclass
class World:
    """All ranks, as this process sees them. `transport` is "shared", "mpi" or "alone"."""
    ranks: Ranks
    store: Store | None
    transport: str
    timeout_s: float
    groups: list[Group] = field(default_factory=list)
    watchdog: Watchdog | None = None
    ended: DistError | None = None
    # called when ranks have parted
    listeners: list[Callable[[DistError], None]] = field(default_factory=list)
    made: Counter[tuple[int, ...]] = field(default_factory=Counter)
    follow: bool = False    # whether the other ranks do as rank 0 does (engine/executor/)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.world_size

    def group(self, members: Sequence[int] | None = None) -> Group:
        """A group of these ranks, of all by default. Raises `DistError`."""
        chosen = tuple(range(self.size)) if members is None else tuple(members)
        if len(set(chosen)) != len(chosen) or not chosen or not all(0 <= r < self.size for r in chosen):
            raise DistError(f"a group of ranks {list(chosen)}", f"different ranks of 0 to {self.size - 1}")
        if len(chosen) > MOST_RANKS:
            raise DistError(f"a group of {len(chosen)} ranks", f"at most {MOST_RANKS}")
        if self.rank not in chosen:
            raise DistError(f"rank {self.rank} makes a group of ranks {list(chosen)}",
                            "a group that it is in")
        self.made[chosen] += 1
        made = Group("-".join(map(str, chosen)), chosen, chosen.index(self.rank), self.timeout_s)
        made.key = f"{made.name}/{self.made[chosen]}"
        if len(chosen) > 1:
            made.transport = self.transport
            if self.transport == "mpi": made.held = mpi.connect(made.struct, chosen)
            else:
                name = f"group/{made.name}/{self.made[chosen]}"
                made.held = shared.connect(made.struct, made.rank == 0, name,
                                           lambda key, own: self._exchange(key, own, made))
        self.groups.append(made)
        return made

    def secret(self) -> bytes:
        """16 random bytes of rank 0, which every rank has to ask for. The transport carries them, which no
        other user's process is part of: the token of the store is no secret where no launcher made it."""
        own, out = np.frombuffer(secrets.token_bytes(16), np.uint8), np.zeros(16, np.uint8)
        self.group().run("broadcast", out, own, 16, dtypes.uint8)
        return out.tobytes()

    def exchange(self, name: str, own: bytes) -> list[bytes]:
        """Returns what every rank says, by rank; `name` is another for each call."""
        if self.size == 1: return [own]
        assert self.store is not None, "several ranks have a store"
        return self.store.all_gather(name, own)

    def _exchange(self, key: str, own: bytes, group: Group) -> list[bytes]:
        """Returns what all members of a group say."""
        assert self.store is not None, "several ranks have a store"
        self.store.set(f"{key}/{group.rank}", own)
        return [self.store.get(f"{key}/{r}") for r in range(group.size)]

    def on_end(self, fn: Callable[[DistError], None]) -> None:
        """Has `fn` called, in another thread, when a rank is lost or hangs. The process is ended when it
        returns, or after some time (watchdog.py)."""
        self.listeners.append(fn)
        if self.ended is not None: fn(self.ended)

    def end(self, why: DistError) -> None:
        """Ends what waits for other ranks, and says so to those that asked for it (`on_end`)."""
        if self.ended is not None: return
        self.interrupt(why)
        for fn in self.listeners: fn(why)

    def interrupt(self, why: DistError) -> None:
        """Ends what waits for other ranks: `check` raises why."""
        self.ended = why
        for each in self.groups: each.end(why)

    def check(self) -> None:
        """Raises `DistError` if a collective of any group has failed."""
        for each in self.groups: each.check()

    def close(self) -> None:
        """Ends what this process has to do with other ranks."""
        self.listeners.clear()
        if self.watchdog is not None: self.watchdog.close()
        self.leave_peers()
        whole = self.whole
        for each in self.groups: each.close()
        if self.store is not None: self.store.leave()    # what waits for this rank hears that before MPI ends
        if whole and self.transport == "mpi": mpi.finalize()
        if self.store is not None: self.store.close()

    @property
    def whole(self) -> bool:
        """Whether no rank is lost, and no collective has failed."""
        return self.ended is None and not any(each.failure() for each in self.groups)

    def leave_peers(self) -> None:
        """Closes other ranks' memory, and frees this rank's when all others have closed it, for which this
        waits `LEAVE_S` at most. All ranks call it at the end, behind their last kernel; a second call does
        nothing. In a world that is not whole nothing is freed: a kernel may still run."""
        sharing = [each for each in self.groups if each.workspaces]
        if not sharing or not self.whole: return
        assert self.store is not None, "several ranks have a store"
        end = time.monotonic() + LEAVE_S
        with suppress(NVError):
            for group in sharing:
                for there in group.workspaces: there.leave()
                self.store.set(f"peers/{group.key}/closed/{group.rank}", b"")
            for group in sharing:
                for rank in range(group.size):
                    self.store.get(f"peers/{group.key}/closed/{rank}", max(end - time.monotonic(), 0.01))
                for there in group.workspaces: there.free()
        for group in sharing: group.peers.clear()


_world: World | None = None


def world() -> World:
    """The ranks that this process is one of: `init` says. One that was not called is alone."""
    return _world if _world is not None else init()


def init(transport: str = "auto", ranks: Ranks | None = None,
         watch_ranks: Callable[[Watch], None] | None = None) -> World:
    """Finds the other ranks, as the launcher's environment variables say, and meets them. `transport` is
    "shared" (ranks of one machine), "mpi", or "auto": MPI where a launcher of MPI started them. `watch_ranks`
    is for ranks that this process started (store.py). Raises `DistError`."""
    global _world
    if _world is not None: raise DistError("init() is called twice", "one call", "use world()")
    found = Ranks.from_environment() if ranks is None else ranks
    if transport == "auto":
        own = "mpi" if found.launcher in ("mpiexec", "srun") else "shared"
        transport = own if found.world_size > 1 else "alone"
    if transport == "shared" and found.local_world_size != found.world_size:
        raise DistError(f"{found.world_size} ranks, of which {found.local_world_size} are on this machine",
                        "ranks of one machine, where memory is the transport",
                        "start ranks of several machines with mpiexec or srun")
    if transport == "mpi": found = mpi.with_master(found)
    store = Store.open(found, watch_ranks=watch_ranks) if found.world_size > 1 else None
    # a collective waits for ever: the watchdog says when that is too long
    _world = World(found, store, transport, WAIT_S)
    if store is not None:
        _world.watchdog = Watchdog(store, _world.groups)
        _world.watchdog.before_end(_world.end)
    return _world


def close() -> None:
    """Undoes `init`."""
    global _world
    if _world is not None: _world.close()
    _world = None
