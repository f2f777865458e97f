"""A rank of test_collectives.py: every collective against NumPy, and what goes wrong between ranks."""
from __future__ import annotations

import os
import sys
import time

import numpy as np
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.dist.collectives.functions import (
    all_gather,
    all_reduce,
    all_reduce_many,
    all_to_all,
    broadcast,
    buckets,
    copy_to_ranks,
    recv,
    reduce_scatter,
    send,
)
from tinygrad_nv.dist.group import Group, World, init, world
from tinygrad_nv.errors import DistError

KINDS: dict[DType, str] = {dtypes.float32: "f4", dtypes.float64: "f8", dtypes.bfloat16: "u2",
                           dtypes.float16: "f2", dtypes.int8: "i1", dtypes.uint8: "u1", dtypes.int16: "i2",
                           dtypes.uint16: "u2", dtypes.int32: "i4", dtypes.uint32: "u4", dtypes.int64: "i8",
                           dtypes.uint64: "u8"}


def given(group: Group, shape: tuple[int, ...], most: int = 9) -> list[np.ndarray]:
    """Small integers of each rank: sums are exact in every dtype."""
    return [np.random.default_rng(rank).integers(0, most, shape) for rank in range(group.size)]


def bits(x: np.ndarray, dtype: DType) -> np.ndarray:
    """As memory has it; bfloat16 is the upper half of a float32."""
    if dtype != dtypes.bfloat16: return np.ascontiguousarray(x.astype(KINDS[dtype]))
    return (np.ascontiguousarray(x.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16)


def tensor(x: np.ndarray, kind: str = "f4") -> Tensor: return Tensor(x.astype(kind)).realize()


def same(found: Tensor, wanted: np.ndarray, what: object) -> None:
    got = found.numpy()
    assert got.shape == wanted.shape and np.array_equal(got, wanted), (what, got, wanted)  # noqa: PT018


def transport(group: Group) -> None:
    """Every kind of every dtype, on arrays: few elements, and more than fit a slot."""
    n, r = group.size, group.rank
    for dtype in KINDS:
        for count in (1, 7, 70_001):
            x, y = given(group, (count,)), given(group, (count * n,))
            for op, fn in (("sum", np.add), ("max", np.maximum), ("min", np.minimum)):
                _check(group, "all_reduce", dtype, x[r], fn.reduce(x), count, op)
                _check(group, "reduce_scatter", dtype, y[r], np.split(fn.reduce(y), n)[r], count, op)
            _check(group, "all_gather", dtype, x[r], np.concatenate(x), count)
            _check(group, "broadcast", dtype, x[r], x[-1], count, peer=n - 1)
            wanted = np.concatenate([np.split(each, n)[r] for each in y])
            _check(group, "all_to_all", dtype, y[r], wanted, count)


def _check(group: Group, kind: str, dtype: DType, own: np.ndarray, wanted: np.ndarray, count: int,
           op: str = "sum", peer: int = 0) -> None:
    out = np.zeros(wanted.shape, KINDS[dtype])
    group.run(kind, out, bits(own, dtype), count, dtype, op, peer)
    assert np.array_equal(out, bits(wanted, dtype)), (kind, dtype, count, op, out, wanted)


def axes(group: Group) -> None:
    """Of tensors: along every axis."""
    n, r = group.size, group.rank
    x = given(group, (2 * n, 4 * n, n), 1000)
    own = tensor(x[r], "i4")
    for axis in (0, 1, -1):
        same(reduce_scatter(own, group, axis), np.split(sum(x), n, axis)[r], axis)
        same(all_gather(own, group, axis), np.concatenate(x, axis), axis)
    for split, concat in ((0, 0), (0, 2), (1, 0), (2, 1)):
        wanted = np.concatenate([np.split(x[s], n, split)[r] for s in range(n)], concat)
        same(all_to_all(own, group, split, concat), wanted, (split, concat))


def in_place(group: Group) -> None:
    """Sums over what is added, where memory is the transport, of few and of many elements."""
    if group.held.__class__.__name__ != "mmap": return
    for dtype in (dtypes.int32, dtypes.float64, dtypes.bfloat16):
        for count in (100, 70_001):
            x = given(group, (count,))
            own = bits(x[group.rank], dtype)
            group.run("all_reduce", own, own, count, dtype)
            assert np.array_equal(own, bits(sum(x), dtype)), (dtype, count)


def empty(group: Group) -> None:
    """Of no elements: nothing to do."""
    for dtype in KINDS:
        x = np.zeros(0, KINDS[dtype])
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            group.run(kind, x, x.copy(), 0, dtype)


def rounded_once(group: Group) -> None:
    """float16 is added in float32, in the order of ranks, over few and over many elements."""
    for count in (100, 60_000):
        x = [np.random.default_rng(rank).standard_normal(count).astype("f2") for rank in range(group.size)]
        out = np.zeros(count, "f2")
        group.run("all_reduce", out, x[group.rank], count, dtypes.float16)
        total = x[0].astype("f4")
        for each in x[1:]: total = total + each.astype("f4")
        assert np.array_equal(out, total.astype("f2"))


def replays(group: Group) -> None:
    """In a TinyJit's graph, several that depend on each other and on a changing input."""
    x = given(group, (5, 7), 100)

    @TinyJit
    def step(a: Tensor) -> Tensor:
        for i in range(3): a = all_reduce(a + 1, group, name=f"layer {i}") - 2
        return (a * 2).realize()
    for replay in range(6):
        wanted = [each + replay for each in x]
        for _ in range(3):
            total = sum(each + 1 for each in wanted) - 2
            wanted = [total] * group.size
        same(step(tensor(x[group.rank] + replay)), 2 * wanted[0], replay)


def gradients(group: Group) -> None:
    n, r = group.size, group.rank
    x, w = given(group, (2 * n, 3)), given(group, (2 * n, 3), 5)

    def of(fn: object, weight: np.ndarray) -> Tensor:
        own = tensor(x[r])
        (fn(own) * tensor(weight)).sum().backward()   # type: ignore[operator]
        assert own.grad is not None
        return own.grad
    same(of(lambda t: all_reduce(t, group), w[r]), sum(w), "all_reduce")
    same(of(lambda t: all_reduce(t, group, replicated=True), w[0]), w[0], "replicated")
    same(of(lambda t: copy_to_ranks(t, group), w[r]), sum(w), "copied")
    parts = np.concatenate([each[:2] for each in w])
    same(of(lambda t: reduce_scatter(t, group), w[r][:2]), parts, "scatter")
    wide = given(group, (2 * n * n, 3), 5)
    same(of(lambda t: all_gather(t, group), wide[r]), np.split(sum(wide), n)[r], "gather")
    parts = np.concatenate([np.split(each, n)[r] for each in w])
    same(of(lambda t: all_to_all(t, group), w[r]), parts, "all_to_all")
    same(of(lambda t: broadcast(t, group, 0), w[r]), sum(w) * (r == 0), "broadcast")


def messages(group: Group) -> None:
    """Around a ring, more than the room for messages, twice the same call."""
    n, r = group.size, group.rank
    for count in (3, 100_000):
        x = given(group, (count,), 1000)
        for _ in range(2):
            sent = send(tensor(x[r], "i4"), group, (r + 1) % n, name="ring")
            if r == 0: sent.realize()
            same(recv((count,), dtypes.int32, group, (r - 1) % n, name="ring"), x[(r - 1) % n], count)
            if r: sent.realize()


def several(group: Group) -> None:
    """Buckets of several tensors, a wire dtype."""
    shapes = ((3, 5), (700,), (2, 2), (9,))
    x = [given(group, shape, 50) for shape in shapes]
    kinds = ("f4", "f2", "f4", "f4")
    own = [tensor(each[group.rank] % 20, kind) for each, kind in zip(x, kinds, strict=True)]
    assert buckets(own, 80) == [[0, 2], [1], [3]], buckets(own, 80)
    for found, each in zip(all_reduce_many(own, group, bucket_bytes=80), x, strict=True):
        same(found, sum(one % 20 for one in each), found.shape)
    for found, each in zip(all_reduce_many(own, group, wire=dtypes.float16), x, strict=True):
        same(found, sum(one % 20 for one in each), found.shape)


def groups(world: World) -> None:
    """Groups of some ranks beside each other."""
    if world.size < 4: return
    pair = world.group([world.rank // 2 * 2, world.rank // 2 * 2 + 1])
    other = world.group([world.rank % 2, world.rank % 2 + 2])
    own = tensor(np.array([10 ** world.rank]), "i4")
    same(all_reduce(own, pair), np.array([11 if world.rank < 2 else 1100]), pair)
    same(all_reduce(all_reduce(own, pair), other), np.array([1111]), other)


def differ(group: Group, how: str) -> None:
    """Ranks that do not do the same: each must end with an error."""
    if how == "late": group.struct.timeout_ns = int(1e9)
    own = tensor(np.arange(64))
    if how == "left" and group.rank == 1: return
    if how == "lost" and group.rank == 1: os._exit(4)
    if how == "late" and group.rank == 1: return time.sleep(3)
    if how == "message": return message_of_another_shape(group)
    try:
        if how == "count" and group.rank == 1: own = own[:32]
        if how == "kind" and group.rank == 1: all_gather(own, group, name="gathered").realize()
        elif how == "dtype" and group.rank == 1: all_reduce(own.cast(dtypes.int32), group, name="w").realize()
        else: all_reduce(own, group, name="layers.3.down").realize()
        group.check()
    except DistError as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(3) from error


def message_of_another_shape(group: Group) -> None:
    """Rank 1 asks for fewer elements than rank 0 sends."""
    x = np.arange(64, dtype=np.float32)
    if group.rank == 0: return group.run("send", x, x, 64, dtypes.float32, peer=1)
    try: group.run("recv", x, x, 32, dtypes.float32)
    except DistError as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(3) from error


def hang(group: Group) -> None:
    """Rank 1 does not come: the watchdog ends both, also where rank 0's program ends while it drains."""
    own = tensor(np.arange(64))
    watchdog = world().watchdog
    assert watchdog is not None
    if group.rank == 0: watchdog.before_end(lambda error: time.sleep(2))
    if group.rank == 1: time.sleep(300)
    all_reduce(own, group, name="layers.3.down").realize()


def main() -> None:
    world = init()
    group = world.group()
    if sys.argv[1:] == ["hang"]: return hang(group)
    if len(sys.argv) > 1 and sys.argv[1] != "few": return differ(group, sys.argv[1])
    # starting ranks, and having tinygrad make kernels in each, is what takes time
    tensors = (replays, messages) if len(sys.argv) > 1 else (axes, replays, gradients, messages, several)
    for check in (empty, transport, in_place, rounded_once, *tensors): check(group)
    groups(world)
    print(f"rank {world.rank} of {world.size}: all right over {world.transport}", flush=True)


if __name__ == "__main__": main()
