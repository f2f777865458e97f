/* mbarriers: phases that end when all arrivals have come and all bytes they announced have.
 *
 * The state is kept beside the memory (struct Mbarrier); the 8 bytes hold it in the encoding ptxas uses:
 * 2^20 minus the expected count in bits 1-20, the bytes outstanding in 21-41, 2^20 minus the pending count
 * in 43-62, the phase's parity in 63. When the bytes are not those any more, something wrote over the
 * mbarrier.
 *
 * Clocks: an arrival releases into the clock of its phase; a wait that succeeds acquires that of the phase
 * which ended, in which all earlier ones are contained. Asynchronous operations that report to an mbarrier
 * carry its actor and `epoch` + 1, so that a thread that waits for their phase knows them to be done.
 */
#include <stdlib.h>

#include "core.h"

#define MBARRIER_LIMIT ((1 << 20) - 1)
enum { NO_COMPLETE = 16, EXPECT = 32, DROP = 64, PARITY = 128, RELAXED = 256, TEST = 512,
       CLUSTER_WIDE = 1024 };

/* The arrivals of a warp in one phase: lanes; the clocks of the last, and of the instruction it was in. */
typedef struct Arrival { u32 lanes, clock, began; } Arrival;

static size_t arrivals_size(const Cta *cta) {
    return (size_t)(cta->cluster->size * MAX_WARPS) * sizeof(Arrival);
}

static void forget_arrivals(const Cta *cta, Mbarrier *b, int parity) {
    b->copies[parity] = false;
    if (b->arrivals[parity]) memset(b->arrivals[parity], 0, arrivals_size(cta));
}

static u64 mbarrier_word(const Mbarrier *b) {
    u64 limit = MBARRIER_LIMIT + 1;
    return ((limit - (u64)b->expected) & MBARRIER_LIMIT) << 1 | ((u64)b->tx & 0x1fffff) << 21
        | ((limit - (u64)b->pending) & MBARRIER_LIMIT) << 43 | (u64)(b->phase & 1) << 63;
}

static void mbarrier_store(Cta *cta, const Mbarrier *b) {
    u64 word = mbarrier_word(b);
    memcpy(cta->shared.data + b->offset, &word, 8);
    memset(cta->shared.valid + b->offset, 1, 8);
}

/* The entry of an offset, live or not; NULL: never was one. */
static Mbarrier *mbarrier_find(const Cta *cta, u64 offset) {
    for (i32 i = 0; i < cta->mbarrier_count; i++)
        if (cta->mbarriers[i].offset == offset) return &cta->mbarriers[i];
    return NULL;
}

Mbarrier *mbarrier_at(Machine *m, Warp *w, const Op *op, int lane, Cta *cta, u64 offset) {
    Mbarrier *b = mbarrier_find(cta, offset);
    ull address = cta->shared.base + offset;
    if (!b || !b->live) {
        report(m, BARRIER, op, w, lane, "no mbarrier is initialised at shared address 0x%llx", address);
        return NULL;
    }
    u64 word = mbarrier_word(b);
    if (memcmp(cta->shared.data + offset, &word, 8)) {
        report(m, BARRIER, op, w, lane, "the mbarrier at shared address 0x%llx was written over", address);
        mbarrier_store(cta, b);
    }
    return b;
}

/* Enters an mbarrier's new state; its phase ends when nothing is outstanding. */
static void mbarrier_changed(Machine *m, Cta *cta, Mbarrier *b) {
    if (b->pending == 0 && b->tx == 0) {
        Clock *done = b->clock[b->phase & 1], *next = b->clock[~b->phase & 1];
        b->phase++, b->epoch++;
        b->pending = b->expected;
        forget_arrivals(cta, b, b->phase & 1);
        if (done) join_dense(next, done);
        happened(m, cta->cluster);
    }
    mbarrier_store(cta, b);
}

/* Whether all arrivals that ended the last phase are known to have happened. Of a warp's arrivals by one
 * instruction all are when one is, if `together`. */
static bool knows_arrivals(const Warp *w, int lane, const Mbarrier *b, bool together) {
    const Cluster *k = w->cta->cluster;
    int last = ~b->phase & 1;
    if (b->copies[last]) return false;
    for (i32 i = 0; i < k->size * MAX_WARPS; i++) {
        const Arrival *a = &b->arrivals[last][i];
        u32 actor = (u32)(i / MAX_WARPS * ACTORS + i % MAX_WARPS), clock = together ? a->began : a->clock;
        bool ours = actor == own(w), before = a->lanes == 1u << lane || a->clock < w->lane_sync[lane];
        if (a->lanes && (ours ? !before : part(w->clock, KNOWN)[actor] < clock)) return false;
    }
    return true;
}

/* An arrival counts for the phase it was meant for only when something orders it after the end of the phase
 * before: a wait, one's own or one that was told of, or the arrivals that ended it. Otherwise it is one too
 * many of that phase. */
static void check_phase(Machine *m, Warp *w, const Op *op, int lane, const Cta *cta, const Mbarrier *b) {
    if (!m->launch.check || b->epoch == b->first) return;
    if (part(w->clock, KNOWN)[b->actor] >= b->epoch || knows_arrivals(w, lane, b, false)) return;
    ull address = (ull)(cta->shared.base + b->offset);
    if (knows_arrivals(w, lane, b, true))
        report(m, NOTE, op, w, lane,
               "phase %u of the mbarrier at 0x%llx ended by arrivals of which some are known here only "
               "because other lanes arrived elsewhere with the same instruction: PTX orders lanes with "
               "bar.warp.sync",
               b->phase - 1, address);
    else
        report(m, BARRIER, op, w, lane,
               "an arrival at the mbarrier at 0x%llx in phase %u by a thread that does not know phase %u to "
               "have ended: it may come in that phase as well, beyond the %d arrivals it expects",
               address, b->phase, b->phase - 1, b->expected);
}

/* `count` arrivals of the phase under way. */
static void mbarrier_arrive_count(Machine *m, Warp *w, const Op *op, int lane, Cta *cta, Mbarrier *b,
                                  i64 count) {
    if (count < 1 || count > b->pending) {
        report(m, BARRIER, op, w, lane,
               "%lld arrivals at the mbarrier at 0x%llx, which expects %d and has %d pending in phase %u",
               (long long)count, (ull)(cta->shared.base + b->offset), b->expected, b->pending, b->phase);
        count = count < 1 ? 0 : b->pending;
    }
    b->pending -= (i32)count;
    mbarrier_changed(m, cta, b);
}

/* Adds to the bytes outstanding (complete_tx: takes away). */
static void mbarrier_add_tx(Machine *m, Warp *w, const Op *op, int lane, Cta *cta, Mbarrier *b, i64 bytes) {
    b->tx += bytes;
    b->copies[b->phase & 1] |= bytes != 0;
    if (b->tx > MBARRIER_LIMIT || b->tx < -MBARRIER_LIMIT) {
        report(m, BARRIER, op, w, lane,
               "%lld bytes outstanding at the mbarrier at 0x%llx: at most 2^20 - 1 can be", (long long)b->tx,
               (ull)(cta->shared.base + b->offset));
        b->tx -= bytes;
    }
    mbarrier_changed(m, cta, b);
}

void mbarrier_complete_tx(Machine *m, Warp *w, const Op *op, int lane, Cta *cta, u64 offset, i64 bytes) {
    Mbarrier *b = mbarrier_at(m, w, op, lane, cta, offset);
    if (b) mbarrier_add_tx(m, w, op, lane, cta, b, -bytes);
}

/* The shared memory an mbarrier operation of a lane addresses, entered in the shadow; false: reported. */
static bool mbarrier_reach(Machine *m, Warp *w, const Op *op, int lane, u64 address, int kind, Cta **cta,
                           u64 *offset) {
    Region *r;
    if (!locate(m, w, op, lane, op->space, address, 8, 8, &r, offset)) return false;
    if (!r || !r->cta) {
        report(m, BARRIER, op, w, lane, "an mbarrier at 0x%llx, which is not shared memory",
               (ull)address);
        return false;
    }
    *cta = r->cta;
    Who who = thread_of(w, op, lane);
    who.strong = kind != WRITE;
    shadow_access(m, &who, r, *offset, 8, kind);
    return true;
}

/* The same for an operation on a live mbarrier. */
static Mbarrier *mbarrier_of(Machine *m, Warp *w, const Op *op, int lane, u64 address, int kind, Cta **cta) {
    u64 offset;
    if (!mbarrier_reach(m, w, op, lane, address, kind, cta, &offset)) return NULL;
    return mbarrier_at(m, w, op, lane, *cta, offset);
}

/* **** clocks **** */

/* A relaxed arrival: what the last fence published goes along. */
static void release_published(Machine *m, const Warp *w, Clock *into, int scope) {
    const Sparse *s = m->launch.check ? w->clock->published[largest_level(m, w, scope)] : NULL;
    if (!s) return;
    u32 *known = part(into, KNOWN), *fenced = part(into, FENCED_GLOBAL);
    for (i32 i = 0; i < s->count; i++) {
        Foreign f = s->items[i];
        if (f.key >> ACTOR_BITS != w->cta->cluster->sequence) { sparse_raise(&into->foreign, f); continue; }
        u32 at = f.key & ((1u << ACTOR_BITS) - 1);
        if (known[at] < f.known) known[at] = f.known;
        if (fenced[at] < f.fenced) fenced[at] = f.fenced;
        if (is_sound(w, at) && sound(into)[sound_at(at)] < f.known) sound(into)[sound_at(at)] = f.known;
    }
}

/* The lanes in mask acquire; what other lanes of the warp released into `from` is before them too. */
static void acquire_lanes(Machine *m, Warp *w, const Op *op, u32 mask, Clock *from) {
    if (!m->launch.check) return;
    if (!m->launch.remote || op->flags & CLUSTER_WIDE) clock_acquire(m, w, from);
    else {
        join_words(w->clock, from, 3 * from->actors);
        raise_words(sound(w->clock), sound_here(from), sound_warps(from->actors));
    }
    copies_become_seen(w, mask);
    if (after_wait(w, &from->foreign)) w->behind &= ~mask;
    u32 since = part(from, KNOWN)[own(w)] + 1;
    ACTIVE if (w->lane_sync[l] < since) w->lane_sync[l] = since;
}

/* An arrival at an mbarrier of another CTA takes a scope of .cluster, which is not the default. CUTLASS leaves it out
 * where it tells that a buffer has been read: so all becomes known, but not soundly. */
static void mbarrier_release(Machine *m, Warp *w, const Op *op, const Cta *owner, Mbarrier *b) {
    if (!m->launch.check) return;
    Clock *into = b->clock[b->phase & 1];
    bool elsewhere = owner != w->cta, wide = op->flags & CLUSTER_WIDE;
    into->started |= 1u << w->cta->rank;
    if (op->flags & RELAXED) {
        release_published(m, w, into, wide ? SCOPE_CLUSTER : SCOPE_CTA);
        clock_phases(m, w, into);
    } else if (elsewhere && !wide) {
        tick(w);
        join_words(into, w->clock, 3 * into->actors);
    } else {
        clock_release(m, w, into);
        if (m->launch.remote && !elsewhere)
            raise_words(sound_here(into), sound(w->clock), sound_warps(into->actors));
    }
}

static void enter_arrival(const Warp *w, int lane, Mbarrier *b, u32 began) {
    if (!b->arrivals[0]) return;
    Arrival *a = &b->arrivals[b->phase & 1][w->cta->rank * MAX_WARPS + w->id];
    a->lanes |= 1u << lane, a->clock = w->now, a->began = began;
}

/* **** instructions **** */

static Mbarrier *mbarrier_new(Machine *m, Cta *cta, u64 offset) {
    if (cta->mbarrier_count == cta->mbarrier_room) {
        cta->mbarrier_room = 2 * cta->mbarrier_room + 16;
        cta->mbarriers = realloc(cta->mbarriers, sizeof *cta->mbarriers * (size_t)cta->mbarrier_room);
    }
    u32 number = (u32)cta->mbarrier_count++;
    Mbarrier *b = &cta->mbarriers[number];
    /* beyond MBARRIER_ACTORS they share actors, whose clocks only grow: which may hide races, not make any */
    u32 actor = ACTOR_MBARRIER + number % MBARRIER_ACTORS;
    *b = (Mbarrier){.offset = offset, .actor = (u32)cta->rank * ACTORS + actor,
                    .clock = {clock_new(m), clock_new(m)}};
    for (int i = 0; i < 2 && m->launch.check; i++) b->arrivals[i] = calloc(1, arrivals_size(cta));
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
