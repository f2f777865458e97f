"""The part "train" of bench/gpu/run.py: what a step of training does beside matmuls and attention, GB/s.

Shapes are those of a step of GPT-2 124M (16 x 1024 tokens) and of Llama 3.1 8B (1 x 8192), as
bench/timing/train_gpu_model.py predicts them: cross entropy with its gradient, of the rows that a step has at
once; AdamW of all parameters, and the norm of their gradients; gradients of a table's rows, of biases and of
norms' weights; rotary positions and gated activations, backwards. GB/s count what must move: operands and
results once; "of 3.35 TB/s" is the share of what an H100's memory is said to move.

"torch" is its own functions as they are called (fused AdamW; of bfloat16 parameters with copies from and to
float32 ones, since it has no masters), "compiled" the same by torch.compile, "Triton" cross entropy as
Liger-Kernel has it, "copy" moves as many bytes.
`modelled_us` is what train_gpu_model.py predicted, where it did. All is compared with float64
(train_workloads.py).

With --emulate: each workload scaled down, whose results must be right.
"""
from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench.gpu.compare import check_on_emulator, raw
from bench.gpu.elementwise import copy
from bench.gpu.launch import bind_sets, device, make_launch
from bench.gpu.parts import (
    Column,
    NotMeasured,
    Options,
    Row,
    Run,
    about,
    contender,
    emulation,
    timing_part,
    torch_compile,
    verdict_row,
    workloads,
)
from bench.gpu.train_updates import Squares, Update, gpt2, llama
from bench.gpu.train_workloads import (
    BETA1,
    BETA2,
    BF16,
    DECAY,
    IGNORED,
    RATE,
    STEP,
    TINY,
    Columns,
    CrossEntropy,
    EmbeddingGradient,
    GatedGradient,
    One,
    Rope,
    Workload,
)
from bench.lib.measure import RESULTS
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.tile.kernel import Chain
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HBM = 3.35e12       # bytes a second of an H100 SXM, as published
Sets = Sequence[One]


@workloads("train")
def shapes() -> Iterator[Any]:
    """All rows."""
    yield CrossEntropy(4096, 50304)
    yield CrossEntropy(2048, 128256)
    yield Update("GPT-2 124M", *gpt2())
    yield Update("GPT-2 124M", *gpt2(), BF16)
    yield Squares("GPT-2 124M", sum(gpt2(), ()))
    yield EmbeddingGradient(50304, 768, 16384)
    yield EmbeddingGradient(128256, 4096, 8192)
    yield Columns("norm weight", 8192, 4096)
    yield Columns("bias", 16384, 768)
    yield Rope(1, 8192, 32, 8, 128, gradient=True)
    yield GatedGradient(8192, 14336)
    yield Rope(1, 8192, 32, 8, 128)
    yield CrossEntropy(4096, 50304, BF16)
    yield Update("2 layers of Llama 8B", *llama(2), BF16)


# **** ours ****

def bind_launch(driver: Driver, workload: Any, at: Mapping[str, int]) -> Callable[[Any], None]:
    """A launch of ours on memory by name, with scratch memory of its own."""
    gpu, spec = GPU(driver.properties.arch, driver.properties.sm_count), workload.spec
    made = TABLE.build(spec, TABLE.choose(spec, gpu), gpu)
    out, *others = (at[name] for name in workload.names)
    if isinstance(made, Chain):
        between = driver.alloc(made.between.nbytes)
        both = [make_launch(driver, [made.first], [between, *others]),
                make_launch(driver, [made.second], [out, between])]
    else:
        scratch = [driver.alloc(each.nbytes) for each in made.scratch]
        rows = spec.m if isinstance(spec, NormSpec) else 0
        both = [make_launch(driver, made.kernels, [out, *scratch, *others], rows=rows)]

    def submit(stream: Any) -> None:
        for each in both: each(stream)

    return submit


def compute_norm(one: One) -> None:
    """Computes what torch does behind a kernel of ours: of sums of squares the norm."""
    if "norm" in one: one["norm"].copy_(one["sums"].sum(0, keepdim=True).sqrt_())


@contender("train", "ours")
def ours(workload: Any, given: Sets, options: Options) -> Run:
    """Our kernels by the default schedule."""
    gpu = device()
    launch = bind_sets(gpu, partial(bind_launch, gpu, workload), given, workload.names)
    kept = [dict(one) for one in given]

    def run(i: int) -> None:
        launch(i)
        compute_norm(kept[i])

    stepping(given, run, lambda: STEP)
    return run


def stepping(given: Sets, run: Run, t: Callable[[], float]) -> None:
    """How a set takes one more step, and that step's number."""
    for i, one in enumerate(given): one |= {"again": functools.partial(run, i), "t": t}


@about("train")
def describe_schedule(workload: Any) -> dict[str, Any]:
    """The schedule of `ours`, and what was predicted."""
    gpu = GPU(device().properties.arch, device().properties.sm_count)
    return {"schedule": str(TABLE.choose(workload.spec, gpu)), **predictions(workload)}


def predictions(workload: Any) -> dict[str, float]:
    """Returns the prediction of train_gpu_model.py for the kernel, of sums of columns without the sums of
    these groups; nothing where it has none, or of three kernels one."""
    path = RESULTS / "train_gpu_model.json"
    if not path.exists() or isinstance(workload, EmbeddingGradient): return {}
    found = {kernel["what"]: kernel["us"] for step in json.loads(path.read_text())["steps"]
             for kernel in step["kernels"]}
    what = str(workload.spec)
    return {"modelled_us": round(found[what], 1)} if what in found else {}


@emulation("train")
def run_emulated(workload: Any, options: Options) -> Row:
    """The workload scaled down, on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, driver = workload.scale_down(), EmulatedDriver(options.arch, seed=options.seed)
    if isinstance(small, Update): wrong = one_step(small, driver)
    else:
        written = ("sums",) if isinstance(small, Squares) else small.results
        wrong = check_on_emulator(small, driver, partial(bind_launch, driver, small), written,
                                  compute_norm)
    return verdict_row(wrong, str(TABLE.choose(workload.spec, GPU(options.arch))))


def one_step(workload: Update, driver: Any) -> str:
    """How two emulated steps are not what they must be."""
    import torch
    one = workload.make_inputs("cpu")[0]
    at = {name: driver.alloc(one[name].nbytes) for name in workload.names}
    for name in workload.names: driver.copy_in(at[name], memoryview(raw(one[name])))
    run = bind_launch(driver, workload, at)

    def again(i: int) -> None:
        run(None)
        for name in workload.names:
            data = bytearray(one[name].nbytes)
            driver.copy_out(memoryview(data), at[name])
            one[name].copy_(torch.frombuffer(data, dtype=one[name].dtype))

    stepping([one], again, lambda: STEP)
    return workload.unlike(one) or workload.unlike(one)


# **** the others ****

def bind_torch(given: Sets, function: Callable[[One], One]) -> Run:
    """A function of torch, on each set in turn."""
    kept = [dict(one) for one in given]
    return lambda i: given[i].update(function(kept[i]))


@contender("train", "torch")
def torch_eager(workload: Workload, given: Sets, options: Options) -> Run:
    """torch's own functions."""
    if isinstance(workload, Update): return torch_adamw(workload, given)
    return bind_torch(given, workload.theirs)


@contender("train", "compiled")
def torch_compiled(workload: Workload, given: Sets, options: Options) -> Run:
    """The same by torch.compile."""
    if isinstance(workload, Update | Squares): raise NotMeasured("left out, to save time")
    return bind_torch(given, torch_compile(workload.compilable))


@contender("train", "Triton")
def triton(workload: Any, given: Sets, options: Options) -> Run:
    """Liger-Kernel's way; of cross entropy alone."""
    if not isinstance(workload, CrossEntropy): raise NotMeasured("of cross entropy alone")
    from bench.lib.memory_peers import cross_entropy
    kept = [dict(one) for one in given]

    def run(i: int) -> None:
        one = kept[i]
        given[i].update({name: one[name] for name in workload.results})
        cross_entropy(one["gradient"], one["losses"], one["logits"], one["labels"], IGNORED)

    return run


def torch_adamw(workload: Update, given: Sets) -> Run:
    """torch's fused AdamW on the same parameters, with state of its own; with masters two copies beside."""
    import torch
    one, spec, steps = given[0], workload.spec, range(len(workload.spec.counts))
    x, grads = ([one[f"{kind}{i}"] for i in steps] for kind in "xg")
    own = [torch.nn.Parameter(one[f"w{i}"] if spec.master else one[f"x{i}"]) for i in steps]
    for each, grad in zip(own, grads, strict=True): each.grad = grad.float() if spec.master else grad
    wide = [each.grad for each in own]
    split = len(workload.decayed)
    optimizer = torch.optim.AdamW([{"params": own[:split], "weight_decay": DECAY},
                                   {"params": own[split:], "weight_decay": 0.0}], lr=RATE,
                                  betas=(BETA1, BETA2), eps=TINY, fused=True, capturable=x[0].is_cuda)

    def run(i: int) -> None:
        if spec.master: torch._foreach_copy_(wide, grads)
        optimizer.step()
        if spec.master: torch._foreach_copy_(x, [each.detach() for each in own])

    run(0)  # makes its state
    for i, each in enumerate(own):
        state = optimizer.state[each]
        one |= {f"m{i}": state["exp_avg"], f"v{i}": state["exp_avg_sq"]}
    stepping(given, run, lambda: float(optimizer.state[own[0]]["step"]))
    return run


contender("train", "copy")(copy)
timing_part("train", "what a step of training does beside matmuls and attention",
            Column("GB/s", "nbytes", 1e9, ".0f"), expected_s=8.0,
            also=Column("of 3.35 TB/s", "nbytes", HBM, ".0%"))
