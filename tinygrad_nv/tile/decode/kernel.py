"""Decode attention over pages or a contiguous cache: split-KV with a combine step, on mma.sync. For sm_80 and
later.

    split: for each request, key head (16 · warps_m rows of it) and split of the keys, in one CTA
        wait for the kernel before; the kernel after may begin
        the request's length, read or given; meanwhile q's fragments to registers
        nothing to do beyond the length; the split's pages, and scales, to shared memory; meanwhile addresses
        each group of warps, on keys of its own, from a ring of its own:
            the first `depth - 1` tiles of keys and values are on their way
            for each tile:
                wait until it is in and the group has read the tile before
                start the copies of the tile `depth - 1` further on
                sums = q kᵀ
                weights, rescale = online softmax of the scores
                out = out · rescale + weights v
        merge the warps, in shared memory; a request of one split: store the result; else: leave the sums,
        maxima and sums in the workspace
    combine: for each row of a request with more splits, in one CTA
        wait for the kernel before; the kernel after may begin; merge the splits in their order

Query heads of a key head and the request's rows are packed into the 16 rows of mma.m16n8k16 (GQA). What a
row's bits are depends on its own request alone: splits follow from its length (plan.py), and merging
adds in a fixed order (combine.py).
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.tile.decode.combine import COMBINE_WARPS, Combine
from tinygrad_nv.tile.decode.plan import DecodePlan, Parameters, Span, SplitPlan, divide_columns
from tinygrad_nv.tile.decode.schedules import Decode
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.decode.split import SplitKernel
from tinygrad_nv.tile.kernel import AttentionKernel, DecodeKernel
from tinygrad_nv.tile.template import GPU


def decode_attention(spec: DecodeSpec, schedule: Decode, gpu: GPU) -> DecodeKernel:
    """The kernels of a decode attention, by a legal schedule."""
    plan = DecodePlan.of(divide_columns(spec), schedule)
    kernels = [_split(plan, gpu.arch)]
    if plan.workspace_bytes: kernels.append(combine_kernel(plan, gpu.arch))
    return DecodeKernel(tuple(kernels), plan.workspace_bytes)


def _split(plan: DecodePlan, arch: str) -> AttentionKernel:
    spec, s = plan.spec, plan.schedule
    kb = Kernel("decode_split", arch=arch, threads=s.threads, min_ctas=1)
    SplitKernel(kb, plan, Parameters(kb, plan)).write()
    grid = plan.most_splits, spec.heads * plan.row_blocks, spec.batch
    return AttentionKernel("decode_split", kb.ptx(), grid, s.threads, kb.dynamic_smem, pdl=kb.hopper)


def combine_kernel(plan: SplitPlan, arch: str) -> AttentionKernel:
    """The second kernel."""
    spec, threads = plan.spec, 32 * COMBINE_WARPS
    kb = Kernel("decode_combine", arch=arch, threads=threads)
    given = Parameters(kb, plan)
    if kb.hopper:
        kb.wait_for_previous_grid()
        kb.launch_dependents()
    span = Span(kb, plan, given.length(kb.ctaid.z))
    with kb.if_(span.several):
        Combine(kb, plan, given).write(span.count())
    return AttentionKernel("decode_combine", kb.ptx(), (spec.rows, spec.heads, spec.batch), threads,
                           kb.dynamic_smem, pdl=kb.hopper)
