"""Functions that flash.py computes with: packing of keys and values, products of a few rows with packed
blocks, in C.

Protocol: `ROWS` rows at a time. Numbers are float32, or with `pairs` bfloat16 in pairs along what is summed,
as VDPBF16PS takes them: an element of a packed block is then 32 bits of two numbers. `units` of a head are
what a sum goes over: d numbers, or half as many pairs.

    keys[units][block_n]       the block of k transposed, so that the lanes of a vector are columns
    values[block_n][d_v]       the block of v, pairs of rows together, the lanes along d_v
    s[ROWS][block_n]           q kᵀ; then, in place, the weights
    o[ROWS][d_v]               the result so far

`product` is s = q kᵀ for `count` vectors of columns: ROWS · count sums in registers, an element of q spread
over the lanes for each row. `weighted` is o = o · alpha + p v likewise.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import c_type, up
from tinygrad_nv.tile.expression import short

ROWS = 6  # · 4 vectors of 512 bits, or · 2 of fewer, are the sums that registers hold beside operands


def has_pairs(dtype: DType, isa: ISA) -> bool:
    """Whether products are of pairs of bfloat16."""
    return dtype == dtypes.bfloat16 and isa.bf16 and not isa.emulated


@dataclass(frozen=True)
class AttentionBlocks:
    """Parameters that the text depends on."""
    isa: ISA
    dtype: DType
    d: int
    d_v: int
    block_n: int

    @property
    def pairs(self) -> bool: return has_pairs(self.dtype, self.isa)

    @property
    def units(self) -> int:
        """Number of units that sums over d go over."""
        return -(-self.d // 2) if self.pairs else self.d

    @property
    def keys(self) -> int:
        """Rows of `keys`: whole squares are transposed."""
        return up(self.units, self.isa.lanes)

    @property
    def width(self) -> int:
        """Columns of `values` and `o`."""
        return up(self.d_v, self.isa.lanes)

    @property
    def most(self) -> int:
        """Vectors of columns whose sums registers hold."""
        return 4 if self.isa.registers == 32 else 2

    @property
    def element(self) -> str:
        """The C type of a packed element."""
        return "u32" if self.pairs else "float"

    def text(self) -> str:
        """All functions."""
        whole, last = divmod(self.width // self.isa.lanes, self.most)
        return "\n".join([_HEAD, _DOTS, self._pack_keys(), self._pack_values(),
                          *(self._product(n) for n in range(1, self.most + 1)),
                          *(self._weigh_values(n) for n in [self.most] * (whole > 0) + [last] * (last > 0))])

    def products(self) -> str:
        """C that makes s of all vectors of columns from `begin` up to `end`."""
        cases = " ".join(f"case {n}: product{n}(qs, keys + v * W, s + v * W); break;"
                         for n in range(1, self.most))
        return f"""{{ s64 v = begin;
        for (; v + {self.most} <= end; v += {self.most}) product{self.most}(qs, keys + v * W, s + v * W);
        switch (end - v) {{ {cases} default: break; }} }}"""

    def weighteds(self) -> str:
        """C that adds p v of columns from `from` up to `to` to `os`."""
        count, out, at = self.width // self.isa.lanes, [], 0
        while at < count:
            n = min(self.most, count - at)
            out.append(f"weighted{n}(os + {at} * W, p, values + {at} * W, from, to, alpha);")
            at += n
        return " ".join(out)

    def _pack_keys(self) -> str:
        lanes, kind, n = self.isa.lanes, short(self.dtype), self.block_n
        whole, scale = self.units // lanes * lanes, " * scale[c]" if kind == "e4m3" else ""
        of_unit = 2 if self.pairs else 1

        def square(load: str) -> str:
            loads = "\n".join(f"{{ const s64 c = i + {j} < cols ? i + {j} : cols - 1; "
                              f"const {c_type(self.dtype)} *row = k + c * stride + {of_unit} * u; "
                              f"x[{j}] = {load}; }}" for j in range(lanes))
            stores = " ".join(f"*(vi_u *)(keys + (u + {j}) * {n} + i) = x[{j}];" for j in range(lanes))
            return f"{{ vi x[W];\n{loads}\ntranspose(x); {stores} }}"
        if self.pairs: load, some = "*(const vi_u *)row", f"some_pairs(row, {self.d - 2 * whole})"
        else:
            load, some = (f"as_i({name}_{kind}(row{rest}){scale})"
                          for name, rest in (("load", ""), ("load_n", f", {self.d - whole}")))
        rest = f"{{ const s64 u = {whole}; {square(some)} }}" if whole < self.units else ""
        return f"""// columns after the last are copies of it
static __attribute__((noinline)) void pack_keys({self.element} *keys, const {c_type(self.dtype)} *k,
    s64 stride, s64 cols, const float *scale) {{
  for (s64 i = 0; i < cols; i += W) {{
    for (s64 u = 0; u < {whole}; u += W) {square(load)}
    {rest}
  }}
}}"""

    def _pack_values(self) -> str:
        kind, lanes, width = short(self.dtype), self.isa.lanes, self.width
        whole, scale = self.d_v // lanes * lanes, " * scale[c]" if kind == "e4m3" else ""
        if self.pairs:
            def step(name: str, rest: str) -> str:
                return f"*(vi_u *)(values + c / 2 * {width} + x) = " \
                       f"(c < hidden ? (vi)0 : {name}_u16(row + x{rest})) | " \
                       f"(c + 1 < cols ? {name}_u16(row + stride + x{rest}) << 16 : (vi)0);"
            by = 2
        else:
            def step(name: str, rest: str) -> str:
                return f"*(vf_u *)(values + c * {width} + x) = {name}_{kind}(row + x{rest}){scale};"
            by = 1
        last = step("load_n", f", {self.d_v - whole}")
        rest = f"{{ const s64 x = {whole}; {last} }}" if whole < self.d_v else ""
        first = f"hidden / {by} * {by}"
        return f"""static __attribute__((noinline)) void pack_values({self.element} *values,
    const {c_type(self.dtype)} *v, s64 stride, s64 hidden, s64 cols, const float *scale) {{
  for (s64 c = {first};  c < cols; c += {by}) {{
    const {c_type(self.dtype)} *row = v + c * stride;
    for (s64 x = 0; x < {whole}; x += W) {step("load", "")}
    {rest}
  }}
}}"""

    def _step(self, count: int, a: str, b: str) -> str:
        """Sums of rows and vectors: += element `a` of row i · vector `b` number j."""
        kind, fused = ("vi", "dot_") if self.pairs else ("vf", "fma_")
        out = [f"const {kind} b{j} = *(const {kind}_u *)({b} + {j} * W);" for j in range(count)]
        for i in range(ROWS):
            out.append(f"{{ const {kind} a = ({kind}){a.format(i=i)};")
            out += [f"s{i}_{j} = {fused}(a, b{j}, s{i}_{j});" for j in range(count)]
            out.append("}")
        return " ".join(out)

    def _product(self, count: int) -> str:
        units = self.units
        names = [(i, j) for i in range(ROWS) for j in range(count)]
        zero = " ".join(f"vf s{i}_{j} = (vf)0.f;" for i, j in names)
        store = " ".join(f"*(vf_u *)(s + {i * self.block_n} + {j} * W) = s{i}_{j};" for i, j in names)
        step = self._step(count, f"q[{{i}} * {units} + u]", f"keys + u * {self.block_n}")
        return f"""static __attribute__((noinline)) void product{count}(const {self._unit_type} *q,
    const {self.element} *keys, float *s) {{
  {zero}
  for (s64 u = 0; u < {self.units}; u++) {{ {step} }}
  {store}
}}"""

    @property
    def _unit_type(self) -> str:
        """The C type of elements of q and of weights as `units` have them."""
        return "s32" if self.pairs else "float"

    def _weigh_values(self, count: int) -> str:
        by, row = (2, self.block_n // 2) if self.pairs else (1, self.block_n)
        names = [(i, j) for i in range(ROWS) for j in range(count)]
        lies = {(i, j): f"*(vf_u *)(o + {i * self.width} + {j} * W)" for i, j in names}
        load = " ".join(f"vf s{i}_{j} = {lies[i, j]} * alpha[{i}];" for i, j in names)
        store = " ".join(f"{lies[i, j]} = s{i}_{j};" for i, j in names)
        step = self._step(count, f"p[{{i}} * {row} + u]", f"values + u * {self.width}")
        return f"""static __attribute__((noinline)) void weighted{count}(float *o, const {self._unit_type} *p,
    const {self.element} *values, s64 from, s64 to, const float *alpha) {{
  {load}
  for (s64 u = from / {by}; u < (to + {by - 1}) / {by}; u++) {{ {step} }}
  {store}
}}"""


_HEAD = """ANYWHERE(s32_u, s32);
// the greatest of the lanes, none of them NaN
INLINE float peak_(vf x) {
#if W == 16
  VECTOR(float, 8) h = __builtin_elementwise_max(x.lo, x.hi);
  VECTOR(float, 4) q = __builtin_elementwise_max(h.lo, h.hi);
#elif W == 8
  VECTOR(float, 4) q = __builtin_elementwise_max(x.lo, x.hi);
#else
  VECTOR(float, 4) q = x;
#endif
  VECTOR(float, 2) p = __builtin_elementwise_max(q.lo, q.hi);
  return p.x > p.y ? p.x : p.y;
}
INLINE vi some_pairs(const u16 *p, s64 n) {
  vi x = (vi)0;
  for (s64 i = 0; i < W && 2 * i < n; i++) x[i] = p[2 * i] | (2 * i + 1 < n ? p[2 * i + 1] << 16 : 0);
  return x;
}"""
# sums of products of pairs, and the nearest pairs of two vectors' numbers; weights are no subnormal numbers
_DOTS = """#if HAVE_BF16
INLINE vf dot_(vi a, vi b, vf c) { __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b)); return c; }
INLINE vh weights_(vf x) { vh y; __asm__("vcvtneps2bf16 %1, %0" : "=v"(y) : "v"(x)); return y; }
#endif"""
