"""tinygrad's cache on disk for every thread. Part of hooks.py, which states the protocol.

tinygrad 0.14.0 opens one connection to its database, which sqlite lets serve only the thread that opened it:
whoever compiles in another one gets sqlite3.ProgrammingError. Here the main thread keeps that connection, and
each other thread has one of its own, by tinygrad's function with a `_db_connection` of its own; it is closed
when the thread ends. Writers wait for each other as processes do. A database that cannot be written is used
as a copy in the directory of cache.py.
"""
from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import types
from pathlib import Path
from typing import Any

from tinygrad import helpers

from tinygrad_nv import cache
from tinygrad_nv.replaced import put_back, replace, theirs

_own = threading.local()


def install() -> None:
    """Gives threads their connections."""
    replace(helpers, "db_connection", _connection)


def remove() -> None:
    """Undoes `install`."""
    put_back(helpers, "db_connection")
    if helpers.CACHEDB in _moved: helpers.CACHEDB = _moved[helpers.CACHEDB]


_moved: dict[str, str] = {}  # databases in use, and which they are in the place of: most in their own


def _place() -> None:
    """Puts tinygrad's cache into our directory, with a copy of what it has, where it cannot be written."""
    if (before := helpers.CACHEDB) in _moved: return
    why = cache.why_not(Path(before).parent)
    if not why and os.path.exists(before) and not os.access(before, os.W_OK): why = "it is read-only"
    if why:
        place = cache.directory()
        helpers.CACHEDB = str(place / "tinygrad.db")
        with contextlib.suppress(OSError):
            if not os.path.exists(helpers.CACHEDB): shutil.copyfile(before, helpers.CACHEDB)
        if not cache.is_temporary(place):
            print(f"tinygrad-nv: {before} cannot be written ({why}); {helpers.CACHEDB} is used",
                  file=sys.stderr)
    _moved[helpers.CACHEDB] = before


def _connection() -> Any:
    _place()
    opened = theirs(helpers, "db_connection")
    if threading.current_thread() is threading.main_thread(): return opened()
    made = getattr(_own, "opened", None)
    # a cache elsewhere is another one
    if made is None or made.__globals__["CACHEDB"] != helpers.CACHEDB:
        made = _own.opened = types.FunctionType(opened.__code__, {**vars(helpers), "_db_connection": None})
    return made()
