"""Predicted time of training steps on an H100, kernel by kernel. Nothing is measured; no GPU is needed.

    python bench/timing/train_gpu_model.py [gpt2-124m] [llama-3.1-8b] [--rows 16] [--checkpointing full]

The steps are those of `tinygrad-nv train` in bfloat16 with AdamW (train/step.py), scheduled for the emulated
H100 and not run, as `tinygrad-nv train --plan` does. GPT-2's shapes are those of a LLaMA: there is no family
of GPT-2 here. Of models of many layers 2 and 3 are scheduled: the others have the launches of the third.
Kernels whose arguments grow with the layers (the update of all parameters) are one launch of more bytes.

A kernel is `modelled` where the timing model (ptx/timing) has run its PTX: one launch in a row of equal
ones, each distinct kernel once. It is `roofline` where tinygrad generates it, or it moves more than the
emulator holds: its operations at the float32 peak, or its bytes at the share of HBM that streaming reaches,
whichever takes longer, and a launch of a graph. Both are predictions. A step is their sum: what kernels may
do side by side is not taken off. MFU counts the operations of PaLM's appendix B. One GPU is taken to hold the
step, though an 8B model with its states takes more than an H100 has.

Writes results/train_gpu_model.json and .png.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinygrad.helpers import Context
from tinygrad.uop.ops import Ops, UOp

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.timing.gate_cases import GPU_NAME, HOPPER
from bench.timing.rows import total_seconds
from tinygrad_nv.dist.plan import compute
from tinygrad_nv.dist.plan.cluster import Device, device
from tinygrad_nv.dist.plan.layout import Training
from tinygrad_nv.dist.plan.presets import preset
from tinygrad_nv.dist.plan.training import operations
from tinygrad_nv.errors import NVError
from tinygrad_nv.explain import count_work
from tinygrad_nv.models.config import ModelConfig, parse_config
from tinygrad_nv.progress import bar
from tinygrad_nv.runtime.note import note_of
from tinygrad_nv.table import align_columns
from tinygrad_nv.tile.emulated import timings
from tinygrad_nv.tile.templates import TABLE
from tinygrad_nv.train.arguments import make_arguments
from tinygrad_nv.train.plan.memory import shorten, step_programs

RESULTS = Path(__file__).parents[1] / "results" / "train_gpu_model"
EMULATED = "EMU"
LARGEST = 2 << 30       # bytes of a kernel's arguments that the emulator is given
WHOLE = 12              # layers that are scheduled one by one
FEW = 2, 3              # layers that are scheduled of models of more
GPT2 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768,
        "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 12, "vocab_size": 50304, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True}
STEPS = {"gpt2-124m": (16, 1024), "llama-3.1-8b": (1, 8192)}     # rows and tokens of each


@dataclass(frozen=True)
class Kernel:
    """A distinct kernel: `template` "" for one that tinygrad generates; `seconds` of a launch."""
    name: str
    template: str
    what: str
    launches: int
    flops: int
    nbytes: int
    seconds: float
    how: str

    @property
    def total_s(self) -> float:
        """Seconds of all launches."""
        return self.launches * self.seconds


# **** which kernels ****

@dataclass(frozen=True)
class Call:
    """A launch, by what is equal in equal launches."""
    name: str
    template: str
    spec: Any
    schedule: Any
    flops: int
    nbytes: int

    @property
    def kind(self) -> Hashable:
        """The part that it has in common with the one that is there in its place in a model of more
        layers."""
        return self.template or "tinygrad"


def calls_of(config: ModelConfig, options: dict[str, Any]) -> list[Call]:
    """The launches of a step, in order."""
    with Context(TRAINING=1): programs = step_programs(config, make_arguments(options), 1, EMULATED)
    return [_call(each) for program in programs for each in program.calls]


def _call(call: UOp) -> Call:
    note, (name, estimates) = note_of(call.src[0]), count_work(call, EMULATED)
    flops, nbytes = int(estimates.ops), int(estimates.mem)
    if note is None:
        return Call("copy" if call.src[0].op is Ops.COPY else name, "", None, None, flops, nbytes)
    return Call(name, note.template, note.spec, note.schedule, flops, nbytes)


def launches_of(config: ModelConfig, options: dict[str, Any]) -> dict[Call, int]:
    """Distinct launches of a step and how often each is there, of many layers from few."""
    if config.num_layers <= WHOLE: return dict(Counter(calls_of(config, options)))
    low, high = (Counter(calls_of(shorten(config, layers), options)) for layers in FEW)
    more, found = config.num_layers - FEW[1], dict[Call, int]()
    gone = [each for each in low if each not in high]
    for each, count in high.items():
        grown = next((other for other in gone if other.kind == each.kind and low[other] == count), None) \
            if each not in low else None
        if grown is None: found[each] = count + more * (count - low[each])
        else:
            gone.remove(grown)
            flops, nbytes = each.flops - grown.flops, each.nbytes - grown.nbytes
            found[replace(each, flops=each.flops + more * flops, nbytes=each.nbytes + more * nbytes,
                          spec=None, schedule=None)] = count
    return {each: count for each, count in found.items() if count > 0}


# **** how long they take ****

def predict(call: Call, count: int, gpu: Device) -> Kernel:
    """By the timing model, else by a roofline."""
    how, seconds = "roofline", _roofline(call, gpu)
    if call.spec is not None and call.schedule is not None and call.nbytes <= LARGEST:
        try:
            found = timings(TABLE.build(call.spec, call.schedule, HOPPER), call.spec, GPU_NAME)
            if found:
                one, four = (total_seconds(found * times, pdl=True) for times in (1, 4))
                how, seconds = "modelled", (four - one) / 3
        except (NVError, MemoryError, AssertionError) as error: print(f"{call.name}: {error}")
    what = f"{call.flops:,} operations, {call.nbytes:,} bytes" if call.spec is None else str(call.spec)
    return Kernel(call.name, call.template, what, count, call.flops, call.nbytes, seconds, how)


def _roofline(call: Call, gpu: Device) -> float:
    model = gpu.model
    rate = 2.0 * model.fp32_fma * model.sm_count * model.clock_hz
    if call.template and call.flops > call.nbytes * 64: rate = compute.tensor_core_rate(gpu, "bf16")
    return compute.launch_s(gpu) + max(call.nbytes / compute.stream_rate(gpu), call.flops / rate)


def step(name: str, rows: int, tokens: int, checkpointing: str | None) -> dict[str, Any]:
    """A row of the results."""
    config, gpu = parse_config(GPT2) if name == "gpt2-124m" else preset(name), device("H100")
    options: dict[str, Any] = {"dtype": "bfloat16", "max_length": tokens, "per_device_train_batch_size": rows}
    if checkpointing: options |= {"gradient_checkpointing": True,
                                  "gradient_checkpointing_policy": checkpointing}
    distinct = launches_of(config, options)
    kernels = []
    with bar("predicting kernels") as shown:
        for call, count in distinct.items():
            kernels.append(predict(call, count, gpu))
            shown(len(kernels), len(distinct))
    kernels.sort(key=lambda each: -each.total_s)
    seconds, work = sum(each.total_s for each in kernels), Training(rows, tokens, rows)
    own = [each for each in kernels if not each.template]
    return {"model": name, "gpu": gpu.name, "parameters": config.parameters, "rows": rows, "tokens": tokens,
            "checkpointing": checkpointing or "none", "predicted_s": seconds,
            "tokens_per_s": rows * tokens / seconds,
            "mfu": operations(config, work) / seconds / gpu.peak_flops_per_s,
            "launches": sum(each.launches for each in kernels),
            "tinygrad_launches": sum(each.launches for each in own),
            "tinygrad_share": sum(each.total_s for each in own) / seconds,
            "modelled_share": sum(each.total_s for each in kernels if each.how == "modelled") / seconds,
            "kernels": [{"name": each.name, "template": each.template or None, "what": each.what,
                         "launches": each.launches, "us": each.seconds * 1e6,
                         "share": each.total_s / seconds, "how": each.how} for each in kernels]}


# **** shown ****

def text(found: dict[str, Any], most: int = 30) -> str:
    """The largest shares as a table."""
    rows = [("kernel", "launches", "us each", "share", "how", "of")]
    rows += [(each["name"], str(each["launches"]), f"{each['us']:.1f}", f"{each['share']:.1%}", each["how"],
              ("" if each["template"] else "tinygrad: ") + each["what"]) for each in found["kernels"][:most]]
    head = (f"{found['model']}, {found['rows']} x {found['tokens']} tokens on {found['gpu']}, predicted: "
            f"{found['predicted_s'] * 1e3:.1f} ms, {found['tokens_per_s']:,.0f} tokens/s, MFU "
            f"{found['mfu']:.1%}; {found['launches']} launches, {found['tinygrad_launches']} of them "
            f"tinygrad's own ({found['tinygrad_share']:.1%} of the time)")
    return "\n".join([head, *align_columns(rows, (1, 2, 3))])


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Shares of templates, one bar a step."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + len(found)))
    names = [f"{each['model']}\n{each['predicted_s'] * 1e3:.0f} ms, MFU {each['mfu']:.0%}" for each in found]
    shares = [Counter[str]() for _ in found]
    for share, each in zip(shares, found, strict=True):
        for kernel in each["kernels"]: share[kernel["template"] or "tinygrad's own"] += kernel["share"]
    order = sorted({name for share in shares for name in share},
                   key=lambda name: -max(share[name] for share in shares))
    for number, name in enumerate(order):
        left = [sum(share[other] for other in order[:number]) for share in shares]
        axes.barh(names, [share[name] for share in shares], left=left, label=name,
                  color=pyplot.get_cmap("tab20")(number % 20))
    axes.set_xlabel("share of a step on an H100, predicted")
    axes.set_xlim(0, 1)
    axes.legend(ncol=5, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*STEPS, []], help="default: all")
    parser.add_argument("--rows", type=int, help="of a step (default 16 of gpt2-124m, 1 of llama-3.1-8b)")
    parser.add_argument("--checkpointing", help="what layers keep, as --gradient-checkpointing-policy")
    given = parser.parse_args()
    found = []
    for name in given.models or STEPS:
        rows, tokens = STEPS[name]
        found.append(step(name, given.rows or rows, tokens, given.checkpointing))
        print(text(found[-1]), flush=True)
    path = RESULTS.with_suffix(".json")
    known = {each["model"]: each for each in json.loads(path.read_text())["steps"]} if path.exists() else {}
    known |= {each["model"]: each for each in found}
    path.write_text(json.dumps({"modelled": True, "steps": list(known.values())}, indent=1) + "\n")
    plot(list(known.values()), RESULTS.with_suffix(".png"))


if __name__ == "__main__": main()
