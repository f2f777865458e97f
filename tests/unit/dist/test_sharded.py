"""Tensors over several devices of one process: reductions across them, and two axes in one tensor; what a
layout says of tensors, and layouts that cannot be."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv import Tensor, TinyJit, dtypes, hooks
from tinygrad_nv.dist.collectives import sharded, sharding
from tinygrad_nv.dist.collectives.sharding import groups, shard
from tinygrad_nv.dist.mesh import current, mesh
from tinygrad_nv.dist.mesh.layout import LayoutRules, check_layout, placement
from tinygrad_nv.errors import DistError

DEVICES = tuple(f"CPU:{i}" for i in range(4))
MESH = (2, 2)
numbers = np.random.default_rng(0)
X, W1, W2 = (numbers.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 16), (16, 12), (12, 4)))


def trained(x: Tensor, a: Tensor, b: Tensor) -> list[np.ndarray]:
    """The results and gradients of a network of two layers."""
    y = (x @ a).relu() @ b
    y.square().sum().backward()
    return [y.numpy(), a.grad.numpy(), b.grad.numpy()]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of the nodes that have run."""
    ran: list[str] = []

    def execute(ctx, call, ast):
        ran.append(ast.arg)
        return sharded.execute(ctx, call, ast)
    if hooks.has_custom_function(sharded.NAME): hooks.remove_custom_function(sharded.NAME)
    hooks.add_custom_function(sharded.NAME, execute, lambda call: ((0,), (1,)))
    yield ran
    hooks.remove_custom_function(sharded.NAME)


@pytest.mark.parametrize("axes", [pytest.param((0, None, None), id="data"),
                                  pytest.param((None, 1, 0), id="tensor", marks=pytest.mark.slow)])
def test_a_training_step_is_that_of_one_device(axes, calls):
    wanted = trained(*map(Tensor, (X, W1, W2)))
    found = trained(*(Tensor(each).shard(DEVICES, axis)
                      for each, axis in zip((X, W1, W2), axes, strict=True)))
    for each, other in zip(found, wanted, strict=True): np.testing.assert_array_equal(each, other)
    assert calls
    assert set(calls) == {"nv_allreduce:ADD:0,1,2,3"}


def test_16_bit_floats_are_rounded_once(calls):
    given = np.array([[256], [1], [1], [1]], np.float32)    # 256 + 1 is 256 in bfloat16
    total = Tensor(given).cast(dtypes.bfloat16).shard(DEVICES, 0).sum(0)
    assert total.float().numpy() == [260]                   # 259 rounds to even
    assert calls


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.int8, dtypes.int64, dtypes.float64, dtypes.bool], ids=str)
def test_the_largest_of_all_devices(dtype, calls):
    given = numbers.integers(0, 2, (4, 5))
    found = Tensor(given).cast(dtype).shard(DEVICES, 0).max(0)
    np.testing.assert_array_equal(found.cast(dtypes.int32).numpy(), given.max(0))
    assert calls == ["nv_allreduce:MAX:0,1,2,3"]


def test_inside_tinyjit(calls):
    @TinyJit
    def step(x: Tensor, w: Tensor) -> Tensor: return ((x @ w).sum(0) + 1).realize()
    w = Tensor(W1).shard(DEVICES).realize()
    for i in range(4):
        found = step(Tensor(X + i).shard(DEVICES, 0).realize(), w).numpy()
        np.testing.assert_array_equal(found, ((X + i) @ W1).sum(0) + 1)
    assert len(calls) == 4


@pytest.mark.slow
def test_disabled_it_is_tinygrads(calls):
    with hooks.disabled():
        assert Tensor(X).shard(DEVICES, 0).sum().item() == X.sum()
    assert not calls


@pytest.mark.slow
def test_what_no_collective_carries_is_tinygrads(calls):
    given = numbers.integers(1, 3, (4, 2))
    found = Tensor(given).shard(DEVICES, 0).prod(0)
    np.testing.assert_array_equal(found.numpy(), given.prod(0))
    assert not calls


# **** two axes ****

def test_groups():
    x = shard(Tensor(X), DEVICES, MESH, {0: 0, 1: 1})
    (_, first), (_, second) = x.uop.sharding
    assert groups(4, [first], [second]) == ((0, 2), (1, 3))
    assert groups(4, [second], [first]) == ((0, 1), (2, 3))
    assert groups(4, [first, second], []) == ((0, 1, 2, 3),)
    assert groups(4, [first], []) == ((0, 2), (1, 3)), "copies are not counted twice"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", [{0: 0, 1: 1}, {0: 1, 1: 0}, {0: 0}, {1: 1}, {}], ids=str)
def test_a_layout_and_back(axes):
    np.testing.assert_array_equal(shard(Tensor(X), DEVICES, MESH, axes).realize().numpy(), X)
    doubled = shard(Tensor(X), DEVICES, MESH, axes).realize() * 2
    np.testing.assert_array_equal(doubled.numpy(), 2 * X)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", [0, 1, None])
def test_reductions_of_two_axes(axis, calls):
    x = shard(Tensor(X), DEVICES, MESH, {0: 0, 1: 1})
    np.testing.assert_array_equal(x.sum(axis).numpy(), X.sum(axis))
    np.testing.assert_array_equal(x.max(axis).numpy(), X.max(axis))
    part = {0: "0,2|1,3", 1: "0,1|2,3", None: "0,1,2,3"}[axis]
    assert f"nv_allreduce:ADD:{part}" in calls


@pytest.mark.parametrize("axes", [
    pytest.param(({0: 0}, {1: 1}, {0: 1}), id="tensor", marks=pytest.mark.slow),
    pytest.param(({0: 0}, {0: 0, 1: 1}, {0: 1, 1: 0}), id="both"),
    pytest.param(({0: 1, 1: 0}, {1: 1}, {1: 0}), id="changed", marks=pytest.mark.slow)])
def test_a_training_step_over_two_axes(axes, calls):
    """Data and tensor parallel at once; weights cut along both; layouts that have to be changed."""
    wanted = trained(*map(Tensor, (X, W1, W2)))
    found = trained(*(shard(Tensor(each), DEVICES, MESH, axis).realize()
                      for each, axis in zip((X, W1, W2), axes, strict=True)))
    for each, other in zip(found, wanted, strict=True): np.testing.assert_array_equal(each, other)
    assert "nv_allreduce:ADD:0,1|2,3" in calls


@pytest.mark.slow
def test_two_axes_inside_tinyjit():
    weight = shard(Tensor(W1), DEVICES, MESH, {0: 0, 1: 1}).realize()

    @TinyJit
    def step(x: Tensor) -> Tensor: return (x @ weight).relu().sum(1).realize()
    for i in range(4):
        x = shard(Tensor(X + i), DEVICES, MESH, {0: 0}).realize()
        np.testing.assert_array_equal(step(x).numpy(), np.maximum((X + i) @ W1, 0).sum(1))


def test_its_memory_is_cut():
    weight = shard(Tensor(W1), DEVICES, MESH, {0: 0, 1: 1}).realize()
    assert [each.size for each in weight.uop.src[0].buffer.bufs] == [W1.size // 4] * 4
    weight.assign(weight + 1).realize()
    np.testing.assert_array_equal(weight.numpy(), W1 + 1)


def test_removed_it_is_tinygrads_assertion():
    shard(Tensor(X), DEVICES, MESH, {0: 0})
    hooks.remove_shard_rules("mesh")
    try:
        x = shard(Tensor(X), DEVICES, MESH, {0: 0, 1: 1})
        hooks.remove_shard_rules("mesh")
        with pytest.raises(RuntimeError, match="sharded on multiple axes"): x.sum(0).numpy()
    finally:
        if not hooks.has_shard_rules("mesh"): hooks.add_shard_rules("mesh", sharding.RULES)


@pytest.mark.parametrize(("mesh", "axes", "words"), [
    ((2, 3), {0: 0}, "a mesh of 2 x 3 over 4 devices"),
    (MESH, {0: 0, 1: 0}, "for each axis of the tensor another one of the mesh"),
    (MESH, {2: 0}, "axis 2 of shape"),
    ((4, 1), {1: 0}, "an extent that 4 divides"),
])
def test_layouts_that_cannot_be(mesh, axes, words):
    with pytest.raises(DistError, match=words): shard(Tensor(np.ones((4, 6))), DEVICES, mesh, axes)


# **** layouts of a mesh ****


SIZES = {"dp": 2, "tp": 4}
LAYOUT: LayoutRules = {"d_model": "shard", "batch": "shard", "params": "replicate",
                       "params.head": ("dp", "tp"), "rows": ("tp", "dp")}
RULES = check_layout(LAYOUT, SIZES)


def test_rules() -> None:
    assert RULES == {"d_model": ("tp",), "batch": ("dp",), "params": (), "params.head": ("dp", "tp"),
                     "rows": ("tp", "dp")}
    x = placement("x", (6, 5, 8), dtypes.float16, ("batch", "position", "d_model"), RULES, SIZES)
    assert (x.cuts, x.local_shape, x.local_bytes) == ((("dp",), (), ("tp",)), (3, 5, 2), 60)
    # a tensor's name goes before those of its dimensions, the longest prefix first
    norm = placement("params.norm", (8,), dtypes.float32, ("d_model",), RULES, SIZES)
    head = placement("params.head.weight", (16, 8), dtypes.float32, ("vocab", "d_model"), RULES, SIZES)
    assert (norm.local_shape, head.local_shape, head.ways) == ((8,), (2, 8), (8, 1))
    assert placement("paramsx", (8,), dtypes.float32, ("d_model",), RULES, SIZES).local_shape == (2,)
    assert placement("", (), dtypes.float32, (), RULES, SIZES).local_shape == ()


@pytest.mark.parametrize(("shape", "dims", "words"), [
    ((6, 10), ("batch", "d_model"), "q of shape (6, 10): axis tp of 4 cuts d_model of 10"),
    ((16, 8), ("rows", "d_model"), "q of shape (16, 8): axis tp cuts both rows and d_model"),
    ((9, 8), ("rows", "position"), "axis tp x dp of 8 cuts rows of 9"),
    ((6, 8), ("batch",), "q of shape (6, 8) with the dimensions batch")])
def test_tensors_that_cannot_be_cut(shape: tuple[int, ...], dims: tuple[str, ...], words: str) -> None:
    with pytest.raises(DistError) as error: placement("q", shape, dtypes.float32, dims, RULES, SIZES)
    assert words in str(error.value)


def test_layouts_of_a_mesh_that_cannot_be() -> None:
    with pytest.raises(DistError, match="layout of hidden: \"shard\", in a mesh of dp=2, tp=4"):
        check_layout({"hidden": "shard"}, SIZES)
    with pytest.raises(DistError, match=r"(?s)layout of experts: .shard.*of the axes ep.*experts.: .dp."):
        check_layout({"experts": "shard"}, SIZES)
    with pytest.raises(DistError, match="layout of batch: axis pp"): check_layout({"batch": "pp"}, SIZES)
    with pytest.raises(DistError, match="a mesh of dp=3"): mesh(axes={"dp": 3})
    with pytest.raises(DistError, match="no mesh"): current()


def test_devices_of_one_process() -> None:
    devices = ("CPU:0", "CPU:1")
    with mesh(devices, axes={"dp": 2}, layout={"batch": "shard"}) as m:
        x = np.arange(12, dtype=np.float32).reshape(4, 3)
        placed = m.place(Tensor(x), ("batch", "d_model"), "x")
        assert placed.device == ("CPU", "CPU:1")
        assert placed.uop.axis == 0
        assert np.array_equal((placed * 2).sum(0).to("CPU").numpy(), x.sum(0) * 2)
        assert m.place(Tensor(x), ("position", "d_model"), "w").uop.axis is None
        assert [line.split() for line in m.describe().splitlines()[2:]] == [
            ["tensor", "dtype", "whole", "a", "device", "cut", "bytes", "a", "device"],
            ["x", "float", "4x3", "2x3", "batch", "by", "dp", "24", "B"],
            ["w", "float", "4x3", "4x3", "replicated", "48", "B"], ["all", "72", "B"]]
        with pytest.raises(DistError, match="a group of devices of one process"): m.group("dp")
        assert current() is m
    with mesh(devices, axes={"dp": 1, "tp": 2}, layout={"a": "dp", "b": "tp"}) as m, pytest.raises(
            DistError, match=r"q of shape .2, 2., cut by dp, tp over devices of one process"):
        m.place(Tensor(x[:2, :2]), ("a", "b"), "q")
