/* Scopes: which threads a release or an acquire orders.
 *
 * A release of scope s by thread R and an acquire of scope t by thread A order the two where s includes A and t
 * includes R; a relaxed access beside a fence has the smaller of the two scopes. So a location has a clock for each set
 * of threads that a scope can name: a CTA, a cluster, a GPU, all GPUs. A release goes into those of its thread from the
 * CTA's up to that of its scope, and an acquire takes in those of its own thread, likewise: a clock that both name has
 * threads of both scopes alone. Launches without a scope smaller than the GPU's (Launch.narrow) keep no clocks for
 * clusters and CTAs.
 *
 * Among peers a clock of system scope is for all GPUs, and others are for one GPU each.
 */
#include "core.h"

#define WHOSE_CTA (1ull << 62)
#define WHOSE_CLUSTER (1ull << 61)
#define WHOSE_SYSTEM (1ull << 60)

static int level_of(int scope) { return scope + GPU_LEVEL; }

static int smallest_level(const Machine *m) { return m->launch.narrow ? CTA_LEVEL : GPU_LEVEL; }

/* The largest set of threads that a scope of a warp names: without a cluster, .cluster is .cta. */
static int largest_level(const Machine *m, const Warp *w, int scope) {
    int level = level_of(scope), least = smallest_level(m), most = m->launch.peers ? SYSTEM_LEVEL : GPU_LEVEL;
    if (level == CLUSTER_LEVEL && w->cta->cluster->size == 1) level = CTA_LEVEL;
    return level < least ? least : level > most ? most : level;
}

/* **** fences **** */

/* What relaxed reads saw becomes known. */
static void take_pending(Warp *w, int level) {
    w->clock->missed &= (u8)~(1u << level);
    if (!w->clock->pending[level]) return;
    sparse_into(w, w->clock->pending[level]);
    sparse_free(w->clock->pending[level]);
    w->clock->pending[level] = NULL;
}

/* At a barrier, without a fence, unless there was one and its scope is too small. */
static void take_unfenced(Warp *w) {
    for (int level = CTA_LEVEL; level <= GPU_LEVEL; level++)
        if (w->clock->pending[level] && !(w->clock->missed >> level & 1)) take_pending(w, level);
}

void clock_fence(Machine *m, Warp *w, bool acquire, bool release, int scope) {
    if (!m->launch.check) return;
    if (release) tick(w);
    int most = largest_level(m, w, scope);
    for (int level = smallest_level(m); level <= most; level++) {
        if (level == CLUSTER_LEVEL && w->cta->cluster->size == 1) continue;
        if (acquire) take_pending(w, level);
        if (!release) continue;
        if (!w->clock->published[level]) w->clock->published[level] = take_zeros(1, sizeof(Sparse));
        sparse_from(w, w->clock->published[level]);
    }
    for (int level = most + 1; acquire && level < LEVELS; level++)
        if (w->clock->pending[level]) w->clock->missed |= (u8)(1u << level);
}

/* **** locations: atomics, acquire loads, release stores **** */

static Location *location_at(struct Shadow *s, u64 key, u64 whose) {
    if (2 * s->location_count >= s->location_room) {
        Location *old = s->locations;
        i32 room = s->location_room;
        s->location_room = room ? 2 * room : 64;
        s->locations = take_zeros((size_t)s->location_room, sizeof *s->locations);
        s->location_count = 0;
        for (i32 i = 0; i < room; i++) if (old[i].key) *location_at(s, old[i].key, old[i].whose) = old[i];
        give(old);
    }
    u64 at = (key ^ whose * 0x2545f4914f6cdd1dull) * 0x9e3779b97f4a7c15ull >> 20;
    for (;; at++) {
        Location *found = &s->locations[at & (u64)(s->location_room - 1)];
        if (found->key == key && found->whose == whose) return found;
        if (found->key) continue;
        found->key = key, found->whose = whose;
        s->location_count++;
        return found;
    }
}

/* The threads of a level that a warp is one of. */
static u64 whose_clock(const Machine *m, const Warp *w, const Region *r, int level) {
    const Cluster *k = w->cta->cluster;
    switch (level) {
    case CTA_LEVEL: return WHOSE_CTA | (u64)k->sequence << ACTOR_BITS | (u64)w->cta->rank;
    case CLUSTER_LEVEL: return WHOSE_CLUSTER | k->sequence;
    case GPU_LEVEL: return m->launch.peers && !r->cta ? (u64)m->launch.gpu + 1 : 0;
    default: return WHOSE_SYSTEM;
    }
}

/* The part of an access to a location that is of one level. */
static void synchronise_level(Warp *w, Sparse *at, int level, bool reads, bool writes, bool acquire, bool release) {
    if (reads && acquire) sparse_into(w, at);
    else if (reads && at->count) {
        if (!w->clock->pending[level]) w->clock->pending[level] = take_zeros(1, sizeof(Sparse));
        sparse_join(w->clock->pending[level], at);
    }
    if (!writes) return;
    if (release) sparse_from(w, at);
    else if (w->clock->published[level]) sparse_join(at, w->clock->published[level]);
    if (level == SYSTEM_LEVEL && at->count && at->items[0].key == AHEAD)  /* which is of one GPU alone */
        memmove(at->items, at->items + 1, sizeof *at->items * (size_t)--at->count);
}

void clock_location(Machine *m, Warp *w, Region *r, u64 offset, bool reads, bool writes, bool acquire,
                    bool release, int scope) {
    if (!m->launch.check) return;
    u64 key = (u64)(r->data + offset) & ~3ull;
    if (writes && release) tick(w);
    if (!m->launch.narrow && !m->launch.peers) {    /* one clock, of the GPU */
        synchronise_level(w, &location_at(m->shadow, key, 0)->clock, GPU_LEVEL, reads, writes, acquire, release);
        return;
    }
    int least = smallest_level(m), most = largest_level(m, w, scope);
    if (r->cta && most > GPU_LEVEL) most = GPU_LEVEL;
    if (r->cta && w->cta->cluster->size == 1) most = least;     /* no others reach it */
    for (int level = least; level <= most; level++) {
        if (level == CLUSTER_LEVEL && w->cta->cluster->size == 1) continue;
        Location *at = location_at(m->shadow, key, whose_clock(m, w, r, level));
        synchronise_level(w, &at->clock, level, reads, writes, acquire, release);
        if (m->launch.peers && !r->cta && at->clock.count > MANY) forget_ended(m->launch.peers, &at->clock);
    }
    if (most == SYSTEM_LEVEL && w->clock->foreign.count > MANY) forget_ended(m->launch.peers, &w->clock->foreign);
}
