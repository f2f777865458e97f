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

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.launch import Integer, LaunchConfig, MapArgument, Zeroed

FLAGS = 2  # the pointer parameter of a matmul's flags: out, workspace, flags


@dataclass(frozen=True)
class Scratch:
    """Memory of a call that nothing reads afterwards: so many elements, as an output that comes at place `at`
    among the outputs, or after the others. `held`: what a prediction of the kernels that read it finds there,
    by the arrays of the call's arguments by name."""
    dtype: DType
    count: int
    at: int | None = None
    held: Callable[[Any], Any] | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.count * self.dtype.itemsize

    @staticmethod
    def floats(nbytes: int) -> tuple[Scratch, ...]:
        """At least so many bytes of float32; nothing for none."""
        return (Scratch(dtypes.float32, -(-nbytes // 4)),) if nbytes else ()


@dataclass(frozen=True)
class Chain:
    """Two kernels, of GPUs or of CPUs: one that writes `between` in the place of the output, and one that
    makes the output of that alone."""
    first: Any
    second: Any
    between: Scratch


@dataclass(frozen=True)
class TileKernel:
    """A kernel of any template. `grid` is that of the most rows; where `rows_of_cta` is not 0, x is ceil(rows
    / rows_of_cta) times `ctas_of_rows` of a launch instead. With `pdl` it may be launched before the kernel
    ahead of it has ended, for which it waits itself (griddepcontrol). `integers` are its integer arguments
    where these are not the launch's variables."""
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
    integers: tuple[Integer, ...] = ()
    parts: ClassVar[int] = 1  # a CPU's kernel has several

    @property
    def text(self) -> str:
        """Text that is compiled."""
        return self.ptx

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a CTA, as x, y, z."""
        return self.threads, 1, 1

    @property
    def kernels(self) -> tuple[TileKernel, ...]:
        """Kernels that a call launches."""
        return (self,)

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Memory that a call needs besides its arguments."""
        return ()

    def with_integers(self, integers: tuple[Integer, ...]) -> Self:
        """The kernel with these integer arguments."""
        return replace(self, integers=integers)

    def grid_for(self, rows: int) -> tuple[int, int, int]:
        """The grid of a launch with so many rows."""
        if not self.rows_of_cta: return self.grid
        return (-(-rows // self.rows_of_cta) * self.ctas_of_rows, *self.grid[1:])

    @property
    def zeroed(self) -> tuple[Zeroed, ...]:
        """Memory that is zero before every launch."""
        return ()

    @property
    def launch(self) -> LaunchConfig:
        """How it is launched."""
        return LaunchConfig(self.dynamic_smem, self.cluster, self.pdl, self.zeroed, self.maps, self.integers)


@dataclass(frozen=True)
class GemmKernel(TileKernel):
    """A kernel of a matmul. Its rows are a symbolic spec's `m`."""
    workspace_bytes: int = 0
    flags: int = 0

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        if not self.workspace_bytes: return ()
        return (*Scratch.floats(self.workspace_bytes), Scratch(dtypes.uint32, max(self.flags, 1)))

    @property
    def zeroed(self) -> tuple[Zeroed, ...]:
        if not self.flags: return ()
        assert self.workspace_bytes, "flags come after a workspace"
        return (Zeroed(FLAGS, 4 * self.flags),)


@dataclass(frozen=True)
class AttentionKernel(TileKernel):
    """A kernel of an attention. Parameters in this order: out; l, where the spec has `lse`; q, k, v;
    scales of q, of k, of v, where it has them; cu_q, cu_k, s32, of a ragged batch; sinks, where it has them;
    seed, two u32, lower half first, of dropout; x0, x1, … of the score; u32 s_q, s_kv, start, those of
    them that are symbolic; tensor maps, whose dynamic dimension is an integer by its number. Its rows are
    s_q."""


@dataclass(frozen=True)
class BackwardKernel(TileKernel):
    """A kernel of an attention's backward pass. Parameters in this order: dq, float32 [*batch, s_q, d],
    `dq_bytes`, zero before every launch; turns, u32, `flags` of them, zero before every launch, where that is
    not 0; dk; dv; q; k; v; grad; l; delta; seed, two u32, of dropout; x0, x1, … of the score; u32 s_q, s_kv,
    start, those of them that are symbolic; tensor maps. Its rows are s_kv."""
    dq_bytes: int = 0
    flags: int = 0

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        return (Scratch(dtypes.uint32, self.flags, at=1),) if self.flags else ()

    @property
    def zeroed(self) -> tuple[Zeroed, ...]:
        turns = (Zeroed(1, 4 * self.flags),) if self.flags else ()
        return (Zeroed(0, self.dq_bytes), *turns)


@dataclass(frozen=True)
class KernelsInTurn:
    """Kernels that are launched one after the other, all with the same parameters: out; workspace,
    `workspace_bytes` of float32, never initialised, where that is not 0; then the arguments."""
    kernels: tuple[TileKernel, ...]
    workspace_bytes: int = 0

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """The workspace, where there is one."""
        return Scratch.floats(self.workspace_bytes)


@dataclass(frozen=True)
class DecodeKernel(KernelsInTurn):
    """The kernels of a decode attention, launched one after the other, all with the same parameters: out;
    workspace, `workspace_bytes` of uninitialised float32, where that is not 0; q; pages of k and
    of v; table; lengths, in memory; scales of k and of v; x0, x1, … of the score; u32 length, an argument:
    those of them that the spec has. Grids are those of the most requests and tokens: z counts requests."""

    def with_integers(self, integers: tuple[Integer, ...]) -> DecodeKernel:
        """The kernels with these integer arguments."""
        return replace(self, kernels=tuple(each.with_integers(integers) for each in self.kernels))


@dataclass(frozen=True)
class ProgramsInTurn:
    """Kernels of programs that are launched one after the other, all with the same parameters: outputs;
    scratch, never initialised; inputs."""
    kernels: tuple[TileKernel, ...]
    scratch: tuple[Scratch, ...]
