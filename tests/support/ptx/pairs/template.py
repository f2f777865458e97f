"""Kernels that hold their own bugs, and what running one comes to.

Protocol: a `Kernel`'s text is the right kernel plus marks at the ends of lines, or on lines above them:
`//: cure=a,b` (the line is missing in the variants with bug a or b), `//: bug=a` (it is there in the
variant with bug a alone), `//: at=a` (a finding of bug a points here). `source(None)` is the cured kernel,
`source("a")` the one with bug a; the two have the same lines otherwise, at the same numbers. Registers need
no declarations: the first letter of a name tells its type (`%p_…` predicate, `%d_…` 64 bits, `%f_…` f32,
`%h_…` 16 bits, `%r_…` 32 bits); parameters `d_…` and `r_…` and the addresses of tensor maps `map_…` and of
shared variables (`%r_…`) are in registers of their names when the text begins, and so are the thread, lane,
warp and CTA number (`%r_thread`, `%r_lane`, `%r_warp`, `%r_cta`).
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator import Emulator, Finding

TYPES = {"p": "pred", "d": "b64", "f": "f32", "h": "b16", "r": "b32"}
NAME = re.compile(r"%([pdfhr]_\w+)")

# arguments, and what each output buffer holds when the kernel is right
Setup = Callable[[Emulator], tuple[list[object], list[tuple[object, np.ndarray]]]]


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel, its bugs (name: kinds of finding, any of which will do) and its launch. `refused` are bugs
    that ptxas objects to as well."""
    name: str
    text: str
    bugs: dict[str, tuple[str, ...]]
    setup: Setup
    grid: int = 1
    block: int = 128
    cluster: int = 1
    arch: str = "sm_90a"
    step_limit: int = 1_000_000
    refused: frozenset[str] = field(default_factory=frozenset)

    def source(self, bug: str | None) -> str:
        """PTX of the variant."""
        out = []
        for line, marks in marked(self.text):
            absent = bug in marks["cure"] or (bool(marks["bug"]) and bug not in marks["bug"])
            out.append("" if absent else line)
        return "\n".join(out) + "\n"

    def lines(self, bug: str) -> set[int]:
        """Numbers of the lines that findings of a bug point to; empty: any."""
        return {number for number, (_, marks) in enumerate(marked(self.text), 1) if bug in marks["at"]}


def marked(text: str) -> Iterator[tuple[str, dict[str, set[str]]]]:
    """The lines without their marks, and the bugs in these; a line of marks alone is empty."""
    marks: dict[str, set[str]] = {"cure": set(), "bug": set(), "at": set()}
    for line in text.splitlines():
        body, _, mark = line.partition("//:")
        for key, bugs in (part.split("=") for part in mark.split()): marks[key] |= set(bugs.split(","))
        if mark and not body.strip():
            yield "", {key: set() for key in marks}
            continue
        yield body.rstrip(), marks
        marks = {key: set() for key in marks}


def kernel(name: str, parameters: str, shared: str, body: str, bugs: dict[str, str], setup: Setup,
           *, block: int = 128, directives: str = "", arch: str = "sm_90a", refused: str = "",
           **launch: int) -> Kernel:
    """A `Kernel` from the names of its parameters, declarations of shared variables (`name:bytes:align`, …),
    its body, and bugs with their kinds (`"race|async-hazard"`)."""
    names = parameters.split()
    declared = [f".param .align 64 .b8 {n}[128]" if n.startswith("map_")
                else f".param .{TYPES[n[0]]} {n}" for n in names]
    loads = [f"mov.b64 %d_{n}, {n}; cvta.param.u64 %d_{n}, %d_{n};" if n.startswith("map_")
             else f"ld.param.{TYPES[n[0]]} %{n}, [{n}];" for n in names]
    loads += [f"mov.u32 %r_{item.split(':')[0]}, {item.split(':')[0]};" for item in shared.split()]
    variables = [".shared .align {2} .b8 {0}[{1}];".format(*item.split(":")) for item in shared.split()]
    found = {*NAME.findall(body), *NAME.findall("".join(loads)), "r_thread", "r_lane", "r_warp", "r_cta"}
    registers = [f".reg .{kind} {', '.join('%' + n for n in sorted(found) if n[0] == letter)};"
                 for letter, kind in TYPES.items() if any(n[0] == letter for n in found)]
    head = [".version 8.6", f".target {arch}", ".address_size 64",
            f".visible .entry {name}({', '.join(declared)})", f".reqntid {block} {directives}", "{",
            *registers, *variables, "mov.u32 %r_thread, %tid.x;", "and.b32 %r_lane, %r_thread, 31;",
            "shr.u32 %r_warp, %r_thread, 5;", "mov.u32 %r_cta, %ctaid.x;", *loads]
    text = "\n".join([*head, body.strip("\n"), "ret;", "}"])
    kinds = {bug: tuple(kind.split("|")) for bug, kind in bugs.items()}
    return Kernel(name, text, kinds, setup, block=block, arch=arch, refused=frozenset(refused.split()),
                  **launch)


# **** PTX that repeats ****

TENSOR = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def wait(barrier: str, parity: str) -> str:
    """Waits for the phase of a parity of an mbarrier, in one line."""
    return (f"{{ .reg .pred %done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [{barrier}], "
            f"{parity}; @!%done bra AGAIN; }}")


def arrive(barrier: str) -> str:
    """One arrival at an mbarrier of the own CTA."""
    return f"mbarrier.arrive.shared::cta.b64 _, [{barrier}];"


def registers(prefix: str, count: int) -> str:
    """`%prefix0, %prefix1, …`: a list of registers for a wgmma or an mma."""
    return ", ".join(f"%{prefix}{i}" for i in range(count))


# **** runs ****

@dataclass(frozen=True)
class Outcome:
    """One launch: its findings, and whether every output was bit for bit what it should be."""
    findings: list[Finding]
    exact: bool


@cache
def emulator(arch: str, limit: int) -> Emulator: return Emulator(arch=arch, check=True, step_limit=limit)


@cache
def run(case: Kernel, bug: str | None, seed: int | str) -> Outcome:
    """Launches a variant under a seed."""
    emu = emulator(case.arch, case.step_limit)
    emu.seed = seed
    before = set(emu.buffers)
    arguments, outputs = case.setup(emu)
    report = emu.launch(case.source(bug), grid=case.grid, block=case.block, cluster=case.cluster,
                        args=arguments)
    exact = all(np.array_equal(buffer.numpy(), expected) for buffer, expected in outputs)
    for address in set(emu.buffers) - before:
        if all(address not in loaded.addresses.values() for loaded in emu.modules.values()):
            emu.free(emu.buffers[address])
    return Outcome(report.findings, exact)


def assembles(case: Kernel, bug: str | None) -> bool:
    """Whether ptxas takes a variant as it stands. Raises `PTXError` when it is no PTX at all."""
    try: assemble(case.source(bug), case.arch)
    except PTXError as error:
        if "changed the kernel" in str(error): return False
        raise
    return True


def points(case: Kernel, bug: str, finding: Finding) -> bool:
    """Whether a finding is of an expected kind and at a line that the bug is about: its own or that of the
    other access."""
    lines = case.lines(bug)
    other = {int(number) for number in re.findall(r"\(line (\d+)", finding.message)}
    return finding.kind in case.bugs[bug] and (not lines or bool(lines & {finding.ptx_line, *other}))
