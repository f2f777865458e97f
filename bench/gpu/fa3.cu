// FlashAttention-3's forward kernel for one head size (-DHEAD_DIM), called without torch: built by fa3.py from
// its sources. Heads are dense: [batch, heads, tokens, d].
#include "flash_fwd_launch_template.h"

// 0, or CUDA's error. `semaphore` is 4 bytes for the tile scheduler, zeroed in the stream before each launch, as
// its own interface does; `lse` is float32 [batch, heads, tokens].
extern "C" int attend(void *out, void *q, void *k, void *v, void *lse, void *semaphore, int batch, int heads,
                      int kv_heads, int tokens, int causal, float scale, int sm_count, void *stream)
{
    Flash_fwd_params p = {};
    int64_t const head = int64_t(tokens) * HEAD_DIM;
    p.q_ptr = q, p.k_ptr = k, p.v_ptr = v, p.o_ptr = out, p.softmax_lse_ptr = lse;
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = HEAD_DIM;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = head;
    p.q_batch_stride = p.o_batch_stride = heads * head;
    p.k_batch_stride = p.v_batch_stride = kv_heads * head;
    p.v_dim_stride = 1;
    p.b = p.b_k = batch, p.h = heads, p.h_k = kv_heads;
    p.seqlen_q = p.seqlen_k = tokens;
    p.seqlen_q_rounded = p.seqlen_k_rounded = (tokens + 127) / 128 * 128;
    p.total_q = p.total_k = batch * tokens;
    p.d = p.dv = p.d_rounded = p.dv_rounded = HEAD_DIM;
    p.scale_softmax = scale;
    p.p_dropout = p.rp_dropout = 1.f, p.p_dropout_in_uint8_t = 255;
    p.is_bf16 = true, p.is_causal = causal;
    p.window_size_left = tokens - 1, p.window_size_right = causal ? 0 : tokens - 1;
    p.num_splits = 1;
    p.tile_count_semaphore = static_cast<int *>(semaphore);
    p.head_swizzle = causal, p.varlen_sort_batches = true;
    p.arch = 90, p.num_sm = sm_count;
    cudaMemsetAsync(semaphore, 0, 4, cudaStream_t(stream));
    run_mha_fwd_<90, cutlass::bfloat16_t, HEAD_DIM, HEAD_DIM, false, false, false, false>(p, cudaStream_t(stream));
    return int(cudaGetLastError());
}
