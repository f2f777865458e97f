"""Tuning of matmuls for tile/tune.py: which schedules are worth trying, and what one takes by counters."""
from __future__ import annotations

from collections import Counter

from tinygrad_nv.tile.gemm import trial
from tinygrad_nv.tile.gemm.analytic import analytic
from tinygrad_nv.tile.gemm.candidates import space
from tinygrad_nv.tile.gemm.cost import CostModel
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.template import GPU

RINGS = 2   # of schedules that differ in stages alone


def candidates(spec: GemmSpec, gpu: GPU, count: int) -> list[GemmSchedule]:
    """Returns the schedule that the cost model chooses, and so many others that it likes; of those that
    differ in stages alone, two."""
    model = CostModel(spec, gpu_model_for(gpu.arch, gpu.sm_count))
    favourite = analytic(spec, gpu.arch, model.gpu_model.sm_count)
    if favourite is None: return []
    ranked = sorted(space(spec, GPU(gpu.arch, model.gpu_model.sm_count)),
                    key=lambda s: model.predict(s).seconds)
    made, alike = [favourite], Counter([favourite.without_stages])
    for s in ranked:
        if len(made) > count: break
        if s == favourite or alike[s.without_stages] >= RINGS: continue
        alike[s.without_stages] += 1
        made.append(s)
    return made


def counter_cost(spec: GemmSpec, s: GemmSchedule, gpu: GPU, registers: int) -> float:
    """The cost model's seconds, of the emulator's counters and of registers as they are."""
    model = CostModel(spec, gpu_model_for(gpu.arch, gpu.sm_count))
    done = trial.work_from_trial(trial.counters(spec, s, gpu.arch), model, s)
    return model.predict_work(s, done, registers).seconds
