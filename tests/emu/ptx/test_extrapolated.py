"""Predictions from a few recorded clusters beside all clusters of a grid, run on all SMs of a small GPU."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.lib.specs import BF16, attention, matmul, rms
from tests.emu.ptx.test_predicted import predicted
from tinygrad_nv.ptx.timing import model
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.job import code_of, make_job
from tinygrad_nv.ptx.timing.l2 import shares_of
from tinygrad_nv.ptx.timing.simulator import run
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.gemm.schedules import Mma, Wgmma
from tinygrad_nv.tile.template import GPU

SMS = 6
H100 = figures("h100")
SMALL = replace(H100, sms=SMS, hbm_bytes_per_s=H100.hbm_bytes_per_s * SMS / 132,
                l2_bytes_per_cycle=H100.l2_bytes_per_cycle * SMS / 132, power_w=1e9)   # at the highest clock
OF_MMA = Mma().block(128, 128).k(32).warps(2, 4).stages(3)
FEW_STAGES = Wgmma().block(128, 128).k(64).stages(2)
# the spec, a schedule, and how far off: most for one recorded cluster of a grid with several tiles each
# of different lengths, for CTAs that share an SM, and for one that has it to itself at the end
CASES = {
    "gemm of one wave": (matmul(256, 384, 512), FEW_STAGES, 0.001),
    "persistent gemm": (matmul(128 * 3, 128 * 5, 512), FEW_STAGES, 0.001),
    "gemm of 7 waves": (matmul(128 * 8, 128 * 5, 128), OF_MMA, 0.07),
    "gemv, 6 CTAs an SM": (matmul(1, 4096, 256), None, 0.03),
    "attention": (attention(128 * 13, 512, 64, BF16, batch=1, heads=1), None, 0.05),
    "causal": (attention(1024, 1024, 64, BF16, batch=1, heads=4, band=Band(None, 0)), None, 0.06),
    "norm, 32 CTAs an SM": (rms(300, 1024), None, 0.05),
}


def whole(listing, entry, shape, tapes, gpu, memory, begins, log=0):
    """Cycles of all clusters, each on the SM that is its turn: what `model.predict_work` is called with."""
    code, first = code_of(listing, entry, gpu), shape.ctas_of_sm(gpu)
    notes = np.concatenate([tape.notes for tape in tapes.warps])
    shares = shares_of(tapes.reads, memory, notes, 1.0, first, gpu)
    ends = np.cumsum([len(tape.notes) for tape in tapes.warps])[:-1]
    sms = [tape.cluster * shape.ctas % SMS + tape.rank for tape in tapes.warps]
    job = make_job(code, tapes.warps, gpu, np.split(shares, ends), sms, first)
    return run(job, gpu, shape.busy_sms(gpu)).cycles


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_some_clusters_say_what_all_take(name: str, monkeypatch: pytest.MonkeyPatch):
    spec, schedule, tolerance = CASES[name]
    monkeypatch.setattr(model, "figures", lambda _: SMALL)
    target = GPU("sm_90a", SMS)
    few = predicted(spec, schedule, target=target)
    monkeypatch.setattr(model, "clusters_to_record", lambda shape, *_: list(range(shape.clusters)))
    found: list[int] = []

    def all_of_them(*words):
        found.append(whole(*words))
        return few
    monkeypatch.setattr(model, "predict_tapes", all_of_them)
    predicted(spec, schedule, target=target)
    assert few.cycles == pytest.approx(found[0], rel=tolerance)
