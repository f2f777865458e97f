"""Groups of ranks that call collectives together.

Protocol: `World` is what this process knows of all ranks: who it is, how they were started, what carries
bytes. `world.group(members)` makes a group; all members call it, in the same order, and get a `Group` each. A
group has a structure that C fills in while a collective runs (csrc/group.h): `current()` says what it is at,
`check()` raises what went wrong, `abort()` ends what waits. After an error a group is of no use any more.

A collective in a graph is one C call (collectives/kernel.py) with a `descriptor` as its last argument: a
Tensor of 8 words that says which function, which group, and what to do. So one kernel is compiled for all
collectives, and a graph, or a step that was kept on disk, finds this process's addresses in memory.
"""
from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.dist.store import Store
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
from tinygrad_nv.errors import DistError


@dataclass(frozen=True)
class Operation:
    """A collective that runs: its number in the group, what it is called for."""
    number: int
    collective: str
    tensor: str
    count: int
    dtype: str
    started_s: float

    def __str__(self) -> str:
        return f"{self.collective} #{self.number} of {self.tensor}, {self.count} {self.dtype}"


class Group:
    """Ranks `members` (of the world) that call collectives together; this one is `rank` of `size`."""

    def __init__(self, name: str, members: Sequence[int], rank: int, timeout_s: float) -> None:
        self.name, self.members, self.rank, self.size = name, tuple(members), rank, len(members)
        self.struct = GroupStruct(rank=rank, size=self.size, timeout_ns=int(timeout_s * 1e9))
        self.struct.run = library().address("alone_run")
        self.why: DistError | None = None
        self.held: Any = None       # what the transport needs to be kept
        self.tags: list[str] = []   # names of tensors
        self.flags: dict[int, Tensor] = {}
        self.descriptors: dict[tuple[int, ...], Tensor] = {}

    def __repr__(self) -> str: return f"Group({self.name}: rank {self.rank} of {self.size})"

    def descriptor(self, kind: str, count: int, dtype: DType, op: str = "sum", peer: int = 0,
                   name: str = "") -> Tensor:
        """The words that a kernel calls a collective with, uint64 (8,) on the CPU. Raises `DistError`."""
        if dtype not in TYPES:
            raise DistError(f"{kind} of {dtype.name}", f"one of {', '.join(each.name for each in TYPES)}",
                            "cast before, and back after")
        if op not in OPS: raise DistError(f"{kind} with {op!r}", f"one of {', '.join(OPS)}")
        if not 0 <= peer < self.size: raise DistError(f"{kind} with rank {peer}", f"0 to {self.size - 1}")
        if name not in self.tags: self.tags.append(name)
        key = KINDS.index(kind), count, TYPES.index(dtype), OPS.index(op), peer, self.tags.index(name)
        if key not in self.descriptors:
            words = [library().address("collective"), ctypes.addressof(self.struct), *key]
            self.descriptors[key] = Tensor(np.array(words, np.uint64), device="CPU").realize()
        return self.descriptors[key]

    def is_rank(self, rank: int) -> Tensor:
        """1 on this rank of the group, 0 on others, float32 (1,) on the CPU: a value in memory, so that all ranks
        build the same graph."""
        if rank not in self.flags: self.flags[rank] = Tensor(np.array([rank == self.rank], np.float32)).realize()
        return self.flags[rank]

    def run(self, kind: str, out: np.ndarray, given: np.ndarray, count: int, dtype: DType, op: str = "sum",
            peer: int = 0, name: str = "") -> None:
        """A collective on arrays, now. Raises `DistError`."""
        call = Call(KINDS.index(kind), count, TYPES.index(dtype), OPS.index(op), peer, 0)
        library().c.collective(ctypes.byref(self.struct), ctypes.byref(call),
                               ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(given.ctypes.data))
        self.check()

    def current(self) -> Operation | None:
        """What this rank is at: None between collectives."""
        s = self.struct
        if s.begun == s.ended: return None
        return self._operation(s.current, s.begun, s.since / 1e9)

    def check(self) -> None:
        """Raises `DistError` if a collective has failed."""
        s = self.struct
        if s.status == OK: return
        if self.why is not None: raise self.why
        own = self._operation(s.current, s.begun, s.since / 1e9)
        other = f"rank {self.members[s.culprit]}"
        if s.status == MISMATCH:
            raise DistError(f"rank {self.members[self.rank]} calls {own}, {other} calls "
                            f"{self._operation(s.theirs, s.begun, 0)}",
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
        """Ends a collective that waits, from another thread."""
        self.struct.abort = 1

    def _operation(self, call: Call, number: int, since: float) -> Operation:
        name = self.tags[call.tag] if call.tag < len(self.tags) else ""
        return Operation(number, KINDS[call.kind], name or "a tensor", call.count, TYPES[call.type].name,
                         since)


@dataclass
class World:
    """All ranks, as this process sees them. `transport` is "shared", "mpi" or "alone"."""
    ranks: Ranks
    store: Store | None
    transport: str
    timeout_s: float
    groups: list[Group] = field(default_factory=list)
    lost: DistError | None = None
    told: list[Callable[[DistError], None]] = field(default_factory=list)   # who hears of a lost rank
    made: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def rank(self) -> int:
        """Of this process."""
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
        if len(chosen) > 1:
            if self.transport == "mpi": made.held = mpi.connect(made.struct, chosen)
            else:
                name = f"group/{made.name}/{self.made[chosen]}"
                made.held = shared.connect(made.struct, made.rank == 0, name,
                                           lambda key, own: self._exchange(key, own, made))
        self.groups.append(made)
        return made

    def exchange(self, name: str, own: bytes) -> list[bytes]:
        """What every rank says, by rank; `name` is another for each call."""
        if self.size == 1: return [own]
        if self.store is not None: return self.store.all_gather(name, own, self.timeout_s)
        said: list[bytes] = mpi.load().COMM_WORLD.allgather(own)
        return said

    def _exchange(self, key: str, own: bytes, group: Group) -> list[bytes]:
        """What all members of a group say."""
        assert self.store is not None, "ranks of one machine have a store"
        self.store.set(f"{key}/{group.rank}", own)
        return [self.store.get(f"{key}/{r}", self.timeout_s) for r in range(group.size)]

    def on_lost(self, fn: Callable[[DistError], None]) -> None:
        """Has `fn` called, in another thread, when a rank is lost."""
        self.told.append(fn)
        if self.lost is not None: fn(self.lost)

    def lose(self, rank: int, reason: str) -> None:
        """Ends what waits for a rank that is gone."""
        if self.lost is not None: return
        self.lost = DistError(f"rank {rank} is lost: {reason}", "all ranks until rank 0 ends",
                              "see what it has written, and start again")
        for each in self.groups: each.end(self.lost)
        for fn in self.told: fn(self.lost)

    def check(self) -> None:
        """Raises `DistError` if a collective of any group has failed."""
        for each in self.groups: each.check()

    def close(self) -> None:
        """Ends what this process has to do with other ranks."""
        self.told.clear()
        for each in self.groups: each.abort()
        if self.store is not None: self.store.close()


_world: World | None = None


def world() -> World:
    """The ranks that this process is one of: `init` says. One that was not called is alone."""
    return _world if _world is not None else init()


def init(transport: str = "auto", ranks: Ranks | None = None) -> World:
    """Finds the other ranks, as the launcher's environment variables say, and meets them. `transport` is
    "shared" (ranks of one machine), "mpi", or "auto": MPI where a launcher of MPI started them. Raises
    `DistError`."""
    global _world
    if _world is not None: raise DistError("init() is called twice", "one call", "use world()")
    found = Ranks.from_environment() if ranks is None else ranks
    timeout = 600.0
    if transport == "auto":
        own = "mpi" if found.launcher in ("mpiexec", "srun") else "shared"
        transport = own if found.world_size > 1 else "alone"
    if transport == "shared" and found.local_world_size != found.world_size:
        raise DistError(f"{found.world_size} ranks, of which {found.local_world_size} are on this machine",
                        "ranks of one machine, where memory is the transport",
                        "start ranks of several machines with mpiexec or srun")
    store = Store.open(found, timeout) if transport == "shared" else None
    _world = World(found, store, transport, timeout)
    if store is not None: store.watch(_world.lose)
    return _world


def close() -> None:
    """Undoes `init`."""
    global _world
    if _world is not None: _world.close()
    _world = None


def clock_s() -> float:
    """The clock of `Operation.started_s`."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
