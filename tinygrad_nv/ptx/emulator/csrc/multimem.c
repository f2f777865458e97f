/* multimem: addresses of a multicast object, which are those of one allocation in each of several GPUs.
 *
 * Ops as for atomics (atomics.c): `more` is operation | type << 8, the list has the registers. What is read of the
 * GPUs is added up in an order that the seed chooses: the switch does not say in which it does.
 */
#include "core.h"

enum { F32_SUMS = 32 };  /* Op.flags: .acc::f32 */

/* Where the bytes of a lane lie in each GPU; 0: nowhere (reported). */
static i32 multicast_places(Machine *m, Warp *w, const Op *op, int lane, u64 address, u32 bytes, Place *out) {
    for (i32 i = 0; i < m->launch.multicast_count; i++) {
        const Multicast *each = &m->launch.multicasts[i];
        if (!within(address - each->base, bytes, each->size)) continue;
        if (address % bytes) {
            report(m, MISALIGNED, op, w, lane, "multimem of %u bytes at 0x%llx, which is not a multiple of it", bytes,
                   (ull)address);
            return 0;
        }
        for (i32 j = 0; j < each->count; j++) {
            u64 member = each->members[j] + (address - each->base);
            if (find_global(m, member, bytes, &out[j]) == FOUND) continue;
            report_global(m, w, op, lane, member, bytes, "multimem");
            return 0;
        }
        return each->count;
    }
    report(m, OUT_OF_BOUNDS, op, w, lane, "multimem of %u bytes at 0x%llx, which is no address of a multicast object",
           bytes, (ull)address);
    return 0;
}

/* One access of a lane to one GPU's bytes, before it is made (reads) or after (writes). */
static void multimem_order(Machine *m, Warp *w, const Op *op, const Place *p, bool reads) {
    if (!(op->flags & STRONG)) return;
    clock_location(m, w, p->region, p->offset, reads, !reads, reads && op->flags & ACQUIRE, !reads && op->flags & RELEASE,
                   scope_of(op));
}

static void multimem_enter(Machine *m, Warp *w, const Op *op, int lane, const Place *p, u32 bytes, int kind) {
    Who who = thread_of(w, op, lane);
    who.strong = (op->flags & STRONG) != 0, who.scope = (i8)scope_of(op);
    enter_access(m, &who, p->region, p->offset, bytes, kind);
}

/* Element `i` of all GPUs, in one. */
static u64 of_all_gpus(Machine *m, const Op *op, const Place *places, i32 count, i32 i) {
    int operation = op->more & 255, type = op->more >> 8;
    i32 first = (i32)(random_u64(m) % (u64)count);
    u64 made = 0, one;
    f32 low = 0, high = 0;
    bool bfloat = type == BFLOAT_PAIR, wide = op->flags & F32_SUMS;
    for (i32 j = 0; j < count; j++) {
        one = 0;
        memcpy(&one, places[(first + j) % count].host + i * op->width, op->width);
        if (wide) {
            f32 a = bfloat ? bf16_to_f32(one & 0xffff) : f16_to_f32(one & 0xffff);
            f32 b = bfloat ? bf16_to_f32(one >> 16 & 0xffff) : f16_to_f32(one >> 16 & 0xffff);
            low = j ? low + a : a, high = j ? high + b : b;
        } else made = j ? combine(operation, type, op->width, made, one, false) : one;
    }
    if (!wide) return made;
    return bfloat ? f32_to_bf16(low) | f32_to_bf16(high) << 16 : f32_to_f16(low) | f32_to_f16(high) << 16;
}

HANDLER(multimem_ld_reduce) {
    u64 address[LANES], made[LANES][8] = {{0}};
    const i32 *list = m->launch.lists + op->list;
    u32 bytes = (u32)op->width * op->vector;
    addresses(w, op, address);
    ACTIVE {
        Place places[MOST_PEERS];
        i32 count = multicast_places(m, w, op, l, address[l], bytes, places);
        for (i32 j = 0; j < count; j++) {
            multimem_order(m, w, op, &places[j], true);
            multimem_enter(m, w, op, l, &places[j], bytes, READ);
        }
        for (i32 i = 0; count && i < op->vector; i++) made[l][i] = of_all_gpus(m, op, places, count, i);
    }
    put_old(w, op, list, made, mask);
    return op->flags & STRONG ? YIELD : NEXT;
}

/* multimem.st, and multimem.red, which changes what is there. */
HANDLER(multimem_write) {
    u64 address[LANES];
    const i32 *list = m->launch.lists + op->list;
    u32 bytes = (u32)op->width * op->vector;
    int operation = op->more & 255, type = op->more >> 8;
    addresses(w, op, address);
    ACTIVE {
        Place places[MOST_PEERS];
        i32 count = multicast_places(m, w, op, l, address[l], bytes, places);
        for (i32 j = 0; j < count; j++) {
            multimem_enter(m, w, op, l, &places[j], bytes, operation == EXCH ? WRITE : ATOMIC);
            for (i32 i = 0; i < op->vector; i++) {
                u64 before = 0, value = operand_of(w, list[i], op->width, l);
                memcpy(&before, places[j].host + i * op->width, op->width);
                value = combine(operation, type, op->width, before, value, false);
                memcpy(places[j].host + i * op->width, &value, op->width);
            }
            multimem_order(m, w, op, &places[j], false);
        }
    }
    if (!(op->flags & STRONG)) return NEXT;
    happened(m, w->cta->cluster);
    return YIELD;
}
