"""Updates of many tensors, and sums of their squares, in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.optimizer.spec import CHUNK, HEAD, PER_GROUP, AdamWSpec, SquaresSpec
from tinygrad_nv.tile.reference import Argument, Given, Results, compute_dtype, dense, round_to


def arguments(spec: AdamWSpec | SquaresSpec) -> tuple[Argument, ...]:
    """Returns the arguments: of an update all x, m, v, masters, then gradients, and control; of squares sums,
    then tensors."""
    if isinstance(spec, SquaresSpec):
        return (Argument("sums", dtypes.float32, (dense(sum(spec.chunks)),), "out"),
                *(Argument(f"g{i}", spec.dtype, (dense(count),)) for i, count in enumerate(spec.counts)))
    made = [Argument(f"{name}{i}", dtype, (dense(count),), "in" if name == "g" else "inout")
            for name, dtype in spec.kinds for i, count in enumerate(spec.counts)]
    return *made, Argument("control", dtypes.float32, (dense(spec.control),))


def reference(spec: AdamWSpec | SquaresSpec, given: Given, exact: bool = False) -> Results:
    """Returns the tensors that are written, one by one, in the order of the arguments."""
    wide = compute_dtype(dtypes.float32, exact)
    held = {each.name: given[each.name] for each in arguments(spec) if each.role != "out"}  # all dense
    if isinstance(spec, SquaresSpec): return squares(spec, *(x.cast(wide) for x in held.values())),
    found = update(spec, *(x.cast(wide) for x in held.values()))
    if exact: return found
    kinds = [each.dtype for each in arguments(spec) if each.role != "in"]
    return tuple(round_to(x, kind) for x, kind in zip(found, kinds, strict=True))


def squares(spec: SquaresSpec, *tensors: Tensor) -> Tensor:
    """Sums of squares of chunks of tensors in float32 or float64."""
    made = []
    for x, count, chunks in zip(tensors, spec.counts, spec.chunks, strict=True):
        flat = x.reshape(-1).pad((0, chunks * CHUNK - count)) if chunks * CHUNK > count else x.reshape(-1)
        made.append(flat.reshape(chunks, CHUNK).square().sum(1))
    return made[0] if len(made) == 1 else made[0].cat(*made[1:])


def update(spec: AdamWSpec, *given: Tensor) -> tuple[Tensor, ...]:
    """x, m, v, and masters, of all tensors, given those, gradients and control, in float32 or float64. x of
    16 bits is its master, not rounded."""
    count, control = len(spec.counts), given[-1]
    lists = {name: given[i * count:(i + 1) * count] for i, (name, _) in enumerate(spec.kinds)}
    done: dict[str, list[Tensor]] = {name: [] for name in lists if name != "g"}
    go = control[0:1] != 0
    for i, group in enumerate(spec.groups):
        x, m, v, g = (lists[name][i] for name in ("w" if spec.master else "x", "m", "v", "g"))
        decay, step = (control[HEAD + PER_GROUP * group + j:][:1] for j in range(PER_GROUP))
        flat = go.expand(x.numel()).reshape(x.shape)
        g = g * control[1:2]
        new_m = m + (1 - spec.beta1) * (g - m)
        new_v = spec.beta2 * v + (1 - spec.beta2) * (g * g)
        new_x = x * decay - step * (new_m / (new_v.sqrt() * control[2:3] + spec.eps))
        kept = flat.where(new_x, x)
        done["m"].append(flat.where(new_m, m))
        done["v"].append(flat.where(new_v, v))
        done["x"].append(flat.where(new_x, lists["x"][i]) if spec.master else kept)
        if spec.master: done["w"].append(kept)
    return tuple(x for each in done.values() for x in each)
