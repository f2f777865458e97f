"""The α–β model of collectives, by hand, and what must hold of every way."""
from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tinygrad_nv.dist.plan.cluster import Cluster, cluster
from tinygrad_nv.dist.plan.collectives import KERNELS, GroupSize, collective, ways
from tinygrad_nv.tile.all_reduce.cost import choose

MIB = 1 << 20
NODE, TWO, PCIE = cluster("8xH100"), cluster("8xH100", nodes=2), cluster("4xL40S")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def way(kind: str, nbytes: float, group: GroupSize, where: Cluster, name: str) -> float:
    return next(each.seconds for each in ways(kind, nbytes, group, where) if each.algorithm == name)


def test_a_ring_by_hand():
    """NCCL's latencies: a launch, and 14 hops of 3.4 us; 7/4 of the bytes at 370.8 GB/s."""
    found = way("all_reduce", 64 * MIB, GroupSize(8, 8), NODE, "ring Simple")
    assert found == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 1.75 * 64 * MIB / 370.8e9)
    half = way("all_gather", 64 * MIB, GroupSize(8, 8), NODE, "ring Simple")
    assert half == pytest.approx(8.4e-6 + 7 * 3.4e-6 + .875 * 64 * MIB / 370.8e9)


def test_a_ring_over_two_nodes_by_hand():
    """30 hops, two of them between nodes; a rank of each node: one adapter of 47 GB/s."""
    found = way("all_reduce", 64 * MIB, GroupSize(16, 8), TWO, "ring Simple")
    assert found == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 2 * 14e-6 + 1.875 * 64 * MIB / 370.8e9)
    apart = way("all_reduce", 64 * MIB, GroupSize(2, 1), TWO, "ring Simple")
    assert apart == pytest.approx(8.4e-6 + 2 * 14e-6 + 64 * MIB / 47e9)


def test_kernels_over_peer_memory_by_hand():
    """Latency and rate of tile/all_reduce/cost.py; NVLink 3 has 240 of NVLink 4's 370.8 GB/s."""
    one = way("all_reduce", MIB, GroupSize(4, 4), NODE, "one-shot")
    assert one == pytest.approx(5.3e-6 + 3 * MIB / 350e9)
    slower = way("all_reduce", MIB, GroupSize(4, 4), cluster("4xA100"), "one-shot")
    assert slower == pytest.approx(5.3e-6 + 3 * MIB / 350e9 * 370.8 / 240)
    two = way("all_reduce", 8 * MIB, GroupSize(4, 4), NODE, "two-shot")
    assert two == pytest.approx(12.5e-6 + 1.5 * 8 * MIB / 260e9)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("kib", [1, 256, 257, 512, 513, 2048, 2049, 1 << 15, (1 << 15) + 1, 1 << 17])
def test_a_plan_has_the_kernel_that_a_graph_has(ranks: int, kib: int):
    """tile/all_reduce/cost.py says which one, by size."""
    found = {each.algorithm for each in ways("all_reduce", kib << 10, GroupSize(ranks, ranks), NODE)
             if each.algorithm in KERNELS.values()}
    chosen = choose(ranks, kib << 10)
    assert found == ({KERNELS[chosen]} if chosen else set())


def test_experts_tokens_by_hand():
    """Of 16 ranks' shares half stay in the node, one sixteenth at home."""
    found = way("all_to_all", 16 * MIB, GroupSize(16, 8), TWO, "pairs")
    assert found == pytest.approx(14e-6 + 4e-6 + 8 * MIB / 47e9)
    near = way("all_to_all", 16 * MIB, GroupSize(8, 8), NODE, "pairs")
    assert near == pytest.approx(14e-6 + 14 * MIB / 370.8e9)


@pytest.mark.parametrize(("nbytes", "name"), [(16 << 10, "one-shot"), (MIB, "ring LL"), (16 * MIB, "NVLS")])
def test_the_fastest_of_eight_by_size(nbytes: int, name: str):
    assert collective("all_reduce", nbytes, GroupSize(8, 8), NODE).algorithm == name


def test_what_hardware_lacks_is_not_used():
    def named(where: Cluster, peer: bool = True) -> set[str]:
        return {each.algorithm.split()[0] for each in ways("all_reduce", MIB, GroupSize(4, 4), where, peer)}
    assert named(NODE) == {"ring", "tree", "NVLS", "one-shot"}
    assert named(NODE, peer=False) == {"ring", "tree", "NVLS"}
    assert named(cluster("4xA100")) == {"ring", "tree", "one-shot"}
    assert named(PCIE) == {"ring", "tree"}
    two = {each.algorithm for each in ways("all_reduce", MIB, GroupSize(2, 2), NODE)}
    assert "NVLS" not in two


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_take_longer_and_nothing_is_faster_than_its_wire(kind: str):
    for where, group in ((NODE, GroupSize(8, 8)), (TWO, GroupSize(16, 8)), (PCIE, GroupSize(4, 4))):
        sizes = (1 << 10, 1 << 16, 1 << 22, 1 << 28)
        times = [collective(kind, size, group, where).seconds for size in sizes]
        assert all(a < b for a, b in itertools.pairwise(times))
        least = (1 << 28) / group.ranks / where.device.link.bytes_per_s
        assert times[-1] > least


@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_slower_network_is_slower(kind: str):
    slow = replace(TWO, net=cluster("8xH100", 2, "100G").net)
    assert collective(kind, 1 << 28, GroupSize(16, 8), slow).seconds > \
        1.5 * collective(kind, 1 << 28, GroupSize(16, 8), TWO).seconds


def test_one_rank_waits_for_none():
    assert collective("all_reduce", MIB, GroupSize(1, 1), NODE).seconds == 0
