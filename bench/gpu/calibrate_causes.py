"""Microbenchmarks of what the timing model's errors are put down to: each tests one assumption.

docs/timing.md lists the causes. What an instruction beside wgmmas costs, in their warpgroup or another one,
and a branch before the wait for them; fences beside reads; hand-overs at mbarriers and named barriers; HBM by
the SMs that read, the bytes of a row and those in flight; writes that L2 has room for; reductions into L2;
unpacking of 4-bit weights; the promotion of scaled fp8.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from bench.gpu.calibrate_memory import AT_ONCE, MIB, READERS, STREAMED, first
from bench.gpu.calibrate_probe import Body, Loop, Probe, fill_shared, fold, register, words
from bench.gpu.calibrate_sm import TILE_BYTES
from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.builder.hopper import descriptor_bits

GROUP = 128                     # threads of a warpgroup
BESIDE = 48                     # instructions of a warp beside 8 wgmmas of 64 cycles
READ_BYTES = 1 << 16            # at the start of memory, which each CTA reads and no reduction writes
WIDE = 1024                     # threads of a CTA that has an SM for itself
ALONE_SMEM = 120 << 10          # bytes of shared memory with which a CTA has an SM for itself


# **** beside wgmma ****

def _convert(kb: Kernel, value: Value) -> None:
    """F2FP: two floats to bfloat16, and back by a move, so that each follows the one before."""
    pair = kb.reg("b32")
    kb.emit("cvt.rn.bf16x2.f32", pair, value, value)
    kb.emit("mov.b32", value, pair)


INSTRUCTIONS: dict[str, Callable[[Kernel, Value], None]] = {
    "FFMA": lambda kb, v: kb.emit("fma.rn.f32", v, v, v, v),
    "MUFU": lambda kb, v: kb.emit("ex2.approx.ftz.f32", v, v),
    "F2FP": _convert}


def beside_wgmma(name: str, other: bool, tensor: bool = True) -> Body:
    """8 wgmmas a round, and BESIDE instructions of each warp while they run: of the warpgroup that issued
    them, or of another one. `tensor`: with the wgmmas."""
    def body(kb: Kernel, memory: Value, tensor_map: Value | None) -> Loop:
        tile, _ = fill_shared(kb, memory, TILE_BYTES, GROUP * (1 + other))
        layout = descriptor_bits(0, 8 * 128)
        a, b = kb.descriptor(tile, layout), kb.descriptor(tile + 64 * 128, layout)
        sums, values = words(kb, memory, 64, "f32"), words(kb, memory, 4, "f32")
        leads = kb.tid.x < GROUP
        def multiply() -> None:
            kb.wgmma_fence()
            for _ in range(8): kb.wgmma("m64n128k16", "f32.bf16.bf16", sums, a, b)
            kb.wgmma_commit()
        def compute() -> None:
            for _ in range(BESIDE // len(values)):
                for value in values: INSTRUCTIONS[name](kb, value)
        def one_round() -> None:
            if other:
                with kb.if_(leads):
                    multiply()
                    kb.wgmma_wait(0)
                with kb.if_(~leads): compute()
                kb.sync()
            else:
                if tensor: multiply()
                compute()
                if tensor: kb.wgmma_wait(0)
        return Loop(one_round, [*sums, *values] if tensor else values)
    return body


def pin_exponentials(branch: bool) -> Body:
    """8 wgmmas a round, and BESIDE exponentials of their warpgroup, which a sleep that never happens keeps
    before the wait, as attention does; ptxas makes a branch of it. Without `branch` no sleep."""
    def body(kb: Kernel, memory: Value, tensor_map: Value | None) -> Loop:
        tile, _ = fill_shared(kb, memory, TILE_BYTES, GROUP)
        layout = descriptor_bits(0, 8 * 128)
        a, b = kb.descriptor(tile, layout), kb.descriptor(tile + 64 * 128, layout)
        sums, values, bits = words(kb, memory, 64, "f32"), words(kb, memory, 4, "f32"), kb.reg("b32")
        def one_round() -> None:
            kb.wgmma_fence()
            for _ in range(8): kb.wgmma("m64n128k16", "f32.bf16.bf16", sums, a, b)
            kb.wgmma_commit()
            for _ in range(BESIDE // len(values)):
                for value in values: INSTRUCTIONS["MUFU"](kb, value)
            if branch:
                kb.emit("mov.b32", bits, values[0] + values[1] + values[2] + values[3])
                kb.emit("nanosleep.u32", 0, guard=bits == 0x3d2b1a47)   # no sum that comes here
            kb.wgmma_wait(0)
        return Loop(one_round, [*sums, *values])
    return body


def promote(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    """Scaled fp8: 4 wgmmas of k 32 into fresh sums, a wait, and 64 multiply-adds of a scale into float32."""
    tile, _ = fill_shared(kb, memory, TILE_BYTES, GROUP)
    layout = descriptor_bits(0, 8 * 128)
    a, b = kb.descriptor(tile, layout), kb.descriptor(tile + 64 * 128, layout)
    sums, whole = words(kb, memory, 64, "f32"), words(kb, memory, 64, "f32")
    scale, = words(kb, memory, 1, "f32")
    def one_round() -> None:
        kb.wgmma_fence()
        for i in range(4): kb.wgmma("m64n128k32", "f32.e4m3.e4m3", sums, a, b, accumulate=i > 0)
        kb.wgmma_commit()
        kb.wgmma_wait(0)
        for into, value in zip(whole, sums, strict=True): kb.emit("fma.rn.f32", into, value, scale, into)
    return Loop(one_round, whole)


def wgmma_probes() -> Iterator[Probe]:
    """Yields the probes of instructions beside wgmmas."""
    for name in INSTRUCTIONS:
        for where, other in (("the same warpgroup", False), ("another one", True)):
            yield Probe(f"8 wgmmas beside {BESIDE} {name} of {where}", beside_wgmma(name, other),
                        threads=GROUP * (1 + other), nbytes=TILE_BYTES, random=True, sass=(name, BESIDE),
                        needs="sm_90a")
        yield Probe(f"{BESIDE} {name} by themselves", beside_wgmma(name, False, False), threads=GROUP,
                    nbytes=TILE_BYTES, random=True, sass=(name, BESIDE), needs="sm_90a")
    for words_of, branch in (("no branch", False), ("a branch", True)):
        yield Probe(f"8 wgmmas, {BESIDE} MUFU, {words_of} and a wait", pin_exponentials(branch),
                    threads=GROUP, nbytes=TILE_BYTES, random=True, sass=("MUFU", BESIDE), needs="sm_90a")
    yield Probe("scaled fp8 m64n128k128 with its promotion", promote, threads=GROUP, nbytes=TILE_BYTES,
                random=True, sass=("QGMMA", 4), needs="sm_90a")


# **** hand-overs of warpgroups ****

def hand_over(arrivals: int) -> Body:
    """A warpgroup frees a stage, by `arrivals` of its threads, and waits until the other has filled it."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        free, full = kb.mbarriers("free"), kb.mbarriers("full")
        with kb.if_(first(kb)):
            kb.mbarrier_init(free[0], arrivals)
            kb.mbarrier_init(full[0], 1)
            kb.fence_mbarrier_init()
        kb.sync()
        parity, lane = kb.reg("u32", 0), kb.tid.x & (GROUP - 1)
        consumes = kb.tid.x < GROUP
        def one_round() -> None:
            with kb.if_(consumes):
                with kb.if_(lane < arrivals): kb.mbarrier_arrive(free[0])
                kb.mbarrier_wait(full[0], parity)
            with kb.if_(~consumes):
                kb.mbarrier_wait(free[0], parity)
                with kb.if_(lane == 0): kb.mbarrier_arrive(full[0])
            parity.set(parity ^ 1)
        return Loop(one_round)
    return body


def ping_pong(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    """Two warpgroups order themselves at two named barriers, as ping-pong schedules do."""
    leads, both = kb.tid.x < GROUP, 2 * GROUP
    with kb.if_(~leads): kb.arrive(1, both)
    def one_round() -> None:
        with kb.if_(leads):
            kb.sync(1, both)
            kb.arrive(2, both)
        with kb.if_(~leads):
            kb.sync(2, both)
            kb.arrive(1, both)
    def after() -> None:
        with kb.if_(leads): kb.sync(1, both)
    return Loop(one_round, after=after)


def barrier_probes() -> Iterator[Probe]:
    """Yields the probes of hand-overs between warpgroups."""
    for arrivals in (1, GROUP):
        yield Probe(f"hand-over of a stage, {arrivals} arriving", hand_over(arrivals), threads=2 * GROUP,
                    sass=("SYNCS", 6), needs="sm_90a")
    yield Probe("turn of two warpgroups at named barriers", ping_pong, threads=2 * GROUP, sass=("BAR", 4))


# **** HBM and L2 ****

def read_rows(row_bytes: int) -> Body:
    """Warps read rows of `row_bytes` that are 8 KiB apart, 16 bytes a lane, 4 loads under way: rows below
    512 bytes share a load."""
    lanes, loads = min(32, row_bytes // 16), max(1, row_bytes // 512)
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        lane, warps = kb.special("laneid"), kb.nctaid.x * (READERS // 32)
        rows_a_load = 32 // lanes
        row = (kb.ctaid.x * (READERS // 32) + kb.tid.x // 32) * rows_a_load + lane // lanes
        column = (lane & (lanes - 1)) * 16
        whole = kb.reg("b32", 0)
        def one_round() -> None:
            for _ in range(max(1, AT_ONCE // loads)):
                # 32768 rows, 8 KiB apart, fill 256 MiB; after these the next row_bytes of each
                further = ((row >> 15) * row_bytes & 8191) + column
                at = memory + ((row & 0x7fff) << 13).to("u64") + further.to("u64")
                for i in range(loads): fold(whole, kb.ld("global", "b32", at.at(512 * i), 4, ".cg"))
                row.set(row + warps * rows_a_load)
        return Loop(one_round, [whole])
    return body


def read_wide(loads: int, fence: bool = False) -> Body:
    """CTAs of WIDE threads that have an SM each read on, `loads` of 16 bytes of a thread under way; `fence`:
    with one of the GPU's scope beside them."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        width = kb.nctaid.x * WIDE
        at, step = memory + ((kb.ctaid.x * WIDE + kb.tid.x) * 16).to("u64"), (width * 16).to("u64")
        whole = kb.reg("b32", 0)
        def one_round() -> None:
            here = at + 0
            for _ in range(loads):
                fold(whole, kb.ld("global", "b32", here.at(), 4, ".cg"))
                here += step
            if fence: kb.emit("fence.acq_rel.gpu")
            at.set(here)
        return Loop(one_round, [whole])
    return body


def write_again(turns: int) -> Body:
    """Stores of 16 bytes a thread over the same `turns` parts of memory, again and again."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        width = kb.nctaid.x * READERS
        at, turn = memory + ((kb.ctaid.x * READERS + kb.tid.x) * 16).to("u64"), kb.reg("u32", 0)
        given = [kb.special("laneid")] * 4
        def one_round() -> None:
            for _ in range(AT_ONCE):
                kb.st("global", "b32", (at + (turn * width * 16).to("u64")).at(), given)
                turn.set((turn + 1) & (turns - 1))
        return Loop(one_round)
    return body


def reduce(width: int, turns: int) -> Body:
    """Reductions of `width` floats a thread over `turns` parts of memory: width 1 a line of all warps' lanes,
    wider ones as vectors."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        threads = kb.nctaid.x * READERS
        at = memory + ((kb.ctaid.x * READERS + kb.tid.x) * (4 * width) + READ_BYTES).to("u64")
        values, turn = words(kb, memory, width, "f32"), kb.reg("u32", 0)
        vector = f".v{width}" if width > 1 else ""
        def one_round() -> None:
            for _ in range(AT_ONCE):
                place = (at + (turn * threads * (4 * width)).to("u64")).at()
                kb.emit(f"red.relaxed.gpu.global.add{vector}.f32", place, values if width > 1 else values[0])
                turn.set((turn + 1) & (turns - 1))
        return Loop(one_round)
    return body


def reduce_bulk(nbytes: int) -> Body:
    """Bulk reductions of `nbytes` from shared memory by one thread of each CTA, two under way."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        fill_shared(kb, memory, nbytes, 32)
        tile, turn = kb.tiles[-1], kb.reg("u32", 0)
        def one_round() -> None:
            with kb.if_(first(kb)):
                for _ in range(AT_ONCE):
                    place = memory + ((turn * kb.nctaid.x + kb.ctaid.x) * nbytes + READ_BYTES).to("u64")
                    kb.emit("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", place.at(),
                            tile.at(), nbytes)
                    kb.tma_commit()
                    kb.tma_wait(1)
                    turn.set((turn + 1) & 3)
        def after() -> None:
            with kb.if_(first(kb)): kb.tma_wait(0)
        return Loop(one_round, after=after)
    return body


def memory_probes() -> Iterator[Probe]:
    """Yields the probes of HBM and of L2."""
    whole = partial(Probe, rate=True, ctas=0, nbytes=STREAMED)
    for row_bytes in (128, 256, 512, 2048):
        loads = max(1, AT_ONCE // max(1, row_bytes // 512)) * max(1, row_bytes // 512)
        yield whole(f"HBM read, rows of {row_bytes} bytes", read_rows(row_bytes), loads * READERS * 16 * 8,
                    threads=READERS, ctas_of_sm=8, rounds=(4, 12), sass=("LDG", loads))
    for quarters in (1, 2, 3, 4):
        yield whole(f"HBM read by {quarters}/4 of the SMs", read_wide(4), 4 * WIDE * 16 * quarters / 4,
                    threads=WIDE, smem=ALONE_SMEM, share=quarters / 4, rounds=(8, 24), sass=("LDG", 4))
    yield whole("HBM read, 64 KiB of an SM under way and a fence", read_wide(4, fence=True), 4 * WIDE * 16,
                threads=WIDE, smem=ALONE_SMEM, rounds=(8, 24), sass=("MEMBAR", 1))
    for loads in (1, 2, 8):
        yield whole(f"HBM read, {loads * WIDE * 16 >> 10} KiB of an SM under way", read_wide(loads),
                    loads * WIDE * 16, threads=WIDE, smem=ALONE_SMEM, rounds=(32 // loads, 96 // loads),
                    sass=("LDG", loads))
    near = partial(Probe, rate=True, threads=READERS, ctas=0, ctas_of_sm=8, rounds=(16, 64), nbytes=64 * MIB,
                   near=True)
    for turns in (2, 4, 16):    # on 132 SMs a part is 4.1 MiB
        yield near(f"write again, {turns} parts", write_again(turns), AT_ONCE * READERS * 16 * 8,
                   nbytes=5 * MIB * turns, sass=("STG", AT_ONCE))
    for width in (1, 2, 4):
        yield near(f"red.v{width}.f32", reduce(width, 4), AT_ONCE * READERS * 4 * width * 8,
                   rounds=(8, 24), sass=("REDG", AT_ONCE), needs="sm_90a")
    for nbytes in (1024, 4096, 16384):
        yield near(f"cp.reduce.async.bulk of {nbytes} bytes", reduce_bulk(nbytes), AT_ONCE * nbytes * 2,
                   threads=32, ctas_of_sm=2, sass=("UBLKRED", AT_ONCE), needs="sm_90a")


# **** unpacking ****

def unpack_int4(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    """8 int4 of a word to bfloat16 by the exponent's bits, less their bias: 12 words a round."""
    code, = words(kb, memory, 1)
    whole, bias = kb.reg("b32", 0), kb.reg("b32", 0xC308C308)      # -136: 128 of the exponent, 8 of the code
    one = kb.reg("b32", 0x3F803F80)
    def one_round() -> None:
        for _ in range(12): _unpack_word(kb, code, bias, one, whole)
    return Loop(one_round, [whole, code])


def _unpack_word(kb: Kernel, code: Value, bias: Value, one: Value, whole: Value) -> None:
    found: list[Value] = []
    for shift in (0, 4, 8, 12):
        here, pair = code >> shift if shift else code, kb.reg("b32")
        kb.emit("lop3.b32", pair, here, 0x000F000F, 0x43004300, 0xEA)      # (a & b) | c
        kb.emit("fma.rn.bf16x2", pair, pair, one, bias)
        found.append(pair)
    fold(whole, found)
    fold(code, [whole])


def unpack_probes() -> Iterator[Probe]:
    """Yields the probe of 4-bit weights."""
    yield Probe("unpacking of 8 int4", unpack_int4, 12, sass=("HFMA2", 48), needs="sm_90a")


for probes in (wgmma_probes, barrier_probes, memory_probes, unpack_probes): register(probes())
