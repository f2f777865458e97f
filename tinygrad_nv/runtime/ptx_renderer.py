"""tinygrad's PTX renderer for devices over `driver.py`.

Protocol: a `Renderer` of tinygrad. It differs from tinygrad's in what depends on the name of the device: the
"binary" is the PTX text (the driver compiles it, or runs it), and a float32 matmul keeps its precision unless
ALLOW_TF32 is set. Text whose header does not ask for TARGET and VERSION is left as it is, so that kernels
given as PTX pass through the same compiler. On sm_90 a kernel lets the one after it begin as soon as all its
own CTAs have begun, and waits for the one before; program.py launches a kernel that waits accordingly.

Three types are mended. Bytes wrap: PTX has no 8-bit arithmetic, so tinygrad computes them in 16-bit registers
and would compare, shift, divide or widen 127 + 1 as 128. And bfloat16 is a type of its own, kept in .b16
registers and computed in float32, where tinygrad's stand-in for types a renderer lacks rounds only at stores,
and fails on some reductions. Of float64 PTX has rcp and sqrt rounded to nearest, and no ex2, lg2 or sin:
those are series.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from tinygrad.codegen.decomp.transcendental import xexp2, xlog2, xsin
from tinygrad.codegen.opt.tc import TensorCore
from tinygrad.device import Compiler
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import ALLOW_TF32, Target
from tinygrad.renderer import ptx
from tinygrad.renderer.cstyle import create_non_native_float_pats
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

REVISION = 6  # goes up when the renderer writes other text: programs are kept on disk
HEADER = ".version VERSION\n.target TARGET\n"
EARLY = ["griddepcontrol.launch_dependents;", "griddepcontrol.wait;"]


WIDER = {dtypes.int8: dtypes.int16, dtypes.uint8: dtypes.uint16}
# what can make of bytes what is none
OVERFLOWING = (Ops.ADD, Ops.SUB, Ops.NEG, Ops.MUL, Ops.MULACC, Ops.SHL, Ops.CDIV)


def _widen(x: UOp) -> UOp:
    """Returns a byte's arithmetic in 16 bits, then cut to 8."""
    return UOp(x.op, src=tuple(s.cast(WIDER[x.dtype]) if s.dtype == x.dtype else s for s in x.src),
               arg=x.arg).cast(x.dtype)


_pm_bytes = PatternMatcher([(UPat(OVERFLOWING, dtype=tuple(WIDER), name="x"), _widen)])

# PTX converts from bf16 on sm_90 only; its bits are the upper half of a float's on all
_pm_bf16 = create_non_native_float_pats((dtypes.bfloat16,)) + PatternMatcher([
    (UPat(Ops.CAST, dtypes.float32, (UPat.var("x", dtypes.bfloat16),)),
     lambda x: (x.bitcast(dtypes.uint16).cast(dtypes.uint32) << 16).bitcast(dtypes.float32)),
])
BF16_CONSTANT = re.compile(r"^(mov\.b16 \S+, )0f([0-9A-F]{8});")


def bf16_constant(line: str) -> str:
    """A move of a bf16 constant, which tinygrad's renderer spells as a float's 32 bits, with its own 16."""
    def round_bits(found: re.Match[str]) -> str:
        bits = int(found[2], 16)
        if bits & 0x7fffffff <= 0x7f800000: bits += 0x7fff + (bits >> 16 & 1)
        return f"{found[1]}0x{bits >> 16:04X};"
    return BF16_CONSTANT.sub(round_bits, line)


_pm_double = PatternMatcher([(UPat(op, dtype=dtypes.double, src=(UPat.var("d"),)), series) for op, series in
                             ((Ops.EXP2, xexp2), (Ops.LOG2, xlog2), (Ops.SIN, xsin))])


def _nearest(op: Ops, name: str) -> Callable[..., str]:
    """The instruction of an operation that PTX approximates in float32 only."""
    def line(d: str, a: str, dtype: DType, kind: str) -> str:
        return f"{name}.rn.f64 {d}, {a};" if dtype == dtypes.double else ptx.asm_for_op[op](d, a, dtype, kind)
    return line


class PTXText(Compiler):
    """Fills in the header that tinygrad's renderer leaves open. `arch` is sm_80 … sm_90."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        super().__init__(f"compile_tinygrad_nv_ptx_{REVISION}_{arch}")

    def compile(self, src: str) -> bytes:
        version = "7.8" if int(self.arch[3:]) >= 89 else "7.5"
        return src.replace(HEADER, f".version {version}\n.target {self.arch}\n", 1).encode()


class PTXRenderer(ptx.PTXRenderer):
    """PTX for `target.arch`, sm_80 … sm_90."""
    extra_matcher = _pm_bytes + _pm_bf16 + _pm_double + ptx.ptx_matcher
    code_for_op: ClassVar = {**ptx.asm_for_op, Ops.RECIPROCAL: _nearest(Ops.RECIPROCAL, "rcp"),
                             Ops.SQRT: _nearest(Ops.SQRT, "sqrt")}
    types: ClassVar = {**ptx.PTXRenderer.types, dtypes.bfloat16: "b16"}
    mem_types: ClassVar = {**ptx.PTXRenderer.mem_types, dtypes.bfloat16: "b16"}
    cast_types: ClassVar = {**ptx.PTXRenderer.cast_types, dtypes.bfloat16: "bf16"}

    def __init__(self, target: Target) -> None:
        # under this name tinygrad takes the compiler that needs no library
        super().__init__(replace(target, device="CUDA"))
        self.target, self.compiler = target, PTXText(target.arch)
        cores: list[TensorCore] = ptx.PTXRenderer.tc_sm80
        self.tensor_cores = [core for core in cores if ALLOW_TF32 or core.dtype_in != dtypes.float]

    def render_kernel(self, kernel: list[str], *args: Any) -> str:
        lines = [bf16_constant(line) for line in kernel]
        if int(self.target.arch[3:]) < 90: return super().render_kernel(lines, *args)
        return super().render_kernel([*EARLY, *lines], *args)

    def supported_dtypes(self) -> set[DType]: return super().supported_dtypes() | {dtypes.bfloat16}
