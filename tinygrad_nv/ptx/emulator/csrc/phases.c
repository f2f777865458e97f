/* Instructions on mbarriers (mbarrier.c): init, inval, expect_tx, complete_tx, arrive, test_wait and try_wait,
 * pending_count.
 */

#include "core.h"

enum { MOST_MBARRIERS = 1024 };   /* of a CTA, each of which has clocks of all threads of the cluster */

static Mbarrier *mbarrier_new(Machine *m, Cta *cta, u64 offset) {
    if (cta->mbarrier_count == cta->mbarrier_room) {
        cta->mbarrier_room = 2 * cta->mbarrier_room + 16;
        cta->mbarriers = take_more(cta->mbarriers, sizeof *cta->mbarriers * (size_t)cta->mbarrier_room);
    }
    u32 number = (u32)cta->mbarrier_count++;
    Mbarrier *b = &cta->mbarriers[number];
    /* beyond MBARRIER_ACTORS they share actors, whose clocks only grow: which may hide races, not make any */
    u32 actor = ACTOR_MBARRIER + number % MBARRIER_ACTORS;
    *b = (Mbarrier){.offset = offset, .actor = (u32)cta->rank * ACTORS + actor,
                    .clock = {clock_new(m), clock_new(m)}};
    for (int i = 0; i < 2 && m->launch.check; i++) b->arrivals[i] = take_zeros(1, arrivals_size(cta));
    return b;
}

/* mbarrier.init [a], count. One that is live may be initialised again. */
HANDLER(mbarrier_init) {
    u64 address[LANES];
    addresses(w, op, address);
    ACTIVE {
        Cta *cta;
        u64 offset;
        i32 count = s32(w, op->b)[l];
        if (!mbarrier_reach(m, w, op, l, address[l], WRITE, &cta, &offset)) continue;
        if (count < 1 || count > MBARRIER_LIMIT) {
            report(m, BARRIER, op, w, l, "an mbarrier for %d arrivals: 1 to 2^20 - 1 can be", count);
            count = 1;
        }
        Mbarrier *b = mbarrier_find(cta, offset);
        if (!b && cta->mbarrier_count == MOST_MBARRIERS) {
            report(m, BARRIER, op, w, l, "more than %d mbarriers in a CTA: the emulator follows so many", MOST_MBARRIERS);
            continue;
        }
        if (!b) b = mbarrier_new(m, cta, offset);
        b->live = true, b->first = b->epoch;
        b->phase = 0, b->tx = 0;
        b->expected = b->pending = count;
        b->init_line = op->line, b->init_lane = l, b->init_actor = actor_of(w, 0), b->init_clock = w->now;
        b->init_fenced = 0;
        for (int i = 0; i < 2; i++) clock_clear(m, b->clock[i]), forget_arrivals(cta, b, i);
        mbarrier_store(cta, b);
        happened(m, cta->cluster);
    }
    return NEXT;
}

/* fence.mbarrier_init: of the mbarriers that the lanes in mask have initialised. */
static void fence_inits(const Warp *w, u32 mask) {
    for (i32 i = 0; i < w->cta->mbarrier_count; i++) {
        Mbarrier *b = &w->cta->mbarriers[i];
        bool ours = b->init_actor == actor_of(w, 0) && mask >> b->init_lane & 1;
        if (ours && !b->init_fenced) b->init_fenced = w->now;
    }
}

/* A copy of the async proxy signals an mbarrier: its init should have passed a fence to that proxy. */
static void check_init_seen(Machine *m, Warp *w, const Op *op, int lane, const Mbarrier *b) {
    if (!m->launch.check || part(w->clock, FENCED_SHARED)[b->init_actor] >= b->init_clock) return;
    if (b->init_fenced && part(w->clock, KNOWN)[b->init_actor] >= b->init_fenced) return;
    report(m, NOTE, op, w, lane,
           "the init of its mbarrier (line %d) has passed neither fence.mbarrier_init nor fence.proxy.async: "
           "PTX asks for one before the async proxy signals it", b->init_line);
}

/* mbarrier.inval [a]. */
HANDLER(mbarrier_inval) {
    u64 address[LANES];
    addresses(w, op, address);
    ACTIVE {
        Cta *cta;
        Mbarrier *b = mbarrier_of(m, w, op, l, address[l], WRITE, &cta);
        if (!b) continue;
        b->live = false;
        memset(cta->shared.data + b->offset, 0xff, 8);
        if (m->launch.check) memset(cta->shared.valid + b->offset, 0, 8);
    }
    return NEXT;
}

/* mbarrier.expect_tx [a], bytes. */
HANDLER(mbarrier_expect_tx) {
    u64 address[LANES];
    addresses(w, op, address);
    ACTIVE {
        Cta *cta;
        Mbarrier *b = mbarrier_of(m, w, op, l, address[l], ATOMIC, &cta);
        if (!b) continue;
        if (w->tape) tape_note(w, ARRIVED, 0, barrier_key(m, cta, b->offset), b->epoch, r32(w, op->b)[l]);
        mbarrier_add_tx(m, w, op, l, cta, b, r32(w, op->b)[l]);
    }
    return NEXT;
}

/* mbarrier.complete_tx [a], bytes: as if an asynchronous operation had ended. */
HANDLER(mbarrier_complete_tx) {
    u64 address[LANES];
    addresses(w, op, address);
    ACTIVE {
        Cta *cta;
        Mbarrier *b = mbarrier_of(m, w, op, l, address[l], ATOMIC, &cta);
        if (b) mbarrier_add_tx(m, w, op, l, cta, b, -(i64)r32(w, op->b)[l]);
    }
    return NEXT;
}

/* mbarrier.arrive and .arrive_drop: `b` the count or, with EXPECT, the bytes; -1: one arrival. `d`: the
 * state before it, or -1. */
HANDLER(mbarrier_arrive) {
    u64 address[LANES], state[LANES] = {0};
    u32 began = w->now;
    addresses(w, op, address);
    ACTIVE {
        Cta *cta;
        Mbarrier *b = mbarrier_of(m, w, op, l, address[l], ATOMIC, &cta);
        if (!b) continue;
        u32 operand = op->b < 0 ? 1 : r32(w, op->b)[l];
        i64 count = op->flags & EXPECT ? 1 : operand;
        check_phase(m, w, op, l, cta, b);
        state[l] = mbarrier_word(b);
        enter_arrival(w, l, b, began);
        mbarrier_release(m, w, op, cta, b);
        if (w->tape) tape_note(w, ARRIVED, (u32)count, barrier_key(m, cta, b->offset), b->epoch,
                               op->flags & EXPECT ? operand : 0);
        if (op->flags & EXPECT) mbarrier_add_tx(m, w, op, l, cta, b, operand);
        if (op->flags & NO_COMPLETE && count >= b->pending) {
            report(m, BARRIER, op, w, l,
                   ".noComplete, but with its %lld arrivals none is pending at the mbarrier at 0x%llx",
                   (long long)count, (ull)(cta->shared.base + b->offset));
        }
        if (op->flags & DROP) b->expected -= (i32)(count > b->expected ? b->expected : count);
        mbarrier_arrive_count(m, w, op, l, cta, b, count);
    }
    if (op->d >= 0) put64(w, op->d, state, mask);
    return NEXT;
}

/* Whether the phase that a wait names has ended: the one of the parity, or of the state, in `b`. */
static bool mbarrier_ended(const Warp *w, const Op *op, int lane, const Mbarrier *b) {
    u32 parity = op->flags & PARITY ? r32(w, op->b)[lane] & 1 : (u32)(r64(w, op->b)[lane] >> 63);
    return (b->phase & 1) != parity;
}

/* The lanes whose try_wait at this place is to fail for the first time: all of those that begin one, when the
 * launch is late. test_wait does not wait: it says what is. */
static u32 first_waits(const Machine *m, Warp *w, const Op *op, i32 pc, u32 mask) {
    u32 first = 0;
    if (m->launch.late && !(op->flags & TEST)) ACTIVE if (w->failed_pc[l] != pc) first |= 1u << l, w->failed_pc[l] = pc;
    return first;
}

/* mbarrier.try_wait and .test_wait: `d` says whether the phase has ended. The first failure at a place is
 * told to the program; when it comes again, and nothing else has changed, it waits until the phase ends. */
HANDLER(mbarrier_wait) {
    u64 address[LANES];
    u32 ended = 0;
    addresses(w, op, address);
    Group *g = group_of(w);
    u32 first = g->ticket ? 0 : first_waits(m, w, op, g->pc, mask);
    ACTIVE {
        Cta *cta;
        u64 offset;
        if (g->ticket) {  /* again: entered, and found sound, before */
            Region *r;
            if (!locate(m, w, op, l, op->space, address[l], 8, 8, &r, &offset)) continue;
            cta = r->cta;
        } else if (!mbarrier_reach(m, w, op, l, address[l], READ, &cta, &offset)) {
            ended |= 1u << l;
            continue;
        }
        Mbarrier *b = mbarrier_at(m, w, op, l, cta, offset);
        if (!b) { ended |= 1u << l; continue; }  /* reported; waiting would never end */
        if (first >> l & 1 || !mbarrier_ended(w, op, l, b)) continue;
        ended |= 1u << l;
        w->failed_pc[l] = -1;
        acquire_lanes(m, w, op, 1u << l, b->clock[~b->phase & 1]);
        clock_observe(m, w, b->actor, b->epoch);
        if (w->tape) tape_note(w, WAITED, 1, barrier_key(m, cta, b->offset), b->epoch - 1, 0);
    }
    if (first) {
        tape_note(w, FAILED, 1, 0, 0, 0);
        put_pred(w, op->d, ended, mask);
        return YIELD;
    }
    u64 missing = ended == mask ? 0 : address[lowest(mask & ~ended)];
    if (missing && w->tried_pc == g->pc && w->tried == missing && !g->forced) {
        g->ticket = 1;
        return BLOCKED;
    }
    w->tried_pc = missing ? g->pc : -1;
    w->tried = missing;
    if (missing) tape_note(w, FAILED, 1, 0, 0, 0);
    put_pred(w, op->d, ended, mask);
    return missing ? YIELD : NEXT;
}

/* mbarrier.pending_count n, state. */
HANDLER(mbarrier_pending_count) {
    u32 n[LANES];
    (void)m;
    EACH n[l] = (u32)((MBARRIER_LIMIT + 1 - (r64(w, op->a)[l] >> 43 & MBARRIER_LIMIT)) & MBARRIER_LIMIT);
    put32(w, op->d, n, mask);
    return NEXT;
}
