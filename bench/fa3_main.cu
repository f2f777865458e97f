// A host program for fa3.cu's library: one launch of the forward kernel on random numbers, by its own times.
//
//     nvcc -o fa3_main fa3_main.cu -ldl
//     tinygrad-nv ptx run --time ./fa3_main fa3_128.so 128 BATCH HEADS KV_HEADS TOKENS CAUSAL
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <vector>
#include <cuda_runtime.h>

typedef int Attend(void *, void *, void *, void *, void *, void *, int, int, int, int, int, float, int, void *);

static uint16_t bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits >> 16;
}

int main(int argc, char **argv) {
    if (argc != 8) return puts("LIBRARY HEAD BATCH HEADS KV_HEADS TOKENS CAUSAL"), 2;
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) return puts(dlerror()), 2;
    auto attend = (Attend *)dlsym(library, "attend");
    int const head = atoi(argv[2]), batch = atoi(argv[3]), heads = atoi(argv[4]), kv_heads = atoi(argv[5]),
              tokens = atoi(argv[6]), causal = atoi(argv[7]);
    size_t const elements = size_t(batch) * heads * tokens * head, kv = elements / heads * kv_heads;
    std::vector<uint16_t> values(elements);
    for (auto &value : values) value = bf16(rand() / float(RAND_MAX) * 2 - 1);
    void *q, *k, *v, *out, *lse, *semaphore;
    for (void **each : {&q, &out}) cudaMalloc(each, elements * 2);
    for (void **each : {&k, &v}) cudaMalloc(each, kv * 2);
    cudaMalloc(&lse, elements / head * 4), cudaMalloc(&semaphore, 16);
    cudaMemcpy(q, values.data(), elements * 2, cudaMemcpyHostToDevice);
    for (void *each : {k, v}) cudaMemcpy(each, values.data(), kv * 2, cudaMemcpyHostToDevice);
    int sms;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    cudaEventRecord(begin);
    int status = attend(out, q, k, v, lse, semaphore, batch, heads, kv_heads, tokens, causal, 1 / sqrtf(head), sms,
                        nullptr);
    cudaEventRecord(end);
    cudaError_t const error = cudaDeviceSynchronize();
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    double const flops = 4. * batch * heads * tokens * double(tokens) * head / (causal ? 2 : 1);
    printf("%s, %.3f ms, %.1f TFLOP/s\n", cudaGetErrorString(error), ms, flops / ms / 1e9);
    return status;
}
