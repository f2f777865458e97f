"""FlashAttention-3's forward tables as judges of the timing model.

github.com/Dao-AILab/flash-attention at 74b0761f (hopper/), the release that its paper measured (J. Shah et
al., "FlashAttention-3", 2024: figures of the forward pass, float16, H100 80GB SXM5), with CUTLASS at
756c351b. Its own host code launches the kernel, as a program that runs on the emulated GPU
(tinygrad_nv/host). Fitted: 16384 tokens, not causal (what wgmmas and other instructions take of each other).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.timing.judges import CACHE, Judged
from bench.timing.programs import launches, program
from tinygrad_nv.ptx.timing.model import Timing

TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
PUBLISHED = {(64, False): (333, 392, 460, 476, 496, 497), (64, True): (197, 265, 371, 420, 460, 473),
             (128, False): (467, 565, 625, 638, 646, 648), (128, True): (292, 423, 521, 579, 602, 616),
             (256, False): (482, 639, 707, 736, 746, 756), (256, True): (286, 427, 537, 612, 628, 642)}
FITTED = {(64, False, 16384), (128, False, 16384), (256, False, 16384)}
# what it uses of torch's headers
ATEN = """#pragma once
#include <cstdint>
#include <cstdio>
namespace at { struct PhiloxCudaState { uint64_t seed, offset; }; }
#define C10_CUDA_CHECK(x) do { if (cudaError_t e = (x)) printf("CUDA error %d\\n", int(e)); } while (0)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
"""


def build(source: Path, include: Sequence[Path], head: int) -> Path:
    """The program for a head size. Raises `NVError` with the compiler's words."""
    headers = CACHE / "aten"
    for name in ("CUDAGeneratorImpl.h", "cuda/CUDAGeneratorImpl.h", "cuda/CUDAContext.h",
                 "cuda/CUDAGraphsUtils.cuh"):
        (headers / "ATen" / name).parent.mkdir(parents=True, exist_ok=True)
        (headers / "ATen" / name).write_text(ATEN)
    text = Path(__file__).with_name("fa3_release.cu").read_text()
    return program(f"fa3_release_{head}", text, (headers, source / "hopper", *include),
                   (f"-DHEAD_DIM={head}",))


def predict(made: Path, causal: bool, tokens: int) -> Timing:
    """The launch of its program."""
    return launches(made, tokens, int(causal))[-1]


def judge(source: Path, include: Sequence[Path]) -> Iterator[Judged]:
    """Each bar of the paper's figures."""
    for (head, causal), figures in PUBLISHED.items():
        made = build(source, include, head)
        for tokens, tflops in zip(TOKENS, figures, strict=True):
            flops = 4 * 16384 * tokens * 2048 / (2 if causal else 1)
            found = flops / predict(made, causal, tokens).seconds / 1e12
            name = f"FA3 d {head}{' causal' if causal else ''} {tokens}"
            yield Judged("FlashAttention-3", name, tflops, found, (head, causal, tokens) in FITTED)


