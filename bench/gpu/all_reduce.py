"""The part "all_reduce" of bench/gpu/run.py: all-reduce over the memory of peers, of 2, 4 and 8 ranks on one
GPU.

Ranks are streams of the GPU, all of whose CTAs run at once: what is shown is that kernels are right on
hardware, and what they take by the GPU's own memory, not by NVLink. A row is a template, a number of ranks, a
number of elements, their dtype, and columns where residual and RMSNorm follow. Of each:

    replays     of a graph a rank, with another x and spoiled results each time, compared in the graph; now
                and then a rank is held back. Whole numbers, to the bit; of normalized rows, those of the
                first launch, which are near what torch computes
    random      the sum in the order of ranks in float32, rounded once, to the bit
    us, us_pdl  a launch, of 100 in a graph on all ranks, the best of 6; with programmatic launches where
                CTAs of the next kernel have room beside those of all ranks

`results/all_reduce_h100-80gb-hbm3.json` has these rows. With --emulate: at most 300 elements, ranks are
emulated GPUs, no times.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tinygrad.dtype import dtypes

from bench.gpu.launch import open_driver
from bench.gpu.parts import Measure, Options, Part, Row, register
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.runtime.all_reduce import AllReduceGroup
from tinygrad_nv.runtime.driver import Driver, Executable, Fill, Launch, Node, Stream, Work, integer, pointer
from tinygrad_nv.tile.all_reduce.cost import candidates
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, OneShot, TwoShot
from tinygrad_nv.tile.all_reduce.spec import AllReduceSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

B, H, F, I, L = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.int32, dtypes.int64
TORCH = {B: torch.bfloat16, H: torch.float16, F: torch.float32, I: torch.int32, L: torch.int64}
NAMES = {B: "bf16", H: "half", F: "float", I: "int", L: "long"}
SHAPES = (*((n, B, 0) for n in (8, 8192, 1 << 17, (1 << 19) + 3, 1 << 22)),
          *((10007, dtype, 0) for dtype in (H, F, I, L)),
          (4 * 4096, B, 4096), (40 * 8192, B, 8192), (3 * 1024, F, 1024))
MOST_CTAS = 120         # of all ranks, of 132 SMs
EARLY_CTAS = 60         # of all ranks where the next kernel's are there, too
SETS, REPLAYS, TIMED, TIMES = 8, 1000, 100, 6
UNIT = {B: 2.0**-7, H: 2.0**-10, F: 2.0**-20}   # as norm_close of the tests has it
# adds the number of 16-bit words in which `made` is not `wanted`; `hold` takes a millisecond
HELPERS = """.version 8.0
.target sm_80
.address_size 64
.visible .entry differ(.param .u64 made, .param .u64 wanted, .param .u64 bad, .param .u32 words)
{
.reg .b64 %m, %w, %b, %at;
.reg .b32 %i, %n, %x, %y, %s, %count;
.reg .b16 %p, %q;
.reg .pred %done, %same;
ld.param.b64 %m, [made];
ld.param.b64 %w, [wanted];
ld.param.b64 %b, [bad];
ld.param.b32 %n, [words];
mov.u32 %x, %ctaid.x;
mov.u32 %y, %ntid.x;
mov.u32 %i, %tid.x;
mad.lo.u32 %i, %x, %y, %i;
mov.u32 %s, %nctaid.x;
mul.lo.u32 %s, %s, %y;
mov.u32 %count, 0;
again:
setp.ge.u32 %done, %i, %n;
@%done bra out;
mul.wide.u32 %at, %i, 2;
add.u64 %at, %at, %m;
ld.global.b16 %p, [%at];
mul.wide.u32 %at, %i, 2;
add.u64 %at, %at, %w;
ld.global.b16 %q, [%at];
setp.eq.b16 %same, %p, %q;
@!%same add.u32 %count, %count, 1;
add.u32 %i, %i, %s;
bra again;
out:
setp.eq.u32 %same, %count, 0;
@!%same red.global.add.u32 [%b], %count;
ret;
}
.visible .entry hold()
{
nanosleep.u32 1000000;
ret;
}
"""


@dataclass(frozen=True)
class AllReduceCase:
    """A row."""
    spec: AllReduceSpec
    schedule: AllReduceSchedule

    @property
    def name(self) -> str:
        """Name of the case in results."""
        spec = self.spec
        return f"{self.schedule.template}_{spec.world}_{spec.count}_{NAMES[spec.dtype]}_{spec.columns}"

    def scale_down(self) -> AllReduceCase:
        """Returns the case as small as the emulator likes it."""
        spec = self.spec
        columns = min(spec.columns, 64)
        count = 3 * columns if columns else min(spec.count, 299)
        return AllReduceCase(replace(spec, count=count, columns=columns),
                             replace(self.schedule, ctas=2, threads=64))


def cases() -> dict[str, AllReduceCase]:
    """All of them."""
    made = []
    for world in (2, 4, 8):
        for kind in (OneShot, TwoShot):
            for count, dtype, columns in SHAPES:
                spec = AllReduceSpec(world, count, dtype, columns)
                schedule = candidates(spec, kind)[0]
                ctas = min(schedule.ctas, MOST_CTAS // world)
                made.append(AllReduceCase(spec, replace(schedule, ctas=ctas)))
    return {each.name: each for each in made}


class Ranks:
    """A case on its ranks, each a driver and a stream; emulated ones do not wait for each other in one."""

    def __init__(self, case: AllReduceCase, drivers: Sequence[Driver]) -> None:
        self.case, self.drivers = case, drivers
        self.streams = [each.stream() for each in drivers]
        self.kernel = TABLE.build(case.spec, case.schedule, GPU(drivers[0].properties.arch))
        self.functions = [each.load(self.kernel.ptx.encode()).function(self.kernel.name) for each in drivers]
        self.helpers = [each.load(HELPERS.encode()) for each in drivers]
        self.group = AllReduceGroup(drivers, case.schedule.workspace)
        results = 2 if case.spec.columns else 1
        self.outs = [[each.alloc(case.spec.nbytes) for _ in range(results)] for each in drivers]
        self.bad = [upload(each, torch.zeros(1, dtype=torch.int32)) for each in drivers]

    def launch(self, rank: int, x: int, after: Sequence[int], pdl: bool = False) -> Launch:
        """The kernel of a rank."""
        spec, schedule = self.case.spec, self.case.schedule
        args = self.group.arguments(spec, schedule, rank, self.outs[rank], [x, *after])
        return Launch(self.functions[rank], self.kernel.grid, self.kernel.block, args, pdl=pdl)

    def spoil(self, rank: int) -> list[Work]:
        """Nothing of the results that were there."""
        return [Fill(out, 0xff, self.case.spec.nbytes) for out in self.outs[rank]]

    def differ(self, rank: int, wanted: Sequence[int]) -> list[Work]:
        """Counts what is not as it must be."""
        words = self.case.spec.nbytes // 2
        function = self.helpers[rank].function("differ")
        return [Launch(function, (min(-(-words // 256), 8), 1, 1), (256, 1, 1),
                       (*map(pointer, (out, want, self.bad[rank])), integer(words)))
                for out, want in zip(self.outs[rank], wanted, strict=True)]

    def graph(self, rank: int, works: Sequence[Work]) -> Executable:
        """One after another."""
        made, after = self.drivers[rank].graph(), list[Node]()
        for work in works: after = [made.add(work, after)]
        return made.instantiate()

    def everywhere(self, run: Callable[[int, Stream], None]) -> None:
        """On all ranks, once what they are given is there; then waits."""
        self.wait()
        for rank, stream in enumerate(self.streams): run(rank, stream)
        self.wait()

    def wait(self) -> None:
        """For all ranks."""
        for driver in dict.fromkeys(self.drivers): driver.synchronize()

    def results(self, rank: int) -> list[torch.Tensor]:
        """Returns the results of a rank."""
        return [read(self.drivers[rank], out, self.case.spec) for out in self.outs[rank]]


def upload(driver: Driver, x: torch.Tensor) -> int:
    """Memory with these elements."""
    data = x.contiguous().view(torch.uint8).numpy().tobytes()
    driver.copy_in(address := driver.alloc(len(data)), memoryview(data))
    return address


def read(driver: Driver, address: int, spec: AllReduceSpec) -> torch.Tensor:
    """The elements of a result."""
    driver.copy_out(memoryview(data := bytearray(spec.nbytes)), address)
    return torch.frombuffer(data, dtype=TORCH[spec.dtype])


# **** what is right ****

def right(spec: AllReduceSpec, x: Sequence[torch.Tensor],
          after: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """out, and with a norm residual_out behind it."""
    dtype = TORCH[spec.dtype]
    total = x[0].float() if dtype.is_floating_point else x[0]
    for each in x[1:]: total = total + each.to(total.dtype)
    total = total.to(dtype)
    if not spec.columns: return [total]
    residual, weight = after
    new = (total.float() + residual.float()).to(dtype)
    rows = new.view(-1, spec.columns).float()
    scaled = (rows / torch.sqrt(rows.square().mean(-1, keepdim=True) + spec.eps)).to(dtype)
    return [(scaled.float() * weight.float()).to(dtype).flatten(), new]


def unlike(spec: AllReduceSpec, made: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> str:
    """How results are not what they must be; "" where they are."""
    if not torch.equal(made[-1].view(torch.uint8), want[-1].view(torch.uint8)): return "sums differ"
    if not spec.columns: return ""
    off = (made[0].double() - want[0].double()).abs() - 2 * UNIT[spec.dtype] * want[0].double().abs()
    return "normalized rows differ" if bool((off > 0).any()) else ""


def draw_inputs(spec: AllReduceSpec, whole: bool,
                random: torch.Generator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """x of each rank, and residual and weight."""
    dtype = TORCH[spec.dtype]

    def numbers(count: int) -> torch.Tensor:
        if whole: return torch.randint(-4, 5, (count,), generator=random).to(dtype)
        if dtype.is_floating_point: return torch.randn(count, generator=random).to(dtype)
        return torch.randint(-2**31, 2**31, (count,), generator=random).to(dtype)
    x = [numbers(spec.count) for _ in range(spec.world)]
    return x, [numbers(spec.count), torch.ones(spec.columns, dtype=dtype)] if spec.columns else []


# **** what is measured ****

def check_replays(ranks: Ranks, replays: int) -> tuple[Row, str]:
    """Replays with whole numbers, then random ones: figures, and what is wrong."""
    spec, random = ranks.case.spec, torch.Generator().manual_seed(1)
    x, after = draw_inputs(spec, True, random)
    there = [[upload(driver, each) for each in after] for driver in ranks.drivers]
    works: list[list[Work]] = [[] for _ in ranks.drivers]
    first = list[torch.Tensor]()
    for step in range(SETS):
        given = [each + step for each in x]
        want = right(spec, given, after)
        inputs = [upload(driver, each) for driver, each in zip(ranks.drivers, given, strict=True)]
        ranks.everywhere(lambda rank, stream, inputs=inputs: ranks.drivers[rank].submit(  # type: ignore[misc]
            ranks.launch(rank, inputs[rank], there[rank]), stream))
        first = ranks.results(0)
        if words := unlike(spec, first, want): return {}, f"x + {step}: {words}"
        for rank, driver in enumerate(ranks.drivers):
            wanted = [upload(driver, each) for each in first]
            works[rank] += [*ranks.spoil(rank), ranks.launch(rank, inputs[rank], there[rank]),
                            *ranks.differ(rank, wanted)]
    graphs = [ranks.graph(rank, each) for rank, each in enumerate(works)]
    ranks.wait()
    begun = time.perf_counter()
    for number in range(max(1, replays // SETS)):
        if number % 7 == 3:
            late = number // 7 % spec.world
            hold = Launch(ranks.helpers[late].function("hold"), (1, 1, 1), (1, 1, 1))
            ranks.drivers[late].submit(hold, ranks.streams[late])
        for graph, stream in zip(graphs, ranks.streams, strict=True): graph.launch(stream)
    ranks.wait()
    seconds = time.perf_counter() - begun
    counts = [int(read(driver, at, AllReduceSpec(2, 1, I)))
              for driver, at in zip(ranks.drivers, ranks.bad, strict=True)]
    row: Row = {"replays": replays, "replay_us": round(seconds / replays * 1e6, 2), "wrong_words": counts}
    if any(counts): return row, f"wrong words by rank: {counts}"
    x, after = draw_inputs(spec, False, random)
    there = [[upload(driver, each) for each in after] for driver in ranks.drivers]
    inputs = [upload(driver, each) for driver, each in zip(ranks.drivers, x, strict=True)]
    ranks.everywhere(lambda rank, stream: ranks.drivers[rank].submit(
        ranks.launch(rank, inputs[rank], there[rank]), stream))
    want = right(spec, x, after)
    found = next(filter(None, (unlike(spec, ranks.results(rank), want) for rank in range(spec.world))), "")
    return row, f"random numbers: {found}" if found else ""


def time_launch(ranks: Ranks, pdl: bool) -> float:
    """Microseconds of a launch."""
    spec = ranks.case.spec
    x, after = draw_inputs(spec, True, torch.Generator().manual_seed(2))
    graphs = []
    for rank, driver in enumerate(ranks.drivers):
        args = upload(driver, x[rank]), [upload(driver, each) for each in after]
        graphs.append(ranks.graph(rank, [ranks.launch(rank, *args, pdl=pdl)] * TIMED))
    best = float("inf")
    for _ in range(TIMES):
        begun = time.perf_counter()
        ranks.everywhere(lambda rank, stream: graphs[rank].launch(stream))
        best = min(best, time.perf_counter() - begun)
    return round(best / TIMED * 1e6, 2)


def open_worker(options: Options) -> Measure:
    """A worker: drivers for each row."""
    def measure(name: str, budget_s: float) -> Row:
        case, every = cases()[name], options.emulate
        if every: case = case.scale_down()
        ranks = Ranks(case, devices(case.spec.world, options))
        row, words = check_replays(ranks, 2 * SETS if every else REPLAYS)
        spec, schedule = case.spec, case.schedule
        registers = assemble(ranks.kernel.ptx, "sm_90a").kernels[ranks.kernel.name].registers
        row |= {"ctas": schedule.ctas, "rounds": schedule.rounds(spec), "registers": registers}
        if words: return {**row, "status": "disagrees", "why": words}
        if every: return {"status": "emulated", "why": "as it must be"}
        row["us"] = time_launch(ranks, False)
        # early CTAs of the next launch take room, which on one GPU other ranks' CTAs may need
        if spec.world * schedule.ctas <= EARLY_CTAS: row["us_pdl"] = time_launch(ranks, True)
        return {**row, "status": "measured", "why": ""}
    return measure


def devices(world: int, options: Options) -> list[Driver]:
    """One GPU for all ranks, or an emulated one for each."""
    if options.emulate: return [open_driver(options, rank) for rank in range(world)]
    return [open_driver(options)] * world


def render(rows: Mapping[str, Row]) -> str:
    """A line each."""
    def describe(row: Mapping[str, Any]) -> str:
        figures = ", ".join(f"{row[key]} {key}" for key in ("us", "us_pdl", "replays") if key in row)
        return f"{row['status']}: {row.get('why') or figures}"
    return "\n".join(f"  {name}: {describe(row)}" for name, row in rows.items())


register(Part("all_reduce", "all-reduce over peer memory, ranks on one GPU", lambda options: list(cases()),
              open_worker, render, expected_s=4.0, limit_s=60.0))
