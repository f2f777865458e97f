/* setp: comparisons to predicates, of integers and of floating point. PTX ISA "Comparison and Selection
 * Instructions".
 *
 * Protocol: `more` is the comparison, d = (a cmp b) op c and e = !(a cmp b) op c, with the Boolean operation
 * in bits 0-1 of flags and flushing (ftz) in bit 2; d or e may be absent. set, and comparisons that the
 * manual has besides these, are lowered to these.
 */
#include "formats.h"

enum { EQ, NE, LT, LE, EQU, NEU, LTU, LEU, NUM, UNORDERED };   /* ptx/emulator/lower_float.py knows this order */
enum { FLUSH_COMPARE = 4 };

static inline u32 combined(const Warp *w, const Op *op, u32 bits) {
    if (op->c < 0) return bits;
    u32 c = pred(w, op->c), how = op->flags & 3;
    return how == 1 ? bits & c : how == 2 ? bits | c : bits ^ c;
}
static inline int compared(Warp *w, const Op *op, u32 bits, u32 mask) {
    u32 yes = combined(w, op, bits), no = combined(w, op, ~bits);
    if (op->d >= 0) put_pred(w, op->d, yes, mask);
    if (op->e >= 0) put_pred(w, op->e, no, mask);
    return NEXT;
}

#define BITS(expr) do { u32 bits = 0; EACH bits |= (u32)(expr) << l; return bits; } while (0)
#define INTEGER_COMPARISON(suffix, type, reg) \
    static inline u32 compare_##suffix(const reg *x, const reg *y, int how) { \
        switch (how) { \
            case EQ: BITS((type)x[l] == (type)y[l]); \
            case NE: BITS((type)x[l] != (type)y[l]); \
            case LT: BITS((type)x[l] < (type)y[l]); \
            default: BITS((type)x[l] <= (type)y[l]); \
        } \
    } \
    HANDLER(setp_##suffix) { \
        const reg *a = (const reg *)(w->regs + op->a), *b = (const reg *)(w->regs + op->b); \
        return compared(w, op, compare_##suffix(a, b, op->more), mask); \
    }
INTEGER_COMPARISON(s16, i16, u32)
INTEGER_COMPARISON(u16, u16, u32)
INTEGER_COMPARISON(s32, i32, u32)
INTEGER_COMPARISON(u32, u32, u32)
INTEGER_COMPARISON(s64, i64, u64)
INTEGER_COMPARISON(u64, u64, u64)

/* Ordered comparisons fail where an operand is NaN, those that end in U hold. */
#define FLOAT_COMPARISON(suffix, type) \
    static inline u32 compare_##suffix(const type *x, const type *y, int how) { \
        switch (how) { \
            case EQ: BITS(x[l] == y[l]); \
            case NE: BITS((x[l] < y[l]) | (x[l] > y[l])); \
            case LT: BITS(x[l] < y[l]); \
            case LE: BITS(x[l] <= y[l]); \
            case EQU: BITS(!((x[l] < y[l]) | (x[l] > y[l]))); \
            case NEU: BITS(x[l] != y[l]); \
            case LTU: BITS(!(x[l] >= y[l])); \
            case LEU: BITS(!(x[l] > y[l])); \
            case NUM: BITS((x[l] == x[l]) & (y[l] == y[l])); \
            default: BITS((x[l] != x[l]) | (y[l] != y[l])); \
        } \
    }
FLOAT_COMPARISON(f32, f32)
FLOAT_COMPARISON(f64, f64)

HANDLER(setp_f32) {
    const f32 *a = rf32(w, op->a), *b = rf32(w, op->b);
    f32 x[LANES], y[LANES];
    if (op->flags & FLUSH_COMPARE) {
        EACH x[l] = flush(a[l]), y[l] = flush(b[l]);
        a = x, b = y;
    }
    return compared(w, op, compare_f32(a, b, op->more), mask);
}
HANDLER(setp_f64) { return compared(w, op, compare_f64(rf64(w, op->a), rf64(w, op->b), op->more), mask); }

/* Halves of words: `format` decodes 16 bits; the upper ones of packed operands after a shift. */
static inline f32 flush_f16(f32 x) { return fabsf(x) < 0x1p-14f ? x * 0.0f : x; }
#define HALF_COMPARISON(suffix, decode, flushed) \
    static u32 compare_##suffix(const Warp *w, const Op *op, int shift) { \
        f32 x[LANES], y[LANES]; \
        EACH x[l] = decode(r32(w, op->a)[l] >> shift & 0xffff); \
        EACH y[l] = decode(r32(w, op->b)[l] >> shift & 0xffff); \
        if (op->flags & FLUSH_COMPARE) EACH x[l] = flushed(x[l]), y[l] = flushed(y[l]); \
        return compare_f32(x, y, op->more); \
    } \
    HANDLER(setp_##suffix) { return compared(w, op, compare_##suffix(w, op, 0), mask); } \
    HANDLER(setp_##suffix##x2) {   /* d of the low halves, e of the high ones */ \
        u32 low = combined(w, op, compare_##suffix(w, op, 0)); \
        u32 high = combined(w, op, compare_##suffix(w, op, 16)); \
        if (op->d >= 0) put_pred(w, op->d, low, mask); \
        if (op->e >= 0) put_pred(w, op->e, high, mask); \
        return NEXT; \
    }
HALF_COMPARISON(f16, f16_to_f32, flush_f16)
HALF_COMPARISON(bf16, bf16_to_f32, flush)

/* testp: flags say which of the classes count: 1 infinite, 2 NaN, 4 normal, 8 subnormal, 16 zero. */
static inline u32 class_of(u64 exponent, u64 fraction, u64 top) {
    return exponent == top ? (fraction ? 2 : 1) : exponent ? 4 : fraction ? 8 : 16;
}
HANDLER(testp_f32) {
    u32 bits = 0;
    EACH {
        u32 x = r32(w, op->a)[l];
        bits |= (u32)((class_of(x >> 23 & 255, x & 0x7fffff, 255) & op->flags) != 0) << l;
    }
    put_pred(w, op->d, bits, mask);
    return NEXT;
}
HANDLER(testp_f64) {
    u32 bits = 0;
    EACH {
        u64 x = r64(w, op->a)[l];
        bits |= (u32)((class_of(x >> 52 & 2047, x & 0xfffffffffffffull, 2047) & op->flags) != 0) << l;
    }
    put_pred(w, op->d, bits, mask);
    return NEXT;
}
#undef BITS
