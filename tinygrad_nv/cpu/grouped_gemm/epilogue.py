"""Epilogue of the sums of a row: bias, activation, weight, rounding, and the place in the result.

Protocol: `finish` makes the C function

    finish_(p, e, i, n, left, y0[, y1])    W columns from n on of row i, of group e; `left` of them there are

y1 are the columns of the other half where there is an activation. `source` makes source_(p, i), the row of x.
`p` is the struct of pointers, `operands`.
"""
from __future__ import annotations

from tinygrad_nv.cpu.expression import c_float
from tinygrad_nv.cpu.kernel import c_type
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.grouped_gemm.spec import ALPHA, LIMIT, GroupedGemmSpec

# tanh and sigmoid are one exponential: (1 + tanh z) / 2 = sigmoid(2 z)
SIGMOID = """
INLINE vf sigmoid_(vf x) { return 1.f / (1.f + exp2_(x * -0x1.715476p0f)); }
"""
# Abramowitz and Stegun 7.1.26, as tinygrad has it
ERF = """
INLINE vf erf_(vf x) {
  const vf t = 1.f / (1.f + 0.3275911f * abs_(x));
  vf p = fma_((vf)1.061405429f, t, (vf)-1.453152027f);
  p = fma_(p, t, (vf)1.421413741f); p = fma_(p, t, (vf)-0.284496736f); p = fma_(p, t, (vf)0.254829592f);
  const vf y = 1.f - p * t * exp2_(x * x * -0x1.715476p0f);
  return pick(x < 0.f, -y, y);
}
"""
VALUES = {
    "silu": "y0 * sigmoid_(y0) * y1",
    "gelu": f"0.5f * y0 * (1.f + erf_(y0 * {c_float(0.5 ** 0.5)})) * y1",
    "gelu_tanh": "y0 * sigmoid_(0x1.988454p0f * (y0 + 0.044715f * y0 * y0 * y0)) * y1",
    "swiglu_clamped": f"(y1 + 1.f) * (y0 * sigmoid_(y0 * {c_float(ALPHA)}))"}
# a NaN stays one
CUT = (f"y0 = pick(y0 > {c_float(LIMIT)}, (vf){c_float(LIMIT)}, y0); "
       f"y1 = pick(y1 > {c_float(LIMIT)}, (vf){c_float(LIMIT)}, y1); "
       f"y1 = pick(y1 < {c_float(-LIMIT)}, (vf){c_float(-LIMIT)}, y1);")


def pointers(spec: GroupedGemmSpec) -> list[tuple[str, str]]:
    """The inputs of a kernel: C types and names."""
    kind = c_type(spec.dtype)
    return [(kind, "x"), (c_type(spec.matrix), "w"), ("s32", "offsets"), *[("s32", "order")] * spec.has_order,
            *[("float", "weights")] * spec.weighted, *[(kind, "bias")] * spec.biased]


def operands(spec: GroupedGemmSpec, matrices: bool = True) -> str:
    """The struct of a kernel's pointers, with that to matrices or without."""
    fields = " ".join(f"const {kind} *{name};" for kind, name in pointers(spec) if matrices or name != "w")
    return f"typedef struct {{ {c_type(spec.dtype)} *out; {fields} }} operands;"


def source(spec: GroupedGemmSpec) -> str:
    """The function that finds the row of x of a row of a group."""
    row = f"p->order[i] / {spec.gather}" if spec.gather else "i"
    return f"""INLINE const {c_type(spec.dtype)} *source_(const operands *p, s64 i) {{
  return p->x + (s64)({row}) * {spec.k};
}}"""


def finish(spec: GroupedGemmSpec) -> str:
    """The function of a vector of columns."""
    kind, names = short(spec.dtype), [f"y{h}" for h in range(spec.halves)]
    lines = []
    if spec.has_order: lines.append("const s64 slot = p->order[i];")
    if spec.biased:
        lines += [f"{name} += load_n_{kind}(p->bias + e * {spec.n} + {h * spec.columns} + n, left);"
                  for h, name in enumerate(names)]
    if spec.activation == "swiglu_clamped": lines.append(CUT)
    if spec.activation: lines.append(f"y0 = {VALUES[spec.activation]};")
    if spec.weighted: lines.append("y0 *= p->weights[slot];")
    place = "slot" if spec.scatter else "i"
    lines.append(f"store_n_{kind}(p->out + {place} * {spec.columns} + n, y0, left);")
    before = (SIGMOID if spec.activation else "") + (ERF if spec.activation == "gelu" else "")
    inner = "\n  ".join(lines)
    return f"""{before}
INLINE void finish_(const operands *p, s64 e, s64 i, s64 n, s64 left,
                    {', '.join(f'vf {x}' for x in names)}) {{
  {inner}
}}"""
