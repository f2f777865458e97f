"""A launch's extents, and which of its clusters are recorded.

Protocol: `places(shape, gpu)` chooses clusters at which recording begins: the first, and a few more where the
grid has several waves; `recorded(shape, gpu, begins)` has all clusters to be recorded: at each place as many
as share the SMs of one cluster. """
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tinygrad_nv.ptx.assemble import Resources
from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.ptx.timing.gpu import GPUFigures

REGISTERS_OF_SM, RESERVED_BYTES = 65536, 1024   # of each CTA the system has a KiB of shared memory
DRAWING = 6                 # of a grid whose clusters draw their work tiles: 4 % from the mean of all (rms)
PLACES = 5                  # of a grid of several waves that are recorded
MANY_PLACES = 24            # of one whose clusters differ: fewer repeat after any number, as chance has it
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Shape:
    """A launch: extents, bytes of shared memory, and what ptxas says of the kernel."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    resources: Resources

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return prod(self.cluster)

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return prod(self.grid) // self.ctas

    @property
    def rows(self) -> tuple[int, ...]:
        """Clusters of a row of the grid, and of a plane; none of a grid of one row."""
        x, y, _ = (of // by for of, by in zip(self.grid, self.cluster, strict=True))
        return tuple(dict.fromkeys(each for each in (x, x * y) if 1 < each < self.clusters))

    def busy_sms(self, gpu: GPUFigures) -> int:
        """SMs that have a CTA."""
        return min(gpu.sms, self.clusters * self.ctas)

    def ctas_of_sm(self, gpu: GPUFigures) -> int:
        """CTAs that an SM has at once: what it holds, or, of a grid that does not fill the GPU, its part, for
        CTAs go to the SMs in turn."""
        return max(1, min(self.room_of_sm(gpu), -(-self.clusters * self.ctas // gpu.sms)))

    @property
    def needs(self) -> tuple[int, int, int]:
        """Threads, registers and bytes of shared memory of a CTA. Registers are given to warps by 256."""
        threads = -(-prod(self.block) // 32) * 32
        registers = -(-self.resources.registers * 32 // 256) * 256 * threads // 32
        return threads, max(registers, 1), self.shared_bytes + RESERVED_BYTES

    def room_of_sm(self, gpu: GPUFigures) -> int:
        """CTAs that an SM holds at once."""
        threads, registers, shared = self.needs
        return max(1, min(gpu.threads_of_sm // threads, REGISTERS_OF_SM // registers,
                          gpu.shared_bytes_of_sm // shared, 32))

    def fits_beside(self, other: Shape, gpu: GPUFigures) -> bool:
        """Whether the launch has room while all CTAs run that `other` has at once: on the SMs that it leaves
        free, or a CTA beside its own on an SM."""
        free = (gpu.sms - other.busy_sms(gpu)) * self.room_of_sm(gpu)
        limits = gpu.threads_of_sm, REGISTERS_OF_SM, gpu.shared_bytes_of_sm
        beside = all(other.ctas_of_sm(gpu) * theirs + mine <= limit
                     for theirs, mine, limit in zip(other.needs, self.needs, limits, strict=True))
        return beside or self.clusters * self.ctas <= free

    def at_once(self, gpu: GPUFigures) -> int:
        """Clusters that the GPU holds at once."""
        return max(1, most_clusters(self.ctas, gpu.sms, self.room_of_sm(gpu)))


def places(shape: Shape, gpu: GPUFigures, drawn: bool = False, count: int = PLACES) -> list[int]:
    """Numbers of the clusters at which recording begins: one where all run at once, and some where they draw
    their work tiles, as chance has it; else a few, `count`, evenly."""
    together = shape.ctas_of_sm(gpu)
    if shape.clusters <= shape.at_once(gpu):
        # a step more each, or all would begin at the same place of a row of tiles
        return sorted({(i * shape.clusters // DRAWING + i) % shape.clusters
                       for i in range(DRAWING)}) if drawn else [0]
    last = max(0, shape.clusters - 2 * together)
    # with multiples of an irrational number between, or all might begin at the same place of a row
    return sorted({0, last, *(round(last * (GOLDEN * i % 1)) for i in range(1, count - 1))})


def clusters_to_record(shape: Shape, gpu: GPUFigures, begins: Sequence[int]) -> list[int]:
    """All clusters that are recorded: at each place, where it begins, as many as an SM holds, and where there
    are several waves as many again, which follow them."""
    count = shape.ctas_of_sm(gpu) * (2 if shape.clusters > shape.at_once(gpu) else 1)
    return sorted({at + i for at in begins for i in range(count) if at + i < shape.clusters})
