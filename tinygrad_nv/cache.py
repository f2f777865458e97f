"""The cache directory: compiled kernels, tuned schedules, measured rates, the compiler's own cache.

Protocol: `directory()` can be written. It is NV_CACHE_DIR, else tinygrad_nv in XDG_CACHE_HOME or ~/.cache.
Where that cannot be written or has no room, as in containers, it is a directory for temporary files, in
memory where there is no other; it is removed when the process ends, a line on stderr says so, and the
processes that this one starts find it in NV_CACHE_DIR. What was there already is read from `readable()`.

What lies there is loaded as code. A directory that others may write (private.py) is neither read nor written:
the temporary one takes its place, too. Programs go on, since only time is lost: kernels are compiled again.
"""
from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from tinygrad_nv import config, private
from tinygrad_nv.errors import ConfigError

LOCK = threading.RLock()  # held while places are looked for
ROOM = 1 << 20  # bytes that must fit: a few compiled kernels
_PREFIX = "tinygrad_nv-"
_unwritable: dict[Path, Path] = {}      # places that are named, by the directories in their place


def environment_path() -> Path:
    """Returns where the environment puts it, whether or not it can be written."""
    if chosen := str(config.get("NV_CACHE_DIR")): return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tinygrad_nv"


def readable() -> Path:
    """Returns where what was kept is read: the place that is named, also where it cannot be written and
    another is used, unless others may write it."""
    place = _unwritable.get(environment_path(), environment_path())
    return directory() if private.refusal(place) else place


def directory() -> Path:
    """A directory that exists and can be written."""
    with LOCK: return _usable(environment_path())


def folder(name: str) -> Path:
    """A folder of the directory, for this user alone. One that others made there, when they could write the
    directory, is renamed."""
    return _own_folder(directory() / name)


@functools.lru_cache(64)
def _own_folder(place: Path) -> Path:
    private.make(place)
    if why := private.refusal(place):
        aside = Path(tempfile.mkdtemp(prefix=f"{place.name}.refused-", dir=place.parent))
        os.rename(place, aside)
        private.make(place)
        print(f"tinygrad-nv: {place} is {aside.name} now, and is not used: {why}", file=sys.stderr)
    return place


def zig() -> Path:
    """zig's own cache, which zig trusts: under a name that others cannot know beforehand."""
    known = private.key(directory())
    return folder(f"zig-{private.seal(known, 'zig', b'').hex()[:16]}" if known else "zig")


def is_temporary(place: Path) -> bool:
    """Whether it is there in place of another, which this process or the one that started it has said."""
    return place.name.startswith(_PREFIX)


def why_not(place: Path) -> str:
    """Why nothing can be kept in a directory, which is made; "" where it can."""
    if refused := private.refusal(place): return refused
    try:
        private.make(place)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(ROOM))
            file.flush()
    except OSError as error: return error.strerror or str(error)
    return ""


@functools.lru_cache(16)
def _usable(place: Path) -> Path:
    return place if not (why := why_not(place)) else instead_of(place, why)


def instead_of(place: Path, why: str) -> Path:
    """A directory for this process and those it starts; `place` itself where there is no other. Raises
    `ConfigError` where others may write that."""
    refused = private.refusal(place)
    for base in dict.fromkeys((*_temporary(), "/dev/shm")):
        try: made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError: continue
        if not why_not(made): break
        with contextlib.suppress(OSError): made.rmdir()
    else:
        if refused:
            raise ConfigError(f"the cache directory {place}: {refused}", "one that only this user may write",
                              "set NV_CACHE_DIR to such a directory")
        return place
    kept, way_out = "can be kept in", ""
    if refused:
        kept, way_out = "is read from or kept in", " to a directory that only you may write" + (
            f", or chmod 700 {place}" if why.startswith(private.EVERYONE) and private.is_mine(place) else "")
    print(f"tinygrad-nv: nothing {kept} {place} ({why}); what is compiled is in {made} until the process "
          f"ends. To keep it, set NV_CACHE_DIR{way_out}", file=sys.stderr)
    if place.is_dir() and not refused: _unwritable[made] = place
    os.environ.update(NV_CACHE_DIR=str(made))
    atexit.register(_remove, made, os.getpid())
    return made


def _temporary() -> list[str]:
    """tempfile's choice, which it does not find where nothing can be written."""
    try: return [tempfile.gettempdir()]
    except OSError: return []


def _reset_after_fork() -> None:
    """Makes a new lock in a child of fork, which has one thread: the one that held the lock may be
    another."""
    global LOCK
    LOCK = threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)


def _remove(made: Path, owner: int) -> None:
    if os.getpid() == owner: shutil.rmtree(made, ignore_errors=True)
