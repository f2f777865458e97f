"""A rank of test_collectives.py: meshes of ranks, against one device. Integers: results are exact."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor

from tests.support.dist.train_program import close, integers, normal, same
from tinygrad_nv.dist.collectives.functions import shift
from tinygrad_nv.dist.group import Group, World, init
from tinygrad_nv.dist.mesh import Mesh, mesh, pmap
from tinygrad_nv.errors import DistError

LAYOUT = {"batch": "shard", "d_ff": "shard", "params.norm": "replicate"}


def mapped(m: Mesh) -> None:
    """A captured step over both axes, its description, and an argument that is written over."""
    x, up, down = integers(0, 8, 6), integers(1, 6, 12), integers(2, 12, 6)
    a = m.place(Tensor(up), ("d_model", "d_ff"), "params.up").realize()
    b = m.place(Tensor(down), ("d_ff", "d_model"), "params.down").realize()
    half = m.map(lambda x: (x @ a).relu() @ b) >> m.all_reduce("tp")
    assert half.name == "<lambda> >> all_reduce over tp"
    run = m.pmap(half, inputs=[("batch", "d_model")], output=("batch", "d_model"), name="half")
    for i in range(3): same(run(Tensor(x + i)).numpy(), np.maximum((x + i) @ up, 0) @ down, "mapped")
    state, wanted = m.place(Tensor(x), ("batch", "d_model"), "state").realize(), x
    buffer = state.uop.base.buffer
    double = pmap(lambda each: each * 2 + 1, donate=(0,), name="double")
    for _ in range(3):
        assert double(state) is state
        wanted = wanted * 2 + 1
    assert state.uop.base.buffer is buffer, "the result has the argument's memory"
    rows = 8 // m.axes["dp"]
    same(state.numpy(), wanted[m.coordinates()["dp"] * rows:][:rows], "donated")
    told = [line.split() for line in m.describe().splitlines()]
    assert ["params.up", "float", "6x12", f"6x{12 // m.axes['tp']}", "d_ff", "by", "tp"] in [
        line[:7] for line in told], told
    assert ["all_gather", m.group("dp").name, "1", "192", "B"] in told, told
    assert (["all_reduce", m.group("tp").name, "1", f"{rows * 24}", "B"] in told) == (m.axes["tp"] > 1), told
    with pytest.raises(DistError, match="argument 0 of short is donated"):
        pmap(lambda each: each[:1], donate=(0,), name="short")(state)


def by_axis(m: Mesh, world: World) -> None:
    """reduce, scan, gathers and shifts by axis, with gradients."""
    n, both = world.size, ("dp", "tp")
    each = [integers(r, 2 * n, 3) for r in range(n)]
    x, weight = Tensor(each[world.rank]).realize(), Tensor(integers(50, 2 * n, 3)).realize()
    wanted = each[0]
    for one in each[1:]: wanted = wanted * 2 + one
    same(m.reduce(lambda a, b: a * 2 + b, both)(x).numpy(), wanted, "reduce")
    same(m.reduce("max", both)(x).numpy(), np.maximum.reduce(each), "max")
    # an associative function that does not commute: pairs of (scale, offset)
    pairs = [np.stack([one + 2, one]) for one in each]
    def then(a: Tensor, b: Tensor) -> Tensor: return Tensor.stack(a[0] * b[0], a[1] * b[0] + b[1])
    scale, offset = pairs[0]
    for one in pairs[1:world.rank + 1]: scale, offset = scale * one[0], offset * one[0] + one[1]
    same(m.scan(then, both)(Tensor(pairs[world.rank])).numpy(), np.stack([scale, offset]), "scan")
    same(m.all_gather(both, 1)(x).numpy(), np.concatenate(each, 1), "all_gather")
    same(m.reduce_scatter(both)(x).numpy(), np.sum(each, 0)[2 * world.rank:2 * world.rank + 2],
         "reduce_scatter")
    same(m.all_to_all(both, 0, 1)(x).numpy(), np.concatenate(
        [one[2 * world.rank:2 * world.rank + 2] for one in each], 1), "all_to_all")
    for by in (1, -1, 2):
        x.grad = None
        y = m.shift(both, by)(x)
        (y * weight).sum().backward()
        same(y.numpy(), each[(world.rank - by) % n], ("shift", by))
        assert x.grad is not None
        same(x.grad.numpy(), weight.numpy(), ("gradient of shift", by))
    group = m.group(*both)
    large = Tensor(np.full(300_000, world.rank, np.float32))
    same(shift(large, group).numpy(), np.full(300_000, (world.rank - 1) % n, np.float32), "large")


def piped(m: Mesh, group: Group) -> None:
    """A stage a rank, two microbatches: result and gradients."""
    x, of = integers(0, 4, 4), integers(1, 4, 4)
    weights = [normal(2 + r, 4, 4) for r in range(group.size)]
    given, own = Tensor(x).realize(), Tensor(weights[group.rank]).realize()
    y = m.pipeline(lambda each: (each @ own).relu() + each, ("dp", "tp"), 2)(given)
    (y * Tensor(of)).sum().backward()
    one, parts = Tensor(x).realize(), [Tensor(each).realize() for each in weights]
    wanted = one
    for each in parts: wanted = (wanted @ each).relu() + wanted
    (wanted * Tensor(of)).sum().backward()
    close(y.numpy(), wanted.numpy(), wanted.numpy(), "pipeline", c=16)
    assert own.grad is not None
    exact = parts[group.rank].grad
    assert exact is not None
    close(own.grad.numpy(), exact.numpy(), exact.numpy(), "gradient of a stage", c=16)
    assert given.grad is not None
    assert one.grad is not None
    exact = one.grad if group.rank == 0 else one.grad * 0
    close(given.grad.numpy(), exact.numpy(), one.grad.numpy(), "gradient of the first stage's input", c=16)


def main() -> None:
    world = init()
    with mesh(axes={"dp": 2, "tp": world.size // 2}, layout=LAYOUT) as m:
        assert [m.coordinates(r) for r in (0, world.size - 1)] == [
            {"dp": 0, "tp": 0}, {"dp": 1, "tp": world.size // 2 - 1}]
        mapped(m)
        by_axis(m, world)
        piped(m, m.group("dp", "tp"))
    print(f"rank {world.rank} of {world.size}: meshes are right", flush=True)


if __name__ == "__main__": main()
