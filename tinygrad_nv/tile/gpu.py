"""Figures of GPUs, for the cost model.

Protocol: a `GPUModel` holds rates and sizes of one GPU, as its maker states them (the white papers named
below) where `peak` figures are meant, and estimates where no maker states any: `sustained`, `l2_bytes_per_s`
and the latencies. `gpu_model_for(arch, sm_count)` finds the GPU of a device. The H100's `l2_bytes_per_s`,
`sustained` and `load_s` are fitted to matmuls that one timed (bench/timing/fit_cost.py); nothing else was
measured by us.

Sources: NVIDIA H100 Tensor Core GPU Architecture (2022), tables 1 to 3; NVIDIA A100 Tensor Core GPU
Architecture (2020), tables 4 and 5; NVIDIA Ada GPU Architecture (2022), appendix A; L40S data sheet (2023).
Multiply-adds a cycle and SM follow from them: 989.4 TFLOP/s = 2 · 132 SMs · 1.83 GHz · 2048. L2 bandwidth:
DeepGEMM's model has 64 bytes a cycle and SM, at most 8 TB/s on Hopper; the others in proportion to SMs and
clock. Sustained shares of tensor peak: the best published bf16 products reach 855 of 989 TFLOP/s on H100,
where power ends it (93 % of the peak, less what a busy L2 takes, `l2_power`), 290 of 312 on A100. mma.sync on
Hopper: 62 % of wgmma. That an early launch saves half of the latency of one is an estimate: the CTAs are
placed, the last wait and the flush of memory remain.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.gemm.spec import FP8, INT8S

STREAMING = 0.92                    # of HBM's peak, that reading in order reaches
BYTE_OPERANDS = frozenset((*FP8, *INT8S))  # which tensor cores take at twice the speed of bf16


@dataclass(frozen=True)
class GPUModel:
    """A GPU. `tensor_fma`: bf16 multiply-adds a cycle and SM at peak; `mma_share` of them by mma.sync;
    `fp32_fma` without tensor cores. `launch_s` is a kernel's in a graph, `early_launch_s` what is left of it
    where kernels begin before the one ahead has ended (0: they do not); `load_s` from asking HBM for a
    tile until it is there, under load. `l2_power`: of L2's cycles beside tensor cores, the share that these
    lose by the power it takes."""
    name: str
    arch: str
    sm_count: int
    clock_hz: float
    hbm_bytes_per_s: float
    l2_bytes_per_s: float
    l2_bytes: int
    smem_of_sm: int
    tensor_fma: int
    fp32_fma: int = 128
    mma_share: float = 1.0
    sustained: float = 0.9
    l2_power: float = 0.0
    threads_of_sm: int = 2048
    launch_s: float = 1.3e-6
    early_launch_s: float = 0.0
    load_s: float = 0.7e-6

    @property
    def tensor_flops_per_s(self) -> float:
        """bf16 operations a second at peak."""
        return 2.0 * self.tensor_fma * self.sm_count * self.clock_hz

    def tensor_scale(self, dtype: DType, by_mma: bool) -> float:
        """Speed of the tensor cores with these operands, by mma.sync or by wgmma, where bf16 in the fastest
        way is 1."""
        scale = 2.0 if dtype in BYTE_OPERANDS else 0.5 if dtype == dtypes.float32 else 1.0
        if not by_mma: return scale
        # mma.sync of fp8 is unpacked to two of f16 on Hopper
        return self.mma_share * (1.0 if dtype in FP8 and self.arch == "sm_90a" else scale)


H100 = GPUModel("H100 SXM", "sm_90a", 132, 1.83e9, 3.35e12, 8.57e12, 50 << 20, 228 << 10, 2048,
               mma_share=0.62, sustained=0.95, l2_power=0.1, early_launch_s=0.7e-6, load_s=1.1e-6)
H100_PCIE = replace(H100, name="H100 PCIe", sm_count=114, clock_hz=1.62e9, hbm_bytes_per_s=2.04e12,
                    l2_bytes_per_s=5.5e12)
A100 = GPUModel("A100 SXM 80GB", "sm_80", 108, 1.41e9, 2.04e12, 5e12, 40 << 20, 164 << 10, 1024, fp32_fma=64,
               sustained=0.93)
L40S = GPUModel("L40S", "sm_89", 142, 2.52e9, 0.864e12, 8e12, 96 << 20, 100 << 10, 512, threads_of_sm=1536)
RTX4090 = replace(L40S, name="RTX 4090", sm_count=128, hbm_bytes_per_s=1.008e12, l2_bytes=72 << 20,
                  tensor_fma=256)
GPU_MODELS = (H100, H100_PCIE, A100, L40S, RTX4090)  # of each architecture, the one meant first


@functools.cache
def gpu_model_for(arch: str, sm_count: int = 0) -> GPUModel:
    """The GPU of an architecture with this many SMs; 0: the architecture's first. Where none is known with
    so many, the first with L2 and HBM as they are and that many SMs."""
    known = [gpu_model for gpu_model in GPU_MODELS if gpu_model.arch == arch]
    assert known, f"{arch} is one of sm_80, sm_89, sm_90a"
    exact = [gpu_model for gpu_model in known if gpu_model.sm_count == sm_count or not sm_count]
    return exact[0] if exact else replace(known[0], name=f"{arch} with {sm_count} SMs", sm_count=sm_count)
