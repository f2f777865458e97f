"""The gradient of rows of a table (tile/embedding/spec.py): added up.

Protocol: parts share out columns, which makes their work the same whatever the tokens are; each goes through
all tokens from the last to the first and chains those of a row, in its own part of the workspace: `head[v]`
is the first token of row v, `next[t]` the one after t, −1 none. Then every row is written once, from registers.

    for each row v, W columns at a time:
      sum = 0;  for t = head[v], next[t], …: sum += grad[t]
      dweight[v] = sum
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.programs import make_family
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, template
from tinygrad_nv.tile.embedding.program import PROGRAMS
from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, Tokens
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.template import Family

PART_ELEMENTS = 1 << 14     # fewer are done before another thread has begun
COLUMNS = 32                # that a part has a multiple of: no line of a cache is written by two
TOGETHER = 4                # sums side by side


class CPUEmbeddingGradient(CPUSchedule):
    """Shares of columns."""
    template: ClassVar[str] = "embedding_gradient"


def gradient_default(spec: EmbeddingGradientSpec, target: CPU) -> CPUEmbeddingGradient:
    """The schedule of a gradient."""
    return CPUEmbeddingGradient(target.isa, _parts(-(-spec.width // COLUMNS), spec.rows * spec.width, target))


def _parts(shares: int, moved: int, target: CPU) -> int:
    return max(1, min(target.threads, shares, moved // PART_ELEMENTS))


def gradient(spec: EmbeddingGradientSpec, schedule: CPUEmbeddingGradient) -> CPUKernel:
    """The kernel of a gradient: out, workspace, tokens, grad."""
    count, parts, width, lanes = spec.tokens.count, schedule.parts, spec.width, schedule.isa.lanes
    shares, kind = -(-width // COLUMNS), short(spec.dtype)
    whole = width // lanes * lanes
    tail = f"""
    if (n < last) {{
      vf sum = (vf)0.f;
      for (s32 t = head[v]; t >= 0; t = next[t]) sum += load_n_{kind}(grad + (s64)t * {width} + n, last - n);
      store_n_{kind}(out + v * {width} + n, sum, last - n);
    }}""" if whole < width else ""
    body = f"""
  const s64 first = core_id * {shares} / {parts} * {COLUMNS};
  const s64 end = (core_id + 1) * {shares} / {parts} * {COLUMNS}, last = end < {width} ? end : {width};
  s32 *head = (s32 *)work + core_id * {spec.rows + count}ll, *next = head + {spec.rows};
  for (s64 v = 0; v < {spec.rows}; v++) head[v] = -1;
  for (s64 t = {count - 1}; t >= 0; t--) {{
    const s64 v = row_(tokens, t);
    if (v < 0 || v >= {spec.rows}) continue;
    next[t] = head[v];
    head[v] = (s32)t;
  }}
  for (s64 v = 0; v < {spec.rows}; v++) {{
    s64 n = first;{_sums(kind, width, TOGETHER)}{_sums(kind, width, 1)}{tail}
  }}"""
    c, tokens = c_type(spec.dtype), f"s{8 * spec.tokens.dtype.itemsize}"
    return kernel(f"embedding_gradient_{spec.rows}x{width}", schedule.isa, body,
                  [(c, "out"), ("u32", "work")], [(tokens, "tokens"), (c, "grad")], parts=parts,
                  workspace_bytes=4 * parts * (spec.rows + count), before=_at(spec.tokens, spec.rows))


def _sums(kind: str, width: int, vectors: int) -> str:
    """C that writes columns [n, last) of row v as long as there are so many vectors of them."""
    names = range(vectors)
    zeros = ", ".join(f"s{u} = (vf)0.f" for u in names)
    added = " ".join(f"s{u} += load_{kind}(from + {u} * W);" for u in names)
    stored = " ".join(f"store_{kind}(to + {u} * W, s{u});" for u in names)
    return f"""
    for (; n + {vectors} * W <= last; n += {vectors} * W) {{
      vf {zeros};
      for (s32 t = head[v]; t >= 0; t = next[t]) {{
        __typeof__(grad) from = grad + (s64)t * {width} + n;
        {added}
      }}
      __typeof__(&out[0]) to = out + v * {width} + n;
      {stored}
    }}"""


def _at(tokens: Tokens, rows: int) -> str:
    """A function of C: the row that token t means; one there is not for a number of none."""
    terms, rest = [str(tokens.offset)], "t"
    for extent, stride in reversed(list(zip(tokens.extents[1:], tokens.strides[1:], strict=True))):
        terms.append(f"{rest} % {extent} * {stride}ll")
        rest = f"({rest} / {extent})"
    terms.append(f"{rest} * {tokens.strides[0]}ll")
    return f"""INLINE s64 row_(const s{8 * tokens.dtype.itemsize} *tokens, s64 t) {{
  const s64 v = tokens[{" + ".join(terms)}];
  return v < 0 ? v + {rows} : v;
}}"""


GRADIENT = template(EmbeddingGradientSpec, CPUEmbeddingGradient, gradient_default, None, __name__, "gradient")
FAMILY = Family("embedding", (*make_family("embedding", PROGRAMS, OVER_ROWS).templates, GRADIENT),
                determinism_class=OVER_ROWS)
