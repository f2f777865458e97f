"""Functions of cpu/vector.h on arrays, for their tests.

Protocol: `call(level, name, out, *arrays, n)` runs the case `name` of CASES: C that reads a, b, c and writes
out, over n elements. One kernel of all cases is made for each level.
"""
from __future__ import annotations

import functools

import numpy as np

from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.kernel import C_TYPES, kernel
from tinygrad_nv.runtime.cpu.program import LoadedKernel, load

LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512, isa.AVX512_BF16)
          if not isa.why_not(each.level) and (not each.bf16 or "avx512_bf16" in isa.flags())]
LEVELS.append(isa.ISA("amx", bf16=True, vnni=True, emulated=True))  # 16 lanes by the compiler alone
FLOATS = ("f32", "bf16", "f16", "e4m3", "e5m2")
UNARY = ("exp2_", "exp2_small", "log2_", "sqrt_", "abs_", *(f"round_{kind}" for kind in FLOATS))
NUMPY = {"f32": np.float32, "bf16": np.uint16, "f16": np.uint16, "e4m3": np.uint8, "e5m2": np.uint8,
         "bool": np.uint8, "s8": np.int8, "u8": np.uint8, "s16": np.int16, "u16": np.uint16, "s32": np.int32,
         "u32": np.uint32}


def each(body: str) -> str: return f"for (s64 i = 0; i < n; i += W) {{ {body} }}"


def wide(kind: str) -> str: return "f32" if kind in FLOATS else "s32"


def of(kind: str, name: str, where: str = "i") -> str: return f"({C_TYPES[kind]} *){name} + {where}"


def _cases() -> dict[str, str]:
    made = {}
    for kind in C_TYPES:
        to, vector = wide(kind), "vf" if kind in FLOATS else "vi"
        made[f"load_{kind}"] = each(f"store_{to}({of(to, 'out')}, load_{kind}({of(kind, 'a')}));")
        made[f"store_{kind}"] = each(f"store_{kind}({of(kind, 'out')}, load_{to}({of(to, 'a')}));")
        # n of one vector
        made[f"load_n_{kind}"] = f"store_{to}({of(to, 'out', '0')}, load_n_{kind}({of(kind, 'a', '0')}, n));"
        made[f"store_n_{kind}"] = f"store_n_{kind}({of(kind, 'out', '0')}, load_{to}({of(to, 'a', '0')}), n);"
        made[f"one_{kind}"] = f"for (s64 i = 0; i < n; i++) (({C_TYPES[to]} *)out)[i] = " \
                              f"one_{kind}({of(kind, 'a')});"
        made[f"strided_{kind}"] = \
            f"store_{to}({of(to, 'out', '0')}, strided_{kind}({of(kind, 'a', '0')}, 3, n));"
        made[f"scatter_{kind}"] = \
            f"{vector} x = load_{to}({of(to, 'a', '0')}); scatter_{kind}({of(kind, 'out', '0')}, 3, x, n);"
    for name in UNARY:
        made[name] = each(f"store_f32({of('f32', 'out')}, {name}(load_f32({of('f32', 'a')})));")
    for name in ("max_", "min_"): made[name] = each(
        f"store_f32({of('f32', 'out')}, {name}(load_f32({of('f32', 'a')}), load_f32({of('f32', 'b')})));")
    made["fma_"] = each(f"store_f32({of('f32', 'out')}, fma_(load_f32({of('f32', 'a')}), "
                        f"load_f32({of('f32', 'b')}), load_f32({of('f32', 'c')})));")
    made["sums"] = """for (s64 i = 0; i < n; i += 4) {
      vf x[4]; for (int j = 0; j < 4; j++) x[j] = load_f32((const float *)a + (i + j) * W);
      vf4 s = sum4_(x[0], x[1], x[2], x[3]);
      for (int j = 0; j < 4; j++) {
        float *o = (float *)out + (i + j) * 3;
        o[0] = sum_(x[j]); o[1] = s[j]; o[2] = top_(x[j]);
        ((s32 *)b)[i + j] = sum_i(as_i(x[j]));
      } }"""
    made["transpose"] = """vi x[W]; for (int i = 0; i < W; i++) x[i] = load_s32((const s32 *)a + i * W);
      transpose(x); for (int i = 0; i < W; i++) store_s32((s32 *)out + i * W, x[i]);"""
    for bits, kind in ((16, "s16"), (17, "u16"), (8, "s8"), (9, "u8")):
        made[f"wrap{bits}"] = each(f"store_s32((s32 *)out + i, round_{kind}(load_s32((s32 *)a + i)));")
    return made


CASES = _cases()


@functools.cache
def _loaded(level: isa.ISA) -> LoadedKernel:
    cases = "\n".join(f"case {number}: {{ {text} break; }}" for number, text in enumerate(CASES.values()))
    pairs = """case 1000: store_f32((float *)out, dot_pairs(load_f32((float *)c), load_pairs((u16 *)a),
      load_n_pairs((u16 *)b, n))); break;""" if level.bf16 and not level.emulated else ""
    body = f"switch (what) {{ {cases}\n{pairs} }}"
    pointers = [("u8", name) for name in ("out", "a", "b", "c")]
    return load(kernel("vectors", level, body, pointers, [], ["what", "n"]))


def call(level: isa.ISA, name: str, n: int, out: np.ndarray, *given: np.ndarray) -> np.ndarray:
    """Runs a case; arrays stay alive, missing ones are the result's."""
    what = list(CASES).index(name) if name in CASES else 1000
    _loaded(level)(out, *[*given, out, out, out][:3], what, n)
    return out
