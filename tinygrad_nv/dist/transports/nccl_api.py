"""NCCL's functions by ctypes.

Protocol: `NCCL(library)` calls the functions of one library, by NCCL's names and with its arguments: that of
`libnccl.so.2` (`real()`), or the one for emulated devices (nccl_emulated.py). A function that fails raises a
`DistError` with NCCL's message. Communicators do not block: `finish` waits until one has done its call, and
raises when that takes too long.

The library is that of a wheel, nvidia-nccl-cu13 or -cu12, or the system's. Loading it needs no driver.
"""
from __future__ import annotations

import ctypes
import functools
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import DistError

SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 4, 5, 6, 7
UNDEFINED = -(1 << 31)
OPS = {"sum": 0, "max": 2, "min": 3}
# none of 16 bits, which are carried as bytes and not added
TYPES: dict[DType, int] = {
    dtypes.int8: 0, dtypes.uint8: 1, dtypes.int32: 2, dtypes.uint32: 3, dtypes.int64: 4, dtypes.uint64: 5,
    dtypes.float16: 6, dtypes.float32: 7, dtypes.float64: 8, dtypes.bfloat16: 9}
LOWEST_VERSION = 21800  # of ncclCommSplit and of the configuration's fields
ALL_TO_ALL_VERSION = 22800
FIRST_NAP_S, LONGEST_NAP_S = 20e-6, 2e-3

Handle = ctypes.c_void_p
_int, _size = ctypes.c_int, ctypes.c_size_t


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""
    _fields_ = (("bytes", ctypes.c_byte * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t as version 2.18 has it; later ones add fields behind, and read `size` and `version`."""
    _fields_: ClassVar = [
        ("size", _size), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
        *((name, _int) for name in ("blocking", "cga_cluster_size", "min_ctas", "max_ctas")),
        ("net_name", ctypes.c_char_p), ("split_share", _int)]

    @staticmethod
    def make(split_share: bool = False) -> Config:
        """One that does not block."""
        return Config(ctypes.sizeof(Config), 0xcafebeef, LOWEST_VERSION, 0, *[UNDEFINED] * 3, None,
                      int(split_share))


# by name: types of the arguments; all return an ncclResult_t but for the two that return text
_BUFFERS = (Handle, Handle, _size)
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (Handle,), "ncclGetUniqueId": (Handle,),
    "ncclCommInitRankConfig": (Handle, _int, UniqueId, _int, Handle),
    "ncclCommInitAll": (Handle, _int, Handle),
    "ncclCommSplit": (Handle, _int, _int, Handle, Handle),
    "ncclCommFinalize": (Handle,), "ncclCommDestroy": (Handle,), "ncclCommAbort": (Handle,),
    "ncclCommGetAsyncError": (Handle, Handle),
    "ncclCommRegister": (Handle, Handle, _size, Handle), "ncclCommDeregister": (Handle, Handle),
    "ncclGroupStart": (), "ncclGroupEnd": (),
    "ncclAllReduce": (*_BUFFERS, _int, _int, Handle, Handle),
    "ncclReduceScatter": (*_BUFFERS, _int, _int, Handle, Handle),
    "ncclAllGather": (*_BUFFERS, _int, Handle, Handle),
    "ncclBroadcast": (*_BUFFERS, _int, _int, Handle, Handle),
    "ncclAlltoAll": (*_BUFFERS, _int, Handle, Handle),
    "ncclSend": (Handle, _size, _int, _int, Handle, Handle),
    "ncclRecv": (Handle, _size, _int, _int, Handle, Handle)}
TEXTS: dict[str, tuple[Any, ...]] = {"ncclGetErrorString": (_int,), "ncclGetLastError": (Handle,)}
LATER = ("ncclAlltoAll",)   # functions that an older NCCL does not have


class NCCL:
    """The functions of a library."""

    def __init__(self, library: Any) -> None:
        self.library = library
        version = _int()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version < LOWEST_VERSION:
            raise DistError(f"NCCL {version_text(self.version)}",
                            f"NCCL {version_text(LOWEST_VERSION)} or later",
                            "pip install nvidia-nccl-cu13")

    def call(self, name: str, *args: Any, handle: int | None = None) -> int:
        """Calls a function. Raises `DistError` in NCCL's words; that of the communicator `handle`, if it has
        any."""
        result: int = getattr(self.library, name)(*args)
        if result not in (SUCCESS, IN_PROGRESS): raise self.failure(name, result, handle)
        return result

    def failure(self, doing: str, result: int, handle: int | None = None) -> DistError:
        """The error of a result."""
        words = _text(self.library.ncclGetErrorString(result))
        last = _text(self.library.ncclGetLastError(handle)) if handle else ""
        return DistError(f"{doing}: {words}" + (f": {last}" if last else ""))

    def unique_id(self) -> bytes:
        """Returns the id that ranks have to know to connect."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def async_error(self, handle: int) -> int:
        """Returns what a communicator has failed in since, SUCCESS, or IN_PROGRESS."""
        found = _int()
        self.call("ncclCommGetAsyncError", handle, ctypes.byref(found))
        return found.value

    def finish(self, state: Callable[[], int], handle: int, doing: str, timeout_s: float) -> None:
        """Waits until a communicator has done what it was asked for; `state()` is its `async_error`. Raises
        `DistError` when it failed or the time is over; it is of no use then."""
        limit, nap = time.monotonic() + timeout_s, FIRST_NAP_S
        while (result := state()) == IN_PROGRESS:
            if time.monotonic() > limit:
                raise DistError(f"{doing} took longer than {timeout_s:g} s", "all ranks in the same call",
                                "see what the other ranks do, or raise NV_DIST_TIMEOUT")
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_S)
        if result != SUCCESS: raise self.failure(doing, result, handle)


def version_text(version: int) -> str:
    """A version as people write it."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _text(given: bytes | None) -> str: return (given or b"").decode(errors="replace").strip()


@functools.cache
def real() -> NCCL:
    """The machine's NCCL. Raises `DistError` where there is none."""
    tried = []
    for path in _paths():
        try: library = ctypes.CDLL(path)
        except OSError as error:
            tried.append(str(error))
            continue
        for table, result in ((FUNCTIONS, _int), (TEXTS, ctypes.c_char_p)):
            for name, arguments in table.items():
                if name in LATER and not hasattr(library, name): continue
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, result
        return NCCL(library)
    raise DistError(f"NCCL cannot be loaded: {'; '.join(tried)}", "libnccl.so.2",
                    "pip install nvidia-nccl-cu13")


def _paths() -> list[str]:
    """Returns the paths where it may be: the wheel's, then what the system finds."""
    try: found = importlib.util.find_spec("nvidia.nccl")
    except ImportError: found = None
    folders = found.submodule_search_locations or [] if found is not None else []
    return [*(str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders), "libnccl.so.2"]
