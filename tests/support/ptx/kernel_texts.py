"""PTX bodies as kernels: for tests of single instructions and of small protocols.

Protocol: `run(body, *args)` wraps a body, launches it on a new emulator and returns the report. Buffers are
parameters of 64 bits, loaded into %a0, %a1, …; integers parameters of 32 bits, loaded into %n0, %n1, … by
their place among the arguments. %t is %tid.x, %c is %ctaid.x. Registers for the body's use: %h<16> (16 bits),
%r<32>, %d<32> (64 bits), %q<8> (128 bits), %f<16>, %p<16>.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_nv.ptx.emulator import Buffer, Emulator, Report

HEADER = ".version 8.7\n.target {arch}\n.address_size 64\n"
REGISTERS = (".reg .b16 %h<16>; .reg .b32 %r<32>, %t, %c; .reg .b64 %d<32>; .reg .b128 %q<8>; "
             ".reg .f32 %f<16>; .reg .pred %p<16>;")


def kernel(body: str, args: tuple[Any, ...], variables: str = "", arch: str = "sm_90a",
           directives: str = "") -> str:
    """The PTX text; `variables` are declared at module scope. The body begins at line 6 + their lines."""
    wide = [isinstance(arg, Buffer) for arg in args]
    parameters = ", ".join(f".param .b{64 if w else 32} p{i}" for i, w in enumerate(wide))
    loads = [f".reg .b{64 if w else 32} %{'a' if w else 'n'}{i}; ld.param.b{64 if w else 32} "
             f"%{'a' if w else 'n'}{i}, [p{i}];" for i, w in enumerate(wide)]
    return (HEADER.format(arch=arch) + variables
            + f".visible .entry test({parameters}) {directives}{{ {REGISTERS} "
            + " ".join(loads) + f" mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x;\n{body}\nret;\n}}\n")


def run(body: str, *args: Any, emu: Emulator | None = None, grid: int = 1, block: int = 32, cluster: int = 1,
        dynamic: int = 0, variables: str = "", directives: str = "", arch: str = "sm_90a") -> Report:
    """Launches a body over `grid` CTAs of `block` threads."""
    emu = emu or Emulator(arch)
    text = kernel(body, args, variables, arch, directives)
    return emu.launch(text, grid, block, args, cluster=(cluster, 1, 1), dynamic_smem=dynamic)


def kinds(report: Report) -> list[str]:
    """The kinds of its findings, sorted."""
    return sorted(finding.kind for finding in report.findings)


def found(report: Report, kind: str, *words: str) -> None:
    """Findings of one kind alone, the first saying all of `words`."""
    assert set(kinds(report)) == {kind}, [str(f) for f in report.findings]
    message = report.findings[0].message
    assert [word for word in words if word not in message] == [], message


def sound(report: Report) -> None:
    """Nothing found."""
    assert report.findings == [], [str(f) for f in report.findings]


def words(buffer: Buffer, kind: type = np.uint32) -> np.ndarray:
    """What a buffer holds now, as a flat array."""
    return np.frombuffer(buffer.numpy().tobytes(), kind)
