/* cvt: PTX ISA "Data Movement and Conversion Instructions: cvt, cvt.pack".
 *
 * Protocol: `more` is destination type | source type << 8 (enum Type, as in ptx/emulator/lower_convert.py); `vector` the
 * rounding, from `formats.h`; `width` the bytes of the destination register, `wide` says that the source's
 * is 64 bits wide. Values pass through u64 (integers, extended by sign or zero) or f64 (floats, exactly or
 * rounded to odd), and are rounded once.
 */
#include "formats.h"

enum Type { TYPE_U8, TYPE_S8, TYPE_U16, TYPE_S16, TYPE_U32, TYPE_S32, TYPE_U64, TYPE_S64, TYPE_F16, TYPE_BF16,
    TYPE_F32, TYPE_F64, TYPE_TF32, TYPE_E4M3, TYPE_E5M2 };
/* FTZ, SAT, RELU as in float.c */
enum { SATFINITE = 64, INTEGRAL = 128, FROM_F64 = 256 };   /* INTEGRAL: float to float, rounded to an integer */

static inline bool is_signed_type(int type) { return type & 1; }
static inline int bits_of_type(int type) { return 8 << (type >> 1); }

/* **** integers **** */

static inline u64 extend_from(u64 x, int type) {
    int unused = 64 - bits_of_type(type);
    return is_signed_type(type) ? (u64)((i64)(x << unused) >> unused) : x << unused >> unused;
}
static inline void load_integers(const Warp *w, const Op *op, int type, u64 *out) {
    if (op->wide) EACH out[l] = extend_from(r64(w, op->a)[l], type);
    else EACH out[l] = extend_from(r32(w, op->a)[l], type);
}
/* Registers wider than the type hold it extended. */
static inline int store_integers(Warp *w, const Op *op, int type, const u64 *value, u32 mask) {
    u64 wide[LANES];
    u32 out[LANES], ones = op->width == 1 ? 0xff : op->width == 2 ? 0xffff : ~0u;
    EACH wide[l] = extend_from(value[l], type);
    if (op->width == 8) { put64(w, op->d, wide, mask); return NEXT; }
    EACH out[l] = (u32)wide[l] & ones;
    put32(w, op->d, out, mask);
    return NEXT;
}

static inline u64 lowest_of(int type) {
    return is_signed_type(type) ? 0 - (1ull << (bits_of_type(type) - 1)) : 0;
}
static inline u64 highest_of(int type) {
    return is_signed_type(type) ? (1ull << (bits_of_type(type) - 1)) - 1 : ~0ull >> (64 - bits_of_type(type));
}
static inline u64 saturate_integer(u64 x, int from, int to) {
    bool negative = is_signed_type(from) && (i64)x < 0;
    if (negative) return is_signed_type(to) && (i64)x >= (i64)lowest_of(to) ? x : lowest_of(to);
    return x > highest_of(to) ? highest_of(to) : x;
}
HANDLER(cvt_integer) {
    u64 x[LANES];
    int to = op->more & 255, from = op->more >> 8;
    load_integers(w, op, from, x);
    if (op->flags & SAT) EACH x[l] = saturate_integer(x[l], from, to);
    return store_integers(w, op, to, x, mask);
}
HANDLER(widen_s32) {
    u64 out[LANES];
    EACH out[l] = (u64)(i64)s32(w, op->a)[l];
    put64(w, op->d, out, mask);
    return NEXT;
}

/* **** floats: loads and stores **** */

static inline void load_floats(const Warp *w, const Op *op, int type, f64 *out) {
    const u32 *x = r32(w, op->a);
    switch (type) {
        case TYPE_F16: EACH out[l] = f16_to_f32(x[l] & 0xffff); break;
        case TYPE_BF16: EACH out[l] = bf16_to_f32(x[l] & 0xffff); break;
        case TYPE_F64: EACH out[l] = rf64(w, op->a)[l]; break;
        default:
            if (op->flags & FTZ) EACH out[l] = as_f32(canonical(flush(as_f32(x[l]))));
            else EACH out[l] = as_f32(x[l]);
    }
}
static inline f64 limited(f64 x, u32 flags, f64 largest) {
    if (flags & SAT) x = x > 0 ? (x < 1 ? x : 1) : 0;
    if (flags & RELU) x = x > 0 || x != x ? x : 0;
    if (flags & SATFINITE) x = x > largest ? largest : x < -largest ? -largest : x;
    return x;
}
static inline u32 f32_code(f64 x, int mode, u32 flags) {
    f32 y = f64_to_f32(x, mode);
    return canonical(flags & FTZ ? flush(y) : y);
}
/* A NaN of f64 in f16, bf16 or f32: quiet, with its sign and the upper bits of its payload. (On an H100
 * 0x7ff8000000000000 gives 0x7e00, 0x7fc0 and 0x7fc00000; no other was tried.) */
static inline u32 narrowed_nan(u64 x, int type) {
    u32 bits = type == TYPE_F32 ? 32 : 16, mantissa = type == TYPE_F32 ? 23 : type == TYPE_F16 ? 10 : 7;
    u32 exponent = (1u << (bits - 1)) - (1u << mantissa), payload = 1u << (mantissa - 1);
    return (u32)(x >> 63) << (bits - 1) | exponent | payload | (u32)((x & 0xfffffffffffffull) >> (52 - mantissa));
}
/* The code of a value in a format of at most 32 bits, with the modifiers of the op. */
static inline u32 float_code(f64 x, int type, int mode, u32 flags) {
    if (flags & FROM_F64 && x != x && !(flags & SAT)) return narrowed_nan(as_u64(x), type);
    switch (type) {
        case TYPE_F16: return f64_to_f16(limited(x, flags, 65504), mode);
        case TYPE_BF16: return f64_to_bf16(limited(x, flags, 0x1.fep127), mode);
        case TYPE_TF32: return f64_to_tf32(limited(x, flags, 0x1.ffcp127), mode);
        default: return f32_code(limited(x, flags, 0x1.fffffep127), mode, flags);
    }
}
#define STORE_AS(type) case type: EACH out[l] = float_code(x[l], type, mode, flags); break
static inline int store_floats(Warp *w, const Op *op, int type, f64 *x, u32 flags, u32 mask) {
    u32 out[LANES];
    int mode = op->vector;
    if (type == TYPE_F64) {
        if (flags & SAT) EACH x[l] = limited(x[l], SAT, 0);
        put64(w, op->d, (const u64 *)x, mask);
        return NEXT;
    }
    switch (type) {
        STORE_AS(TYPE_F16);
        STORE_AS(TYPE_BF16);
        STORE_AS(TYPE_TF32);
        default: EACH out[l] = float_code(x[l], TYPE_F32, mode, flags);
    }
    put32(w, op->d, out, mask);
    return NEXT;
}
#undef STORE_AS

static inline f64 to_integral(f64 x, int mode) {
    return mode == RZ ? trunc(x) : mode == RM ? floor(x) : mode == RP ? ceil(x) : rint(x);
}

/* **** conversions with a float on one side or both **** */

/* f32 to tf32, ties away from zero: infinities and NaNs lose their low bits, and .satfinite takes the next code
 * towards zero for them, a NaN or not. So an H100 does it. */
static inline u32 tf32_away(u32 x, u32 flags) {
    u32 code = ((x & 0x7f800000) == 0x7f800000 ? x : x + 0x1000) & ~0x1fffu;
    return flags & SATFINITE && (code & 0x7f800000) == 0x7f800000 ? code - 0x2000 : code;
}
HANDLER(cvt_float) {
    f64 x[LANES];
    int from = op->more >> 8;
    if ((op->more & 255) == TYPE_TF32 && op->vector == RNA) {
        u32 out[LANES];
        EACH out[l] = tf32_away(r32(w, op->a)[l], op->flags);
        put32(w, op->d, out, mask);
        return NEXT;
    }
    load_floats(w, op, from, x);
    if (op->flags & INTEGRAL) EACH x[l] = to_integral(x[l], op->vector);
    return store_floats(w, op, op->more & 255, x, op->flags | (from == TYPE_F64 ? FROM_F64 : 0), mask);
}

/* An integer as f64, in any rounding. */
static inline f64 integer_to_f64(u64 size, bool negative, int mode) {
    int shift = size >> 53 ? 11 - __builtin_clzll(size) : 0;
    u64 kept = size >> shift, lost = size & ((1ull << shift) - 1), half = (1ull << shift) >> 1;
    bool nearest = lost > half || (lost && lost == half && kept & 1);
    bool directed = lost && (mode == RM ? negative : mode == RP && !negative);
    bool up = mode == RN ? nearest : directed;
    f64 x = (f64)(i64)(kept + up) * (f64)(1ull << shift);
    return negative ? -x : x;
}
HANDLER(cvt_from_integer) {
    int to = op->more & 255, from = op->more >> 8;
    u64 x[LANES];
    f64 y[LANES];
    load_integers(w, op, from, x);
    EACH {
        bool negative = is_signed_type(from) && (i64)x[l] < 0;
        u64 size = negative ? 0 - x[l] : x[l];
        y[l] = to == TYPE_F64 ? integer_to_f64(size, negative, op->vector) : odd_integer(size, negative);
    }
    return store_floats(w, op, to, y, op->flags, mask);
}

/* Float to integer clamps. NaN is 0; but where either side is 64 bits wide, only the highest bit is set. */
static inline u64 integer_of(f64 x, int to, bool from_f64) {
    int bits = bits_of_type(to);
    f64 limit = is_signed_type(to) ? ldexp(1, bits - 1) : ldexp(1, bits);
    if (x != x) return from_f64 || bits == 64 ? 1ull << (bits - 1) : 0;
    if (x >= limit) return highest_of(to);
    if (x < (is_signed_type(to) ? -limit : 0)) return lowest_of(to);
    return is_signed_type(to) ? (u64)(i64)x : (u64)x;
}
HANDLER(cvt_to_integer) {
    int to = op->more & 255, from = op->more >> 8;
    f64 x[LANES];
    u64 y[LANES];
    load_floats(w, op, from, x);
    EACH y[l] = integer_of(to_integral(x[l], op->vector), to, from == TYPE_F64);
    return store_integers(w, op, to, y, mask);
}

/* **** what most kernels use, without detours **** */

#define DIRECT_LOOP(expr) \
    u32 out[LANES]; \
    EACH { u32 a = r32(w, op->a)[l]; out[l] = expr; } \
    put32(w, op->d, out, mask); \
    return NEXT;
#define DIRECT(name, expr) HANDLER(name) { DIRECT_LOOP(expr) }
DIRECT(cvt_f32_bf16, a << 16)   /* NaNs too: an H100 makes 0x7fff0000 of 0x7fff */
DIRECT(cvt_f32_f16, canonical(f16_to_f32(a)))
DIRECT(cvt_bf16_f32, f32_to_bf16(as_f32(a)))
DIRECT(cvt_f16_f32, f32_to_f16(as_f32(a)))
DIRECT(cvt_f32_s32, as_u32((f32)(i32)a))
DIRECT(cvt_f32_u32, as_u32((f32)a))
DIRECT(cvt_bf16x2_f32, f32_to_bf16(as_f32(a)) << 16 | f32_to_bf16(rf32(w, op->b)[l]))
DIRECT(cvt_f16x2_f32, f32_to_f16(as_f32(a)) << 16 | f32_to_f16(rf32(w, op->b)[l]))

/* **** packed: the first source becomes the upper half **** */

/* two f32 to two of a format of 16 bits */
#define PAIR_AS(type) case type: \
        EACH out[l] = float_code(rf32(w, op->a)[l], type, mode, flags) << 16 | \
                      float_code(rf32(w, op->b)[l], type, mode, flags); \
        break
HANDLER(cvt_pair) {
    u32 out[LANES], flags = op->flags;
    int mode = op->vector;
    switch (op->more & 255) {
        PAIR_AS(TYPE_F16);
        default: PAIR_AS(TYPE_BF16);
    }
    put32(w, op->d, out, mask);
    return NEXT;
}
#undef PAIR_AS
/* f32 or the halves of f16x2 to 8 bits: nearest even and saturated, PTX has nothing else */
static inline f32 not_below_zero(f32 x, u32 flags) { return flags & RELU && x <= 0 ? 0 : x; }
#define PAIR_F8(name, convert) \
    DIRECT(cvt_##name##x2_f32, convert(not_below_zero(as_f32(a), op->flags)) << 8 | \
           convert(not_below_zero(rf32(w, op->b)[l], op->flags))) \
    DIRECT(cvt_##name##x2_f16x2, convert(not_below_zero(f16_to_f32(a >> 16), op->flags)) << 8 | \
           convert(not_below_zero(f16_to_f32(a & 0xffff), op->flags)))
PAIR_F8(e4m3, f32_to_e4m3)
PAIR_F8(e5m2, f32_to_e5m2)
/* and back to f16x2 */
static inline u32 f16_of_f8(u32 code, int from, u32 flags) {
    f32 x = from == TYPE_E4M3 ? e4m3_to_f32(code) : e5m2_to_f32(code);
    return f64_to_f16(limited(x, flags, 65504), RN);
}
HANDLER(cvt_f16x2_f8x2) {
    int from = op->more >> 8;
    DIRECT_LOOP(f16_of_f8(a >> 8 & 255, from, op->flags) << 16 | f16_of_f8(a & 255, from, op->flags))
}

/* cvt.pack.sat: a above b, each clamped to `width` bits of the type, above them the low bits of c when there
 * is one. */
static inline u32 packed_field(i32 x, u32 bits, bool is_signed) {
    i32 high = (i32)((1u << (bits - is_signed)) - 1), low = is_signed ? -high - 1 : 0;
    return (u32)(x > high ? high : x < low ? low : x) & ((1u << bits) - 1);
}
HANDLER(cvt_pack) {
    u32 bits = op->width;
    bool is_signed = op->flags;
    DIRECT_LOOP(packed_field((i32)a, bits, is_signed) << bits |
                packed_field(s32(w, op->b)[l], bits, is_signed) |
                (op->c < 0 ? 0 : r32(w, op->c)[l] << 2 * bits))
}
