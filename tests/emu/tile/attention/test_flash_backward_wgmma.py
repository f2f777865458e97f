"""The wgmma template of attention's backward pass on the emulator: heads, bands, rings, layouts, the order of
sums; what is exact comes out bit for bit."""
from __future__ import annotations

import re

import pytest
import torch
from backward_case import Given, arguments, backward, launched, lies, near, run
from flash_backward_wgmma_case import BF16, CAUSAL, F16, F32, HALVED, LOW, SMALL, WIDE, close
from tinygrad.dtype import DType

from tinygrad_nv.tile.attention.schedules import BackwardWgmma
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

# **** rings ****

@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", [WIDE, LOW, SMALL, HALVED], ids=str)
def test_interleavings(schedule: BackwardWgmma, seed: int):
    """Warps run in another order for every seed; two query heads, of two or more blocks of rows each, pass
    two stages."""
    rows = 3 * schedule.block_m if schedule.block_m == 64 else 200
    close(backward(rows, schedule.block_n + 8, 16, F16, group=2, band=Band(-300, 70)), schedule, seed)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", [LOW, SMALL, HALVED], ids=str)
def test_rings(schedule: BackwardWgmma, stages: int):
    """At least `stages` + 2 blocks of rows, fewer blocks than stages, and one."""
    for s_q in (64 * (stages + 2), 70, 5): close(backward(s_q, 64, 16), schedule.stages(stages))


# **** heads ****

@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("d", "schedule"), [(8, WIDE), (16, SMALL), (40, WIDE), (64, WIDE), (64, LOW),
                                             (72, LOW), (80, SMALL), (96, LOW), (128, LOW), (128, HALVED),
                                             (160, HALVED), (192, HALVED), (256, HALVED)], ids=str)
def test_heads(d: int, schedule: BackwardWgmma, dtype: DType):
    """Of a window that begins and ends within blocks; and of keys that end within one."""
    close(backward(140, 150, d, dtype, band=Band(-50, 3), start=20), schedule, seed=d % 4)
    close(backward(70, 40, d, dtype), schedule, seed=d % 4)


@pytest.mark.parametrize(("d", "d_v", "schedule"), [(64, 16, WIDE), (32, 72, WIDE), (128, 64, LOW),
                                                    (72, 128, LOW), (16, 64, SMALL),
                                                    (200, 40, HALVED)], ids=str)
def test_values_of_another_width_than_keys(d: int, d_v: int, schedule: BackwardWgmma):
    close(backward(150, 140, d, d_v=d_v, band=CAUSAL), schedule)


@pytest.mark.parametrize("schedule", [LOW, HALVED], ids=str)
@pytest.mark.parametrize("out", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
def test_results(out: DType, schedule: BackwardWgmma):
    close(backward(70, 130, 56, F16, out=out, heads=2, group=2), schedule)


# **** bands ****

@pytest.mark.parametrize("start", [0, 150])
@pytest.mark.parametrize("band", [CAUSAL, Band(-40, 0), Band(None, 20), Band(-10, None), Band(5, 60),
                                  Band(None, -7), Band(-70, -33)], ids=str)
def test_bands(band: Band, start: int):
    """Rows may see nothing, and keys may be seen by none."""
    close(backward(140, 290, 16, band=band, start=start), seed=len(str(band)) % 4)


@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_lengths_at_the_edges_of_blocks(edge: int):
    for band in (FULL, CAUSAL): close(backward(128 + edge, 128 + edge, 64, band=band), WIDE)


def test_blocks_that_see_nothing_are_skipped():
    """Bytes that are copied: of 2 blocks of keys all 4 of rows, or those from the first on that sees them; of
    a window, three, as far as there are so many."""
    s, nbytes, found = 256, 64 * 128 * 2, {}
    for band in (FULL, CAUSAL, Band(-63, 0)):
        spec = backward(s, s, 128, band=band, out=F32)
        made = TABLE.build(spec, LOW, GPU("sm_90a"))
        _, report = launched(made, spec, arguments(spec), "sm_90a", check=False)
        # keys and values are read once, sums of 64 x 128 in float32 are written
        found[band] = report.stats.asynchronous_bytes - 2 * s * 128 * 2
    assert found == {FULL: 8 * 4 * nbytes, CAUSAL: 6 * 4 * nbytes, Band(-63, 0): 5 * 4 * nbytes}


# **** exact ****

@pytest.mark.parametrize("schedule", [WIDE, LOW, SMALL, HALVED], ids=str)
def test_one_key_takes_all(schedule: BackwardWgmma):
    """Rows that see one key each have p = 1 and ds = 0: dv is the gradient, dq and dk are zeros."""
    spec = backward(150, 150, 64, F16, band=Band(0, 0))
    given = arguments(spec)
    for name in ("q", "k", "v", "grad"): given[name].copy_((given[name] * 2).round())
    q, k, v, grad = (each.double() for each in rows_of(given, spec))
    lies(spec, given, "l").copy_((q * k).sum(-1) / 8)
    lies(spec, given, "delta").copy_((v * grad).sum(-1))
    got = run(TABLE.build(spec, schedule, GPU("sm_90a")), spec, given, "sm_90a")
    assert torch.equal(got.dv, grad.squeeze(2))
    assert (got.dk == 0).all()
    assert (got.dq == 0).all()


def rows_of(given: Given, spec: object) -> list[torch.Tensor]:
    return [lies(spec, given, name) for name in ("q", "k", "v", "grad")]  # type: ignore[arg-type]


def test_equal_scores_share():
    """Queries are 0, so that p is 1/64 for each key of a window of 64; small integers, of which nothing is
    rounded: dk is 0, dv and dq are sums."""
    spec = backward(64, 128, 64, out=F32, band=Band(-63, 0), start=63, score=None)
    given = arguments(spec)
    random = torch.Generator().manual_seed(3)
    for name in ("k", "v", "grad"):
        given[name].copy_(torch.randint(-2, 3, given[name].shape, generator=random))
    given["q"].zero_()
    lies(spec, given, "l").fill_(6 * 0.6931471805599453)
    lies(spec, given, "delta").fill_(1.0)
    got = run(TABLE.build(spec, LOW, GPU("sm_90a")), spec, given, "sm_90a")
    k, v, grad = (each.double()[0, 0, 0] for each in rows_of(given, spec)[1:])
    row, key = torch.arange(64)[:, None] + 63, torch.arange(128)[None, :]
    p = ((key <= row) & (key >= row - 63)).double() / 64
    assert (got.dk == 0).all()
    assert torch.equal(got.dv[0, 0], p.T @ grad)
    assert torch.equal(got.dq[0, 0, 0], (p * (grad @ v.T - 1) / 8).bfloat16().double() @ k)


def test_a_rows_share_does_not_depend_on_other_rows():
    """dq of five rows, alone and among others: the same bits."""
    spec, alone = (backward(s_q, 100, 64) for s_q in (70, 5))
    given = arguments(spec)
    few = {name: storage.clone() for name, storage in given.items()}
    few |= {name: given[name][:5 * (64 if name in ("dq", "q", "grad") else 1)].clone()
            for name in ("dq", "q", "grad", "l", "delta")}
    many = run(TABLE.build(spec, LOW, GPU("sm_90a")), spec, given, "sm_90a")
    some = run(TABLE.build(alone, LOW, GPU("sm_90a")), alone, few, "sm_90a")
    assert torch.equal(some.dq, many.dq[..., :5, :])


# **** layouts ****

@pytest.mark.parametrize("order", ["bhr", "brh"])
@pytest.mark.parametrize("gap", [0, 8])
def test_layouts(order: str, gap: int):
    """Heads in either order, shared by a group."""
    close(backward(40, 130, 40, batch=2, heads=2, group=3, order=order, gap=gap))


def test_memory_is_touched_after_the_kernel_before():
    """And the next kernel may begin when the last copies are on their way."""
    made = TABLE.build(backward(64, 128, 64, out=F32), LOW, GPU("sm_90a"))
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", made.ptx)]
    copies = [found.start() for found in re.finditer(r"cp\.async\.bulk\.tensor", made.ptx)]
    done = made.ptx.index("griddepcontrol.launch_dependents")
    assert made.pdl
    assert len(waits) == 3
    assert waits[0] < copies[0] < copies[-1] < done < waits[1] < made.ptx.index("ld.global") < waits[2]
    assert waits[2] < made.ptx.index("cp.reduce") < made.ptx.index("st.global")


# **** one order of sums ****

@pytest.mark.parametrize("band", [FULL, Band(-100, 20), Band(100, None)], ids=str)
@pytest.mark.parametrize(("d", "schedule"), [(80, LOW), (32, WIDE), (16, SMALL), (32, HALVED)], ids=str)
def test_a_deterministic_sum_is_the_same_whatever_is_done_first(d: int, schedule: BackwardWgmma, band: Band):
    """Of three blocks of keys."""
    spec = backward(100, 2 * schedule.block_n + 10, d, band=band, group=2, deterministic=True)
    made, given = TABLE.build(spec, schedule, GPU("sm_90a")), arguments(spec)
    first, second = (run(made, spec, given, "sm_90a", seed) for seed in (1, 2))
    near(spec, given, first)
    assert torch.equal(first.dq, second.dq)


@pytest.mark.parametrize(("schedule", "add", "fence"), [(LOW, "cp.reduce", "fence.proxy.async.global"), (
    HALVED, "red.relaxed", "bar.warp.sync")], ids=["by TMA", "from registers"])
def test_what_a_turn_orders(schedule: BackwardWgmma, add: str, fence: str):
    """Between turns other threads, or the other proxy, add: fences that the emulator does not ask for."""
    spec = backward(100, 200, 64, deterministic=True)
    ptx = TABLE.build(spec, schedule, GPU("sm_90a")).ptx
    taken, added = ptx.index("ld.acquire.gpu"), ptx.index(add)
    given = ptx.index("red.release.gpu", added)
    assert taken < ptx.index(fence, taken) < added
    done = ptx[ptx.rindex(add):given] if schedule == HALVED else ptx[added:given]
    wanted = ("fence.acq_rel.gpu", "bar.warp.sync") if schedule == HALVED else ("cp.async.bulk.wait_group",)
    at = [done.index(each) for each in wanted]
    assert at == sorted(at)
    assert "wait_group.read" not in ptx[added:given]
