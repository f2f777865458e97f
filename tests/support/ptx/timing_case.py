"""Kernels that the timing model reads: ours of each family, Triton's and nvcc's."""
from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np

from bench.lib.gemm_peers import OURS_PTX
from bench.timing.emitted_cases import cases, emit

NVCC = Path(__file__).parents[2] / "emu" / "ptx" / "nvcc"
OURS = {"gemm": "gemm: bf16 4096 | sm_90a | default",
        "gemm ping-pong": "gemm: bf16 640x512x1024 | sm_90a | wgmma ping-pong",
        "gemm mma": "gemm: f16 300x200x520 | sm_90a | mma 128x128",
        "flash": "attention: causal | sm_90a | default",
        "flash d 128": "attention: full d 128 f16 | sm_90a | default",
        "flash tiles": "attention: many tiles | sm_90a | default",
        "flash backward": "attention backward: causal | sm_90a | default",
        "decode": "decode: pages | sm_90a | default",
        "norm": "norm: rms | sm_90a | default"}
TRITON = {"triton gemm": "gemm-bf16-3stages-sm90", "triton specialised": "specialised-outer-sm90",
          "triton ampere": "gemm-bf16-real-sm80"}
AMPERE = "triton ampere"    # of mma.sync and cp.async, for sm_80
KERNELS = (*OURS, *(name for name in TRITON if name != AMPERE), "nvcc hopper", "nvcc shared")


@cache
def ptx(name: str) -> str:
    """The PTX of one of KERNELS."""
    if name in OURS: return emit(next(case for case in cases() if case.name == OURS[name])).kernels[0].ptx
    if name not in TRITON: return (NVCC / f"{name.partition(' ')[2]}.ptx").read_text()
    from tests.support.ptx.triton_case import compile_for
    from tests.support.ptx.triton_kernels import CASES
    case = next(case for case in CASES if case.name == TRITON[name])
    made = compile_for(case, case.make(np.random.default_rng(0))).ptx
    return re.sub(r"\.version \d+\.\d+", f".version {OURS_PTX}", made)


def module(body: str, params: str = ".param .u64 p, .param .u32 n", head: str = "") -> str:
    """A kernel `k` of this body."""
    return f""".version 8.7
.target sm_90a
.address_size 64
{head}
.visible .entry k({params})
.maxntid 128
{{
  .reg .b64 %rd<9>; .reg .f32 %f<20>; .reg .b32 %r<20>; .reg .pred %p<5>;
  ld.param.u64 %rd1, [p];
  ld.param.u32 %r1, [n];
{body}
}}
"""


def line_of(text: str, words: str) -> int:
    """The line where these words begin, the only one."""
    found = [number for number, line in enumerate(text.splitlines(), 1) if words in line]
    assert len(found) == 1, (words, found)
    return found[0]
