"""C++ names as people write them."""
from __future__ import annotations

import ctypes
import ctypes.util
import functools


@functools.cache
def _library() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("stdc++")
    if name is None: return None
    made = ctypes.CDLL(name)
    made.__cxa_demangle.restype = ctypes.c_void_p
    return made


@functools.lru_cache(1024)
def demangled(name: str) -> str:
    """The name; itself where it is no C++ name, or the system has no C++ library."""
    library = _library()
    if library is None: return name
    status = ctypes.c_int()
    found = getattr(library, "__cxa_demangle")(name.encode(), None, None, ctypes.byref(status))
    if status.value or not found: return name
    text = ctypes.string_at(found).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(found))
    return text
