/* mma.sync and mma.sp: a warp's matmul, operands and results in registers.
 *
 * Fragments, with g = lane / 4, q = lane % 4, E elements of a 32-bit register: element j of A's register r is
 * at row g + 8 * (r % (m / 8)), k = E * q + j + 4 * E * (r / (m / 8)); of B's register r at k = E * q + j + 4
 * * E * r, column g; C's register i at row g + 8 * (i / 2), column 2 * q + i % 2, two of them in a register
 * for f16.
 *
 * Op: more = m | n << 8 | k << 18; width, vector = elements of A and B; flags below; list = D, A, B, C,
 * metadata.
 */
#include "core.h"

enum { MMA_RESULT = 3, MMA_SATURATE = 4, MMA_XOR = 8, MMA_SPARSE = 16, MMA_SELECTOR_SHIFT = 5 };

static inline int mma_m(const Op *op) { return op->more & 0xff; }
static inline int mma_n(const Op *op) { return op->more >> 8 & 0x3ff; }
static inline int mma_k(const Op *op) { return op->more >> 18; }

/* Hopper's mma.sync has no 8-bit floats: ptxas unpacks them to f16 and makes two HMMAs, of the elements 0 and 1 of
 * each four, then of 2 and 3, which begin with zero; C is added to their sum by FADD or HADD2. (Sparse ones are
 * taken for two halves of k here.) */
static void unpack_eights(Dot *d) {
    int ld = dot_ld(d->n), half = d->k / 2;
    u32 a[DOT_ROWS][DOT_K], b[DOT_K][8];
    memcpy(a, dot_tile.raw_a, sizeof a);
    for (int k = 0; k < d->k; k++) memcpy(b[k], dot_tile.raw_b + k * ld, sizeof b[k]);
    for (int k = 0; k < d->k; k++) {
        int to = (k & 2 ? half : 0) + k / 4 * 2 + (k & 1);
        for (int i = 0; i < DOT_ROWS; i++)
            dot_tile.raw_a[i][to] = f32_to_f16(d->a == E4M3 ? e4m3_to_f32(a[i][k]) : e5m2_to_f32(a[i][k]));
        for (int j = 0; j < 8; j++)
            dot_tile.raw_b[to * ld + j] =
                f32_to_f16(d->b == E4M3 ? e4m3_to_f32(b[k][j]) : e5m2_to_f32(b[k][j]));
    }
    d->a = d->b = F16, d->step = half;
}

static void dot_eights(Dot *d) {
    u32 c[DOT_ROWS * 16];
    memcpy(c, d->c, sizeof c);
    memset(d->c, 0, sizeof c);
    unpack_eights(d);
    dot(d, false);
    for (int i = 0; i < DOT_ROWS * 16; i++) d->c[i] = canonical(as_f32(c[i]) + as_f32(d->c[i]));
}

/* The arithmetic of an architecture's mma.sync. */
static void mma_arithmetic(const Machine *m, Dot *d, bool sparse) {
    bool hopper = m->launch.arch >= 90, eight = d->a == E4M3 || d->a == E5M2;
    d->bits = hopper ? 25 : eight ? 13 : 24;
    d->keep = eight && !hopper ? 0xfffffc00 : ~0u;
    d->step = hopper && !eight ? d->k : (eight ? 16 : d->a == TF32 ? 4 : 8) << sparse;
    if (d->step > d->k) d->step = d->k;
    d->exact = m->launch.exact;
}

static inline u32 code_of(u32 word, int bits, int j) {
    return bits == 32 ? word : word >> (bits * j) & ((1u << bits) - 1);
}

/* A's registers to raw_a; `m` rows. Bits come as words. */
static void mma_load_a(const Warp *w, const i32 *places, int count, int element, int m) {
    int bits = element == B1 ? 32 : element_bits[element], per = 32 / bits, tall = m / 8;
    for (int r = 0; r < count; r++) {
        const u32 *words = r32(w, places[r]);
        EACH for (int j = 0; j < per; j++)
            dot_tile.raw_a[(l >> 2) + 8 * (r % tall)][per * (l & 3) + j + 4 * per * (r / tall)] =
                code_of(words[l], bits, j);
    }
}

static void mma_load_b(const Warp *w, const i32 *places, int count, int element) {
    int bits = element == B1 ? 32 : element_bits[element], per = 32 / bits, ld = dot_ld(8);
    for (int r = 0; r < count; r++) {
        const u32 *words = r32(w, places[r]);
        EACH for (int j = 0; j < per; j++)
            dot_tile.raw_b[(per * (l & 3) + j + 4 * per * r) * ld + (l >> 2)] = code_of(words[l], bits, j);
    }
}

/* Accumulator registers of 8-column fragments side by side, to or from a matrix with rows of `ldc` words. */
static void load_accumulators(const Warp *w, const i32 *places, int rows, int n, int result, u32 *c,
                              int ldc) {
    int tall = rows / 8, per = result == RESULT_F16 ? 1 : 2;
    for (int i = 0; i < n / 8 * tall * per; i++) {
        const u32 *words = r32(w, places[i]);
        int block = i / (tall * per), row = 8 * (i / per % tall);
        EACH {
            u32 *out = c + (row + (l >> 2)) * ldc + 8 * block + 2 * (l & 3);
            if (per == 2) out[i & 1] = words[l];
            else out[0] = as_u32(f16_to_f32(words[l] & 0xffff)), out[1] = as_u32(f16_to_f32(words[l] >> 16));
        }
    }
}

static void store_accumulators(Warp *w, const i32 *places, int rows, int n, int result, const u32 *c,
                               int ldc, u32 mask) {
    int tall = rows / 8, per = result == RESULT_F16 ? 1 : 2;
    for (int i = 0; i < n / 8 * tall * per; i++) {
        u32 words[LANES];
        int block = i / (tall * per), row = 8 * (i / per % tall);
        EACH {
            const u32 *in = c + (row + (l >> 2)) * ldc + 8 * block + 2 * (l & 3);
            if (per == 2) words[l] = in[i & 1];
            else words[l] = f32_to_f16(as_f32(in[0])) | f32_to_f16(as_f32(in[1])) << 16;
        }
        put32(w, places[i], words, mask);
    }
}

/* mma.sync.aligned, and mma.sp with its metadata: every type but f64. */
HANDLER(mma) {
    u32 c[DOT_ROWS * 16] __attribute__((aligned(64))) = {0};
    bool sparse = op->flags & MMA_SPARSE;
    Dot d = {.a = op->width, .b = op->vector, .result = (int)(op->flags & MMA_RESULT), .rows = mma_m(op),
             .n = mma_n(op),
             .k = mma_k(op), .saturate = op->flags & MMA_SATURATE, .c = c, .ldc = 16};
    m->launch.counters[op->source].flops += 2ull * (u64)d.rows * (u64)d.n * (u64)d.k;
    const i32 *places = m->launch.lists + op->list;
    int nd = d.rows * d.n / LANES / (d.result == RESULT_F16 ? 2 : 1), stored = sparse ? d.k / 2 : d.k;
    int na = d.rows * stored * element_bits[d.a] / 1024, nb = d.n * d.k * element_bits[d.b] / 1024;
    load_accumulators(w, places + nd + na + nb, d.rows, d.n, d.result, c, 16);
    if (m->launch.idle) {
        if (d.result != RESULT_S32) add_random_sums(w, d.rows, d.n, d.k, (f32 *)c, 16);
        store_accumulators(w, places, d.rows, d.n, d.result, c, 16, mask);
        return NEXT;
    }
    mma_load_a(w, places + nd, na, d.a, d.rows);
    mma_load_b(w, places + nd + na, nb, d.b);
    if (sparse) {
        u64 metadata[DOT_ROWS];
        sparse_metadata(d.a, d.k, r32(w, places[2 * nd + na + nb]), op->flags >> MMA_SELECTOR_SHIFT & 3,
                        metadata);
        sparse_expand(d.a, metadata, d.k);
    }
    mma_arithmetic(m, &d, sparse);
    if (d.a == B1) dot_bits(&d, op->flags & MMA_XOR);
    else if (m->launch.arch >= 90 && !sparse && !d.exact && (d.a == E4M3 || d.a == E5M2)) dot_eights(&d);
    else dot(&d, sparse);
    store_accumulators(w, places, d.rows, d.n, d.result, c, 16, mask);
    return NEXT;
}

/* mma.sync of f64: fused multiply-adds in the order of k. flags: the rounding. */
HANDLER(mma_f64) {
    int rows = mma_m(op), n = mma_n(op), k = mma_k(op), tall = rows / 8;
    const i32 *places = m->launch.lists + op->list;
    int nd = rows * n / LANES, na = rows * k / LANES, nb = n * k / LANES;
    f64 a[16][16], b[16][8], c[16][8];
    for (int r = 0; r < na; r++)
        EACH a[(l >> 2) + 8 * (r % tall)][(l & 3) + 4 * (r / tall)] = rf64(w, places[nd + r])[l];
    for (int r = 0; r < nb; r++) EACH b[(l & 3) + 4 * r][l >> 2] = rf64(w, places[nd + na + r])[l];
    for (int i = 0; i < nd; i++)
        EACH c[(l >> 2) + 8 * (i / 2)][2 * (l & 3) + i % 2] = rf64(w, places[nd + na + nb + i])[l];
    for (int i = 0; i < rows; i++)
        for (int x = 0; x < k; x++)
            for (int j = 0; j < n; j++)
                c[i][j] = op->flags == RN ? fma(a[i][x], b[x][j], c[i][j])
                    : directed_f64(F64_FMA, a[i][x], b[x][j], c[i][j], (int)op->flags);
    for (int i = 0; i < nd; i++) {
        u64 words[LANES];
        EACH words[l] = as_u64(c[(l >> 2) + 8 * (i / 2)][2 * (l & 3) + i % 2]);
        put64(w, places[i], words, mask);
    }
    m->launch.counters[op->source].flops += 2ull * (u64)rows * (u64)n * (u64)k;
    return NEXT;
}
