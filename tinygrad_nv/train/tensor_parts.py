"""Gradients of a tensor parallel run: what its ranks do with them, over what data parallel ranks do.

Protocol: as parts.py has it; `inner` are the parts that ranks with the same parameters make. Parameters are
of the kinds of cuts.py. After a micro-batch gradients that are partial are added up over the tensor group,
and those of rows that several ranks have over these. The norm of all gradients has the squares of what is cut
of all ranks, and those of other parameters once. `save` gathers the model on rank 0.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from tinygrad import Tensor

from tinygrad_nv.dist.collectives.functions import all_reduce, all_reduce_many
from tinygrad_nv.dist.group import Group
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.train.cuts import CUT, PARTIAL, Cuts, join
from tinygrad_nv.train.parts import Named, Parts


class TensorParts:
    """The parts of a rank that has a part of each layer. `sharing` are the ranks that have the same key and
    value heads; None where this rank alone has its own."""

    def __init__(self, inner: Parts, model: Llama, sharing: Group | None) -> None:
        assert model.parallel is not None
        self.inner, self.group, self.sharing, self.cuts = inner, model.parallel.group, sharing, Cuts.of(model)
        self.whole, self.optimized, self.added = inner.whole, inner.optimized, inner.added
        self.sharded, self.joins, self.regions = inner.sharded, inner.joins, inner.regions
        self._number = {id(each): number for number, each in enumerate(self.cuts.tensors)}
        self._on_first = self.cuts.on_first()
        self._shared = self._rows_of_several()

    def _kind(self, name: str) -> str: return self.cuts.kinds[self._number[id(self.whole[name])]]

    def _rows_of_several(self) -> dict[str, list[tuple[int, int]]]:
        """Elements of flat parameters that several ranks have, from and to, in order."""
        found = dict[str, list[tuple[int, int]]]()
        for name, tensor in self.whole.items():
            own = [each for each in self.cuts.slices.values()
                   if each.copies > 1 and each.tensor == self._number[id(tensor)]]
            if own: found[name] = sorted((each.slot.first, each.slot.first + each.slot.shape[0])
                                         for each in own)
        return found

    def each(self, gradients: Named) -> Named:
        """The inner parts of gradients that are those of all tensor parallel ranks."""
        made = dict(gradients)
        partial = [name for name in made if self._kind(name) == PARTIAL]
        if partial:
            summed = all_reduce_many([made[name] for name in partial], self.group, name="partial gradients")
            made |= zip(partial, summed, strict=True)
        for name, tensor in made.items():
            if self._number[id(self.whole[name])] in self._on_first:
                made[name] = tensor * self.group.is_rank(0).to(tensor.device).cast(tensor.dtype)
        for name, rows in self._shared.items(): made[name] = self._sum(name, made[name], rows)
        return self.inner.each(made)

    def _sum(self, name: str, gradient: Tensor, rows: list[tuple[int, int]]) -> Tensor:
        """A gradient, with these rows of all ranks that have them."""
        assert self.sharing is not None
        made, at = list[Tensor](), 0
        for first, end in rows:
            if first > at: made.append(gradient[at:first])
            made.append(all_reduce(gradient[first:end].contiguous(), self.sharing, name=f"{name} {first}"))
            at = end
        if at < int(gradient.shape[0]): made.append(gradient[at:])
        return Tensor.cat(*made).contiguous() if len(made) > 1 else made[0]

    def all(self, sums: Named) -> Named: return self.inner.all(sums)

    def take(self, sums: Named) -> Named: return self.inner.take(sums)

    def gather(self) -> list[Tensor]: return self.inner.gather()

    def present(self) -> AbstractContextManager[None]: return self.inner.present()

    def leaves(self) -> Named: return self.inner.leaves()

    def squares(self, gradients: Named, name: str = "") -> Tensor:
        """The sum of squares of all gradients of the whole model."""
        cut = {name: each for name, each in gradients.items() if self._kind(name) == CUT}
        alike = {name: each for name, each in gradients.items() if name not in cut}
        several = Named()
        for each, rows in self._shared.items():
            for first, end in rows: several[f"{each} {first}"] = cut[each][first:end].contiguous()
        made = self.inner.squares(cut, f"{name} of parts")
        if several and self.sharing is not None:
            made = made - self.inner.squares(several, f"{name} of several") * (1 - 1 / self.sharing.size)
        made = all_reduce(made, self.group, name=f"squares of gradients{name}")
        return made + self.inner.squares(alike, f"{name} of all") if alike else made

    @contextlib.contextmanager
    def save(self, model: Llama) -> Iterator[Llama]:
        """The whole model, on rank 0."""
        with self.inner.save(model): yield join(model) or model
