"""The part "chains" of bench/gpu/run.py: recorded launches again, among kernels that each begin before the
one ahead has ended (programmatic dependent launch).

Rows are tests of gpu/record.py with a kernel that waits (griddepcontrol.wait). A launch of one is made
`ROUNDS` times, as kernels in a row, every one of them programmatic:

    spoil       fills all that the kernel can reach with ones
    restore     puts there what it was given, after a while
    the kernel
    keep        copies all of it away

once in a stream, once as nodes of a graph. A kernel that reads before it has waited meets spoiled memory, one
that is read before it has ended leaves spoiled answers. What was kept must be what gpu/correct.py asks for.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.gpu.cases import Case, Cases, relocate
from bench.gpu.correct import arguments, open_worker, readable, render, rows_of
from bench.gpu.parts import Options, Part, register
from tinygrad_nv.runtime.driver import Driver, Launch, Node, Work, integer, pointer

ROUNDS = 3
ALIGN = 1024        # of each buffer: swizzled boxes of TMA have no wider need
THREADS, MOST_CTAS = 256, 16    # of a move: the rest of the GPU is for the dependent launches
WAIT = "griddepcontrol.wait"
PROBE = "%probe"    # test_pdl.py: loads in place of prefetches, to see where these go
# 16 bytes a thread at a time; lets the next kernel begin at once, waits, and takes its time
MOVE = """.version 8.0
.target sm_90
.address_size 64
.visible .entry move(.param .u64 to, .param .u64 from, .param .u32 vectors)
{
.reg .b64 %to, %from, %at, %a, %b;
.reg .b32 %i, %n, %step, %cta, %size, %x<4>;
.reg .pred %done;
griddepcontrol.launch_dependents;
ld.param.b64 %to, [to];
ld.param.b64 %from, [from];
ld.param.b32 %n, [vectors];
mov.u32 %cta, %ctaid.x;
mov.u32 %size, %ntid.x;
mov.u32 %i, %tid.x;
mad.lo.u32 %i, %cta, %size, %i;
mov.u32 %step, %nctaid.x;
mul.lo.u32 %step, %step, %size;
griddepcontrol.wait;
nanosleep.u32 5000;
again:
setp.ge.u32 %done, %i, %n;
@%done bra out;
mul.wide.u32 %at, %i, 16;
add.u64 %a, %from, %at;
add.u64 %b, %to, %at;
ld.global.v4.b32 {%x0, %x1, %x2, %x3}, [%a];
st.global.v4.b32 [%b], {%x0, %x1, %x2, %x3};
add.u32 %i, %i, %step;
bra again;
out:
ret;
}
"""


def in_chains(driver: Driver, case: Case) -> Iterator[tuple[list[bytes], list[int]]]:
    """Memory after the kernel in each round of both ways, and where it lay. Nothing stays behind."""
    starts, total = [], 0
    for each in case.memory:
        starts.append(total)
        total += -(-max(len(each.before), 1) // ALIGN) * ALIGN
    arena, given, spoiled, *kept = taken = [driver.alloc(total) for _ in range(3 + ROUNDS)]
    modules = driver.load(MOVE.encode()), driver.load(readable(case.ptx).encode())
    try:
        addresses = [arena + start for start in starts]
        driver.copy_in(given, memoryview(bytes(total)))
        for start, each in zip(starts, case.memory, strict=True):
            driver.copy_in(given + start, memoryview(relocate(each.before, case.memory, addresses)))
        driver.copy_in(spoiled, memoryview(b"\xff" * total))
        vectors = total // 16

        def move(to: int, come: int) -> Launch:
            return Launch(modules[0].function("move"), (min(MOST_CTAS, -(-vectors // THREADS)), 1, 1),
                          (THREADS, 1, 1), (pointer(to), pointer(come), integer(vectors)), pdl=True)
        kernel = Launch(modules[1].function(case.entry), case.grid, case.block,
                        arguments(driver, case, addresses), case.dynamic_smem, case.cluster, pdl=True)
        works: list[Work] = [work for to in kept for work in
                             (move(arena, spoiled), move(arena, given), kernel, move(to, arena))]
        for run in (in_a_stream, in_a_graph):
            for to in kept: driver.copy_in(to, memoryview(bytes(total)))
            run(driver, works)
            driver.synchronize()
            for to in kept:
                whole = bytearray(total)
                driver.copy_out(memoryview(whole), to)
                yield [bytes(whole[start:start + len(each.before)])
                       for start, each in zip(starts, case.memory, strict=True)], addresses
    finally:
        for module in modules: module.unload()
        for address in taken: driver.free(address)


def in_a_stream(driver: Driver, works: list[Work]) -> None:
    """One after the other."""
    for work in works: driver.submit(work)


def in_a_graph(driver: Driver, works: list[Work]) -> None:
    """Adds the launches as nodes, each with an edge from the one before."""
    graph = driver.graph()
    after: list[Node] = []
    for work in works: after = [graph.add(work, after)]
    graph.instantiate().launch()


def waiting(cases: Cases) -> list[str]:
    """Names of the launches of kernels that wait, but for those into which a test put loads before that."""
    early = set(cases.names(PROBE))
    return [name for name in cases.names(WAIT) if name not in early]


def rows(options: Options) -> list[str]:
    """Tests with such a kernel."""
    return rows_of(options, waiting)


register(Part("chains", "recorded launches among programmatic ones, against the emulator's answers", rows,
              partial(open_worker, part="chains", names_of=waiting, answers=in_chains), render,
              expected_s=1.5, limit_s=90.0))
