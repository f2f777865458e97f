"""Parts of a sampler as functions known by name: bodies in tinygrad, and kernels on the CPU.

Protocol: `threshold` and `gumbel` are what the sampler calls; tile/sampling.py says what they compute. A
threshold has the same bits from body and kernel, whatever the processor; noise has them where the compiler
contracts products and sums alike, as it does for one processor.
"""
from __future__ import annotations

import functools
from types import ModuleType

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.cpu import gumbel as noise_template
from tinygrad_nv.cpu import threshold as threshold_template
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import cpu_of
from tinygrad_nv.tile.sampling import DIGITS, LANES, GumbelSpec, ThresholdSpec

Spec = ThresholdSpec | GumbelSpec


def threshold(keys: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
    """The largest uint32 t with Σ weights[keys ≥ t] ≥ target, shape (1,), or 0 if there is none: the k-th
    largest key without weights, which are 1 then, and with k for a target; the nucleus' smallest key when
    weights are probabilities and target is top_p. Keys and float32 weights are (V,), target is float32 (1,).
    Ties at the threshold are all kept."""
    spec = ThresholdSpec(int(keys.shape[0]), weights is None)
    return call(spec, selected, keys, *([] if weights is None else [weights]), target)[0]


def selected(spec: ThresholdSpec, keys: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """A threshold in tinygrad: radix selection, four bits a pass from the top, eight passes of two kernels
    instead of a sort. A pass sums for all 16 digits in `LANES` lanes, since one float sum a digit is a chain
    of additions that no compiler may break up. On two x86-64 cores this takes 0.2 ms for V = 2,048, 1 ms for
    32,000 and 4 ms for 128,256; a byte a pass without lanes takes 2, 26 and 26 ms, two bits a pass are faster
    still on the CPU but twice the kernels."""
    weights = Tensor.ones_like(keys, dtype=dtypes.float32) if spec.counted else others[0]
    target = others[-1]
    # weights of the padding are 0
    keys, weights = (x.pad((0, spec.rows * LANES - spec.size)).reshape(LANES, spec.rows, 1).contiguous()
                     for x in (keys, weights))
    digits = Tensor.arange(DIGITS, dtype=dtypes.uint32)
    found = Tensor.zeros(1, dtype=dtypes.uint32, device=keys.device)
    for shift in range(28, -4, -4):
        mass = (keys >= found + digits * (1 << shift)).where(weights, 0).sum(1).contiguous().sum(0)
        # mass falls with the digit, so the count of digits that reach the target is the digit sought, plus
        # one; at least digit 0: rounding may leave the total just under a target of 1
        reached = (mass >= target).cast(dtypes.uint32).sum().maximum(1).cast(dtypes.uint32) - 1
        found = (found + reached * (1 << shift)).contiguous()
    return (found,)


def gumbel(seed: Tensor, position: Tensor, size: int) -> Tensor:
    """Standard Gumbel noise, float32 (size,), a function of seed, position and index alone. `seed` is uint32
    (2,), `position` int (1,)."""
    return call(GumbelSpec(size), drawn, seed, position.cast(dtypes.uint32))[0]


def drawn(spec: GumbelSpec, seed: Tensor, position: Tensor) -> tuple[Tensor, ...]:
    """Noise in tinygrad."""
    key = (seed[1:2].cast(dtypes.uint64) << 32) | seed[0:1].cast(dtypes.uint64)
    index = Tensor.arange(spec.size, dtype=dtypes.uint32).cast(dtypes.uint64)
    counter = (position.cast(dtypes.uint64) << 32) | index
    # contiguous: in one kernel with argmax the noise is computed more than once and not vectorised
    return (gumbel_of(counter.threefry(key.expand(spec.size)).cast(dtypes.uint32)).contiguous(),)


def gumbel_of(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in (-2.9, 16.7), float32, from uniform uint32 of the same shape."""
    # 23 bits and a half fit float32 exactly; of 24, the largest would round to 1, whose noise is infinite
    uniform = ((bits >> 9).cast(dtypes.float32) + 0.5) * 2.0 ** -23
    return -(-uniform.log()).log()


def lowered(template: ModuleType, size: int | None, dtype: DType, spec: Spec, function: UOp,
            *arguments: UOp) -> tuple[UOp, ...] | None:
    """What a spec computes, by the kernel of a template, on the CPU: `size` elements, or as many as the
    spec."""
    if (machine := cpu_of(function.device)) is None: return None
    assert function.device is not None
    schedule = template.default(spec, machine)
    note = program.Note(template.TEMPLATE, f"{spec}: {schedule}", spec, schedule)
    out = program.Output((spec.size if size is None else size,), dtype)
    return program.on_cpu(kernel(template, spec, schedule), function.device, [out], list(arguments),
                          flops=template.OPERATIONS * spec.size, note=note)


@functools.lru_cache(64)
def kernel(template: ModuleType, spec: Spec, schedule: CPUSchedule) -> CPUKernel:
    """The kernel of a spec."""
    made: CPUKernel = template.build(spec, schedule)
    return made


lower(ThresholdSpec, threshold_template.TEMPLATE,
      functools.partial(lowered, threshold_template, 1, dtypes.uint32))
lower(GumbelSpec, noise_template.TEMPLATE, functools.partial(lowered, noise_template, None, dtypes.float32))
