"""Microbenchmarks of bench/gpu/calibrate.py, and the kernel that all of them share.

Protocol. A `Probe` is a loop: `body(kb, memory, tensor)` writes what comes before it, and returns what writes
a round, the values to keep, and what comes behind the loop. Clocks are read around the loop, by each warp;
the kernel runs with two numbers of rounds, and the difference of times over that of rounds is what a round
takes: what begins and ends a kernel cancels out. `program(probe, arch)` is its PTX, of the parameters

    out         clock64 and globaltimer before and after the loop, 4 x 64 bits for each warp
    memory      `nbytes`, zeros or random
    rounds      of the loop
    map         for probes with a `box`: a tensor map of `memory`, rows of 128 bytes

Rounds are long and marked so that ptxas does not unroll them. What a round computes follows from what it
read from memory, so ptxas cannot leave it out. Addresses of loads move from round to round: ptxas takes loads
of the same place out of the loop, as it did in the first probes of L2 and of bank conflicts. `sass` of a
probe says what its loop has, and `count_in_loop` counts it.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.builder import Kernel, Label, Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.ptx.sass import disassemble, functions, loops

CLOCKS = ("clock64", "globaltimer")
WORDS = 2 * len(CLOCKS)         # of 64 bits that a warp writes
ROW_BYTES = 128                 # of a tensor map's rows: the widest swizzle
ENTRY = "probe"


class Loop(NamedTuple):
    """`one_round` writes a round, `after` what comes behind the loop; `kept` are the values that matter."""
    one_round: Callable[[], None]
    kept: Sequence[Value] = ()
    after: Callable[[], None] = lambda: None


Body = Callable[[Kernel, Value, Value | None], Loop]


@dataclass(frozen=True)
class Probe:
    """A microbenchmark. `count`: operations, or bytes, of a round; what is reported is a round's cycles for
    each of them, or with `rate` how many of them a cycle. `rounds`: those of the two launches. `ctas`: 0 for
    `ctas_of_sm` on each SM, whose time is that of the whole launch. `near`: what it reads is in L2 already.
    `random`: what memory has; else zeros. `sass`: an opcode, and how many of it the loop has. `share`: the
    part of the SMs that has CTAs, where `ctas` is 0. `needs`: the first architecture that has the
    instructions; `without`: later ones that do not."""
    name: str
    body: Body
    count: float = 1.0
    rate: bool = False
    threads: int = 32
    rounds: tuple[int, int] = (8, 24)
    ctas: int = 1
    ctas_of_sm: int = 1
    cluster: int = 1
    nbytes: int = 4096
    box: int = 0                # rows of the tensor map's box
    smem: int = 0               # bytes of dynamic shared memory beyond the kernel's own
    near: bool = False
    random: bool = False
    sass: tuple[str, int] = ("", 0)
    share: float = 1.0
    needs: str = "sm_80"
    without: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Unit of the value."""
        return "a cycle" if self.rate else "cycles"


PROBES: dict[str, Probe] = {}


def register(probes: Iterable[Probe]) -> None:
    """Adds probes, in the order in which they are measured."""
    for probe in probes:
        assert probe.name not in PROBES, probe.name
        PROBES[probe.name] = probe


def fits(probe: Probe, arch: str) -> bool:
    """Whether an architecture has what the probe measures."""
    return arch[:5] >= probe.needs[:5] and arch not in probe.without


def program(probe: Probe, arch: str) -> tuple[str, int]:
    """The PTX of a probe, and the bytes of dynamic shared memory to launch it with."""
    cluster = (probe.cluster,) if probe.cluster > 1 else ()
    kb = Kernel(ENTRY, arch, probe.threads, cluster=cluster)
    out, memory, rounds = kb.pointer("out"), kb.pointer("memory"), kb.param("rounds", "u32")
    tensor = kb.tensor_map("map") if probe.box else None
    loop = probe.body(kb, memory, tensor)
    kb.sync()
    begin = [_read(kb, clock) for clock in CLOCKS]
    with kb.loop(0, rounds):
        kb.nounroll()
        loop.one_round()
    loop.after()
    end = [_read(kb, clock) for clock in CLOCKS]
    _keep_alive(kb, out, loop.kept)
    if probe.cluster > 1: _meet(kb)     # shared memory of the others stays until all have read it
    warps = probe.threads // 32
    with kb.if_(kb.special("laneid") == 0):
        warp = kb.ctaid.x * warps + kb.tid.x // 32
        at = out + warp.to("u64") * (8 * WORDS)
        for i, (first, last) in enumerate(zip(begin, end, strict=True)):
            kb.st("global", "b64", at.at(16 * i), [first, last])
    return kb.ptx(), kb.dynamic_smem


def count_in_loop(probe: Probe, arch: str) -> Counter[str]:
    """Returns the opcodes of the loop as ptxas left it."""
    code = functions(disassemble(assemble(program(probe, arch)[0], arch).cubin))[ENTRY]
    return max((loop.counts for loop in loops(code)), key=lambda counts: counts.total())


def _read(kb: Kernel, clock: str) -> Value:
    made = kb.reg("u64")
    kb.emit("mov.u64", made, Label(f"%{clock}"))
    return made


def _meet(kb: Kernel) -> None:
    kb.cluster_arrive()
    kb.cluster_wait()


def _keep_alive(kb: Kernel, out: Value, values: Sequence[Value]) -> None:
    """Uses values in a way that ptxas cannot tell to be without effect."""
    whole = kb.reg("b32", 0)
    for value in values:
        bits = value
        if value.kind != "b32":
            bits = kb.reg("b32")
            if value.kind in ("u64", "b64", "s64"): kb.emit("cvt.u32.u64", bits, value)
            else: kb.emit("mov.b32", bits, value)
        whole ^= bits
    with kb.if_(whole == 0x3d2b1a47): kb.st("global", "b32", out.at(), whole)


def fold(into: Value, values: Sequence[Number]) -> None:
    """XORs values into a register."""
    for value in values: into ^= value


def accumulate(into: Value, value: Number) -> None:
    """Adds a value to a register."""
    into += value


def words(kb: Kernel, memory: Value, count: int, kind: str = "b32") -> list[Value]:
    """`count` values from memory: zeros, or random ones, which ptxas does not know."""
    return [kb.ld("global", kind, memory.at(4 * i))[0] for i in range(count)]


def fill_shared(kb: Kernel, memory: Value, nbytes: int, threads: int,
                align: int = 1024) -> tuple[Value, Value]:
    """Shared memory with a copy of memory's first `nbytes`: its address, as u32, and a zero of memory's."""
    tile = kb.shared("tile", nbytes, align)
    with kb.loop(0, nbytes // (16 * threads)) as i:
        offset = (i.to("u32") * threads + kb.tid.x) * 16
        loaded = kb.ld("global", "b32", (memory + offset.to("u64")).at(), 4)
        kb.st("shared", "b32", tile.address(offset).at(), loaded)
    if kb.hopper: kb.fence_proxy_async()
    kb.sync()
    return tile.address(0), words(kb, memory, 1)[0]
