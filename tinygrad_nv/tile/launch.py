"""Settings of a kernel's launch besides its grid, its block and the memory it works on.

Protocol: `LaunchConfig` travels with the kernel, from the template that made it (`TileKernel.launch`) through
tinygrad's graph (runtime/note.py) to the program that launches it (runtime/program.py). Pointers count the
kernel's pointer parameters from 0, integers the others. Each of `integers`, where there are any, is an
argument of the kernel, u32; without them the variables of the launch are the arguments. Each of `maps` is
made for each launch over the buffer of a pointer parameter, and is an argument after pointers and integers.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.errors import DriverError


@dataclass(frozen=True)
class MapArgument:
    """A tensor map over the buffer of pointer parameter `pointer`, innermost dimension first, to be made for
    each launch: `dims` in elements, `strides` in bytes (without the innermost), `box` in elements. `dynamic`
    is the dimension, -1 for none, whose extent is an integer argument of the launch: that number `integer`,
    -1 for the last, which is a matmul's `m`. With `lower` and `upper` it is an im2col map over images (C, W,
    H, N): these are the corners of the box of base pixels, as offsets from the first and from the last pixel
    of W and of H; `box` is channels and pixels, `steps` how far apart the base pixels are along each
    dimension. Raises `DriverError` for numbers that name nothing."""
    pointer: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "128B"
    offset_bytes: int = 0
    dynamic: int = -1
    integer: int = -1
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.pointer, self.offset_bytes) < 0 or self.integer < -1 \
                or not -1 <= self.dynamic < len(self.dims):
            raise DriverError(f"tensor map of pointer {self.pointer} at {self.offset_bytes} B, dimension "
                              f"{self.dynamic} of {len(self.dims)} by integer {self.integer}",
                              "pointer and offset from 0, integer from -1, and a dimension it has or -1")


@dataclass(frozen=True)
class Zeroed:
    """Bytes at the beginning of a pointer parameter's buffer that are zero before every launch. Raises
    `DriverError` for negative numbers."""
    pointer: int
    nbytes: int

    def __post_init__(self) -> None:
        if min(self.pointer, self.nbytes) < 0:
            raise DriverError(f"{self.nbytes} B of pointer {self.pointer} to be zeroed", "numbers from 0")


@dataclass(frozen=True)
class Integer:
    """An integer argument of a kernel: `offset + Σ factors · variables of the launch`."""
    offset: int
    factors: tuple[int, ...]

    def of(self, values: Sequence[int]) -> int:
        """Its value. Before variables have values they are 0, and what would be negative is 0 too."""
        return max(0, self.offset + sum(f * v for f, v in zip(self.factors, values, strict=True)))


@dataclass(frozen=True)
class LaunchConfig:
    """Bytes of dynamic shared memory, CTAs of a cluster, whether the kernel may begin before the one ahead of
    it has ended (programmatic dependent launch: it executes griddepcontrol.wait), memory that is zeroed
    before it, its tensor maps, and its integers where these are not the launch's variables. A `call` of a
    library takes the kernel's place (runtime/library_call.py). With `peers` devices run the kernel together,
    and it has two arguments behind its pointers that say who it is among them (runtime/together.py)."""
    dynamic_smem: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    pdl: bool = False
    zeroed: tuple[Zeroed, ...] = ()
    maps: tuple[MapArgument, ...] = ()
    integers: tuple[Integer, ...] = ()
    call: Hashable = None
    peers: Any = None       # hashable

    def describe(self) -> str:
        """Comment lines for a reader of the kernel's PTX. Nothing parses them."""
        lines = [f"// launch: dynamic_smem={self.dynamic_smem} cluster={_list_numbers(self.cluster)} "
                 f"pdl={int(self.pdl)}"]
        lines += [f"// zero: pointer={each.pointer} bytes={each.nbytes}" for each in self.zeroed]
        lines += [f"// integer: offset={i.offset} factors={_list_numbers(i.factors)}" for i in self.integers]
        if self.peers is not None: lines.append(f"// together: {self.peers}")
        lines += [f"// tensormap: pointer={m.pointer} dtype={m.dtype} dims={_list_numbers(m.dims)} "
                  f"strides={_list_numbers(m.strides)} box={_list_numbers(m.box)} swizzle={m.swizzle} "
                  f"offset={m.offset_bytes} dynamic={m.dynamic} integer={m.integer}{_columns(m)}"
                  for m in self.maps]
        return "\n".join(lines) + "\n"


PLAIN = LaunchConfig()  # of a kernel that needs nothing of this


def _columns(m: MapArgument) -> str:
    if not m.lower: return ""
    return f" im2col={_list_numbers(m.lower)}..{_list_numbers(m.upper)} steps={_list_numbers(m.steps)}"


def _list_numbers(numbers: tuple[int, ...]) -> str: return ",".join(map(str, numbers))
