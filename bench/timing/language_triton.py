# mypy: disallow-untyped-defs=False
"""Kernels of language_gpu_model.py in Triton, compiled here and predicted by the timing model.

Protocol: each function of a GPU gives the microseconds of the best of a few tiles, as launches of a graph and
with the cost of one launch, as those of the language are counted. Matmuls are those of gemm_peers.py with
sums stored in float32, attention is that of attention_peers.py, norms are those of memory_peers.py. Of the
gradient of attention the two kernels count; delta is given to them. W4A16 is written here, for both orders of
the packed words: eight codes of a column, or of a row of the transposed matrix, in a word of 32 bits.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import triton
import triton.language as tl

from bench.lib import gemm_peers, memory_peers
from bench.lib.attention_peers import Flash
from bench.lib.gemm_peers import Peer
from bench.timing.rows_attention import predict_flash
from bench.timing.triton_times import Array, Given, predict
from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.sequence import in_row, seconds

HOPPER = "h100"
GROUP = 128         # elements of a scale
FEW, PARTS = 64, 8  # rows up to which K is cut, and parts


@triton.jit
def _store_or_add(out, acc, m, n, N, SPLIT: tl.constexpr):
    """Sums to `out`: stored, or, of parts of K, added."""
    at = out + m[:, None] * N + n[None, :]
    if SPLIT == 1: tl.store(at, acc.to(out.dtype.element_ty))
    else: tl.atomic_add(at, acc)


@triton.jit
def w4a16(x, packed, scales, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          GROUP: tl.constexpr, SPLIT: tl.constexpr):
    """x [M, K] float16 times codes 0 to 15 less 8, of words [K / 8, N], times a scale for each group of K and
    column."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    shifts = k % 8 * 4
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    begin = tl.program_id(2) * (K // SPLIT)
    for start in range(begin, begin + K // SPLIT, BK):
        left = tl.load(x + m[:, None] * K + (start + k)[None, :])
        codes = tl.load(packed + ((start + k) // 8)[:, None] * N + n[None, :]) >> shifts[:, None] & 15
        scale = tl.load(scales + start // GROUP * N + n)
        right = (codes.to(tl.float16) - 8.0) * scale[None, :]
        acc = tl.dot(left, right.to(tl.float16), acc)
    _store_or_add(out, acc, m, n, N, SPLIT)


@triton.jit
def w4a16_turned(x, packed, scales, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 GROUP: tl.constexpr, SPLIT: tl.constexpr):
    """Multiplies by words [N, K / 8], each loaded once: its codes are a new axis."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k, words = tl.arange(0, BK), tl.arange(0, BK // 8)
    shifts = tl.arange(0, 8) * 4
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    begin = tl.program_id(2) * (K // SPLIT)
    for start in range(begin, begin + K // SPLIT, BK):
        left = tl.load(x + m[:, None] * K + (start + k)[None, :])
        word = tl.load(packed + n[:, None] * (K // 8) + (start // 8 + words)[None, :])
        codes = tl.reshape(word[:, :, None] >> shifts[None, None, :] & 15, (BN, BK))
        scale = tl.load(scales + start // GROUP * N + n)
        right = (codes.to(tl.float16) - 8.0) * scale[:, None]
        acc = tl.dot(left, right.to(tl.float16).T, acc)
    _store_or_add(out, acc, m, n, N, SPLIT)


@triton.jit
def matmul_promoting(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                     GROUP: tl.constexpr):
    """a bᵀ of e4m3 with descriptors, as gemm_peers.py's, whose tensor cores add up BK products alone."""
    tile = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    m = (first + tile % (GROUP * columns) % height) * BM
    n = tile % (GROUP * columns) // height * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        acc = tl.dot(a.load([m, k * BK]), b.load([n, k * BK]).T, acc, max_num_imprecise_acc=BK)
    c.store([m, n], acc.to(c.dtype))


QUANTISED = {"words of columns": w4a16, "words of rows": w4a16_turned}


def _microseconds(launch: Timing, gpu: str) -> float:
    own = figures(gpu)
    return seconds(in_row([launch], own), own) * 1e6


def _best(gpu: str, tried: Iterable[tuple[str, Callable[[], Timing]]]) -> tuple[float, str]:
    """The least of what runs; tiles that a GPU has no shared memory for are passed over."""
    found = list[tuple[float, str]]()
    for name, launched in tried:
        try: found.append((_microseconds(launched(), gpu), name))
        except (NVError, RuntimeError) as error: print(f"  {name}: {error}", file=sys.stderr)
    return min(found)


# **** matmuls ****

def matmul(gpu: str, m: int, n: int, k: int, dtype: str = "bf16", b_major: str = "MN") -> tuple[float, str]:
    """Sums in float32 of operands of a dtype of gemm_peers.TYPES."""
    deep = 128 if dtype == "e4m3" else 64
    if gpu == HOPPER and m <= 512: tiles = [("descriptors", (128, 128, deep), 4, 4)]
    elif gpu == HOPPER: tiles = [(kind, (128, 256, deep), 8, 3) for kind in ("descriptors", "persistent")]
    else: tiles = [("pointers", (128, 128, 32), 4, 4), ("pointers", (128, 128, 64), 8, 3)]
    peers = [Peer(*each, b_major, dtype) for each in tiles]
    return _best(gpu, ((f"{each}, {each.block}", partial(_matmul, each, gpu, m, n, k)) for each in peers))


def _matmul(peer: Peer, gpu: str, m: int, n: int, k: int) -> Timing:
    fn, fixed = gemm_peers.KERNELS[peer.kind], gemm_peers.constants(peer)
    boxes = gemm_peers.blocks(peer) if peer.descriptors else ((), (), ())
    kind = gemm_peers.TYPES[peer.dtype]
    b = (n, k) if peer.b_major == "K" else (k, n)
    given: dict[str, Given] = {"a": Array(kind, (m, k), boxes[0]), "b": Array(kind, b, boxes[1]),
                               "c": Array("fp32", (m, n), boxes[2]), "M": m, "N": n, "K": k}
    strides = {"stride_am": k, "stride_ak": 1, "stride_bk": 1 if peer.b_major == "K" else n,
               "stride_bn": k if peer.b_major == "K" else 1, "stride_cm": n}
    given |= {name: size for name, size in strides.items() if name in fn.arg_names and name not in fixed}
    tiles = -(-m // peer.block[0]) * -(-n // peer.block[1])
    return predict(fn, given, (min(tiles, fixed.get("CTAS", tiles)),), fixed, gpu, num_warps=peer.warps,
                   num_stages=peer.stages)


def int4_matmul(gpu: str, m: int, n: int, k: int) -> tuple[float, str]:
    """Float16 times codes of 4 bits; of few rows K is cut in parts."""
    large = (256, 128, 64, 8, 3) if gpu == HOPPER else (128, 128, 64, 4, 3)
    tiles = [((16, 32, 128, 4, 4), 1), ((16, 32, 128, 4, 4), PARTS), ((16, 64, 128, 4, 3), PARTS)]
    return _best(gpu, [(f"{name} {tile}, {split} parts of K",
                        partial(_int4_matmul, name, tile, split, gpu, m, n, k))
                       for tile, split in (tiles if m <= FEW else [(large, 1)]) for name in QUANTISED])


def _int4_matmul(name: str, tile: Sequence[int], split: int, gpu: str, m: int, n: int, k: int) -> Timing:
    bm, bn, bk, warps, stages = tile
    fixed = {"BM": bm, "BN": bn, "BK": bk, "GROUP": GROUP, "SPLIT": split}
    given: dict[str, Given] = {"x": Array("fp16", (m, k)), "packed": Array("i32", (k // 8, n)),
                               "scales": Array("fp16", (k // GROUP, n)),
                               "out": Array("fp16" if split == 1 else "fp32", (m, n)), "M": m, "N": n, "K": k}
    return predict(QUANTISED[name], given, (-(-m // bm), -(-n // bn), split), fixed, gpu, num_warps=warps,
                   num_stages=stages)


# **** attention ****

def attention(gpu: str, tokens: int, d: int, heads: int = 16) -> tuple[float, str]:
    """The forward pass without a mask."""
    flashes = [Flash("forward", d, block, warps, stages, descriptors=gpu == HOPPER)
               for block, warps, stages in (((128, 128) if gpu == HOPPER else (128, 64), 8, 3),
                                            ((64, 64), 4, 3))]
    return _best(gpu, ((str(each), partial(predict_flash, each, tokens, heads, gpu)) for each in flashes))


def gradient(gpu: str, tokens: int, d: int, heads: int = 16) -> tuple[float, str]:
    """dk and dv, and dq, each with its best tile."""
    tiles = [((64, 64), 4, 3 if d == 64 else 2), ((128, 64), 8, 2)]
    made = [_best(gpu, ((str(each), partial(predict_flash, each, tokens, heads, gpu))
                        for each in [Flash(what, d, *tile) for tile in tiles])) for what in ("dk, dv", "dq")]
    # one launch's cost for both, as in a graph
    return sum(each for each, _ in made) - figures(gpu).launch_s * 1e6, "; ".join(name for _, name in made)


# **** rows ****

def norm(gpu: str, name: str, m: int, n: int) -> tuple[float, str]:
    """RMSNorm or LayerNorm, a row in a program."""
    fn, weights = {"rms": (memory_peers.rms_norm, "w"), "layer": (memory_peers.layer_norm, "wb")}[name]
    given: dict[str, Given] = {each: Array("bf16", (m, n)) for each in ("out", "x")}
    given |= {each: Array("bf16", (n,)) for each in weights}
    return _best(gpu, ((f"{warps} warps", partial(predict, fn, given, (m,), {"N": n}, gpu, num_warps=warps))
                       for warps in (4, 8)))


def softmax(gpu: str, m: int, n: int) -> tuple[float, str]:
    """Persistent programs."""
    given: dict[str, Given] = {"out": Array("bf16", (m, n)), "x": Array("bf16", (m, n)), "ROWS": m}

    def time_launch(warps: int, each: int, stages: int) -> Timing:
        ctas = min(m, figures(gpu).sms * each)
        fixed = {"N": n, "CTAS": ctas, "STAGES": stages}
        return predict(memory_peers.softmax, given, (ctas,), fixed, gpu, num_warps=warps)
    return _best(gpu, ((f"{warps} warps, {each} an SM, {stages} stages",
                        partial(time_launch, warps, each, stages))
                       for warps, each, stages in ((8, 8, 1), (4, 8, 4))))
