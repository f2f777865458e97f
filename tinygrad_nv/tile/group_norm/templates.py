"""The template of group norm on a GPU.

Protocol: an image's positions are cut into slices, each the work of a CTA, by the extents of an image alone:
so the order of sums does not depend on the GPU, nor on other images.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import ClassVar

from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build

VECTOR_BYTES = 16
THREADS, MOST_THREADS = 256, 1024
TOGETHER = 4            # positions of a thread whose loads are under way together
MOST_SLICES = 256
STATISTIC_BYTES = 8     # of a group in a slice: its mean, and squares around it
MOST_IMAGES = 65535     # a grid's y


@dataclass(frozen=True)
class GroupNorm(Schedule):
    """`vector` channels of a thread, `rows` positions of a slice."""
    template: ClassVar[str] = "group_norm"
    vector: int = 1
    rows: int = 1

    def words(self) -> list[str]:
        return [f"{self.vector} channels a thread", f"slices of {self.rows} positions"]

    @staticmethod
    @lru_cache(1024)
    def of(spec: GroupNormSpec) -> GroupNorm:
        """The schedule of a spec. Every CTA reads the statistics of all slices: no more bytes than it
        normalises."""
        vector = VECTOR_BYTES // spec.dtype.itemsize
        while spec.channels % vector: vector //= 2
        image = spec.positions * spec.channels * spec.dtype.itemsize
        slices = min(MOST_SLICES, isqrt(image // (STATISTIC_BYTES * spec.groups)),
                     spec.positions // (TOGETHER * lanes_of(spec.channels // vector)))
        return GroupNorm(vector, -(-spec.positions // max(slices, 1)))


def threads_of(columns: int) -> int:
    """Threads of a CTA, with so many vectors of channels."""
    return max(THREADS, -(-columns // 32) * 32)


def lanes_of(columns: int) -> int:
    """Positions that a CTA has under way at once, a vector a thread."""
    return threads_of(columns) // columns


def problems(spec: GroupNormSpec, schedule: GroupNorm, gpu: GPU) -> list[str]:
    """Why the template does not take a spec; empty when it does."""
    own, out = GroupNorm.of(spec), list[str]()
    if (columns := spec.channels // own.vector) > MOST_THREADS:
        out.append(f"{spec.channels} channels in vectors of {own.vector} are {columns}, more than "
                   f"{MOST_THREADS} threads")
    if spec.batch > MOST_IMAGES: out.append(f"{spec.batch} images, more than {MOST_IMAGES}")
    return out if out or schedule == own else [f"{schedule} is not {own}"]


GROUP_NORM = Template("group_norm", GroupNormSpec, GroupNorm, problems,
                      lambda spec, gpu: (GroupNorm.of(spec),),
                      lazy_build("tinygrad_nv.tile.group_norm.kernel", "group_norm"))
FAMILY = Family("group_norm", (GROUP_NORM,),
                determinism_class="each image alone, in an order that its extents give")
