"""The programs that the language was drawn with, nearly as they were written, on the CPU and on the
emulated GPU. Programs of users' kinds on the CPU, and as NumPy computes them from the Tile IR.

What differs is said in docs/language.md, "Differences".
"""
from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor as Plain

from tests.support.language.programs import PROGRAMS
from tests.support.language.programs.case import Case, interpreted
from tinygrad_nv.errors import EffectError
from tinygrad_nv.language import *
from tinygrad_nv.language import autotune
from tinygrad_nv.language.kernels import Kernel

Array = np.ndarray[Any, Any]
SCHEDULES = tempfile.mkdtemp()     # of this process alone: nothing is found that another run has left


@kernel.autotune(space=dict(BM=[64, 128], BN=[64, 96, 128], BD=[64, 128], warps=[4, 8], stages=[2, 3],
                            vector=[4, 8]),
                 metric="latency_ms", budget_ms=180, cache=SCHEDULES)
def flash_attention(q: KTile["B*H", "S", "D_h", bf16 @accum(f32)], cache: KVCache, *, dropout: float,
                    causal: bool):
    T  = tile.context()
    Qb = tile.load(q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
    acc = tile.zeros((T.m, T.d), f32); m = tile.full((T.m,), -INF); l = tile.zeros((T.m,), f32)
    for nblk in tile.range_n(cache.K.shape, T.n, prefetch=2):
        Kb = tile.load(cache.K, nblk, cols=T.d, vector=T.vector)
        Vb = tile.load(cache.V, nblk, cols=T.d, vector=T.vector)
        S  = tile.dot(Qb, tile.transpose(Kb)) * tile.rsqrt(float(T.d))
        if causal: tile.mask_causal(S, tile.row_index(), tile.col_index(nblk))
        P, m_c, l_c = tile.softmax_online(S)
        if dropout: P = dropout_in_kernel(P, p=dropout)
        acc, m, l = tile.softmax_accumulate(acc, m, l, P, Vb, m_c, l_c)
    return tile.cast(acc / l[:, None], bf16)


@flash_attention.defvjp
def flash_attention_gradient(inputs, outputs, gradients, *, dropout, causal):
    """By tinygrad: the seed has none."""
    q, k, v = (each.detach() for each in inputs)
    score = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if causal: score = Plain.ones(*score.shape[-2:], device=q.device).tril().bool().where(score,
                                                                                          -float("inf"))
    p, grad = score.softmax(-1), gradients[0].float()
    dv = p.transpose(-1, -2) @ grad
    dp = grad @ v.float().transpose(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return (ds @ k.float()).cast(q.dtype), (ds.transpose(-1, -2) @ q.float()).cast(k.dtype), dv.cast(v.dtype)


base_schedule = Schedule(block=(128, 128), warps=8, stages=3)


@kernel.schedule(base_schedule.with_block(64, 64))
def small_attention(q: KTile["B*H", "S", "D_h", bf16], k: KTile["B*H", "T", "D_h", bf16],
                    v: KTile["B*H", "T", "D_h", bf16]):
    T = tile.context()
    Qb, acc = tile.load(q, rows=T.m, cols=T.d), tile.zeros((T.m, T.d), f32)
    m, l = tile.full((T.m,), -INF), tile.zeros((T.m,), f32)
    for nblk in tile.range_n(k.shape, T.n):
        P, m_c, l_c = tile.softmax_online(tile.dot(Qb,
                                                   tile.load(k, nblk, cols=T.d).T) * tile.rsqrt(float(T.d)))
        acc, m, l = tile.softmax_accumulate(acc, m, l, P, tile.load(v, nblk, cols=T.d), m_c, l_c)
    return tile.cast(acc / l[:, None], bf16)


HEADS, WIDTH = 2, 64
_rng = np.random.default_rng(5)
WEIGHTS = [_rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH))]
Wqkv, Wo = (Plain(each).cast(bf16).realize() for each in WEIGHTS)


@jit
@autodiff
def transformer_block(x: Tensor["B", "S", "D", bf16 @accum(f32)], cache: KVCache, *, heads: int, p: float):
    x0 = x
    x = rmsnorm_safe(x)
    with device(gpu), prefetch(cache, into="smem", overlap="compute"):
        qkv = matmul(x, Wqkv); q, k, v = split_qkv(qkv, heads=heads)
        cache = cache.append(k, v)
        y = flash_attention(q, cache, dropout=p, causal=True)
    y = residual(x, matmul(merge_heads(y, heads=heads), Wo), dropout=p)
    return cast_like(y, x0), cache


def numbers(*shape: int, seed: int = 0) -> Plain:
    made = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
    return Plain(made).cast(bf16).realize()


def attended(q: Plain, k: Plain, v: Plain, causal: bool) -> Array:
    """Attention in float64."""
    a, b, c = (each.float().numpy().astype(np.float64) for each in (q, k, v))
    score = a @ b.transpose(0, 2, 1) / np.sqrt(a.shape[-1])
    if causal: score = np.where(np.tril(np.ones(score.shape[-2:], bool)), score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ c


def near(made: Plain | Array, exact: Array) -> None:
    """As near as bfloat16 is: a half of its last digit for the result, and as much for the probabilities."""
    got = made.float().numpy() if isinstance(made, Plain) else made
    assert np.abs(got - exact).max() <= 2.0**-8 * np.abs(exact).max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [100, 64, 200])
def test_flash_attention(causal: bool, length: int) -> None:
    q, k, v = (numbers(6, length, 64, seed=i) for i in range(3))
    near(flash_attention(q, CacheState(k, v), dropout=0.0, causal=causal), attended(q, k, v, causal))
    assert all(found.how == "measured" for found in flash_attention.winners.values())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_flash_attention_as_ptx(arch: str) -> None:
    """Four blocks of keys, on the emulator, asynchronous work early and late: right, and no finding."""
    flash_attention.schedule(block=(64, 64), k=64).warps(4).stages(3).vector(8).swizzle("xor")
    q, k, v = (numbers(1, 250, 64, seed=i) for i in range(3))
    kernel = small_attention.with_schedule(flash_attention.chosen)
    for seed in (0, 1):
        checked = kernel.check(q, k, v, arch=arch, emulator_seed=seed)
        assert not checked.findings, str(checked)
        near(checked.outputs["result"], attended(q, k, v, False))


@pytest.mark.slow
def test_dropout() -> None:
    """Some of the probabilities are dropped, and the mean stays."""
    q, k = numbers(2, 128, 64), numbers(2, 128, 64, seed=1)
    ones = Plain.ones(2, 128, 64).cast(bf16).contiguous().realize()
    made = flash_attention(q, CacheState(k, ones), dropout=0.25, causal=False).float().numpy()
    assert 0.02 < made.std() < 0.5
    assert abs(made.mean() - 1) < 0.02


def test_small_attention() -> None:
    q, k, v = (numbers(2, 150, 64, seed=i) for i in range(3))
    near(small_attention(q, k, v), attended(q, k, v, False))
    assert small_attention.chosen == Schedule(block=(64, 64), warps=8, stages=3)


def block_exact(x: Array) -> Array:
    """transformer_block on an empty cache, in float64 of the rounded weights."""
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    wqkv, wo = (each.float().numpy().astype(np.float64) for each in (Wqkv, Wo))
    b, s, d = x.shape
    q, k, v = (normed @ wqkv).reshape(b, s, 3, HEADS, d // HEADS).transpose(2, 0, 3, 1, 4)
    score = np.where(np.tril(np.ones((s, s), bool)), q @ k.transpose(0, 1, 3, 2) / np.sqrt(d // HEADS),
                     -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    y = (weight / weight.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(b, s, d)
    return normed + y @ wo


def test_transformer_block() -> None:
    """Twice: captured, then replayed; the cache grows by what was appended."""
    for seed in range(3):
        x = numbers(2, 40, WIDTH, seed=seed)
        empty = CacheState(*(Plain.zeros(2 * HEADS, 0, WIDTH // HEADS).cast(bf16) for _ in range(2)))
        y, cache = transformer_block(x, empty, heads=HEADS, p=0.0)
        exact = block_exact(x.float().numpy().astype(np.float64))
        assert np.abs(y.float().numpy() - exact).max() <= 2.0**-6 * np.abs(exact).max()
        assert cache.K.shape == (2 * HEADS, 40, WIDTH // HEADS)


def test_operations_of_a_cache_are_in_one_order() -> None:
    cache = CacheState(numbers(2, 10, 8), numbers(2, 10, 8, seed=1))
    longer = cache.append(numbers(2, 3, 8), numbers(2, 3, 8))
    with pytest.raises(EffectError, match="that append has replaced"): cache.prune(2)
    kept, other = longer.fork()
    away = kept.offload()
    assert len(other.prune(4)) == 4
    back = away.prefetch()
    wanted = np.concatenate([each.float().numpy() for each in (numbers(2, 10, 8), numbers(2, 3, 8))], 1)
    np.testing.assert_array_equal(back.K.float().numpy(), wanted)


def test_schedules_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A winner that was found is read by another process's kernel, and goes to a file and back."""
    q, k, v = (numbers(6, 100, 64, seed=i) for i in range(3))
    flash_attention(q, CacheState(k, v), dropout=0.0, causal=False).realize()
    file, = Path(SCHEDULES).glob("*.json")
    flash_attention.export(tmp_path / "winners.json")
    before, kept = set(flash_attention.winners.values()), file.read_text()
    file.unlink()
    flash_attention.load(tmp_path / "winners.json")
    assert json.loads(file.read_text()) == json.loads(kept)
    assert not flash_attention.winners
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "seconds", None)        # nothing is timed
        flash_attention(q, CacheState(k, v), dropout=0.0, causal=False).realize()
    assert before >= set(flash_attention.winners.values())


def test_there_are_programs_of_many_kinds():
    from tests.support.language import programs
    kernels = {name for module in programs.MODULES for name, each in vars(module).items() if isinstance(each,
                                                                                                        Kernel)}
    assert len(kernels) >= 60
    assert len({each.name for each in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.sampled(28)
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_on_the_cpu(case: Case): case.check("CPU")


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_interpreted(case: Case): case.check("CPU", interpreted)
