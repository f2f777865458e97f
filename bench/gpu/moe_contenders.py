"""The contenders of mixtures of experts: ours, torch's grouped matmul, vLLM's fused experts, DeepGEMM.

Protocol: that of gemm_contenders.py. All get the same matrices and routing.

    grouped_mm  torch._grouped_mm, as transformers calls it: rows are gathered before it, silu(gate) · up,
                weights and sums come after it
    vLLM        fused_experts, Triton's kernels: whole layers, which sort tokens by expert themselves
    DeepGEMM    m_grouped_bf16_gemm_nt_contiguous: the matmul alone, of rows that were gathered and padded
                before, without activation or weights
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from bench.gpu.compare import Partly
from bench.gpu.gemm_contenders import Buffers
from bench.gpu.launch import bind_sets, device
from bench.gpu.moe_workloads import MoEWorkload
from bench.gpu.parts import NotMeasured, Options, Run, about, contender
from tinygrad_nv.runtime.driver import Driver, Fill, Launch, Stream, Work, map_spec, pointer
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

Submit = Callable[[Stream | None], None]


class Launcher:
    """The kernels of a workload's stages on a device. Keeps their scratch memory until `close`."""

    def __init__(self, driver: Driver, workload: MoEWorkload, gpu: GPU) -> None:
        self.driver, self.workload = driver, workload
        self.scratch: list[int] = []
        self.kernels: list[tuple[TileKernel, Any]] = []
        for spec, _ in workload.stages:
            if (schedule := choose(spec, gpu)) is None: raise NotMeasured(TABLE.why_not(spec, gpu))
            made = TABLE.build(spec, schedule, gpu)
            self.kernels.append((made, driver.load(made.ptx.encode()).function(made.name)))

    def bind_launch(self, addresses: Mapping[str, int]) -> Submit:
        """Launches on this memory, by the workload's names."""
        works: list[Work] = []
        for (spec, names), (made, function) in zip(self.workload.stages, self.kernels, strict=True):
            scratch = [self.driver.alloc(each.count * each.dtype.itemsize) for each in made.scratch]
            self.scratch += scratch
            given = [addresses[names[each.name]] for each in TABLE.arguments(spec)]
            pointers = [given[0], *scratch, *given[1:]]
            works += [Fill(pointers[each.pointer], 0, each.nbytes) for each in made.zeroed]
            maps = [self.driver.tensor_map(map_spec(each, pointers[each.pointer])) for each in made.maps]
            works.append(Launch(function, made.grid, made.block, (*map(pointer, pointers), *maps),
                                made.dynamic_smem, made.cluster, made.pdl))

        def submit(stream: Stream | None = None) -> None:
            for work in works: self.driver.submit(work, stream)

        return submit


@contender("moe", "ours")
def ours(workload: MoEWorkload, buffers: Buffers, options: Options) -> Run:
    """Our kernels, by the default schedules."""
    gpu = device()
    launcher = Launcher(gpu, workload, GPU(gpu.properties.arch, gpu.properties.sm_count, gpu.clusters))
    launch = bind_sets(gpu, launcher.bind_launch, buffers)

    def run(i: int) -> None:
        launch(i)
        if workload.part == "layer": sum_experts(workload, buffers[i])

    return run


def sum_experts(workload: MoEWorkload, one: dict[str, Any]) -> None:
    """Adds the k results of each token."""
    import torch
    torch.sum(one["out"].view(workload.tokens, workload.shape.k, -1), 1, out=one["sum"])


@about("moe")
def describe_schedule(workload: MoEWorkload) -> dict[str, Any]:
    """The schedules that `ours` takes."""
    gpu = device().properties
    made = [choose(spec, GPU(gpu.arch, gpu.sm_count)) for spec, _ in workload.stages]
    return {"schedule": "; ".join(map(str, made))}


@contender("moe", "grouped_mm")
def torch_grouped_mm(workload: MoEWorkload, buffers: Buffers, options: Options) -> Run:
    """A copy of the result where torch has no `out`."""
    import torch
    if not hasattr(torch, "_grouped_mm"): raise NotMeasured("this torch has no _grouped_mm")
    k = workload.shape.k

    def first(one: dict[str, Any]) -> Any:
        made = torch._grouped_mm(one["x"][one["order"] // k], one["gate_up"].transpose(-2, -1),
                                 offs=one["offsets"][1:])
        gate, up = made.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def second(one: dict[str, Any], inner: Any) -> None:
        made = torch._grouped_mm(inner, one["down"].transpose(-2, -1), offs=one["offsets"][1:])
        one["out"][one["order"]] = (made * one["weights"][one["order"]].unsqueeze(1)).bfloat16()

    def run(i: int) -> None:
        one = buffers[i]
        if workload.part == "gate_up": one["inner"].copy_(first(one))
        else: second(one, one["inner"] if workload.part == "down" else first(one))
        if workload.part == "layer": sum_experts(workload, one)

    return run


@contender("moe", "vLLM")
def vllm_experts(workload: MoEWorkload, buffers: Buffers, options: Options) -> Run:
    """Its Triton kernels, with its own configurations."""
    if workload.part != "layer": raise NotMeasured("computes whole layers alone")
    if find_spec("vllm") is None: raise NotMeasured("vLLM is not installed")
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts as call
    k = workload.shape.k

    def run(i: int) -> None:
        one = buffers[i]
        one["sum"].copy_(call(one["x"], one["gate_up"], one["down"], one["weights"].view(-1, k),
                              one["experts"].int()))

    return run


@contender("moe", "DeepGEMM")
def deep_gemm(workload: MoEWorkload, buffers: Buffers, options: Options) -> Run:
    """Rows of each group begin at a multiple of what it asks for. Compared here, as it has no activation."""
    import torch
    if workload.part == "layer": raise NotMeasured("has no whole layer")
    if find_spec("deep_gemm") is None: raise NotMeasured("DeepGEMM is not installed")
    import deep_gemm as peer
    (spec, names), = workload.stages
    align = peer.get_mk_alignment_for_contiguous_layout()
    sets = []
    for one in buffers:
        rows, groups = pad_groups(one["offsets"].tolist(), align)
        x = one["x"][one["order"] // workload.shape.k] if workload.part == "gate_up" else one["inner"]
        a = torch.zeros(len(groups), spec.k, device=x.device, dtype=x.dtype)
        a[rows] = x
        numbers = torch.tensor(groups, device=x.device, dtype=torch.int32)
        sets.append((a, one[names["w"]], a.new_empty(len(groups), spec.n), numbers, rows[0]))

    def run(i: int) -> None:
        a, w, out, numbers, _ = sets[i]
        peer.m_grouped_bf16_gemm_nt_contiguous(a, w, out, numbers)

    run(0)
    a, w, out, numbers, row = sets[0]
    exact = w[int(numbers[row])].double() @ a[row].double()
    if not torch.allclose(out[row].double(), exact, rtol=2.0**-8, atol=2.0**-7):
        raise NotMeasured("its first row is wrong")
    return Partly(run, 0)


def pad_groups(offsets: Sequence[int], align: int) -> tuple[list[int], list[int]]:
    """Returns where each row goes, and the group of each padded row; padding has the number of its group."""
    rows: list[int] = []
    groups: list[int] = []
    for group, (first, end) in enumerate(pairwise(offsets)):
        rows += range(len(groups), len(groups) + end - first)
        groups += [group] * (-(-(end - first) // align) * align)
    return rows, groups
