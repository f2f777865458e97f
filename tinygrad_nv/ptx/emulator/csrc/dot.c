/* Arithmetic of tensor cores: D = A * B + C for up to 16 rows, on decoded operands.
 *
 * Protocol: the caller fills the codes of `dot_tile` (raw_a, raw_b), describes the product in a `Dot` and
 * calls `dot`, which works on C in place. Everything is vector code over 16 columns.
 *
 * Floating point, after MMA-Sim (arXiv 2511.10909). A step takes C and the products of up to `step`
 * elements; a product's exponent is the sum of its factors' (not renormalised; subnormals have the least
 * exponent of their type, C's zero -126, and a product of zero none). All terms are aligned to the largest
 * exponent and truncated toward
 * zero after `bits` fractional bits, summed exactly, and the sum is rounded: to f32 toward zero (8-bit
 * floats on Hopper's wgmma and on Ada: to 13 bits of mantissa), to f16 to nearest even. NaN and infinity
 * follow from the sum in the ordinary way; NaN is 0x7fffffff. With Launch.exact the products, which are
 * exact, are summed in f64, and that is rounded once, to nearest even. Integers are exact; sums wrap, or
 * saturate with .satfinite.
 */
#include "core.h"
#include "formats.h"

enum { F16, BF16, TF32, E4M3, E5M2, S8, U8, S4, U4, B1 };  /* elements; ptx/emulator/lower_tensor.py has the same order */
enum { RESULT_F32, RESULT_F16, RESULT_S32 };
enum { DOT_ROWS = 16, DOT_K = 128, DOT_N = 256, DOT_LD = DOT_N + 16 };
enum { ZERO_EXPONENT = -400, ABSENT = -1000, LEAST = -100, LEAST_F32 = -126 };

static const u8 element_bits[] = {16, 16, 32, 8, 8, 8, 8, 4, 4, 1};

typedef f32 VF __attribute__((vector_size(64)));
typedef i32 VI __attribute__((vector_size(64)));
typedef f64 VD __attribute__((vector_size(128)));

/* A product. `c` has rows of `ldc` words, a multiple of 16: f32 (also for f16 results) or s32. */
typedef struct {
    int a, b, result;      /* elements, RESULT_* */
    int rows, n, k;
    int step, bits;
    u32 keep;              /* bits of an f32 result that are kept */
    bool exact, saturate, negate_a, negate_b;
    u32 *c;
    int ldc;
} Dot;

/* Operands: codes, then values and exponents. raw_b and b have rows of `ld` words. `absent` marks what
 * sparsity left out. */
static struct {
    u32 raw_a[DOT_ROWS][DOT_K], raw_b[DOT_K * DOT_LD];
    u8 absent[DOT_ROWS][DOT_K];
    f32 a[DOT_ROWS][DOT_K], b[DOT_K * DOT_LD];
    i32 ea[DOT_ROWS][DOT_K], eb[DOT_K * DOT_LD];
} dot_tile __attribute__((aligned(64)));

/* Words from one row of raw_b to the next: whole vectors, and not a multiple of 4 KiB for any shape. */
static inline int dot_ld(int n) { return (n + 15) / 16 * 16 + 16; }

/* **** codes to values **** */

#define DECODE(element, expression, least) case element: \
    for (int i = 0; i < count; i++) { \
        u32 x = raw[i]; \
        f32 v = expression; \
        i32 e = (i32)(as_u32(v) >> 23 & 0xff) - 127; \
        e = e < (least) ? (least) : e; \
        value[i] = as_f32(as_u32(v) ^ sign); \
        exponent[i] = as_u32(v) << 1 ? e : ZERO_EXPONENT; \
    } break
#define DECODE_INTEGER(element, expression) case element: \
    for (int i = 0; i < count; i++) { u32 x = raw[i]; value[i] = (f32)(expression); } break

/* Values, and for floating point the exponents that alignment goes by. */
static void decode(int element, bool negate, const u32 *raw, f32 *value, i32 *exponent, int count) {
    u32 sign = negate ? 0x80000000 : 0;
    switch (element) {
    DECODE(F16, f16_to_f32(x), -14);
    DECODE(BF16, bf16_to_f32(x), -126);
    DECODE(TF32, tf32_to_f32(x), -126);
    DECODE(E4M3, e4m3_to_f32(x), -6);
    DECODE(E5M2, e5m2_to_f32(x), -14);
    DECODE_INTEGER(S8, (i8)x);
    DECODE_INTEGER(U8, (u8)x);
    DECODE_INTEGER(S4, (i32)(x << 28) >> 28);
    DECODE_INTEGER(U4, (i32)(x & 15));
    }
}

/* Largest and least exponents of what is not zero; 128 stands for NaN and infinity. */
static void exponent_range(const f32 *value, const i32 *exponent, int count, i32 *least, i32 *most) {
    i32 low = 1000, high = -1000;
    for (int i = 0; i < count; i++) {
        i32 e = exponent[i], or_zero = value[i] == 0 ? 1000 : e;
        low = or_zero < low ? or_zero : low;
        high = e > high ? e : high;
    }
    *least = low < *least ? low : *least;
    *most = high > *most ? high : *most;
}

/* **** sums to results **** */

/* Toward zero, but to infinity from 2^128 up. */
static inline f32 to_f32_rz(f64 x) {
    f32 y = (f32)x;
    u32 larger = (fabs((f64)y) > fabs(x)) & (fabs(x) < 0x1p128);
    return as_f32(as_u32(y) - larger);
}

/* 16 sums become results in c. */
static inline void finish(const Dot *d, const f64 *x, f32 *c) {
    if (d->result == RESULT_F16) for (int i = 0; i < 16; i++) c[i] = f16_to_f32(f64_to_f16(x[i], RN));
    else if (d->exact) for (int i = 0; i < 16; i++) c[i] = (f32)x[i];
    else for (int i = 0; i < 16; i++) c[i] = as_f32(as_u32(to_f32_rz(x[i])) & d->keep);
}

static inline VI larger_of(VI a, VI b) {
    VI m = a > b;
    return (a & m) | (b & ~m);
}

/* The exponent of subnormal sums. */
static inline i32 least_of(const Dot *d) { return d->result == RESULT_F16 ? -14 : LEAST_F32; }

/* One step for 16 columns of a row, where all factors' exponents allow f32: products are exact (22 bits at
 * most), aligned ones fit 28 bits, so two sums of half the products each fit an i32. Below 2^-100 there is
 * only C, which then is the result. */
static inline void step_fast(const Dot *d, const f32 *a, const i32 *ea, const f32 *b, const i32 *eb, int ld,
                             int k, f32 *c) {
    VF cv = *(const VF *)c, scale;
    VI top = (VI)((((VI)cv) >> 23) & 0xff) - 127, sum[2] = {{0}, {0}};
    VI some = (VI)cv << 1 != 0;
    top = larger_of(top, (some & least_of(d)) | (~some & LEAST_F32));
    for (int i = 0; i < k; i++) top = larger_of(top, *(const VI *)(eb + i * ld) + ea[i]);
    VI tiny = top < LEAST;
    top = larger_of(top, top * 0 + LEAST);
    scale = (VF)((d->bits - top + 127) << 23);
    int half = k / 2;
    VI s = __builtin_convertvector(cv * scale, VI);
    for (int i = 0; i < half; i++)
        s += __builtin_convertvector(*(const VF *)(b + i * ld) * a[i] * scale, VI);
    sum[0] = s;
    s = top * 0;
    for (int i = half; i < k; i++)
        s += __builtin_convertvector(*(const VF *)(b + i * ld) * a[i] * scale, VI);
    sum[1] = s;
    VD x = __builtin_convertvector(sum[0], VD) + __builtin_convertvector(sum[1], VD);
    f64 out[16] __attribute__((aligned(64)));
    i32 exponent[16] __attribute__((aligned(64))), small[16] __attribute__((aligned(64)));
    memcpy(out, &x, sizeof out), memcpy(exponent, &top, sizeof exponent), memcpy(small, &tiny, sizeof small);
    for (int i = 0; i < 16; i++) {
        f64 value = out[i] * as_f64((u64)(exponent[i] - d->bits + 1023) << 52);
        out[i] = small[i] ? (f64)c[i] + 0.0 : value;  /* a zero has no sign */
    }
    finish(d, out, c);
}

/* An aligned term, below 2^40 unless NaN or infinity made it: no integer stands for those. */
static inline i64 aligned_term(f64 x) { return fabs(x) < 0x1p40 ? (i64)x : 0; }

/* The same in f64, for any exponents. Lanes with NaN or infinity come out as anything. */
static void step_wide(const Dot *d, const f32 *a, const i32 *ea, const f32 *b, const i32 *eb, int ld, int k,
                      f32 *c) {
    i32 top[16];
    i64 sum[16];
    f64 scale[16], out[16];
    for (int j = 0; j < 16; j++) {
        i32 e = (i32)(as_u32(c[j]) >> 23 & 0xff) - 127, least = as_u32(c[j]) << 1 ? least_of(d) : LEAST_F32;
        top[j] = e < least ? least : e;
    }
    for (int i = 0; i < k; i++)
        for (int j = 0; j < 16; j++) {
            i32 e = ea[i] + eb[i * ld + j];
            top[j] = e > top[j] ? e : top[j];
        }
    for (int j = 0; j < 16; j++) {
        scale[j] = as_f64((u64)(d->bits - top[j] + 1023) << 52);
        sum[j] = aligned_term((f64)c[j] * scale[j]);
    }
    for (int i = 0; i < k; i++)
        for (int j = 0; j < 16; j++) sum[j] += aligned_term((f64)b[i * ld + j] * (f64)a[i] * scale[j]);
    for (int j = 0; j < 16; j++) out[j] = (f64)sum[j] * as_f64((u64)(top[j] - d->bits + 1023) << 52);
    finish(d, out, c);
}

/* Sums in f64 for 16 columns of a row. */
static inline void plain_sums(const f32 *a, const f32 *b, int ld, int k, const f32 *c, f64 *out) {
    for (int j = 0; j < 16; j++) out[j] = (f64)c[j];
    for (int i = 0; i < k; i++)
        for (int j = 0; j < 16; j++) out[j] += (f64)b[i * ld + j] * (f64)a[i];
}

/* What sums in the ordinary way make NaN or infinite. */
static inline void not_finite(const f64 *plain, f32 *c) {
    for (int j = 0; j < 16; j++) {
        if (plain[j] != plain[j]) c[j] = as_f32(NAN_F32);
        else if (plain[j] - plain[j] != 0) c[j] = (f32)plain[j];
    }
}

/* A row's result in 16 columns. `special`: NaN or infinity may be among the operands, and decide where the
 * sum of a step is not finite. */
static void float_block(const Dot *d, const f32 *a, const i32 *ea, const f32 *b, const i32 *eb, int ld,
                        bool fast,
                        bool special, f32 *c) {
    f64 plain[16];
    if (d->exact) {
        plain_sums(a, b, ld, d->k, c, plain);
        finish(d, plain, c);
        if (special) not_finite(plain, c);
        return;
    }
    for (int k = 0; k < d->k; k += d->step) {
        f32 before[16];
        memcpy(before, c, sizeof before);
        if (k && fast) for (int j = 0; j < 16; j++) c[j] = before[j] - before[j] == 0 ? c[j] : 0;
        if (special) plain_sums(a + k, b + k * ld, ld, d->step, c, plain);
        if (fast) step_fast(d, a + k, ea + k, b + k * ld, eb + k * ld, ld, d->step, c);
        else step_wide(d, a + k, ea + k, b + k * ld, eb + k * ld, ld, d->step, c);
        /* once a step has overflowed, infinity it stays */
        if (k) for (int j = 0; j < 16; j++) c[j] = before[j] - before[j] == 0 ? c[j] : before[j];
        if (special) not_finite(plain, c);
    }
}

static void dot_float(const Dot *d, int ld) {
    i32 least_a = 1000, most_a = -1000, least_b = 1000, most_b = -1000;
    for (int i = 0; i < d->rows; i++) exponent_range(dot_tile.a[i], dot_tile.ea[i], d->k, &least_a, &most_a);
    exponent_range(dot_tile.b, dot_tile.eb, d->k * ld, &least_b, &most_b);
    u32 special = most_a > 127 || most_b > 127;
    for (int i = 0; i < d->rows; i++)
        for (int j = 0; j < d->n; j++) special |= (d->c[i * d->ldc + j] & 0x7f800000) == 0x7f800000;
    bool fast = !special && most_a + most_b <= 126 && least_a + least_b >= LEAST;
    for (int j = 0; j < d->n; j += 16)
        for (int i = 0; i < d->rows; i++)
            float_block(d, dot_tile.a[i], dot_tile.ea[i], dot_tile.b + j, dot_tile.eb + j, ld, fast, special,
                        (f32 *)(d->c + i * d->ldc + j));
}

/* **** integers **** */

static inline i32 clamped(i64 x) { return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (i32)x; }

/* Sums of products are below 2^24, so f32 has them exactly. */
static void dot_integer(const Dot *d, int ld) {
    for (int j = 0; j < d->n; j += 16)
        for (int i = 0; i < d->rows; i++) {
            VF sum = {0};
            for (int k = 0; k < d->k; k++) sum += *(const VF *)(dot_tile.b + k * ld + j) * dot_tile.a[i][k];
            i32 add[16] __attribute__((aligned(64)));
            *(VI *)add = __builtin_convertvector(sum, VI);
            i32 *c = (i32 *)d->c + i * d->ldc + j;
            if (d->saturate) for (int l = 0; l < 16; l++) c[l] = clamped((i64)c[l] + add[l]);
            else for (int l = 0; l < 16; l++) c[l] = (i32)((u32)c[l] + (u32)add[l]);
        }
}

/* Single bits: raw_a and raw_b hold words of 32 of them. */
static void dot_bits(const Dot *d, bool exclusive) {
    int words = d->k / 32, ld = dot_ld(d->n);
    for (int i = 0; i < d->rows; i++)
        for (int k = 0; k < words; k++)
            for (int j = 0; j < d->n; j++) {
                u32 a = dot_tile.raw_a[i][k], b = dot_tile.raw_b[k * ld + j];
                d->c[i * d->ldc + j] += (u32)popcount(exclusive ? a ^ b : a & b);
            }
}

/* **** sparsity **** */

/* Where element `stored` of a compressed row lies: `code` are the four bits of its group, two indices of
 * two bits. Groups hold 2 of 4 elements; tf32: 1 of 2, named by both its halves; 4-bit integers: 2 of 4
 * pairs. */
static int sparse_place(int element, u32 code, int stored) {
    u32 low = code & 3, high = code >> 2 & 3;
    if (element == TF32) return 2 * stored + (int)(low >> 1);
    if (element == S4 || element == U4)
        return stored / 4 * 8 + 2 * (int)(stored & 2 ? high : low) + (stored & 1);
    return stored / 2 * 4 + (int)(stored & 1 ? high : low);
}

/* Spreads the compressed rows of raw_a over k elements. `code(row, group)` is metadata[row] >> 4 * group. */
static void sparse_expand(int element, const u64 *metadata, int k) {
    int per = element == TF32 ? 1 : element == S4 || element == U4 ? 4 : 2;
    for (int i = 0; i < DOT_ROWS; i++) {
        u32 stored[DOT_K];
        memcpy(stored, dot_tile.raw_a[i], sizeof stored);
        memset(dot_tile.raw_a[i], 0, sizeof stored);
        memset(dot_tile.absent[i], 1, sizeof dot_tile.absent[i]);
        for (int s = 0; s < k / 2; s++) {
            int at = sparse_place(element, metadata[i] >> (4 * (s / per)) & 15, s);
            dot_tile.raw_a[i][at] = stored[s];
            dot_tile.absent[i][at] = 0;
        }
    }
}

/* The metadata of 16 rows, four bits a group, from a register of each lane; `sel` says which lanes of four
 * give it. 8-bit and 4-bit elements: a lane has 8 groups of row g + 8 * (lane & 1). Others: 4 groups each
 * of rows g and g + 8. */
static void sparse_metadata(int element, int k, const u32 *words, u32 sel, u64 *out) {
    int groups = element == TF32 ? k / 2 : element == S4 || element == U4 ? k / 8 : k / 4;
    memset(out, 0, DOT_ROWS * sizeof *out);
    EACH {
        int g = l >> 2, q = l & 3, part, lanes;
        if (element_bits[element] < 16) {
            if ((lanes = groups / 4) == 2 && q >> 1 != (int)sel) continue;
            part = lanes == 2 ? 0 : q >> 1;
            out[g + 8 * (q & 1)] |= (u64)words[l] << (32 * part);
            continue;
        }
        lanes = groups / 4;
        if (q / lanes != (int)sel) continue;
        part = q % lanes;
        out[g] |= (u64)(words[l] & 0xffff) << (16 * part);
        out[g + 8] |= (u64)(words[l] >> 16) << (16 * part);
    }
}

/* **** the whole **** */

/* D = A * B + C. `sparse`: raw_a was spread by sparse_expand. */
static void dot(const Dot *d, bool sparse) {
    int ld = dot_ld(d->n), wide = (d->n + 15) / 16 * 16;
    for (int i = 0; i < d->rows; i++) {
        decode(d->a, d->negate_a, dot_tile.raw_a[i], dot_tile.a[i], dot_tile.ea[i], d->k);
        if (sparse) for (int k = 0; k < d->k; k++) if (dot_tile.absent[i][k]) dot_tile.ea[i][k] = ABSENT;
    }
    for (int k = 0; k < d->k; k++)
        for (int j = d->n; j < wide + 16; j++) dot_tile.raw_b[k * ld + j] = 0;
    decode(d->b, d->negate_b, dot_tile.raw_b, dot_tile.b, dot_tile.eb, d->k * ld);
    if (d->result == RESULT_S32) dot_integer(d, ld);
    else dot_float(d, ld);
}
