"""A mesh as text: which tensor is where, bytes a device, collectives a step."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from tinygrad_nv.dist.collectives.kernel import Collective
from tinygrad_nv.dist.mesh.layout import Placement
from tinygrad_nv.runtime.observe.memory_report import human
from tinygrad_nv.table import align_columns


def describe(axes: Mapping[str, int], place: Mapping[str, int] | None, placements: Mapping[str, Placement],
              steps: Mapping[str, Sequence[Collective]]) -> str:
    """The table. `place` is where this rank is on each axis."""
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
