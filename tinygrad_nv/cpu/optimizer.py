"""AdamW of many tensors in place, and sums of squares of their chunks (tile/optimizer/spec.py).

Protocol: parts have whole chunks. Elements are independent of each other, so that no bit depends on parts:

    nothing where control[0] is 0
    each chunk of this part, whole vectors, then the last elements:
        read gradient, exp_avg, exp_avg_sq and parameter, or master weights; write them where they lay

A part has the chunks from chunks · core_id / parts on. `walk(counts, parts, chunk, kinds, body)` is
C that runs `body` for each, with `t` the tensor, `at` the first element, `n` how many there are, and a
pointer of each kind of `kinds` (C type, name), to the chunk's first element. Parameters of the kernel are
named x0, x1, …

A chunk's squares are added up in `SUMS` vectors, turn about, which are added at its end: one order, whatever
the number of parts.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, template
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.optimizer.spec import CHUNK, HEAD, PER_GROUP, AdamWSpec, SquaresSpec
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.template import Family

BYTES_OF_PART = 256 << 10   # waking a thread takes as long as moving some 10 KiB
PARTS = 4                   # for each thread, so that a thread that is late does fewer
SUMS = 8                    # chains of additions, more than their latency needs


class CPUAdamW(CPUSchedule):
    """Shares of chunks."""
    template: ClassVar[str] = "adamw_update"


def default(spec: AdamWSpec, target: CPU) -> CPUAdamW:
    """Some parts for each thread, where there is enough to do."""
    most = PARTS * target.threads if target.threads > 1 else 1
    chunks = sum(-(-count // CHUNK) for count in spec.counts)
    return CPUAdamW(target.isa, max(1, min(most, chunks, spec.nbytes // BYTES_OF_PART)))


def build(spec: AdamWSpec, s: CPUAdamW) -> CPUKernel:
    """The kernel: all x, m, v, masters; all gradients; control."""
    numbers = range(len(spec.counts))
    written = [(c_type(dtype), f"{name}{i}") for name, dtype in spec.kinds if name != "g" for i in numbers]
    read = [(c_type(spec.grad), f"g{i}") for i in numbers]
    kinds = [("const " * (name == "g") + c_type(dtype), name) for name, dtype in spec.kinds]
    groups = ", ".join(map(str, spec.groups))
    body = f"""    const float *own = control + {HEAD} + {PER_GROUP} * groups[t];
    const vf decay = (vf)own[0], step = (vf)own[1];
    s64 i = 0;
    for (; i + W <= n; i += W) {{ {_vector(spec, "")} }}
    if (i < n) {{ {_vector(spec, ", n - i")} }}"""
    loop = walk(spec.counts, s.parts, CHUNK, kinds, body)
    text = f"""
  if (control[0] == 0.f) return;
  static const int groups[] = {{{groups}}};
  const vf scale = (vf)control[1], root = (vf)control[2];{loop}"""
    return kernel("adamw", s.isa, text, written, [*read, ("float", "control")], parts=s.parts)


def _vector(spec: AdamWSpec, count: str) -> str:
    """C: the elements from i on."""
    load, store = ("load_n_", "store_n_") if count else ("load_", "store_")
    own, copy = ("w", f"{store}{short(spec.dtype)}(x + i, next{count});") if spec.master else ("x", "")
    return f"""const vf grad = {load}{short(spec.grad)}(g + i{count}) * scale;
      const vf before = {load}f32(m + i{count}), mean = fma_((vf){1 - spec.beta1!r}f, grad - before, before);
      const vf old = {load}f32(v + i{count}) * (vf){spec.beta2!r}f;
      const vf square = fma_(grad * grad, (vf){1 - spec.beta2!r}f, old);
      const vf change = mean / fma_(sqrt_(square), root, (vf){spec.eps!r}f);
      const vf next = fma_(-step, change, {load}f32({own} + i{count}) * decay);
      {store}f32(m + i, mean{count}); {store}f32(v + i, square{count});
      {store}f32({own} + i, next{count}); {copy}"""


def walk(counts: Sequence[int], parts: int, chunk: int, kinds: Sequence[tuple[str, str]], body: str) -> str:
    """The loop over the chunks of a part, and where they lie."""
    chunks = [-(-count // chunk) for count in counts]
    firsts = list(accumulate(chunks, initial=0))
    names = {name: ", ".join(f"{name}{i}" for i in range(len(counts))) for _, name in kinds}
    tables = "\n".join(f"  {kind} *const all_{name}[] = {{{names[name]}}};" for kind, name in kinds)
    pointers = " ".join(f"{kind} *{name} = all_{name}[t] + at;" for kind, name in kinds)
    return f"""
  static const s64 counts[] = {{{', '.join(map(str, counts))}}}, firsts[] = {{{', '.join(map(str, firsts))}}};
{tables}
  const s64 first = {firsts[-1]}ll * core_id / {parts}, last = {firsts[-1]}ll * (core_id + 1) / {parts};
  s64 t = 0;
  for (s64 c = first; c < last; c++) {{
    while (c >= firsts[t + 1]) t++;
    const s64 at = (c - firsts[t]) * {chunk}, n = counts[t] - at < {chunk} ? counts[t] - at : {chunk};
    {pointers}
{body}
  }}"""


class CPUSquares(CPUSchedule):
    """Shares of chunks."""
    template: ClassVar[str] = "squared_sums"


def default_squares(spec: SquaresSpec, target: CPU) -> CPUSquares:
    """Some parts for each thread, where there is enough to do."""
    most = PARTS * target.threads if target.threads > 1 else 1
    return CPUSquares(target.isa, max(1, min(most, sum(spec.chunks), spec.nbytes // BYTES_OF_PART)))


def build_squares(spec: SquaresSpec, s: CPUSquares) -> CPUKernel:
    """The kernel: sums; all tensors."""
    c, kind = c_type(spec.dtype), short(spec.dtype)
    adds = " ".join(f"{{ const vf a = load_{kind}(g + i + {j} * W); s{j} = fma_(a, a, s{j}); }}"
                    for j in range(SUMS))
    total = " + ".join(f"s{j}" for j in range(SUMS))
    body = f"""    vf {', '.join(f's{j} = (vf)0.f' for j in range(SUMS))};
    s64 i = 0;
    for (; i + {SUMS} * W <= n; i += {SUMS} * W) {{ {adds} }}
    for (; i < n; i += W) {{ const vf a = load_n_{kind}(g + i, n - i); s0 = fma_(a, a, s0); }}
    sums[c] = sum_({total});"""
    text = walk(spec.counts, s.parts, CHUNK, [(f"const {c}", "g")], body)
    tensors = [(c, f"g{i}") for i in range(len(spec.counts))]
    return kernel("squares", s.isa, text, [("float", "sums")], tensors, parts=s.parts)


ADAMW = template(AdamWSpec, CPUAdamW, default, None, __name__)
SQUARES = template(SquaresSpec, CPUSquares, default_squares, None, __name__, "build_squares")
FAMILY = Family("optimizer", (ADAMW, SQUARES), determinism_class=OVER_ROWS)
