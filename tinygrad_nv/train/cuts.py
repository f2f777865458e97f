"""Parts of a whole model's tensors that each rank of a tensor parallel group has, by name.

Protocol: `Cuts.of(model)` compares a rank's network with the whole one; both have the same tensors in the
same order, of which some are cut (models/parallel.py). A tensor is

    CUT      a part of the whole one: its gradient is that of the part
    PARTIAL  whole on every rank, which applies it to its own heads, experts or tokens: its gradients are
             added up over ranks
    ALIKE    whole, and applied alike on every rank: its gradient is the same everywhere

Rows of a cut tensor may stand on several ranks: those of key and value heads, of which there are fewer than
ranks (`shared`). A bias that is added behind a sum over ranks is on rank 0 alone; others have zeros
(`elsewhere`).

`take` fills a rank's network of whole tensors, and `join` a whole one of all ranks' parts.

`TensorParts` is what a step does with gradients of such ranks, over what data parallel ranks do.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from tinygrad import Tensor
from tinygrad.nn.state import get_parameters

from tinygrad_nv.dist.collectives.functions import all_gather, all_reduce, all_reduce_many
from tinygrad_nv.dist.group import Group
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, local_config, names_apart
from tinygrad_nv.models.shares import TABLES, biases_elsewhere, shares
from tinygrad_nv.models.weights import WeightSlice, list_loaded, slots
from tinygrad_nv.quant.readers.reader import TensorPart
from tinygrad_nv.runtime.memory import allocate, read_part, write
from tinygrad_nv.train.parts import Named, Parts

CUT, PARTIAL, ALIKE = "cut", "partial", "alike"


@dataclass(frozen=True)
class OwnSlice:
    """Slice of a checkpoint's tensor: the rank's rows of its own tensor, number `tensor`, and which part
    of the whole one they are; None: all of it. `copies` ranks have it; `elsewhere`: rank 0 has it, and not
    this."""
    tensor: int
    slot: WeightSlice
    part: TensorPart | None
    copies: int
    elsewhere: bool


@dataclass(frozen=True)
class Cuts:
    """Slices of a rank's network: `kinds` of its tensors, in order, and `slices` by names of the whole
    network."""
    tensors: tuple[Tensor, ...]
    kinds: tuple[str, ...]
    slices: dict[str, OwnSlice]

    @staticmethod
    def of(model: Llama) -> Cuts:
        """Returns the slices of a network whose `parallel` says which part it is."""
        parallel = _parallel(model)
        whole, own = whole_network(model, apart=True), list_loaded(model)
        extents = {name: slot.shape for name, slot in slots(whole).items()}
        found = shares(extents, {name: slot.shape for name, slot in slots(model).items()}, parallel, TABLES)
        elsewhere = biases_elsewhere(found, parallel)
        biases = {id(slots(model)[name].tensor) for name in _row_biases(model, found)}
        kinds = _kinds(model, own, list_loaded(whole), biases)
        apart, every = biases | _experts(model), slots(model)
        numbers = {id(tensor): number for number, tensor in enumerate(own)}

        def own_slice(name: str, slot: WeightSlice) -> OwnSlice:
            number, part = numbers[id(slot.tensor)], found.get(name)
            copies = 1
            if kinds[number] == CUT and name not in TABLES and id(slot.tensor) not in apart:
                copies = parallel.ranks if part is None else \
                    max(part.count * parallel.ranks // extents[name][part.axis], 1)
            return OwnSlice(number, slot, part, copies, name in elsewhere)
        return Cuts(tuple(own), tuple(kinds), {name: own_slice(name, slot) for name, slot in every.items()})

    def on_first(self) -> set[int]:
        """Numbers of tensors of which other ranks than 0 have zeros."""
        return {each.tensor for name, each in self.slices.items()
                if name in _row_biases_of({name: one.part for name, one in self.slices.items()})}


def _parallel(model: Llama) -> Parallel:
    assert model.parallel is not None, "a rank's network"
    return model.parallel


def _kinds(model: Llama, own: list[Tensor], whole: list[Tensor], biases: set[int]) -> list[str]:
    within = {id(each) for block in model.blocks for half in (block.attention, block.feed_forward)
              for each in get_parameters(half)}
    apart = _experts(model) | biases
    return [CUT if mine.shape != there.shape or id(mine) in apart
            else PARTIAL if _parallel(model).sequence or id(mine) in within else ALIKE
            for mine, there in zip(own, whole, strict=True)]


def _experts(model: Llama) -> set[int]:
    """Tensors, by id, of experts that a rank has whole: others on each rank."""
    made = set[int]()
    for block in model.blocks:
        half = block.feed_forward
        if not isinstance(half, MixtureOfExperts) or len(half.own) == half.moe.experts: continue
        every = (half.gate_up, half.down, half.gate_up_bias, half.down_bias)
        made |= {id(each) for each in every if each is not None}
    return made


def _row_biases(model: Llama, found: dict[str, TensorPart]) -> list[str]:
    """Names of biases of matrices that are cut by columns."""
    return [name for name in slots(model) if name in _row_biases_of(found)]


def _row_biases_of(found: dict[str, TensorPart] | dict[str, TensorPart | None]) -> set[str]:
    return {f"{name.removesuffix('.weight')}.bias" for name, part in found.items()
            if part is not None and part.axis == 1 and name.endswith(".weight")}


def whole_network(model: Llama, apart: bool) -> Llama:
    """The whole network that a rank has a part of, without memory; `apart`: its projections have names of
    their own, as ranks' have."""
    config = _parallel(model).whole
    if apart: config = replace(config, names=names_apart(config.names))
    return Llama(config, model.dtype, model.device)


def network_of(model: Llama, rank: int) -> Llama:
    """Returns the network of another rank of the group, without memory; of its collectives none can be
    called."""
    parallel = _parallel(model)
    there = replace(parallel, group=Group(parallel.group.name, parallel.group.members, rank, 1.0))
    return Llama(local_config(parallel.whole, parallel.ranks, parallel.experts), model.dtype, model.device,
                 parallel=there)


def _rows(values: np.ndarray, slot: WeightSlice) -> np.ndarray:
    """A slot's elements of its tensor's, in the shape of the checkpoint's tensor: a view."""
    first = slot.first * prod(slot.shape[1:])
    return values.reshape(-1)[first:first + prod(slot.shape)].reshape(slot.shape)


def _within(values: np.ndarray, part: TensorPart | None) -> np.ndarray:
    """A part of a checkpoint's tensor: a view."""
    if part is None: return values
    at = [slice(None)] * values.ndim
    at[part.axis] = slice(part.first, part.first + part.count)
    return values[tuple(at)]


def take(model: Llama, value: Callable[[str, Tensor], np.ndarray]) -> None:
    """Fills a rank's network. `value(name, tensor)` gives the whole tensors, float32, one after the other, by
    their first names in the whole network; the shape is that of `tensor`."""
    whole, own, cuts = slots(whole_network(model, apart=True)), list_loaded(model), Cuts.of(model)
    names = dict[int, list[str]]()
    for name, slot in whole.items(): names.setdefault(id(slot.tensor), []).append(name)
    for mine, group in zip(own, names.values(), strict=True):
        values = value(group[0], whole[group[0]].tensor)
        made = np.zeros(tuple(map(int, mine.shape)), np.float32)
        for name in group:
            own_slice = cuts.slices.get(name)
            if own_slice is None or own_slice.elsewhere: continue
            _rows(made, own_slice.slot)[...] = _within(_rows(values, whole[name]), own_slice.part)
        mine.assign(Tensor(made, device=mine.device).cast(mine.dtype)).realize()


def join(model: Llama) -> Llama | None:
    """The whole network with all ranks' parts, on rank 0 of the group; None on others, which call it, too."""
    parallel = _parallel(model)
    group, first = parallel.group, parallel.group.rank == 0
    made = whole_network(model, apart=False)
    there = list_loaded(made)
    lies = slots(whole_network(model, apart=True))
    every = [Cuts.of(network_of(model, rank)) for rank in range(group.size)] if first else []
    for number, tensor in enumerate(list_loaded(model)):
        parts = all_gather(tensor.detach().unsqueeze(0), group, name=f"tensor {number}")
        parts = parts.contiguous().realize()
        if first: _write(there[number], _join(number, parts, there[number], every, lies))
    return made if first else None


def _join(number: int, parts: Tensor, whole: Tensor, every: list[Cuts], lies: dict[str, WeightSlice]
            ) -> np.ndarray:
    """A whole tensor's bits, of the parts (ranks, …)."""
    kind = np.dtype(f"u{whole.dtype.itemsize}")
    given = np.frombuffer(read_part(parts, 0, int(parts.nbytes())), kind).reshape(
        tuple(map(int, parts.shape)))
    made = np.zeros(tuple(map(int, whole.shape)), kind)
    for rank, cuts in enumerate(every):
        for name, own_slice in cuts.slices.items():
            if own_slice.tensor != number or own_slice.elsewhere: continue
            _within(_rows(made, lies[name]), own_slice.part)[...] = _rows(given[rank], own_slice.slot)
    return made


def _write(tensor: Tensor, values: np.ndarray) -> None:
    allocate(tensor)
    write(tensor, 0, values.reshape(-1).data.cast("B"))


class TensorParts:
    """The parts of a rank that has a part of each layer (parts.py has the protocol). `inner` are the parts
    that ranks with the same parameters make, `sharing` the ranks that have the same key and value heads; None
    where this rank alone has its own. After a micro-batch gradients that are partial are added up over the
    tensor group, and those of rows that several ranks have over these. The norm of all gradients has the
    squares of what is cut of all ranks, and those of other parameters once. `save` gathers the model on rank
    0."""

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
