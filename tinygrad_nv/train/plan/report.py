"""A plan of training as text, and how long a step takes on a GPU, by dist/plan."""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.dist.plan.cluster import Cluster, cluster, figures
from tinygrad_nv.dist.plan.layout import Layout, Training, require
from tinygrad_nv.dist.plan.report import milliseconds
from tinygrad_nv.dist.plan.training import operations, train
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.runtime.observe.memory_report import human
from tinygrad_nv.table import align_columns
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.plan.memory import RankMemory

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
    """Returns the speed of a step of data parallel ranks on GPUs of one name. Times are modelled: those of
    `tinygrad-nv plan --train`, of bfloat16, whole fine-tuning and AdamW, whatever the arguments' dtype is;
    there are none of adapters and preferences. Operations are those that MFU counts (PaLM, appendix B): 6 for
    each parameter in a matmul and token, and those of attention; without the gradients of weights that stay,
    and with the reference of DPO. What is computed again is not among them. Raises `PlanError` for a GPU
    without figures."""
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


def text(name: str, arguments: TrainingArguments, ranks: int, device: str, memory: RankMemory,
         speed: StepSpeed) -> str:
    """Returns a report of a rank's memory, scheduled for a device, and of a step of all ranks."""
    each = "" if ranks == 1 else f" of each of {ranks} ranks"
    held = align_columns([(f"memory on {device}{each}", ""),
                    *((part, human(size)) for part, size in memory.parts.items()),
                    ("peak", human(memory.total)), *_room(device, memory, speed)], (1,))
    lines = [f"{name}: {_setting(arguments)}", "nothing has run: bytes are scheduled, times are modelled", "",
             *held]
    if memory.host:
        lines += ["", *align_columns([("memory of the host", ""),
                                *((part, human(size)) for part, size in memory.host.items())], (1,))]
    if memory.layers:
        low, high = memory.layers
        lines += [f"scheduled with {low} and {high} layers, from which that of all follows"]
    return "\n".join([*lines, "", *align_columns(_step(memory, speed), (1,))])


def _setting(arguments: TrainingArguments) -> str:
    """The options that decide memory."""
    a = arguments
    said = [a.method, a.precision or a.dtype, a.optim, f"rows of {a.max_length} tokens",
            f"{a.per_device_train_batch_size} x {a.gradient_accumulation_steps} a step"]
    if a.use_peft: said.append(f"adapter of rank {a.lora_r}")
    if a.zero_stage: said.append(f"ZeRO {a.zero_stage}")
    if not a.regions.keeps_all: said.append(f"checkpointing {a.gradient_checkpointing_policy}")
    return ", ".join(said)


def _room(device: str, memory: RankMemory, speed: StepSpeed) -> list[tuple[str, str]]:
    """Whether it fits into a GPU."""
    if device.partition(":")[0] == "CPU": return []
    gpu = speed.gpus.device
    left = gpu.memory_bytes - figures()["overhead"]["context_bytes"] - memory.total
    if left >= 0: return [(f"free of {gpu.name}", human(left))]
    return [(f"more than {gpu.name} has", human(-left))]


def _step(memory: RankMemory, speed: StepSpeed) -> list[tuple[str, str]]:
    rows = [("a step", ""), ("tokens, at most", f"{speed.tokens:,}"),
            ("operations", f"{speed.operations / 1e12:,.4g} T"), ("kernels of a rank", f"{memory.kernels:,}")]
    where = f"{speed.gpus.gpus} x {speed.gpus.device.name}"
    if speed.seconds is None: return [*rows, (f"time on {where}", "no model")]
    return [*rows, (f"time on {where}, bfloat16", f"{milliseconds(speed.seconds)} ms"),
            ("tokens/s", f"{speed.tokens / speed.seconds:,.0f}"), ("MFU", f"{speed.mfu:.1%}")]
