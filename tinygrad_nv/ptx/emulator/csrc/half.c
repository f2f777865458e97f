/* Arithmetic of f16 and bf16, one or two in a word: PTX ISA "Half Precision Floating Point Instructions".
 *
 * Protocol: `vector` is the number of values in a word; flags are those of float.c. Values are computed in
 * f64, exactly or rounded to odd, and rounded once to nearest even. NaN results are 0x7fff.
 */
#include "formats.h"

static inline f64 load_half(u32 word, int half, u32 flags, bool brain) {
    u32 code = word >> 16 * half & 0xffff;
    f32 x = brain ? bf16_to_f32(code) : f16_to_f32(code);
    return flags & FTZ ? (brain ? flush(x) : flush_f16(x)) : x;
}
static inline u32 store_half(f64 x, int half, u32 flags, bool brain) {
    if (flags & SAT) x = x > 0 ? (x < 1 ? x : 1) : 0;
    if (flags & RELU) x = x > 0 || x != x ? x : 0;
    f32 y = f64_to_f32_odd(x);
    u32 code = brain ? f32_to_bf16(y) : f32_to_f16(y), exponent = brain ? 0x7f80 : 0x7c00;
    if (flags & FTZ && !(code & exponent)) code &= 0x8000;
    return code << 16 * half;
}

#define LOAD(x, field) f64 x = load_half(r32(w, op->field)[l], half, op->flags, brain)
#define HALF_HANDLER(name, is_brain, loads, expr) \
    HANDLER(name) { \
        const bool brain = is_brain; \
        u32 out[LANES] = {0}; \
        for (int half = 0; half < op->vector; half++) \
            EACH { loads; out[l] |= store_half(expr, half, op->flags, brain); } \
        put32(w, op->d, out, mask); \
        return NEXT; \
    }
#define HALF_BOTH(name, loads, expr) \
    HALF_HANDLER(name##_f16, false, loads, expr) HALF_HANDLER(name##_bf16, true, loads, expr)
HALF_BOTH(add, LOAD(a, a); LOAD(b, b), odd_sum(a, b))
HALF_BOTH(sub, LOAD(a, a); LOAD(b, b), odd_sum(a, -b))
HALF_BOTH(mul, LOAD(a, a); LOAD(b, b), a * b)
HALF_BOTH(fma, LOAD(a, a); LOAD(b, b); LOAD(c, c), odd_sum(a * b, c))
HALF_BOTH(min, LOAD(a, a); LOAD(b, b), least_f32((f32)a, (f32)b, op->flags))
HALF_BOTH(max, LOAD(a, a); LOAD(b, b), most_f32((f32)a, (f32)b, op->flags))
HALF_BOTH(ex2, LOAD(a, a), power_of_two(a))
HALF_BOTH(tanh, LOAD(a, a), tanh(a))

/* fma.oob: zero where a factor is OOB_NAN. Of 0x7fff an H100 makes a NaN. */
#define HALF_OOB(name, is_brain) \
    HANDLER(name) { \
        const bool brain = is_brain; \
        u32 out[LANES] = {0}; \
        for (int half = 0; half < op->vector; half++) \
            EACH { \
                LOAD(a, a); LOAD(b, b); LOAD(c, c); \
                bool outside = (r32(w, op->a)[l] >> 16 * half & 0xffff) == OOB_NAN || \
                               (r32(w, op->b)[l] >> 16 * half & 0xffff) == OOB_NAN; \
                out[l] |= store_half(outside ? 0 : odd_sum(a * b, c), half, op->flags, brain); \
            } \
        put32(w, op->d, out, mask); \
        return NEXT; \
    }
HALF_OOB(fma_oob_f16, false)
HALF_OOB(fma_oob_bf16, true)
#undef LOAD

/* abs, neg: of the bits; of a NaN, 0x7fff */
static inline u32 half_canonical(u32 code, u32 exponent) { return (code & 0x7fff) > exponent ? NAN_F16 : code; }
#define HALF_SIGNS(name, exponent, expr) \
    HANDLER(name) { \
        u32 out[LANES], ones = op->vector == 2 ? ~0u : 0xffff; \
        EACH { \
            u32 a = r32(w, op->a)[l]; \
            if (op->flags & FTZ) { \
                u32 low = a & (exponent) ? 0xffff : 0x8000; \
                u32 high = a & (exponent) << 16 ? 0xffff0000 : 0x80000000; \
                a &= low | high; \
            } \
            a = expr; \
            out[l] = (half_canonical(a & 0xffff, exponent) | half_canonical(a >> 16, exponent) << 16) & ones; \
        } \
        put32(w, op->d, out, mask); \
        return NEXT; \
    }
HALF_SIGNS(abs_f16, 0x7c00u, a & 0x7fff7fff)
HALF_SIGNS(neg_f16, 0x7c00u, a ^ 0x80008000)
HALF_SIGNS(abs_bf16, 0x7f80u, a & 0x7fff7fff)
HALF_SIGNS(neg_bf16, 0x7f80u, a ^ 0x80008000)
