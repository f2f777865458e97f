"""Cases of emitted.py: specs of every family, for every architecture and CPU level, with schedules.

Protocol. `cases()` yields each `Case`: a spec, a target (an architecture, or a `CPU` that is the same
wherever this runs) and a schedule, None for the default. Names say all three and stay the same: two commits
are compared by them. `emit(case)` gives the schedule that was used and the kernels, in the order of their
launches. Default schedules are those without a database of tuned ones and without a search.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.lib.specs import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    QTYPES,
    S8,
    U8,
    alibi,
    appends,
    attention,
    backward,
    blocks,
    caches,
    codes,
    decode,
    eights,
    epilogues,
    gate_up,
    mask_and_bias,
    matmul,
    norms,
    pack_sequences,
    quant_matmul,
    samplers,
    soft_cap,
    sparse,
    tables,
    with_fp8_scales,
)
from tinygrad_nv.cpu.gemm.schedules import CPUGemm
from tinygrad_nv.cpu.isa import AMX, AVX2, AVX512, AVX512_BF16, ISA, PORTABLE
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.attention.schedules import BackwardMma, BackwardWgmma, FlashFma, FlashMma, FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.decode.schedules import Decode
from tinygrad_nv.tile.expression import (
    Load,
    Sum,
)
from tinygrad_nv.tile.gemm.analytic import analytic
from tinygrad_nv.tile.gemm.schedules import Gemv, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.kernel import Chain, TileKernel
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledMma, ScaledWgmma
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SMS = {"sm_80": 108, "sm_89": 142, "sm_90a": 132}
A100, HOPPER, GPUS = ("sm_80",), ("sm_90a",), tuple(SMS)
DEFAULT = {"default": None}
LEVELS = (PORTABLE, AVX2, AVX512, AVX512_BF16)
CAUSAL, WINDOW = Band(None, 0), Band(-255, 0)


@dataclass(frozen=True)
class Case:
    """Spec, schedule and target of a kernel. `schedule` None is the default."""
    name: str
    family: str
    spec: Any
    target: str | CPU
    schedule: Schedule | None = None

    def __str__(self) -> str: return self.name


@dataclass(frozen=True)
class Emitted:
    """A case's schedule, None where a template has none, and kernels; with bytes that these share."""
    schedule: Schedule | None
    kernels: Sequence[TileKernel | CPUKernel]
    workspace_bytes: int = 0


def on(isa: ISA) -> CPU:
    """Eight cores with caches of 32 KiB, 1 MiB and 32 MiB."""
    return CPU(isa, 8, 32 << 10, 1 << 20, 32 << 20)


# **** kernels ****

def emit(case: Case) -> Emitted:
    """The schedule and the kernels. Raises the project's errors where a template refuses, `LookupError` where
    no template takes the spec."""
    spec, of = case.spec, case.target
    target: GPU | CPU = of if isinstance(of, CPU) else GPU(of, SMS[of])
    schedule: Any = case.schedule or _default(spec, target)
    if schedule is None: raise LookupError(f"no template for {spec} on {of}")
    computed = target.kind == "cpu" and isinstance(spec, AttentionSpec)
    made = TABLE.build(spec, schedule, target, _integers(spec) if computed else ())
    if isinstance(made, Chain): return Emitted(schedule, [made.first, made.second])
    shared = sum(each.nbytes for each in made.scratch) if len(made.kernels) > 1 else 0
    return Emitted(schedule, made.kernels, shared)


def _default(spec: Any, target: GPU | CPU) -> Schedule | None:
    if isinstance(spec, GemmSpec) and isinstance(target, GPU):  # whatever a database has
        return analytic(spec, target.arch, target.sm_count)
    return TABLE.choose(spec, target)


def _integers(spec: AttentionSpec) -> tuple[Integer, ...]:
    """Returns two variables of a launch: the last one is the extent, start is what the first adds up to."""
    return tuple(Integer(i, (1, int(name == "s_kv"))) for i, name in enumerate(spec.symbolic))


# **** cases ****

def cross(family: str, specs: Mapping[str, Any], targets: Sequence[str | ISA],
          schedules: Mapping[str, Schedule | None] = DEFAULT) -> Iterator[Case]:
    """Every spec on every target with every schedule, or the default."""
    for label, spec in specs.items():
        for target in targets:
            place = target if isinstance(target, str) else on(target)
            for words, schedule in schedules.items():
                yield Case(f"{family}: {label} | {target} | {words}", family, spec, place, schedule)


def cases() -> Iterator[Case]:
    """All of them."""
    for family in (gemm, gemv, block_scale_gemm, quant_gemm, sparse_gemm, forward, backwards,
                   decode_attention, kv_append, row_norms, sampling, embedding, on_cpu):
        yield from family()


MMA, WGMMA, GEMV, BLOCKS = Mma(), Wgmma(), Gemv(), ScaledWgmma()
FLASH, FLASH_MMA, FLASH_FMA, DECODE, DQ, DQ_MMA = (
    FlashWgmma(), FlashMma(), FlashFma(), Decode(), BackwardWgmma(), BackwardMma())


def gemm() -> Iterator[Case]:
    """mma.sync and wgmma."""
    plain = {
        "bf16 4096": matmul(4096, 4096, 4096), "bf16 x @ w": matmul(512, 768, 1024, majors="KM"),
        "f16 x.T @ w": matmul(512, 768, 1024, F16, "MM"), "f16 to f32": matmul(300, 512, 640, F16, out=F32),
        "tf32": matmul(256, 512, 384, F32), "tf32 x @ w": matmul(256, 512, 384, F32, "KM"),
        "int8": matmul(256, 512, 1024, S8), "uint8": matmul(256, 512, 1024, U8),
        "odd extents": matmul(101, 133, 75), "rows apart": matmul(100, 136, 80, F16, gap=8),
        "columns side by side": matmul(256, 384, 512, out_major="M"),
        "symbolic": matmul(1024, 512, 768, symbolic=True), "batch 2x3": matmul(128, 192, 256, batch=(2, 3)),
        "one b for a batch": replace(one := matmul(96, 256, 128, batch=(4,)), b=replace(one.b, batch=(0,))),
        "48 rows": matmul(48, 4096, 4096), "long K": matmul(128, 128, 16384)}
    yield from cross("gemm", plain | epilogues(), GPUS)
    yield from cross("gemm", eights(), GPUS[1:])
    small = {"f16 300x200x520": matmul(300, 200, 520, F16)}
    yield from cross("gemm", small, GPUS, {
        "mma 128x128": MMA, "mma 64x64, 4 stages": MMA.block(64, 64).stages(4),
        "mma split 3": MMA.block(64, 64).split(3), "mma swapped": MMA.block(64, 128).swap_operands(),
        "mma 256x128": MMA.block(256, 128).warps(4, 2), "mma 16x64": MMA.block(16, 64).k(64).warps(1, 2)})
    wide = {"bf16 640x512x1024": matmul(640, 512, 1024)}
    yield from cross("gemm", wide, HOPPER, {
        "wgmma 128x128": WGMMA, "wgmma ping-pong": WGMMA.block(64, 128).pingpong(),
        "wgmma cluster 2x1": WGMMA.cluster(2), "wgmma cluster 1x2": WGMMA.cluster(1, 2),
        "wgmma cluster 2x2, ping-pong": WGMMA.block(64, 64).pingpong().cluster(2, 2),
        "wgmma split 2": WGMMA.split(2), "wgmma split 4": WGMMA.split(4), "wgmma stream-K": WGMMA.stream_k(),
        "wgmma swapped": WGMMA.block(128, 64).swap_operands(), "wgmma swizzle 64B": WGMMA.swizzle("64B"),
        "wgmma swizzle 32B": WGMMA.swizzle("32B"), "wgmma 3 consumers": WGMMA.block(192, 96).warps(16),
        "wgmma 64x8": WGMMA.block(64, 8).warps(8), "wgmma group 1": WGMMA.group_rows(1)})
    some = {"e4m3 512x256x1024": matmul(512, 256, 1024, E4M3), "gated 256": gate_up(256, 256, 512)}
    yield from cross("gemm", some, HOPPER, {"wgmma 128x64": WGMMA.block(128, 64).k(128).stages(3)})


def block_scale_gemm() -> Iterator[Case]:
    """FP8 with scales of groups of K."""
    some = {"4096": blocks(4096, 4096, 4096), "odd": blocks(101, 200, 336), "16 rows": blocks(16, 4096, 4096),
            "symbolic": blocks(1024, 512, 768, symbolic=True)}
    yield from cross("scaled_gemm", some, GPUS[1:])
    wide = {"640x512x1024": blocks(640, 512, 1024)}
    yield from cross("scaled_gemm", wide, HOPPER, {
        "ping-pong": BLOCKS.block(64, 128).pingpong(), "cluster 2x1": BLOCKS.cluster(2),
        "split 2": BLOCKS.split(2), "stream-K": BLOCKS.stream_k(), "256x128": BLOCKS.block(256, 128),
        "swapped": BLOCKS.block(128, 32).swap_operands()})
    few = {"100x200x1024": blocks(100, 200, 1024)}
    yield from cross("scaled_gemm", few, ("sm_89",), {
        "mma 128x128": ScaledMma().block(128, 128).warps(2, 4).stages(3),
        "mma split 3": ScaledMma().block(64, 64).warps(2, 2).stages(3).split(3),
        "mma swapped": ScaledMma().block(64, 32).warps(2, 1).stages(4).swap_operands()})


def quant_gemm() -> Iterator[Case]:
    """Matrices in fragments: few rows and many."""
    for name, type in QTYPES.items():
        some = {f"{name}, {m} rows": quant_matmul(type, m, 1024, 1024) for m in (1, 16, 256)}
        yield from cross("quant_gemm", some, A100 + HOPPER)
    odd = {"symbolic": quant_matmul(QTYPES["int4"], 70, 200, 512, symbolic=True),
           "f16": quant_matmul(QTYPES["int4, zeros"], 40, 200, 512, F16)}
    yield from cross("quant_gemm", odd, A100 + HOPPER)


def sparse_gemm() -> Iterator[Case]:
    """2:4 sparse matrices: few rows and many."""
    for dtype, name in ((BF16, "bf16"), (S8, "s8"), (E4M3, "e4m3")):
        some = {f"{name}, {m} rows": sparse(m, 1024, 1024, dtype) for m in (1, 16, 256)}
        yield from cross("sparse_gemm", some, HOPPER if dtype == E4M3 else A100 + HOPPER)


def gemv() -> Iterator[Case]:
    """Few rows."""
    for dtype, name in ((BF16, "bf16"), (F16, "f16"), (F32, "f32"), (S8, "s8"), (U8, "u8"), (E4M3, "e4m3"),
                        (E5M2, "e5m2")):
        one = {f"{name} 1 row": matmul(1, 1024, 2048, dtype),
               f"{name} x @ w": matmul(3, 1024, 512, dtype, "KM")}
        yield from cross("gemv", one, A100 + HOPPER)
    yield from cross("gemv", {
        "vocabulary": matmul(1, 128256, 4096), "1 column": matmul(2048, 1, 1024, out=F32),
        "gated 1 row": gate_up(1, 1024, 512), "symbolic": matmul(8, 512, 1024, symbolic=True),
        "odd": matmul(2, 77, 130, F16),
        "bias": matmul(4, 768, 512, epilogue=Sum().cast(BF16) + Load(0, BF16, 0, 1)),
        "batch 5": matmul(1, 128, 256, batch=(5,)), "f32 4 rows": matmul(4, 512, 1024, F32),
        "int8 odd": matmul(1, 77, 131, S8), "f16 odd": matmul(3, 33, 515, F16, gap=2)}, GPUS)
    yield from cross("gemv", {"f16 4x512x4096": matmul(4, 512, 4096, F16)}, GPUS, {
        "8 warps along K": GEMV.columns(16).k(128), "split 4": GEMV.columns(16).k(64).warps(4).split(4)})


def forward() -> Iterator[Case]:
    """Attention, forwards."""
    specs = {
        "causal": attention(512, 512, band=CAUSAL),
        "d 128 GQA": attention(256, 512, 128, group=4, band=CAUSAL, start=256),
        "full d 128 f16": attention(300, 700, 128, F16), "window": attention(1024, 1024, band=WINDOW),
        "d 96 to f32": attention(128, 384, 96, out=F32, band=CAUSAL),
        "d 192/128": attention(256, 256, 192, d_v=128),
        "d 256": attention(256, 256, 256, band=CAUSAL), "LSE": attention(200, 200, lse=True, bshd=True),
        "soft-cap": attention(256, 256, 64, F16, band=CAUSAL, score=soft_cap()),
        "mask and bias": attention(128, 256, score=mask_and_bias(128, 256)),
        "symbolic": attention(256, 1024, 128, band=CAUSAL, start=768, symbolic=("s_q", "s_kv", "start")),
        "dropout": attention(256, 256, 64, band=CAUSAL, kept=230, lse=True),
        "ragged": pack_sequences(attention(512, 512, 128, batch=3, group=2, band=CAUSAL, bshd=True),
                                 (900, 900)),
        "slopes": attention(100, 300, band=CAUSAL, start=200, group=2, score=alibi()),
        "many tiles": attention(4096, 4096, 128, heads=4, group=4), "d 40": attention(100, 140, 40),
        "many tiles, causal": attention(4096, 4096, 128, heads=7, group=3, band=CAUSAL),
        "16 rows": attention(16, 2048, 128, band=CAUSAL, start=2032)}
    yield from cross("attention", specs, GPUS)
    floats = {
        "f32 causal": attention(256, 256, 64, F32, band=CAUSAL), "f32 d 128": attention(128, 512, 128, F32),
        "f32 soft-cap, LSE": attention(100, 100, 40, F32, score=soft_cap(40), lse=True),
        "f32 d 256 to bf16": attention(64, 64, 256, F32, out=BF16),
        "f32 symbolic": attention(64, 512, 32, F32, symbolic=("s_kv",))}
    yield from cross("attention", floats, A100 + HOPPER)
    yield from cross("attention", {"f32 64x200": attention(64, 200, 64, F32)}, A100, {
        "shared columns": FLASH_FMA.block(16, 64).warps(1, 4), "4 warps": FLASH_FMA.block(64, 32).warps(4)})
    yield from cross("attention", {
        "e4m3": with_fp8_scales(attention(256, 512, 128, band=CAUSAL, start=256), 128),
        "e4m3, a scale for a head": with_fp8_scales(attention(300, 300, 64, group=2), 0),
        "e4m3 d 256": with_fp8_scales(attention(128, 256, 256, out=F32, lse=True), 64)}, HOPPER)
    one = {"bf16 400x400": attention(400, 400, 64, group=2, band=CAUSAL, lse=True)}
    yield from cross("attention", one, GPUS, {
        "mma 64x64": FLASH_MMA.block(64, 64).warps(4),
        "mma 32x128, 3 stages": FLASH_MMA.block(32, 128).warps(2).stages(3)})
    yield from cross("attention", one, HOPPER, {
        "wgmma 64x64": FLASH.block(64, 64).warps(8), "wgmma 128x112": FLASH.block(128, 112),
        "wgmma 192x80, ping-pong": FLASH.block(192, 80).warps(16).pingpong(),
        "wgmma 128x64, 3 stages": FLASH.block(128, 64).stages(3)})


def backwards() -> Iterator[Case]:
    """Attention's gradients."""
    specs = {
        "causal": backward(512, 512, band=CAUSAL), "d 128 GQA": backward(256, 256, 128, group=4, band=CAUSAL),
        "f16 to f32": backward(300, 500, 64, F16, out=F32), "window": backward(512, 512, band=WINDOW),
        "d 96": backward(128, 384, 96, bshd=True),
        "d 192/128": backward(128, 128, 192, d_v=128),
        "in one order": backward(256, 256, 64, deterministic=True),
        "dropout": backward(256, 256, 64, kept=200, band=CAUSAL),
        "soft-cap": backward(200, 200, score=soft_cap()),
        "mask and bias": backward(128, 256, score=mask_and_bias(128, 256)),
        "slopes": backward(100, 300, band=CAUSAL, start=200, score=alibi()), "d 40": backward(100, 140, 40),
        "in one order, window": backward(512, 512, deterministic=True, band=WINDOW),
        "symbolic": backward(512, 512, 64, band=CAUSAL, symbolic=("s_q", "s_kv"))}
    yield from cross("attention backward", specs, GPUS)
    yield from cross("attention backward", {
        "d 256": backward(128, 128, 256, band=CAUSAL),
        "in one order d 256": backward(128, 128, 256, deterministic=True, band=CAUSAL)}, A100 + HOPPER)
    one = {"bf16 200x200": backward(200, 200, 64, group=2, band=CAUSAL)}
    yield from cross("attention backward", one, GPUS, {
        "mma 32x32": DQ_MMA.block(32, 32).warps(2),
        "mma 64x64, keys shared": DQ_MMA.block(64, 64).warps(2, 2)})
    yield from cross("attention backward", one, HOPPER, {
        "wgmma 128x128": DQ.block(128, 128), "wgmma 64x64": DQ.block(64, 64).warps(8),
        "wgmma halves": DQ.block(64, 64), "wgmma 64x128, 3 stages": DQ.block(64, 128).stages(3)})


def decode_attention() -> Iterator[Case]:
    """Decode attention."""
    yield from cross("decode", caches(), GPUS)
    yield from cross("decode", {"f16": decode(dtype=F16)}, GPUS, {
        "16x64": DECODE.keys(64).warps(1, 4).split(4, 128),
        "32x32, one split": DECODE.keys(32).warps(2, 2).split(1, 64).stages(3)})


def kv_append() -> Iterator[Case]:
    """New keys and values."""
    for label, spec in appends().items():
        yield from cross("kv_append", {label: spec}, GPUS[1:] if spec.k_pages.dtype == E4M3 else GPUS)


def row_norms() -> Iterator[Case]:
    """Norms, softmax, argmax, elements."""
    yield from cross("norm", norms(), A100 + HOPPER)
    quantised = {"codes of rows": codes(64, 4096), "codes of groups": codes(64, 4096, 128)}
    yield from cross("norm", quantised, HOPPER)


def sampling() -> Iterator[Case]:
    """Sampling."""
    yield from cross("sampling", samplers(), A100 + HOPPER)


def embedding() -> Iterator[Case]:
    """Embeddings and their gradients."""
    yield from cross("embedding", tables(), GPUS)


def on_cpu() -> Iterator[Case]:
    """Every family on the CPU."""
    emulated = replace(AMX, emulated=True)
    few = {"1 row": matmul(1, 2048, 1024), "f32 x @ w": matmul(4, 512, 300, F32, "KM"),
           "int8 16 rows": matmul(16, 512, 1024, S8), "gated": gate_up(1, 512, 256),
           "symbolic": matmul(8, 256, 512, F16, symbolic=True), "1 column": matmul(300, 1, 256, F32),
           "x @ w 4096": matmul(1, 4096, 4096, BF16, "KM")}
    many = {"bf16": matmul(256, 512, 1024), "f32": matmul(100, 300, 200, F32),
            "int8": matmul(128, 256, 512, S8),
            "f16 x.T @ w, batch 3": matmul(64, 128, 96, F16, "MM", batch=(3,)),
            "gated": gate_up(64, 256, 256),
            "bias, gelu, residual": epilogues()["bias, gelu, residual"], "e4m3": matmul(64, 128, 256, E4M3),
            "bf16 x @ w": matmul(100, 130, 75, BF16, "KM"), "int8 x.T @ w": matmul(64, 96, 70, S8, "MM"),
            "columns side by side": matmul(40, 64, 96, F32, out_major="M")}
    yield from cross("CPU gemv", few, LEVELS)
    yield from cross("CPU gemm", many, LEVELS)
    tiled = {label: many[label] for label in ("bf16", "int8", "gated", "bf16 x @ w", "int8 x.T @ w")}
    yield from cross("CPU gemm", tiled, (AMX, emulated))
    yield from cross("CPU gemm", {"f32 x @ w": matmul(90, 200, 150, F32, "KM")}, (AVX2,), {
        "4x16, 3 parts": CPUGemm(AVX2, 3, 32, 64, 64, 4, 16)})
    yield from cross("CPU attention", {
        "causal": attention(256, 256, band=CAUSAL),
        "f32 GQA, LSE": attention(100, 200, 40, F32, group=3, lse=True),
        "dropout": attention(128, 128, 64, F16, kept=230), "soft-cap": attention(64, 64, score=soft_cap()),
        "ragged": pack_sequences(attention(64, 64, 64, batch=3, band=CAUSAL, bshd=True), (100, 100)),
        "e4m3": with_fp8_scales(attention(64, 256, 64), 128), "slopes": attention(50, 50, score=alibi()),
        "symbolic": attention(
            64, 512, 128, band=WINDOW, start=448, symbolic=("s_q", "s_kv", "start"))}, LEVELS)
    yield from cross("CPU attention backward", {
        "causal": backward(256, 256, 64, group=2, band=CAUSAL), "f32": backward(100, 60, 40, F32),
        "dropout, soft-cap": backward(64, 64, kept=200, score=soft_cap()),
        "many heads, slopes": backward(64, 64, batch=4, heads=8, score=alibi())}, LEVELS)
    some = {label: spec for label, spec in epilogues().items() if label not in many}
    yield from cross("CPU gemm", some, (AVX2, AVX512_BF16))
    yield from cross("CPU decode", caches() | {"f32": decode(dtype=F32, batch=1)}, (AVX2, AVX512_BF16))
    yield from cross("CPU kv_append", appends(), (PORTABLE, AVX512))
    yield from cross("CPU norm", norms(), (PORTABLE, AVX2, AVX512))
    yield from cross("CPU sampling", samplers(), (AVX2, AVX512))
    yield from cross("CPU embedding", tables(), (PORTABLE, AVX512))
