/* ld, st, prefetch, discard: elements between memory and registers.
 *
 * Ops: `a`, `imm`, `wide`, `space` the address; `width` bytes of an element, `vector` elements, whose
 * places are the list (one: d for loads, b for stores; -1: not wanted). `more`: bytes of the
 * registers (2, 4, 8 or 16). Strong accesses (.relaxed, .acquire, .release, .volatile) order threads
 * through the location's clock, and yield, so that a thread which spins lets the others go on.
 */
#include <time.h>

#include "core.h"

enum { SIGNED = 1, STRONG = 2, ACQUIRE = 4, RELEASE = 8, SYSTEM_SCOPE = 16, CTA_SCOPE = 64, CLUSTER_SCOPE = 128,
       NONCOHERENT = 256 };

static int scope_of(const Op *op) {
    return op->flags & SYSTEM_SCOPE ? SCOPE_SYSTEM : op->flags & CTA_SCOPE ? SCOPE_CTA
        : op->flags & CLUSTER_SCOPE ? SCOPE_CLUSTER : SCOPE_GPU;
}

static const i32 *items_of(const Machine *m, const Op *op, const i32 *single) {
    return op->count ? m->launch.lists + op->list : single;
}

/* The synchronisation of a strong access: reads before it acquire, writes after it release. Lanes in a row
 * at the same location do it once. */
static void synchronise(Machine *m, Warp *w, const Op *op, const Reach *reach, bool reads, bool writes) {
    Region *last = NULL;
    u64 at = 0;
    EACH {
        if (!(reach->good >> l & 1) || !reach->region[l]) continue;
        if (reach->region[l] == last && reach->offset[l] == at) continue;
        last = reach->region[l], at = reach->offset[l];
        bool acquire = !writes && op->flags & ACQUIRE, release = writes && op->flags & RELEASE;
        clock_location(m, w, last, at, reads, writes, acquire, release, scope_of(op));
    }
}

/* **** loads **** */

static inline u32 extended(u32 x, int bits, const Op *op) {
    if (op->flags & SIGNED) x = (u32)((i32)(x << (32 - bits)) >> (32 - bits));
    return op->more == 2 ? x & 0xffff : x;
}

/* Element `at` bytes into what each lane reads, to a register. */
static void load_element(Warp *w, const Op *op, i32 place, u8 *const *host, u32 at, u32 mask) {
    u32 x[LANES];
    u64 y[LANES], z[LANES];
    switch (op->width) {
    case 1: EACH x[l] = extended(host[l][at], 8, op); break;
    case 2: EACH { u16 v; memcpy(&v, host[l] + at, 2); x[l] = extended(v, 16, op); } break;
    case 4: EACH memcpy(&x[l], host[l] + at, 4); break;
    case 8: EACH memcpy(&y[l], host[l] + at, 8); break;
    default: EACH memcpy(&y[l], host[l] + at, 8), memcpy(&z[l], host[l] + at + 8, 8);
    }
    if (op->width < 8 && op->more < 8) { put32(w, place, x, mask); return; }
    if (op->width < 8) EACH y[l] = op->flags & SIGNED ? (u64)(i64)(i32)x[l] : x[l];
    put64(w, place, y, mask);
    if (op->width == 16) put64(w, place + 8 * LANES, z, mask);
}

enum { LOOKS = 32, REST_NS = 50000 };

/* A thread asks for what another process may write. Without news it sleeps between its looks. */
static void look_outside(Machine *m, Warp *w, u64 address, const u8 *host, u32 bytes) {
    u64 value = 0;
    memcpy(&value, host, bytes < 8 ? bytes : 8);
    if (w->polled != address || w->poll_changes != value) w->polls = 0;
    w->polled = address, w->poll_changes = value;
    if (++w->polls < LOOKS) return;
    nanosleep(&(struct timespec){0, REST_NS}, NULL);
    m->rested = true;
}

HANDLER(ld) {
    u64 address[LANES];
    Reach reach;
    u32 bytes = (u32)op->width * op->vector;
    const i32 *items = items_of(m, op, &op->d);
    addresses(w, op, address);
    reach_warp(m, w, op, address, mask, bytes, bytes, READ, &reach);
    bool strong = op->flags & STRONG;
    if (strong) {
        synchronise(m, w, op, &reach, true, false);
        i32 first = lowest(mask);
        if (m->launch.peers) peers_poll(m, w, op, address[first]);
        else if ((reach.good >> first & 1) && reach.region[first] && reach.region[first]->outside)
            look_outside(m, w, address[first], reach.host[first], bytes);
    }
    if (m->launch.check) {
        Who who = thread_of(w, op, 0);
        who.strong = strong, who.scope = (i8)scope_of(op), who.noncoherent = (op->flags & NONCOHERENT) != 0;
        for (u32 l = 0; l < LANES; l++) {
            if (!(reach.good >> l & 1)) continue;
            who.lane = (i32)l;
            enter_access(m, &who, reach.region[l], reach.offset[l], bytes, READ);
        }
    }
    for (int i = 0; i < op->vector; i++)
        if (items[i] >= 0) load_element(w, op, items[i], reach.host, (u32)i * op->width, mask);
    count_access(m, op, address, &reach, bytes, READ);
    if (strong) __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return strong ? YIELD : NEXT;
}

/* ld.param at a constant offset: the same for all lanes. */
HANDLER(ld_param) {
    u32 bytes = (u32)op->width * op->vector;
    bool fits = within((u64)op->imm, bytes, (u64)m->launch.parameter_bytes) && (u64)op->imm % bytes == 0;
    if (!fits) return op_ld(m, w, op, mask);
    const i32 *items = items_of(m, op, &op->d);
    u8 *host[LANES];
    EACH host[l] = (u8 *)m->launch.parameters + op->imm;
    for (int i = 0; i < op->vector; i++)
        if (items[i] >= 0) load_element(w, op, items[i], host, (u32)i * op->width, mask);
    return NEXT;
}

/* **** stores **** */

/* Register `place` as bytes at `at` of each lane's row. */
static void gather_element(const Warp *w, const Op *op, i32 place, u8 rows[LANES][64], u32 at) {
    if (op->more < 8) {
        const u32 *x = r32(w, place);
        switch (op->width) {
        case 1: EACH rows[l][at] = (u8)x[l]; return;
        case 2: EACH { u16 v = (u16)x[l]; memcpy(rows[l] + at, &v, 2); } return;
        default: EACH memcpy(rows[l] + at, &x[l], 4); return;
        }
    }
    const u64 *y = r64(w, place);
    /* rows have room, and later elements come after */
    if (op->width <= 8) EACH memcpy(rows[l] + at, &y[l], 8);
    else EACH memcpy(rows[l] + at, &y[l], 8), memcpy(rows[l] + at + 8, &y[l + LANES], 8);
}

static inline void copy_row(u8 *to, const u8 *from, u32 bytes) {
    switch (bytes) {
    case 1: *to = *from; return;
    case 2: memcpy(to, from, 2); return;
    case 4: memcpy(to, from, 4); return;
    case 8: memcpy(to, from, 8); return;
    case 16: memcpy(to, from, 16); return;
    default: memcpy(to, from, bytes);
    }
}

HANDLER(st) {
    u64 address[LANES];
    Reach reach;
    u8 rows[LANES][64];
    u32 bytes = (u32)op->width * op->vector;
    const i32 *items = items_of(m, op, &op->b);
    addresses(w, op, address);
    reach_warp(m, w, op, address, mask, bytes, bytes, WRITE, &reach);
    for (int i = 0; i < op->vector; i++) gather_element(w, op, items[i], rows, (u32)i * op->width);
    bool strong = op->flags & STRONG;
    Who who = thread_of(w, op, 0);
    who.strong = strong, who.scope = (i8)scope_of(op);
    u32 good = reach.good;
    if (strong) __atomic_thread_fence(__ATOMIC_RELEASE);
    EACH {
        if (!(good >> l & 1)) continue;
        if (m->launch.check) {
            who.lane = l;
            m->storing = rows[l];
            enter_access(m, &who, reach.region[l], reach.offset[l], bytes, WRITE);
        }
        copy_row(reach.host[l], rows[l], bytes);
    }
    m->storing = NULL;
    count_access(m, op, address, &reach, bytes, WRITE);
    if (!strong) return NEXT;
    synchronise(m, w, op, &reach, false, true);
    happened(m, w->cta->cluster);
    return YIELD;
}

/* **** hints **** */

/* discard.global.L2 [a], 128: what the bytes hold is lost. */
HANDLER(discard) {
    u64 address[LANES];
    addresses(w, op, address);
    ACTIVE {
        Region *r;
        u64 offset;
        u8 *host = touch(m, w, op, l, op->space, address[l], 128, 128, WRITE);
        if (!host) continue;
        memset(host, 0xff, 128);
        bool there = locate(m, w, op, l, op->space, address[l], 128, 128, &r, &offset) && r;
        if (there && m->launch.check && r->valid) memset(r->valid + offset, 0, 128);
    }
    return NEXT;
}
