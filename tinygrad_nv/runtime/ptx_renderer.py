"""tinygrad's PTX renderer for devices over `driver.py`.

Protocol: a `Renderer` of tinygrad. It differs from tinygrad's in what depends on the name of the device: the
"binary" is the PTX text (the driver compiles it, or runs it), and a float32 matmul keeps its precision unless
ALLOW_TF32 is set. Text whose header does not ask for TARGET and VERSION is left as it is, so that kernels
given as PTX pass through the same compiler.

It also wraps bytes: PTX has no 8-bit arithmetic, so tinygrad computes them in 16-bit registers and would
compare, shift, divide or widen 127 + 1 as 128.
"""
from __future__ import annotations

from dataclasses import replace

from tinygrad.codegen.opt.tc import TensorCore
from tinygrad.device import Compiler
from tinygrad.dtype import dtypes
from tinygrad.helpers import ALLOW_TF32, Target
from tinygrad.renderer import ptx
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

HEADER = ".version VERSION\n.target TARGET\n"


WIDER = {dtypes.int8: dtypes.int16, dtypes.uint8: dtypes.uint16}
# what can make of bytes what is none
OVERFLOWING = (Ops.ADD, Ops.SUB, Ops.NEG, Ops.MUL, Ops.MULACC, Ops.SHL, Ops.CDIV)


def _wrapped(x: UOp) -> UOp:
    """A byte's arithmetic in 16 bits, then cut to 8."""
    return UOp(x.op, src=tuple(s.cast(WIDER[x.dtype]) if s.dtype == x.dtype else s for s in x.src),
               arg=x.arg).cast(x.dtype)


_pm_bytes = PatternMatcher([(UPat(OVERFLOWING, dtype=tuple(WIDER), name="x"), _wrapped)])


class PTXText(Compiler):
    """Fills in the header that tinygrad's renderer leaves open. `arch` is sm_80 … sm_90."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        super().__init__(f"compile_tinygrad_nv_ptx_{arch}")

    def compile(self, src: str) -> bytes:
        version = "7.8" if int(self.arch[3:]) >= 89 else "7.5"
        return src.replace(HEADER, f".version {version}\n.target {self.arch}\n", 1).encode()


class PTXRenderer(ptx.PTXRenderer):
    """PTX for `target.arch`, sm_80 … sm_90."""
    extra_matcher = _pm_bytes + ptx.ptx_matcher

    def __init__(self, target: Target) -> None:
        # under this name tinygrad takes the compiler that needs no library
        super().__init__(replace(target, device="CUDA"))
        self.target, self.compiler = target, PTXText(target.arch)
        cores: list[TensorCore] = ptx.PTXRenderer.tc_sm80
        self.tensor_cores = [core for core in cores if ALLOW_TF32 or core.dtype_in != dtypes.float]
