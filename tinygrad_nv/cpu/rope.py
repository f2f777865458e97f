"""Rotary positions (tile/rope/spec.py).

Protocol: parts share out tokens. Of a token all heads of q|k|v are moved, one after the other, W elements of
the lower half and of the upper half at a time; angles of the token stay in a cache:

    for each token:
      for each head of q and k: turn it; copy what is not rotated
      for each head of v: copy it
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, template
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.order import BY_ELEMENT
from tinygrad_nv.tile.rope.spec import RopeGradientSpec, RopeSpec
from tinygrad_nv.tile.template import Family

PART_ELEMENTS = 1 << 14     # fewer are done before another thread has begun
HEADS = ("q", "k", "v")


class CPURope(CPUSchedule):
    """Shares of tokens."""
    template: ClassVar[str] = "rope"


class CPURopeGradient(CPUSchedule):
    """Shares of tokens."""
    template: ClassVar[str] = "rope_gradient"


def default(spec: RopeSpec, target: CPU) -> CPURope:
    """A part for each thread, where there is enough to do."""
    return CPURope(target.isa, _parts(spec, target))


def default_gradient(spec: RopeSpec, target: CPU) -> CPURopeGradient:
    """Returns the default schedule of a gradient."""
    return CPURopeGradient(target.isa, _parts(spec, target))


def gradient_problems(spec: RopeGradientSpec, s: CPURopeGradient) -> list[str]:
    """Why a gradient has no kernel; empty when it has one."""
    return ["a gradient of q of float32 beside others"] * spec.wide_q


def _parts(spec: RopeSpec, target: CPU) -> int:
    rows = spec.batch * spec.tokens
    return max(1, min(target.threads, rows, rows * spec.width // PART_ELEMENTS))


def build(spec: RopeSpec, s: CPURope) -> CPUKernel:
    """The kernel from q|k|v to heads: q, k, v, qkv, cos, sin."""
    return _kernel(spec, s, back=False)


def gradient(spec: RopeSpec, s: CPURopeGradient) -> CPUKernel:
    """The kernel from gradients of heads to that of q|k|v: qkv, q, k, v, cos, sin."""
    return _kernel(spec, s, back=True)


def _kernel(spec: RopeSpec, s: CPUSchedule, back: bool) -> CPUKernel:
    lies, rows, element = spec.angles, spec.batch * spec.tokens, c_type(spec.dtype)
    heads, first = list[str](), 0
    for name, count in zip(HEADS, (spec.heads, spec.kv_heads, spec.kv_heads), strict=True):
        both = f"qkv + row * {spec.width} + (h + {first}) * {spec.d}"
        apart = f"{name} + ((b * {count} + h) * {spec.tokens}ll + t) * {spec.d}"
        call = "copy_" if name == "v" else "turn_"
        ends = (apart, both) if back else (both, apart)
        angles = "" if name == "v" else ", c, s"
        heads.append(f"for (s64 h = 0; h < {count}; h++) {call}({ends[0]}, {ends[1]}{angles});")
        first += count
    body = f"""
  const s64 from = {rows}ll * core_id / {s.parts}, upto = {rows}ll * (core_id + 1) / {s.parts};
  for (s64 row = from; row < upto; row++) {{
    const s64 b = row / {spec.tokens}, t = row % {spec.tokens};
    const s64 at = {lies.offset} + b * {lies.batch}ll + t * {lies.row}ll;
    __typeof__(&cos[0]) c = cos + at, s = sin + at;
    {" ".join(heads)}
  }}"""
    outputs, inputs = ["qkv"] if back else list(HEADS), list(HEADS) if back else ["qkv"]
    angle = c_type(lies.dtype)
    return kernel(f"{s.template}_{rows}x{spec.width}", s.isa, body, [(element, name) for name in outputs],
                  [*((element, name) for name in inputs), (angle, "cos"), (angle, "sin")], parts=s.parts,
                  before=_functions(spec, back))


def _functions(spec: RopeSpec, back: bool) -> str:
    """C: turn_ and copy_, of one head."""
    kind, angle, element, half = short(spec.dtype), short(spec.angles.dtype), c_type(spec.dtype), spec.half
    given = f"const {element} *restrict from, {element} *restrict to"
    angles = f", const {c_type(spec.angles.dtype)} *cos, const {c_type(spec.angles.dtype)} *sin"

    def step(load: str, store: str, count: str) -> str:
        low, high = ("fma_(a, c, b * s)", "fma_(b, c, -(a * s))") if back else \
            ("fma_(a, c, -(b * s))", "fma_(b, c, a * s)")
        return f"""
    const vf a = {load}{kind}(from + e{count}), b = {load}{kind}(from + {half} + e{count});
    const vf c = {load}{angle}(cos + e{count}), s = {load}{angle}(sin + e{count});
    {store}{kind}(to + e, {low}{count}); {store}{kind}(to + {half} + e, {high}{count});"""
    def move(first: int) -> str:
        return f"""
  s64 n = {first};
  for (; n + W <= {spec.d}; n += W) store_{kind}(to + n, load_{kind}(from + n));
  if (n < {spec.d}) store_n_{kind}(to + n, load_n_{kind}(from + n, {spec.d} - n), {spec.d} - n);"""
    return f"""
INLINE void copy_({given}) {{{move(0)}
}}
INLINE void turn_({given}{angles}) {{
  s64 e = 0;
  for (; e + W <= {half}; e += W) {{{step("load_", "store_", "")}
  }}
  if (e < {half}) {{{step("load_n_", "store_n_", f", {half} - e")}
  }}{move(2 * half) if 2 * half < spec.d else ""}
}}"""


ROPE = template(RopeSpec, CPURope, default, None, __name__)
GRADIENT = template(RopeGradientSpec, CPURopeGradient, default_gradient,
                    gradient_problems, __name__, "gradient")
FAMILY = Family("rope", (ROPE, GRADIENT), determinism_class=BY_ELEMENT)
