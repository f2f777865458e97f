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

/* NULL: there is none, as reported, or nothing waits in the cluster. */
Mbarrier *mbarrier_at(Machine *m, Warp *w, const Op *op, int lane, Cta *cta, u64 offset) {
    if (cta->cluster->alone) return NULL;
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
