"""The cache directory: compiled kernels, tuned schedules, measured rates, the compiler's own cache.

Protocol: `directory()` can be written. It is NV_CACHE_DIR, else tinygrad_nv in XDG_CACHE_HOME or ~/.cache.
Where that cannot be written or has no room, as in containers, it is a directory for temporary files, in
memory where there is no other; it is removed when the process ends, a line on stderr says so, and the
processes that this one starts find it in NV_CACHE_DIR. What was there already is read from `named()`.
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

from tinygrad_nv import config

LOCK = threading.RLock()  # held while places are looked for
ROOM = 1 << 20  # bytes that must fit: a few compiled kernels
_PREFIX = "tinygrad_nv-"


def named() -> Path:
    """Where the environment puts it, whether or not it can be written."""
    if chosen := str(config.get("NV_CACHE_DIR")): return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tinygrad_nv"


def directory() -> Path:
    """A directory that exists and can be written."""
    with LOCK: return _usable(named())


def write(path: Path, text: str) -> None:
    """Written beside and renamed, so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file: file.write(text)
    os.replace(file.name, path)


def is_temporary(place: Path) -> bool:
    """Whether it is there in place of another, which this process or the one that started it has said."""
    return place.name.startswith(_PREFIX)


def why_not(place: Path) -> str:
    """Why nothing can be kept in a directory, which is made; "" where it can."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(ROOM))
            file.flush()
    except OSError as error: return error.strerror or str(error)
    return ""


@functools.lru_cache(16)
def _usable(place: Path) -> Path:
    return place if not (why := why_not(place)) else instead_of(place, why)


def instead_of(place: Path, why: str) -> Path:
    """A directory for this process and those it starts; `place` itself where there is no other."""
    for base in dict.fromkeys((*_temporary(), "/dev/shm")):
        try: made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError: continue
        if not why_not(made): break
        with contextlib.suppress(OSError): made.rmdir()
    else: return place
    print(f"tinygrad-nv: nothing can be kept in {place} ({why}); what is compiled is in {made} until the "
          "process ends. To keep it, set NV_CACHE_DIR", file=sys.stderr)
    os.environ.update(NV_CACHE_DIR=str(made))
    atexit.register(_remove, made, os.getpid())
    return made


def _temporary() -> list[str]:
    """tempfile's choice, which it does not find where nothing can be written."""
    try: return [tempfile.gettempdir()]
    except OSError: return []


def _forked() -> None:
    """A child of fork has one thread: the one that held the lock may be another."""
    global LOCK
    LOCK = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def _remove(made: Path, owner: int) -> None:
    if os.getpid() == owner: shutil.rmtree(made, ignore_errors=True)
