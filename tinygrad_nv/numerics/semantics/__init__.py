"""A model of arithmetic: rounding, overflow, NaN, subnormals and order of sums, for each dtype and unit, to
run.

docs/numerics.md says it in words, with sources. The model shares nothing with the emulator or with kernels:
tests/emu/numerics/ holds them to it, bit for bit. It needs NumPy, which `import tinygrad_nv` does not load.

Read in this order:
  formats.py    codes and values of f32, tf32, f16, bf16, e4m3, e5m2: decode, and encode with each rounding
  exact.py      sums, products, quotients and roots in float64 with what float64 drops kept in the last bit
  elements.py   add, mul, fma, div … of CUDA cores and of CPUs, and conversions
  units.py      dot products: tensor cores (mma, wgmma), AMX, AVX-512 BF16, bytes, chains of FMAs
"""
from tinygrad_nv.numerics.semantics.elements import apply, convert
from tinygrad_nv.numerics.semantics.formats import FORMATS, Format, decode, encode
from tinygrad_nv.numerics.semantics.units import Unit, dot, promote_dot, tensor_core

__all__ = ["FORMATS", "Format", "Unit", "apply", "convert", "decode", "dot", "encode", "promote_dot",
           "tensor_core"]
