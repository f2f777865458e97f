"""Tensors over a mesh of the devices of one process: several axes of a tensor, each along an axis of the
mesh.

Protocol. `shard(x, devices, mesh, axes)` lays a tensor out: device d has the coordinates of d in `mesh`, in
row-major order, and `axes` says which axis of the tensor is cut along which axis of the mesh; along the rest
of the mesh it is the same on all devices. In tinygrad that is an UNSHARD whose ranges are computed from the
number of the device. tinygrad resolves operations whose operands all have the same layout; RULES come before
its own and resolve the others, where at least one operand has such a layout:

  ALU      operands cut along different axes need no data of each other: the result is cut along all of them
  REDUCE   over a part of the mesh: devices that differ in the reduced coordinates add up, in groups
  COPY     to one device one copy of each part; to all devices the parts are added up in groups
  STORE    of a value into storage that is cut in another way

Coordinates decide which devices are in a group (`groups`). Where two operands are cut along different axes by
the same coordinate, the later one is gathered along its axis, and stays cut along its others.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from tinygrad import Device, Tensor
from tinygrad.schedule.multi import _shard_idx
from tinygrad.uop.ops import AxisType, GroupOp, Ops, PatternMatcher, UOp, UPat, _broadcast_shape

from tinygrad_nv import hooks
from tinygrad_nv.dist.collectives.sharded import Groups, can_reduce, reduce_sharded
from tinygrad_nv.errors import DistError
from tinygrad_nv.hooks.layouts import is_mesh

Sharding = tuple[tuple[int, UOp], ...]  # axes of a tensor, each with the range that cuts it


def shard(x: Tensor, devices: Sequence[str], mesh: Sequence[int], axes: Mapping[int, int]) -> Tensor:
    """x on all devices, its axes cut as `axes` says: {axis of x: axis of the mesh}. Raises `DistError`."""
    names, count = tuple(Device.canonicalize(each) for each in devices), prod(mesh)
    if count != len(names) or len(set(names)) != len(names):
        raise DistError(f"a mesh of {' x '.join(map(str, mesh))} over {len(names)} devices",
                        "as many different devices as the mesh has places")
    if len(set(axes.values())) != len(axes):
        raise DistError(f"axes {dict(axes)}", "for each axis of the tensor another one of the mesh")
    for axis, along in axes.items():
        if not 0 <= axis < x.ndim or not 0 <= along < len(mesh):
            raise DistError(f"axis {axis} of shape {x.shape} along axis {along} of mesh {tuple(mesh)}",
                            "axes that there are")
        if x.shape[axis] % mesh[along]:
            raise DistError(f"axis {axis} of shape {x.shape} over {mesh[along]} devices",
                            f"an extent that {mesh[along]} divides", "pad it")
    made, number = x.uop.copy_to_device(names), UOp.range(count, -1, AxisType.DEVICE)
    cut = {axis: _coordinate(number, mesh, along) for axis, along in axes.items() if mesh[along] > 1}
    for axis, rng in cut.items(): made = made._shard(axis, rng)
    if not cut: return Tensor(made)
    if not hooks.has_shard_rules("mesh"): hooks.add_shard_rules("mesh", RULES)
    return Tensor(made.unshard(tuple(cut), tuple(cut.values())))


def _coordinate(number: UOp, mesh: Sequence[int], along: int) -> UOp:
    """Returns where a device stands along an axis of the mesh."""
    stride, extent = prod(mesh[along + 1:]), mesh[along]
    return ((number // stride if stride > 1 else number) % extent if along else number // stride).simplify()


def groups(count: int, over: Sequence[UOp], apart: Sequence[UOp]) -> Groups:
    """Devices that reduce together: in each group every value of the ranges `over` once, and one value of
    those `apart`. Devices that have the same of both are copies: each is in a group of its own."""
    made: dict[tuple[tuple[int, ...], int], list[int]] = {}
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for device in range(count):
        mine, theirs = (tuple(_shard_idx(rng, device) for rng in ranges) for ranges in (over, apart))
        copy = seen[mine, theirs] = seen.get((mine, theirs), -1) + 1
        made.setdefault((theirs, copy), []).append(device)
    return tuple(tuple(group) for group in made.values())


# **** rules ****

def _has_mesh(*nodes: UOp) -> bool: return any(map(is_mesh, nodes))


def _fits(sharding: Sharding, count: int) -> bool:
    """Whether no coordinate is on two axes: each combination of parts is on some device."""
    values = {tuple(_shard_idx(rng, device) for _, rng in sharding) for device in range(count)}
    return len(values) == prod(int(rng.vmax) + 1 for _, rng in sharding)


def _alu(root: UOp) -> UOp | None:
    if not _has_mesh(*root.src): return None
    devices = next(each.device for each in root.src if each.op is Ops.UNSHARD)
    assert devices is not None
    shape, sharding = _broadcast_shape(*(each.shape for each in root.src)), dict[int, UOp]()
    sources = list(root.src)
    for i, each in enumerate(sources):
        if each.op is not Ops.UNSHARD: continue
        stays = set()
        for axis, rng in each.sharding:
            joined = {**sharding, (at := axis + len(shape) - len(each.shape)): rng}
            if sharding.get(at, rng) is rng and _fits(tuple(joined.items()), len(devices)):
                sharding = joined
                stays.add(axis)
        sources[i] = _join(each, stays)
    parts = [_part(each, shape, sharding) for each in sources]
    return _cut(parts[0].alu(root.op, *parts[1:]), sharding)


def _join(multi: UOp, stays: Collection[int] = ()) -> UOp:
    """A tensor that is cut along these of its axes alone, on the same devices: the others are gathered."""
    kept = {axis: rng for axis, rng in multi.sharding if axis in stays}
    if len(kept) == len(multi.sharding): return multi
    local, over = multi.src[0], []
    for axis, rng in multi.sharding:
        if axis in stays: continue
        size, parts = local.shape[axis], int(rng.vmax) + 1
        local = local.pad(tuple((size * rng, size * parts - size - size * rng) if at == axis else (0, 0)
                                for at in range(len(local.shape))))
        over.append(rng)
    return _cut(_together(local, Ops.ADD, over, tuple(kept.values())), kept)


def _part(x: UOp, shape: tuple[int, ...], sharding: Mapping[int, UOp]) -> UOp:
    """Returns what a device has of an operand that is broadcast to `shape`, which is cut so."""
    own = dict(x.sharding)
    local = x.src[0] if x.op is Ops.UNSHARD else x
    for axis, rng in sharding.items():
        at = axis - (len(shape) - len(x.shape))
        if at >= 0 and at not in own and x.shape[at] != 1: local = local._shard(at, rng)
    return local


def _cut(x: UOp, sharding: Mapping[int, UOp]) -> UOp:
    return x.unshard(tuple(sharding), tuple(sharding.values())) if sharding else x


def _reduce(root: UOp, multi: UOp) -> UOp | None:
    op, leading = root.arg
    over = [rng for axis, rng in multi.sharding if axis < leading]
    if not _has_mesh(multi) or not over: return None
    left = {axis - leading: rng for axis, rng in multi.sharding if axis >= leading}
    local = multi.src[0]._rop(op, tuple(range(leading)))
    return _cut(_together(local, op, over, tuple(left.values())), left)


def _together(x: UOp, op: Ops, over: Sequence[UOp], apart: Sequence[UOp]) -> UOp:
    if not can_reduce(x, op):
        raise DistError(f"{op.name} of {x.dtype.name} over a part of the devices {x.device}",
                        "a sum or a maximum of a dtype that NCCL has", "cast before, and back after")
    return reduce_sharded(x, op, groups(len(x.device or ()), over, apart))


def _gather(multi: UOp, device: str) -> UOp:
    """All of a tensor on one device."""
    sharding, count = multi.sharding, len(multi.device or ())
    where = {tuple(_shard_idx(rng, number) for _, rng in sharding): number
             for number in reversed(range(count))}

    def parts(*begun: int) -> UOp:
        """Returns the parts whose first coordinates are these, one after another along the axes of the
        others."""
        if len(begun) == len(sharding): return multi.src[0].mselect(where[begun]).copy_to_device(device)
        axis, rng = sharding[len(begun)]
        first, *others = (parts(*begun, i) for i in range(int(rng.vmax) + 1))
        return first.cat(*others, dim=axis)
    return parts()


def _copy(copy: UOp, multi: UOp) -> UOp | None:
    if not _has_mesh(multi): return None
    if copy.arg == multi.device: return _join(multi)
    if isinstance(copy.arg, str): return _gather(multi, copy.arg)
    return _gather(multi, copy.arg[0]).copy_to_device(copy.arg)


def _store_after(dest: UOp, src: UOp) -> UOp | None:
    """Into storage that is cut: the value is cut in the same way."""
    if not _has_mesh(dest, src): return None
    local, sharding = dest.src[0], dict(dest.sharding)
    stays = [axis for axis, rng in src.sharding if sharding.get(axis) is rng]
    return _cut(local.after(local.store(_part(_join(src, stays), dest.shape, sharding))), sharding)


def _store(dest: UOp, multi: UOp) -> UOp | None:
    """Into storage that is the whole on every device."""
    return dest.store(_join(multi)) if _has_mesh(multi) and dest.op is not Ops.UNSHARD else None


_MULTI = UPat(Ops.UNSHARD, name="multi")
RULES = PatternMatcher([
    (UPat(GroupOp.ALU, name="root", custom_early_reject={Ops.UNSHARD}), _alu),
    (UPat(Ops.REDUCE, src=(_MULTI,), name="root"), _reduce),
    (UPat(Ops.COPY, src=(_MULTI,), name="copy"), _copy),
    (UPat(Ops.AFTER, src=(UPat(Ops.UNSHARD), UPat(Ops.STORE, src=(UPat(Ops.UNSHARD, name="dest"),
                                                                  UPat.var("src"))))), _store_after),
    (UPat(Ops.STORE, src=(UPat.var("dest"), _MULTI)), _store),
])
