"""Meshes of ranks, or of devices of one process, with named axes.

Protocol. `mesh(devices, axes={"dp": 2, "tp": 4}, layout={…})`, often in a `with`: the last one entered is
`current()`. Without `devices` the mesh has all ranks: each runs the same program (SPMD), and has one part of
each tensor that is cut. With a list of device names, all of one process, a cut tensor is one tensor of
tinygrad's over several devices. The last axis counts fastest: ranks 0 and 1 differ in "tp".

* `group("tp")`, `group("dp", "tp")`: the ranks that differ from this one in these axes alone.
* `place(x, dims, name)`: this rank's part of a tensor that every rank has whole, by the layout (layout.py);
  `gather(part, like)` gives the whole tensor again. `placements` lists placed tensors by name.
* `pmap(fn, inputs, output, donate)`: a function of parts, captured by a TinyJit.
* `all_reduce("tp")`, `scan(fn, "dp")`, …: functions of parts (steps.py).

All ranks call the same of these in the same order.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import TracebackType
from typing import Any

from tinygrad import Tensor, TinyJit
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.dist.collectives.device import DeviceCollective
from tinygrad_nv.dist.collectives.functions import Collective, all_gather, part
from tinygrad_nv.dist.collectives.peer_norm import ReduceNorm
from tinygrad_nv.dist.group import Group, World, world
from tinygrad_nv.dist.mesh.layout import LayoutRules, Placement, check_layout, placement
from tinygrad_nv.dist.mesh.steps import Steps
from tinygrad_nv.errors import DistError
from tinygrad_nv.runtime.observe.memory_report import human
from tinygrad_nv.table import align_columns

Dims = Sequence[str]
_entered: list[Mesh] = []


def mesh(devices: Sequence[str] | World | None = None, *, axes: Mapping[str, int],
         layout: LayoutRules | None = None) -> Mesh:
    """A mesh. Raises `DistError` for axes that do not make as many devices, and layouts that cannot be."""
    return Mesh(world() if devices is None else devices, axes, layout or {})


def current() -> Mesh:
    """The mesh of the `with` around. Raises `DistError` where there is none."""
    if not _entered: raise DistError("no mesh", "a `with mesh(…):` around the call")
    return _entered[-1]


def pmap(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`Mesh.pmap` of the current mesh."""
    return current().pmap(fn, **options)


class Mesh(Steps):
    """Devices with named axes."""

    def __init__(self, devices: Sequence[str] | World, axes: Mapping[str, int], layout: LayoutRules) -> None:
        self.axes = dict(axes)
        self.world = devices if isinstance(devices, World) else None
        self.devices = () if isinstance(devices, World) else tuple(devices)
        self.size = devices.size if isinstance(devices, World) else len(self.devices)
        if not axes or any(size < 1 for size in axes.values()) or prod(axes.values()) != self.size:
            raise DistError(f"a mesh of {' x '.join(f'{axis}={size}' for axis, size in axes.items())}",
                            f"axes whose extents make {self.size}, the number of "
                            f"{'ranks' if self.world else 'devices'}")
        self.rules = check_layout(layout, self.axes)
        self.placements: dict[str, Placement] = {}
        self.steps: dict[str, list[Collective]] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        if self.world is not None:
            for axis in self.axes: self.group(axis)

    def __enter__(self) -> Mesh:
        _entered.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        _entered.pop()

    @property
    def rank(self) -> int:
        """Rank of this process; of one process with several devices 0."""
        return 0 if self.world is None else self.world.rank

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Returns where a rank, this one by default, is on each axis."""
        left, made = self.rank if rank is None else rank, {}
        for axis, size in reversed(self.axes.items()): left, made[axis] = divmod(left, size)
        return {axis: made[axis] for axis in self.axes}

    def group(self, *axes: str) -> Group:
        """The ranks that differ from this one in these axes alone, in order. Raises `DistError`."""
        for axis in axes:
            if axis not in self.axes: raise DistError(f"axis {axis}", f"one of {', '.join(self.axes)}")
        if self.world is None:
            raise DistError("a group of devices of one process", "ranks, one a device",
                            "start the program with torchrun or mpiexec, and leave out `devices`")
        key = tuple(axis for axis in self.axes if axis in axes)
        if key not in self._groups:
            own, same = self.coordinates(), [axis for axis in self.axes if axis not in key]
            members = [r for r in range(self.size)
                       if all(self.coordinates(r)[axis] == own[axis] for axis in same)]
            self._groups[key] = self.world.group(members)
        return self._groups[key]

    def place(self, x: Tensor, dims: Dims, name: str = "") -> Tensor:
        """Returns this rank's part of x, which has to be whole; over devices of one process, x over all of
        them. Raises `DistError`."""
        found = self.placement(x, dims, name)
        if self.world is None: return self._over_devices(x, found)
        own = x
        for dim, axes in enumerate(found.cuts):
            if axes: own = part(own, dim, self.group(*axes).rank, found.ways[dim])
        return own.contiguous() if own is not x else x

    def placement(self, x: Tensor, dims: Dims, name: str = "") -> Placement:
        """Returns where x is, by the layout; kept under its name. Raises `DistError`."""
        shape = tuple(int(extent) for extent in x.shape)
        found = placement(name, shape, x.dtype, dims, self.rules, self.axes)
        if name: self.placements[name] = found
        return found

    def gather(self, own: Tensor, like: Placement) -> Tensor:
        """The whole tensor, of the parts that ranks have."""
        for dim, axes in enumerate(like.cuts):
            if axes and self.world is not None: own = all_gather(own, self.group(*axes), dim, like.name)
        return own

    def pmap(self, fn: Callable[..., Any], *, inputs: Sequence[Dims | None] | None = None,
             output: Dims | None = None, donate: Sequence[int] = (), name: str = "") -> Callable[..., Any]:
        """fn on every device, on its parts of the arguments: one captured step. Arguments with `inputs`,
        names of their dimensions, are whole and are placed; others are parts already. With `output` the
        result is gathered, by the names of its dimensions. Arguments in `donate` are written over with
        results of their shape and dtype, in order: what comes back is the argument."""
        step = name or getattr(fn, "__name__", "step")

        def run_parts(*parts: Tensor) -> Any:
            made = fn(*parts)
            results = [made] if isinstance(made, Tensor) else list(made)
            if output is not None: results = [self._whole(each, output, step) for each in results]
            self.steps[step] = collectives_of(*results)
            for number in donate: _donate(parts[number], results, f"argument {number} of {step}")
            Tensor.realize(*results)
            return results[0] if isinstance(made, Tensor) else type(made)(results)
        captured = TinyJit(run_parts)

        def call(*given: Tensor) -> Any:
            dims = inputs if inputs is not None else [None] * len(given)
            return captured(*(each if own is None else self.place(each, own).realize()
                              for each, own in zip(given, dims, strict=True)))
        return call

    def describe(self) -> str:
        """Returns a table: which tensor is where, bytes a device, collectives a step."""
        return describe(self.axes, self.coordinates() if self.world else None, self.placements, self.steps)

    def _whole(self, own: Tensor, dims: Dims, step: str) -> Tensor:
        """A result, gathered: its whole shape follows from that of the part."""
        ways = [prod(self.axes[axis] for axis in self.rules.get(dim, ())) for dim in dims]
        shape = tuple(int(extent) * n for extent, n in zip(own.shape, ways, strict=True))
        found = placement(f"result of {step}", shape, own.dtype, dims, self.rules, self.axes)
        return self.gather(own, found)

    def _over_devices(self, x: Tensor, found: Placement) -> Tensor:
        cut = [dim for dim, axes in enumerate(found.cuts) if axes]
        if len(cut) > 1 or (cut and found.ways[cut[0]] != self.size):
            raise DistError(f"{found.name or 'a tensor'} of shape {found.shape}, cut by "
                            f"{', '.join(axis for axes in found.cuts for axis in axes)} over devices of one "
                            "process", "one dimension, over all devices", "start one rank a device")
        return x.shard(self.devices, cut[0] if cut else None)


def _donate(argument: Tensor, results: list[Tensor], what: str) -> None:
    """Puts a result into an argument's memory."""
    for i, each in enumerate(results):
        if each.shape == argument.shape and each.dtype == argument.dtype and each is not argument:
            results[i] = argument.assign(each)
            return
    raise DistError(f"{what} is donated, {argument.dtype.name} {argument.shape}",
                    "a result of its shape and dtype, which takes its memory")


def collectives_of(*tensors: Tensor) -> list[Collective]:
    """The collectives that these tensors depend on and that have not run yet, each once."""
    sink = UOp.sink(*(each.uop for each in tensors))
    named = (node.arg.aux for node in sink.toposort(enter_calls=False) if node.op is Ops.FUNCTION)
    return [_on_cpu(each) for each in named if isinstance(each, Collective | DeviceCollective | ReduceNorm)]


def _on_cpu(what: Collective | DeviceCollective | ReduceNorm) -> Collective:
    """A collective of a GPU as that of a CPU is written."""
    if isinstance(what, Collective): return what
    group, order = (what.group, what.order) if isinstance(what, ReduceNorm) else \
        (what.call.group, what.call.order)
    return Collective(order.kind, what.shape, what.dtype, 2 * order.nbytes, what.name,
                      group.partition("/")[0])


def describe(axes: Mapping[str, int], place: Mapping[str, int] | None, placements: Mapping[str, Placement],
              steps: Mapping[str, Sequence[Collective]]) -> str:
    """Returns a mesh as text: which tensor is where, bytes a device, collectives a step. `place` is where
    this rank is on each axis."""
    head = f"mesh {' x '.join(f'{axis}={size}' for axis, size in axes.items())}"
    if place is not None: head += f"; this rank: {', '.join(f'{axis} {at}' for axis, at in place.items())}"
    lines = [head]
    if placements:
        rows = [("tensor", "dtype", "whole", "a device", "cut", "bytes a device"),
                *(_row(each) for each in placements.values()),
                ("all", "", "", "", "", human(sum(each.local_bytes for each in placements.values())))]
        lines += ["", *align_columns(rows, numbers=(5,))]
    for step, collectives in steps.items():
        lines += ["", f"collectives of {step}: {len(collectives)}"]
        if not collectives: continue
        lines += align_columns([("kind", "ranks", "calls", "bytes of results"), *_kinds(collectives)],
                         numbers=(2, 3))
    return "\n".join(lines)


def _row(one: Placement) -> tuple[str, ...]:
    cut = [f"{dim} by {' x '.join(axes)}" for dim, axes in zip(one.dims, one.cuts, strict=True) if axes]
    return (one.name, one.dtype.name, _shape(one.shape), _shape(one.local_shape),
            ", ".join(cut) or "replicated", human(one.local_bytes))


def _kinds(collectives: Sequence[Collective]) -> list[tuple[str, ...]]:
    """A row for each kind and group: its calls, and what this rank has of them."""
    made: dict[tuple[str, str], list[int]] = {}
    for each in collectives:
        made.setdefault((each.kind, each.ranks), []).append(prod(each.shape) * each.dtype.itemsize)
    return [(kind, ranks, str(len(found)), human(sum(found))) for (kind, ranks), found in made.items()]


def _shape(shape: Sequence[int]) -> str: return "x".join(map(str, shape)) or "scalar"
