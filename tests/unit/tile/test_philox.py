"""Philox4x32-10 against the vectors that its authors publish, in integers of Python, numpy and tinygrad."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes

from tinygrad_nv.patterns.attention.named import FlashAttention, attend, draw_seed, keep
from tinygrad_nv.tile.attention.dropout import keep_256ths, keeps, philox

# Random123, tests/kat_vectors: counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8)),
    ((0xffffffff,) * 4, (0xffffffff,) * 2, (0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd)),
    ((0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344), (0xa4093822, 0x299f31d0),
     (0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1))]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]):
    assert philox(counter, key) == result


def test_known_answers_of_arrays():
    counters, keys, results = (np.array(each, np.uint64).T for each in zip(*KNOWN, strict=True))
    assert np.array_equal(philox(counters, keys), results)
    words = philox([Tensor(each) for each in counters], [Tensor(each) for each in keys])
    assert np.array_equal([word.cast(dtypes.uint64).numpy() for word in words], results)


def test_elements_are_kept_by_bytes_of_their_call():
    """Of two calls, written out."""
    seed, kept = (1, 2), 100
    row, matrix = 77, 5
    for column in (3, 64, 127, 200):
        words = philox((row, column // 64 * 4 + column % 8 // 2, matrix, 0), seed)
        whole = b"".join(word.to_bytes(4, "little") for word in words)
        assert keeps(row, column, matrix, seed, kept) == (whole[column % 64 // 8 * 2 + column % 2] < kept)


def test_the_share_that_is_kept():
    """Of a million elements, and of any two neighbours both: within five standard deviations."""
    row, column = np.arange(1024, dtype=np.uint64)[:, None], np.arange(1024, dtype=np.uint64)[None]
    for kept in (1, 128, 230):
        found = keeps(row, column, np.uint64(3), (np.uint64(9), np.uint64(8)), kept)
        for share, each in ((kept / 256, found), ((kept / 256)**2, found[:, 1:] & found[:, :-1]),
                            ((kept / 256)**2, found[1:] & found[:-1])):
            assert abs(each.mean() - share) < 5 * (share * (1 - share) / each.size)**.5


def test_probabilities_are_multiples_of_a_256th():
    assert [keep_256ths(p) for p in (0.0, 0.1, 0.5, 0.9, 1 / 256, 1.0)] == [256, 230, 128, 26, 255, 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("shape", "kept"), [((2, 3, 5, 70), 100), ((1, 2, 3, 64), 200), ((1, 1, 2, 7), 1)])
def test_weights_of_tinygrad_are_those_of_kernels(shape: tuple[int, ...], kept: int):
    seed = np.array([0xdeadbeef, 7], np.uint32)
    found = keep(Tensor(seed), shape, kept).numpy().reshape(-1, *shape[2:])
    matrix, row, column = np.ogrid[:found.shape[0], :shape[2], :shape[3]]
    expected = keeps(*(x.astype(np.uint64) for x in (row, column, matrix)), seed.astype(np.uint64), kept)
    assert np.array_equal(found, np.where(expected, np.float32(256 / kept), 0))


def test_seeds_are_drawn():
    Tensor.manual_seed(3)
    seeds = [draw_seed(None).numpy() for _ in range(3)]
    assert seeds[0].dtype == np.uint32
    assert seeds[0].shape == (2,)
    assert len({tuple(seed) for seed in seeds}) == 3
    Tensor.manual_seed(3)
    assert np.array_equal(draw_seed(None).numpy(), seeds[0])


@pytest.mark.slow
def test_an_attention_of_tinygrad_drops_them_too():
    """The body of the named function, and its gradients by formulas, against float64."""
    random, words = torch.Generator().manual_seed(0), np.array([3, 4], np.uint32)
    leaves = [torch.randn(1, h, n, 8, generator=random).requires_grad_() for h, n in ((2, 5), (1, 9), (1, 9))]
    q, k, v = (x.double().expand(1, 2, *x.shape[2:]) for x in leaves)
    matrix, row, column = (x.astype(np.uint64) for x in np.ogrid[:2, :5, :9])
    kept = torch.from_numpy(keeps(row, column, matrix, words.astype(np.uint64), 150))[None]
    out = ((q @ k.transpose(-1, -2) / 8**.5).softmax(-1) * kept * (256 / 150)) @ v
    wanted = [out, *torch.autograd.grad(out.sin().sum(), leaves)]
    given = [Tensor(x.detach().numpy()).realize() for x in leaves]
    y = attend(FlashAttention(kept=150), *given, None, Tensor(words).realize())
    got = [y, *y.sin().sum().gradient(*given)]
    for mine, right in zip(got, wanted, strict=True):
        assert np.abs(mine.numpy() - right.detach().numpy()).max() < 1e-5
