"""The part "language" of bench/gpu/run.py: kernels in the tile language beside our templates for the same
thing, Triton and torch.

The kernels are those of language_gpu_model.py, with the schedules that the timing model chose there and left
in results/language_gpu_model.json: nothing is searched. Rows say what the model predicted of ours
(`predicted_s`). Matmuls have sums in float32 as results, in torch too (`out_dtype`), but bfloat16 in Triton;
of e4m3 all add sums of 128 products in float32. Attention of the standard library leaves LSE, too, which the
template does not here. Triton's matmuls are the quickest of two tiles, its others have the tile that the
model chose. Of 4-bit weights "torch" multiplies the dequantised matrix, "int4pack" is torch's
`_weight_int4pack_mm`, of bfloat16. Rows of norms and softmax show TB/s.

With --emulate: a few programs of the same blocks on the emulator, two sets in turns, whose results must be
right; CTAs go through programs, as they do on a GPU.
"""
from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.gpu import elementwise as gpu_elementwise
from bench.gpu.compare import check_on_emulator
from bench.gpu.language_workloads import (
    EMULATED_SMS,
    Flash,
    LanguageWorkload,
    Matmul,
    Quantised,
    Rows,
    Sets,
    model_cases,
    schedule_of,
)
from bench.gpu.launch import Submit, bind_sets, device, load_functions, make_launch
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
    verdict_row,
    workloads,
)
from bench.gpu.quant_contenders import _int4pack
from tinygrad_nv.language.building import build
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.template import GPU


@workloads("language")
def shapes() -> Iterator[LanguageWorkload]:
    """All rows."""
    yield Matmul(4096, 4096, 4096, "gemm 4096x4096x4096 bf16")
    yield Matmul(8192, 8192, 8192, "gemm 8192x8192x1024 bf16")
    yield Matmul(4096, 4096, 4096, "gemm 4096x4096x4096 e4m3", "e4m3")
    for d in (64, 128): yield Flash(1, 16, 4096, d, False)
    yield Flash(1, 16, 4096, 128, True)
    for form in ("rms", "softmax"): yield Rows(form, 4096, 4096)
    for m in (4096, 16): yield Quantised(m, 4096, 4096)


# **** ours ****

def kernel_of(workload: LanguageWorkload, gpu: GPU) -> tuple[TileKernel, list[str]]:
    """The kernel, and its tensors' storages in their order."""
    schedule, (kernel, tensors, constants) = schedule_of(workload), workload.kernel_call
    program = kernel.with_schedule(schedule).program(*tensors, **constants)
    made: TileKernel = build(program, schedule, gpu)
    return made, [workload.names.get(each.name, each.name) for each in program.tensors]


def binds(driver: Driver, workload: LanguageWorkload, gpu: GPU) -> Callable[[Mapping[str, int]], Submit]:
    """Makes launches of ours on memory by name."""
    made, names = kernel_of(workload, gpu)
    functions, nbytes = load_functions(driver, made.kernels), workload.zero_bytes
    return lambda at: make_launch(driver, made.kernels, [at[name] for name in names],
                                  zeroed=[(at["out"], nbytes)] if nbytes else (), functions=functions)


@contender("language", "ours")
def ours(workload: LanguageWorkload, given: Sets, options: Options) -> Run:
    """The kernel in the tile language."""
    gpu = device().properties
    return bind_sets(device(), binds(device(), workload, GPU(gpu.arch, gpu.sm_count)), given)


@about("language")
def describe_schedule(workload: LanguageWorkload) -> dict[str, Any]:
    """The schedule of `ours`, and what the model says."""
    case = model_cases()[workload.case]
    said = {"predicted_s": 1e-6 * case["language_us"], "predicted_template_s": 1e-6 * case["template_us"],
            "predicted_triton_s": 1e-6 * case["triton_us"]} if workload.is_predicted else {}
    return {"schedule": str(schedule_of(workload)), **said}


@emulation("language")
def run_emulated(workload: Any, options: Options) -> Row:
    """Scaled down, on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, driver = workload.scale_down(), EmulatedDriver(options.arch, seed=options.seed)
    gpu = GPU(options.arch, EMULATED_SMS)
    made, _ = kernel_of(small, gpu)
    wrong = check_on_emulator(small, driver, binds(driver, small, gpu))
    return verdict_row(wrong, f"{schedule_of(small)}; {made.threads} threads, {made.grid}")


# **** the others ****

@contender("language", "template")
def of_template(workload: LanguageWorkload, given: Sets, options: Options) -> Run:
    """Our template, with the schedule that it has without tuning."""
    return workload.template(given, options)


@contender("language", "Triton")
def of_triton(workload: LanguageWorkload, given: Sets, options: Options) -> Run:
    """Triton's kernel."""
    if importlib.util.find_spec("triton") is None: raise NotMeasured("Triton is not installed")
    return workload.triton(given, options)


@contender("language", "torch")
def of_torch(workload: LanguageWorkload, given: Sets, options: Options) -> Run:
    """torch."""
    return workload.torch(given, options)


@contender("language", "compiled")
def torch_compiled(workload: LanguageWorkload, given: Sets, options: Options) -> Run:
    """torch.compile, of rows."""
    if not isinstance(workload, Rows): raise NotMeasured("calls the same libraries as torch")
    return gpu_elementwise.torch_compiled(workload, given, options)


@contender("language", "int4pack")
def int4pack(workload: LanguageWorkload, given: Sets, options: Options) -> Run:
    """torch's matmul with 4-bit weights."""
    if not isinstance(workload, Quantised): raise NotMeasured("multiplies 4-bit weights alone")
    return _int4pack(workload, [{**one, "a": one["a"].bfloat16()} for one in given])


timing_part("language", "kernels in the tile language, beside templates, Triton and torch",
            Column("TFLOP/s, TB/s", form=".2f"), expected_s=8.0)
