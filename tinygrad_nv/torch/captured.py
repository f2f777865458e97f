"""The launches of a graph for one set of shapes.

Protocol. `Captured(plan, args)` lowers the plan's graph, with tinygrad collecting what it would run, plans
the memory of intermediates and compiles. Arguments and results are parameters of the launches. A call sets
the addresses that changed since the last one and runs all launches in one call into C: no scheduling, and no
copies. Arguments are read, and results written, where torch has them, in the strides that torch expects. One
more result says whether an index was out of range (lowering/checks.py), which raises once all has run.

An argument whose memory tinygrad cannot address (memory.py) is copied first, and back if it is written.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.graphs.capture import ScheduleRecorder
from tinygrad_nv.graphs.kept_buffers import all_buffers, buffers_of, live_tensors
from tinygrad_nv.graphs.launches import Launches, compile_launches
from tinygrad_nv.torch.lowering import checks, dtype_of, torch_dtype
from tinygrad_nv.torch.memory import DEVICE, Layout, Slot, shareable

Value = Any     # a Tensor, a number, or None


@dataclass(frozen=True)
class Plan:
    """A function of Tensors and numbers that changes none of its arguments, and what is to be done besides.

    `lower` is called once for each set of shapes. `layout` is that of a result by position and shape, None
    for rows. `numbers`: arguments that are numbers on which it depends. `writes`: results by position, and
    the arguments that they replace; those of `in_place` are there already. `static`: arguments whose layout
    never changes, such as weights."""
    lower: Callable[[Sequence[Value]], list[Value]]
    layout: Callable[[int, tuple[int, ...]], Layout] | None = None
    numbers: tuple[int, ...] = ()
    writes: Mapping[int, int] = field(default_factory=dict)
    in_place: frozenset[int] = frozenset()
    static: frozenset[int] = frozenset()

    def key(self, args: Sequence[Any]) -> Hashable:
        """Key of a capture: all of the arguments that it depends on."""
        return (tuple(args[i] for i in self.numbers),
                tuple(Layout.of(x) for x in args if isinstance(x, torch.Tensor)))


class Captured:
    """A graph's launches for arguments of one set of shapes, numbers included."""

    def __init__(self, plan: Plan, args: Sequence[Any]) -> None:
        self.written = set(plan.writes.values())
        self.numbers = [(i, args[i]) for i in plan.numbers]
        self.checked = [(i, Layout.of(x)) for i, x in enumerate(args)
                        if isinstance(x, torch.Tensor) and i not in plan.static]
        shared = [shareable(x) if isinstance(x, torch.Tensor) else x for x in args]
        self.slots = {i: Slot.of(x) for i, x in enumerate(shared)
                      if isinstance(x, torch.Tensor) and x.numel()}
        places = [slot.base for slot in self.slots.values()]
        self.layouts = dict[int, Layout]()      # of results that are new
        linear, made = self._record(plan, shared)
        self.values = [None if isinstance(each, Tensor) else each for each in made]
        self.results = [k for k in self.layouts if made[k].numel()]
        fresh = [Slot.of(self.layouts[k].fresh()).base for k in self.results]
        recorded = [*places, *(made[k].uop.base for k in self.results)]
        self.launches = Launches(compile_launches(linear), recorded, [*places, *fresh])

    # **** capture ****

    def _record(self, plan: Plan, args: Sequence[Any]) -> tuple[UOp, list[Any]]:
        """Records the schedule that tinygrad would run, and the results: a Tensor each with memory of its
        own, in the order of torch's strides."""
        given = [self.slots[i].tensor if i in self.slots else _empty(x) for i, x in enumerate(args)]
        existing = all_buffers() | buffers_of(tensor.uop for _, tensor in live_tensors())
        with ScheduleRecorder() as schedules:
            with checks.recording() as noted: made = list(plan.lower(given))
            made.append(noted.first_failed() if config.get("NV_TORCH_CHECK") else None)
            self.words = noted.names
            for k, each in enumerate(made):
                if not isinstance(each, Tensor) or k in plan.in_place: continue
                self.layouts[k] = _layout(plan if k < len(made) - 1 else None, k, each)
                made[k] = _lay_out(each, self.layouts[k])
            _realize(each for each in made if isinstance(each, Tensor))
            for k in self.layouts:
                if not made[k].uop.has_buffer_identity() or made[k].uop.base in existing:
                    made[k] = _realize([made[k].clone()])[0]
                existing.add(made[k].uop.base)
            self._write(plan, given, made)
        return schedules.linear, made

    def _write(self, plan: Plan, given: Sequence[Any], made: list[Any]) -> None:
        """Overwrites arguments, after all that reads them."""
        for k, argument in plan.writes.items():
            if k in plan.in_place: continue
            layout = self.layouts.pop(k)
            back = sorted(range(len(layout.order)), key=layout.order.__getitem__)
            _realize([given[argument].assign(made[k].permute(back) if back else made[k])])

    # **** replay ****

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether arguments have the shapes, strides and numbers of this capture."""
        for i, number in self.numbers:
            if args[i] != number: return False
        return all(args[i].shape == layout.shape and args[i].stride() == layout.strides
                   for i, layout in self.checked)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        copies = []
        for place, i in enumerate(self.slots):
            if args[i].data_ptr() == self.launches.addresses[place]: continue
            if (x := shareable(args[i])) is not args[i]: copies.append((i, x))
            self.launches.bind(place, x.data_ptr())
        made: list[Any] = list(self.values)
        for k, layout in self.layouts.items(): made[k] = layout.fresh()
        for place, k in enumerate(self.results, len(self.slots)):
            self.launches.bind(place, made[k].data_ptr())
        self.launches.run()
        for i, x in copies:
            if i in self.written: args[i].copy_(x)
        for i in self.written: torch.autograd.graph.increment_version(args[i])
        if (failed := made.pop()) is not None and failed: raise checks.refusal(self.words[int(failed) - 1])
        return made


def _layout(plan: Plan | None, k: int, made: Tensor) -> Layout:
    """Layout that torch wants for a result of a plan, or that a number of ours has."""
    if plan is not None and plan.layout is not None: return plan.layout(k, tuple(made.shape))
    return Layout.rows(tuple(made.shape), torch_dtype(made.dtype))


def _empty(x: Any) -> Any:
    """A number as it is; a tensor without elements."""
    if not isinstance(x, torch.Tensor): return x
    return Tensor.empty(*x.shape, dtype=dtype_of(x.dtype), device=DEVICE)


def _lay_out(made: Tensor, layout: Layout) -> Tensor:
    """A result with its dimensions in the order of torch's strides, to be stored without gaps."""
    made = made.permute(layout.order) if made.ndim else made
    if not made.uop.is_virtual: return made.contiguous()
    return Tensor.empty(*made.shape, dtype=made.dtype, device=DEVICE).assign(made)


def _realize(made: Iterable[Tensor]) -> list[Tensor]:
    made = list(made)
    if made: Tensor.realize(*made)
    return made
