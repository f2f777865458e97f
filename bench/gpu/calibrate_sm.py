"""Microbenchmarks of one SM: arithmetic, mma.sync and wgmma by shape, shared memory, barriers."""
from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.gpu.calibrate_probe import Body, Loop, Probe, fill_shared, fold, register, words
from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.builder.hopper import descriptor_bits

LENGTH = 96         # instructions of a round: too many for ptxas to unroll further
SMEM_BYTES = 32768  # that shared-memory probes read
TILE_BYTES = 40960  # of wgmma operands: 64 rows of A, 256 of B, of 128 bytes
MANY = 512          # threads that fill an SM: four warps a scheduler


# **** arithmetic ****

def chains(emit: Callable[[Kernel, Value], None], ilp: int = 1, kind: str = "b32") -> Body:
    """`ilp` chains of one operation, LENGTH of them a round."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        values = words(kb, memory, ilp, kind)
        for value in values if kind == "b32" else ():   # a shuffle of what all lanes have is none
            fold(value, [kb.special("laneid")])
        def one_round() -> None:
            for _ in range(LENGTH // ilp):
                for value in values: emit(kb, value)
        return Loop(one_round, values)
    return body


OPERATIONS: dict[str, tuple[Callable[[Kernel, Value], None], str]] = {
    "FFMA": (lambda kb, v: kb.emit("fma.rn.f32", v, v, v, v), "f32"),
    "HFMA2": (lambda kb, v: kb.emit("fma.rn.f16x2", v, v, v, v), "b32"),
    "IMAD": (lambda kb, v: kb.emit("mad.lo.s32", v, v, v, v), "s32"),
    "MUFU.EX2": (lambda kb, v: kb.emit("ex2.approx.ftz.f32", v, v), "f32"),
    "SHFL": (lambda kb, v: kb.emit("shfl.sync.bfly.b32", v, v, 1, 31, -1), "b32"),
}


def arithmetic() -> Iterator[Probe]:
    for name, (emit, kind) in OPERATIONS.items():
        sass = name.partition(".")[0], LENGTH
        yield Probe(f"{name} latency", chains(emit, 1, kind), LENGTH, sass=sass)
        yield Probe(f"{name} of an SM", chains(emit, 4, kind), LENGTH * MANY // 32, threads=MANY, sass=sass)


# **** tensor cores ****

def mma(shape: str, types: str, registers: tuple[int, int, int], ilp: int) -> Body:
    """`ilp` independent sums."""
    kind = {"f32": "f32", "s32": "s32", "f16": "b32"}[types.partition(".")[0]]
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        a, b = (words(kb, memory, count) for count in registers[:2])
        sums = [words(kb, memory, registers[2], kind) for _ in range(ilp)]
        def one_round() -> None:
            for _ in range(LENGTH // 4 // ilp):
                for each in sums: kb.mma(shape, types, each, a, b, each)
        return Loop(one_round, [value for each in sums for value in each])
    return body


# e4m3 on Hopper is of f16 instructions, of which ptxas computes once what repeats
MMA = {"m16n8k16 bf16": ("m16n8k16", "f32.bf16.bf16.f32", (4, 2, 4), "sm_80"),
       "m16n8k16 f16, sums of 16 bits": ("m16n8k16", "f16.f16.f16.f16", (4, 2, 2), "sm_80"),
       "m16n8k8 bf16": ("m16n8k8", "f32.bf16.bf16.f32", (2, 1, 4), "sm_80"),
       "m16n8k8 tf32": ("m16n8k8", "f32.tf32.tf32.f32", (4, 2, 4), "sm_80"),
       "m16n8k32 s8": ("m16n8k32", "s32.s8.s8.s32", (4, 2, 4), "sm_80"),
       "m16n8k32 e4m3": ("m16n8k32", "f32.e4m3.e4m3.f32", (4, 2, 4), "sm_89")}


def warp_mma() -> Iterator[Probe]:
    for name, (shape, types, registers, needs) in MMA.items():
        sass = next((opcode for kind, opcode in (("s8", "IMMA"), ("e4m3", "QMMA")) if kind in types),
                    "HMMA"), LENGTH // 4
        without = ("sm_90a",) if "e4m3" in types else ()
        for ilp in (1, 2, 3, 4):
            count = LENGTH // 4 // ilp * ilp
            yield Probe(f"mma.sync {name}, 1 warp, ILP {ilp}", mma(shape, types, registers, ilp), count,
                        needs=needs, sass=sass, without=without)
        yield Probe(f"mma.sync {name} of an SM", mma(shape, types, registers, 4), LENGTH // 4 * 8,
                    threads=256, random=True, needs=needs, sass=sass, without=without)


def wgmma(n: int, types: str = "f32.bf16.bf16", k: int = 16, registers: bool = False, count: int = 8,
          rounds_of: int = 0) -> Body:
    """`count` wgmmas a round, and a wait for those of the round before; `rounds_of`: with so many rounds of
    LENGTH dependent multiply-adds behind them instead, and a wait for all of them."""
    kind = types.partition(".")[0]
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        tile, _ = fill_shared(kb, memory, TILE_BYTES, 128)
        layout = descriptor_bits(0, 8 * 128)
        a: Value | list[Value] = words(kb, memory, 4) if registers else kb.descriptor(tile, layout)
        b, value = kb.descriptor(tile + 64 * 128, layout), kb.reg("f32", 1.0)
        sums = words(kb, memory, n // 2, kind)
        def one_round() -> None:
            kb.wgmma_fence()
            for _ in range(count): kb.wgmma(f"m64n{n}k{k}", types, sums, a, b)
            kb.wgmma_commit()
            if rounds_of:
                with kb.loop(0, rounds_of):
                    kb.nounroll()
                    for _ in range(LENGTH): kb.emit("fma.rn.f32", value, value, value, value)
            kb.wgmma_wait(0 if rounds_of else 1)
        return Loop(one_round, [*sums, value], kb.wgmma_wait)
    return body


def drain_wgmma(n: int, count: int) -> Body:
    """Fence, `count` wgmmas, commit, and a wait for them."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        tile, _ = fill_shared(kb, memory, TILE_BYTES, 128)
        layout = descriptor_bits(0, 8 * 128)
        a, b = kb.descriptor(tile, layout), kb.descriptor(tile + 64 * 128, layout)
        sums = words(kb, memory, n // 2, "f32")
        def one_round() -> None:
            kb.wgmma_fence()
            for _ in range(count): kb.wgmma(f"m64n{n}k16", "f32.bf16.bf16", sums, a, b)
            kb.wgmma_commit()
            kb.wgmma_wait(0)
        return Loop(one_round, sums)
    return body


WGMMA = {"bf16": ("f32.bf16.bf16", 16), "e4m3": ("f32.e4m3.e4m3", 32), "s8": ("s32.s8.s8", 32),
         "tf32": ("f32.tf32.tf32", 8)}
AHEAD, AHEAD_ROUNDS = 16, 24    # wgmmas of 128 cycles, and rounds of 4 x LENGTH cycles


def warpgroup_mma() -> Iterator[Probe]:
    for n in (8, 16, 32, 64, 128, 256):
        for source in ("SS", "RS"):
            yield Probe(f"wgmma m64n{n}k16 bf16 {source}", wgmma(n, registers=source == "RS"), 8, threads=128,
                        nbytes=TILE_BYTES, random=True, sass=("HGMMA", 8), needs="sm_90a")
    for name, (types, k) in list(WGMMA.items())[1:]:
        opcode = {"e4m3": "QGMMA", "s8": "IGMMA", "tf32": "HGMMA"}[name]
        yield Probe(f"wgmma m64n128k{k} {name} SS", wgmma(128, types, k), 8, threads=128, nbytes=TILE_BYTES,
                    random=True, sass=(opcode, 8), needs="sm_90a")
    for count in (1, 4, 8):
        yield Probe(f"wgmma m64n8k16 bf16, {count} and a wait", drain_wgmma(8, count), threads=128,
                    nbytes=TILE_BYTES, sass=("HGMMA", count), needs="sm_90a")
    yield Probe("wgmma issued ahead", wgmma(256, count=AHEAD, rounds_of=AHEAD_ROUNDS), threads=128,
                nbytes=TILE_BYTES, rounds=(2, 6), sass=("HGMMA", AHEAD), needs="sm_90a")


# **** shared memory ****

def chase(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    """Loads whose addresses follow from what the load before gave: zeros."""
    tile, _ = fill_shared(kb, memory, SMEM_BYTES, 32)
    at = tile + kb.tid.x * 4
    def one_round() -> None:
        for i in range(LENGTH // 4):
            found, = kb.ld("shared", "u32", at.at(i * 128))
            fold(at, [found])
    return Loop(one_round, [at])


def places(stride: int) -> int:
    """Loads of a round: of addresses that differ, or ptxas takes some for the same."""
    return min(LENGTH // 4, SMEM_BYTES // 2 // span(stride))


def span(stride: int) -> int: return max(4 * stride * 32, 512)


def loads(width: int, stride: int, store: bool = False) -> Body:
    """Loads or stores of `width` words, those of neighbours `stride` words apart."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        tile, _ = fill_shared(kb, memory, SMEM_BYTES, 256)
        at, whole = tile + kb.special("laneid") * (4 * stride), kb.reg("b32", 0)
        values, turn = words(kb, memory, width), kb.reg("u32", 0)
        def one_round() -> None:
            here = at + turn
            for i in range(places(stride)):
                place = here.at(i * span(stride))
                if store: kb.st("shared", "b32", place, values)
                else: fold(whole, kb.ld("shared", "b32", place, width))
            turn.set(turn ^ (SMEM_BYTES // 2))
        return Loop(one_round, [whole])
    return body


def matrices(count: int, store: bool = False, chained: bool = False) -> Body:
    """ldmatrix or stmatrix of rows of 16 bytes, one behind the other."""
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        tile, _ = fill_shared(kb, memory, SMEM_BYTES, 32 if chained else 256)
        at, whole = tile + kb.special("laneid") * 16, kb.reg("b32", 0)
        values = words(kb, memory, count)
        def one_round() -> None:
            for i in range(LENGTH // 4):
                place = at.at(i * 512)
                if store: kb.stmatrix(place, values)
                elif chained: fold(at, kb.ldmatrix(place, count)[:1])
                else: fold(whole, kb.ldmatrix(place, count))
        return Loop(one_round, [whole, at])
    return body


def smem() -> Iterator[Probe]:
    rows = LENGTH // 4
    yield Probe("LDS latency", chase, rows, nbytes=SMEM_BYTES, sass=("LDS", rows))
    for stride in (1, 2, 4, 8, 16, 32):
        yield Probe(f"LDS, stride {stride}", loads(1, stride), places(stride) * 8, threads=256,
                    nbytes=SMEM_BYTES, sass=("LDS", places(stride)))
    for stride in (1, 8):
        yield Probe(f"STS, stride {stride}", loads(1, stride, store=True), places(stride) * 8, threads=256,
                    nbytes=SMEM_BYTES, sass=("STS", places(stride)))
    for name, store in (("LDS", False), ("STS", True)):
        yield Probe(f"{name}.128 bytes", loads(4, 4, store), places(4) * 8 * 512, rate=True, threads=256,
                    nbytes=SMEM_BYTES, sass=(name, places(4)))
    for count in (1, 2, 4):
        yield Probe(f"ldmatrix.x{count} latency", matrices(count, chained=True), rows, nbytes=SMEM_BYTES,
                    sass=("LDSM", rows))
        yield Probe(f"ldmatrix.x{count}", matrices(count), rows * 8, threads=256, nbytes=SMEM_BYTES,
                    sass=("LDSM", rows))
    for count in (1, 2, 4):
        yield Probe(f"stmatrix.x{count}", matrices(count, store=True), rows * 8, threads=256,
                    nbytes=SMEM_BYTES, sass=("STSM", rows), needs="sm_90a")


# **** barriers ****

def barrier(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    def one_round() -> None:
        for _ in range(8): kb.sync()
    return Loop(one_round, [])


def mbarrier(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    """All arrive and wait for the phase; two phases a round."""
    bar = kb.mbarriers("bar")
    with kb.if_(kb.tid.x == 0):
        kb.mbarrier_init(bar[0], kb.threads[0])
        if kb.hopper: kb.fence_mbarrier_init()
    def one_round() -> None:
        for parity in (0, 1):
            kb.mbarrier_arrive(bar[0])
            kb.mbarrier_wait(bar[0], parity)
    return Loop(one_round, [])


def barriers() -> Iterator[Probe]:
    for threads in (128, 512):
        yield Probe(f"bar.sync of {threads}", barrier, 8, threads=threads, sass=("BAR", 8))
        yield Probe(f"mbarrier round trip of {threads}", mbarrier, 2, threads=threads, sass=("SYNCS", 6))


for made in (arithmetic, warp_mma, warpgroup_mma, smem, barriers): register(made())
