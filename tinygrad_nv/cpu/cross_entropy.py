"""Cross entropy of rows of logits and their gradient (tile/cross_entropy/spec.py).

Protocol: parts share out rows. A row stays in a cache while it is gone through three times:

    for each row:
      the largest logit, which is the largest x too: x rises with l
      sums of e^(x - max), and with label smoothing of max - x; of a distillation, of both rows
      the loss; then each element of the gradient, written where its logit was or apart

Each sum is kept in four vectors that are added at the end, in one order whatever the parts.
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, template
from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec, DistillationSpec, RowsSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.template import Family

UNROLLED = 4
PART_ELEMENTS = 1 << 13     # fewer are done before another thread has begun
PARTS = 4                   # for each thread, so that one that is held up does less


class CPUCrossEntropy(CPUSchedule):
    """Shares of rows."""
    template: ClassVar[str] = "cross_entropy"


class CPUDistillation(CPUSchedule):
    """Shares of rows."""
    template: ClassVar[str] = "distillation"


def default(spec: CrossEntropySpec, target: CPU) -> CPUCrossEntropy:
    """Some parts for each thread, where there is enough to do."""
    return CPUCrossEntropy(target.isa, _parts(spec, target))


def default_distillation(spec: DistillationSpec, target: CPU) -> CPUDistillation:
    """Returns the default schedule of a distillation."""
    return CPUDistillation(target.isa, _parts(spec, target))


def _parts(spec: RowsSpec, target: CPU) -> int:
    most = PARTS * target.threads if target.threads > 1 else 1
    return max(1, min(most, spec.rows, spec.rows * spec.size // PART_ELEMENTS))


def build(spec: CrossEntropySpec, s: CPUCrossEntropy) -> CPUKernel:
    """The kernel of a cross entropy."""
    loss, of = spec.loss, short(spec.dtype)
    smoothing, size = loss.label_smoothing, spec.size
    far = f" f[u] += {_inside('most - x')};" if smoothing else ""
    text = f"""
    const float most = value_((vf)highest_(from))[0];
    vf s[{UNROLLED}] = {{0}}, f[{UNROLLED}] = {{0}};
    {_steps(spec, f"{_x(spec)} s[u] += {_inside('exp_(x - most)')};{far}")}
    const int known = label >= 0 && label < {size};
    const vf own = known ? value_(one_of_{of}(from + label)) : (vf)__builtin_nanf("");
    const float sum = sums_(s), log = log_(sum), lse = most + log;
    float loss = {_number(1 - smoothing)} * (most - own[0] + log);
    {f'loss += {_number(smoothing)} * (sums_(f) / {size} + log);' if smoothing else ''}
    {f'loss += {_number(loss.z_loss)} * lse * lse;' if loss.z_loss else ''}
    losses[row] = loss;"""
    return _kernel(s, spec, text + (_gradient(spec) if spec.gradient is not None else ""))


def _gradient(spec: CrossEntropySpec) -> str:
    """C: the gradient of a row. That of its class is computed before what lies there is overwritten."""
    loss, to = spec.loss, short(spec.gradient or spec.dtype)
    even = f" - {_number(loss.label_smoothing / spec.size)}" if loss.label_smoothing else ""
    z = f"{_number(2 * loss.z_loss)} * lse" if loss.z_loss else "0.f"
    target = f"({_number(1 - loss.label_smoothing)} - q * z)"   # what z adds to p - 1 is small
    value = f"(exp_(x - most) * p{even}) * slope_(x) * w"
    return f"""
    const float w = {_scale(spec)}, z = {z}, p = (1.f + z) / sum;
    const vf q = exp_(own - most) / sum, own_gradient = (q - {target}{even}) * slope_(own) * w;
    {_steps(spec, f"{_x(spec)} put_{to}(to + c, {value}, whole, n);")}
    if (known) store_n_{to}(to + label, own_gradient, 1);"""


def build_distillation(spec: DistillationSpec, s: CPUDistillation) -> CPUKernel:
    """The kernel of a distillation."""
    of_t, t = short(spec.teacher), _number(spec.temperature)
    both = f"{_x(spec)} const vf z = x / {t}, y = get_{of_t}(taught + c, whole, n) / {t};"
    sums = f"{both} const vf e = {_inside('exp_(y - top)')}; f[u] += e;" \
           f" s[u] += {_inside('exp_(z - most)')};" \
           " k[u] += pick(e == 0.f, e, e * ((y - top) - (z - most)));"
    text = f"""
    const float most = (value_((vf)highest_(from)) / {t})[0], top = ((vf)highest_taught(taught) / {t})[0];
    vf s[{UNROLLED}] = {{0}}, f[{UNROLLED}] = {{0}}, k[{UNROLLED}] = {{0}};
    {_steps(spec, sums)}
    const float sum = sums_(s), mass = sums_(f);
    losses[row] = {_number(spec.temperature ** 2)} * (sums_(k) / mass + (log_(sum) - log_(mass)));"""
    if spec.gradient is not None:
        value = "(exp_(z - most) * p - exp_(y - top) * q) * slope_(x) * w"
        text += f"""
    const float w = {_scale(spec)} * {t}, p = 1.f / sum, q = 1.f / mass;
    {_steps(spec, f"{both} put_{short(spec.gradient)}(to + c, {value}, whole, n);")}"""
    return _kernel(s, spec, text)


def _number(value: float) -> str:
    """C: a float32."""
    return f"{float(value)!r}f"


def _x(spec: RowsSpec) -> str: return f"const vf x = value_(get_{short(spec.dtype)}(from + c, whole, n));"


def _scale(spec: RowsSpec) -> str: return "scale[row]" if spec.scaled else "1.f"


def _inside(value: str) -> str: return f"inside({value}, whole, n, 0.f)"


def _steps(spec: RowsSpec, text: str) -> str:
    """C: a row, W elements from `c` on at a time, of which `n` are there; `u` counts vectors of sums."""
    vectors = " ".join(f"{{ enum {{ u = {u}, whole = 1, n = W }}; {text} c += W; }}" for u in range(UNROLLED))
    return f"""{{
      s64 c = 0;
      while (c + {UNROLLED} * W <= {spec.size}) {{ {vectors} }}
      for (; c < {spec.size}; c += W) {{ enum {{ u, whole = 0 }}; const s64 n = {spec.size} - c; {text} }}
    }}"""


def _highest(spec: RowsSpec, name: str, of: str) -> str:
    """C: the largest logit of a row; NaN counts as none."""
    step = f"m[u] = max_(inside(get_{of}(p + c, whole, n), whole, n, LEAST), m[u]);"
    return f"""
INLINE float {name}(const {'float' if of == 'f32' else 'u16'} *p) {{
  vf m[{UNROLLED}];
  for (int u = 0; u < {UNROLLED}; u++) m[u] = (vf)LEAST;
  {_steps(spec, step)}
  return top_(max_(max_(m[0], m[1]), max_(m[2], m[3])));
}}"""


def _kernel(s: CPUSchedule, spec: RowsSpec, text: str) -> CPUKernel:
    """The kernel of parts of rows."""
    logits, loss = (c_type(spec.dtype), "logits"), spec.loss
    outputs = [logits] if spec.in_place else []
    if spec.gradient is not None and not spec.in_place: outputs = [(c_type(spec.gradient), "gradient")]
    inputs = [*([] if spec.in_place else [logits]), ("s32", "labels")]
    to = "logits" if spec.in_place else "gradient"
    before, taught = [_highest(spec, "highest_", short(spec.dtype))], ""
    if isinstance(spec, DistillationSpec):
        inputs.append((c_type(spec.teacher), "teacher"))
        before.append(_highest(spec, "highest_taught", short(spec.teacher)))
        taught = f"const {c_type(spec.teacher)} *taught = teacher + row * {spec.size};"
    if spec.scaled: inputs.append(("float", "scale"))
    zeros = to_row = ""
    if spec.gradient is not None:
        to_row = f"{c_type(spec.gradient)} *to = {to} + row * {spec.size};"
        zeros = _steps(spec, f"put_{short(spec.gradient)}(to + c, (vf)0.f, whole, n);")
    body = f"""
  const s64 first = {spec.rows}ll * core_id / {s.parts}, last = {spec.rows}ll * (core_id + 1) / {s.parts};
  for (s64 row = first; row < last; row++) {{
    const {logits[0]} *from = logits + row * {spec.size};
    const s64 label = labels[row]; {taught} {to_row}
    if (label == {loss.ignore_index}) {{
      losses[row] = 0.f;
      {zeros}
      continue;
    }}{text}
  }}"""
    defined = [f"#define DIVISOR {_number(loss.divisor)}", f"#define DIVIDED {int(loss.divisor != 1)}"]
    if loss.softcap is not None: defined.append(f"#define CAP {_number(loss.softcap)}")
    head = "\n".join([*defined, header("cross_entropy.h"), *before])
    return kernel(f"{s.template}_{spec.rows}x{spec.size}", s.isa, body, [*outputs, ("float", "losses")],
                  inputs, parts=s.parts, before=head)


ROWS = template(CrossEntropySpec, CPUCrossEntropy, default, None, __name__)
DISTILLATION = template(DistillationSpec, CPUDistillation, default_distillation, None,
                        __name__, "build_distillation")
FAMILY = Family("cross_entropy", (ROWS, DISTILLATION), determinism_class=OVER_ROWS)
