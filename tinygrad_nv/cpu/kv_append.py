"""New keys and values into pages or a contiguous cache, with rotation and rounding, in one launch.

Protocol. A part has whole rows:

    for each row of each request of this part:
        its place, by the request's length; its page: where there is none, no keys and values
        q:  each head: rotate, store
        k:  the same, into the page
        v:  the same without rotation

A head is moved in vectors: of a rotation that pairs i with i + half there are two at a time; those of an
interleaved one are taken apart into first and second numbers, and put together again.
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, template
from tinygrad_nv.tile.decode.spec import Pages, Scales
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import FP8
from tinygrad_nv.tile.kv_append.spec import AppendSpec, Heads, Rope
from tinygrad_nv.tile.order import BY_ELEMENT
from tinygrad_nv.tile.template import Family

PART_BYTES = 256 << 10  # that are moved by a part at least: waking a thread takes as long as some 10 KiB


class CPUAppend(CPUSchedule):
    """Shares of rows of requests."""
    template: ClassVar[str] = "kv_append"


def default(spec: AppendSpec, target: CPU) -> CPUAppend:
    """The schedule: parts that are worth a thread. Every spec can be computed."""
    row = spec.heads * (spec.d + spec.d_v) + spec.q_heads * spec.d
    moved = spec.batch * spec.rows * row * (spec.k.dtype.itemsize + spec.k_pages.dtype.itemsize)
    parts = min(target.threads, spec.batch * spec.rows, -(-moved // PART_BYTES))
    return CPUAppend(target.isa, parts)


def build(spec: AppendSpec, schedule: CPUAppend) -> CPUKernel:
    """The kernel. Parameters in this order: keys, values of the cache; rotated q; k, v; q; table; lengths;
    cos, sin; scales of keys, of values: those that there are."""
    q, rope, isa = spec.q, spec.rope, schedule.isa
    angles = ""
    if rope is not None:
        kind, at = c_type(rope.dtype), f"near * {rope.half}"
        angles = f"""const s64 near = place < 0 ? 0 : inside ? place : {spec.longest - 1};
    const {kind} *cos_row = cos + {at}, *sin_row = sin + {at};
    """
    page = f"table[b * {spec.pages} + place / {spec.page_size}]" if spec.table else "b"
    queries = ""
    if q is not None:
        to = Pages(q.dtype, spec.rows * spec.q_heads * spec.d, spec.q_heads * spec.d, spec.d)
        queries = _part("q", q, "q_out", to, "b", "t", spec.q_heads, rope, None)
    values = "" if spec.v is None or spec.v_pages is None else \
        _part("v", spec.v, "v_pages", spec.v_pages, "page", "token", spec.heads, None, spec.v_scale)
    body = f"""
  const s64 rows = {spec.batch * spec.rows};
  for (s64 row = rows * core_id / {schedule.parts}; row < rows * (core_id + 1) / {schedule.parts}; row++) {{
    const s64 b = row / {spec.rows}, t = row % {spec.rows}, place = lengths[b] - {spec.rows} + t;
    const int inside = place >= 0 && place < {spec.longest};
    {angles}{queries}
    const s64 page = inside ? {page} : -1, token = place % {spec.page_size};
    if (page < 0 || page >= {spec.stored}) continue;
    {_part("k", spec.k, "k_pages", spec.k_pages, "page", "token", spec.heads, rope, spec.k_scale)}
    {values}
  }}"""
    outputs, inputs = [(c_type(spec.k_pages.dtype), "k_pages")], [(c_type(spec.k.dtype), "k")]
    if spec.v is not None and spec.v_pages is not None:
        outputs.append((c_type(spec.v_pages.dtype), "v_pages"))
        inputs.append((c_type(spec.v.dtype), "v"))
    if q is not None:
        outputs.append((c_type(q.dtype), "q_out"))
        inputs.append((c_type(q.dtype), "q"))
    inputs += [("s32", "table")] * spec.table + [("s32", "lengths")]
    if rope is not None: inputs += [(c_type(rope.dtype), "cos"), (c_type(rope.dtype), "sin")]
    inputs += [("float", "k_scale")] * bool(spec.k_scale) + [("float", "v_scale")] * bool(spec.v_scale)
    return kernel("kv_append", isa, body, outputs, inputs, (), schedule.parts, before=_functions(spec, isa))


def _part(name: str, rows: Heads, target: str, to: Pages, page: str, token: str, heads: int,
          rope: Rope | None, scale: Scales | None) -> str:
    """The heads of row t of request b."""
    start = f"{rows.offset} + b * {rows.request}LL + t * {rows.row}LL"
    end = f"{to.offset} + {page} * {to.page}LL + {token} * {to.token}LL"
    inverse = "1.f"
    if scale is not None:
        inverse = f"1.f / {name}_scale[page * {scale.page}LL + h * {scale.head}LL + {scale.offset}]"
    given = inverse + (", cos_row, sin_row" if rope is not None else "")
    return f"""for (s64 h = 0; h < {heads}; h++)
      move_{name}({name} + {start} + h * {rows.head}LL, {target} + {end} + h * {to.head}LL, {given});"""


def _functions(spec: AppendSpec, isa: ISA) -> str:
    """move_q, move_k and move_v: one head from `from` to `to`."""
    made = [_move("k", spec.k.dtype, spec.k_pages.dtype, spec.d, spec.rope)]
    if spec.v is not None and spec.v_pages is not None:
        made.append(_move("v", spec.v.dtype, spec.v_pages.dtype, spec.d_v, None))
    if spec.q is not None: made.append(_move("q", spec.q.dtype, spec.q.dtype, spec.d, spec.rope))
    return "\n".join([_QUANTISED, _interleaving(isa.lanes), *made])


def _move(name: str, source: DType, target: DType, d: int, rope: Rope | None) -> str:
    kind, to = short(source), short(target)

    def store(at: str, value: str, count: str) -> str:
        if target == dtypes.int8: value = f"to_s8({value} * inverse)"
        elif target in FP8: value = f"{value} * inverse"
        return f"store_n_{to}(to + {at}, {value}, {count});"
    angles, lines, done = "", "", 0
    if rope is not None:
        angle, done = short(rope.dtype), 2 * rope.half
        angles = f", const {c_type(rope.dtype)} *cos, const {c_type(rope.dtype)} *sin"
        turned = f"""const vf c = load_n_{angle}(cos + e, n), s = load_n_{angle}(sin + e, n);
    {_rotate(kind if rope.rounded else "")}"""
        if rope.interleaved:
            lines = f"""  for (s64 e = 0; e < {rope.half}; e += W) {{
    const s64 n = {rope.half} - e < W ? {rope.half} - e : W, first = 2 * n < W ? 2 * n : W;
    const vf x = load_n_{kind}(from + 2 * e, first), y = load_n_{kind}(from + 2 * e + W, 2 * n - first);
    const vf a = evens(x, y), b = odds(x, y);
    {turned}
    {store("2 * e", "lows(p, q)", "first")}
    {store("2 * e + W", "highs(p, q)", "2 * n - first")}
  }}"""
        else:
            lines = f"""  for (s64 e = 0; e < {rope.half}; e += W) {{
    const s64 n = {rope.half} - e;
    const vf a = load_n_{kind}(from + e, n), b = load_n_{kind}(from + e + {rope.half}, n);
    {turned}
    {store("e", "p", "n")}
    {store(f"e + {rope.half}", "q", "n")}
  }}"""
    given = f"const {c_type(source)} *from, {c_type(target)} *to, float inverse{angles}"
    return f"""INLINE void move_{name}({given}) {{
  (void)inverse;
{lines}
  for (s64 e = {done}; e < {d}; e += W) {{ {store("e", f"load_n_{kind}(from + e, {d} - e)", f"{d} - e")} }}
}}"""


def _rotate(kind: str) -> str:
    """p = a c − b s and q = b c + a s; each operation rounded to a dtype, where one is given."""
    if not kind: return "const vf p = fma_(a, c, -(b * s)), q = fma_(b, c, a * s);"
    def product(x: str, y: str) -> str: return f"round_{kind}({x} * {y})"
    return (f"const vf p = round_{kind}({product('a', 'c')} - {product('b', 's')}), "
            f"q = round_{kind}({product('b', 'c')} + {product('a', 's')});")


def _interleaving(lanes: int) -> str:
    """evens and odds of two vectors; lows and highs, which put them together again."""
    turns = [i // 2 + i % 2 * lanes for i in range(lanes)]
    order = {"evens": range(0, 2 * lanes, 2), "odds": range(1, 2 * lanes, 2), "lows": turns,
             "highs": [i + lanes // 2 for i in turns]}
    return "\n".join(f"INLINE vf {name}(vf x, vf y) {{ return __builtin_shufflevector(x, y, "
                     f"{', '.join(map(str, indices))}); }}" for name, indices in order.items())


# to the nearest, ties to even; NaN is -128, as of the GPU's instructions
_QUANTISED = """
INLINE vi to_s8(vf x) {
  const vf kept = min_((vf)127.f, max_(x, (vf)-128.f));
  return to_i((kept + NEAREST) - NEAREST);
}
"""


KV_APPEND = template(AppendSpec, CPUAppend, default, None, __name__)
FAMILY = Family("kv_append", (KV_APPEND,), determinism_class=BY_ELEMENT)
