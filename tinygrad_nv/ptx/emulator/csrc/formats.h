/* Floating-point formats: f16, bf16, tf32, e4m3 and e5m2 to and from f32 and f64, every rounding, each
 * result rounded once.
 *
 * Protocol: codes are the low bits of a u32. NaNs come out as PTX's canonical ones: 0x7fffffff (f32), 0x7fffe000
 * (tf32), 0x7fff (f16, bf16), 0x7f (e4m3, e5m2). What is rounded twice is rounded to odd the first time (Boldo and
 * Melquiond), in f64, which has at least two bits more than any format here: then the second rounding is
 * that of the exact value. All functions are free of branches, so that loops over lanes become vector code.
 */
#ifndef EMULATOR_FORMATS_H
#define EMULATOR_FORMATS_H

#include "core.h"
#include <math.h>

enum { RN, RZ, RM, RP, RNA };   /* to nearest even, to zero, down, up, to nearest with ties away from zero */
enum { NAN_F32 = 0x7fffffff, NAN_F16 = 0x7fff, NAN_F8 = 0x7f };
enum { OOB_NAN = 0x7ff7 };   /* each 16 bits that TMA fills in beyond a tensor, as an H100 does it */
enum { MAX_F16 = 0x7bff, MAX_BF16 = 0x7f7f, MAX_TF32 = 0x3fbff, MAX_E4M3 = 0x7e, MAX_E5M2 = 0x7b };

static inline u32 as_u32(f32 x) { u32 y; memcpy(&y, &x, 4); return y; }
static inline f32 as_f32(u32 x) { f32 y; memcpy(&y, &x, 4); return y; }
static inline u64 as_u64(f64 x) { u64 y; memcpy(&y, &x, 8); return y; }
static inline f64 as_f64(u64 x) { f64 y; memcpy(&y, &x, 8); return y; }

/* **** to f32: exact **** */

static inline f32 bf16_to_f32(u32 x) { return as_f32(x << 16); }

/* A code of `mantissa` and fewer than 8 exponent bits, without its sign, as if it were finite. Subnormals
 * lack a leading one: it is put in and taken away again. */
static inline f32 widened(u32 code, int exponent, int mantissa) {
    u32 bits = code << (23 - mantissa), rebias = (u32)(128 - (1 << (exponent - 1))) << 23, one = 1u << 23;
    return bits < one ? as_f32(bits + rebias + one) - as_f32(rebias + one) : as_f32(bits + rebias);
}
static inline f32 f16_to_f32(u32 x) {
    u32 finite = as_u32(widened(x & 0x7fff, 5, 10)), rest = (x & 0x7fff) << 13;
    return as_f32(((x & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : finite) | (x & 0x8000) << 16);
}
static inline f32 e5m2_to_f32(u32 x) { return f16_to_f32(x << 8); }
static inline f32 e4m3_to_f32(u32 x) {
    u32 finite = as_u32(widened(x & 0x7f, 4, 3));
    return as_f32(((x & 0x7f) == 0x7f ? NAN_F32 : finite) | (x & 0x80) << 24);
}

/* What the tensor core reads of an f32 as tf32: the upper 19 bits. */
static inline f32 tf32_to_f32(u32 x) { return as_f32(x & 0xffffe000); }

/* **** from f32, to nearest even: the ways most kernels take **** */

static inline u32 f32_to_bf16(f32 x) {
    u32 bits = as_u32(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : NAN_F16;
}

/* The code of |x| in a format of fewer than 8 exponent bits, as if its exponents went on: what is too large
 * is left to the caller. Subnormals are rounded by an adder, whose last place is theirs. */
static inline u32 narrowed(f32 x, int exponent, int mantissa) {
    u32 size = as_u32(x) & 0x7fffffff, rebias = (u32)(128 - (1 << (exponent - 1))) << 23;
    u32 lost = (u32)(23 - mantissa), magic = rebias + ((u32)(24 - mantissa) << 23);
    u32 small = as_u32(as_f32(size) + as_f32(magic)) - magic;
    u32 rounded = (size - rebias + (1u << (lost - 1)) - 1 + (size >> lost & 1)) >> lost;
    return size < rebias + (1u << 23) ? small : rounded;
}
static inline u32 f32_to_f16(f32 x) {
    u32 code = narrowed(x, 5, 10);
    code = code > 0x7c00 ? 0x7c00 : code;
    return x == x ? code | (as_u32(x) >> 16 & 0x8000) : NAN_F16;
}
/* to 8 bits, where what is too large becomes the largest finite number (.satfinite) */
static inline u32 f32_to_e4m3(f32 x) {
    u32 code = narrowed(x, 4, 3);
    code = code > MAX_E4M3 ? MAX_E4M3 : code;
    return x == x ? code | (as_u32(x) >> 24 & 0x80) : NAN_F8;
}
static inline u32 f32_to_e5m2(f32 x) {
    u32 code = narrowed(x, 5, 2);
    code = code > MAX_E5M2 ? MAX_E5M2 : code;
    return x == x ? code | (as_u32(x) >> 24 & 0x80) : NAN_F8;
}

/* **** from f64, every rounding **** */

/* The code of `x`, not NaN, in a format of `exponent` and `mantissa` bits with subnormals, whose highest
 * finite code is `largest`. What is too large becomes the code above it, or stays at it where the rounding
 * says so. */
static inline u32 encode(f64 x, int exponent, int mantissa, u32 largest, int mode) {
    u64 bits = as_u64(x), fraction = bits & 0xfffffffffffffull, field = bits >> 52 & 0x7ff, sign = bits >> 63;
    u64 significand = field ? fraction | 1ull << 52 : fraction != 0;   /* f64 subnormals: not zero */
    i64 e = (i64)field - 1023 + (1 << (exponent - 1)) - 1;
    u64 low = (u64)(52 - mantissa) + (u64)(e < 1 ? 1 - e : 0), shift = low > 60 ? 60 : low;
    u64 q = significand >> shift, rest = significand & ((1ull << shift) - 1), half = 1ull << (shift - 1);
    u64 nearest = mode == RNA ? rest >= half : (rest > half) | ((rest == half) & (q & 1));
    u64 directed = (rest != 0) & (mode == RM ? sign : mode == RP ? !sign : 0);
    u64 code = q + (mode == RN || mode == RNA ? nearest : directed) + ((u64)(e < 1 ? 0 : e - 1) << mantissa);
    u64 stays = field != 0x7ff && (mode == RZ || (mode == RM && !sign) || (mode == RP && sign));
    u64 top = (u64)largest + !stays;
    return (u32)((code > largest ? top : code) | sign << (exponent + mantissa));
}

static inline u32 f64_to_f16(f64 x, int mode) { return x == x ? encode(x, 5, 10, MAX_F16, mode) : NAN_F16; }
static inline u32 f64_to_bf16(f64 x, int mode) { return x == x ? encode(x, 8, 7, MAX_BF16, mode) : NAN_F16; }
/* tf32 as a word of f32 whose low 13 bits are zero */
static inline u32 f64_to_tf32(f64 x, int mode) {
    return x == x ? encode(x, 8, 10, MAX_TF32, mode) << 13 : (u32)NAN_F32 & ~0x1fffu;
}

/* f64 to f32; NaNs stay what the host makes of them. */
static inline f32 f64_to_f32(f64 x, int mode) {
    f32 y = (f32)x;
    u32 bits = as_u32(y), outward = bits >> 31 ? ~0u : 1;   /* +outward: the next value up */
    u32 above = (f64)y > x, below = (f64)y < x, larger = bits >> 31 ? below : above;
    u32 down = bits - above * outward, up = bits + below * outward;
    u32 out = mode == RZ ? bits - larger : mode == RM ? down : mode == RP ? up : bits;
    return as_f32(out);
}

/* **** f64 operations rounded to odd (finite results; others are as the host makes them) **** */

/* `x`, the nearest to a value that differs from it by something of the sign of `error` (0: by nothing), to
 * odd. */
static inline f64 to_odd(f64 x, f64 error) {
    u64 bits = as_u64(x);
    u64 inexact = (error > 0 || error < 0) & !(bits & 1) & (fabs(x) < INFINITY);
    u64 outward = (error > 0) == (x > 0);
    return as_f64(bits + (outward ? inexact : 0 - inexact));
}

static inline f64 odd_sum(f64 a, f64 b) {
    f64 s = a + b, t = s - a;
    return to_odd(s, (a - (s - t)) + (b - t));
}

static inline f64 odd_quotient(f64 a, f64 b) {
    f64 q = a / b, rest = fma(-q, b, a);
    return to_odd(q, b < 0 ? -rest : rest);
}

static inline f64 odd_root(f64 x) {
    f64 s = sqrt(x);
    return to_odd(s, fma(-s, s, x));
}

/* f64 to f32, to odd. */
static inline f32 f64_to_f32_odd(f64 x) {
    f32 y = (f32)x;
    u32 bits = as_u32(y), even = ~bits & 1;
    u32 short_of = fabs((f64)y) < fabs(x), beyond = fabs((f64)y) > fabs(x);
    return as_f32(bits + (even & short_of) - (even & beyond));
}

/* An integer `size`, or minus that, as f64, to odd. */
static inline f64 odd_integer(u64 size, bool negative) {
    int shift = size >> 53 ? 11 - __builtin_clzll(size) : 0;
    u64 kept = size >> shift, lost = size & ((1ull << shift) - 1);
    f64 x = (f64)(i64)(kept | (lost != 0)) * (f64)(1ull << shift);
    return negative ? -x : x;
}

/* 2^x for results in the range of f32, to about 50 bits: a series about the nearest integer. */
static inline f64 power_of_two(f64 x) {
    f64 clamped = x < -300 ? -300 : x > 300 ? 300 : x, shifted = clamped + 0x1.8p52;
    f64 y = (clamped - (shifted - 0x1.8p52)) * 0x1.62e42fefa39efp-1, sum = 1.0 / 39916800;
    sum = sum * y + 1.0 / 3628800, sum = sum * y + 1.0 / 362880, sum = sum * y + 1.0 / 40320;
    sum = sum * y + 1.0 / 5040, sum = sum * y + 1.0 / 720, sum = sum * y + 1.0 / 120;
    sum = sum * y + 1.0 / 24, sum = sum * y + 1.0 / 6, sum = sum * y + 1.0 / 2;
    sum = sum * y + 1, sum = sum * y + 1;
    return x == x ? as_f64(as_u64(sum) + (as_u64(shifted) << 52)) : x;   /* the integer is in the low bits */
}

/* **** flushes and canonical NaNs of f32 **** */

static inline f32 flush(f32 x) {
    u32 bits = as_u32(x);
    return as_f32(bits & 0x7f800000 ? bits : bits & 0x80000000);
}
static inline u32 canonical(f32 x) { return x == x ? as_u32(x) : (u32)NAN_F32; }

#endif
