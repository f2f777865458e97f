/* Vector clocks: what each warp knows to have happened.
 *
 * An actor is a warp, or its wgmmas, bulk groups or cp.async groups, or an mbarrier's phases. An access
 * carries its actor's clock; it happened before what a warp does now when the warp's clock has reached it.
 * Besides what is `known`, a clock keeps what is known to have passed a proxy fence (for shared and for
 * global memory), since the async proxy sees only that. Actors of the own cluster are in a dense vector,
 * those of other clusters in a sorted list, which is nearly always empty. There is also the one event of
 * cluster 0, which is none: that the kernels ahead have ended.
 *
 * Releases and acquires order the threads of their scope alone (scopes.c). Among peers (peers.c) cluster 0 has an
 * event for each GPU as well: up to which launch it is known to have run.
 */

#include "core.h"

typedef struct { u32 key, known, fenced; } Foreign;  /* key: cluster << 12 | actor */
typedef struct { Foreign *items; i32 count, room; } Sparse;
/* key: host address of the word, 0: empty; whose: the threads that its clock is for */
typedef struct { u64 key, whose; Sparse clock; } Location;
enum { CTA_LEVEL, CLUSTER_LEVEL, GPU_LEVEL, SYSTEM_LEVEL, LEVELS };  /* scopes, by size */

struct Clock {
    i32 actors, length;         /* length: of v */
    u32 started;                /* ranks of CTAs of the cluster that are known to have started */
    Sparse foreign;
    /* what was known at fences of at least this scope, for relaxed writes after them; NULL: none. Barriers hand it
     * on: CUDA's threads call __threadfence, then __syncthreads, then one of them tells the other blocks. */
    Sparse *published[LEVELS];
    Sparse *pending[LEVELS];    /* a warp's: what relaxed reads saw, for the fence after them */
    u8 missed;                  /* levels of `pending` that a fence came after, of a scope too small */
    /* known, fenced for shared memory, fenced for global memory: `actors` each. With Launch.remote, of warps alone:
     * what is known otherwise than by arrivals at mbarriers of other CTAs whose scope is too small; and, of an
     * mbarrier's, what of that came by arrivals of its own CTA */
    u32 v[];
};

struct Shadow {
    Location *locations;
    i32 location_count, location_room;
    struct Cell *cells;       /* pool of split words, four cells each */
    u32 cell_count, cell_room, cell_free;
    struct Reader *readers;   /* pool of further readers */
    u32 reader_count, reader_room, reader_free;
};

/* **** peers: launches of several GPUs that run together (peers.c) **** */

typedef struct { const Op *ops; char name[64]; u32 grid[3], cluster[3], number; i32 gpu; } PeerLaunch;
typedef struct { u32 launch, number; } PeerCluster;     /* of Peers.launches; in the grid */

/* A GPU, whose launches run one after the other. */
typedef struct {
    Machine *machine;       /* of the launch that runs, NULL: none */
    u32 launches, sleep;    /* launches so far; turns until it goes on */
    Sparse before, known;   /* what is known at the beginning of the last launch, and after it */
    Sparse ended;           /* what warps of the launch that runs knew when they exited */
} PeerGpu;

struct Peers {
    struct Shadow *shadow;
    PeerGpu *gpus;
    i32 gpu_count;
    PeerLaunch *launches;
    PeerCluster *clusters;  /* by sequence */
    u32 launch_count, launch_room, started, cluster_room;
    u64 changes, seed, rng, turns;
    bool stuck;             /* a deadlock was reported */
    Sparse *notes;          /* what GPUs knew at points that others wait for */
    i32 note_count, note_room;
    struct PeerPages { struct PeerPages *next; struct Page **pages; u64 count; } *pages;
};

static const PeerLaunch *launch_of(const Peers *p, u32 cluster) {
    return &p->launches[p->clusters[cluster].launch];
}

enum { KNOWN, FENCED_SHARED, FENCED_GLOBAL };
enum { AHEAD = 0 };  /* Foreign.key; those after it: GPUs among peers, up to which launch they are known to have run */
enum { MANY = 48 };
#define ACTOR_BITS 12

static i32 sound_warps(i32 actors) { return actors / ACTORS * MAX_WARPS; }
static u32 *sound(Clock *c) { return c->v + 3 * (size_t)c->actors; }                    /* Launch.remote */
static u32 *sound_here(Clock *c) { return sound(c) + sound_warps(c->actors); }
static i32 sound_at(u32 actor) { return (i32)(actor / ACTORS) * MAX_WARPS + (i32)(actor % ACTORS); }
static u32 *part(Clock *c, int which) { return c->v + (size_t)which * (size_t)c->actors; }
static u32 own(const Warp *w) { return actor_of(w, 0); }

Clock *clock_new(Machine *m) {
    if (!m->launch.check) return NULL;
    i32 length = 3 * m->actors + (m->launch.remote ? 2 * sound_warps(m->actors) : 0);
    Clock *c = take_zeros(1, sizeof *c + sizeof(u32) * (size_t)length);
    c->actors = m->actors, c->length = length;
    return c;
}

static void sparse_free(Sparse *s) {
    if (s) give(s->items), give(s);
}

void clock_free(Clock *c) {
    if (!c) return;
    for (int s = 0; s < LEVELS; s++) sparse_free(c->published[s]), sparse_free(c->pending[s]);
    give(c->foreign.items), give(c);
}

void clock_clear(Machine *m, Clock *c) {
    if (!c) return;
    (void)m;
    memset(c->v, 0, sizeof(u32) * (size_t)c->length);
    c->foreign.count = 0, c->started = 0;
    for (int s = 0; s < LEVELS; s++) sparse_free(c->published[s]), c->published[s] = NULL;
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
    if (s->count == s->room) s->items = take_more(s->items,
                                                sizeof *s->items * (size_t)(s->room = s->room * 2 + 8));
    memmove(s->items + at + 1, s->items + at, sizeof *s->items * (size_t)(s->count - at));
    s->items[at] = f;
    s->count++;
}

static void sparse_join(Sparse *into, const Sparse *from) {
    for (i32 i = 0; i < from->count; i++) sparse_raise(into, from->items[i]);
}

/* What of other GPUs a list need not name, as it knows their launches to have ended. */
static void forget_ended(const Peers *p, Sparse *s) {
    i32 kept = 0;
    for (i32 i = 0; i < s->count; i++) {
        u32 cluster = s->items[i].key >> ACTOR_BITS;
        if (cluster) {
            const PeerLaunch *launch = launch_of(p, cluster);
            i32 at = sparse_find(s, (u32)launch->gpu + 1);  /* those are before all clusters, and stay */
            if (at < kept && s->items[at].key == (u32)launch->gpu + 1 && s->items[at].known >= launch->number) continue;
        }
        s->items[kept++] = s->items[i];
    }
    s->count = kept;
}

/* Whether a warp knows that the launch of a cluster has ended. */
static bool ended(const Warp *w, const Sparse *s, u32 cluster) {
    const PeerLaunch *launch = launch_of(w->cta->cluster->peers, cluster);
    u32 key = (u32)launch->gpu + 1;
    i32 at = sparse_find(s, key);
    return at < s->count && s->items[at].key == key && s->items[at].known >= launch->number;
}

/* All a warp knows, as a list that other clusters can read. */
static void sparse_from(const Warp *w, Sparse *into) {
    u32 *known = part(w->clock, KNOWN), *fenced = part(w->clock, FENCED_GLOBAL);
    u32 cluster = w->cta->cluster->sequence << ACTOR_BITS;
    for (i32 i = 0; i < w->clock->actors; i++)
        if (known[i]) sparse_raise(into, (Foreign){cluster | (u32)i, known[i], fenced[i]});
    sparse_join(into, &w->clock->foreign);
}

static bool after_wait(const Warp *w, const Sparse *s) {
    return s->count && s->items[0].key == AHEAD && s->items[0].known == w->cta->cluster->launch;
}

/* Whether what is known soundly is kept of an actor. */
static bool is_sound(const Warp *w, u32 actor) {
    return w->clock->length > 3 * w->clock->actors && actor % ACTORS < MAX_WARPS;
}

static void sparse_into(Warp *w, const Sparse *from) {
    if (after_wait(w, from)) w->behind = 0;
    u32 *known = part(w->clock, KNOWN), *fenced = part(w->clock, FENCED_GLOBAL);
    for (i32 i = 0; i < from->count; i++) {
        Foreign f = from->items[i];
        if (f.key >> ACTOR_BITS != w->cta->cluster->sequence) { sparse_raise(&w->clock->foreign,
                                                                             f); continue; }
        u32 at = f.key & ((1u << ACTOR_BITS) - 1);
        if (known[at] < f.known) known[at] = f.known;
        if (fenced[at] < f.fenced) fenced[at] = f.fenced;
        if (is_sound(w, at) && sound(w->clock)[sound_at(at)] < f.known) sound(w->clock)[sound_at(at)] = f.known;
    }
}

/* **** synchronisation **** */

static void raise_words(u32 *into, const u32 *from, i32 count) {
    for (i32 i = 0; i < count; i++) into[i] = into[i] < from[i] ? from[i] : into[i];
}

/* The first `length` words of a clock, and its lists. */
static void join_words(Clock *into, const Clock *from, i32 length) {
    raise_words(into->v, from->v, length);
    into->started |= from->started;
    if (from->foreign.count) sparse_join(&into->foreign, &from->foreign);
    for (int s = 0; s < LEVELS; s++) {
        if (!from->published[s]) continue;
        if (!into->published[s]) into->published[s] = take_zeros(1, sizeof(Sparse));
        sparse_join(into->published[s], from->published[s]);
    }
}

static void join_dense(Clock *into, const Clock *from) { join_words(into, from, into->length); }

/* The warp's own entry is its clock; what it does from now on is later. */
static void tick(Warp *w) {
    if (is_sound(w, own(w))) sound(w->clock)[sound_at(own(w))] = w->now;
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

#include "scopes.c"

/* cp.asyncs that the warp knows to be complete are so for the lanes in mask, whichever lane waited for them. */
static void copies_become_seen(Warp *w, u32 mask) {
    u32 complete = part(w->clock, KNOWN)[actor_of(w, ACTOR_COPY)];
    ACTIVE w->copies_seen[l] = complete;
}

/* Barriers end here too. They also take in what relaxed reads saw: CUDA's own pattern of the last block
 * (atomicInc by one thread, then __syncthreads) has no fence between the two. */
void lanes_sync(Machine *m, Warp *w, u32 mask) {
    if (!m->launch.check) return;
    take_unfenced(w);
    tick(w);
    ACTIVE w->lane_sync[l] = w->now;
    w->behind &= ~mask;
    copies_become_seen(w, mask);
}

/* **** the kernels ahead **** */

void clock_wait(Machine *m, Warp *w, u32 mask) {
    if (!m->launch.check) return;
    w->behind = ~mask & (after_wait(w, &w->clock->foreign) ? w->behind : ~0u);
    u32 launch = w->cta->cluster->launch;
    sparse_raise(&w->clock->foreign, (Foreign){AHEAD, launch, launch});
    if (m->launch.peers) sparse_join(&w->clock->foreign, &m->launch.peers->gpus[m->launch.gpu].known);
}

bool clock_after_wait(const Warp *w, int lane) {
    return after_wait(w, &w->clock->foreign) && !(w->behind >> lane & 1);
}

/* **** the launches of a stream, among peers **** */

/* A programmatic launch knows what the one ahead of it knew, until griddepcontrol.wait. */
void clock_begin(Warp *w, const Machine *m) {
    if (!m->launch.check || !m->launch.peers) return;
    const PeerGpu *gpu = &m->launch.peers->gpus[m->launch.gpu];
    sparse_join(&w->clock->foreign, m->launch.pdl ? &gpu->before : &gpu->known);
}

void clock_end(Machine *m, const Warp *w) {
    if (m->launch.check && m->launch.peers)
        sparse_join(&m->launch.peers->gpus[m->launch.gpu].ended, &w->clock->foreign);
}

/* Whether the warp knows that `actor` of `cluster` has reached `clock` (which: KNOWN, or past a proxy
 * fence). */
static bool knows(const Warp *w, u32 cluster, u32 actor, u32 clock, int which) {
    if (cluster == w->cta->cluster->sequence) return part(w->clock, which)[actor] >= clock;
    u32 key = cluster << ACTOR_BITS | actor;
    const Sparse *s = &w->clock->foreign;
    i32 at = sparse_find(s, key);
    if (at < s->count && s->items[at].key == key && (which == KNOWN ? s->items[at].known : s->items[at].fenced) >= clock)
        return true;
    return w->cta->cluster->peers && ended(w, s, cluster);
}
