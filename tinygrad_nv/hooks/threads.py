"""tinygrad in several threads. Part of __init__.py, which states the protocol.

tinygrad 0.14.0 keeps as state of the process what belongs to the thread that works:

* one connection to its database, which sqlite lets serve only the thread that opened it. The main thread
  keeps that connection; each other thread gets one of its own, closed when the thread ends. A database that
  cannot be written is used as a copy in the directory of cache.py, also by the processes that compile; in
  the place of one that others may write (private.py) there is a new one.
* `ALLOW_DEVICE_USAGE`, which is 0 while a kernel is generated: launches of other threads would be refused,
  and after two overlapping generations it would stay 0. It has a value for each thread, and each use of
  `Context` as a decorator remembers the values that it found itself.
* `CAPTURING`, which is 0 while something is scheduled beside a capture, as explain() does: a TinyJit of
  another thread would lose kernels.
* `capturing`, the TinyJit that takes what is scheduled: it would take the schedules of other threads. A list
  for each thread.
* devices, which two threads would open twice.

`LOWERING` is held while a schedule or a program is made: UOps are unique by identity, and caches of both
tinygrad and tinygrad_nv rely on it. Launches do not take it. A fork does, so that the child can make programs
too, and the child has connections of its own.
"""
from __future__ import annotations

import contextlib
import os
import pickle
import sqlite3
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinygrad import helpers, schedule
from tinygrad.device import Device
from tinygrad.engine import jit, realize, worker

from tinygrad_nv import cache, private
from tinygrad_nv.hooks.replaced import put_back, replace, theirs
from tinygrad_nv.hooks.workers import Workers

LOWERING = threading.RLock()
SQLITE = b"SQLite format 3\0"       # what such a file begins with
_own = threading.local()
_SETTINGS: tuple[helpers.ContextVar[Any], ...] = (helpers.ALLOW_DEVICE_USAGE, helpers.CAPTURING)
_OPEN = "_Device__get_canonicalized_item"


def install() -> None:
    """Makes that state a thread's own."""
    replace(helpers, "db_connection", _connection)
    replace(helpers, "pickle", _SealedPickles())
    for owner in _pool_owners(): replace(owner, "get_worker_pool", _workers)
    replace(helpers.Context, "_recreate_cm", _fresh)
    replace(type(Device), _OPEN, _OpenOnce(theirs(type(Device), _OPEN)))
    capturing = _Capturing()
    for owner in (realize, schedule, jit): replace(owner, "capturing", capturing)
    for setting in _SETTINGS: setting.__class__ = _PerThread


def remove() -> None:
    """Undoes `install`. Devices that are open stay so."""
    put_back(helpers, "db_connection")
    put_back(helpers, "pickle")
    for owner in _pool_owners(): put_back(owner, "get_worker_pool")
    if helpers.CACHEDB in _moved: helpers.CACHEDB = _moved[helpers.CACHEDB]
    if os.environ.get("CACHEDB") in _moved: os.environ["CACHEDB"] = helpers.CACHEDB
    put_back(helpers.Context, "_recreate_cm")
    put_back(type(Device), _OPEN)
    for owner in (realize, schedule, jit): put_back(owner, "capturing")
    for setting in _SETTINGS: setting.__class__ = helpers.ContextVar


# **** the cache on disk ****

_keys: dict[str, bytes | None] = {}     # of databases
_moved: dict[str, str] = {}  # databases in use, and which they are in the place of: most in their own


def _place() -> None:
    """Puts tinygrad's cache into our directory, with a copy of what it has, where it cannot be written; where
    others may write it, or it is no database, without."""
    if helpers.CACHEDB in _moved: return
    with cache.LOCK:
        if (before := helpers.CACHEDB) in _moved: return
        refused = private.refusal(Path(before).parent)
        why = refused or cache.why_not(Path(before).parent)
        if not why: why = refused = _refusal(before)
        if not why and os.path.exists(before): _check(before)
        if not why and os.path.exists(before) and not os.access(before, os.W_OK): why = "it is read-only"
        if not why:
            _moved[before] = _new(before)
            return
        place = cache.directory()
        made = str(place / "tinygrad.db")
        with contextlib.suppress(OSError):
            if _refusal(made): private.remove(Path(made))
            if os.path.exists(made): _check(made)
            # other processes may be there: none finds half of it
            if not refused and not os.path.exists(made):
                with private.open_private(before) as file: private.write(Path(made), file)
        if not cache.is_temporary(place):
            verb = "is not used" if refused else "cannot be written"
            print(f"tinygrad-nv: {before} {verb} ({why}); {made} is used", file=sys.stderr)
        _moved[_new(made)] = before
        if not refused: _keys[made] = private.key(Path(before).parent)      # of what was copied
        helpers.CACHEDB = os.environ["CACHEDB"] = made


def _refusal(database: str) -> str:
    """Why a file is not used as tinygrad's database; "" of one that is, or is not there."""
    try:
        with private.open_private(database) as file: head = file.read(len(SQLITE))
    except FileNotFoundError: return ""
    except OSError as error: return error.strerror or str(error)
    return "" if head in (b"", SQLITE) else "it is no database"


def _new(database: str) -> str:
    """The path of a database, which is there from now on: for this user alone, whatever the umask is."""
    with contextlib.suppress(OSError): os.close(os.open(database, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    return database


class _Guarded:
    """A connection of tinygrad's, or its cursor. Of a damaged database nothing more is read or written, and
    the next process makes another."""

    def __init__(self, made: Any) -> None: self.made = made
    def __getattr__(self, name: str) -> Any: return getattr(self.made, name)
    def cursor(self) -> _Guarded: return _Guarded(self.made.cursor())
    def execute(self, *words: Any) -> _Guarded: return _Guarded(self._try(self.made.execute, *words))
    def fetchone(self) -> Any: return None if self.made is None else self._try(self.made.fetchone)
    def commit(self) -> None: self._try(self.made.commit)

    def _try(self, call: Callable[..., Any], *words: Any) -> Any:
        try: return call(*words)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if not _is_damage(error): raise
            if helpers.CACHELEVEL.value: _set_aside(helpers.CACHEDB, error)
            helpers.CACHELEVEL.value = 0
            return None


def _is_damage(error: Exception) -> bool:
    """Whether a database is damaged: a lock, a full disk and a missing table have classes of their own."""
    return type(error) is sqlite3.DatabaseError or isinstance(error, UnicodeDecodeError) \
        or "unsupported file format" in str(error)


def _check(database: str) -> None:
    """Has a damaged database set aside before tinygrad opens it."""
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=60)) as opened:
            opened.execute("SELECT sql FROM sqlite_master").fetchall()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if _is_damage(error): _set_aside(database, error)


def _set_aside(database: str, why: Exception) -> None:
    aside = f"{database}.corrupt"
    with contextlib.suppress(OSError):
        os.replace(database, aside)
        for each in ("-wal", "-shm"): private.remove(Path(database + each))
        print(f"tinygrad-nv: {database} is damaged ({why}); it is {aside} now, and is not used",
              file=sys.stderr)


class _SealedPickles:
    """Replacement of `pickle` for tinygrad's database: values have a keyed hash behind them, which pickle
    leaves alone, and one whose hash does not fit is absent. So nothing is unpickled that this user's
    processes did not write, and machine code whose bits changed is compiled again."""

    def dumps(self, value: Any) -> bytes:
        """A pickle, and its seal."""
        data = pickle.dumps(value)
        return data if (known := _key()) is None else data + private.seal(known, "", data)

    def loads(self, data: bytes) -> Any:
        """The value; None, which tinygrad takes for one that is not there."""
        found = private.content(_key(), "", data)
        return None if found is None else pickle.loads(found)


def _key() -> bytes | None:
    if (known := _keys.get(helpers.CACHEDB)) is None:
        known = _keys[helpers.CACHEDB] = private.key(Path(helpers.CACHEDB).parent)
    return known


def _connection() -> Any:
    _place()
    return _Guarded(_open())


def _open() -> Any:
    opened = theirs(helpers, "db_connection")
    if threading.current_thread() is threading.main_thread(): return opened()
    made = getattr(_own, "opened", None)
    # a cache elsewhere is another one
    if made is None or made.__globals__["CACHEDB"] != helpers.CACHEDB:
        made = _own.opened = types.FunctionType(opened.__code__, {**vars(helpers), "_db_connection": None})
    return made()


def _pool_owners() -> list[types.ModuleType]:
    """BEAM's search takes what is in `worker` when it is imported."""
    return [realize, worker, *filter(None, [sys.modules.get("tinygrad.codegen.opt.search")])]


def _workers() -> Workers | None:
    """tinygrad's processes that compile: they load nothing of this file, and find the cache where it is."""
    _place()
    make = theirs(realize, "get_worker_pool")
    return Workers(make) if make() is not None else None


# **** settings ****

class _PerThread(helpers.ContextVar[Any]):
    """A ContextVar that each thread sets for itself; in a thread that never did, it is what it was before."""

    @property
    def value(self) -> Any: return getattr(_own, self.key, vars(self)["value"])

    @value.setter
    def value(self, value: Any) -> None: setattr(_own, self.key, value)


def _fresh(context: Any) -> Any:
    """A Context for one use. tinygrad's decorator enters one object, which remembers the last entry alone."""
    return type(context)(**context.kwargs)


class _Capturing(list[Any]):
    """Capture of this thread."""

    @property
    def here(self) -> list[Any]:
        if (found := getattr(_own, "capturing", None)) is None: found = _own.capturing = []
        return found

    def __len__(self) -> int: return len(self.here)

    def __getitem__(self, which: Any) -> Any: return self.here[which]

    def __repr__(self) -> str: return repr(self.here)

    def append(self, one: Any) -> None: self.here.append(one)

    def clear(self) -> None: self.here.clear()


# **** devices ****

class _OpenOnce:
    """tinygrad's cache of open devices; one thread at a time opens one."""

    def __init__(self, opened: Any) -> None:
        self.opened, self.known = opened, dict[str, Any]()

    def __get__(self, devices: Any, owner: type | None = None) -> Callable[..., Any]:
        return self if devices is None else types.MethodType(self, devices)

    def __call__(self, devices: Any, name: str) -> Any:
        if (found := self.known.get(name)) is None:
            with LOWERING: found = self.known[name] = self.opened(devices, name)
        return found

    def cache_clear(self) -> None:
        self.known.clear()
        self.opened.cache_clear()


# **** forks ****

FORK_WAITS_S = 60.0  # for a thread that compiles; a longer one (BEAM) may leave the child a lock of sqlite's
_parents: list[Any] = []  # connections of the processes that this one is a fork of: sqlite forbids their use


def _fork() -> None:
    """No thread is amid a schedule or sqlite when the process forks: its locks would stay taken."""
    _own.waited = LOWERING.acquire(timeout=FORK_WAITS_S)


def _parent() -> None:
    if _own.waited: LOWERING.release()


def _child() -> None:
    global LOWERING
    LOWERING = threading.RLock()
    _parents.append((helpers._db_connection, vars(_own).pop("opened", None)))
    helpers._db_connection = None


os.register_at_fork(before=_fork, after_in_parent=_parent, after_in_child=_child)
