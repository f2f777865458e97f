"""The functions of the API that are emulated, and how their arguments are read.

Protocol: a handler is decorated with the names that it serves, and takes the session and its arguments, whose
annotations say what they are in C:

    Word     a pointer, a handle, a size_t         Int, Unsigned   32 bits
    Text     const char *, read                    Dim3            by value: two words
    Extent   cudaExtent by value                   Pitched         cudaPitchedPtr by value

Its result is what the function returns, None for success; it may raise `CudaError`. A name `…_ptsz` or
`…_ptds` is served as the name before it, with the default stream of the thread.
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tinygrad_nv.host.wire import Call, Wire

Word: TypeAlias = int
Int: TypeAlias = int
Unsigned: TypeAlias = int
Text: TypeAlias = str
Dim3: TypeAlias = tuple[int, int, int]
Extent: TypeAlias = tuple[int, int, int]
Pitched: TypeAlias = tuple[int, int, int, int]
MEMORY_WORDS = {"Extent": 3, "Pitched": 4}      # of what is always on the stack


@dataclass(frozen=True)
class Function:
    """A handler, and the kinds of its arguments."""
    run: Callable[..., int | None]
    kinds: tuple[str, ...]

    def arguments(self, call: Call, wire: Wire) -> list[Any]:
        """Returns the arguments as the calling convention of x86-64 has them."""
        registers, stack, found = list(call.registers), list(call.stack), []

        def words(count: int, in_memory: bool = False) -> list[int]:
            source = stack if in_memory or len(registers) < count else registers
            taken = source[:count]
            del source[:count]
            return taken

        for kind in self.kinds:
            values = words(MEMORY_WORDS.get(kind, 2 if kind == "Dim3" else 1), kind in MEMORY_WORDS)
            found.append(convert(kind, values, wire))
        return found


def convert(kind: str, values: list[int], wire: Wire) -> Any:
    """An argument of a kind."""
    if kind == "Word": return values[0]
    if kind == "Unsigned": return values[0] & 0xffffffff
    if kind == "Int": return struct.unpack("<i", struct.pack("<I", values[0] & 0xffffffff))[0]
    if kind == "Text": return wire.text(values[0])
    if kind == "Dim3": return struct.unpack("<3I", struct.pack("<2Q", *values)[:12])
    return tuple(values)


FUNCTIONS: dict[str, Function] = {}


def api(*names: str) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Registers a handler for these names."""
    def register(run: Callable[..., int | None]) -> Callable[..., int | None]:
        kinds = tuple(str(kind) for name, kind in run.__annotations__.items() if name not in ("s", "return"))
        for name in names: FUNCTIONS[name] = Function(run, kinds)
        return run
    return register


def function_of(name: str) -> Function | None:
    """Returns who serves a name."""
    if (found := FUNCTIONS.get(name)) is not None: return found
    return FUNCTIONS.get(name.removesuffix("_ptsz").removesuffix("_ptds"))
