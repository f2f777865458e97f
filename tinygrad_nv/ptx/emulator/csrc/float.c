/* Arithmetic of f32 and f64: PTX ISA "Floating Point Instructions".
 *
 * Protocol: flags of every op here and in half.c are FTZ (subnormal inputs and results are zeros of their
 * sign), SAT (results within [0, 1], NaN gives +0), RELU, NANS (min and max give NaN when an operand is NaN)
 * and XOR_SIGN (of min and max of absolute values). `more` is the rounding. f32 results that are NaN are
 * 0x7fffffff. f64 sums and products give NaNs as an H100 does; others of f64 are the host's. Functions that PTX calls approximate are f64's of the C library,
 * rounded: within the manual's bounds.
 */
#include "formats.h"

#include <fenv.h>

enum { FTZ = 1, SAT = 2, RELU = 4, NANS = 8, XOR_SIGN = 16, OOB = 32 };

/* **** f32: operands and results **** */

/* The operand at a place, flushed into `room` when the op says so. */
static inline const f32 *operand_f32(const Warp *w, const Op *op, i32 at, f32 *room) {
    if (!(op->flags & FTZ)) return rf32(w, at);
    EACH room[l] = flush(rf32(w, at)[l]);
    return room;
}
static inline int finish_f32(Warp *w, const Op *op, f32 *value, u32 mask) {
    u32 out[LANES];
    if (op->flags & SAT) EACH value[l] = value[l] > 0 ? (value[l] < 1 ? value[l] : 1) : 0;
    if (op->flags & FTZ) EACH value[l] = flush(value[l]);
    EACH out[l] = canonical(value[l]);
    put32(w, op->d, out, mask);
    return NEXT;
}

#define FLOAT1(name, expr) \
    HANDLER(name) { \
        f32 value[LANES], room[LANES]; \
        const f32 *x = operand_f32(w, op, op->a, room); \
        EACH { f32 a = x[l]; value[l] = (f32)(expr); } \
        return finish_f32(w, op, value, mask); \
    }
#define FLOAT2(name, expr) \
    HANDLER(name) { \
        f32 value[LANES], room[2][LANES]; \
        const f32 *x = operand_f32(w, op, op->a, room[0]), *y = operand_f32(w, op, op->b, room[1]); \
        EACH { f32 a = x[l], b = y[l]; value[l] = (f32)(expr); } \
        return finish_f32(w, op, value, mask); \
    }
#define FLOAT3(name, expr) \
    HANDLER(name) { \
        f32 value[LANES], room[3][LANES]; \
        const f32 *x = operand_f32(w, op, op->a, room[0]), *y = operand_f32(w, op, op->b, room[1]); \
        const f32 *z = operand_f32(w, op, op->c, room[2]); \
        EACH { f32 a = x[l], b = y[l], c = z[l]; value[l] = (f32)(expr); } \
        return finish_f32(w, op, value, mask); \
    }

/* **** f32: to nearest even, as the host does it **** */

FLOAT2(add_f32, a + b)
FLOAT2(sub_f32, a - b)
FLOAT2(mul_f32, a * b)
FLOAT2(div_f32, a / b)
FLOAT1(rcp_f32, 1.0f / a)
FLOAT1(sqrt_f32, sqrtf(a))
FLOAT3(fma_f32, fmaf(a, b, c))

/* **** f32: directed roundings, of f64 values rounded to odd **** */

/* A sum to odd; one that is exactly zero takes the sign the rounding asks for. */
static inline f64 sum_for(f64 a, f64 b, int mode) {
    f64 s = odd_sum(a, b);
    u64 either = (as_u64(a) | as_u64(b)) & 1ull << 63;
    return s == 0 && mode == RM ? as_f64(either) : s;
}
FLOAT2(add_round_f32, f64_to_f32(sum_for(a, b, op->more), op->more))
FLOAT2(sub_round_f32, f64_to_f32(sum_for(a, -(f64)b, op->more), op->more))
FLOAT2(mul_round_f32, f64_to_f32((f64)a * b, op->more))
FLOAT2(div_round_f32, f64_to_f32(odd_quotient(a, b), op->more))
FLOAT1(rcp_round_f32, f64_to_f32(odd_quotient(1, a), op->more))
FLOAT1(sqrt_round_f32, f64_to_f32(odd_root(a), op->more))
FLOAT3(fma_round_f32, f64_to_f32(sum_for((f64)a * b, c, op->more), op->more))

/* **** f32: approximations **** */

/* div.approx multiplies by a reciprocal, which is zero for divisors above 2^126. */
static inline f32 divide_approx(f32 a, f32 b) {
    f32 size = fabsf(b);
    return size > 0x1p126f && size < INFINITY ? a * copysignf(0.0f, b) : a / b;
}
FLOAT2(div_approx_f32, divide_approx(a, b))
FLOAT1(rsqrt_f32, 1.0 / sqrt((f64)a))
FLOAT1(ex2_f32, power_of_two(a))
FLOAT1(lg2_f32, log2((f64)a))
FLOAT1(sin_f32, sin((f64)a))
FLOAT1(cos_f32, cos((f64)a))
FLOAT1(tanh_f32, tanh((f64)a))

/* **** min and max: -0 < +0, a NaN gives the other operand **** */

static inline f32 least_f32(f32 a, f32 b, u32 flags) {
    u32 sign = (as_u32(a) ^ as_u32(b)) & 0x80000000;
    f32 x = flags & XOR_SIGN ? fabsf(a) : a, y = flags & XOR_SIGN ? fabsf(b) : b;
    f32 least = x < y ? x : y < x ? y : as_f32(as_u32(x) | as_u32(y));
    least = x != x ? (flags & NANS ? x : y) : y != y ? (flags & NANS ? y : x) : least;
    return flags & XOR_SIGN ? as_f32(as_u32(least) ^ sign) : least;
}
static inline f32 most_f32(f32 a, f32 b, u32 flags) {
    u32 sign = (as_u32(a) ^ as_u32(b)) & 0x80000000;
    f32 x = flags & XOR_SIGN ? fabsf(a) : a, y = flags & XOR_SIGN ? fabsf(b) : b;
    f32 most = x > y ? x : y > x ? y : as_f32(as_u32(x) & as_u32(y));
    most = x != x ? (flags & NANS ? x : y) : y != y ? (flags & NANS ? y : x) : most;
    return flags & XOR_SIGN ? as_f32(as_u32(most) ^ sign) : most;
}
FLOAT2(min_f32, least_f32(a, b, op->flags))
FLOAT2(max_f32, most_f32(a, b, op->flags))

/* **** signs: of the bits; abs and neg of a NaN are 0x7fffffff, as all NaNs are **** */

#define SIGNS_F32(name, expr) \
    HANDLER(name) { \
        u32 out[LANES]; \
        EACH { \
            u32 a = r32(w, op->a)[l]; \
            a = op->flags & FTZ ? as_u32(flush(as_f32(a))) : a; \
            out[l] = expr; \
        } \
        put32(w, op->d, out, mask); \
        return NEXT; \
    }
SIGNS_F32(abs_f32, canonical(as_f32(a & 0x7fffffff)))
SIGNS_F32(neg_f32, canonical(as_f32(a ^ 0x80000000)))
SIGNS_F32(copysign_f32, (a & 0x80000000) | (r32(w, op->b)[l] & 0x7fffffff))

/* **** f64 **** */

enum { F64_ADD, F64_MUL, F64_FMA, F64_DIV, F64_SQRT };

/* One operation under another rounding mode: the volatile values keep it between the two changes of mode. */
static f64 directed_f64(int what, f64 a, f64 b, f64 c, int mode) {
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    volatile f64 x = a, y = b, z = c, out;
    fesetround(modes[mode]);
    switch (what) {
        case F64_ADD: out = x + y; break;
        case F64_MUL: out = x * y; break;
        case F64_FMA: out = fma(x, y, z); break;
        case F64_DIV: out = x / y; break;
        default: out = sqrt(x);
    }
    fesetround(FE_TONEAREST);
    return out;
}

#define DOUBLE(name, loads, nearest, directed) \
    HANDLER(name) { \
        f64 out[LANES]; \
        if (op->more == RN) EACH { loads; out[l] = nearest; } \
        else EACH { loads; out[l] = directed; } \
        put64(w, op->d, (const u64 *)out, mask); \
        return NEXT; \
    }
#define A f64 a = rf64(w, op->a)[l]
#define AB A; f64 b = rf64(w, op->b)[l]
#define ABC AB; f64 c = rf64(w, op->c)[l]
/* The last operand that is a NaN comes through, quiet and with its sign; what is invalid without one gives
 * 0xfff8000000000000. */
static inline f64 quiet(f64 x) { return as_f64(as_u64(x) | 1ull << 51); }
static inline f64 nan2(f64 a, f64 b, f64 result) {
    f64 made = result == result ? result : as_f64(0xfff8000000000000ull);
    return b != b ? quiet(b) : a != a ? quiet(a) : made;
}
static inline f64 nan3(f64 a, f64 b, f64 c, f64 result) { return c != c ? quiet(c) : nan2(a, b, result); }
DOUBLE(add_f64, AB, nan2(a, b, a + b), nan2(a, b, directed_f64(F64_ADD, a, b, 0, op->more)))
DOUBLE(sub_f64, AB, nan2(a, b, a - b), nan2(a, b, directed_f64(F64_ADD, a, -b, 0, op->more)))
DOUBLE(mul_f64, AB, nan2(a, b, a * b), nan2(a, b, directed_f64(F64_MUL, a, b, 0, op->more)))
DOUBLE(fma_f64, ABC, nan3(a, b, c, fma(a, b, c)), nan3(a, b, c, directed_f64(F64_FMA, a, b, c, op->more)))
DOUBLE(div_f64, AB, a / b, directed_f64(F64_DIV, a, b, 0, op->more))
DOUBLE(rcp_f64, A, 1.0 / a, directed_f64(F64_DIV, 1, a, 0, op->more))
DOUBLE(sqrt_f64, A, sqrt(a), directed_f64(F64_SQRT, a, 0, 0, op->more))

/* rcp.approx.ftz.f64 and rsqrt.approx: the upper word of the input gives the upper word of the result. */
static inline f64 upper_word(f64 x) {
    u64 bits = as_u64(x) & 0xffffffff00000000ull;
    return as_f64(bits & 0x7ff0000000000000ull ? bits : bits & 1ull << 63);
}
#define DOUBLE_EXACT(name, loads, expr) DOUBLE(name, loads, expr, expr)
DOUBLE_EXACT(rcp_approx_f64, A, upper_word(1.0 / upper_word(a)))
DOUBLE_EXACT(rsqrt_approx_ftz_f64, A, upper_word(1.0 / sqrt(upper_word(a))))
DOUBLE_EXACT(rsqrt_f64, A, 1.0 / sqrt(a))
DOUBLE_EXACT(abs_f64, A, fabs(a))
DOUBLE_EXACT(neg_f64, A, a != a ? quiet(a) : -a)   /* an addition on hardware, which leaves NaNs their sign */
DOUBLE_EXACT(copysign_f64, AB, copysign(b, a))
static inline f64 least_f64(f64 a, f64 b) {
    f64 least = a < b ? a : b < a ? b : as_f64(as_u64(a) | as_u64(b));
    return a != a ? b : b != b ? a : least;
}
static inline f64 most_f64(f64 a, f64 b) {
    f64 most = a > b ? a : b > a ? b : as_f64(as_u64(a) & as_u64(b));
    return a != a ? b : b != b ? a : most;
}
DOUBLE_EXACT(min_f64, AB, least_f64(a, b))
DOUBLE_EXACT(max_f64, AB, most_f64(a, b))
#undef A
#undef AB
#undef ABC
