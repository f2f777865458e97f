"""What changes no bit of a decode attention: where pages lie, who else is there, how many there could be;
and what changes little: how keys are split. And decode attention over a contiguous cache."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tests.support.tile.decode_case import (
    SMALL,
    Given,
    checked,
    contiguous,
    decode,
    launched,
    near,
    requests,
    run,
)
from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.decode.templates import FAMILY as DECODE
from tinygrad_nv.tile.expression import Expression, Load, Position, Sum, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

KINDS = [None, dtypes.int8]
LENGTHS = [640, 1, 0, 129, 300]  # five splits, one, none, two, three


def moved(spec: DecodeSpec, given: Given, seed: int) -> Given:
    """The same requests with their pages elsewhere."""
    count = -(-given.storages["k"].numel() // spec.k.page)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    back = torch.argsort(order)
    storages, written = dict(given.storages), dict(given.written)
    for name in ("k", "v", "k_scale", "v_scale"):
        for made in (storages, written):
            if name in made: made[name] = made[name].view(count, -1)[order].reshape(-1)
    known = written["table"]
    storages["table"] = torch.where(known, back[storages["table"].long().clamp(0, count - 1)].int(), 1 << 30)
    return Given(storages, written, given.lengths)


def alone(spec: DecodeSpec, given: Given, b: int, pages: int = 0) -> tuple[DecodeSpec, Given]:
    """Request `b` by itself, in a spec of one request, which may have fewer pages at most."""
    one = replace(spec, batch=1, pages=pages or spec.pages)
    storages, written = dict(given.storages), dict(given.written)
    for made in (storages, written): made["table"] = made["table"][b:b + 1, :one.pages].contiguous()
    storages["lengths"] = storages["lengths"][b:b + 1]
    storages["q"] = storages["q"].view(spec.batch, -1)[b]
    return one, Given(storages, written, given.lengths[b:b + 1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("window", [None, 150])
def test_pages_may_lie_anywhere(kv, window):
    spec = decode(batch=5, heads=2, group=4, s_q=2, pages=40, kv=kv, window=window)
    given = requests(spec, LENGTHS)
    got = run(spec, given)
    near(spec, given, got)
    for seed in range(3): assert torch.equal(run(spec, moved(spec, given, seed), seed=seed), got)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_request_alone(kv, arch: str):
    """Its bits are those that it has in a batch, whatever else is in the batch; also where the table is as
    short as the request, or no request could have more than one split."""
    spec = decode(batch=5, heads=2, group=4, pages=40, kv=kv)
    given = requests(spec, LENGTHS)
    got = run(spec, given, arch=arch)
    for b, length in enumerate(LENGTHS):
        for pages in (40, max(1, -(-length // 16))):
            assert torch.equal(run(*alone(spec, given, b, pages), arch=arch)[0], got[b])


def test_neighbours_change_nothing():
    """A request's neighbours get other lengths, tables and queries."""
    spec = decode(batch=5, heads=2, group=4, pages=40)
    given = requests(spec, LENGTHS)
    got = run(spec, given)
    other = Given(dict(given.storages), dict(given.written), [640, 0, 300, 5, 300])
    table, known = given.storages["table"].clone(), given.written["table"].clone()
    for b, source in ((1, 0), (2, 4), (3, 0)): table[b], known[b] = table[source], known[source]
    q = given.storages["q"].clone().view(5, -1)
    q[1:4] = q[1:4].flip(0) * 2
    other.storages |= {"table": table, "q": q.view(-1)}
    other.storages["lengths"] = torch.tensor(other.lengths, dtype=torch.int32)
    other.written["table"] = known
    assert torch.equal(run(spec, other)[[0, 4]], got[[0, 4]])


def test_padding_rows():
    """Requests of length 0 give zeros, with nothing but scrap around them."""
    spec = decode(batch=4, heads=2, group=4, s_q=3, pages=40)
    given = requests(spec, [0, 300, 0, 0])
    got = run(spec, given)
    near(spec, given, got)
    assert not got[[0, 2, 3]].any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 16, 32])
def test_numbers_of_splits(splits: int):
    """All within the bound of the error: a request has so many parts at most, of one tile of keys at least.
    """
    spec = decode(batch=3, heads=2, group=4, pages=66)
    given = requests(spec, [1056, 700, 65])
    near(spec, given, run(spec, given, SMALL.split(splits, 64)))


def test_seeds_of_the_emulator():
    """The order of warps, and when copies arrive."""
    spec = decode(batch=2, heads=2, group=4, s_q=4, pages=40)
    given = requests(spec, [640, 200])
    results = [run(spec, given, SMALL.warps(2, 2), "sm_90a", seed) for seed in range(4)]
    for got in results[1:]: assert torch.equal(got, results[0])


def test_a_launch_serves_any_length():
    """The same kernels, of which nothing depends on lengths."""
    spec = decode(batch=2, group=4, pages=40)
    made = TABLE.build(spec, SMALL, GPU("sm_90a"))
    for lengths in ([1, 640], [640, 0], [17, 18]):
        given = requests(spec, lengths)
        storage, reports = launched(made, spec, given, "sm_90a")
        assert [report.findings for report in reports] == [[], []]
        near(spec, given, storage.view(2, 1, 4, 1, 64))


@st.composite
def specs(draw: st.DrawFn) -> tuple[DecodeSpec, list[int]]:
    kv = draw(st.sampled_from([None, dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2]))
    d, d_v = (draw(st.sampled_from([32, 64, 96, 128, 160, 256])) for _ in range(2))
    size, batch = draw(st.sampled_from([8, 16, 32, 64, 128, 256])), draw(st.integers(1, 3))
    longest = draw(st.integers(1, 700))
    lengths = [draw(st.one_of(st.integers(0, longest), st.sampled_from([0, 1, size]))) for _ in range(batch)]
    lengths = [min(length, longest) for length in lengths]
    return decode(batch, draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 8)), d, size,
                  -(-longest // size), draw(st.sampled_from([dtypes.bfloat16, dtypes.float16])), kv, d_v,
                  draw(st.one_of(st.none(), st.integers(1, 300))), None,
                  draw(st.sampled_from(["ths", "hts"])), draw(st.sampled_from(["brh", "bhr"]))), lengths


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@drawn(case=specs(), arch=st.sampled_from(["sm_80", "sm_90a"]), seed=st.integers(0, 7), small=st.booleans())
def test_generated(case: tuple[DecodeSpec, list[int]], arch: str, seed: int, small: bool):
    """With the default schedule, or one of small splits."""
    spec, lengths = case
    schedule = DECODE.choose(spec, GPU(arch))
    assert schedule is not None
    given = requests(spec, lengths, seed)
    near(spec, given, run(spec, given, schedule.split(5, 128) if small else schedule, arch, seed))


# **** a contiguous cache ****

BIAS = Load(0, dtypes.bfloat16, 700, 1, (4 * 700, 2 * 700, 700))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_one_launch_serves_any_length(arch: str):
    """Splits of 128 keys, up to ten tiles from a ring of three stages; beyond the length nothing is written.
    """
    spec = contiguous(700, batch=2, heads=2, group=4, d=128, order="hts")
    made = TABLE.build(spec, SMALL.stages(3), GPU(arch))
    for seed, length in enumerate((0, 1, 127, 128, 129, 255, 256, 257, 640, 700)):
        given = requests(spec, [length] * 2, seed, spare=0)
        storage, reports = launched(made, spec, given, arch)
        assert [report.findings for report in reports] == [[], []]
        near(spec, given, storage.view(2, 2, 4, 1, 128))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("causal", [True, False])
def test_rows_and_layouts(seed: int, causal: bool):
    length = 300 + seed
    spec = contiguous(length, "most", batch=2, heads=2, group=3, s_q=2 * seed + 1, causal=causal, d_v=32,
                      order=["ths", "hts"][seed % 2], gap=8 * (seed // 2), dtype=dtypes.float16)
    checked(spec, [length] * 2, seed=seed, arch=["sm_90a", "sm_80"][causal])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [1, 7, 150, 1000])
def test_windows(window: int):
    for s_q in (1, 3):
        spec = contiguous(640, batch=1, heads=2, group=2, s_q=s_q, window=window)
        checked(spec, [517])


def test_lengths_of_their_own():
    """Of each request, from memory: bits do not depend on who else is there, nor on room for more keys."""
    spec = contiguous(640, "memory", batch=5, heads=2, group=4)
    given = requests(spec, [640, 1, 0, 129, 300], spare=0)
    got = run(spec, given)
    near(spec, given, got)
    for b, length in enumerate(given.lengths):
        for most, kind in ((640, "argument"), (max(length, 1), "most" if length else "argument")):
            one = replace(contiguous(most, kind, heads=2, group=4), k=spec.k, v=spec.v)
            assert torch.equal(run(one, only(spec, given, b))[0], got[b])


def only(spec: DecodeSpec, given: Given, b: int) -> Given:
    """Request `b` by itself."""
    storages = {name: given.storages[name].view(spec.batch, -1)[b] for name in "kvq"}
    written = {name: given.written[name].view(spec.batch, -1)[b] for name in "kv"}
    return Given(storages, written, [given.lengths[b]])


def test_the_bits_are_those_of_pages():
    """Splits are the same, and what is added in which order."""
    spec = contiguous(640, batch=1, heads=2, group=4)
    given = requests(spec, [600], spare=0)
    paged = decode(heads=2, group=4, pages=40)
    storages = dict(given.storages) | {"table": torch.arange(40, dtype=torch.int32)[None],
                                       "lengths": torch.tensor([600], dtype=torch.int32)}
    again = Given(storages, {name: given.written[name] for name in "kv"}, [600])
    assert torch.equal(run(paged, again), run(spec, given))


def alibi(dtype: DType) -> Expression:
    distance = (Position("n") - Position("m")).cast(dtypes.float32)
    return Sum() * 0.125 + distance * Load(0, dtype, 0, 0, (0, 2, 1)).cast(dtypes.float32)


def both() -> Expression:
    """A bias, and a mask of request and key."""
    seen = Load(1, dtypes.bool, 0, 1, (700, 0, 0))
    return where(seen, Sum() * 0.125 + BIAS.cast(dtypes.float32), float("-inf"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("score", [alibi(dtypes.float32), alibi(dtypes.float16), both(),
                                   Sum() + BIAS.cast(dtypes.float32)])
@pytest.mark.parametrize("length", ["argument", "most"])
def test_scores_that_read_memory(score: Expression, length):
    """Two elements at a time where all keys are there, else one; nothing beyond the last key."""
    spec = contiguous(300, length, batch=2, heads=2, group=2, s_q=3, score=score)
    checked(spec, [300 if length == "most" else 291] * 2, scale=0.5, arch="sm_90a")


def test_rows_that_a_mask_hides():
    """All of a request's keys: zeros."""
    spec = contiguous(300, "most", batch=2, heads=2, group=2, score=both())
    given = requests(spec, [300, 300])
    given.storages["x1"][:700] = False
    got = run(spec, given)
    assert not got[0].any()
    assert got[1].any()


def test_rows_that_the_smallest_number_hides():
    """Scores that are all the same, of splits too: a mean, not zeros."""
    spec = contiguous(300, "most", heads=2, group=2, score=Sum() * 0.125 + torch.finfo(torch.float32).min)
    assert checked(spec, [300]).any()


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_defaults(arch: str):
    """The same splits, whatever the longest is; one kernel where no request is split."""
    kernels = []
    for longest in (200, 1000, 1 << 20):
        spec = contiguous(longest, heads=8, group=4, d=128)
        schedule = DECODE.choose(spec, GPU(arch))
        assert schedule is not None
        assert schedule == DECODE.choose(contiguous(300, heads=8, group=4, d=128), GPU(arch))
        kernels.append(len(TABLE.build(spec, schedule, GPU(arch)).kernels))
    assert kernels == [1, 2, 2]


def test_what_is_refused():
    for words, change in (("2 pages of 64 tokens without a table", {"pages": 2}),
                          ("k_scale with s8", {"kv": dtypes.int8}),
                          ("a window of 2 rows at one place", {"causal": False, "s_q": 2, "window": 5})):
        with pytest.raises(SpecError, match=words): decode(page_size=64, table=False, **{"pages": 1} | change)
    with pytest.raises(SpecError, match="reads memory, of pages with a table"):
        decode(score=Sum() + BIAS.cast(dtypes.float32))
    far = contiguous(64)
    far = replace(far, k=replace(far.k, token=1 << 23))
    with pytest.raises(ScheduleError, match="256 tokens of keys 4294967296 B apart"):
        TABLE.build(far, SMALL, GPU("sm_80"))


def test_in_words():
    words = "decode 1x2x≤300, 2 heads, d 64, bf16, full"
    assert str(contiguous(300, heads=2, s_q=2, causal=False)).startswith(words)
    assert str(contiguous(300, "most")).startswith("decode 1x1x300, 1 heads, d 64, bf16, (sum")
