"""How the ranks of a data parallel run make one step of their gradients.

Protocol: as parts.py has it.

`Replicas`: every rank has all parameters and updates them alike; gradients are added up in float32, in the
order of ranks.

`Sharded` (ZeRO, arXiv 1910.02054, section 5): a rank updates its part of each parameter, a float32 vector of
1/n of the elements in whole blocks of 256, of which the optimiser's states are parts too; the updated parts
are gathered. Of 16-bit parameters the parts are the float32 master weights. Stage 1 keeps sums over
micro-batches whole, stage 2 adds up parts; of stage 3 see fully_sharded.py. Parts hold for rules that treat
elements alike: not for Muon and Adafactor.
"""
from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tinygrad import Tensor, dtypes

from tinygrad_nv.dist.collectives.functions import (
    BUCKET_BYTES,
    all_gather,
    all_reduce,
    all_reduce_many,
    buckets,
    reduce_scatter,
)
from tinygrad_nv.dist.group import Group
from tinygrad_nv.train.optimizers.state import BLOCK
from tinygrad_nv.train.parts import Named, Whole


class Replicas(Whole):
    """Every rank has all, updated alike."""
    joins = True

    def __init__(self, parameters: Mapping[str, Tensor], group: Group) -> None:
        super().__init__(parameters)
        self.group = group

    def all(self, sums: Named) -> Named:
        """The sums over ranks, float32."""
        made = all_reduce_many(list(sums.values()), self.group, name="gradients")
        return dict(zip(sums, made, strict=True))


def one_rank() -> Group:
    """The group of a run of one rank, whose parts are all: a checkpoint of many ranks' parts fits it."""
    return Group("0", (0,), 0, 0.0)


def columns(count: int, ranks: int) -> int:
    """Elements of a part, of so many in all: whole blocks of 8-bit state, which can be cut anew then."""
    return -(-count // (ranks * BLOCK)) * BLOCK


class Bucket:
    """Parameters whose collectives are one call: a matrix with a row for each rank, in which a parameter has
    some columns."""

    def __init__(self, parameters: Mapping[str, Tensor], group: Group, number: int) -> None:
        self.parameters, self.group, self.name = dict(parameters), group, f"bucket {number}"
        self.columns = {name: columns(prod(map(int, each.shape)), group.size)
                        for name, each in parameters.items()}

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """(ranks, columns) of whole tensors, float32."""
        made = []
        for name, columns in self.columns.items():
            flat = tensors[name].cast(dtypes.float32).reshape(-1)
            missing = columns * self.group.size - int(flat.shape[0])
            made.append((flat.pad((0, missing)) if missing else flat).reshape(self.group.size, columns))
        return Tensor.cat(*made, dim=1) if len(made) > 1 else made[0]

    def parts(self, row: Tensor) -> Named:
        """A rank's part of each, of its row (columns,)."""
        made, at = Named(), 0
        for name, columns in self.columns.items():
            made[name], at = row[at:at + columns], at + columns
        return made

    def first(self) -> Named:
        """Returns this rank's parts of the parameters, in memory of their own."""
        own = self.parts(self.rows({name: each.detach() for name, each in self.parameters.items()})
                         [self.group.rank])
        return {name: each.contiguous().is_param_(False).realize() for name, each in own.items()}

    def reduce(self, gradients: Named) -> Named:
        """Returns this rank's parts of the sums over ranks."""
        rows = self.rows({name: gradients[name] for name in self.columns})
        return self.parts(reduce_scatter(rows, self.group, name=f"gradients {self.name}").reshape(-1))

    def join(self, shards: Named, after: Tensor | None = None, name: str = "") -> Tensor:
        """(ranks, columns) of the parts of all ranks, in the parameters' dtype, gathered after `after`."""
        dtype = next(iter(self.parameters.values())).dtype
        own = [shards[each].detach() for each in self.columns]
        flat = (Tensor.cat(*own) if len(own) > 1 else own[0]).cast(dtype).contiguous()
        return all_gather(flat.reshape(1, -1), self.group, name=f"parameters {self.name}{name}", after=after)

    def wholes(self, rows: Tensor) -> Named:
        """Whole parameters, of rows (ranks, columns)."""
        made, at = Named(), 0
        for name, columns in self.columns.items():
            shape = self.parameters[name].shape
            made[name] = rows[:, at:at + columns].reshape(-1)[:prod(map(int, shape))].reshape(shape)
            at += columns
        return made

    def gather(self, shards: Named) -> list[Tensor]:
        """The parameters, written from all ranks' parts."""
        for name, made in self.wholes(self.join(shards)).items(): self.parameters[name].assign(made)
        return list(self.parameters.values())


class Sharded(Whole):
    """Every rank has all, and updates its parts. `stage` is 1 or 2."""
    sharded = True

    def __init__(self, parameters: Mapping[str, Tensor], group: Group, stage: int,
                 bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(parameters)
        self.group, self.stage = group, stage
        self.buckets = self._make(bucket_bytes)
        made = {name: part for each in self.buckets for name, part in each.first().items()}
        self.optimized = {name: made[name] for name in self.whole}
        self.added, self.joins = (self.whole, True) if stage == 1 else (self.optimized, False)

    def _make(self, bucket_bytes: int) -> list[Bucket]:
        """The last parameters first, whose gradients are there first."""
        names = list(reversed(self.whole))
        found = buckets([self.whole[name] for name in names], bucket_bytes)
        return [Bucket({names[i]: self.whole[names[i]] for i in numbers}, self.group, number)
                for number, numbers in enumerate(found)]

    def each(self, gradients: Named) -> Named:
        """Stage 2: this rank's parts of the sums over ranks."""
        if self.stage == 1: return gradients
        # in memory first: a kernel that joins a bucket must not read parameters that are written behind it
        return self._reduce({name: each.contiguous() for name, each in gradients.items()})

    def all(self, sums: Named) -> Named:
        """Stage 1: this rank's parts of the sums over ranks."""
        return self._reduce(sums)

    def take(self, sums: Named) -> Named:
        """Parts of gradients: of stage 1 in memory of their own."""
        if self.stage == 2: return sums
        return {name: each.zeros_like().contiguous().is_param_(False).realize()
                for name, each in self.optimized.items()}

    def gather(self) -> list[Tensor]:
        """The parameters, written from all ranks' parts."""
        return [tensor for each in self.buckets for tensor in each.gather(self.optimized)]

    def squares(self, gradients: Named, name: str = "") -> Tensor:
        """The sum over ranks of sums of squares of their parts."""
        return all_reduce(super().squares(gradients), self.group, name=f"squares of gradients{name}")

    def _reduce(self, gradients: Named) -> Named:
        made = {name: part for each in self.buckets for name, part in each.reduce(gradients).items()}
        return {name: made[name] for name in gradients}
