"""Functions that kernel.py computes with: products of tiles in registers, and rows in scratch memory, in C.

Protocol: numbers in scratch are float32 in rows of `pitch(n)` elements, an odd number of cache lines, so that
rows below each other are in different sets of a cache. A product makes a tile of `ROWS` rows and a few
vectors in registers,

    out[i][j] (+)= Σ_u a[i · a_row + u · a_step] b[u][j]

one vector of a's element spread over the lanes for each vector of b. All strides are constants, so a
function is made for each product that differs.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import c_type
from tinygrad_nv.tile.expression import short

NOINLINE = "static __attribute__((noinline)) void"
ROWS = 6    # · 4 vectors of 512 bits, or · 2 of fewer, are the sums that registers hold beside operands
LINE = 16   # float32 numbers of a cache line


def pitch(count: int) -> int:
    """Elements between rows of `count`."""
    return (-(-count // LINE) | 1) * LINE


@dataclass(frozen=True)
class TileProduct:
    """A product, for tiles of ROWS rows and `vectors` vectors."""
    name: str
    a_row: int
    a_step: int
    b_row: int
    out_row: int
    add: bool

    def text(self, vectors: int) -> str:
        """Its function, {name}{vectors}(a, b, out, count)."""
        tile = [(i, j) for i in range(ROWS) for j in range(vectors)]
        begin = "load_f32(out + {i} * {row} + {j} * W)" if self.add else "(vf)0.f"
        sums = "\n".join(f"  vf s{i}_{j} = {begin.format(i=i, j=j, row=self.out_row)};" for i, j in tile)
        step = [f"const vf b{j} = load_f32(b + u * {self.b_row} + {j} * W);" for j in range(vectors)]
        for i in range(ROWS):
            fused = " ".join(f"s{i}_{j} = fma_(x, b{j}, s{i}_{j});" for j in range(vectors))
            step.append(f"{{ const vf x = (vf)a[{i * self.a_row} + u * {self.a_step}]; {fused} }}")
        stores = "\n".join(f"  store_f32(out + {i * self.out_row} + {j} * W, s{i}_{j});" for i, j in tile)
        loop = "\n    ".join(step)
        return f"""{NOINLINE} {self.name}{vectors}(const float *a, const float *b, float *out, s64 count) {{
{sums}
  for (s64 u = 0; u < count; u++) {{
    {loop}
  }}
{stores}
}}"""

    def over(self, a: str, b: str, out: str, count: str, width: int, isa: ISA) -> str:
        """C that makes ROWS rows of `width` elements."""
        return " ".join(f"{self.name}{n}({a}, {b} + {at} * W, {out} + {at} * W, {count});"
                        for at, n in panels(width, isa))


def most_vectors(isa: ISA) -> int:
    """Vectors of a tile: with ROWS rows, what registers hold beside operands."""
    return 4 if isa.registers == 32 else 2


def panels(width: int, isa: ISA) -> Iterator[tuple[int, int]]:
    """Vectors that make rows of `width` elements: the first of a tile, and how many."""
    count, most = -(-width // isa.lanes), most_vectors(isa)
    return ((at, min(most, count - at)) for at in range(0, count, most))


def functions(products: Iterable[tuple[TileProduct, int]], isa: ISA) -> str:
    """The functions of products, whose results are so wide; equal ones once."""
    made = {(product, n): None for product, width in products for _, n in panels(width, isa)}
    return "\n".join(product.text(n) for product, n in made)


# **** rows ****

def read(name: str, dtype: DType, d: int, isa: ISA) -> str:
    """{name}(to, from, stride, rows): rows of `d` elements, widened."""
    load, rest = _part("load", dtype, d, isa)
    return _function(name, "float *to", f"const {c_type(dtype)} *from", d,
                     f"store_f32(to + r * {pitch(d)} + c, {load}(from + r * stride + c{rest}));")


def write(name: str, dtype: DType, d: int, isa: ISA) -> str:
    """{name}(to, from, stride, rows): rows of `d` elements, rounded."""
    store, rest = _part("store", dtype, d, isa)
    return _function(name, f"{c_type(dtype)} *to", "const float *from", d,
                     f"{store}(to + r * stride + c, load_f32(from + r * {pitch(d)} + c){rest});")


def add(name: str, d: int, isa: ISA) -> str:
    """{name}(to, from, stride, rows): rows of `d` elements, added to those that are there."""
    (load, rest), (store, _) = (_part(which, dtypes.float32, d, isa) for which in ("load", "store"))
    where = "to + r * stride + c"
    total = f"{load}({where}{rest}) + load_f32(from + r * {pitch(d)} + c)"
    return _function(name, "float *to", "const float *from", d, f"{store}({where}, {total}{rest});")


def turn(name: str, dtype: DType, d: int, row: int, isa: ISA) -> str:
    """{name}(to, from, stride, cols): a block of `cols` rows of `d` elements, widened, its columns as rows of
    `row` elements. Rows after the last are copies of it."""
    load, rest = _part("load", dtype, d, isa)
    loads = "\n".join(f"      x[{i}] = as_i({load}(from + smaller(j + {i}, cols - 1) * stride + c{rest}));"
                      for i in range(isa.lanes))
    stores = "\n".join(f"      store_f32(to + (c + {i}) * {row} + j, as_f(x[{i}]));"
                       for i in range(isa.lanes))
    return f"""{NOINLINE} {name}(float *to, const {c_type(dtype)} *from, s64 stride, s64 cols) {{
  for (s64 j = 0; j < cols; j += W)
    for (s64 c = 0; c < {d}; c += W) {{
      vi x[W];
{loads}
      transpose(x);
{stores}
    }}
}}"""


def _function(name: str, to: str, start: str, d: int, step: str) -> str:
    return f"""{NOINLINE} {name}({to}, {start}, s64 stride, s64 rows) {{
  for (s64 r = 0; r < rows; r++)
    for (s64 c = 0; c < {d}; c += W) {step}
}}"""


def _part(which: str, dtype: DType, d: int, isa: ISA) -> tuple[str, str]:
    """The function that loads or stores a vector of a row, and its last argument: how many count."""
    if d % isa.lanes == 0: return f"{which}_{short(dtype)}", ""
    return f"{which}_n_{short(dtype)}", f", {d} - c"
