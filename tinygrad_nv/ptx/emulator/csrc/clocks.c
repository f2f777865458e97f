/* Vector clocks: what each warp knows to have happened.
 *
 * An actor is a warp, or its wgmmas, bulk groups or cp.async groups, or an mbarrier's phases. An access
 * carries its actor's clock; it happened before what a warp does now when the warp's clock has reached it.
 * Besides what is `known`, a clock keeps what is known to have passed a proxy fence (for shared and for
 * global memory), since the async proxy sees only that. Actors of the own cluster are in a dense vector,
 * those of other clusters in a sorted list, which is nearly always empty. There is also the one event of
 * cluster 0, which is none: that the kernels ahead have ended.
 */
#include <stdlib.h>

#include "core.h"

typedef struct { u32 key, known, fenced; } Foreign;  /* key: cluster << 12 | actor */
typedef struct { Foreign *items; i32 count, room; } Sparse;
typedef struct { u64 key; Sparse clock; } Location;   /* key: host address of the word; 0: empty */

struct Clock {
    i32 actors;
    Sparse foreign;
    /* what was known at fences, for relaxed writes after them; NULL: none. Barriers hand it on: CUDA's threads
     * call __threadfence, then __syncthreads, then one of them tells the other blocks. */
    Sparse *published;
    Sparse *pending;    /* a warp's: what relaxed reads saw, for the fence after them */
    u32 v[];            /* known, fenced for shared memory, fenced for global memory: `actors` each */
};

struct Shadow {
    Location *locations;
    i32 location_count, location_room;
    struct Cell *cells;       /* pool of split words, four cells each */
    u32 cell_count, cell_room, cell_free;
    struct Reader *readers;   /* pool of further readers */
    u32 reader_count, reader_room, reader_free;
};

enum { KNOWN, FENCED_SHARED, FENCED_GLOBAL };
enum { AHEAD = 0 };  /* Foreign.key */
#define ACTOR_BITS 12

static u32 *part(Clock *c, int which) { return c->v + (size_t)which * (size_t)c->actors; }
static u32 own(const Warp *w) { return actor_of(w, 0); }

Clock *clock_new(Machine *m) {
    if (!m->launch.check) return NULL;
    Clock *c = calloc(1, sizeof *c + 3 * sizeof(u32) * (size_t)m->actors);
    c->actors = m->actors;
    return c;
}

static void sparse_free(Sparse *s) {
    if (s) free(s->items), free(s);
}

void clock_free(Clock *c) {
    if (!c) return;
    sparse_free(c->published), sparse_free(c->pending);
    free(c->foreign.items), free(c);
}

void clock_clear(Machine *m, Clock *c) {
    if (!c) return;
    memset(c->v, 0, 3 * sizeof(u32) * (size_t)m->actors);
    c->foreign.count = 0;
    sparse_free(c->published);
    c->published = NULL;
}

/* **** sorted lists **** */

static i32 sparse_find(const Sparse *s, u32 key) {  /* the first whose key is not less */
    i32 low = 0, high = s->count;
    while (low < high) {
        i32 middle = (low + high) / 2;
        if (s->items[middle].key < key) low = middle + 1; else high = middle;
    }
    return low;
}

static void sparse_raise(Sparse *s, Foreign f) {
    i32 at = sparse_find(s, f.key);
    if (at < s->count && s->items[at].key == f.key) {
        if (s->items[at].known < f.known) s->items[at].known = f.known;
        if (s->items[at].fenced < f.fenced) s->items[at].fenced = f.fenced;
        return;
    }
    if (s->count == s->room) s->items = realloc(s->items,
                                                sizeof *s->items * (size_t)(s->room = s->room * 2 + 8));
    memmove(s->items + at + 1, s->items + at, sizeof *s->items * (size_t)(s->count - at));
    s->items[at] = f;
    s->count++;
}

static void sparse_join(Sparse *into, const Sparse *from) {
    for (i32 i = 0; i < from->count; i++) sparse_raise(into, from->items[i]);
}

/* All a warp knows, as a list that other clusters can read. */
static void sparse_from(const Warp *w, Sparse *into) {
    u32 *known = part(w->clock, KNOWN), *fenced = part(w->clock, FENCED_GLOBAL);
    u32 cluster = w->cta->cluster->sequence << ACTOR_BITS;
    for (i32 i = 0; i < w->clock->actors; i++)
        if (known[i]) sparse_raise(into, (Foreign){cluster | (u32)i, known[i], fenced[i]});
    sparse_join(into, &w->clock->foreign);
}

static bool after_wait(const Sparse *s) { return s->count && s->items[0].key == AHEAD; }

static void sparse_into(Warp *w, const Sparse *from) {
    if (after_wait(from)) w->behind = 0;
    u32 *known = part(w->clock, KNOWN), *fenced = part(w->clock, FENCED_GLOBAL);
    for (i32 i = 0; i < from->count; i++) {
        Foreign f = from->items[i];
        if (f.key >> ACTOR_BITS != w->cta->cluster->sequence) { sparse_raise(&w->clock->foreign,
                                                                             f); continue; }
        u32 at = f.key & ((1u << ACTOR_BITS) - 1);
        if (known[at] < f.known) known[at] = f.known;
        if (fenced[at] < f.fenced) fenced[at] = f.fenced;
    }
}

/* **** synchronisation **** */

static void join_dense(Clock *into, const Clock *from) {
    for (i32 i = 0; i < 3 * into->actors; i++) into->v[i] = into->v[i] < from->v[i] ? from->v[i] : into->v[i];
    if (from->foreign.count) sparse_join(&into->foreign, &from->foreign);
    if (!from->published) return;
    if (!into->published) into->published = calloc(1, sizeof(Sparse));
    sparse_join(into->published, from->published);
}

/* The warp's own entry is its clock; what it does from now on is later. */
static void tick(Warp *w) {
    part(w->clock, KNOWN)[own(w)] = w->now++;
}

void clock_release(Machine *m, Warp *w, Clock *into) {
    if (!m->launch.check) return;
    tick(w);
    join_dense(into, w->clock);
}

void clock_acquire(Machine *m, Warp *w, const Clock *from) {
    if (m->launch.check) join_dense(w->clock, from);
}

void clock_phases(Machine *m, const Warp *w, Clock *into) {
    if (!m->launch.check) return;
    const u32 *known = part(w->clock, KNOWN);
    u32 *to = part(into, KNOWN);
    for (i32 i = ACTOR_MBARRIER; i < m->actors; i += ACTORS)
        for (i32 j = i; j < i + MBARRIER_ACTORS; j++) to[j] = to[j] < known[j] ? known[j] : to[j];
}

void clock_observe(Machine *m, Warp *w, u32 actor, u32 clock) {
    if (!m->launch.check) return;
    u32 *known = part(w->clock, KNOWN);
    if (known[actor] < clock) known[actor] = clock;
}

void clock_proxy_fence(Machine *m, Warp *w, bool shared, bool global) {
    if (!m->launch.check) return;
    tick(w);
    size_t size = sizeof(u32) * (size_t)w->clock->actors;
    if (shared) memcpy(part(w->clock, FENCED_SHARED), part(w->clock, KNOWN), size);
    if (!global) return;
    memcpy(part(w->clock, FENCED_GLOBAL), part(w->clock, KNOWN), size);
    Sparse *s = &w->clock->foreign;
    for (i32 i = 0; i < s->count; i++) s->items[i].fenced = s->items[i].known;
}

/* What relaxed reads saw becomes known. */
static void take_pending(Warp *w) {
    if (!w->clock->pending) return;
    sparse_into(w, w->clock->pending);
    sparse_free(w->clock->pending);
    w->clock->pending = NULL;
}

void clock_fence(Machine *m, Warp *w, bool acquire, bool release) {
    if (!m->launch.check) return;
    if (acquire) take_pending(w);
    if (!release) return;
    tick(w);
    if (!w->clock->published) w->clock->published = calloc(1, sizeof(Sparse));
    sparse_from(w, w->clock->published);
}

/* cp.asyncs that the warp knows to be complete are so for the lanes in mask, whichever lane waited for them. */
static void copies_become_seen(Warp *w, u32 mask) {
    u32 complete = part(w->clock, KNOWN)[actor_of(w, ACTOR_COPY)];
    ACTIVE w->copies_seen[l] = complete;
}

/* Barriers end here too. They also take in what relaxed reads saw: CUDA's own pattern of the last block
 * (atomicInc by one thread, then __syncthreads) has no fence between the two. */
void lanes_sync(Machine *m, Warp *w, u32 mask) {
    if (!m->launch.check) return;
    take_pending(w);
    tick(w);
    ACTIVE w->lane_sync[l] = w->now;
    w->behind &= ~mask;
    copies_become_seen(w, mask);
}

/* **** the kernels ahead **** */

void clock_wait(Machine *m, Warp *w, u32 mask) {
    if (!m->launch.check) return;
    w->behind = ~mask & (after_wait(&w->clock->foreign) ? w->behind : ~0u);
    sparse_raise(&w->clock->foreign, (Foreign){AHEAD, 1, 1});
}

bool clock_after_wait(const Warp *w, int lane) {
    return after_wait(&w->clock->foreign) && !(w->behind >> lane & 1);
}

/* **** locations: atomics, acquire loads, release stores **** */

static Location *location_at(struct Shadow *s, u64 key) {
    if (2 * s->location_count >= s->location_room) {
        Location *old = s->locations;
        i32 room = s->location_room;
        s->location_room = room ? 2 * room : 64;
        s->locations = calloc((size_t)s->location_room, sizeof *s->locations);
        s->location_count = 0;
        for (i32 i = 0; i < room; i++) if (old[i].key) *location_at(s, old[i].key) = old[i];
        free(old);
    }
    u64 at = key * 0x9e3779b97f4a7c15ull >> 20;
    for (;; at++) {
        Location *found = &s->locations[at & (u64)(s->location_room - 1)];
        if (found->key == key) return found;
        if (found->key) continue;
        found->key = key;
        s->location_count++;
        return found;
    }
}

void clock_location(Machine *m, Warp *w, Region *r, u64 offset, bool reads, bool writes, bool acquire,
                    bool release) {
    if (!m->launch.check) return;
    Location *at = location_at(m->shadow, (u64)(r->data + offset) & ~3ull);
    if (reads && acquire) sparse_into(w, &at->clock);
    else if (reads && at->clock.count) {
        if (!w->clock->pending) w->clock->pending = calloc(1, sizeof(Sparse));
        sparse_join(w->clock->pending, &at->clock);
    }
    if (!writes) return;
    if (release) {
        tick(w);
        sparse_from(w, &at->clock);
    } else if (w->clock->published) sparse_join(&at->clock, w->clock->published);
}

/* Whether the warp knows that `actor` of `cluster` has reached `clock` (which: KNOWN, or past a proxy
 * fence). */
static bool knows(const Warp *w, u32 cluster, u32 actor, u32 clock, int which) {
    if (cluster == w->cta->cluster->sequence) return part(w->clock, which)[actor] >= clock;
    u32 key = cluster << ACTOR_BITS | actor;
    const Sparse *s = &w->clock->foreign;
    i32 at = sparse_find(s, key);
    if (at == s->count || s->items[at].key != key) return false;
    return (which == KNOWN ? s->items[at].known : s->items[at].fenced) >= clock;
}
