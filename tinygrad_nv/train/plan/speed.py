"""Operations of a step, and how long it takes on a GPU, by dist/plan.

Protocol: `step_speed(config, arguments, ranks, gpu)` is of data parallel ranks on GPUs of one name. Times are
modelled: those of `tinygrad-nv plan --train`, of bfloat16, whole fine-tuning and AdamW, whatever the
arguments' dtype is; there are none of adapters and preferences. Operations are those that MFU counts (PaLM,
appendix B): 6 for each parameter in a matmul and token, and those of attention; without the gradients of
weights that stay, and with the reference of DPO. What is computed again is not among them.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.dist.plan.cluster import Cluster, cluster
from tinygrad_nv.dist.plan.layout import Layout, Training, require
from tinygrad_nv.dist.plan.training import operations, train
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.train.arguments import TrainingArguments

# what of a layer's matmuls is computed again, in dist/plan's words
RECOMPUTED = {"none": "none", "full": "full", "offload": "full", "selective": "selective",
              "dots": "selective", "budget": "selective"}


@dataclass(frozen=True)
class StepSpeed:
    """`tokens` and `operations` of a step of all ranks; `seconds` None where there is no model of them."""
    gpus: Cluster
    tokens: int
    operations: float
    seconds: float | None
    mfu: float


def step_speed(config: ModelConfig, arguments: TrainingArguments, ranks: int, gpu: str) -> StepSpeed:
    """Returns the speed of a step of all ranks. Raises `PlanError` for a GPU without figures."""
    where, rows = cluster(f"{ranks}x{gpu}"), arguments.per_device_train_batch_size
    if arguments.method == "dpo": rows *= 2
    work = Training(rows * arguments.gradient_accumulation_steps * ranks, arguments.max_length, rows,
                    zero=arguments.zero_stage, recompute=RECOMPUTED[arguments.regions.name])
    layout = Layout(dp=ranks)
    require(layout, config, where, work)
    passes = (2 if arguments.use_peft else 3) + (arguments.method == "dpo")
    counted = operations(config, work) * passes / 3
    if arguments.use_peft or arguments.method == "dpo":
        return StepSpeed(where, work.batch * work.seq_len, counted, None, 0.0)
    step = train(config, layout, work, where)
    return StepSpeed(where, work.batch * work.seq_len, counted, step.seconds, step.mfu)
