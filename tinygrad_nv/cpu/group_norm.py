"""Group norm of channels-last images (tile/group_norm/spec.py).

Protocol: parts share out images and `chunk`s of groups, whose channels lie side by side in each position. Of
a chunk all positions are visited twice: for statistics, then for results.

    for each channel: mean m and second moment M₂ of x − (x of the first position)
    for each group:   mean = Σ m / channels,  variance = Σ (M₂ / positions + (m − mean)²) / channels
    for each position: out = act(x · scale + offset)

Moments are float32 within `BLOCK` positions and float64 from block to block, so an image of millions of
positions loses no more than a small one (Chan, Golub and LeVeque, 1979). No bit depends on chunks or parts.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel, up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, template
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.template import Family

BLOCK = 64                  # positions
CHUNK_BYTES = 128           # of a position that are read at once, where there are several groups
MOST_CHANNELS = 1 << 14     # of a chunk: 28 bytes each on a stack
PART_ELEMENTS = 1 << 14     # fewer are done before another thread has begun


@dataclass(frozen=True)
class CPUGroupNorm(CPUSchedule):
    """Shares of images and chunks of groups."""
    template: ClassVar[str] = "group_norm"


def groups_of_chunk(spec: GroupNormSpec) -> int:
    """Groups that are visited at once: the least divisor of all whose channels fill two cache lines."""
    width = spec.channels // spec.groups * spec.dtype.itemsize
    return next(n for n in range(1, spec.groups + 1)
                if spec.groups % n == 0 and (n * width >= CHUNK_BYTES or n == spec.groups))


def problems(spec: GroupNormSpec, s: CPUGroupNorm) -> list[str]:
    """Why this template does not take a norm; empty when it does."""
    chunk = groups_of_chunk(spec) * (spec.channels // spec.groups)
    return [f"{chunk} channels at once, at most {MOST_CHANNELS}"] if chunk > MOST_CHANNELS else []


def default(spec: GroupNormSpec, target: CPU) -> CPUGroupNorm:
    """A part for each thread, where there is enough to do."""
    units = spec.batch * spec.groups // groups_of_chunk(spec)
    enough = max(1, spec.batch * spec.positions * spec.channels // PART_ELEMENTS)
    return CPUGroupNorm(target.isa, min(target.threads, units, enough))


def build(spec: GroupNormSpec, s: CPUGroupNorm) -> CPUKernel:
    """The kernel: out, x, weight, bias, shift."""
    size, element = spec.channels // spec.groups, c_type(spec.dtype)
    some = groups_of_chunk(spec)
    chunk, chunks = some * size, spec.groups // some
    units = spec.batch * chunks
    body = f"""
  for (s64 unit = {units}ll * core_id / {s.parts}; unit < {units}ll * (core_id + 1) / {s.parts}; unit++) {{
    const s64 b = unit / {chunks}, c = unit % {chunks} * {chunk};
    const {element} *from = x + b * {spec.positions * spec.channels}ll + c;
    double mean[{chunk}], second[{chunk}];
    float scale[{up(chunk, s.isa.lanes)}] __attribute__((aligned(64)));
    float offset[{up(chunk, s.isa.lanes)}] __attribute__((aligned(64)));
    moments(from, mean, second);
    {_add_shift(spec, chunk)}
    for (s64 g = 0; g < {chunk}; g += {size}) {{
      double m = 0, v = 0;
      for (s64 i = g; i < g + {size}; i++) m += mean[i];
      m /= {size};
      for (s64 i = g; i < g + {size}; i++) v += second[i] / {spec.positions} + (mean[i] - m) * (mean[i] - m);
      const float r = 1 / sqrt_((vf)(float)(v / {size} + {spec.eps!r}))[0];
      for (s64 i = g; i < g + {size}; i++) {{
        scale[i] = r * one_{short(spec.affine)}(weight + c + i);
        offset[i] = one_{short(spec.affine)}(bias + c + i) + (float)(-m{_shift(spec)}) * scale[i];
      }}
    }}
    applied(from, out + (from - x), scale, offset);
  }}"""
    inputs = [(element, "x"), (c_type(spec.affine), "weight"), (c_type(spec.affine), "bias")]
    if spec.shift is not None: inputs.append((c_type(spec.shift), "shift"))
    return kernel(f"group_norm_{spec.positions}x{spec.channels}", s.isa, body, [(element, "out")], inputs,
                  parts=s.parts, before=_moments(spec, chunk) + _apply_norm(spec, chunk))


def _add_shift(spec: GroupNormSpec, chunk: int) -> str:
    if spec.shift is None: return ""
    return f"for (s64 i = 0; i < {chunk}; i++) mean[i] += {_one_shift(spec)};"


def _shift(spec: GroupNormSpec) -> str:
    return "" if spec.shift is None else f" + {_one_shift(spec)}"


def _one_shift(spec: GroupNormSpec) -> str:
    assert spec.shift is not None
    return f"one_{short(spec.shift)}(shift + b * {spec.channels} + c + i)"


def _moments(spec: GroupNormSpec, chunk: int) -> str:
    """C: mean and second moment of each channel of a chunk."""
    element, name = c_type(spec.dtype), short(spec.dtype)
    return f"""
INLINE vf {name}_(const {element} *p, s64 left) {{
  return left >= W ? load_{name}(p) : load_n_{name}(p, left);
}}
static void moments(const {element} *restrict x, double *restrict mean, double *restrict second) {{
  for (s64 c = 0; c < {chunk}; c += W) {{
    const s64 left = {chunk} - c, count = left < W ? left : W;
    const vf pivot = {name}_(x + c, left);
    double s[W] = {{0}}, q[W] = {{0}};
    for (s64 first = 0; first < {spec.positions}; first += {BLOCK}) {{
      const s64 last = first + {BLOCK} < {spec.positions} ? first + {BLOCK} : {spec.positions};
      vf sum = (vf)0.f, square = (vf)0.f;
      for (s64 p = first; p < last; p++) {{
        const vf d = {name}_(x + p * {spec.channels} + c, left) - pivot;
        sum += d; square = fma_(d, d, square);
      }}
      for (s64 i = 0; i < count; i++) {{ s[i] += sum[i]; q[i] += square[i]; }}
    }}
    for (s64 i = 0; i < count; i++) {{
      const double m = s[i] / {spec.positions}, rest = q[i] - s[i] * m;
      mean[c + i] = pivot[i] + m;
      second[c + i] = rest > 0 ? rest : 0;
    }}
  }}
}}"""


def _apply_norm(spec: GroupNormSpec, chunk: int) -> str:
    """C: the results of a chunk."""
    element, name = c_type(spec.dtype), short(spec.dtype)
    silu = f" y = y / ((vf)1.f + exp2_(y * {-1 / math.log(2)!r}f));" if spec.silu else ""
    return f"""
static void applied(const {element} *restrict x, {element} *restrict to, const float *restrict scale,
                    const float *restrict offset) {{
  for (s64 p = 0; p < {spec.positions}; p++, x += {spec.channels}, to += {spec.channels}) {{
    for (s64 c = 0; c < {chunk}; c += W) {{
      const s64 left = {chunk} - c;
      vf y = fma_({name}_(x + c, left), *(const vf_u *)(scale + c), *(const vf_u *)(offset + c));{silu}
      if (left >= W) store_{name}(to + c, y); else store_n_{name}(to + c, y, left);
    }}
  }}
}}"""


GROUP_NORM = template(GroupNormSpec, CPUGroupNorm, default, problems, __name__)
FAMILY = Family("group_norm", (GROUP_NORM,),
                determinism_class="each image alone, in an order that its extents give")
