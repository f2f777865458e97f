"""A finished kernel for the CPU: C, and how it is launched.

Protocol. One C function, whose parameters are those of the same kernel on a GPU (tile/kernel.py) in the same
order, less tensor maps: pointers to outputs, to `workspace_bytes` of uninitialised memory where that is not
0, to operands and to the parameters of expressions; then integers (`int`); then `int core_id` where `parts` >
1. The function is called once for each core_id in 0 … parts − 1, in any order, by several threads at a time.
Parts write different elements, and what each computes does not depend on how many there are: results have the
same bits on any number of threads.

`source` puts vector.h ahead of the text. Code for an instruction set that the compiler was not asked for is
made by clang's attribute `target`, so it compiles everywhere and runs where the processor has it.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import ClassVar

from tinygrad.dtype import DType

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.kernel import Scratch
from tinygrad_nv.tile.launch import PLAIN, Integer, LaunchConfig

# what elements of a dtype are in C, where vector.h has functions for them
C_TYPES = {"f32": "float", "bf16": "u16", "f16": "u16", "e4m3": "u8", "e5m2": "u8", "bool": "u8", "s8": "s8",
           "u8": "u8", "s16": "s16", "u16": "u16", "s32": "s32", "u32": "u32"}


@dataclass(frozen=True)
class CPUKernel:
    """A kernel: the name of its function, its text, and in how many parts it is called."""
    name: str
    source: str
    parts: int = 1
    workspace_bytes: int = 0
    # as a GPU's kernel has them
    grid: ClassVar[tuple[int, ...]] = ()
    block: ClassVar[tuple[int, ...]] = ()
    rows_of_cta: ClassVar[int] = 0
    ctas_of_rows: ClassVar[int] = 1
    launch: ClassVar[LaunchConfig] = PLAIN

    @property
    def text(self) -> str:
        """C that is compiled."""
        return self.source

    @property
    def kernels(self) -> tuple[CPUKernel, ...]:
        """Kernels that a call runs."""
        return (self,)

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """The workspace, where there is one."""
        return Scratch.floats(self.workspace_bytes)


def c_type(dtype: DType) -> str:
    """The C type of an element in memory."""
    return C_TYPES[short(dtype)]


def kernel(name: str, isa: ISA, body: str, outputs: Sequence[tuple[str, str]],
           inputs: Sequence[tuple[str, str]], integers: Sequence[str] = (), parts: int = 1,
           workspace_bytes: int = 0, before: str = "") -> CPUKernel:
    """A kernel of pointers (C type, name), integers and a body. `before` are functions it calls."""
    pointers = [f"{kind} *restrict {name}" for kind, name in outputs]
    pointers += [f"const {kind} *restrict {name}" for kind, name in inputs]
    words = [*pointers, *(f"int {each}" for each in integers), *["int core_id"] * (parts > 1)]
    core = "" if parts > 1 else "  const int core_id = 0;\n"
    text = f"{before}\nvoid {name}({', '.join(words)}) {{\n{core}{body}\n}}\n"
    return CPUKernel(name, source(text, isa), parts, workspace_bytes)


def compute_integers(names: Sequence[str], integers: Sequence[Integer]) -> tuple[list[str], str]:
    """Returns what a kernel takes instead of integers that are computed from the variables of its launch: the
    names of those, v0, v1, …, and C that computes the integers by their names; as `Integer.of`, never below
    0."""
    lines = []
    for name, each in zip(names, integers, strict=True):
        value = " + ".join([str(each.offset), *(f"{f} * v{i}" for i, f in enumerate(each.factors) if f)])
        lines.append(f"  const int {name} = {value} < 0 ? 0 : {value};\n")
    return [f"v{i}" for i in range(len(integers[0].factors))], "".join(lines)


def source(text: str, isa: ISA) -> str:
    """The whole text of a kernel: vector.h for the instruction set, and `text`."""
    wide = isa.lanes > 4 and not isa.emulated
    has = {"W": isa.lanes, "HAVE_FMA": int(wide), "HAVE_F16C": int(wide),
           "AVX512": int(isa.lanes == 16 and not isa.emulated),
           "HAVE_BF16": int(isa.bf16 and not isa.emulated),
           "HAVE_VNNI": int(isa.vnni and not isa.emulated),
           "HAVE_AMX": int(isa.level == "amx" and not isa.emulated)}
    defined = "".join(f"#define {name} {value}\n" for name, value in has.items())
    for_isa = f'__attribute__((target("{isa.clang}")))'
    push = f"#pragma clang attribute push({for_isa}, apply_to = function)\n" if isa.clang else ""
    pop = "#pragma clang attribute pop\n" if isa.clang else ""
    return f"{defined}{push}{header('vector.h')}{text}{pop}"


@functools.cache
def header(name: str) -> str:
    """The text of a file of C that kernels are made of."""
    return resources.files(__package__).joinpath(name).read_text()


def up(x: int, to: int) -> int:
    """The next multiple."""
    return -(-x // to) * to
