"""A real rewrite, to test the hooks with: `x.silu() * y` in float32 on the CPU becomes one C kernel."""
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat, graph_rewrite

from tinygrad_nv.patterns.program import Output, miss, program
from tinygrad_nv.patterns.rewriting import write_through
from tinygrad_nv.runtime.note import Note

# exp2 by hand: a kernel cannot call libm with every compiler that the CPU device may have
SOURCE = """
static inline float exp2_(float x) {
  x = x < -126.f ? -126.f : (x > 126.f ? 126.f : x);
  int whole = (int)(x + (x < 0 ? -0.5f : 0.5f));
  float f = (x - whole) * 0.69314718056f;
  float e = 1 + f*(1 + f*(1/2.f + f*(1/6.f + f*(1/24.f + f*(1/120.f + f*(1/720.f))))));
  union { int i; float f; } scale = { (whole + 127) << 23 };
  return e * scale.f;
}
void ENTRY(float* restrict out, const float* restrict x, const float* restrict y PARAMETER) {
  for (int i = 0; i < COUNT; i++) out[i] = x[i] / (1 + exp2_(x[i] * -1.44269504089f)) * y[i];
}
"""


def lower(x: UOp, y: UOp, one: UOp, factor: UOp, whole: UOp) -> UOp | None:
    if (one.val, round(factor.val, 6)) != (1.0, -1.442695): return None
    if x.dtype != dtypes.float32: return miss("silu_mul", whole, f"dtype {x.dtype.name} is not float32")
    if x.shape != y.shape: return miss("silu_mul", whole, "operands are broadcast")
    variables = [v for v in UOp.sink(*(s for s in x.shape if isinstance(s, UOp))).variables() if v.arg.name]
    if len(variables) > 1: return miss("silu_mul", whole, "more than one symbolic extent")
    numel = whole.numel()
    if not variables: count, parameter = str(numel), ""
    else:
        count, parameter = numel.substitute({variables[0]: UOp.variable("n", 0, 1 << 20)}).render(), ", int n"
    source = SOURCE.replace("ENTRY", "silu_mul").replace("COUNT", count).replace("PARAMETER", parameter)
    note = Note("silu_mul", "x.silu() * y", ("float32", whole.max_shape), "one loop")
    return program("silu_mul", source, x.device, [Output(whole.shape, x.dtype)], [x, y], variables=variables,
                   flops=6*numel, nbytes=12*numel, note=note)[0]


_x, _y = UPat.var("x"), UPat.var("y")
_silu = _x * (UPat.cvar("one") + (_x * UPat.cvar("factor")).f(Ops.EXP2)).f(Ops.RECIPROCAL)
_pm = PatternMatcher([((_silu * _y).named("whole"), lower)])


def rewrite(sink: UOp) -> UOp: return write_through(graph_rewrite(sink, _pm, name="silu_mul"))
