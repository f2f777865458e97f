"""All-reduce of small messages by kernels over the memory of peers (tile/all_reduce), in the place of NCCL.

Protocol: `chosen(…)` is the spec and the schedule of a sum over GPUs, or why NCCL does it, in words:
NV_ALL_REDUCE, what the kernels can, and the sizes at which they are faster (tile/all_reduce/cost.py).
`summed(x, groups)` puts the kernel into the graph of a tensor over several devices of this process, a program
of each of them like any other (runtime/together.py), or says why not.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tinygrad import Device
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.program import Output, Refused, program
from tinygrad_nv.patterns.target import target_of
from tinygrad_nv.runtime.all_reduce import find_unreachable
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.note import Communicates, Note
from tinygrad_nv.runtime.together import Peers
from tinygrad_nv.tile.all_reduce.cost import candidates, choose
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, OneShot, TwoShot
from tinygrad_nv.tile.all_reduce.spec import AllReduceSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

FORCED: dict[str, type[AllReduceSchedule]] = {"one_shot": OneShot, "two_shot": TwoShot}
Chosen = tuple[AllReduceSpec, AllReduceSchedule]


@dataclass(frozen=True)
class PeerAllReduce(Communicates):
    """The sum that a kernel makes, for explain()."""
    spec: AllReduceSpec
    by_peers = True

    @property
    def traffic(self) -> tuple[str, int, int]: return "all_reduce", self.spec.nbytes, self.spec.world

    def __str__(self) -> str: return str(self.spec)


def choose_kernel(world: int, count: int, dtype: DType, op: str, gpu: GPU, columns: int = 0,
           eps: float = 0.0) -> Chosen | str:
    """The kernel for a message of so many elements, with `columns` that of rows that are normalized; or why
    NCCL has it."""
    setting = str(config.get("NV_ALL_REDUCE"))
    if setting == "nccl": return "NV_ALL_REDUCE=nccl"
    if op != "sum": return f"the kernels of peer memory sum, and this is a {op}"
    try:
        spec = AllReduceSpec(world, count, dtype, columns, eps)
        kind = FORCED.get(setting) or choose(world, spec.nbytes)
    except SpecError as no: return f"{no.found}, and the kernels of peer memory are for {no.expected}"
    if kind is None: return f"faster for {spec.nbytes} bytes over {world} GPUs"
    schedule = candidates(spec, kind)[0]
    if problems := TABLE.problems(spec, schedule, gpu): return problems[0]
    return spec, schedule


def note(spec: AllReduceSpec, schedule: AllReduceSchedule) -> Note:
    """Returns what explain() tells of the kernel."""
    setting = config.get("NV_ALL_REDUCE")
    forced = f", NV_ALL_REDUCE={setting}" if setting in FORCED else ""
    return Note(schedule.template, f"{spec}: {schedule}{forced}", PeerAllReduce(spec), schedule)


def sum_over(x: UOp, op: str, groups: Sequence[Sequence[int]]) -> UOp | str:
    """x, which lies in memory on several GPUs, summed over each group of their numbers; or why NCCL does
    it."""
    devices, gpu = x.device, target_of(x.device)
    assert isinstance(devices, tuple)
    if not isinstance(gpu, GPU): return "GPUs that are not alike"
    if len(worlds := {len(each) for each in groups}) > 1: return f"groups of {sorted(worlds)} GPUs"
    made = choose_kernel(worlds.pop(), prod(int(extent) for extent in x.shape), x.dtype, op, gpu)
    if isinstance(made, str): return made
    names = tuple(tuple(Device.canonicalize(devices[number]) for number in each) for each in groups)
    for each in names:
        drivers = [opened.driver for name in each if isinstance(opened := Device[name], DrivenDevice)]
        if (apart := find_unreachable(drivers)) is not None:
            return f"{each[apart[0]]} cannot address {each[apart[1]]}'s memory"
    spec, schedule = made
    kernel = TABLE.build(spec, schedule, gpu)
    try:
        out, = program(kernel.name, kernel.ptx, devices, [Output(x.shape, x.dtype)], [x], grid=kernel.grid,
                       block=kernel.block, flops=(spec.world - 1) * spec.count,
                       nbytes=spec.world * spec.nbytes, note=note(spec, schedule),
                       launch=replace(kernel.launch, peers=Peers(names, schedule.workspace)))
    except Refused as no: return str(no)
    return out
