// Control flow, local memory, constants and double precision. nvcc -ptx -arch=sm_80
#include <cstdint>

__constant__ float weights[16] = {1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, -5, -6, -7, 9};
__device__ int calls = 5;

extern "C" __global__ void vector_add(const float *x, const float *y, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}

// Each thread walks the Collatz sequence from its own number: loops of different lengths in a warp.
extern "C" __global__ void collatz(const unsigned *start, int *steps, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long v = start[i];
    int count = 0;
    while (v != 1) {
        if (v & 1) v = 3 * v + 1;
        else v >>= 1;
        if (++count == 200) break;
    }
    steps[i] = count;
}

extern "C" __global__ void dispatch(const int *op, const int *x, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i], r = 0;
    switch (op[i]) {
    case 0: r = v + 1; break;
    case 1: r = v * v; break;
    case 2: r = v / 7; break;
    case 3: r = v % 7;  // falls through
    case 4: r += 100; break;
    case 5:
        for (int j = 0; j < (v & 15); j++) {
            if (j == 3) continue;
            r += j * v;
        }
        break;
    case 6: r = __clz(v) + __popc(v) * 100 + __ffs(v) * 10000; break;
    case 7: r = (int)__brev((unsigned)v) ^ __byte_perm(v, ~v, 0x2541); break;
    default: return;
    }
    out[i] = r;
}

// A local array indexed by data: local memory.
extern "C" __global__ void sort_locally(const int *x, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int a[16];
    for (int j = 0; j < 16; j++) a[j] = x[i * 16 + j];
    for (int j = 1; j < 16; j++) {
        int v = a[j], k = j;
        for (; k > 0 && a[k - 1] > v; k--) a[k] = a[k - 1];
        a[k] = v;
    }
    for (int j = 0; j < 16; j++) out[i * 16 + j] = a[j];
}

extern "C" __global__ void doubles(const double *x, const double *y, double *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = x[i] / y[i];
    out[n + i] = sqrt(fabs(x[i]));
    out[2 * n + i] = fma(x[i], y[i], 1.0);
    out[3 * n + i] = floor(x[i]) + rint(y[i]) + trunc(x[i] * 3) + ceil(y[i] * 5);
    out[4 * n + i] = (double)(float)x[i] + (double)(long long)(y[i] * 1e12)
        + (double)(unsigned)(fabs(y[i]) * 1e3);
    out[5 * n + i] = fmin(x[i], y[i]) * fmax(x[i], y[i]);
    out[6 * n + i] = exp(x[i]);
}

extern "C" __global__ void floats(const float *x, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    out[i] = expf(v);
    out[n + i] = logf(fabsf(v) + 0.1f);
    out[2 * n + i] = sinf(v * 10);
    out[3 * n + i] = __fdividef(v, 3.0f) + __expf(v) + __sinf(v);
    out[4 * n + i] = powf(fabsf(v) + 0.5f, 2.5f);
    out[5 * n + i] = rsqrtf(fabsf(v) + 1) + tanhf(v);
    out[6 * n + i] = __fadd_rz(v, 1e-3f) + __fmul_ru(v, 1.0001f) + __fdiv_rd(v, 7.0f) + __fsqrt_rn(fabsf(v));
}

// 64-bit arithmetic, carries, and narrow loads.
extern "C" __global__ void wide(const int64_t *x, const int64_t *y, int64_t *out, const int8_t *small,
                                const uint16_t *medium, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned __int128 p = (unsigned __int128)(uint64_t)x[i] * (uint64_t)y[i];
    out[i] = x[i] / y[i];
    out[n + i] = x[i] % y[i];
    out[2 * n + i] = (int64_t)(p >> 64);
    out[3 * n + i] = (int64_t)p + __mul64hi(x[i], y[i]);
    out[4 * n + i] = (x[i] << (y[i] & 63)) ^ (x[i] >> 7) ^ (int64_t)((uint64_t)x[i] >> 9);
    out[5 * n + i] = small[i] * (int)medium[i] + (int8_t)(small[i] * 3) + (uint16_t)(medium[i] + 60000);
    out[6 * n + i] = x[i] > y[i] ? __popcll(x[i]) : __clzll(y[i]);
}

extern "C" __global__ void constants(const float *x, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = weights[i & 15];
    for (int j = 0; j < 16; j++) sum += weights[j] * x[(i + j) % n];
    out[i] = sum + calls;
}

struct Pair { float4 a; short2 b; char c[4]; double d; };

extern "C" __global__ void aggregate(const Pair *in, Pair *out, Pair add, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Pair p = in[i];
    p.a.x += add.a.x; p.a.y *= add.a.y; p.a.z -= add.a.z; p.a.w = add.a.w;
    p.b.x += add.b.x; p.b.y ^= add.b.y;
    p.c[i & 3] = add.c[(i + 1) & 3];
    p.d += add.d;
    out[i] = p;
}
