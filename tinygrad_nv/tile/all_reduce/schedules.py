"""How an all-reduce is shared out: `ctas` channels of `threads`, over a workspace.

Protocol: a round takes `vectors_of_round` vectors of 16 bytes a CTA, as many as its half holds, or as there
are; of rows with a norm, whole rows.

    one-shot    every GPU reads all of it from every peer: one exchange of flags, (world − 1) · n bytes in
    two-shot    every GPU sums a shard, and reads the others' shards: two exchanges, 2 (world − 1) / world · n
    multimem    the switch sums a GPU's shard as it is read, and gives it to all as it is written: two
                exchanges, n / world in and n / world out, and from every GPU as much as it has
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.all_reduce.spec import VECTOR_BYTES, AllReduceSpec
from tinygrad_nv.tile.all_reduce.workspace import Workspace
from tinygrad_nv.tile.schedule import Schedule, count_words


@dataclass(frozen=True)
class AllReduceSchedule(Schedule):
    """`ctas` CTAs of `threads` threads; the layout of the workspace is the group's."""
    phases: ClassVar[int]
    ctas: int = 8
    threads: int = 512
    channels: int = 64
    half_bytes: int = 1 << 16

    @property
    def workspace(self) -> Workspace:
        """The layout."""
        return Workspace(self.channels, self.half_bytes)

    def words(self) -> list[str]:
        return [count_words(self.ctas, "CTA"), f"{self.threads} threads",
                f"{self.channels} channels of 2 x {self.half_bytes} bytes"]

    def unit(self, spec: AllReduceSpec) -> int:
        """Vectors that stay together: of a row."""
        return spec.columns // spec.of_vector if spec.columns else 1

    def vectors_held(self, spec: AllReduceSpec) -> int:
        """Vectors that a half has room for."""
        raise NotImplementedError

    def vectors_of_round(self, spec: AllReduceSpec) -> int:
        """Vectors of a CTA in a round, whole units."""
        unit = self.unit(spec)
        wanted = -(-(spec.vectors // unit) // self.ctas)
        return min(wanted, self.vectors_held(spec) // unit) * unit

    def rounds(self, spec: AllReduceSpec) -> int:
        """How often the CTAs take their vectors."""
        return -(-spec.vectors // (self.ctas * self.vectors_of_round(spec)))


@dataclass(frozen=True)
class OneShot(AllReduceSchedule):
    """A half has the vectors of a round."""
    template: ClassVar[str] = "all_reduce_one_shot"
    phases: ClassVar[int] = 1

    def vectors_held(self, spec: AllReduceSpec) -> int: return self.half_bytes // VECTOR_BYTES


@dataclass(frozen=True)
class TwoShot(AllReduceSchedule):
    """A half has the vectors of a round, and behind them the shard that this GPU has summed."""
    template: ClassVar[str] = "all_reduce_two_shot"
    phases: ClassVar[int] = 2

    def vectors_held(self, spec: AllReduceSpec) -> int:
        # the most with vectors + shard(vectors) ≤ room
        return self.half_bytes // VECTOR_BYTES * spec.world // (spec.world + 1)

    def shard(self, spec: AllReduceSpec, vectors: int) -> int:
        """Vectors of a GPU's shard of a round."""
        return -(-vectors // spec.world)


@dataclass(frozen=True)
class Multimem(AllReduceSchedule):
    """A half has the vectors of a round, and behind them the sums of all GPUs. Floats are added up in the
    order of the switch; all GPUs get the same bits. For sm_90 and a multicast object over all workspaces."""
    template: ClassVar[str] = "all_reduce_multimem"
    phases: ClassVar[int] = 2

    def vectors_held(self, spec: AllReduceSpec) -> int: return self.half_bytes // VECTOR_BYTES // 2

    def shard(self, spec: AllReduceSpec, vectors: int) -> int:
        """Vectors of a GPU's shard of a round."""
        return -(-vectors // spec.world)
