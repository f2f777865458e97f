"""C++ names as people write them."""
from __future__ import annotations

import ctypes
import ctypes.util
import functools
import re


@functools.cache
def _library() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("stdc++")
    if name is None: return None
    made = ctypes.CDLL(name)
    made.__cxa_demangle.restype = ctypes.c_void_p
    return made


@functools.lru_cache(1024)
def demangle(name: str) -> str:
    """Returns the name without mangling; itself where it is no C++ name. Where the system's C++ library is
    not there, or does not know it, only its beginning is told."""
    if not name.startswith("_Z"): return name
    library, status = _library(), ctypes.c_int()
    found = library and getattr(library, "__cxa_demangle")(name.encode(), None, None, ctypes.byref(status))
    if not found: return _beginning(name)
    text = ctypes.string_at(found).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(found))
    return text


def _beginning(name: str) -> str:
    """The parts of a nested name up to the first template argument."""
    parts, at = [], 3 if name.startswith("_ZN") else 2
    while (length := re.match(r"\d+", name[at:])) is not None:
        at += len(length[0])
        parts.append(name[at:at + int(length[0])])
        at += int(length[0])
    return "::".join(parts) + ("<…>" if name[at:at + 1] == "I" else "") if parts else name
