"""How long a collective takes: an α–β model; collectives of a step, as a plan lists them.

Protocol: `collective("all_reduce", nbytes, GroupSize(8, 8), cluster)` is the fastest algorithm's
`Collective`. Bytes are those of the whole buffer: what an all-gather makes, what a reduce-scatter is given,
what each rank holds of an all-reduce, what each sends in an all-to-all, of which its own share stays.

    seconds = α + bytes on the busiest wire / β

                 α                                   bytes on a wire, of n ranks in N nodes of g
    ring         launch + steps · hop                2 (n − 1) / n · S; half of it for gather and scatter
    tree         launch + 2 (g − 1 + log2 N hops)    2 S
    NVLS         of the switch                       (1 + 1 / n) S: gather and scatter S
    NVLS tree    NVLS + 2 log2 N hops of the net     (1 + 1 / g) S within nodes; between two S / g, else twice
    one-shot     one kernel                          (n − 1) S read from peers
    two-shot     one kernel, two barriers            2 (n − 1) / n · S

Rings, trees and NVLS are NCCL's, rings and trees of its protocols LL (half the rate), LL128 (0.92 of it) and
Simple; a ring that crosses nodes uses the adapters of its g ranks of a node at once. Their constants are in
figures.toml. One-shot and two-shot are this package's kernels over peer memory (tile/all_reduce/), of an
all-reduce in one node: up to the sizes, and with the constants, of its cost.py. Those are of NVLink 4; over
another link rates are scaled by the links' rates. The third kernel there, multimem, is not in graphs, so
larger messages are NCCL's.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2

from tinygrad_nv.dist.plan.cluster import Cluster, Device, Link, device, figures
from tinygrad_nv.tile.all_reduce import cost
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, OneShot, TwoShot

PROTOCOLS = ("LL", "LL128", "Simple")
SHARES = (0.5, 0.92, 1.0)       # of the link's rate that a protocol's lines of data are
MULTICAST_RANKS = 3             # NCCL's NVLS needs more than a pair
KERNELS: dict[type[AllReduceSchedule], str] = {OneShot: "one-shot", TwoShot: "two-shot"}
MEASURED = "h100"               # whose link the constants of these kernels are of


@dataclass(frozen=True)
class GroupSize:
    """Ranks of a collective: so many, of which `local` are in each node."""
    ranks: int
    local: int

    @property
    def nodes(self) -> int:
        """Number of nodes that it spans."""
        return ceil(self.ranks / self.local)


@dataclass(frozen=True)
class Collective:
    """One collective: `alpha_s` + `wire_bytes` / `bytes_per_s`."""
    kind: str
    nbytes: float
    group: GroupSize
    algorithm: str
    alpha_s: float
    wire_bytes: float
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.alpha_s + self.wire_bytes / self.bytes_per_s


def collective(kind: str, nbytes: float, group: GroupSize, cluster: Cluster, peer: bool = True) -> Collective:
    """The fastest way; `peer`: the kernel over peer memory that graphs have for this size is one of them."""
    if group.ranks <= 1: return Collective(kind, nbytes, group, "none", 0.0, 0.0, 1.0)
    return min(ways(kind, nbytes, group, cluster, peer), key=lambda each: each.seconds)


@lru_cache(4096)
def ways(kind: str, nbytes: float, group: GroupSize, cluster: Cluster,
         peer: bool = True) -> tuple[Collective, ...]:
    """Every algorithm that can do it."""
    make = {"all_reduce": _all_reduce, "all_gather": _half, "reduce_scatter": _half,
            "all_to_all": _all_to_all, "send": _send}[kind]
    return tuple(Collective(kind, nbytes, group, *each)
                 for each in make(kind, nbytes, group, cluster, peer))


Way = tuple[str, float, float, float]       # algorithm, α, bytes on a wire, β


def _all_reduce(kind: str, nbytes: float, group: GroupSize, cluster: Cluster, peer: bool) -> Iterator[Way]:
    yield from _rings(2 * (group.ranks - 1), nbytes * 2 * (group.ranks - 1) / group.ranks, group, cluster)
    yield from _trees(nbytes, group, cluster)
    link, nccl = cluster.device.link, figures()["nccl"]
    if link.multicast and group.nodes == 1 and group.ranks >= MULTICAST_RANKS:
        yield "NVLS", nccl["nvls_s"], nbytes * (1 + 1 / group.ranks), link.bytes_per_s * nccl["nvls_share"]
    if link.multicast and group.nodes > 1 and group.local >= MULTICAST_RANKS:
        yield _nvls_tree(nbytes, group, cluster)
    if peer and link.peer and group.nodes == 1 and group.ranks <= max(cost.ONE_SHOT):
        chosen = cost.choose(group.ranks, ceil(nbytes))
        if chosen is not None: yield kernel(chosen, nbytes, group.ranks, link)


def _half(kind: str, nbytes: float, group: GroupSize, cluster: Cluster, peer: bool) -> Iterator[Way]:
    """All-gather and reduce-scatter."""
    yield from _rings(group.ranks - 1, nbytes * (group.ranks - 1) / group.ranks, group, cluster)
    link, nccl = cluster.device.link, figures()["nccl"]
    if link.multicast and group.nodes == 1 and group.ranks >= MULTICAST_RANKS:
        yield "NVLS", nccl["nvls_s"], nbytes, link.bytes_per_s * nccl["nvls_share"]


def _rings(steps: int, wire: float, group: GroupSize, cluster: Cluster) -> Iterator[Way]:
    link, net, nccl = cluster.device.link, cluster.net, figures()["nccl"]
    between = 0 if group.nodes == 1 else steps // (group.ranks - 1) * (group.nodes - 1)
    rate = link.bytes_per_s if group.nodes == 1 else min(link.bytes_per_s, group.local * net.bytes_per_s)
    for i, protocol in enumerate(PROTOCOLS):
        within = max(link.hop_s[i], (3 if protocol == "Simple" else 1) * net.post_s * bool(between))
        alpha = nccl["ring_s"][i] + (steps - between) * within + between * net.hop_s[i]
        most = rate * SHARES[i]
        yield f"ring {protocol}", alpha, wire, most if i else min(most, link.low_latency_bytes_per_s)


def _trees(nbytes: float, group: GroupSize, cluster: Cluster) -> Iterator[Way]:
    link, net, nccl = cluster.device.link, cluster.net, figures()["nccl"]
    rate = link.bytes_per_s if group.nodes == 1 else min(link.bytes_per_s, group.local * net.bytes_per_s)
    for i, protocol in enumerate(PROTOCOLS):
        hops = (group.local - 1) * link.tree_hop_s[i] + log2(group.nodes) * net.tree_hop_s[i]
        most = 0.92 * rate * SHARES[i]
        yield (f"tree {protocol}", nccl["tree_s"][i] + 2 * hops, 2 * nbytes,
               most if i else min(most, link.low_latency_bytes_per_s))


def _nvls_tree(nbytes: float, group: GroupSize, cluster: Cluster) -> Way:
    """Within nodes and between them at once: what takes longer."""
    nccl, net = figures()["nccl"], cluster.net
    alpha = nccl["nvls_s"] + 2 * log2(group.nodes) * nccl["nvls_tree_hop_s"]
    within = nbytes * (1 + 1 / group.local), cluster.device.link.bytes_per_s * nccl["nvls_share"]
    between = nbytes / group.local * (1 if group.nodes == 2 else 2), net.bytes_per_s
    return "NVLS tree", alpha, *max(within, between, key=lambda each: each[0] / each[1])


def kernel(kind: type[AllReduceSchedule], nbytes: float, ranks: int, link: Link) -> Way:
    """A kernel over peer memory, whether or not graphs have it for this size."""
    slower = link.bytes_per_s / device(MEASURED).link.bytes_per_s
    return (KERNELS[kind], cost.LATENCY[kind], nbytes * cost.share(kind, ranks), cost.RATE[kind] * slower)


def _all_to_all(kind: str, nbytes: float, group: GroupSize, cluster: Cluster, peer: bool) -> Iterator[Way]:
    """Within the node and beyond it at once; each rank has an adapter."""
    within = nbytes * (group.local - 1) / group.ranks, cluster.device.link.bytes_per_s
    beyond = nbytes * (group.ranks - group.local) / group.ranks, cluster.net.bytes_per_s
    alpha = figures()["nccl"]["point_s"] + (cluster.net.hop_s[1] if group.nodes > 1 else 0.0)
    yield "pairs", alpha, *max(within, beyond, key=lambda each: each[0] / each[1])


def _send(kind: str, nbytes: float, group: GroupSize, cluster: Cluster, peer: bool) -> Iterator[Way]:
    far = group.nodes > 1
    alpha = figures()["nccl"]["point_s"] + (cluster.net.hop_s[1] if far else 0.0)
    yield "point to point", alpha, nbytes, cluster.net.bytes_per_s if far else cluster.device.link.bytes_per_s


@dataclass(frozen=True)
class Use:
    """A collective of a step: `count` calls, for `purpose`; `exposed_s` of their seconds are not hidden.
    `hidden_by`: what runs beside them, "" for nothing."""
    purpose: str
    collective: Collective
    count: float
    exposed_s: float
    hidden_by: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of all calls."""
        return self.count * self.collective.seconds

    def plus(self, more: Use) -> Use:
        """Returns the use with as many calls of the same collective more."""
        return replace(self, count=self.count + more.count, exposed_s=self.exposed_s + more.exposed_s)

    def times(self, count: float) -> Use:
        """So often."""
        return replace(self, count=self.count * count, exposed_s=self.exposed_s * count)


def expose(purpose: str, collective: Collective, count: float) -> Use:
    """Returns a use that nothing runs beside."""
    return Use(purpose, collective, count, count * collective.seconds)


def beside(device: Device, kernels_s: float, collectives_s: float) -> float:
    """Seconds of kernels and collectives that run at once: while a collective runs, kernels have the SMs that
    it leaves them."""
    taken = figures()["nccl"]["sms"] / device.model.sm_count
    return max(collectives_s, kernels_s + collectives_s * taken)
