"""The order of rows: a permutation, uniform, resumable at any batch, the same for any number of ranks."""
from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from tinygrad_nv.train.data.sampler import Sampler, SamplerState, permute, share


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 255, 1000, 4096, 4097])
def test_every_index_once(count: int):
    orders = [permute(np.arange(count), count, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders: assert sorted(order.tolist()) == list(range(count))
    if count > 200:
        for one, other in itertools.combinations(orders, 2): assert (one == other).mean() < 0.1


def test_an_index_of_a_large_permutation_is_found_at_once():
    some = np.array([0, 1, 10**12 - 1])
    found = permute(some, 10**12, 7, 3)
    assert len(set(found.tolist())) == 3
    assert ((found >= 0) & (found < 10**12)).all()
    assert [permute(each[None], 10**12, 7, 3)[0] for each in some] == found.tolist()


def mixed(value: int) -> int:
    """SplitMix64's finalizer, of one of Python's integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def place(position: int, count: int, seed: int, epoch: int) -> int:
    """The permutation as its docstring says, in Python's integers: what checkpoints of any version and system
    go on with."""
    golden = 0x9E3779B97F4A7C15
    half = max(2, ((count - 1).bit_length() + 1) // 2)
    begin = mixed((mixed(seed % 2**64) + epoch * golden) % 2**64)
    keys = [mixed((begin + number * golden) % 2**64) for number in range(1, 17)]
    while True:
        left, right = position >> half, position % 2**half
        for key in keys: left, right = right, left ^ mixed((right + key) % 2**64) % 2**half
        position = (left << half) + right
        if position < count: return position


@pytest.mark.parametrize(("count", "seed", "epoch"), [
    (10, 42, 0), (10**9, 42, 5), (2**40 + 1, 2**64 - 1, 2**33)])
def test_the_bits_are_those_of_integers(count: int, seed: int, epoch: int):
    positions = [0, 1, 2, 7, count - 1]
    assert permute(np.array(positions), count, seed, epoch).tolist() == [
        place(position, count, seed, epoch) for position in positions]


def test_permutations_of_four_are_about_equally_frequent():
    """Chi-square of 24 permutations over 1200 epochs: 23 degrees of freedom, 99.99 % below 56."""
    seen = Counter(tuple(permute(np.arange(4), 4, 5, epoch).tolist()) for epoch in range(1200))
    assert len(seen) == 24
    assert sum((count - 50) ** 2 / 50 for count in seen.values()) < 56


def test_places_are_about_equally_frequent():
    """Of 12 indices at 12 places over 600 epochs: 121 degrees of freedom, 99.99 % below 187."""
    table = np.zeros((12, 12))
    for epoch in range(600): table[np.arange(12), permute(np.arange(12), 12, 1, epoch)] += 1
    assert ((table - 50) ** 2 / 50).sum() < 187


def batches(sampler: Sampler, count: int, state: SamplerState | None = None
            ) -> list[tuple[list[int], SamplerState]]:
    state, out = state or sampler.start, []
    for _ in range(count):
        indices, state = sampler.next(state)
        out.append((indices.tolist(), state))
    return out


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs(shuffle: bool, drop_last: bool):
    sampler = Sampler(10, 4, 3, shuffle, drop_last)
    count = sampler.batches
    assert count == (2 if drop_last else 3)
    found = batches(sampler, 3 * count)
    for epoch in range(3):
        rows = [index for indices, _ in found[epoch * count:(epoch + 1) * count] for index in indices]
        assert len(rows) == len(set(rows)) == (8 if drop_last else 10)
        assert found[epoch * count + count - 1][1] == SamplerState(epoch + 1, 0, 3, 10)
        if not shuffle: assert rows == list(range(len(rows)))
    assert (found[0][0] == found[count][0]) is not shuffle


@pytest.mark.parametrize("drop_last", [False, True])
def test_resumed_at_any_batch(drop_last: bool):
    sampler = Sampler(23, 4, 9, drop_last=drop_last)
    whole = batches(sampler, 15)
    for at, (_, state) in enumerate(whole):
        resumed = SamplerState.from_json(json.loads(json.dumps(state.to_json())))
        sampler.require(resumed)
        assert batches(sampler, 15 - at - 1, resumed) == whole[at + 1:]


def test_a_global_batch_is_the_same_for_any_number_of_ranks():
    """24 indices: as 1 rank × 6 micro-batches × 4, 2 × 3 × 4, 6 × 1 × 4, … the same, in the same order of
    micro-batches."""
    indices = np.random.default_rng(0).permutation(24)
    for world, accumulation in ((1, 6), (2, 3), (3, 2), (6, 1)):
        shares = [share(indices, rank, world, accumulation, 4) for rank in range(world)]
        dealt = [shares[rank][micro].tolist() for micro in range(accumulation) for rank in range(world)]
        assert [index for each in dealt for index in each] == indices.tolist()


def test_the_last_batch_of_an_epoch_is_dealt_as_far_as_it_goes():
    shares = [share(np.arange(9), rank, 2, 2, 4) for rank in range(2)]
    assert [[each.tolist() for each in one] for one in shares] == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], []]]
