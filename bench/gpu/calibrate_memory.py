"""Microbenchmarks of memory beyond an SM: L2, HBM, TMA, clusters."""
from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.calibrate_probe import (
    ROW_BYTES,
    Body,
    Loop,
    Probe,
    accumulate,
    fill_shared,
    fold,
    register,
    words,
)
from tinygrad_nv.ptx.builder import Kernel, Value

MIB = 1 << 20
LINE = 128
STREAMED = 256 * MIB    # that a stream reads or writes at most
AT_ONCE = 4             # loads under way of a thread that streams
CHASED = 16             # loads of a round
READERS = 256           # threads of a CTA that reads
SETS = {"near": 4 * MIB, "far": 32 * MIB, "HBM": 256 * MIB}


# **** loads of threads ****

def chase(nbytes: int) -> Body:
    """Loads of lines in a random order, each after the one before: what they give, zero, is part of the
    number of the next."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        number = words(kb, memory, 1, "u32")[0]
        def one_round() -> None:
            for _ in range(CHASED):
                kb.emit("mad.lo.u32", number, number, 1664525, 1013904223)
                line = (number >> 8) & (nbytes // LINE - 1)
                at = kb.reg("u64")
                kb.emit("mad.wide.u32", at, line, LINE, memory)
                accumulate(number, kb.ld("global", "u32", at.at(), modifiers=".cg")[0])
        return Loop(one_round, [number])
    return body


def reads(pieces: int, turns: int) -> Body:
    """Each thread of a grid of 8 CTAs an SM reads `pieces` of 16 bytes that no other reads, others in each of
    `turns` rounds, then the same again."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        threads = kb.nctaid.x * READERS
        first = memory + ((kb.ctaid.x * READERS + kb.tid.x) * 16).to("u64")
        step, whole, turn = (threads * 16).to("u64"), kb.reg("b32", 0), kb.reg("u32", 0)
        def one_round() -> None:
            here = first + turn.to("u64") * step * pieces
            for _ in range(pieces):
                fold(whole, kb.ld("global", "b32", here.at(), 4, ".cg"))
                here += step
            turn.set((turn + 1) & (turns - 1))
        return Loop(one_round, [whole])
    return body


def stream(what: str) -> Body:
    """Each round, a grid moves on by what its threads hold at once: 4 x 16 bytes each."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        width = kb.nctaid.x * READERS
        at, step = memory + ((kb.ctaid.x * READERS + kb.tid.x) * 16).to("u64"), (width * 16).to("u64")
        target = at + STREAMED if what == "copy" else at
        whole, given = kb.reg("b32", 0), [kb.special("laneid")] * 4
        def one_round() -> None:
            loaded = [given] * AT_ONCE
            if what != "write":
                loaded = [kb.ld("global", "b32", here.at(), 4, ".cg") for here in steps(at, step)]
            for here, four in zip(steps(target, step), loaded, strict=True):
                if what == "read": fold(whole, four)
                else: kb.st("global", "b32", here.at(), four)
            for moving in (at, target) if what == "copy" else (at,): accumulate(moving, step << 2)
        return Loop(one_round, [whole])
    return body


def steps(at: Value, step: Value) -> list[Value]:
    """AT_ONCE places, a step apart."""
    out = [at]
    while len(out) < AT_ONCE: out.append(out[-1] + step)
    return out


def store_and_fence(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    """A store, and a fence that waits until all of the GPU may see it."""
    value = words(kb, memory, 1)[0]
    def one_round() -> None:
        for i in range(4):
            kb.st("global", "b32", memory.at(LINE * i), value)
            kb.emit("fence.acq_rel.gpu")
    return Loop(one_round, [value])


def copy_async(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    """cp.async of 16 bytes for each thread, and a wait for it."""
    tile = kb.shared("tile", 512)
    def one_round() -> None:
        for _ in range(4):
            kb.cp_async(tile.address(kb.tid.x * 16).at(), (memory + (kb.tid.x * 16).to("u64")).at(), 16)
            kb.cp_async_commit()
            kb.cp_async_wait(0)
    return Loop(one_round)


def threads() -> Iterator[Probe]:
    for name, nbytes in SETS.items():
        yield Probe(f"load latency, {nbytes // MIB} MiB", chase(nbytes), CHASED, nbytes=nbytes,
                    near=name != "HBM", sass=("LDG", CHASED))
    for name, pieces, turns in (("near", 2, 2), ("far", 4, 2)):     # 16 and 33 MiB on 132 SMs
        yield Probe(f"L2 bytes of all SMs, {name}", reads(pieces, turns), pieces * READERS * 16 * 8,
                    rate=True, threads=READERS, ctas=0, ctas_of_sm=8, rounds=(20, 100), nbytes=64 * MIB,
                    near=True, sass=("LDG", pieces))
    for what in ("read", "write", "copy"):
        moved = AT_ONCE * READERS * 16 * 8 * (2 if what == "copy" else 1)
        yield Probe(f"HBM {what}", stream(what), moved, rate=True, threads=READERS, ctas=0, ctas_of_sm=8,
                    rounds=(4, 12), nbytes=STREAMED * (2 if what == "copy" else 1),
                    sass=("STG" if what == "write" else "LDG", AT_ONCE))
    yield Probe("store and fence", store_and_fence, 4, sass=("MEMBAR", 4))
    yield Probe("cp.async and a wait", copy_async, 4, near=True, sass=("LDGSTS", 4))


# **** TMA ****

def first(kb: Kernel) -> Value: return kb.tid.x == 0


def ring(rows: int, depth: int) -> Body:
    """Loads of `rows` rows by one thread, `depth` of them under way."""
    nbytes = rows * ROW_BYTES
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        assert tensor is not None
        tile, bars = kb.shared("tile", depth * max(nbytes, 1024), 1024), kb.mbarriers("bars", depth)
        parity = kb.reg("u32", 0)
        def load(i: int) -> None:
            kb.mbarrier_expect(bars[i], nbytes)
            kb.tma_load(tile.at(i * max(nbytes, 1024)), tensor, [0, 0], bars[i])
        with kb.if_(first(kb)):
            for i in range(depth): kb.mbarrier_init(bars[i], 1)
            kb.fence_mbarrier_init()
            for i in range(depth): load(i)
        def one_round() -> None:
            with kb.if_(first(kb)):
                for i in range(depth):
                    kb.mbarrier_wait(bars[i], parity)
                    load(i)
            fold(parity, [1])
        def after() -> None:
            with kb.if_(first(kb)):
                for i in range(depth): kb.mbarrier_wait(bars[i], parity)
        return Loop(one_round, after=after)
    return body


def issue_loads(count: int) -> Body:
    """`count` loads of a row by one thread, then a wait for all."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        assert tensor is not None
        tile, bar, parity = kb.shared("tile", ROW_BYTES * count, 1024), kb.mbarriers("bar"), kb.reg("u32", 0)
        with kb.if_(first(kb)):
            kb.mbarrier_init(bar[0], 1)
            kb.fence_mbarrier_init()
        def one_round() -> None:
            with kb.if_(first(kb)):
                kb.mbarrier_expect(bar[0], ROW_BYTES * count)
                for i in range(count): kb.tma_load(tile.at(ROW_BYTES * i), tensor, [0, 0], bar[0])
                kb.mbarrier_wait(bar[0], parity)
            fold(parity, [1])
        return Loop(one_round)
    return body


def stores(rows: int, read: bool) -> Body:
    """Stores of `rows` rows, one behind the other, and a wait until each is written, or its source read."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        assert tensor is not None
        fill_shared(kb, memory, max(rows * ROW_BYTES, 1024), 32)
        tile, row = kb.tiles[-1], kb.reg("s32", 0)
        def one_round() -> None:
            with kb.if_(first(kb)):
                kb.tma_store(tensor, [0, row], tile.at())
                kb.tma_commit()
                kb.tma_wait(0, read)
            accumulate(row, rows)
        return Loop(one_round, after=lambda: _drain(kb))
    return body


def _drain(kb: Kernel) -> None:
    with kb.if_(first(kb)): kb.tma_wait(0)


def tma() -> Iterator[Probe]:
    for rows in (1, 32, 128, 256):
        yield Probe(f"TMA load of {rows * ROW_BYTES} bytes", ring(rows, 1), box=rows, nbytes=64 * 1024,
                    near=True, rounds=(16, 64), sass=("UTMALDG", 1), needs="sm_90a")
    for rows, depth in ((8, 4), (32, 4), (128, 2), (128, 4), (256, 4)):
        yield Probe(f"TMA bytes of an SM, {depth} boxes of {rows * ROW_BYTES}", ring(rows, depth),
                    rows * ROW_BYTES * depth, rate=True, box=rows, nbytes=64 * 1024, near=True,
                    rounds=(16, 64), sass=("UTMALDG", depth), needs="sm_90a")
    for count in (8, 32):
        yield Probe(f"TMA loads of a row, {count} and a wait", issue_loads(count), count, box=1, nbytes=4096,
                    near=True, sass=("UTMALDG", count), needs="sm_90a")
    for rows in (8, 128):
        for read in (False, True):
            yield Probe(f"TMA store of {rows * ROW_BYTES} bytes{', its source read' if read else ''}",
                        stores(rows, read), box=rows, nbytes=MIB, sass=("UTMASTG", 1), needs="sm_90a")


# **** clusters ****

def cluster_barrier(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    def one_round() -> None:
        for _ in range(8):
            kb.cluster_arrive()
            kb.cluster_wait()
    return Loop(one_round)


def remote(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    """Loads of the other CTA's shared memory, each after the one before."""
    tile, _ = fill_shared(kb, memory, 4096, 32)
    kb.cluster_arrive()
    kb.cluster_wait()
    at = kb.mapa(tile + kb.tid.x * 4, kb.special("cluster_ctarank") ^ 1)
    def one_round() -> None:
        for i in range(CHASED): accumulate(at, kb.ld("shared::cluster", "u32", at.at(128 * i))[0])
    return Loop(one_round, [at])


def multicast(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    """One CTA loads 4 KiB for both, once both have said that they expect them."""
    assert tensor is not None
    tile, bar, parity = kb.shared("tile", 4096, 1024), kb.mbarriers("bar"), kb.reg("u32", 0)
    mask = kb.reg("b16", 3)
    with kb.if_(first(kb)):
        kb.mbarrier_init(bar[0], 1)
        kb.fence_mbarrier_init()
    leads = (kb.special("cluster_ctarank") == 0) & first(kb)
    def one_round() -> None:
        with kb.if_(first(kb)): kb.mbarrier_expect(bar[0], 4096)
        kb.cluster_arrive()
        kb.cluster_wait()
        with kb.if_(leads): kb.tma_load(tile.at(), tensor, [0, 0], bar[0], mask)
        kb.mbarrier_wait(bar[0], parity)
        fold(parity, [1])
    return Loop(one_round)


def clusters() -> Iterator[Probe]:
    for size in (2, 4):
        yield Probe(f"barrier of a cluster of {size}", cluster_barrier, 8, ctas=size, cluster=size,
                    sass=("UCGABAR_ARV", 8), needs="sm_90a")
    yield Probe("DSMEM load latency", remote, CHASED, ctas=2, cluster=2, sass=("LD", CHASED), needs="sm_90a")
    yield Probe("multicast of 4096 bytes, and a cluster's barrier", multicast, ctas=2, cluster=2, box=32,
                nbytes=64 * 1024, near=True, sass=("UTMALDG", 1), needs="sm_90a")


for made in (threads, tma, clusters): register(made())
