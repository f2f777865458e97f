"""Cases of language_gpu_model.py: a kernel in the tile language, our template for the same, and Triton's.

Protocol: a `Case` has functions of a GPU's name. `language` gives the microseconds of the best of a few
schedules, `template` those of our template with the schedule that it has without tuning, `triton` those of
language_triton.py. The gradient of attention is one kernel of the template, which is given delta; in the
language the quicker of one alike and of two (dq with delta; dk and dv); two in Triton. W4A16 of few rows is
cut along K on all sides that can: the language and Triton add to zeros that are there.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from bench.lib import kernels_language as kernels
from bench.lib import specs
from tinygrad_nv.errors import NVError
from tinygrad_nv.language.kernels import Kernel
from tinygrad_nv.patterns.target import choose
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.stdlib import attention
from tinygrad_nv.tile.emulated import ModelledClock
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

HOPPER = "h100"
Timed = tuple[float, str]       # microseconds, of which schedule
ROWS = ((1, 64, 64, 4, 2), (1, 64, 64, 8, 2))
EIGHTS = ((128, 256, 128, 8, 3), (256, 128, 128, 8, 4))
BACKWARD_Q = {"h100": ((128, 128, 64, 8, 3), (128, 64, 64, 8, 3)),
              "a100": ((128, 32, 64, 4, 2), (128, 64, 64, 8, 2))}
BACKWARD_KV = {"h100": ((128, 64, 64, 8, 4), (128, 32, 64, 8, 3)),
               "a100": ((64, 64, 64, 4, 3), (64, 64, 64, 8, 2))}
BACKWARD = {"h100": ((128, 64, 64, 8, 4), (128, 32, 64, 8, 3)), "a100": ((64, 64, 64, 4, 2),)}
QUANTISED = {"h100": ((256, 128, 64, 8, 3),), "a100": ((128, 128, 64, 8, 3), (128, 128, 32, 4, 3))}
FEW = ((16, 64, 128, 4, 2), (16, 64, 128, 4, 3))
SPLIT, GROUP = 8, 128           # parts of K of few rows; elements of a scale


@dataclass(frozen=True)
class Case:
    """Functions of a GPU's name; `gpus` that have it."""
    name: str
    language: Callable[[str], Timed]
    template: Callable[[str], float]
    triton: Callable[[str], Timed]
    gpus: tuple[str, ...] = ("h100", "a100")


def empty(*shape: int, dtype: DType = dtypes.bfloat16) -> Tensor:
    """A Tensor that is never realized."""
    return Tensor.empty(*shape, dtype=dtype, device="CPU")


def best(kernel: Kernel, gpu: str, schedules: Sequence[tuple[int, ...]], *given: Tensor,
         **constants: Any) -> Timed:
    """Microseconds of the best schedule, and that schedule."""
    found = list[Timed]()
    for m, n, k, warps, stages in schedules:
        own = TileSchedule(block=(m, n), k=k, warps=warps, stages=stages)
        try: found.append((kernel.with_schedule(own).time(*given, gpu=gpu, **constants), str(own)))
        except NVError as error: print(f"  {own}: {error.found}", file=sys.stderr)
    return min(found)


def template(spec: Any, gpu: str) -> float:
    """Microseconds of our template."""
    own = figures(gpu)
    made = choose(spec, GPU(own.arch, own.sms)).build()
    return ModelledClock(gpu).seconds(made, spec) * 1e6


def triton(name: str, *given: Any) -> Callable[[str], Timed]:
    """A function of language_triton.py, which is imported where it is asked for."""
    def time_kernel(gpu: str) -> Timed:
        from bench.timing import language_triton
        found: Timed = getattr(language_triton, name)(gpu, *given)
        return found
    return time_kernel


def more() -> Iterator[Case]:
    """FP8, gradients of attention, norms, and 4-bit weights."""
    yield Case("gemm 4096x4096x4096 e4m3", _eights, partial(template, specs.matmul(
        4096, 4096, 4096, specs.E4M3, out=dtypes.float32)), triton("matmul", 4096, 4096, 4096, "e4m3", "K"),
        (HOPPER,))
    for d in (64, 128):
        yield Case(f"flash gradient 16x4096x{d} bf16", partial(_gradient, d),
                   partial(template, specs.backward(4096, 4096, d, batch=1, heads=16)),
                   triton("gradient", 4096, d))
    x, w = empty(4096, 4096), empty(4096)
    for name, kernel, spec, weights in (("rms", kernels.rms_norm, specs.rms, (w,)),
                                        ("layer", kernels.layer_norm, specs.layer, (w, w))):
        yield Case(f"{name} norm 4096x4096 bf16", partial(_norm, kernel, x, *weights),
                   partial(template, spec(4096, 4096)), triton("norm", name, 4096, 4096))
    yield Case("softmax 4096x4096 bf16", lambda gpu: best(kernels.softmax, gpu, ROWS, x),
               partial(template, specs.softmax(4096, 4096)), triton("softmax", 4096, 4096))
    for m in (4096, 16):
        yield Case(f"w4a16 {m}x4096x4096 f16", partial(_w4a16, m), partial(template, specs.quant_matmul(
            specs.QTYPES["int4"], m, 4096, 4096, specs.F16)), triton("int4_matmul", m, 4096, 4096))


def _norm(kernel: Kernel, *given: Any) -> Timed:
    """Tensors, then the GPU's name."""
    *tensors, gpu = given
    return best(kernel, gpu, ROWS, *tensors, eps=1e-5)


def _eights(gpu: str) -> Timed:
    x = empty(4096, 4096, dtype=dtypes.fp8e4m3)
    return best(kernels.matmul_nt, gpu, EIGHTS, x, x)


def _gradient(d: int, gpu: str) -> Timed:
    """One kernel that adds to dq, or two with the cost of one launch."""
    q, row = empty(1, 16, 4096, d), empty(1, 16, 4096, dtype=dtypes.float32)
    one = best(kernels.attention_gradient, gpu, BACKWARD[gpu], q, q, q, q, row, row, scale=d ** -0.5)
    options = {"causal": False, "scale": d ** -0.5}
    first = best(attention.gradient_q, gpu, BACKWARD_Q[gpu], q, q, q, q, q, row, **options)
    second = best(attention.gradient_kv, gpu, BACKWARD_KV[gpu], q, q, q, q, row, row, **options)
    both = first[0] + second[0] - figures(gpu).launch_s * 1e6, f"dq {first[1]}; dk, dv {second[1]}"
    return min(one, both)


def _w4a16(m: int, gpu: str) -> Timed:
    given = (empty(m, 4096, dtype=dtypes.float16), empty(4096, 512, dtype=dtypes.int32),
             empty(4096 // GROUP, 4096, dtype=dtypes.float16))
    if m > 64: return best(kernels.w4a16, gpu, QUANTISED[gpu], *given, group=GROUP)
    return best(kernels.w4a16_split, gpu, FEW, *given, group=GROUP, split=SPLIT)


def row(case: str, ours: float, other: float, schedule: str) -> dict[str, Any]:
    """One case."""
    return {"case": case, "language_us": round(ours, 2), "template_us": round(other, 2),
            "ratio": round(other / ours, 3), "schedule": schedule}


def beside(made: dict[str, Any], found: Timed) -> dict[str, Any]:
    """A case with Triton's time."""
    return {**made, "triton_us": round(found[0], 2), "triton_ratio": round(found[0] / made["language_us"], 3),
            "triton": found[1]}
