"""How a kernel is launched: what templates say of it, what cannot be, and the tensor maps it gets. What
is kept in L2: the policy against all windows there are, its reasons, and its limits. Edges of graphs: the
transitive reduction, and which edges are programmatic."""
from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tinygrad.dtype import dtypes

from bench.gpu.launch import GemmLauncher, make_launch
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime import clock, program
from tinygrad_nv.runtime.driver import Attributes, Copy, Fill, Function, Launch, TensorMapSpec, Window, Work
from tinygrad_nv.runtime.edges import EdgeChain, EdgeCounts, early, reduce_edges
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver, properties
from tinygrad_nv.runtime.l2 import MIB, MOST_RANGES, Range, plan
from tinygrad_nv.runtime.library_call import LibraryCall
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.kernel import AttentionKernel, BackwardKernel, DecodeKernel, GemmKernel, Scratch
from tinygrad_nv.tile.launch import Integer, LaunchConfig, MapArgument, Zeroed
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

PTX = ".version 8.7\n.target sm_90a\n"
MAP = MapArgument(1, "bf16", (64, 128), (256,), (64, 8), "128B", 0, 1, 0)
DESCRIBED = ("// tensormap: pointer=1 dtype=bf16 dims=64,128 strides=256 box=64,8 swizzle=128B offset=0 "
             "dynamic=1 integer=0")


def test_the_launch_of_a_matmul():
    kernel = GemmKernel("k", PTX, (1, 1, 1), 128, 98304, (2, 1, 1), (MAP,), pdl=True, workspace_bytes=1024,
                        flags=16)
    assert kernel.launch == LaunchConfig(98304, (2, 1, 1), True, (Zeroed(2, 64),), (MAP,))
    assert replace(kernel, flags=0).launch == LaunchConfig(98304, (2, 1, 1), True, (), (MAP,))


def test_the_launch_of_a_backward_pass():
    """dq is zero before each launch, and so are the turns where there are any."""
    kernel = BackwardKernel("k", PTX, (1, 1, 1), 128, 512, dq_bytes=4096, flags=3)
    assert kernel.launch == LaunchConfig(512, zeroed=(Zeroed(0, 4096), Zeroed(1, 12)))
    assert replace(kernel, flags=0).launch == LaunchConfig(512, zeroed=(Zeroed(0, 4096),))


def test_integers_are_part_of_a_launch():
    """Of both kernels of a decode attention."""
    one, integers = AttentionKernel("k", PTX, (1, 1, 1), 128), (Integer(16, (1, 0)),)
    assert one.with_integers(integers).launch == LaunchConfig(integers=integers)
    both = DecodeKernel((one, one), 1024).with_integers(integers)
    assert {each.launch for each in both.kernels} == {LaunchConfig(integers=integers)}
    assert both.workspace_bytes == 1024


def test_what_a_call_needs_besides_its_arguments():
    matmul = GemmKernel("k", PTX, (1, 1, 1), 128, workspace_bytes=1022, flags=16)
    assert matmul.scratch == (Scratch(dtypes.float32, 256), Scratch(dtypes.uint32, 16))
    assert replace(matmul, flags=0).scratch == (Scratch(dtypes.float32, 256), Scratch(dtypes.uint32, 1))
    assert replace(matmul, workspace_bytes=0, flags=0).scratch == ()
    backward = BackwardKernel("k", PTX, (1, 1, 1), 128, dq_bytes=4096, flags=3)
    assert backward.scratch == (Scratch(dtypes.uint32, 3, at=1),)
    assert replace(backward, flags=0).scratch == ()
    assert DecodeKernel((), 8).scratch == (Scratch(dtypes.float32, 2),)
    assert DecodeKernel(()).scratch == ()


def test_what_a_reader_is_told():
    made = LaunchConfig(98304, (2, 1, 1), True, (Zeroed(2, 64),), (MAP,), (Integer(16, (1, 0)),))
    assert made.describe() == ("// launch: dynamic_smem=98304 cluster=2,1,1 pdl=1\n"
                               "// zero: pointer=2 bytes=64\n"
                               f"// integer: offset=16 factors=1,0\n{DESCRIBED}\n")
    assert LaunchConfig().describe() == "// launch: dynamic_smem=0 cluster=1,1,1 pdl=0\n"


@pytest.mark.parametrize("wrong", [{"pointer": -1}, {"offset_bytes": -16}, {"dynamic": 2}, {"dynamic": -2},
                                   {"integer": -2}], ids=str)
def test_a_tensor_map_that_names_nothing(wrong: dict[str, int]):
    with pytest.raises(DriverError, match="tensor map of pointer"): replace(MAP, **wrong)


@pytest.mark.parametrize("numbers", [(-1, 4), (2, -4)])
def test_memory_that_cannot_be_zeroed(numbers: tuple[int, int]):
    with pytest.raises(DriverError, match=r"-\d .*to be zeroed|of pointer -1 to be zeroed"): Zeroed(*numbers)


def test_integers_of_variables():
    """s_kv = start + 16, start; before a launch has values nothing is below 0."""
    integers = Integer(16, (1, 0)), Integer(-3, (0, 2))
    assert [each.of((5, 4)) for each in integers] == [21, 5]
    assert [each.of((0, 0)) for each in integers] == [16, 0]


class Asked(EmulatedDriver):
    """Keeps what tensor maps are made of."""

    def __init__(self) -> None:
        super().__init__("sm_90a")
        self.specs: list[TensorMapSpec] = []

    def tensor_map(self, spec: TensorMapSpec) -> bytes:
        self.specs.append(spec)
        return super().tensor_map(spec)


def test_every_way_to_launch_has_the_same_tensor_maps():
    """A program of a user's, the tuner, and both launchers of bench/gpu/run.py."""
    spec = dense(128, 64, 128)
    kernel = TABLE.build(spec, Wgmma().block(128, 64).k(64), GPU("sm_90a"))
    gpu = Asked()
    at = [gpu.alloc(nbytes) for nbytes in (128 * 64 * 4, 128 * 128 * 4, 64 * 128 * 4)]

    def asked(make: object) -> list[TensorMapSpec]:
        gpu.specs = []
        make()  # type: ignore[operator]
        return gpu.specs

    users = asked(lambda: [program._encode_map(gpu, m, at[m.pointer], 128) for m in kernel.maps])
    assert len(users) >= 2
    assert {each.l2_promotion for each in users} == {"128B"}
    assert asked(lambda: clock.arguments(gpu, kernel, (), at)) == users
    memory = dict(zip(("out", "a", "b"), at, strict=True))
    assert asked(lambda: GemmLauncher(gpu, kernel).bind_launch(spec, memory)) == users
    assert asked(lambda: make_launch(gpu, [kernel], at)) == users


H100 = properties("sm_90a")     # 50 MiB of L2, 37.5 of them can be set aside, windows of at most 128
ASIDE = H100.persisting_l2_limit
# few bytes, so that every window there is can be tried; what is saved is compared in whole ones
SMALL = replace(H100, l2_bytes=8, persisting_l2_limit=6, window_limit=20)


def test_a_range_that_fits_stays_whole():
    made = plan(H100, [Range(1 << 32, 20 * MIB)], step_bytes=500 * MIB)
    assert made.window == Window(1 << 32, 20 * MIB, 1.0)
    assert made.set_aside_bytes == 20 * MIB
    assert made.saved_bytes == 20 * MIB
    assert made.reason == "20 MiB of L2 keep 100% of 20 MiB: 20 MiB a step less from HBM"


def test_of_a_longer_range_as_many_lines_as_fit():
    made = plan(H100, [Range(0, 100 * MIB, reads=2)], step_bytes=500 * MIB)
    assert made.set_aside_bytes == ASIDE
    assert made.window == Window(0, 100 * MIB, ASIDE / (100 * MIB))
    assert made.saved_bytes == pytest.approx(2 * ASIDE)
    assert made.reason == "37.5 MiB of L2 keep 38% of 100 MiB: 75 MiB a step less from HBM"


def test_no_window_is_longer_than_the_device_allows():
    made = plan(H100, [Range(0, 1000 * MIB)])
    assert made.window == Window(0, H100.window_limit, ASIDE / H100.window_limit)
    assert made.saved_bytes == pytest.approx(ASIDE)


def test_one_window_so_what_lies_together_is_kept():
    apart = [Range(i * 1000 * MIB, 10 * MIB) for i in range(3)]
    together = [Range(i * 10 * MIB, 10 * MIB, allocation=0) for i in range(3)]
    assert plan(H100, apart, 500 * MIB).saved_bytes == 10 * MIB
    assert plan(H100, together, 500 * MIB).saved_bytes == 30 * MIB


def test_what_lies_between_takes_its_share():
    pages = [Range(0, 10 * MIB, allocation=0), Range(30 * MIB, 10 * MIB, allocation=0)]
    made = plan(H100, pages, 500 * MIB)
    assert made.window == Window(0, 40 * MIB, ASIDE / (40 * MIB))
    assert made.saved_bytes == pytest.approx(20 * MIB * ASIDE / (40 * MIB))
    far = [pages[0], replace(pages[1], address=90 * MIB)]
    assert plan(H100, far, 500 * MIB).window == Window(0, 10 * MIB, 1.0)


def test_pages_that_are_read_more_often_come_first():
    made = plan(H100, [Range(0, ASIDE), Range(1 << 32, ASIDE, reads=3)], 500 * MIB)
    assert made.window == Window(1 << 32, ASIDE, 1.0)
    assert made.saved_bytes == 3 * ASIDE


def test_many_pages_take_little_time():
    pages = [Range(i * 64 << 10, 64 << 10, 1 + i % 7 // 6, allocation=0) for i in range(20 * MOST_RANGES)]
    made = plan(H100, pages, 1 << 32)
    assert made.window is not None
    assert made.saved_bytes == pytest.approx(ASIDE * 8 / 7, rel=0.02)


NONE_ASIDE = "emulated sm_90a (sm_90a) sets no L2 aside"
KEPT = "MiB, and L2 (50 MiB) keeps the ranges from one read to the next as it is"


@pytest.mark.parametrize(("limits", "ranges", "step", "reason"), [
    (H100, [], 0, "there is nothing to keep"),
    (replace(H100, persisting_l2_limit=0), [Range(0, MIB)], 1 << 30, NONE_ASIDE),
    (replace(H100, window_limit=0), [Range(0, MIB)], 1 << 30, NONE_ASIDE),
    (H100, [Range(0, 40 * MIB)], 0, f"a step reads 40 {KEPT}"),
    # read ten times a step, so 40 MiB pass between two reads
    (H100, [Range(0, MIB, reads=10)], 400 * MIB, f"a step reads 400 {KEPT}"),
    (H100, [Range(0, 60 * MIB, reads=0)], 1 << 30, "nothing is read")])
def test_without_a_window_there_is_a_reason(limits, ranges, step, reason):
    made = plan(limits, ranges, step)
    assert (made.window, made.set_aside_bytes, made.saved_bytes) == (None, 0, 0)
    assert made.reason == reason


piece = st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 3), st.sampled_from([0, 1]))
pieces = st.lists(piece, min_size=1, max_size=4)


@given(pieces)
@example([(19, 12, 1, 0), (21, 4, 1, 0), (30, 1, 3, 0)])    # 9.5 bytes and 10.2: both are 10 whole ones
def test_no_other_window_saves_more(pieces: list[tuple[int, int, int, int]]):
    ranges = [Range(1000 * where + start, nbytes, reads, where) for start, nbytes, reads, where in pieces]
    made = plan(SMALL, ranges, step_bytes=1 << 20)

    def saved(start: int, nbytes: int) -> float:
        inside = sum(r.reads * max(0, min(r.end, start + nbytes) - max(r.address, start)) for r in ranges)
        return inside * min(1, SMALL.persisting_l2_limit / nbytes)
    best = max(saved(1000 * where + start, nbytes) for where in (0, 1) for start in range(52)
               for nbytes in range(1, SMALL.window_limit + 1))
    # windows are compared by whole bytes
    assert best - 1 < made.saved_bytes <= best + 1e-6
    if made.window is not None:
        assert saved(made.window.address, made.window.nbytes) == pytest.approx(made.saved_bytes)
        assert made.window.nbytes <= SMALL.window_limit
        assert made.set_aside_bytes == min(made.window.nbytes, SMALL.persisting_l2_limit)
        assert made.window.hit_ratio * made.window.nbytes <= SMALL.persisting_l2_limit * (1 + 1e-9)


FUNCTION = Function("k", Attributes(0, 0, 0, 1024), None)
PLAIN, PDL = (Launch(FUNCTION, (1, 1, 1), (32, 1, 1), pdl=pdl) for pdl in (False, True))


def reach(after: list[tuple[int, ...]]) -> list[set[int]]:
    """The nodes before each node, by the definition."""
    out: list[set[int]] = []
    for numbers in after: out.append(set(numbers).union(*(out[number] for number in numbers)))
    return out


@pytest.mark.parametrize(("after", "wanted"), [
    ([()], [()]),
    ([(), (0,), (0, 1)], [(), (0,), (1,)]),
    ([(), (), (0, 1), (2, 1, 0)], [(), (), (0, 1), (2,)]),
    ([(), (0,), (0,), (0, 1, 2)], [(), (0,), (0,), (1, 2)]),
    ([(), (0, 0), (1, 1)], [(), (0,), (1,)]),
])
def test_known_reductions(after, wanted):
    assert reduce_edges(after) == wanted


@pytest.mark.parametrize("seed", range(40))
def test_the_least_edges_of_the_same_order(seed):
    """Random graphs: what comes before a node stays, and no edge can be left out."""
    random.seed(seed)
    count, dense = random.randrange(1, 16), random.random()
    after = [tuple(n for n in range(i) if random.random() < dense) for i in range(count)]
    least = reduce_edges(after)
    assert reach(least) == reach(after)
    for node, numbers in enumerate(least):
        for kept in combinations(numbers, len(numbers) - 1 if numbers else 0):
            fewer = [*least[:node], kept, *least[node + 1:]]
            assert not numbers or reach(fewer) != reach(after)


def test_which_edges_are_programmatic():
    copy, fill = Copy(0, 256, 16), Fill(0, 0, 16)
    assert early(PDL, [PLAIN])
    assert early(PDL, [PDL])
    assert not any(early(PDL, before) for before in ([], [copy], [fill], [PLAIN, PLAIN], [PLAIN, fill]))
    assert not any(early(work, [PLAIN]) for work in (PLAIN, copy, fill))


def launch(ctas: int, pdl: bool = True) -> Launch: return Launch(FUNCTION, (ctas, 1, 1), (32, 1, 1), pdl=pdl)


def chained(*nodes: tuple[Work, tuple[int, ...]],
            sm_count: int = 8) -> tuple[list[tuple[int, ...]], EdgeChain]:
    chain = EdgeChain(sm_count)
    return [chain.add(work, after) for work, after in nodes], chain


def test_large_launches_are_a_chain():
    """q, k and v after one norm, then what needs all three: without the chain one edge would be early."""
    after, chain = chained((launch(8), ()), (launch(9), (0,)), (launch(9), (0,)), (launch(9), (0,)),
                           (launch(8), (1, 2, 3)))
    assert after == [(), (0,), (1,), (2,), (3,)]
    assert chain.counts == EdgeCounts(launches=5, edges=4, programmatic=4, chained=2)


def test_small_independent_launches_run_side_by_side():
    after, chain = chained((launch(8), ()), (launch(3), (0,)), (launch(5), (0,)), (launch(1), (0,)),
                           (launch(8), (1, 2, 3)))
    assert after == [(), (0,), (0,), (0,), (1, 2, 3)]  # the fourth would be the ninth CTA; 1 and 2 are no one
    assert chain.counts == EdgeCounts(launches=5, edges=6, programmatic=3, beside=1)


def test_a_launch_is_not_beside_what_it_follows_by_way_of_a_fill():
    after, chain = chained((launch(1), ()), (Fill(0, 0, 4), (0,)), (launch(1), (1,)), (launch(1), ()))
    assert after == [(), (0,), (1,), (0,)]
    assert chain.counts == EdgeCounts(launches=3, edges=3, programmatic=1, chained=1, beside=1)


def test_a_grid_that_is_not_known_is_a_large_one():
    chain = EdgeChain(8)
    assert [chain.add(launch(1), (), fills=True) for _ in range(3)] == [(), (0,), (1,)]


def test_launches_without_pdl_follow_their_data_alone():
    after, chain = chained((launch(9, pdl=False), ()), (launch(9, pdl=False), ()), (launch(9), ()))
    assert after == [(), (), (1,)]
    assert chain.counts == EdgeCounts(launches=3, edges=1, programmatic=1, chained=1)


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_keeps_the_order_that_data_asks_for(seed):
    random.seed(seed)
    chain, wanted = EdgeChain(8), []
    after = []
    for i in range(20):
        work = random.choice([launch(random.randrange(1, 12), random.random() < 0.9), Fill(0, 0, 4)])
        wanted.append(tuple(n for n in range(i) if random.random() < 0.2))
        after.append(chain.add(work, wanted[-1], random.random() < 0.1))
    assert all(need <= have for need, have in zip(reach(wanted), reach(after), strict=True))
    assert after == reduce_edges(after)
    early_ones = [early(chain.works[i], [chain.works[n] for n in numbers]) for i, numbers in enumerate(after)]
    assert (chain.counts.edges, chain.counts.programmatic) == (sum(map(len, after)), sum(early_ones))


def test_collectives_follow_one_another():
    """Launches that other processes run, too, and calls of libraries: in the order in which they came,
    whatever else they need. Others do not follow them."""
    collective = Launch(FUNCTION, (1, 1, 1), (32, 1, 1), given=lambda event, new: None)
    call = LibraryCall("a call", (), (), lambda stream: None)
    after, _ = chained((collective, ()), (PLAIN, ()), (call, ()), (collective, (1,)))
    assert after == [(), (), (0,), (1, 2)]
