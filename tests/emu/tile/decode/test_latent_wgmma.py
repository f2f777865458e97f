"""Decode attention over latents by wgmma, on the emulator against float64: lengths, rows, heads, layouts;
what is known bit for bit; latents are read once; what it refuses."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from bench.lib.specs import latent
from tests.support.tile.decode_case import Given, launched, near, requests, run
from tinygrad_nv import explain
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.functional import latent_attention
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.decode.schedules import Decode, LatentWgmma
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import Sum, tanh
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SMALL = LatentWgmma().keys(32).stages(3).split(4, 64)
ARCH = "sm_90a"


def small(batch: int, heads: int = 16, s_q: int = 1, **more: Any) -> DecodeSpec:
    """Latents of 128 elements and 64 of a rotated key; pages for 640 tokens."""
    size = more.pop("page_size", 16)
    return latent(batch, heads, s_q, 128, 64, page_size=size, pages=640 // size, **more)


def checked(spec: DecodeSpec, lengths: list[int], schedule: LatentWgmma = SMALL,
            seed: int = 0) -> torch.Tensor:
    """Runs requests of these lengths, and holds them against float64."""
    given = requests(spec, lengths, seed, together=True)
    got = run(spec, given, schedule, ARCH, seed)
    near(spec, given, got)
    return got


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keys", [32, 64, 128])
def test_lengths_around_edges(seed: int, keys: int):
    lengths = [[0, 1, 15, 16, 17], [63, 64, 65, 127, 128], [31, 32, 33, 256, 257], [511, 512, 513, 639, 640]]
    checked(small(5), lengths[seed], SMALL.keys(keys).stages(2).split(4, 128), seed)


def test_a_window_that_begins_in_the_middle_of_a_page():
    """And is longer than the pages whose numbers a warp holds: 32 of 64 keys."""
    spec = latent(1, 16, 1, 128, 64, page_size=64, pages=40, window=2200)
    checked(spec, [2237], SMALL.split(1, 4096))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "s_q"), [(1, 1), (7, 8), (16, 2), (20, 3), (64, 1), (66, 1), (128, 1),
                                             (40, 4)])
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16])
def test_heads_and_rows_are_packed(heads: int, s_q: int, dtype: DType):
    """Into blocks of 64 rows."""
    checked(small(2, heads, s_q, dtype=dtype), [290, s_q // 2])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page_size", [8, 32, 64, 128])
def test_page_sizes(page_size: int):
    checked(small(2, page_size=page_size), [page_size + 1, 530])


def test_more_keys_than_a_warp_has_entries_for():
    """32 entries of 8 tokens are 256 keys; a split has 640."""
    checked(small(1, page_size=8), [640], SMALL.split(1, 640))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [{"window": 100}, {"window": 7}, {"window": 128, "chunked": True},
                                  {"sinks": True}, {"score": tanh(Sum() * 0.1) * 5.0}], ids=str)
@pytest.mark.parametrize("s_q", [1, 3])
def test_windows_chunks_sinks_and_scores(more: dict, s_q: int):
    """With another score than a multiple of the sum, too."""
    spec = replace(small(3, 16, s_q), **more)
    checked(spec, [2, 129, 640])


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "s_q"), [(16, 2), (128, 1)])
def test_deepseek(heads: int, s_q: int):
    """512 + 64 elements, by the default schedule."""
    spec = latent(2, heads, s_q, pages=64)
    schedule = TABLE.choose(spec, GPU(ARCH))
    assert isinstance(schedule, LatentWgmma)
    checked(spec, [1000, 33], schedule)


def test_equal_scores_are_a_mean():
    """Of integers, over a power of two of keys, in several splits: exact."""
    spec = small(3, 20)
    given = requests(spec, [64, 256, 512], together=True)
    given.storages["q"].zero_()
    k = given.storages["k"]
    k.copy_(torch.where(k.isnan(), k, torch.arange(len(k)) * 37 % 17 - 8))
    got = run(spec, given, SMALL, ARCH).double()
    for b, length in enumerate(given.lengths):
        pages = given.storages["table"][b, :-(-length // 16)].long()
        mean = k.view(-1, 16, 192)[pages].reshape(length, 192)[:, 64:].double().mean(0)
        assert torch.equal(got[b], mean.to(torch.bfloat16).double().expand(1, 20, 1, 128))


def test_a_request_alone():
    """Its bits depend neither on others, nor on how many CTAs there are."""
    spec = small(3, 20, 2)
    given = requests(spec, [300, 0, 577], together=True)
    got = run(spec, given, SMALL, ARCH)
    one = TABLE.build(spec, SMALL, GPU(ARCH, 1))
    assert one.kernels[0].grid == (1, 1, 1)
    storage, reports = launched(one, spec, given, ARCH)
    assert [report.findings for report in reports] == [[], []]
    assert torch.equal(storage.view(3, 2, 20, 128), got[:, 0].transpose(1, 2))
    for b, length in enumerate(given.lengths):
        storages = dict(given.storages, table=given.storages["table"][b:b + 1].contiguous(),
                        lengths=given.storages["lengths"][b:b + 1],
                        q=given.storages["q"].view(3, -1)[b].contiguous())
        written = dict(given.written, table=given.written["table"][b:b + 1].contiguous())
        assert torch.equal(run(replace(spec, batch=1), Given(storages, written, [length], True), SMALL, ARCH),
                           got[b:b + 1])


@pytest.mark.parametrize("heads", [16, 128])
def test_latents_are_read_once(heads: int):
    """For each block of 64 rows: what rows see, and queries, whole sectors, not a byte more, and without bank
    conflicts."""
    spec = small(1, heads)
    given = requests(spec, [600], together=True)
    made = TABLE.build(spec, SMALL.split(1, 640), GPU(ARCH))
    _, (report,) = launched(made, spec, given, ARCH)
    assert report.findings == []
    assert report.stats.bank_conflicts == {}
    assert report.stats.asynchronous_bytes == 2 * 192 * (600 * -(-heads // 64) + heads)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "rows"), [(16, 1), (128, 1), (16, 8)])
def test_chosen_and_does_not_spill(heads: int, rows: int):
    spec = latent(4, heads, rows, pages=8192)
    schedule = TABLE.choose(spec, GPU(ARCH))
    assert isinstance(schedule, LatentWgmma)
    for kernel in TABLE.build(spec, schedule, GPU(ARCH)).kernels:
        resources = assemble(kernel.ptx, ARCH).kernels[kernel.name]
        assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert isinstance(TABLE.choose(spec, GPU("sm_80")), Decode)
    assert isinstance(TABLE.choose(replace(spec, latent=False), GPU(ARCH)), Decode)


def test_latent_attention_is_lowered_to_it():
    """From a Tensor: no copy of values, and the numbers of the reference."""
    random = np.random.default_rng(0)
    def of(*shape: int, device: str = "EMU") -> Tensor:
        values = random.standard_normal(shape).astype(np.float32)
        return Tensor(values, device=device).cast(dtypes.bfloat16).realize()
    q, pages = of(2, 1, 16, 192), of(9, 16, 1, 192)
    table, lengths = Tensor([[3, 1, 7], [4, 0, 8]], device="EMU"), Tensor([40, 17], device="EMU")
    y = latent_attention(q, pages, table.cast(dtypes.int32).realize(), lengths.cast(dtypes.int32).realize(),
                         value_dim=128)
    assert [kernel.template for kernel in explain(y).kernels] == ["latent_wgmma"]
    k = pages.float().numpy()[table.numpy()].reshape(2, 48, 192)
    scores = np.einsum("bhd,bcd->bhc", q.float().numpy()[:, 0], k) / 192**0.5
    scores[np.arange(48)[None, None] >= np.array([40, 17])[:, None, None].repeat(16, 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bhc,bcd->bhd", p / p.sum(-1, keepdims=True), k[..., 64:])
    assert abs(y.float().numpy()[:, 0] - wanted).max() < 0.02


@pytest.mark.parametrize(("change", "words"), [
    ({"latent": False}, "values of their own memory"), ({"batch": 513}, "513 requests, at most 512"),
    ({"d_v": 64}, "d_v=64 is not a multiple of 128"), ({"d_v": 640, "d": 704}, "d_v=640, at most 512")])
def test_what_it_refuses(change: dict, words: str):
    with pytest.raises(ScheduleError, match=words): TABLE.build(replace(small(2), **change), SMALL, GPU(ARCH))


def test_schedules_that_cannot_be():
    spec = latent(2, 16)
    for schedule, words in ((SMALL.keys(48), "48 keys of a tile"), (SMALL.stages(1), "1 stage is not"),
                            (SMALL.stages(5), "5 stages × 36864 B"), (SMALL.split(33), "33 splits")):
        with pytest.raises(ScheduleError, match=words): TABLE.build(spec, schedule, GPU(ARCH))
    with pytest.raises(ScheduleError, match="sm_80 has no wgmma"): TABLE.build(spec, SMALL, GPU("sm_80"))
