"""Plan of a run of training, before it runs: memory of a rank, and the time of a step on a GPU.

Protocol: `planned(name, config, arguments, gpu)` is what `tinygrad-nv train --plan` prints. Read in this
order:
  programs.py    programs that are scheduled, and not run: their buffers, and when these are alive
  memory.py      the memory of a rank, by what it holds; models of fewer layers, from which it is extrapolated
  report.py      a plan as text; operations of a step, and its time on a GPU by dist/plan
"""
from __future__ import annotations

from tinygrad import Device

from tinygrad_nv.errors import PlanError
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.plan.memory import RankMemory, rank_memory
from tinygrad_nv.train.plan.report import step_speed, text

__all__ = ["RankMemory", "make_plan", "rank_memory"]

GPU = "H100"            # whose time is told where none is named
SCHEDULED = "EMU"       # the device whose kernels are those of a GPU


def make_plan(name: str, config: ModelConfig, arguments: TrainingArguments, gpu: str | None = None) -> str:
    """A plan as text. `gpu`: what runs it; None: the device of this process, and the time of an H100. Raises
    `PlanError`, and what a run of the arguments raises."""
    _require(arguments)
    ranks = max(1, arguments.data_parallel_size)
    speed = step_speed(config, arguments, ranks, gpu or GPU)
    device = Device.DEFAULT if gpu is None else SCHEDULED
    memory = rank_memory(config, arguments, ranks, device)
    shown = device if gpu is None else speed.gpus.device.name
    return text(name, arguments, ranks, shown, memory, speed)


def _require(arguments: TrainingArguments) -> None:
    """Raises `PlanError` for ranks whose programs are not planned."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        if (size := getattr(arguments, name)) == 1: continue
        raise PlanError(f"--plan with --{name.replace('_', '-')} {size}", "data parallel ranks, which have "
                        "whole layers and rows", "leave it out, or see `tinygrad-nv plan --train`")
