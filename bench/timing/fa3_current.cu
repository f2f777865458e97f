// FlashAttention-3's kernels as they are now, for one head size (-DHEAD_DIM), from its sources (hopper/): the
// backward pass of float16 (-DBACKWARD), or the forward pass of e4m3. Built by timing/rows_attention.py.
// Arguments: tokens, and 1 for causal. As in its paper's tables 16384 tokens in all, 2048 columns.
#include <cmath>
#include <cstdlib>
#include <cuda_runtime.h>
#include "static_switch.h"
// of what is not asked for (query heads that share keys, a deterministic sum) nothing is compiled
#undef BOOL_SWITCH
#define BOOL_SWITCH(CONDITION, NAME, ...) \
    [&] { static constexpr bool NAME = false; return __VA_ARGS__(); }()
#ifdef BACKWARD
#include "flash_bwd_launch_template.h"
#else
#include "flash_fwd_launch_template.h"
#endif

static void *floats(size_t count)
{
    void *made;
    cudaMalloc(&made, 4 * count);
    return made;
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    int const tokens = atoi(argv[1]), causal = atoi(argv[2]), heads = 2048 / HEAD_DIM, all = 16384;
    size_t const size = size_t(all) * 2048;
    Flash_bwd_params p = {};
    void *__restrict__ *arrays[] = {&p.q_ptr, &p.k_ptr, &p.v_ptr, &p.o_ptr, &p.do_ptr, &p.dq_ptr, &p.dk_ptr,
                                    &p.dv_ptr};
    for (auto each : arrays) *each = floats(size / 2);
    p.softmax_lse_ptr = floats(size_t(all) * heads), p.softmax_lse_log2_ptr = floats(size_t(all) * heads);
    p.dsoftmax_sum = floats(size_t(all) * heads), p.dq_accum_ptr = floats(size);
    p.tile_count_semaphore = static_cast<int *>(floats(1));
    cudaMemset(p.tile_count_semaphore, 0, 4);
    int64_t *rows[] = {&p.q_row_stride, &p.k_row_stride, &p.v_row_stride, &p.o_row_stride, &p.do_row_stride,
                       &p.dq_row_stride, &p.dk_row_stride, &p.dv_row_stride};
    for (auto each : rows) *each = 2048;
    int64_t *heads_of[] = {&p.q_head_stride, &p.k_head_stride, &p.v_head_stride, &p.o_head_stride,
                           &p.do_head_stride, &p.dq_head_stride, &p.dk_head_stride, &p.dv_head_stride};
    for (auto each : heads_of) *each = HEAD_DIM;
    int64_t *batches[] = {&p.q_batch_stride, &p.k_batch_stride, &p.v_batch_stride, &p.o_batch_stride,
                          &p.do_batch_stride, &p.dq_batch_stride, &p.dk_batch_stride, &p.dv_batch_stride};
    for (auto each : batches) *each = int64_t(tokens) * 2048;
    p.v_dim_stride = 1;
    p.b = p.b_k = all / tokens, p.h = p.h_k = heads;
    p.d = p.dv = p.d_rounded = p.dv_rounded = HEAD_DIM;
    p.seqlen_q = p.seqlen_k = tokens, p.total_q = p.total_k = all;
    p.seqlen_q_rounded = p.seqlen_k_rounded = (tokens + 127) / 128 * 128;
    p.scale_softmax = 1 / sqrtf(HEAD_DIM);
    p.p_dropout = p.rp_dropout = 1, p.p_dropout_in_uint8_t = 255;
    p.is_causal = causal, p.num_splits = 1, p.head_swizzle = causal;
    p.window_size_left = tokens - 1, p.window_size_right = causal ? 0 : tokens - 1;
    p.arch = 90, p.num_sm = 132;
#ifndef BACKWARD
    p.is_e4m3 = true;
    run_mha_fwd_<90, cutlass::float_e4m3_t, HEAD_DIM, HEAD_DIM, false, false, false, false>(p, 0);
#elif HEAD_DIM == 64
    run_mha_bwd_hdim64<90, cutlass::half_t, false>(p, 0);
#elif HEAD_DIM == 128
    run_mha_bwd_hdim128<90, cutlass::half_t, false>(p, 0);
#else
    run_mha_bwd_hdim256<90, cutlass::half_t, false>(p, 0);
#endif
    return int(cudaDeviceSynchronize());
}
