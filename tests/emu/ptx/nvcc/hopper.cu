// Clusters, distributed shared memory, TMA, mbarriers and wgmma. nvcc -ptx -arch=sm_90a
#include <cstdint>
#include <cuda_bf16.h>

__device__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void init(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ void expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void wait(uint64_t *barrier, int parity) {
    asm volatile("{\n\t.reg .pred done;\nagain:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}"
                 ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Each CTA of a cluster of 4 reads its neighbour's shared memory.
extern "C" __global__ void __cluster_dims__(4, 1, 1) neighbour(const int *x, int *out) {
    __shared__ int mine[64];
    int t = threadIdx.x;
    unsigned rank, remote;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    mine[t] = x[blockIdx.x * 64 + t];
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(remote) : "r"(shared_address(&mine[63 - t])), "r"((rank + 1) % 4));
    int v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(remote) : "memory");
    out[blockIdx.x * 64 + t] = v;
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// Bulk copies in and out with a ring of two stages.
extern "C" __global__ void bulk(const int *x, int *out, int blocks) {
    __shared__ __align__(128) int in[2][256];
    __shared__ __align__(128) int done[256];
    __shared__ uint64_t full[2];
    int t = threadIdx.x;
    auto fetch = [&](int i) {
        expect(&full[i & 1], 1024);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], 1024, [%2];" ::"r"(shared_address(in[i & 1])), "l"(x + i * 256),
                     "r"(shared_address(&full[i & 1])) : "memory");
    };
    if (t == 0) {
        init(&full[0], 1);
        init(&full[1], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (t == 0) fetch(0);
    for (int i = 0; i < blocks; i++) {
        if (t == 0 && i + 1 < blocks) fetch(i + 1);
        wait(&full[i & 1], i >> 1 & 1);
        int v = in[i & 1][t] * 2 + i;
        if (t == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncthreads();
        done[t] = v;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (t == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;\n\t"
                         "cp.async.bulk.commit_group;"
                         ::"l"(out + i * 256), "r"(shared_address(done)) : "memory");
        }
    }
    if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

struct __align__(64) Map { char bytes[128]; };

__device__ void fetch(const Map *map, void *tile, int column, uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, 0}], [%3];"
        ::"r"(shared_address(tile)), "l"(map), "r"(column), "r"(shared_address(barrier)) : "memory");
}

__device__ uint64_t descriptor(const void *tile) {
    return (uint64_t)((shared_address(tile) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// One wgmma of 64 x 64 x 16, tiles K-major in shared memory.
__device__ void multiply(float (&d)[32], uint64_t x, uint64_t y) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(x), "l"(y) : "memory");
}

// C[64, 64] = A[64, k] @ B[64, k]^T: a producer warp, a consumer warpgroup, four stages, 128-byte swizzle.
extern "C" __global__ void __launch_bounds__(160) gemm(const __grid_constant__ Map a,
                                                       const __grid_constant__ Map b, float *c, int k) {
    extern __shared__ __align__(1024) unsigned char tiles[];  // 4 x (A, B) x 8192 bytes
    __shared__ uint64_t full[4], empty[4];
    int t = threadIdx.x, warp = t / 32, lane = t % 32;
    if (t == 0) {
        for (int i = 0; i < 4; i++) {
            init(&full[i], 1);
            init(&empty[i], 128);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == 4) {
        if (lane == 0) {
            for (int i = 0; i < k / 64; i++) {
                int stage = i % 4;
                wait(&empty[stage], i / 4 & 1 ^ 1);
                expect(&full[stage], 16384);
                fetch(&a, tiles + stage * 16384, i * 64, &full[stage]);
                fetch(&b, tiles + stage * 16384 + 8192, i * 64, &full[stage]);
            }
        }
        return;
    }
    float d[32] = {};
    for (int i = 0; i < k / 64; i++) {
        int stage = i % 4;
        wait(&full[stage], i / 4 & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int kk = 0; kk < 4; kk++)
            multiply(d, descriptor(tiles + stage * 16384) + 2 * kk,
                     descriptor(tiles + stage * 16384 + 8192) + 2 * kk);
        asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
        arrive(&empty[stage]);
    }
    for (int i = 0; i < 32; i++)
        c[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
