/* Bits and bytes of integers: counting, fields, permutations, dot products of bytes.
 * PTX ISA "Integer Arithmetic Instructions" from popc on, and prmt. The macros are those of integer.c.
 */
#include "core.h"

/* **** counting **** */

COUNTING(popc_b32, u32, u32, popcount(a))
COUNTING(popc_b64, u64, u64, __builtin_popcountll(a))
COUNTING(clz_b32, u32, u32, a ? __builtin_clz(a) : 32)
COUNTING(clz_b64, u64, u64, a ? __builtin_clzll(a) : 64)

/* bfind: the place of the highest bit that is not a copy of the sign; flags 1: the shift that brings it to
 * the top. */
static inline u32 find_high(u64 x, u32 width, u32 as_shift) {
    if (!x) return ~0u;
    u32 at = 63 - (u32)__builtin_clzll(x);
    return as_shift ? width - 1 - at : at;
}
COUNTING(bfind_u32, u32, u32, find_high(a, 32, op->flags))
COUNTING(bfind_u64, u64, u64, find_high(a, 64, op->flags))
COUNTING(bfind_s32, i32, u32, find_high((u32)(a < 0 ? ~a : a), 32, op->flags))
COUNTING(bfind_s64, i64, u64, find_high((u64)(a < 0 ? ~a : a), 64, op->flags))

/* fns: the n-th set bit of a counted from `base` upwards (n > 0) or downwards (n < 0), -1 when there is
 * none; n = 0 asks for `base` itself. */
static inline u32 find_nth(u32 a, u32 base, i32 n) {
    if (base > 31) return ~0u;
    if (n == 0) return a >> base & 1 ? base : ~0u;
    u32 left = n < 0 ? 0 - (u32)n : (u32)n;
    for (i32 at = (i32)base; at >= 0 && at < 32; at += n < 0 ? -1 : 1)
        if ((a >> at & 1) && --left == 0) return (u32)at;
    return ~0u;
}
TERNARY(fns_b32, U32, find_nth(a, b, (i32)c))

static inline u64 reverse64(u64 x) {
    x = (x >> 1 & 0x5555555555555555ull) | (x & 0x5555555555555555ull) << 1;
    x = (x >> 2 & 0x3333333333333333ull) | (x & 0x3333333333333333ull) << 2;
    x = (x >> 4 & 0x0f0f0f0f0f0f0f0full) | (x & 0x0f0f0f0f0f0f0f0full) << 4;
    return __builtin_bswap64(x);
}
UNARY(brev_b32, U32, reverse64(a) >> 32)
UNARY(brev_b64, U64, reverse64(a))

/* **** fields: position and length are taken modulo 256 of 32 bits, whole of 64, as an H100 does **** */

/* bfe of a value of `width` bits: the field [at, at + length); signed fields, and bits beyond the word,
 * repeat the highest bit that exists. */
static inline u64 field_of(u64 a, u32 at, u32 length, u32 width, bool is_signed) {
    if (width == 32) at &= 255, length &= 255;
    u32 top = (u64)at + length < width ? at + length - 1 : width - 1;
    u64 sign = is_signed && length ? a >> top & 1 : 0;
    u64 kept = at < width ? a >> at : 0;
    u32 have = length && at < width ? top - at + 1 : 0;
    u64 ones = have > 63 ? ~0ull : (1ull << have) - 1;
    return (kept & ones) | (sign ? ~ones : 0);
}
#define FIELDS_(name, reg, put, width, is_signed) \
    HANDLER(name) { \
        reg out[LANES]; \
        const reg *a = (const reg *)(w->regs + op->a); \
        EACH out[l] = (reg)field_of(a[l], r32(w, op->b)[l], r32(w, op->c)[l], width, is_signed); \
        put(w, op->d, out, mask); \
        return NEXT; \
    }
FIELDS_(bfe_u32, u32, put32, 32, false)
FIELDS_(bfe_s32, u32, put32, 32, true)
FIELDS_(bfe_u64, u64, put64, 64, false)
FIELDS_(bfe_s64, u64, put64, 64, true)

/* bfi: the low bits of a go into b (fields: a, b, c position, e length). */
static inline u64 insert_field(u64 a, u64 b, u32 at, u32 length, u32 width) {
    if (width == 32) at &= 255, length &= 255;
    if (at >= width || !length) return b;
    u64 ones = (length > 63 ? ~0ull : (1ull << length) - 1) << at;
    return (b & ~ones) | (a << at & ones);
}
#define INSERT(name, reg, put, width) \
    HANDLER(name) { \
        reg out[LANES]; \
        EACH { \
            OPERAND(reg, reg, a, a) OPERAND(reg, reg, b, b) \
            out[l] = (reg)insert_field(a, b, r32(w, op->c)[l], r32(w, op->e)[l], width); \
        } \
        put(w, op->d, out, mask); \
        return NEXT; \
    }
INSERT(bfi_b32, u32, put32, 32)
INSERT(bfi_b64, u64, put64, 64)

/* szext: the low b bits of a, extended by sign or zero. */
static inline u32 extend(u32 a, u32 bits, bool is_signed) {
    if (bits == 0) return 0;
    if (bits > 31) return a;
    u32 ones = (1u << bits) - 1, sign = is_signed ? a >> (bits - 1) & 1 : 0;
    return (a & ones) | (sign ? ~ones : 0);
}
BINARY(szext_clamp_u32, U32, extend(a, b, false))
BINARY(szext_clamp_s32, U32, extend(a, b, true))
BINARY(szext_wrap_u32, U32, extend(a, b & 31, false))
BINARY(szext_wrap_s32, U32, extend(a, b & 31, true))

/* bmsk: b ones from position a on. */
static inline u32 ones_from(u32 at, u32 length) {
    if (at > 31) return 0;
    return (length > 31 ? ~0u : (1u << length) - 1) << at;
}
BINARY(bmsk_clamp_b32, U32, ones_from(a, b))
BINARY(bmsk_wrap_b32, U32, ones_from(a & 31, b & 31))

/* **** bytes **** */

/* prmt: bytes of b:a chosen by the nibbles of a selector; its bit 3 asks for the sign of the byte in all
 * eight bits. */
static inline u32 permute(u32 a, u32 b, u32 selector) {
    u64 bytes = (u64)b << 32 | a;
    u32 out = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 nibble = selector >> 4 * i & 15, byte = (u32)(bytes >> 8 * (nibble & 7)) & 255;
        out |= (nibble & 8 ? (0 - (byte >> 7)) & 255 : byte) << 8 * i;
    }
    return out;
}
TERNARY(prmt_b32, U32, permute(a, b, c))
/* the modes of prmt as selectors, by the two low bits of c: op->imm holds four of them, 16 bits each */
TERNARY(prmt_mode_b32, U32, permute(a, b, (u32)((u64)op->imm >> 16 * (c & 3) & 0xffff)))

/* dp4a: c plus the dot product of four bytes each. dp2a: of two halves of a and the lower or upper two bytes
 * of b. */
#define BYTE(type, x, i) ((i32)(type)((x) >> 8 * (i)))
#define HALF(type, x, i) ((i32)(type)((x) >> 16 * (i)))
#define DOT4(ta, tb) \
    (c + (u32)(BYTE(ta, a, 0) * BYTE(tb, b, 0)) + (u32)(BYTE(ta, a, 1) * BYTE(tb, b, 1)) + \
     (u32)(BYTE(ta, a, 2) * BYTE(tb, b, 2)) + (u32)(BYTE(ta, a, 3) * BYTE(tb, b, 3)))
#define DOT2(ta, tb, from) \
    (c + (u32)(HALF(ta, a, 0) * BYTE(tb, b, from)) + (u32)(HALF(ta, a, 1) * BYTE(tb, b, from + 1)))
#define DOTS(sa, sb, ta, tb, wide) \
    TERNARY(dp4a_##sa##_##sb, U32, DOT4(ta, tb)) \
    TERNARY(dp2a_lo_##sa##_##sb, U32, DOT2(wide, tb, 0)) \
    TERNARY(dp2a_hi_##sa##_##sb, U32, DOT2(wide, tb, 2))
DOTS(s32, s32, i8, i8, i16)
DOTS(s32, u32, i8, u8, i16)
DOTS(u32, s32, u8, i8, u16)
DOTS(u32, u32, u8, u8, u16)
#undef BYTE
#undef HALF
