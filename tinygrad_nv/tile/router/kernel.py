"""The router of a mixture of experts (spec.py): choices, weights, counts, offsets and order. For sm_80 and
later.

    each warp has some tokens in a row:
        the token's experts and weights (choice.py), to memory
        the slot's rank: how many slots of the warp before it have its expert; to shared memory
    counts of the CTA's warps become those of the warps before; a slot's rank becomes that of the CTA
    one CTA: offsets; order[offset + rank] = slot
    several: counts and ranks to the workspace, and a second kernel, whose CTAs have the same slots:
        counts of all CTAs, and of those before; offsets; order[offset + count before + rank] = slot

Counts are integers, added in the order of CTAs, warps and tokens, so that the order of slots does not depend
on the order in which warps run. Nothing waits for another CTA, and no memory has to be zero before.

On Hopper both are launched early: all threads wait for the kernel before ahead of their first loads.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.kernel import RouterKernel, TileKernel
from tinygrad_nv.tile.router.choice import TokenRouter
from tinygrad_nv.tile.router.spec import RouterSpec
from tinygrad_nv.tile.router.templates import EXPERT_BITS, RouterPlan, sms
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

ORDER_THREADS = 512     # of the second kernel: an expert each, or several threads one
DEEP = 8    # counts that a thread loads together


def router(spec: RouterSpec, schedule: Schedule, gpu: GPU) -> TileKernel | RouterKernel:
    """The kernel of a router, or both."""
    plan = RouterPlan.of(spec, sms(gpu))
    first = _RouterKernel(plan, gpu.arch, "router", plan.threads)
    first.route()
    if plan.alone: return first.emit_kernel()
    second = _RouterKernel(plan, gpu.arch, "order", ORDER_THREADS)
    second.arrange()
    return RouterKernel((first.emit_kernel(), second.emit_kernel()), plan.workspace_words)


class _RouterKernel:
    """A kernel as it is written. Both have the same parameters."""

    def __init__(self, plan: RouterPlan, arch: str, name: str, threads: int) -> None:
        self.plan, self.spec, self.k = plan, plan.spec, plan.spec.policy.k
        self.kb = kb = Kernel(name, arch=arch, threads=threads)
        self.experts, self.weights, self.order, self.offsets = (
            kb.pointer(each) for each in ("experts", "weights", "order", "offsets"))
        if not plan.alone:
            self.counts = kb.pointer("workspace")   # [CTAs][experts], then the ranks of slots
            self.ranks = self.counts + 4 * plan.ctas * self.spec.experts
        self.logits = kb.pointer("logits")
        self.bias = kb.pointer("bias") if self.spec.biased else None
        self.lane, self.warp = kb.special("laneid"), kb.tid.x >> 5
        self.places = kb.shared("places", 4 * self.spec.experts)    # where an expert's slots begin
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()

    def emit_kernel(self) -> TileKernel:
        """The kernel, whole."""
        kb = self.kb
        return TileKernel(kb.name, kb.ptx(), (self.plan.ctas, 1, 1), kb.threads[0], kb.dynamic_smem,
                          pdl=kb.hopper)

    # **** the first ****

    def route(self) -> None:
        """Experts, weights, ranks; offsets and order too, where there is one CTA."""
        kb, plan, experts = self.kb, self.plan, self.spec.experts
        self.seen = kb.shared("seen", 4 * plan.warps * experts)
        self.slots = kb.shared("slots", 4 * plan.slots)
        self.row = self.seen.address(self.warp * (4 * experts))
        with kb.comment("counts of this warp"):
            for i in range(plan.lanes):
                inside = self.lane < experts - 32 * i if 32 * i + 32 > experts else None
                kb.emit("st.shared.u32", (self.row + self.lane * 4).at(128 * i), 0, guard=inside)
            kb.emit("bar.warp.sync", -1)
        router = TokenRouter(kb, plan, self.logits, self.bias)
        local = self.warp * plan.per_warp
        first, end = kb.ctaid.x * plan.per_cta + local, kb.reg("u32")
        kb.emit("min.u32", end, first + plan.per_warp, self.spec.tokens)
        with kb.loop(first, end, kind="u32", name="token") as token:
            expert, weight = router.choose_expert(token)
            self.store(token * self.k + self.lane, expert, weight)
            self.rank((token - kb.ctaid.x * plan.per_cta) * self.k + self.lane, expert)
        kb.sync()
        count = before_warps(kb, self.seen, plan.warps, experts)
        if plan.alone:
            self.begin_experts(offset_of(kb, kb.shared("sums", 4 * plan.warps), count, experts), count)
            for slot, expert, rank in self.each_slot(): self.place(slot, expert, rank)
            return
        with kb.comment("for the kernel after"):
            at = advance(kb, advance(kb, self.counts, kb.ctaid.x, 4 * experts), kb.tid.x, 4)
            kb.emit("st.global.u32", at.at(), count, guard=kb.tid.x < experts)
            kb.sync()
            for slot, _, rank in self.each_slot():
                kb.st("global", "u32", advance(kb, self.ranks, slot, 4).at(), rank)

    def store(self, slot: Value, expert: Value, weight: Value) -> None:
        """A choice to memory, of the lanes that have one."""
        kb, there = self.kb, self.lane < self.k
        kb.emit("st.global.u32", advance(kb, self.experts, slot, 4).at(), expert, guard=there)
        kb.emit("st.global.f32", advance(kb, self.weights, slot, 4).at(), weight, guard=there)

    def rank(self, local: Value, expert: Value) -> None:
        """Counts the choices of a token. A token's experts are different ones, but for the last, which stands
        for choices that are not numbers as well."""
        kb, votes, many, before = self.kb, self.kb.reg("b32"), self.kb.reg("u32"), self.kb.reg("u32")
        there = self.lane < self.k
        shared = (expert == self.spec.experts - 1) & there
        kb.emit("vote.sync.ballot.b32", votes, shared, -1)
        kb.emit("popc.b32", many, votes)
        kb.emit("popc.b32", before, votes & kb.special("lanemask_lt"))
        before, many = kb.select(shared, before, 0), kb.select(shared, many, 1)
        at, seen = (self.row + expert * 4).at(), kb.reg("u32", 0)
        kb.emit("ld.shared.u32", seen, at, guard=there)
        kb.emit("bar.warp.sync", -1)
        kb.emit("st.shared.u32", at, seen + many, guard=there & (before == 0))
        packed = ((seen + before) << EXPERT_BITS) | expert
        kb.emit("st.shared.u32", self.slots.address(local * 4).at(), packed, guard=there)
        kb.emit("bar.warp.sync", -1)

    def each_slot(self) -> Iterator[tuple[Value, Value, Value]]:
        """A slot of the CTA, its expert, and its rank in the CTA; what uses them is written once, in a
        loop."""
        kb, plan = self.kb, self.plan
        with self.own_slots(plan.threads) as (slot, first):
            local = slot - first
            packed = kb.ld("shared", "u32", self.slots.address(local * 4).at())[0]
            expert = packed & (1 << EXPERT_BITS) - 1
            at = (local // (plan.per_warp * self.k) * self.spec.experts + expert) * 4
            yield slot, expert, (packed >> EXPERT_BITS) + \
                kb.ld("shared", "u32", self.seen.address(at).at())[0]

    @contextmanager
    def own_slots(self, threads: int) -> Iterator[tuple[Value, Value]]:
        """A loop over the CTA's slots: a slot of the thread, and the first of all."""
        kb = self.kb
        first, end = kb.ctaid.x * self.plan.slots, kb.reg("u32")
        kb.emit("min.u32", end, first + self.plan.slots, self.spec.slots)
        with kb.comment("slots of this CTA"), kb.loop(first + kb.tid.x, end, threads, kind="u32") as slot:
            yield slot, first

    # **** the second ****

    def arrange(self) -> None:
        """Offsets and order, from counts and ranks."""
        kb, plan, experts = self.kb, self.plan, self.spec.experts
        ways = ORDER_THREADS // max(32, 1 << (experts - 1).bit_length())
        scratch = kb.shared("sums", 8 * ORDER_THREADS)
        total, before = over_ctas(kb, self.counts, scratch, plan.ctas, experts, ways)
        self.begin_experts(offset_of(kb, kb.shared("warps", ORDER_THREADS // 8), total, experts), total,
                           before)
        with self.own_slots(ORDER_THREADS) as (slot, _):
            expert, rank = (kb.ld("global", "u32", advance(kb, each, slot, 4).at())[0]
                            for each in (self.experts, self.ranks))
            self.place(slot, expert, rank)

    # **** both ****

    def begin_experts(self, offset: Value, count: Value, before: Value | None = None) -> None:
        """Offsets to memory; where the CTA's slots of each expert begin, to shared memory."""
        kb, experts = self.kb, self.spec.experts
        there = kb.tid.x < experts
        with kb.if_(there if before is None else there & (kb.ctaid.x == 0)):
            at = advance(kb, self.offsets, kb.tid.x, 4)
            kb.st("global", "u32", at.at(), offset)
            kb.emit("st.global.u32", at.at(4), offset + count, guard=kb.tid.x == experts - 1)
        mine = offset if before is None else offset + before
        kb.emit("st.shared.u32", self.places.address(kb.tid.x * 4).at(), mine, guard=there)
        kb.sync()

    def place(self, slot: Value, expert: Value, rank: Value) -> None:
        """A slot to its place in the order."""
        kb = self.kb
        number = kb.ld("shared", "u32", self.places.address(expert * 4).at())[0] + rank
        kb.st("global", "u32", advance(kb, self.order, number, 4).at(), slot)


def before_warps(kb: Kernel, counts: Shared, warps: int, experts: int) -> Value:
    """Counts of warps [warps][experts] become those of the warps before; the CTA's count of the thread's
    expert, 0 of none."""
    total = kb.reg("u32", 0)
    with kb.comment("counts of the warps before"), kb.if_(kb.tid.x < experts):
        at = counts.address(kb.tid.x * 4)
        for first in range(0, warps, DEEP):
            some = range(first, min(first + DEEP, warps))
            found = [kb.ld("shared", "u32", at.at(4 * experts * warp))[0] for warp in some]
            for warp, count in zip(some, found, strict=True):
                kb.st("shared", "u32", at.at(4 * experts * warp), total)
                total += count
    return total


def offset_of(kb: Kernel, scratch: Shared, count: Value, experts: int) -> Value:
    """The sum of the counts of all threads before this one."""
    kept, lane, warp = kb.reg("u32", count), kb.special("laneid"), kb.tid.x >> 5
    with kb.comment("offsets: of the warp, then of the warps before"):
        for distance in (1, 2, 4, 8, 16):
            other = kb.reg("u32")
            kb.emit("shfl.sync.up.b32", other, kept, distance, 0, -1)
            kb.emit("add.u32", kept, kept, other, guard=lane >= distance)
        kb.emit("st.shared.u32", scratch.address(warp * 4).at(), kept, guard=lane == 31)
        kb.sync()
        made = kept - count
        for each in range(-(-experts // 32) - 1):
            total = kb.ld("shared", "u32", scratch.at(4 * each))[0]
            kb.emit("add.u32", made, made, total, guard=warp > each)
    return made


def over_ctas(kb: Kernel, counts: Value, scratch: Shared, ctas: int, experts: int,
              ways: int) -> tuple[Value, Value]:
    """The sum of all CTAs' counts of the thread's expert, and of the CTAs before this one, in threads below
    `experts`; `ways` threads divide the CTAs among them."""
    total, before = kb.reg("u32", 0), kb.reg("u32", 0)
    pitch = kb.threads[0] // ways
    expert, way = kb.tid.x % pitch, kb.tid.x // pitch
    there = expert < experts
    with kb.comment("counts of all CTAs"):
        at = advance(kb, advance(kb, counts, expert, 4), way, 4 * experts)
        with kb.loop(way, ctas, ways * DEEP) as first:
            found = kb.regs("u32", DEEP, 0)
            for i, count in enumerate(found):
                kb.emit("ld.global.u32", count, at.at(4 * experts * ways * i),
                       guard=there & (first + ways * i < ctas))
            for i, count in enumerate(found):
                total += count
                kb.emit("add.u32", before, before, count, guard=first + ways * i < kb.ctaid.x)
            at += 4 * experts * ways * DEEP
        if ways == 1: return total, before
        for i, value in enumerate((total, before)):
            kb.emit("st.shared.u32", scratch.address((kb.tid.x + i * kb.threads[0]) * 4).at(), value)
        kb.sync()
        for i, value in enumerate((total, before)):
            from_ = scratch.address(expert * 4)
            for other in range(ways):
                one = kb.ld("shared", "u32", from_.at(4 * (i * kb.threads[0] + pitch * other)))[0]
                if other: value += one
                else: value.set(one)
    return kb.select(kb.tid.x < pitch, total, 0, "u32"), before
