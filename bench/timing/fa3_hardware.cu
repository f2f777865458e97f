// FlashAttention-3's forward kernel as bench/gpu/fa3.cu calls it on a GPU, as a program for the emulated one.
// Arguments: sequences, heads, heads of keys, tokens, and 1 for causal. Built by timing/hardware_fa3.py.
#include <cmath>
#include <cstdlib>
#include <cuda_runtime.h>
#include "fa3.cu"

static void *bytes(size_t count)
{
    void *made;
    cudaMalloc(&made, count);
    return made;
}

int main(int argc, char **argv)
{
    if (argc < 6) return 2;
    int const batch = atoi(argv[1]), heads = atoi(argv[2]), keys = atoi(argv[3]), tokens = atoi(argv[4]);
    size_t const head = size_t(batch) * tokens * HEAD_DIM * 2;
    int const status = attend(bytes(heads * head), bytes(heads * head), bytes(keys * head), bytes(keys * head),
                              bytes(size_t(4) * batch * heads * tokens), bytes(4), batch, heads, keys, tokens,
                              atoi(argv[5]), 1 / sqrtf(HEAD_DIM), 132, nullptr);
    return status ? status : int(cudaDeviceSynchronize());
}
