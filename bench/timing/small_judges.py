"""Judges of the timing model that need no checkout: Triton's tutorial attention, and microbenchmarks.

Triton: TFLOP/s of the tutorial's attention on an H100, head size 128, no mask, 16384 tokens in all and 2048
columns (github.com/pytorch/benchmark, pull request 2391 of July 2024; FlashAttention-3 is 4 % below its own
paper there). attention_peers.py has the same kernel, compiled by the Triton that is here, which may be newer;
the tutorial tries its tiles, so the best of `FLASHES` counts.

Microbenchmarks: cycles of wgmma and mma.sync on Hopper, of one SM, turned into TFLOP/s of an H100 at its
clock. `FITTED` were used to choose figures.
"""
from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.calibrate_constants import MEASURES
from bench.gpu.calibrate_players import ModelPlayer
from bench.lib.attention_peers import Flash
from bench.timing.gate_cases import GPU_NAME
from bench.timing.judges import Judged
from bench.timing.rows_attention import ALL, COLUMNS, of_flash
from tinygrad_nv.ptx.timing.gpu import figures

TRITON = {512: 328.882, 1024: 389.723, 2048: 433.721, 4096: 458.359, 8192: 470.732, 16384: 476.753}
FLASHES = (((128, 128), 8, 3), ((128, 64), 4, 3), ((128, 32), 4, 4))
# what gpu/calibrate.py measures: operations of a warpgroup's or an SM's instruction, and cycles of it, of
# Johnsonms/NVIDIA-Hopper-Benchmark (H100), W. Luo et al. 2024 (H800), and a H200
K16, K32 = 2 * 64 * 16, 2 * 64 * 32
MICRO = {"wgmma m64n8k16 bf16 SS": (8 * K16, 18.9), "wgmma m64n16k16 bf16 SS": (16 * K16, 20.9),
         "wgmma m64n32k16 bf16 SS": (32 * K16, 25.1), "wgmma m64n32k16 bf16 RS": (32 * K16, 16.9),
         "wgmma m64n64k16 bf16 SS": (64 * K16, 33.3), "wgmma m64n128k16 bf16 SS": (128 * K16, 65.8),
         "wgmma m64n256k16 bf16 SS": (256 * K16, 131.5), "wgmma m64n256k16 bf16 RS": (256 * K16, 131.3),
         "wgmma m64n8k16 bf16, 1 and a wait": (8 * K16, 57.7),
         "wgmma m64n8k16 bf16, 4 and a wait": (4 * 8 * K16, 113.5),
         "wgmma m64n8k16 bf16, 8 and a wait": (8 * 8 * K16, 185.5),
         "mma.sync m16n8k16 bf16, 1 warp, ILP 1": (2 * 16 * 8 * 16, 24.1),
         "mma.sync m16n8k16 bf16 of an SM": (2 * 16 * 8 * 16, 1.5),
         "mma.sync m16n8k32 s8, 1 warp, ILP 1": (2 * 16 * 8 * 32, 24.0),
         "mma.sync m16n8k32 s8 of an SM": (2 * 16 * 8 * 32, 1.504)}
FITTED = {"wgmma m64n8k16 bf16 SS", "wgmma m64n16k16 bf16 SS", "wgmma m64n32k16 bf16 SS",
          "wgmma m64n32k16 bf16 RS", "wgmma m64n64k16 bf16 SS", "wgmma m64n128k16 bf16 SS",
          "wgmma m64n8k16 bf16, 1 and a wait", "mma.sync m16n8k16 bf16, 1 warp, ILP 1",
          "mma.sync m16n8k16 bf16 of an SM"}


def judge() -> Iterator[Judged]:
    """Each row."""
    for tokens, tflops in TRITON.items():
        best = min(of_flash(Flash("forward", 128, *each), tokens).seconds for each in FLASHES)
        yield Judged("Triton", f"Triton d 128 {tokens}", tflops, 4 * ALL * tokens * COLUMNS / best / 1e12)
    gpu = figures(GPU_NAME)
    for name, (operations, cycles) in MICRO.items():
        rate = operations * gpu.sms * gpu.clock_hz / 1e12
        found = MEASURES[name].value(ModelPlayer(gpu))
        yield Judged("microbenchmarks", name, rate / cycles, rate / found, name in FITTED)
