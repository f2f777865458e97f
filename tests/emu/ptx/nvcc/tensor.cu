// Halves, wmma, cp.async, ldmatrix and mma. nvcc -ptx -arch=sm_80
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

extern "C" __global__ void halves(const __half2 *x, const __half2 *y, __half2 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = __hfma2(x[i], y[i], __float2half2_rn(0.5f));
    out[n + i] = __hadd2(__hmul2(x[i], y[i]), __hsub2(x[i], y[i]));
    out[2 * n + i] = __hmax2(__habs2(x[i]), __hneg2(y[i]));
    out[3 * n + i] = __floats2half2_rn(__low2float(x[i]) * 3, __high2float(y[i]) * 3);
    out[4 * n + i] = __hgt2(x[i], y[i]);
}

extern "C" __global__ void brains(const __nv_bfloat162 *x, const __nv_bfloat162 *y, __nv_bfloat162 *out,
                                  int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = __hfma2(x[i], y[i], x[i]);
    out[n + i] = __hadd2(x[i], y[i]);
    out[2 * n + i] = __hmul2(x[i], y[i]);
    out[3 * n + i] = __hmin2(x[i], y[i]);
}

extern "C" __global__ void wmma(const __half *a, const __half *b, float *c, int n) {
    using namespace nvcuda::wmma;
    fragment<matrix_a, 16, 16, 16, __half, row_major> left;
    fragment<matrix_b, 16, 16, 16, __half, col_major> right;
    fragment<accumulator, 16, 16, 16, float> sum;
    fill_fragment(sum, 0.0f);
    int row = blockIdx.y * 16, column = blockIdx.x * 16;
    for (int k = 0; k < n; k += 16) {
        load_matrix_sync(left, a + row * n + k, n);
        load_matrix_sync(right, b + column * n + k, n);
        mma_sync(sum, left, right, sum);
    }
    store_matrix_sync(c + row * n + column, sum, n, mem_row_major);
}

__device__ void copy16(unsigned to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// C[64, 64] = A[64, k] @ B[64, k]^T: two stages of cp.async, ldmatrix, mma.m16n8k16; four warps of 16 rows.
extern "C" __global__ void __launch_bounds__(128) pipeline(const __nv_bfloat16 *a, const __nv_bfloat16 *b,
                                                           float *c, int k) {
    __shared__ __align__(128) __nv_bfloat16 tile[2][2][64][40];  // rows padded to 80 bytes
    int t = threadIdx.x, warp = t / 32, lane = t % 32;
    float sum[8][4] = {};
    auto load = [&](int stage, int from) {
        for (int i = t; i < 256; i += 128) {
            int row = i / 4, part = i % 4 * 8;
            copy16((unsigned)__cvta_generic_to_shared(&tile[stage][0][row][part]), a + row * k + from + part);
            copy16((unsigned)__cvta_generic_to_shared(&tile[stage][1][row][part]), b + row * k + from + part);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    load(0, 0);
    for (int step = 0, stage = 0; step < k; step += 32, stage ^= 1) {
        if (step + 32 < k) {
            load(stage ^ 1, step + 32);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        for (int kk = 0; kk < 32; kk += 16) {
            unsigned x[4], y[2];
            unsigned at = (unsigned)__cvta_generic_to_shared(
                &tile[stage][0][warp * 16 + lane % 16][kk + lane / 16 * 8]);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
            for (int j = 0; j < 8; j++) {
                unsigned from = (unsigned)__cvta_generic_to_shared(
                    &tile[stage][1][j * 8 + lane % 8][kk + lane / 8 % 2 * 8]);
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                             : "=r"(y[0]), "=r"(y[1]) : "r"(from) : "memory");
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                             "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                             : "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
                             : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
            }
        }
        __syncthreads();
    }
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 4; i++)
            c[(warp * 16 + lane / 4 + i / 2 * 8) * 64 + j * 8 + lane % 4 * 2 + i % 2] = sum[j][i];
}
