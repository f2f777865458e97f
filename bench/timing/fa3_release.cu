// FlashAttention-3's forward kernel as it was released (July 2024), for one head size (-DHEAD_DIM), from its
// sources: built by timing/fa3.py, whose headers take ATen's place. Arguments: tokens, and 1 for causal. As in
// its paper's tables 16384 tokens in all, 2048 columns, float16.
#include <cmath>
#include <cstdlib>
#include <cuda_runtime.h>
#include "flash_fwd_launch_template.h"

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    int const tokens = atoi(argv[1]), causal = atoi(argv[2]), heads = 2048 / HEAD_DIM, all = 16384;
    size_t const size = size_t(all) * 2048 * 2;
    void *q, *k, *v, *o, *lse, *semaphore;
    cudaMalloc(&q, size), cudaMalloc(&k, size), cudaMalloc(&v, size), cudaMalloc(&o, size);
    cudaMalloc(&lse, size_t(4) * all * heads), cudaMalloc(&semaphore, 4);
    cudaMemset(semaphore, 0, 4);
    Flash_fwd_params p = {};
    p.q_ptr = q, p.k_ptr = k, p.v_ptr = v, p.o_ptr = o, p.softmax_lse_ptr = lse;
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = 2048;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = HEAD_DIM;
    p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.o_batch_stride = int64_t(tokens) * 2048;
    p.b = all / tokens, p.h = p.h_k = heads, p.h_h_k_ratio = 1, p.d = p.d_rounded = HEAD_DIM;
    p.seqlen_q = p.seqlen_k = tokens;
    p.seqlen_q_rounded = p.seqlen_k_rounded = (tokens + 127) / 128 * 128;
    p.scale_softmax = 1 / sqrtf(HEAD_DIM), p.scale_softmax_log2 = p.scale_softmax * 1.4426950408889634f;
    p.p_dropout = p.rp_dropout = 1, p.is_causal = causal;
    p.window_size_left = -1, p.window_size_right = causal ? 0 : -1;
    p.tile_count_semaphore = static_cast<int *>(semaphore);
#if HEAD_DIM == 64
    run_mha_fwd_hdim64<cutlass::half_t>(p, 0);
#elif HEAD_DIM == 128
    run_mha_fwd_hdim128<cutlass::half_t>(p, 0);
#else
    run_mha_fwd_hdim256<cutlass::half_t>(p, 0);
#endif
    return int(cudaDeviceSynchronize());
}
