"""How many clusters of CTAs a GPU has room for at once.

The CTAs of a cluster run in one GPC, a group of SMs: of 18 SMs four clusters of 4 CTAs take 16, and two are
left over. A driver knows how many fit (cuOccupancyMaxActiveClusters); these are the numbers without one.

GH100 has 8 GPCs of 9 TPCs of 2 SMs; the H100 SXM has 66 of the 72 TPCs (NVIDIA H100 Tensor Core GPU
Architecture, 2022), which ones differs from chip to chip. `GPCS` is a split that agrees with what is
published of them: a GPC of 16 SMs, and 120 CTAs of clusters of 8 at once (accel-sim/gpu-app-collection pull
request 87; cuBLAS launches as many, NVIDIA/cutlass issue 1921). GPCs of 16 and 18 alone would hold 128.
"""
from __future__ import annotations

import functools

Clusters = tuple[tuple[int, int], ...]  # what a driver says: (CTAs of a cluster, how many run at once)
SIZES = (2, 4, 8)
MOST_SMS = 18
GPCS = {132: (18, 18, 18, 16, 16, 16, 16, 14)}  # by the number of SMs


def gpcs(sm_count: int) -> tuple[int, ...]:
    """SMs of each GPC; of a GPU that is not known as many as there can be, and the rest in one more."""
    if sm_count in GPCS: return GPCS[sm_count]
    full, rest = divmod(sm_count, MOST_SMS)
    return (MOST_SMS,) * full + ((rest,) if rest else ())


@functools.cache
def most_clusters(size: int, sm_count: int, ctas_of_sm: int = 1) -> int:
    """Clusters of `size` CTAs that run at once where an SM holds so many CTAs."""
    if size == 1: return sm_count * ctas_of_sm
    return sum(each * ctas_of_sm // size for each in gpcs(sm_count))
