"""tinygrad's PTX renderer for devices over `driver.py`.

Protocol: a `Renderer` of tinygrad. It differs from tinygrad's in what depends on the name of the device: the
"binary" is the PTX text (the driver compiles it, or runs it), and a float32 matmul keeps its precision unless
ALLOW_TF32 is set. Text whose header does not ask for TARGET and VERSION is left as it is, so that kernels
given as PTX pass through the same compiler.
"""
from __future__ import annotations

from dataclasses import replace

from tinygrad.codegen.opt.tc import TensorCore
from tinygrad.device import Compiler
from tinygrad.dtype import dtypes
from tinygrad.helpers import ALLOW_TF32, Target
from tinygrad.renderer import ptx

HEADER = ".version VERSION\n.target TARGET\n"


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

    def __init__(self, target: Target) -> None:
        # under this name tinygrad takes the compiler that needs no library
        super().__init__(replace(target, device="CUDA"))
        self.target, self.compiler = target, PTXText(target.arch)
        cores: list[TensorCore] = ptx.PTXRenderer.tc_sm80
        self.tensor_cores = [core for core in cores if ALLOW_TF32 or core.dtype_in != dtypes.float]
