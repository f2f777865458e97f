/* Barriers of a CTA and of a cluster, fences, and the pool of registers.
 *
 * A named barrier's phase ends when as many threads as it was given have arrived, an .aligned arrival
 * counting for a whole warp; without a number, when all threads of the CTA that have not exited have. Who
 * waits remembers the phase in Group.value, and that it has arrived in Group.ticket; all groups of a warp
 * that arrive together do.
 */
#include <stdio.h>

#include "core.h"

enum { WAITS = 16, REDUCES = 32, UNALIGNED = 64 };   /* bar: .sync and .red wait */
enum { POPC, ALL, ANY };                             /* Op.more of .red */

static u32 cta_threads(const Machine *m) {
    return m->launch.block[0] * m->launch.block[1] * m->launch.block[2];
}
static i32 whole_warps(i32 threads) { return (threads + LANES - 1) / LANES * LANES; }

/* **** named barriers **** */

/* Ends the phase when everybody is there. */
static void named_check(Machine *m, Cta *cta, Named *n) {
    if (!n->arrived) return;
    if (!n->open && n->arrived < n->expected) return;
    for (i32 i = 0; n->open && i < cta->warp_count; i++) if (cta->warps[i].alive & ~n->lanes[i]) return;
    for (i32 i = 0; i < cta->warp_count; i++)
        if (n->waiting >> i & 1) clock_acquire(m, &cta->warps[i], n->clock[0]);
    clock_clear(m, n->clock[0]);
    memcpy(n->result, n->reduction, sizeof n->result);
    memset(n->lanes, 0, sizeof n->lanes);
    n->reduction[POPC] = n->reduction[ANY] = 0, n->reduction[ALL] = 1;
    n->waiting = 0, n->arrived = 0, n->open = false;
    n->phase++;
    happened(m, cta->cluster);
}

/* The threads a lane's arrival stands for: those that do not exist or have exited come with the first
 * lane. */
static i32 threads_of(const Warp *w, const Op *op, u32 mask) {
    if (!(op->flags & UNALIGNED)) return LANES;
    return popcount(mask) + (mask >> lowest(w->alive) & 1 ? LANES - popcount(w->alive) : 0);
}

/* Counts the lanes in; false when they cannot be (reported). */
static bool named_arrive(Machine *m, Warp *w, const Op *op, u32 mask, Named *n, u32 id) {
    int lane = lowest(mask);
    i32 expected = op->b < 0 ? whole_warps((i32)cta_threads(m)) : s32(w, op->b)[lane];
    if (expected < LANES || expected % LANES || expected > whole_warps((i32)cta_threads(m))) {
        report(m, BARRIER, op, w, lane,
               "barrier %u for %d threads: a multiple of 32 up to the CTA's %u is expected", id, expected,
               cta_threads(m));
        return false;
    }
    i32 threads = threads_of(w, op, mask);
    if (!n->arrived) {
        n->expected = expected;
        n->reduction[POPC] = n->reduction[ANY] = 0, n->reduction[ALL] = 1;
        if (!n->clock[0]) n->clock[0] = clock_new(m);
    } else if (n->expected != expected) {
        report(m, BARRIER, op, w, lane,
               "barrier %u is used for %d threads here and for %d by the threads that have arrived", id,
               expected, n->expected);
    }
    if (n->arrived + threads > n->expected && !n->open && op->b >= 0)
        report(m, BARRIER, op, w, lane, "%d threads arrive at barrier %u, which is for %d",
               n->arrived + threads, id, n->expected);
    n->arrived += threads;
    n->lanes[w->id] |= mask;
    n->open |= op->b < 0;
    if (op->flags & REDUCES) {
        u32 p = pred(w, op->c);
        n->reduction[POPC] += (u32)popcount(p & mask);
        n->reduction[ANY] |= (p & mask) != 0;
        n->reduction[ALL] &= (p & mask) == mask;
    }
    clock_release(m, w, n->clock[0]);
    return true;
}

static void put_reduction(Warp *w, const Op *op, u32 mask, const Named *n) {
    u32 value[LANES];
    if (!(op->flags & REDUCES)) return;
    if (op->more != POPC) { put_pred(w, op->d, n->result[op->more] ? ~0u : 0, mask); return; }
    EACH value[l] = n->result[POPC];
    put32(w, op->d, value, mask);
}

/* bar and barrier: .sync, .arrive, .red. */
HANDLER(bar) {
    Group *g = group_of(w);
    if (w->cta->cluster->alone) { lanes_sync(m, w, mask); return NEXT; }
    u32 id = r32(w, op->a)[lowest(mask)];
    if (id >= NAMED_BARRIERS) {
        report(m, BARRIER, op, w, lowest(mask), "barrier %u: there are 0 to 15", id);
        return NEXT;
    }
    ACTIVE if (r32(w, op->a)[l] != id)
        report(m, BARRIER, op, w, l, "the lanes of the warp name different ones: barriers %u and %u", id,
               r32(w, op->a)[l]);
    Named *n = &w->cta->named[id];
    if (!g->ticket) {
        u32 phase = n->phase;
        if (!named_arrive(m, w, op, mask, n, id)) return NEXT;
        for (i32 i = 0; i < w->group_count; i++) {
            Group *other = &w->groups[i];
            if (other->mask & mask && other->pc == g->pc) other->ticket = 1, other->value = phase;
        }
        if (op->flags & WAITS) n->waiting |= 1u << w->id;
    }
    u32 phase = (u32)g->value;
    if (n->phase == phase) named_check(m, w->cta, n);
    if ((op->flags & WAITS) && n->phase == phase) return BLOCKED;
    if (w->tape) tape_note(w, MEETS, (u32)threads_of(w, op, mask), barrier_key(m, w->cta, NAMED_KEYS | id),
                           phase, (op->flags & WAITS) != 0);
    if (!(op->flags & WAITS)) return NEXT;
    lanes_sync(m, w, mask);
    put_reduction(w, op, mask, n);
    return NEXT;
}

/* **** barrier.cluster **** */

static void cluster_check(Machine *m, Cluster *k) {
    u32 arrived = 0;
    for (i32 c = 0; c < k->size; c++)
        for (i32 i = 0; i < k->ctas[c].warp_count; i++) {
            const Warp *w = &k->ctas[c].warps[i];
            if (w->alive & ~w->cluster_arrived) return;
            arrived |= w->cluster_arrived;
        }
    if (!arrived) return;
    for (i32 c = 0; c < k->size; c++)
        for (i32 i = 0; i < k->ctas[c].warp_count; i++) k->ctas[c].warps[i].cluster_arrived = 0;
    k->phase++;
    clock_clear(m, k->clock[k->phase & 1]);  /* no thread can still be waiting for the phase before */
    happened(m, k);
}

/* barrier.cluster.arrive{.release, .relaxed}. */
HANDLER(cluster_arrive) {
    Cluster *k = w->cta->cluster;
    if (k->alone) return NEXT;
    u32 twice = mask & w->cluster_pending;
    if (twice)
        report(m, BARRIER, op, w, lowest(twice), "barrier.cluster.arrive again, before barrier.cluster.wait");
    w->cluster_arrived |= mask;
    w->cluster_pending |= mask;
    tape_note(w, JOINS, (u32)popcount(mask), k->sequence, k->phase, 0);
    if (op->flags & RELAXED) release_published(m, w, k->clock[k->phase & 1], SCOPE_CLUSTER);
    else clock_release(m, w, k->clock[k->phase & 1]);
    cluster_check(m, k);
    return NEXT;
}

/* barrier.cluster.wait{.acquire}. */
HANDLER(cluster_wait) {
    Cluster *k = w->cta->cluster;
    if (k->alone) return NEXT;
    u32 never = mask & ~w->cluster_pending;
    if (never) {
        report(m, BARRIER, op, w, lowest(never), "barrier.cluster.wait without barrier.cluster.arrive");
        return NEXT;
    }
    if (mask & w->cluster_arrived) cluster_check(m, k);
    if (mask & w->cluster_arrived) return BLOCKED;
    w->cluster_pending &= ~mask;
    tape_note(w, JOINS, (u32)popcount(mask), k->sequence, k->phase - 1, 1);
    clock_acquire(m, w, k->clock[~k->phase & 1]);
    if (m->launch.check) w->clock->started = ~0u;
    lanes_sync(m, w, mask);
    return NEXT;
}

/* **** fences **** */

/* fence.proxy.async: flags 1: shared, 2: global memory. */
HANDLER(fence_proxy) {
    (void)mask;
    clock_proxy_fence(m, w, op->flags & 1, op->flags & 2);
    return NEXT;
}

/* fence.{sc, acq_rel, acquire, release}, membar, fence.mbarrier_init, fence.proxy.tensormap: flags 1:
 * acquires, 2: releases, 4: mbarrier_init; and its scope. */
HANDLER(fence) {
    if (op->flags & 4) fence_inits(w, mask);
    clock_fence(m, w, op->flags & 1, op->flags & 2, scope_of(op));
    return NEXT;
}

/* **** setmaxnreg **** */

/* .dec (flags 0) gives registers to the CTA's pool, .inc (flags 1) waits until it has enough. Without a
 * known count at entry ptxas ignores it. */
HANDLER(setmaxnreg) {
    i32 now = w->registers ? w->registers : m->launch.registers, wanted = (i32)op->imm, more = wanted - now;
    if (!now || w->cta->cluster->alone) return NEXT;
    if (op->flags ? more < 0 : more > 0)
        report(m, BARRIER, op, w, lowest(mask), "setmaxnreg.%s to %d registers from %d",
               op->flags ? "inc" : "dec", wanted, now);
    if (more > w->cta->register_pool && more > 0) return BLOCKED;
    w->cta->register_pool -= more;
    w->registers = wanted;
    if (more < 0) happened(m, w->cta->cluster);
    return NEXT;
}

/* **** what a blocked group waits for **** */

static void describe_mbarrier(Machine *m, Warp *w, const Op *op, int lane, char *out, size_t n) {
    u64 address[LANES], offset;
    Region *r = NULL;
    addresses(w, op, address);
    locate(m, w, op, lane, op->space, address[lane], 8, 8, &r, &offset);
    const Mbarrier *b = r && r->cta ? mbarrier_find(r->cta, offset) : NULL;
    if (!b) { snprintf(out, n, "the mbarrier at 0x%llx", (ull)address[lane]); return; }
    const char *bytes = b->tx < 0 ? "more came than were expected" : "outstanding";
    snprintf(out, n,
             "the mbarrier at shared address 0x%llx, phase %u (parity %u): %d of %d arrivals pending, "
             "%lld bytes %s", (ull)(r->base + offset), b->phase, b->phase & 1, b->pending, b->expected,
             (long long)(b->tx < 0 ? -b->tx : b->tx), bytes);
}

static void describe_cluster(const Warp *w, char *out, size_t n) {
    const Cluster *k = w->cta->cluster;
    i32 arrived = 0, alive = 0;
    for (i32 c = 0; c < k->size; c++)
        for (i32 i = 0; i < k->ctas[c].warp_count; i++) {
            arrived += popcount(k->ctas[c].warps[i].cluster_arrived);
            alive += popcount(k->ctas[c].warps[i].alive);
        }
    snprintf(out, n, "barrier.cluster: %d arrivals of the cluster's %d threads", arrived, alive);
}

void describe_wait(Machine *m, Warp *w, Group *g, char *out, size_t size) {
    const Op *op = &m->launch.ops[g->pc];
    int lane = lowest(g->mask);
    if (describe_poll(m, w, out, size)) return;
    if (op->handler == op_bar) {
        u32 id = r32(w, op->a)[lane] % NAMED_BARRIERS;
        const Named *n = &w->cta->named[id];
        snprintf(out, size, "barrier %u: %d of %d threads have arrived", id, n->arrived, n->expected);
    } else if (op->handler == op_mbarrier_wait) describe_mbarrier(m, w, op, lane, out, size);
    else if (op->handler == op_cluster_wait) describe_cluster(w, out, size);
    else if (op->handler == op_setmaxnreg)
        snprintf(out, size, "%d registers a thread: the CTA has %d to give", (i32)op->imm,
                 w->cta->register_pool);
    else snprintf(out, size, "other lanes of its warp, which do not come (lanes %08x are here)", g->mask);
}

void barriers_free(Machine *m, Cta *c) {
    (void)m;
    for (int i = 0; i < NAMED_BARRIERS; i++) clock_free(c->named[i].clock[0]);
    for (i32 i = 0; i < c->mbarrier_count; i++)
        for (int j = 0; j < 2; j++) clock_free(c->mbarriers[i].clock[j]), give(c->mbarriers[i].arrivals[j]);
    give(c->mbarriers);
}
