// Shared memory, barriers, shuffles, votes and atomics. nvcc -ptx -arch=sm_80
#define FULL 0xffffffffu

template <int T> __device__ void matmul(const float *a, const float *b, float *c, int n) {
    __shared__ float left[T][T], right[T][T + 1];
    int x = threadIdx.x, y = threadIdx.y;
    int row = blockIdx.y * T + y, column = blockIdx.x * T + x;
    float sum = 0;
    for (int k = 0; k < n; k += T) {
        left[y][x] = row < n && k + x < n ? a[row * n + k + x] : 0;
        right[y][x] = k + y < n && column < n ? b[(k + y) * n + column] : 0;
        __syncthreads();
        for (int i = 0; i < T; i++) sum += left[y][i] * right[i][x];
        __syncthreads();
    }
    if (row < n && column < n) c[row * n + column] = sum;
}

extern "C" __global__ void matmul16(const float *a, const float *b, float *c, int n) {
    matmul<16>(a, b, c, n);
}

extern "C" __global__ void transpose(const int *in, int *out, int rows, int columns) {
    __shared__ int tile[32][33];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < columns && y + j < rows) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * columns + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < rows && y + j < columns) out[(y + j) * rows + x] = tile[threadIdx.x][threadIdx.y + j];
}

// Sum of a block: shuffles in each warp, then the first warp over the partial sums.
extern "C" __global__ void reduce(const int *x, int *out, int n) {
    __shared__ int partial[32];
    int sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
    for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(FULL, sum, d);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(FULL, sum, d);
        if (threadIdx.x == 0) atomicAdd(out, sum);
    }
}

// Inclusive scan of a block in dynamic shared memory, two buffers (Hillis and Steele).
extern "C" __global__ void scan(const int *x, int *out) {
    extern __shared__ int buffer[];
    int t = threadIdx.x, n = blockDim.x, from = 0;
    buffer[t] = x[blockIdx.x * n + t];
    __syncthreads();
    for (int d = 1; d < n; d *= 2) {
        int to = 1 - from;
        buffer[to * n + t] = buffer[from * n + t] + (t >= d ? buffer[from * n + t - d] : 0);
        from = to;
        __syncthreads();
    }
    out[blockIdx.x * n + t] = buffer[from * n + t];
}

extern "C" __global__ void histogram(const unsigned char *x, int *out, int n) {
    __shared__ int bins[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[x[i]], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (bins[i]) atomicAdd(&out[i], bins[i]);
}

// The warp's lanes that hold an even number pack them together.
extern "C" __global__ void compact(const int *x, int *out, int *count) {
    __shared__ int base;
    int v = x[blockIdx.x * 32 + threadIdx.x];
    unsigned even = __ballot_sync(FULL, (v & 1) == 0);
    if (threadIdx.x == 0) base = atomicAdd(count, __popc(even));
    __syncwarp();
    unsigned below;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
    if ((v & 1) == 0) out[base + __popc(even & below)] = v;
}

extern "C" __global__ void votes(const int *x, int *out) {
    int t = threadIdx.x, v = x[t];
    out[t] = __any_sync(FULL, v > 5) + 2 * __all_sync(FULL, v > -9);
    out[blockDim.x + t] = __match_any_sync(FULL, v & 3);
    out[2 * blockDim.x + t] = __reduce_add_sync(FULL, v) + __reduce_max_sync(FULL, v) * 1000;
    out[3 * blockDim.x + t] = __shfl_sync(FULL, v, t * 5 % 8, 8) + 100 * __shfl_up_sync(FULL, v, 3, 16);
    if (t % 32 < 11) out[4 * blockDim.x + t] = __shfl_xor_sync(0x7ff, v, 0) + __popc(__activemask());
    out[5 * blockDim.x + t] = __syncthreads_count(v > 0) * 100 + __syncthreads_or(v == 7) * 10
        + __syncthreads_and(v > -100);
}

// Every kind of atomic; the last block to finish adds what the others left.
extern "C" __global__ void last_block(const float *x, float *partial, float *out, unsigned *done) {
    __shared__ float sums[128];
    __shared__ bool last;
    int t = threadIdx.x;
    sums[t] = x[blockIdx.x * 128 + t];
    for (int d = 64; d; d >>= 1) {
        __syncthreads();
        if (t < d) sums[t] += sums[t + d];
    }
    if (t == 0) {
        partial[blockIdx.x] = sums[0];
        __threadfence();
        last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && t == 0) {
        __threadfence();
        float sum = 0;
        for (int i = 0; i < gridDim.x; i++) sum += ((volatile float *)partial)[i];
        *out = sum;
    }
}

extern "C" __global__ void atomics(const int *x, int *cells, unsigned long long *wide, float *real,
                                   double *exact) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i], c = i % 4;
    atomicAdd(&cells[c], v);
    atomicSub(&cells[4 + c], v);
    atomicMin(&cells[8 + c], v);
    atomicMax(&cells[12 + c], v);
    atomicAnd(&cells[16 + c], v);
    atomicOr(&cells[20 + c], v);
    atomicXor(&cells[24 + c], v);
    atomicInc((unsigned *)&cells[28 + c], 40);
    atomicDec((unsigned *)&cells[32 + c], 40);
    atomicAdd(&wide[c], (unsigned long long)v);
    atomicMax(&wide[4 + c], (unsigned long long)(unsigned)v);
    atomicAdd(&real[c], (float)v);
    atomicAdd(&exact[c], (double)v);
    // a maximum by compare and swap
    float old = *(volatile float *)&real[4 + c], seen;
    do {
        seen = old;
        if (seen >= (float)v) break;
        old = __int_as_float(atomicCAS((int *)&real[4 + c], __float_as_int(seen), __float_as_int((float)v)));
    } while (old != seen);
}
