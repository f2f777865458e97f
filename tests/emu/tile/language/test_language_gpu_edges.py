"""Programs at the edges of what the compiler assumes, on the emulated GPU and on this CPU: what threads leave
out, loops that end behind their condition, tiles with padding, names."""
from __future__ import annotations

from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tests.support.tile.language_gpu_case import checked, program, ref
from tinygrad_nv import tile
from tinygrad_nv.cpu.target import host
from tinygrad_nv.language import KTile, OTile, kernel
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.language.gpu import build
from tinygrad_nv.tile.language.ir import TensorParameter
from tinygrad_nv.tile.language.names import bf16, f32, int32
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.router.spec import GroupRowsSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16, S32 = dtypes.float32, dtypes.bfloat16, dtypes.int32
RANDOM = np.random.default_rng(5)


def rare(x, z, out, wide):
    v = x[:]
    out[:] = tile.where_needed(z[:] > 1.0, lambda: tile.exp(v) * 2.0, v)
    wide[:] = tile.cast(v, f32) * 3.0


def test_what_a_branch_converts_is_not_used_outside() -> None:
    made = program(rare, [ref("out", BF16, 256, out=True), ref("wide", F32, 256, out=True),
                          ref("x", BF16, 256), ref("z", F32, 256)])
    checked(made, TileSchedule(warps=2), ulps=2, z=np.where(np.arange(256) % 64, 0, 2).astype(np.float32))


def halve(x, out):
    v = x[:]
    while tile.max(v, 0) > 1.0:
        s = tile.sum(v, 0)
        v = tile.where(v > 1.0, v * 0.5, v) + s * 0.0
    out[0] = tile.sum(v, 0) + tile.max(v, 0)


def test_a_loop_ends_behind_its_condition() -> None:
    """Whose accesses to shared memory are ordered before those behind the loop."""
    checked(program(halve, [ref("out", F32, 1, out=True), ref("x", F32, 128)]), TileSchedule(warps=2),
            x=np.linspace(0, 9, 128, dtype=np.float32))


def scan(x, out): out[:, :] = tile.cumsum(x[:, :], 0)


def test_a_scan_of_padded_columns() -> None:
    for dtype in (BF16, F32):
        checked(program(scan, [ref("out", dtype, 128, 5, out=True), ref("x", dtype, 128, 5)]),
                TileSchedule(warps=4), ulps=2)


def flat_scan(x, out): out[:, :] = tile.cumsum(x[:, :, :, :], 2).reshape(64, 16)


def test_a_scan_in_another_shape() -> None:
    checked(program(flat_scan, [ref("out", F32, 64, 16, out=True), ref("x", F32, 2, 4, 8, 16)]),
            x=RANDOM.integers(-9, 9, (2, 4, 8, 16)).astype(np.float32))


def least(x, out):
    index = tile.arange(64).reshape(8, 8)
    out[:] = tile.min(tile.where(x[:, :] > 0.0, index, 7), 1)


def test_indices_of_all_axes_are_not_places_along_one() -> None:
    x = np.where(np.arange(64).reshape(8, 8) % 2, 1, -1).astype(np.float32)     # of each pair one
    for vector in (1, 8):
        checked(program(least, [ref("out", S32, 8, out=True), ref("x", F32, 8, 8)]),
                TileSchedule(warps=1, vector=vector), x=x)


@kernel(grid=(1,))
def nested(x: KTile["N", int32], y: KTile["N", int32], z: KTile["2*N", int32], a: OTile["4*N", int32],
           b: OTile["4*N", int32]):
    one, other = tile.zeros((a.shape[0],), int32), tile.ones((a.shape[0],), int32)
    for i in tile.range(0, 3):
        w = tile.interleave(tile.interleave(x[:] + i, y[:] - i), z[:] * i)
        one, other = one + w, other * 3 + w
    a[:], b[:] = one, other


def test_elements_in_turn_of_elements_in_turn() -> None:
    given = [Tensor(RANDOM.integers(0, 99, n).astype(np.int32)) for n in (128, 128, 256)]
    for got, want in zip(nested(*given), nested.interpret(*given), strict=True):
        np.testing.assert_array_equal(got.numpy(), want)


@kernel(grid=(1,))
def named(choice0: KTile["N", f32], choice1: KTile["N", f32], i: KTile["I", int32], out: OTile["N", f32]):
    x = tile.select(i[0], (choice1, choice0))
    out[:] = x[tile.block(0, 8)]


def test_tensors_may_have_the_names_of_choices() -> None:
    x, y = (Tensor(RANDOM.standard_normal(8).astype(np.float32)) for _ in range(2))
    np.testing.assert_array_equal(named(x, y, Tensor([1], dtype=S32)).numpy(), x.numpy())


def test_rows_beyond_a_symbolic_number_are_not_read() -> None:
    """A program that has all rows stops at the number that the kernel is given."""
    spec, target = GroupRowsSpec(8, 2, 4, True), host()
    run = load(TABLE.build(spec, TABLE.choose(spec, target), target))
    experts = np.array([[0, 1]] * 8, np.int32)
    order, offsets = np.full(16, -7, np.int32), np.zeros(5, np.int32)
    run(order, offsets, experts, 5)
    assert offsets.tolist() == [0, 5, 10, 10, 10]
    assert order[:10].tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]


# **** barriers and alignment ****

@kernel(grid=(4,))
def of_experts(a: KTile["M", "K", bf16], w: KTile["E", "K", "N", bf16], index: KTile["E", int32],
               bias: KTile["E", "N", bf16], out: OTile["E", "M", "N", f32], copy: OTile["E", "N", bf16]):
    """A row that is copied stays ahead of an index, which a producer's loop of copies needs, too."""
    p, whole = tile.program_id(0), tile.block(0, 64)
    row = bias[p, whole]
    e = index[p]
    acc = tile.zeros((64, 64), f32)
    for k in tile.range(0, 256, 64):
        acc = tile.dot(a[whole, tile.block(k, 64)], w[e, tile.block(k, 64), whole], acc)
    out[e, whole, whole] = acc
    copy[e, whole] = row


def test_one_lane_that_copies_meets_no_barrier_of_its_warp():
    def empty(dtype: Any, *shape: int) -> Tensor: return Tensor.zeros(*shape, dtype=dtype).contiguous()
    made = of_experts.program(empty(bf16, 64, 256), empty(bf16, 4, 256, 64), empty(int32, 4),
                              empty(bf16, 4, 64), empty(f32, 4, 64, 64), empty(bf16, 4, 64))
    ptx = build(made, TileSchedule(), GPU("sm_90a")).ptx
    assert "cp.async.bulk.tensor" in ptx, "a producer copies"
    assert ptx.count("bar.warp.sync") == 1, "the program's own alone"


def test_rows_by_index_of_a_tensor_that_begins_between_vectors():
    def rows(x: Any, index: Any, out: Any) -> None:
        out[tile.block(0, 8), tile.block(0, 64)] = x[tile.load(index, tile.block(0, 8)), tile.block(0, 64)]
    for offset, wide in ((1, False), (4, True)):
        x = TensorParameter("x", dtypes.float32, (100, 64), offset=offset, steps=(64, 1))
        made = program(rows, [TensorParameter("out", dtypes.float32, (8, 64), True), x,
                              ref("index", dtypes.int32, 8)])
        ptx = build(made, TileSchedule(), GPU("sm_90a")).ptx
        assert ("ld.global.nc.v4.f32" in ptx or "ld.global.nc.v4.b32" in ptx) == wide
