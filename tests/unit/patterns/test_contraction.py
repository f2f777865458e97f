"""Index space and contractions, on graphs alone: nothing runs."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv import Context, Tensor, Variable, dtypes, explain
from tinygrad_nv.patterns.contraction import Dim, is_exact, merge_dims, product
from tinygrad_nv.patterns.epilogue import ends, number, usable
from tinygrad_nv.patterns.index import Affine, NotAffine, Space
from tinygrad_nv.patterns.rewriting import rebuilt
from tinygrad_nv.tile.gemm.spec import GemmSpec


@pytest.fixture(autouse=True)
def emu() -> Iterator[None]:
    with Context(DEV="EMU"): yield


def of(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtypes.bfloat16)


def pushed(space: Space, node: UOp, indices: tuple[Affine, ...]) -> Affine:
    """The element of a view's storage."""
    while node.op in GroupOp.Movement: node, indices = node.src[0], space.through(node, indices)
    return space.lies(node.shape, indices)


def elements(space: Space, shape: tuple[int, ...], index: Affine, at: tuple[Affine, ...]) -> np.ndarray:
    """What an index is for each element of a tensor of `shape`, whose own indices are `at`."""
    leaves = [r for r in range(len(space.extents)) if r not in space.divided]
    count = int(np.prod([space.extents[r] for r in leaves]))
    grid = np.indices([space.extents[r] for r in leaves]).reshape(len(leaves), count)
    def value(one: Affine) -> np.ndarray:
        one = space.resolve(one)
        total = np.full(count, one.offset)
        for i, r in enumerate(leaves): total = total + grid[i] * one.strides.get(r, 0)
        return total
    made = np.full(shape, -1)
    made[tuple(value(one) for one in at)] = value(index)
    return made


# **** index space ****

def both(move: Callable) -> tuple[Callable, Callable]: return move, move


def divided(*shape: int) -> tuple[Callable, Callable]:
    """A reshape where the size allows it."""
    known = np.prod([n for n in shape if n > 0])
    def move(x):
        return x.reshape(shape) if np.prod(x.shape) % known == 0 else x
    return both(move)


MOVES: dict[str, tuple[Callable, Callable]] = {
    "transpose": (lambda x: x.transpose(0, -1), lambda x: x.swapaxes(0, -1)),
    "flatten": both(lambda x: x.reshape(-1)), "halve": divided(-1, 2), "three": divided(3, -1),
    "four": divided(2, -1, 2), "first": both(lambda x: x[:1]), "flip": both(lambda x: x[::-1]),
    "cut": both(lambda x: x[1:] if x.shape[0] > 1 else x), "one": both(lambda x: x.reshape(*x.shape, 1)),
    "again": (lambda x: x.unsqueeze(0).expand(2, *x.shape), lambda x: np.broadcast_to(x, (2, *x.shape))),
    "pad and cut": (lambda x: x.pad(((1, 1), *[(0, 0)] * (x.ndim - 1)))[1:-1], lambda x: x),
}
SHAPES = [(4, 6), (12,), (2, 3, 4), (5, 7), (8, 9)]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SHAPES), st.lists(st.sampled_from(sorted(MOVES)), max_size=6))
def test_views_lie_where_numpy_finds_them(shape: tuple[int, ...], moves: list[str]):
    x, wanted = Tensor.empty(*shape, device="EMU"), np.arange(np.prod(shape)).reshape(shape)
    for ours, theirs in map(MOVES.__getitem__, moves): x, wanted = ours(x), theirs(wanted)
    space = Space()
    at = space.ranges(x.shape)
    try: index = pushed(space, x.uop, at)
    except NotAffine: return
    np.testing.assert_array_equal(elements(space, x.shape, index, at), wanted)


@pytest.mark.parametrize("moves", [
    ("transpose", "flatten"),              # a matrix by columns has no one stride
    ("again", "flatten", "three"),         # 6 elements twice, in rows of 4
])
def test_views_without_strides(moves: tuple[str, ...]):
    x = Tensor.empty(4, 6) if len(moves) == 2 else Tensor.empty(6)
    for move in moves: x = MOVES[move][0](x)
    space = Space()
    at = space.ranges(x.shape)
    if len(moves) == 2:  # dividing the range does it
        assert pushed(space, x.uop, at).strides == {1: 1, 2: 6}
        assert space.extents == [24, 6, 4]
    else:
        with pytest.raises(NotAffine): pushed(space, x.uop, at)


def test_a_piece_of_two_rows_has_no_strides():
    """Four elements of a matrix by columns, the last of them in its second row."""
    x = Tensor.empty(4, 2).transpose(0, 1).reshape(-1)[1:5]
    space = Space()
    with pytest.raises(NotAffine, match="no strides"): pushed(space, x.uop, space.ranges(x.shape))


@pytest.mark.parametrize("amounts", [(1, 0), (0, 1)])
def test_padding_that_is_read_has_no_index(amounts: tuple[int, int]):
    space, x = Space(), Tensor.empty(4, 6).pad((amounts, (0, 0)))
    with pytest.raises(NotAffine, match="padding"): pushed(space, x.uop, space.ranges(x.shape))


def test_windows_have_indices_that_are_sums():
    """A convolution reads x[i + j]: the strides of the two ranges are the same."""
    x = Tensor.empty(1, 1, 8)._pool((3,))
    space = Space()
    index = pushed(space, x.uop, space.ranges(x.shape))
    assert sorted(index.strides.values()) == [1, 1]


def test_symbolic_extents_keep_the_largest_in_storage():
    n = Variable("n", 1, 8).bind(3)
    x = Tensor.empty(2, 8, 16)[:, :n].transpose(1, 2)
    space = Space()
    assert sorted(pushed(space, x.uop, space.ranges(x.shape)).strides.values()) == [1, 16, 128]


# **** dimensions ****

def test_dimensions_that_lie_as_one():
    assert merge_dims([Dim(4, (12, 0)), Dim(3, (4, 0)), Dim(4, (1, 0))], (0,)) == [Dim(48, (1, 0))]
    assert merge_dims([Dim(4, (1, 0)), Dim(3, (4, 0))], (0,)) == [Dim(12, (1, 0))]
    apart = [Dim(3, (5, 4)), Dim(4, (1, 1))]
    assert merge_dims(apart, (0,)) == apart
    assert merge_dims([Dim(3, (4, 1)), Dim(4, (1, 3))], (0,)) == [Dim(3, (4, 1)), Dim(4, (1, 3))]


# **** products and regions ****

def graph(*tensors: Tensor) -> tuple[list[UOp], dict[UOp, list[UOp]]]:
    nodes = list(UOp.sink(*(t.uop for t in tensors)).toposort())
    users: dict[UOp, list[UOp]] = {node: [] for node in nodes}
    for node in nodes:
        for one in dict.fromkeys(node.src): users[one].append(node)
    return nodes, users


def closed(*tensors: Tensor) -> list[UOp]:
    """The ends of the region after the first sum."""
    nodes, users = graph(*tensors)
    root = next(node for node in nodes if node.op is Ops.REDUCE)
    place = {node: i for i, node in enumerate(nodes)}
    return [end for end, _ in usable(ends(root, users, place, lambda node: False), users)]


def test_products_are_recognised():
    def found(x: Tensor) -> bool:
        return any(product(node) is not None for node in x.uop.toposort() if node.op is Ops.REDUCE)
    a, b = of(8, 16), of(16, 4)
    assert found(a @ b)
    assert found((a.float().reshape(8, 16, 1) * b).sum(1))
    for x in (a.sum(1), a.square().sum(1), (a * 2).sum(1), a.max(1), (a + b.T[:1]).sum(1)):
        assert not found(x)


def test_regions_end_where_their_values_are_used_outside():
    y = of(8, 16) @ of(16, 4)
    assert closed(y.relu())[0] is y.relu().uop
    both = y.relu() + y.sum(0)
    assert closed(both)[0] is y.uop
    diamond = y * y.sigmoid()
    assert closed(diamond)[0] is diamond.uop


def test_widening_casts_and_views_are_left_to_the_reader():
    y = of(8, 16) @ of(16, 4)
    assert closed(y.float().T)[0] is y.uop
    assert closed(y.T.contiguous())[0] is y.T.uop


def test_weak_constants_are_numbers():
    half = UOp.const(4.0).reciprocal() * UOp.const(2)
    assert number(half) == 0.5
    assert number(of(2).uop) is None


def test_casts_that_lose_nothing():
    assert is_exact(dtypes.bfloat16, dtypes.float32)
    assert is_exact(dtypes.int8, dtypes.int32)
    assert not is_exact(dtypes.float32, dtypes.bfloat16)
    assert not is_exact(dtypes.bfloat16, dtypes.half)


# **** graphs ****

def test_a_graph_is_built_anew_over_what_changed():
    a, b = of(8, 16), of(8, 16)
    x, kept = (a + 1) * 2, b + 1
    sink = UOp.sink(x.uop, kept.uop)
    inner = (a + 1).uop
    made = rebuilt(sink.toposort(), lambda node, new: b.uop if node is inner else None)
    assert made.src[0] is (b * 2).uop
    assert made.src[1] is kept.uop
    assert made.src[0].shape == (8, 16)


def test_what_explain_tells_of_a_product():
    (kernel,) = explain(of(24, 48) @ of(48, 40)).kernels
    assert isinstance(kernel.spec, GemmSpec)
    assert kernel.reason.startswith("24x40x48 bf16 NN → bf16: ")
    assert kernel.flops == 2 * 24 * 40 * 48
    assert kernel.bytes == 2 * (24 * 48 + 48 * 40 + 24 * 40)
