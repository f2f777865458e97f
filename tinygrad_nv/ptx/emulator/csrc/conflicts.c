/* Conflicts: which accesses nothing orders, or orders too weakly, and what is said of them (shadow.c). */
#include "core.h"

typedef struct {
    Machine *m;
    const Who *who;
    Region *r;
    Id me;
    u64 from;      /* where the whole access begins */
    i32 write, strong;  /* not bool, nor the next: clang packs four with AVX-512, which took a third of shadow_access */
    i32 asks_more;      /* than order, of what came before: of threads of other CTAs of a cluster, or before copies */
    i32 plain;          /* an ordinary access by a thread, which asks no more */
} Access;

/* Whether `id` is of the thread of a plain access, and so before it. What Id has below its lane is no matter. */
static bool is_own(const Access *a, Id id) { return a->plain && (id ^ a->me) >> 26 == 0; }

/* Whether what `id` did at `clock` is ordered before `who`. */
static bool ordered(const Who *who, Id id, u32 clock) {
    const Warp *w = who->warp;
    u32 cluster = id_cluster(id), actor = id_actor(id);
    bool same_warp = cluster == w->cta->cluster->sequence && actor == actor_of(w, 0);
    if (cluster == w->cta->cluster->sequence && actor == actor_of(w, ACTOR_COPY)) {
        /* a thread's own cp.asyncs: those it waited for; other lanes' ones: those of before they synchronised */
        bool waited = id_lane(id) == who->lane && clock <= w->copy_done[who->lane] + w->copy_arrivals;
        return waited || clock <= w->copies_seen[who->lane];
    }
    if (!same_warp) return knows(w, cluster, actor, clock, KNOWN);
    if (id_lane(id) == who->lane && !id_many(id)) return true;
    return clock < w->lane_sync[who->lane];
}

/* What is known of another CTA's thread by an arrival at an mbarrier of too small a scope alone, it is not soundly. */
static bool is_known_soundly(const Access *a, Id id, u32 clock) {
    const Warp *w = a->who->warp;
    if (!a->m->launch.remote || id_cluster(id) != w->cta->cluster->sequence) return true;
    bool theirs = id_actor(id) / ACTORS != (u32)w->cta->rank && id_actor(id) % ACTORS < MAX_WARPS;
    return !theirs || sound(w->clock)[sound_at(id_actor(id))] >= clock;
}

static const char *deed(Id id, bool wrote) {
    u32 family = id_actor(id) % ACTORS;
    if (family >= ACTOR_MAP) return "a tensor load's read of its map";
    if (family >= ACTOR_MBARRIER && id_strong(id) && !id_async(id)) return "an asynchronous copy's signal";
    if (family >= ACTOR_MBARRIER) return wrote ? "an asynchronous copy's write" : "an asynchronous read";
    if (family >= ACTOR_COPY) return wrote ? "a cp.async's write" : "a cp.async's read";
    if (family >= ACTOR_BULK) return wrote ? "a bulk copy's write" : "a bulk copy's read";
    if (family >= ACTOR_WGMMA) return "a wgmma's read";
    return id_strong(id) ? "an atomic access" : wrote ? "a write" : "a read";
}

/* A conflict is of the kind of what was not waited for: of a wgmma, of a copy, or of a thread. */
static bool is_wgmma(Id id) { return id_actor(id) % ACTORS / 32 == ACTOR_WGMMA / 32; }

static int kind_of(Id me, Id other) {
    if (is_wgmma(other)) return WGMMA_HAZARD;
    if (is_wgmma(me)) return id_async(other) ? ASYNC_HAZARD : RACE;
    return id_async(me) || id_async(other) ? ASYNC_HAZARD : RACE;
}

/* The CTA of an id, as a number in the grid. */
static i32 id_cta(const Machine *m, Id id) {
    const PeerLaunch *launch = id_launch(m, id);
    const u32 *grid = launch ? launch->grid : m->launch.grid, *size = launch ? launch->cluster : m->launch.cluster;
    u32 number = launch ? m->launch.peers->clusters[id_cluster(id)].number : id_cluster(id) - 1;
    u32 nx = grid[0] / size[0], ny = grid[1] / size[1], rank = id_actor(id) / ACTORS;
    u32 x = number % nx * size[0] + rank % size[0];
    u32 y = number / nx % ny * size[1] + rank / size[0] % size[1];
    u32 z = number / nx / ny * size[2] + rank / size[0] / size[1];
    return (i32)(x + grid[0] * (y + grid[1] * z));
}

/* Why two accesses conflict. */
static const char *conflict_reason(Id me, Id other, int kind, bool known) {
    if (kind == PROXY_FENCE) return "has not passed a fence.proxy.async";
    if (kind == NOTE && !known) return "has not passed a fence.proxy.async, which PTX asks for before a copy writes there";
    if (known) return "is ordered before by an arrival at another CTA's mbarrier, which .cluster must be the scope of, as of "
                      "the wait for it";
    return id_strong(me) && id_strong(other) ? "is not ordered before, and the scope of one is too small for both"
                                             : "is not ordered before";
}

/* A read that came too early: what it was reported for, bytes that nothing had written yet, is this race. */
static void name_race(Machine *m, const Finding *race, u64 address) {
    for (i32 i = 0; i < m->finding_count; i++) {
        Finding *f = &m->findings[i];
        bool same = f->kind == UNINITIALIZED && f->line == race->other && f->cta == race->other_cta;
        if (!same || f->address >> 2 != address >> 2) continue;
        *f = (Finding){race->kind, f->line, race->line, f->cta, race->cta, f->thread, race->thread, f->count, 0, ""};
        snprintf(f->text, sizeof f->text, "a read at %#llx of what was not written yet: the write (line %d, CTA %d) is not "
                 "ordered before", (unsigned long long)address, race->line, race->cta);
    }
}

/* `known`: it is ordered before, but not soundly. */
__attribute__((cold, noinline)) static void conflict(const Access *a, Id other, bool wrote, u64 offset, int kind, bool known) {
    char text[256], memory[48] = "", whose[128] = "";
    Machine *m = a->m;
    const Who *who = a->who;
    u32 family = id_actor(other) % ACTORS;
    const Op *op = id_op(m, other);
    const PeerLaunch *launch = id_launch(m, other);
    u64 address = a->r->base + offset;
    i32 thread = family < ACTOR_MBARRIER ? (i32)(family % 32) * LANES + id_lane(other) : -1;
    m->conflicts += kind != NOTE;
    if (a->write && kind != NOTE)
        name_race(m, &(Finding){.kind = kind, .line = who->op->line, .other = op->line, .cta = cta_number(m, who->warp->cta),
                                .other_cta = id_cta(m, other), .thread = (i32)warp_thread(who->warp, who->lane)}, address);
    if (known_finding(m, kind, who->op->line, op->line)) return;
    if (launch && !a->r->cta) {
        snprintf(memory, sizeof memory, " of GPU %d", a->r->gpu);
        snprintf(whose, sizeof whose, " of kernel %.60s on GPU %d", launch->name, launch->gpu);
    }
    snprintf(text, sizeof text, "%s of %s memory at %#llx%s: %s (line %d, CTA %d%s) %s", deed(a->me, a->write),
             a->r->cta ? "shared" : "global", (unsigned long long)address, memory, deed(other, wrote), op->line,
             id_cta(m, other), whose, conflict_reason(a->me, other, kind, known));
    report_pair(m, kind, who->op, who->warp, who->lane, op->line, id_cta(m, other), thread, text);
}

/* Whether it does not matter which of two ordinary writes of one CTA comes last: they are of the same value
   (Triton's warpgroups may store a tile that each of them computed), or of lanes of one warp in one
   instruction, where PTX stores the value of one of them (Triton stores sums that lanes have added up in
   different orders). */
static bool replicated(const Machine *m, Id me, Id other, const Region *r, u64 offset, u32 bytes, u64 from) {
    if (!m->storing || id_async(other) || id_cta(m, me) != id_cta(m, other)) return false;
    if (id_launch(m, me) != id_launch(m, other)) return false;
    if ((me & OP_MASK) == (other & OP_MASK) && id_actor(me) == id_actor(other)) return true;
    return memcmp(r->data + offset, m->storing + (offset - from), bytes) == 0;
}

/* The least scope that has both threads. */
static int common_scope(const Machine *m, Id a, Id b) {
    if (id_cluster(a) == id_cluster(b)) return id_actor(a) / ACTORS == id_actor(b) / ACTORS ? SCOPE_CTA : SCOPE_CLUSTER;
    return !m->launch.peers || id_launch(m, a)->gpu == id_launch(m, b)->gpu ? SCOPE_GPU : SCOPE_SYSTEM;
}

__attribute__((noinline)) static bool scopes_have_both(const Access *a, Id other) {
    int least = id_scope(a->me) < id_scope(other) ? id_scope(a->me) : id_scope(other);
    return (least >= SCOPE_GPU && !a->m->launch.peers) || least >= common_scope(a->m, a->me, other);
}

/* Two strong accesses, whose scopes include each other's thread. */
static bool excused(const Access *a, Id other) {
    if (!a->strong || !id_strong(other)) return false;
    if ((a->me & other) >> 21 & 1 && !a->m->launch.peers) return true;    /* both of the GPU's scope or more */
    return scopes_have_both(a, other);
}

/* A writer that is ordered before, where order is not enough: of another CTA of the cluster, or before a copy. */
__attribute__((noinline)) static void check_ordered_writer(const Access *a, const Cell *c, u64 offset, u32 bytes) {
    if (!is_known_soundly(a, c->writer, c->written)) {
        if (!(a->write && replicated(a->m, a->me, c->writer, a->r, offset, bytes, a->from)))
            conflict(a, c->writer, true, offset, kind_of(a->me, c->writer), true);
        return;
    }
    if (a->who->async != 2 || id_async(c->writer) == 2) return;
    int which = a->r->cta ? FENCED_SHARED : FENCED_GLOBAL;
    if (!knows(a->who->warp, id_cluster(c->writer), id_actor(c->writer), c->written, which))
        conflict(a, c->writer, true, offset, PROXY_FENCE, false);
}

static void check_writer(const Access *a, const Cell *c, u64 offset, u32 bytes) {
    if (!c->writer || is_own(a, c->writer) || excused(a, c->writer)) return;
    if (!ordered(a->who, c->writer, c->written)) {
        if (!(a->write && replicated(a->m, a->me, c->writer, a->r, offset, bytes, a->from)))
            conflict(a, c->writer, true, offset, kind_of(a->me, c->writer), false);
    } else if (a->asks_more) check_ordered_writer(a, c, offset, bytes);
}

/* A reader that is ordered before, where PTX asks for more: CUTLASS's pipelines do without. */
__attribute__((noinline)) static void note_ordered_reader(const Access *a, Id reader, u32 clock, u64 offset) {
    if (!is_known_soundly(a, reader, clock)) conflict(a, reader, false, offset, NOTE, true);
    if (a->who->async != 2 || !a->r->cta || id_async(reader)) return;
    if (!knows(a->who->warp, id_cluster(reader), id_actor(reader), clock, FENCED_SHARED))
        conflict(a, reader, false, offset, NOTE, false);
}

static void check_reader(const Access *a, Id reader, u32 clock, u64 offset) {
    if (!reader || is_own(a, reader) || excused(a, reader)) return;
    if (!ordered(a->who, reader, clock)) conflict(a, reader, reader & WROTE, offset, kind_of(a->me, reader), false);
    else if (a->asks_more) note_ordered_reader(a, reader, clock, offset);
}
