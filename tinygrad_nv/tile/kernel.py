"""A finished kernel: PTX, and how it is launched.

Protocol. Parameters in this order, each in its natural alignment:

    out                     where the result goes
    workspace, flags        where `workspace_bytes` is not 0: float32 partial sums, never initialised; and
                            u32 flags, zero before every launch
    a, b, x0, x1, …         operands, and the epilogue's parameters
    m                       u32: how many rows there are, of a symbolic spec
    tensor maps             128 bytes each, one for each of `maps`

All pointers are beginnings of buffers, aligned to 16 bytes; offsets are the kernel's own matter.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MapArgument:
    """A tensor map over the buffer of pointer parameter `pointer`, innermost dimension first, to be made for
    each launch: `dims` in elements, `strides` in bytes (without the innermost), `box` in elements. `dynamic`
    is the dimension, -1 for none, whose extent is an integer argument of the launch: that number `integer`,
    -1 for the last, which is a product's `m`."""
    pointer: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "128B"
    offset_bytes: int = 0
    dynamic: int = -1
    integer: int = -1


@dataclass(frozen=True)
class GemmKernel:
    """A kernel of a product. `grid` is that of the most rows; of a symbolic spec, where `rows_of_cta` is not
    0, x is ceil(m / rows_of_cta) times `ctas_of_rows` instead. With `pdl` it may be launched before the
    kernel ahead of it has ended, for which it waits itself (griddepcontrol)."""
    name: str
    ptx: str
    grid: tuple[int, int, int]
    threads: int
    dynamic_smem: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    maps: tuple[MapArgument, ...] = ()
    workspace_bytes: int = 0
    flags: int = 0
    rows_of_cta: int = 0
    ctas_of_rows: int = 1
    pdl: bool = False

    def grid_for(self, m: int) -> tuple[int, int, int]:
        """The grid of a launch with `m` rows."""
        if not self.rows_of_cta: return self.grid
        return (-(-m // self.rows_of_cta) * self.ctas_of_rows, *self.grid[1:])


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel of an attention. Parameters in this order: out; l, where the spec has `log_sum`; q, k, v; x0,
    x1, … of the score; u32 s_q, s_kv, start, those of them that are symbolic; tensor maps, whose dynamic
    dimension is an integer by its number.

    `grid` is that of the most rows: x counts blocks of rows, times `ctas_of_rows`. With s_q symbolic, x is
    ceil(s_q / rows_of_cta) · ctas_of_rows of a launch."""
    name: str
    ptx: str
    grid: tuple[int, int, int]
    threads: int
    dynamic_smem: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    maps: tuple[MapArgument, ...] = ()
    rows_of_cta: int = 0
    ctas_of_rows: int = 1
    pdl: bool = False

    def grid_for(self, s_q: int) -> tuple[int, int, int]:
        """The grid of a launch with so many rows."""
        if not self.rows_of_cta: return self.grid
        return (-(-s_q // self.rows_of_cta) * self.ctas_of_rows, *self.grid[1:])


@dataclass(frozen=True)
class DecodeKernel:
    """The kernels of a decode attention, launched one after the other, all with the same parameters: out;
    workspace, `workspace_bytes` of float32 that nobody initialises, where that is not 0; q; pages of k and
    of v; table; lengths; scales of k and of v, where the spec has them. Grids are those of the most requests
    and tokens: z counts requests."""
    kernels: tuple[AttentionKernel, ...]
    workspace_bytes: int = 0
