// A matmul of CUTLASS's, out = a @ b.T in bfloat16 with sums in float32, by -DSCHEDULE (KernelTmaWarpSpecialized...),
// -DROWS, -DCOLUMNS, -DCLUSTER: built by timing/rows_gemm.py. Arguments: m, n, k.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include "cutlass/cutlass.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"

using namespace cute;
using Type = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Block = Shape<Int<ROWS>, Int<COLUMNS>, _64>;
using Cluster = Shape<Int<CLUSTER>, _1, _1>;
using Arch = cutlass::arch::Sm90;
using Wgmma = cutlass::arch::OpClassTensorOp;
#ifdef PINGPONG
using Loop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using End = cutlass::epilogue::TmaWarpSpecialized;
#else
using Loop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using End = cutlass::epilogue::TmaWarpSpecializedCooperative;
#endif
using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<Arch, Wgmma, Block, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, 8, Type, Row, 8, End>::CollectiveOp;
using Main = cutlass::gemm::collective::CollectiveBuilder<Arch, Wgmma, Type, Row, 8, Type, Column, 8, float,
    Block, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
    Loop>::CollectiveOp;
#ifdef STREAM
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Main, Epilogue,
    cutlass::gemm::StreamKScheduler>;
#else
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Main, Epilogue,
    cutlass::gemm::PersistentScheduler>;
#endif
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

int main(int argc, char **argv)
{
    if (argc < 4) return 2;
    int const m = atoi(argv[1]), n = atoi(argv[2]), k = atoi(argv[3]);
    Type *a, *b, *out;
    cudaMalloc(&a, size_t(m) * k * 2), cudaMalloc(&b, size_t(n) * k * 2), cudaMalloc(&out, size_t(m) * n * 2);
    cutlass::KernelHardwareInfo gpu;
    gpu.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(0);
    typename Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm, {m, n, k, 1},
        {a, {k, _1{}, 0}, b, {k, _1{}, 0}},
        {{1.f, 0.f}, nullptr, {}, out, {n, _1{}, 0}}, gpu};
#ifdef RASTER_N
    arguments.scheduler.raster_order = cutlass::gemm::kernel::detail::RasterOrderOptions::AlongN;
#endif
#ifdef SWIZZLE
    arguments.scheduler.max_swizzle_size = SWIZZLE;
#endif
    Gemm gemm;
    void *workspace = nullptr;
    if (size_t size = Gemm::get_workspace_size(arguments)) cudaMalloc(&workspace, size);
    if (gemm.can_implement(arguments) != cutlass::Status::kSuccess) return 3;
    if (gemm.initialize(arguments, workspace) != cutlass::Status::kSuccess) return 4;
    if (gemm.run() != cutlass::Status::kSuccess) return 5;
    return int(cudaDeviceSynchronize());
}
