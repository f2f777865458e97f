"""The cost model: never below the roofline, never shorter for more work, and in the order that is known."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_nv.ptx.emulator.report import Site, Stats
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm import work
from tinygrad_nv.tile.gemm.cost import CostModel, predict
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Gemv, Mma, Wgmma
from tinygrad_nv.tile.gemm.tune import Trial, work_from_trial
from tinygrad_nv.tile.gpu import A100, GPU_MODELS, H100, L40S, RTX4090, gpu_model_for
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

W = Wgmma()
COOPERATIVE, TURNS = W.block(128, 256), W.block(128, 128).stages(6).pingpong()
SMALL = W.block(64, 64).warps(8)
FEW = (W.block(64, 16).warps(8).stages(7).swap_operands(),
       W.block(64, 16).warps(8).stages(7).swap_operands().split(2))
GEMV = Gemv().columns(16).k(512).warps(4)
FORMS = (COOPERATIVE, COOPERATIVE.cluster(2), COOPERATIVE.cluster(1, 2), TURNS, TURNS.cluster(2),
         W.block(128, 128).split(4), SMALL, *FEW, Mma(), Mma().stages(5).split(3),
         Mma().block(128, 256).warps(2, 4), Mma().block(16, 64).k(64).warps(1, 4))
EXTENT = st.integers(1, 40000)


# **** what must hold ****

@pytest.mark.parametrize("machine", GPU_MODELS, ids=lambda machine: machine.name)
@given(extents=st.tuples(EXTENT, EXTENT, EXTENT), schedule=st.sampled_from(FORMS),
       dtype=st.sampled_from(("bf16", "tf32", "s8", "e4m3")), batch=st.sampled_from(((), (1,), (3, 5))),
       epilogue=st.sampled_from(("", "bias+gelu+residual")))
@settings(deadline=None, max_examples=60)
def test_no_prediction_is_below_the_roofline(machine, extents, schedule, dtype, batch, epilogue):
    model = CostModel(dense(*extents, dtype, batch=batch, epilogue=epilogue), machine)
    predicted = model.predict(schedule)
    assert predicted.seconds >= model.roofline(schedule)
    assert predicted.seconds >= (machine.early_launch_s or machine.launch_s) + machine.load_s
    assert predicted.parts[predicted.bound] == max(predicted.parts.values())


@pytest.mark.parametrize(("schedule", "early"), [
    (GEMV.k(128), True), (GEMV.k(128).split(8), True), (GEMV.k(128).split(16), False), (COOPERATIVE, True),
    (W.block(128, 128).split(4), True), (COOPERATIVE.stream_k(), False), (Mma(), True),
    (Mma().split(3), False)])
def test_what_has_flags_to_zero_is_not_launched_early(schedule, early):
    """The templates say by `flags` what the model says here. 8 µs later everything is 8 µs later."""
    spec, later = dense(8, 4096, 4096), 8e-6
    slow, soon = (replace(H100, launch_s=H100.launch_s + later * (not name),
                          early_launch_s=H100.early_launch_s + later * name) for name in (False, True))
    usual = predict(spec, schedule, H100).seconds
    assert predict(spec, schedule, soon).seconds == pytest.approx(usual + later * early)
    assert (predict(spec, schedule, slow).seconds > usual + later / 2) is not early
    assert bool(TABLE.build(spec, schedule, GPU("sm_90a")).flags) is not early


@given(extents=st.tuples(EXTENT, EXTENT, EXTENT), more=st.tuples(*[st.integers(0, 3000)] * 3),
       schedule=st.sampled_from(FORMS), machine=st.sampled_from(GPU_MODELS))
@settings(deadline=None, max_examples=400)
def test_more_of_any_extent_never_takes_less(extents, more, schedule, machine):
    before = CostModel(dense(*extents), machine).predict(schedule).seconds
    for axis in range(3):
        grown = list(extents)
        grown[axis] += more[axis]
        seconds = CostModel(dense(*grown), machine).predict(schedule).seconds
        assert seconds >= before * (1 - 1e-9), (axis, grown)


@given(m=st.integers(1, 16), more=st.integers(0, 15), n=EXTENT, k=st.integers(1, 8192))
@settings(deadline=None, max_examples=60)
def test_gemv_is_above_the_roofline_and_more_rows_never_take_less(m, more, n, k):
    few, many = (CostModel(dense(rows, n, k), H100) for rows in (m, min(16, m + more)))
    assert few.roofline(GEMV) <= few.predict(GEMV).seconds <= many.predict(GEMV).seconds * (1 + 1e-9) \
        or m == 1   # one row is for CUDA cores, more for tensor cores


def test_peaks_are_those_of_the_data_sheets():
    for machine, tflops in ((H100, 989.4), (A100, 312), (L40S, 362), (RTX4090, 165.2)):
        assert machine.tensor_flops_per_s == pytest.approx(tflops * 1e12, rel=0.02)
    assert gpu_model_for("sm_90a") == H100
    assert gpu_model_for("sm_89", 128) == RTX4090
    other = gpu_model_for("sm_90a", 78)
    assert (other.sm_count, other.hbm_bytes_per_s) == (78, H100.hbm_bytes_per_s)


# **** what is known ****

def seconds(spec, *schedules, arch="sm_90a"): return [predict(spec, s, arch).seconds for s in schedules]


def test_large_products_are_for_large_tiles_or_turns():
    best = choose(dense(8192, 8192, 8192), GPU("sm_90a"))
    assert best.template == "wgmma"
    assert (best.block_m, best.block_n) in ((128, 256), (256, 128)) or best.mode == "pingpong"
    cooperative, turns, small, mma = seconds(dense(8192, 8192, 8192), COOPERATIVE.cluster(2),
                                             TURNS.cluster(2), SMALL, Mma())
    assert max(cooperative, turns) < min(small, mma)
    assert choose(dense(8192, 8192, 8192), GPU("sm_80")).template == "mma"


def test_multicast_helps_where_l2_is_the_bound():
    spec = dense(8192, 8192, 8192)
    alone, pair = (predict(spec, s, "sm_90a") for s in (COOPERATIVE, COOPERATIVE.cluster(2)))
    assert alone.bound == "L2"
    assert pair.parts["L2"] == pytest.approx(alone.parts["L2"] * (128 + 128) / (128 + 256))
    assert pair.seconds < alone.seconds


def test_few_tiles_with_long_sums_are_split():
    spec = dense(512, 512, 16384)
    whole, split, stream = seconds(spec, W.block(128, 128).stages(6), W.block(128, 128).stages(6).split(8),
                                   W.block(128, 128).stages(6).stream_k())
    assert max(split, stream) < 0.5 * whole
    for arch in ("sm_80", "sm_90a"):
        best = choose(spec, GPU(arch))
        assert best.splits > 1 or best.stream
    assert choose(dense(8192, 8192, 8192), GPU("sm_80")).splits == 1


def test_stream_k_evens_out_the_last_wave():
    spec = dense(128 * 9, 256 * 15, 8192)                        # 135 tiles for 132 SMs
    whole, stream = seconds(spec, COOPERATIVE, COOPERATIVE.stream_k())
    assert stream < 0.75 * whole


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_one_row_is_for_gemv(arch):
    for n, k in ((4096, 4096), (8192, 8192), (28672, 8192), (128256, 4096)):
        best = choose(dense(1, n, k), GPU(arch))
        assert best.template == "gemv", (n, k, best)
        assert predict(dense(1, n, k), best, arch).bound == "HBM"


@pytest.mark.parametrize("m", [8, 12, 16])
def test_few_rows_are_for_gemv_or_a_swapped_product(m):
    for n, k in ((4096, 4096), (8192, 8192), (4096, 14336)):
        best = choose(dense(m, n, k), GPU("sm_90a"))
        assert best.template == "gemv" or best.swap, best
        assert predict(dense(m, n, k), best, "sm_90a").bound == "HBM"


def test_rows_beyond_those_of_gemv_are_for_tensor_cores():
    for m in (64, 128, 4096): assert choose(dense(m, 8192, 8192), GPU("sm_90a")).template == "wgmma"


def test_turns_hide_the_end_of_a_tile():
    short = dense(8192, 8192, 256, epilogue="bias+gelu")
    cooperative, turns = seconds(short, W.block(128, 128).stages(6).cluster(2), TURNS.cluster(2))
    assert turns < 0.85 * cooperative


def test_loads_in_flight_hide_their_latency():
    spec, s = dense(16 * 108, 16, 8192), Mma().block(16, 16).warps(1, 1)
    few, many = seconds(spec, s.stages(2), s.stages(5), arch="sm_80")
    assert many < 0.4 * few
    eight, = seconds(dense(16 * 108, 16 * 8, 8192), s.stages(2), arch="sm_80")
    assert eight < 1.5 * few                                     # eight CTAs of an SM wait at once


def test_what_takes_longest_is_named():
    assert predict(dense(8192, 8192, 8192), COOPERATIVE.cluster(2), "sm_90a").bound == "tensor core"
    assert predict(dense(1, 8192, 8192), GEMV, "sm_90a").bound == "HBM"
    assert predict(dense(64, 64, 64), SMALL, "sm_90a").bound == "launch"
    assert predict(dense(4096, 4096, 4096), SMALL.stages(8), "sm_90a").bound == "L2"


def test_operands_half_as_wide_take_half_as_long():
    half, one, double = (predict(dense(8192, 8192, 8192, dtype, "f32"), COOPERATIVE.k(k).cluster(2), "sm_90a")
                         for dtype, k in (("e4m3", 128), ("bf16", 64), ("tf32", 32)))
    assert half.parts["tensor core"] * 2 == pytest.approx(one.parts["tensor core"])
    assert one.parts["tensor core"] * 2 == pytest.approx(double.parts["tensor core"])
    # mma.sync of fp8 is unpacked on Hopper, not on Ada
    for arch, gain in (("sm_90a", 1), ("sm_89", 2)):
        fast, slow = (predict(dense(8192, 8192, 8192, dtype, "f32"), Mma().k(k), arch)
                      for dtype, k in (("e4m3", 64), ("bf16", 32)))
        assert fast.parts["tensor core"] * gain == pytest.approx(slow.parts["tensor core"])


def test_an_epilogue_costs_its_loads_and_its_operations():
    plain, bias, gelu, residual = (
        predict(dense(4096, 4096, 64, epilogue=words), COOPERATIVE, "sm_90a").seconds
        for words in ("", "bias", "gelu", "residual"))
    assert plain < bias < gelu
    assert plain < residual


# **** from counters ****

def stats(steps: int, conflicts: int = 0) -> Stats:
    """What a CTA of 128 × 128 with 32 of K a stage and four warps does in so many steps, and 4096 cycles'
    worth of instructions after them."""
    mma = Site("mma.sync", 1, 1024 * steps, 32768 * steps, 0, 0, 0, 0, 2 * 128 * 128 * 32 * steps)
    passes = (256 + conflicts) * steps
    load = Site("ldmatrix", 2, 64 * steps, 2048 * steps, passes, conflicts * steps, 0, 0, 0)
    return Stats((mma, load), warp_instructions=1088 * steps + 4 * 4096)


def test_counters_become_cycles():
    model, s = CostModel(dense(4096, 4096, 4096), A100), Mma()
    made = work_from_trial(Trial(stats(5), stats(9), (5, 9), 1), model, s)
    assert made.tensor == pytest.approx(128 * 128 * 32 / 1024 / A100.sustained)
    assert (made.shared, made.issue) == (256, 272)
    assert made.finish == work.STORE_LATENCY + 4096
    assert made.ahead == s.depth - 1
    worse = work_from_trial(Trial(stats(5, 500), stats(9, 500), (5, 9), 1), model, s)
    assert worse.shared == 756
    assert model.predict_work(s, worse).seconds > 1.2 * model.predict_work(s, made).seconds


def test_registers_decide_how_many_ctas_an_sm_holds():
    model, s = CostModel(dense(8192, 8192, 8192), A100), Mma().stages(2)
    done = model.plan_work(s)
    assert model.predict_work(s, done, 255).waves == pytest.approx(2 * model.predict_work(s, done, 128).waves)


def test_wgmma_reads_both_operands_from_shared_memory():
    opcode = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
    one = Site(opcode, 1, 4, 128, 0, 0, 0, 0, 2 * 64 * 128 * 16)
    s = W.block(64, 128).warps(8)
    few, many = (Stats((replace(one, warps=4 * n, flops=n * one.flops),), asynchronous_bytes=24576 * n // 4)
                 for n in (4, 8))
    model = CostModel(dense(4096, 4096, 4096), H100)
    made = work_from_trial(Trial(few, many, (1, 2), 1), model, s)
    assert made.shared == (4 * (64 + 128) * 32 + 24576) / 128
    assert made.tensor == pytest.approx(model.plan_work(s).tensor)
    assert made.shared == model.plan_work(s).shared
