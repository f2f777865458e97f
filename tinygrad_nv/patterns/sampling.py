"""Parts of a sampler as functions known by name: bodies in tinygrad, and kernels on the CPU.

Protocol: `largest` and `noisy` are what the sampler calls; tile/sampling.py says what they compute. What is
kept is the same by body and kernel, bit by bit, whatever the processor; noise has them where the compiler
contracts products and sums alike, as it does for one processor.
"""
from __future__ import annotations

import functools
from types import ModuleType

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.cpu import gumbel as noise_template
from tinygrad_nv.cpu import threshold as threshold_template
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import cpu_of
from tinygrad_nv.tile.sampling import DIGITS, LANES, FilterSpec, GumbelSpec

Spec = FilterSpec | GumbelSpec


def largest(logits: Tensor, weights: Tensor | None, knobs: Tensor, knob: int) -> Tensor:
    """float32 logits (V,), -inf but for the largest: those with a sum of float32 `weights` (V,) of at least
    number `knob` of float32 `knobs`, or so many of them without weights. Ties are all kept."""
    spec = FilterSpec(int(logits.shape[0]), knob, weights is None)
    return call(spec, filtered, logits, *([] if weights is None else [weights]), knobs)[0]


def filtered(spec: FilterSpec, logits: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """A filter in tinygrad."""
    keys, target = ordered_bits(logits), others[-1][spec.knob:spec.knob + 1]
    floor = threshold(keys, None if spec.counted else others[0], target)
    return ((keys >= floor).where(logits, -float("inf")).contiguous(),)


def ordered_bits(x: Tensor) -> Tensor:
    """float32 as uint32 in the same order (IEEE 754: flip negatives, set the sign bit of the rest); -0 comes
    just before 0."""
    bits = x.bitcast(dtypes.uint32)
    return (bits >= 1 << 31).where(bits ^ 0xFFFFFFFF, bits | (1 << 31)).contiguous()


def threshold(keys: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
    """The largest uint32 t with Σ weights[keys ≥ t] ≥ target, shape (1,), or 0 if there is none: the k-th
    largest key without weights, which are 1 then, and with k for a target; the nucleus' smallest key when
    weights are probabilities and target is top_p. Keys and float32 weights are (V,), target is float32 (1,).

    Radix selection, four bits a pass from the top, eight passes of two kernels
    instead of a sort. A pass sums for all 16 digits in `LANES` lanes, since one float sum a digit is a chain
    of additions that no compiler may break up. On two x86-64 cores this takes 0.2 ms for V = 2,048, 1 ms for
    32,000 and 4 ms for 128,256; a byte a pass without lanes takes 2, 26 and 26 ms, two bits a pass are faster
    still on the CPU but twice the kernels."""
    if weights is None: weights = Tensor.ones_like(keys, dtype=dtypes.float32)
    size = int(keys.shape[0])
    rows = -(-size // LANES)
    # weights of the padding are 0
    keys, weights = (x.pad((0, rows * LANES - size)).reshape(LANES, rows, 1).contiguous()
                     for x in (keys, weights))
    digits = Tensor.arange(DIGITS, dtype=dtypes.uint32)
    found = Tensor.zeros(1, dtype=dtypes.uint32, device=keys.device)
    for shift in range(28, -4, -4):
        mass = (keys >= found + digits * (1 << shift)).where(weights, 0).sum(1).contiguous().sum(0)
        # mass falls with the digit, so the count of digits that reach the target is the digit sought, plus
        # one; at least digit 0: rounding may leave the total just under a target of 1
        reached = (mass >= target).cast(dtypes.uint32).sum().maximum(1).cast(dtypes.uint32) - 1
        found = (found + reached * (1 << shift)).contiguous()
    return found


def noisy(logits: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """float32 logits (V,) with standard Gumbel noise, a function of seed, position and index alone. `seed` is
    uint32 (2,), `position` int (1,)."""
    return call(GumbelSpec(int(logits.shape[0])), drawn, logits, seed, position.cast(dtypes.int32))[0]


def drawn(spec: GumbelSpec, logits: Tensor, seed: Tensor, position: Tensor) -> tuple[Tensor, ...]:
    """A draw's logits in tinygrad."""
    key = (seed[1:2].cast(dtypes.uint64) << 32) | seed[0:1].cast(dtypes.uint64)
    index = Tensor.arange(spec.size, dtype=dtypes.uint32).cast(dtypes.uint64)
    counter = (position.cast(dtypes.uint32).cast(dtypes.uint64) << 32) | index
    # contiguous: in one kernel with argmax the noise is computed more than once and not vectorised
    noise = gumbel_of(counter.threefry(key.expand(spec.size)).cast(dtypes.uint32)).contiguous()
    return (logits + noise,)


def gumbel_of(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in (-2.9, 16.7), float32, from uniform uint32 of the same shape."""
    # 23 bits and a half fit float32 exactly; of 24, the largest would round to 1, whose noise is infinite
    uniform = ((bits >> 9).cast(dtypes.float32) + 0.5) * 2.0 ** -23
    return -(-uniform.log()).log()


def lowered(template: ModuleType, spec: Spec, function: UOp, *arguments: UOp) -> tuple[UOp, ...] | None:
    """What a spec computes, by the kernel of a template, on the CPU."""
    if (machine := cpu_of(function.device)) is None: return None
    assert function.device is not None
    schedule = template.default(spec, machine)
    note = program.Note(template.TEMPLATE, f"{spec}: {schedule}", spec, schedule)
    out = program.Output((spec.size,), dtypes.float32)
    return program.on_cpu(kernel(template, spec, schedule), function.device, [out], list(arguments),
                          flops=template.OPERATIONS * spec.size, note=note)


@functools.lru_cache(64)
def kernel(template: ModuleType, spec: Spec, schedule: CPUSchedule) -> CPUKernel:
    """The kernel of a spec."""
    made: CPUKernel = template.build(spec, schedule)
    return made


lower(FilterSpec, threshold_template.TEMPLATE, functools.partial(lowered, threshold_template))
lower(GumbelSpec, noise_template.TEMPLATE, functools.partial(lowered, noise_template))
