/* Data that only moves: mov with packing and unpacking, selp and slct, addresses and windows, special
 * registers. PTX ISA "Data Movement and Conversion Instructions"; the macros are those of integer.c.
 */
#include "formats.h"

/* **** mov **** */

HANDLER(mov_b16) {
    u32 out[LANES];
    EACH out[l] = r32(w, op->a)[l] & 0xffff;
    put32(w, op->d, out, mask);
    return NEXT;
}
HANDLER(mov_b32) {
    if (op->d != op->a) put32(w, op->d, r32(w, op->a), mask);
    return NEXT;
}
HANDLER(mov_b64) {
    if (op->d != op->a) put64(w, op->d, r64(w, op->a), mask);
    return NEXT;
}
HANDLER(mov_b128) {
    if (op->d == op->a) return NEXT;
    put64(w, op->d, r64(w, op->a), mask);
    put64(w, op->d + 8 * LANES, r64(w, op->a) + LANES, mask);
    return NEXT;
}
HANDLER(widen_u32) {
    u64 out[LANES];
    EACH out[l] = r32(w, op->a)[l];
    put64(w, op->d, out, mask);
    return NEXT;
}

/* Packing: a (and b, c, e) from the low end up. */
BINARY(pack_2x8, U32, (a & 255) | (b & 255) << 8)
BINARY(pack_2x16, U32, (a & 0xffff) | b << 16)
HANDLER(pack_4x8) {
    u32 out[LANES];
    EACH out[l] = (r32(w, op->a)[l] & 255) | (r32(w, op->b)[l] & 255) << 8 | (r32(w, op->c)[l] & 255) << 16 |
                  r32(w, op->e)[l] << 24;
    put32(w, op->d, out, mask);
    return NEXT;
}
HANDLER(pack_2x32) {
    u64 out[LANES];
    EACH out[l] = r32(w, op->a)[l] | (u64)r32(w, op->b)[l] << 32;
    put64(w, op->d, out, mask);
    return NEXT;
}
HANDLER(pack_4x16) {
    u64 out[LANES];
    EACH out[l] = (r32(w, op->a)[l] & 0xffff) | (u64)(r32(w, op->b)[l] & 0xffff) << 16 |
                  (u64)(r32(w, op->c)[l] & 0xffff) << 32 | (u64)r32(w, op->e)[l] << 48;
    put64(w, op->d, out, mask);
    return NEXT;
}
HANDLER(pack_2x64) {
    put64(w, op->d, r64(w, op->a), mask);
    put64(w, op->d + 8 * LANES, r64(w, op->b), mask);
    return NEXT;
}
HANDLER(pack_4x32) {
    u64 low[LANES], high[LANES];
    EACH low[l] = r32(w, op->a)[l] | (u64)r32(w, op->b)[l] << 32;
    EACH high[l] = r32(w, op->c)[l] | (u64)r32(w, op->e)[l] << 32;
    put64(w, op->d, low, mask);
    put64(w, op->d + 8 * LANES, high, mask);
    return NEXT;
}

/* Unpacking: `width` bytes of a from bit `imm` on; of 128 bits, words. */
HANDLER(extract_b32) {
    u32 out[LANES], ones = op->width == 1 ? 255 : 0xffff;
    EACH out[l] = r32(w, op->a)[l] >> op->imm & ones;
    put32(w, op->d, out, mask);
    return NEXT;
}
HANDLER(extract_b64) {
    u32 out[LANES], ones = op->width == 2 ? 0xffff : ~0u;
    EACH out[l] = (u32)(r64(w, op->a)[l] >> op->imm) & ones;
    put32(w, op->d, out, mask);
    return NEXT;
}
HANDLER(extract_b128) {
    const u64 *half = r64(w, op->a) + (op->imm >= 64 ? LANES : 0);
    if (op->width == 8) { put64(w, op->d, half, mask); return NEXT; }
    u32 out[LANES];
    EACH out[l] = (u32)(half[l] >> (op->imm & 63));
    put32(w, op->d, out, mask);
    return NEXT;
}
/* {d, e} = a */
HANDLER(unpack_2x16) {
    u32 low[LANES], high[LANES];
    EACH low[l] = r32(w, op->a)[l] & 0xffff, high[l] = r32(w, op->a)[l] >> 16;
    put32(w, op->d, low, mask);
    put32(w, op->e, high, mask);
    return NEXT;
}
HANDLER(unpack_2x32) {
    u32 low[LANES], high[LANES];
    EACH low[l] = (u32)r64(w, op->a)[l], high[l] = (u32)(r64(w, op->a)[l] >> 32);
    put32(w, op->d, low, mask);
    put32(w, op->e, high, mask);
    return NEXT;
}

/* **** selp: c ? a : b; slct: c >= 0 ? a : b **** */

#define SELECT(name, reg, put, choice) \
    HANDLER(name) { \
        reg out[LANES]; \
        const reg *a = (const reg *)(w->regs + op->a), *b = (const reg *)(w->regs + op->b); \
        EACH out[l] = choice ? a[l] : b[l]; \
        put(w, op->d, out, mask); \
        return NEXT; \
    }
SELECT(selp_b32, u32, put32, (pred(w, op->c) >> l & 1))
SELECT(selp_b64, u64, put64, (pred(w, op->c) >> l & 1))
SELECT(slct_b32_s32, u32, put32, s32(w, op->c)[l] >= 0)
SELECT(slct_b64_s32, u64, put64, s32(w, op->c)[l] >= 0)
/* a NaN takes b; flags 1 (ftz): a negative subnormal is -0, which takes a */
static inline bool not_negative(f32 x, u32 ftz) { return (ftz ? flush(x) : x) >= 0; }
SELECT(slct_b32_f32, u32, put32, not_negative(rf32(w, op->c)[l], op->flags))
SELECT(slct_b64_f32, u64, put64, not_negative(rf32(w, op->c)[l], op->flags))

/* set.f16x2 and its like: two constants, low half where predicate a holds and high half where b does. */
HANDLER(select_pair) {
    u32 out[LANES], low = (u32)op->imm & 0xffff, high = (u32)op->imm & 0xffff0000;
    EACH out[l] = (pred(w, op->a) >> l & 1 ? low : 0) | (pred(w, op->b) >> l & 1 ? high : 0);
    put32(w, op->d, out, mask);
    return NEXT;
}

/* **** addresses **** */

/* The address of a variable in its own space: shared ones carry the CTA's rank, the others are as they
 * stand. */
static inline u64 symbol_address(const Warp *w, const Op *op) {
    return (u64)op->imm + (op->space == SHARED ? (u64)w->cta->rank << RANK_SHIFT : 0);
}
HANDLER(symbol) {
    u32 out[LANES];
    EACH out[l] = (u32)symbol_address(w, op);
    put32(w, op->d, out, mask);
    return NEXT;
}
HANDLER(symbol_wide) {
    u64 out[LANES];
    EACH out[l] = symbol_address(w, op);
    put64(w, op->d, out, mask);
    return NEXT;
}

static inline u64 window_of(int space) {
    return space == SHARED || space == SHARED_CLUSTER ? SHARED_WINDOW : space == LOCAL ? LOCAL_WINDOW :
           space == PARAM ? PARAM_WINDOW : 0;
}

/* cvta: an address of a space as a generic one, and back (flags 1). */
HANDLER(cvta) {
    u64 out[LANES], window = window_of(op->space);
    EACH out[l] = op->flags ? r64(w, op->a)[l] - window : r64(w, op->a)[l] + window;
    put64(w, op->d, out, mask);
    return NEXT;
}

/* isspacep: whether a generic address is in a space's window; shared::cta is this CTA's part of the
 * cluster's. */
HANDLER(isspacep) {
    u64 window = window_of(op->space), own = (u64)w->cta->rank;
    u32 bits = 0;
    EACH {
        u64 a = r64(w, op->a)[l];
        bool in = a - window < WINDOW_BYTES;
        if (op->space == SHARED) in = in && (a - window) >> RANK_SHIFT == own;
        if (op->space == GLOBAL) in = a < PARAM_WINDOW;
        if (op->space == CONST) in = false;   /* constants lie in global memory here */
        bits |= (u32)in << l;
    }
    put_pred(w, op->d, bits, mask);
    return NEXT;
}

/* **** special registers that are read when needed: ptx/emulator/lowering.py READ_AT_RUN in its order **** */

enum { CLOCK, CLOCK64, CLOCK_HI, GLOBALTIMER, GLOBALTIMER_LO, GLOBALTIMER_HI, NTID, NCTAID = NTID + 3,
    NCLUSTERID = NCTAID + 3, CLUSTER_NCTAID = NCLUSTERID + 3, CLUSTER_NCTARANK = CLUSTER_NCTAID + 3, NWARPID,
    NSMID, GRIDID, IS_EXPLICIT_CLUSTER, TOTAL_SMEM_SIZE, DYNAMIC_SMEM_SIZE, AGGR_SMEM_SIZE,
    RESERVED_SMEM_BEGIN, RESERVED_SMEM_END, RESERVED_SMEM_CAP };

static u64 special_value(const Machine *m, const Warp *w, i32 which) {
    const Launch *a = &m->launch;
    if (which >= NTID && which < NTID + 3) return a->block[which - NTID];
    if (which >= NCTAID && which < NCTAID + 3) return a->grid[which - NCTAID];
    if (which >= CLUSTER_NCTAID && which < CLUSTER_NCTAID + 3) return a->cluster[which - CLUSTER_NCTAID];
    if (which >= NCLUSTERID && which < NCLUSTERID + 3)
        return a->grid[which - NCLUSTERID] / a->cluster[which - NCLUSTERID];
    switch (which) {
        case CLOCK: case CLOCK64: case GLOBALTIMER: case GLOBALTIMER_LO: return m->steps;
        case CLOCK_HI: case GLOBALTIMER_HI: return m->steps >> 32;
        case CLUSTER_NCTARANK: return (u64)w->cta->cluster->size;
        case NWARPID: return 64;
        case NSMID: return a->sm_count;
        case GRIDID: return 1;
        case IS_EXPLICIT_CLUSTER: return w->cta->cluster->size > 1;
        case TOTAL_SMEM_SIZE: case AGGR_SMEM_SIZE: return a->shared_bytes;
        case DYNAMIC_SMEM_SIZE: return a->shared_bytes - a->static_bytes;
        case RESERVED_SMEM_END: case RESERVED_SMEM_CAP: return SHARED_BASE;
        default: return 0;
    }
}
/* flags 1: the destination is 64 bits wide */
HANDLER(special) {
    u64 value = special_value(m, w, op->more), wide[LANES];
    u32 out[LANES];
    EACH wide[l] = value, out[l] = (u32)value;
    if (op->flags) put64(w, op->d, wide, mask);
    else put32(w, op->d, out, mask);
    return NEXT;
}

/* createpolicy: the class `imm` and sixteenths of the fraction a, as ptxas makes them of constants. */
HANDLER(createpolicy) {
    u64 out[LANES];
    EACH {
        f32 sixteenths = rintf(rf32(w, op->a)[l] * 16);
        u64 n = sixteenths >= 1 ? (sixteenths <= 16 ? (u64)sixteenths - 1 : 15) : 0;
        out[l] = ((u64)op->imm | n) << 52;
    }
    put64(w, op->d, out, mask);
    return NEXT;
}

/* nanosleep: others go first. */
HANDLER(nanosleep) {
    (void)m, (void)w, (void)op, (void)mask;
    return YIELD;
}
