/* The bytes of global memory that a launch touches, and launches that begin before the kernels ahead end.
 *
 * Asked for (Launch.footprint), each region keeps a byte of TOUCH_ flags for each of its bytes. A
 * programmatic launch (Launch.pdl) is given what the kernels ahead touch, in Region.flight: an access to
 * that conflicts unless its thread has waited for them (griddepcontrol.wait), or learned from one that has,
 * which travels with the clocks as an event of cluster 0.
 */

#include "core.h"

enum { TOUCH_READ = 1, TOUCH_WRITE = 2, TOUCH_ATOMIC_READ = 4, TOUCH_ATOMIC_WRITE = 8,
       TOUCH_READS = TOUCH_READ | TOUCH_ATOMIC_READ, TOUCH_WRITES = TOUCH_WRITE | TOUCH_ATOMIC_WRITE };

static u8 touch_flags(const Who *who, int kind) {
    if (kind == ATOMIC) return TOUCH_ATOMIC_READ | TOUCH_ATOMIC_WRITE;
    return (u8)((kind == READ ? TOUCH_READ : TOUCH_WRITE) << (who->strong ? 2 : 0));
}

static void mark_bytes(Region *r, u64 offset, u32 bytes, u8 flags) {
    if (!r->touched) r->touched = take_zeros(r->size, 1), r->low = r->size;
    if (offset < r->low) r->low = offset;
    if (offset + bytes > r->high) r->high = offset + bytes;
    u8 *at = r->touched + offset;
    for (u32 i = 0; i < bytes; i++) at[i] |= flags;
}

/* What of the other's accesses an access conflicts with. */
static u8 conflicting(u8 flags) {
    if (flags & TOUCH_WRITE) return 0xff;
    if (flags & TOUCH_READ) return TOUCH_WRITES;
    return flags & TOUCH_ATOMIC_WRITE ? TOUCH_READ | TOUCH_WRITE : TOUCH_WRITE;
}

static void check_flight(Machine *m, const Who *who, const Region *r, u64 offset, u32 bytes, u8 flags) {
    u8 against = conflicting(flags);
    for (u64 at = offset; at < offset + bytes; at++) {
        if (!(r->flight[at] & against)) continue;
        bool reads = flags & TOUCH_READS, writes = flags & TOUCH_WRITES;
        report(m, RACE, who->op, who->warp, who->lane,
               "%s of global memory at %#llx is not ordered after griddepcontrol.wait: it is %s by %s, which "
               "may still run", reads && writes ? "an atomic access" : writes ? "a write" : "a read",
               (unsigned long long)(r->base + at), r->flight[at] & TOUCH_WRITES ? "written" : "read",
               m->launch.ahead);
        return;
    }
}

void footprint_enter(Machine *m, const Who *who, Region *r, u64 offset, u32 bytes, int kind) {
    u8 flags = touch_flags(who, kind);
    if (m->launch.footprint) mark_bytes(r, offset, bytes, flags);
    if (r->flight && !clock_after_wait(who->warp, who->lane)) check_flight(m, who, r, offset, bytes, flags);
}

/* Where the flags of a region change: runs from `bounds[i]` to `bounds[i + 1]` with `flags[i]`. Returns how
 * many there are; the first `room` of them are given. */
i64 footprint_runs(const Region *r, i64 *bounds, u8 *flags, i64 room) {
    i64 count = 0;
    for (u64 at = r->low; at < r->high; count++) {
        u8 flag = r->touched[at];
        u64 word = flag * 0x0101010101010101ull, here;
        if (count < room) bounds[count] = (i64)at, flags[count] = flag;
        while (at + 8 <= r->high && (memcpy(&here, r->touched + at, 8), here == word)) at += 8;
        while (at < r->high && r->touched[at] == flag) at++;
        if (count < room) bounds[count + 1] = (i64)at;
    }
    return count;
}

void footprint_finish(Machine *m) {
    for (i32 i = 0; i < m->launch.region_count; i++) give(m->launch.regions[i].touched);
}

/* **** griddepcontrol: nothing in a launch that is not programmatic **** */

HANDLER(grid_wait) {
    (void)op;
    if (!m->launch.pdl) return NEXT;
    w->cta->waited = true;
    clock_wait(m, w, mask);
    return NEXT;
}

/* The next grid may begin when each CTA has said so or has ended: one that does after waiting holds it until
 * the kernels ahead have ended. */
HANDLER(grid_release) {
    (void)op;
    if (!m->launch.pdl || w->cta->released) return NEXT;
    bool waited = m->launch.check;
    ACTIVE waited = waited && clock_after_wait(w, l);
    w->cta->released = true;
    m->held |= waited;
    return NEXT;
}

void grid_exit(Machine *m, const Cta *c) {
    if (!m->launch.pdl) return;
    m->held |= !c->released;
    if (!c->waited)
        report(m, BARRIER, m->current, &c->warps[0], 0, "the CTA ends without griddepcontrol.wait: a "
               "programmatic launch whose CTAs do not all execute it may end before the kernels ahead");
}
