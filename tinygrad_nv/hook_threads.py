"""tinygrad's cache on disk for every thread. Part of hooks.py, which states the protocol.

tinygrad 0.14.0 opens one connection to its database, which sqlite lets serve only the thread that opened it:
whoever compiles in another one gets sqlite3.ProgrammingError. Here the main thread keeps that connection, and
each other thread has one of its own, by tinygrad's function with a `_db_connection` of its own; it is closed
when the thread ends. Writers wait for each other as processes do.
"""
from __future__ import annotations

import threading
import types
from typing import Any

from tinygrad import helpers

from tinygrad_nv.replaced import put_back, replace, theirs

_own = threading.local()


def install() -> None:
    """Gives threads their connections."""
    replace(helpers, "db_connection", _connection)


def remove() -> None:
    """Undoes `install`."""
    put_back(helpers, "db_connection")


def _connection() -> Any:
    opened = theirs(helpers, "db_connection")
    if threading.current_thread() is threading.main_thread(): return opened()
    made = getattr(_own, "opened", None)
    # a cache elsewhere is another one
    if made is None or made.__globals__["CACHEDB"] != helpers.CACHEDB:
        made = _own.opened = types.FunctionType(opened.__code__, {**vars(helpers), "_db_connection": None})
    return made()
