/* Races: for each word of memory its last writer, and its readers since.
 *
 * An access conflicts with an earlier one to the same bytes when one of them writes, they are not both
 * atomic, and the earlier one is not known (clocks.c) to have happened before. That is decided from the
 * order that synchronisation makes, not from the order in which things happened to run, so one run finds
 * what any schedule could show. After FastTrack (Flanagan and Freund, 2009), with readers kept as a list. A
 * word that is accessed in parts is split into a cell for each byte.
 *
 * Within a warp, lanes are ordered by bar.warp.sync and whatever includes it. Writes of one value by one
 * instruction within a CTA are not reported: compilers replicate stores.
 *
 */
#include <stdio.h>
#include <stdlib.h>

#include "core.h"
#include "clocks.c"

enum { PAGE_WORDS = 1024, MAX_READERS = 32, MAX_GLOBAL_READERS = 4 };

/* Who, in 64 bits: cluster 20, actor 12, lane 5, several lanes 1, async 2, strong 1, wrote 1, system scope 1, op 21;
 * 0: never accessed. */
typedef u64 Id;
/* A list of readers also has ordinary writers that atomic writes came after, marked WROTE: an atomic access
 * conflicts with them, and not with the atomic one that is in Cell.writer. */
typedef struct Reader { Id id; u32 clock, next; } Reader;
/* more, split: pool indices, 0: none */
typedef struct Cell { Id writer, reader; u32 written, read, more, split; } Cell;
typedef struct Page { Cell cells[PAGE_WORDS]; } Page;

#define OP_MASK 0x1fffffull

static Id id_of(const Machine *m, const Who *who, bool strong) {
    return (u64)who->warp->cta->cluster->sequence << 44 | (u64)(who->actor & 0xfff) << 32
        | (u64)(who->lane & 31) << 27 | (u64)(who->async & 3) << 24 | (u64)strong << 23
        | (u64)(strong && who->system) << 21 | ((u64)(who->op - m->launch.ops) & OP_MASK);
}
static u32 id_cluster(Id id) { return (u32)(id >> 44); }
static u32 id_actor(Id id) { return id >> 32 & 0xfff; }
static i32 id_lane(Id id) { return id >> 27 & 31; }
static bool id_many(Id id) { return id >> 26 & 1; }
static u32 id_async(Id id) { return id >> 24 & 3; }
static bool id_strong(Id id) { return id >> 23 & 1; }
static bool id_system(Id id) { return id >> 21 & 1; }

/* The launch of an id, among peers; NULL without. */
static const PeerLaunch *id_launch(const Machine *m, Id id) {
    return m->launch.peers ? launch_of(m->launch.peers, id_cluster(id)) : NULL;
}

static const Op *id_op(const Machine *m, Id id) {
    const PeerLaunch *launch = id_launch(m, id);
    return &(launch ? launch->ops : m->launch.ops)[id & OP_MASK];
}
#define MANY_LANES (1ull << 26)
#define WROTE (1ull << 22)

/* **** pools **** */

static u32 new_split(struct Shadow *s, const Cell *from) {
    u32 at = s->cell_free;
    if (at) s->cell_free = s->cells[at].more;
    else {
        if (s->cell_count + 4 > s->cell_room)
            s->cells = realloc(s->cells, sizeof *s->cells * (s->cell_room = s->cell_room * 2 + 4096));
        if (!s->cell_count) s->cell_count = 4;  /* index 0 means none */
        at = s->cell_count;
        s->cell_count += 4;
    }
    for (u32 i = 0; i < 4; i++) s->cells[at + i] = *from, s->cells[at + i].more = s->cells[at + i].split = 0;
    s->cells[at].more = from->more;  /* further readers stay with the first byte: enough to find a conflict */
    return at;
}

static void free_readers(struct Shadow *s, u32 first) {
    while (first) {
        u32 next = s->readers[first].next;
        s->readers[first].next = s->reader_free;
        s->reader_free = first;
        first = next;
    }
}

static void free_split(struct Shadow *s, u32 at) {
    for (u32 i = 0; i < 4; i++) free_readers(s, s->cells[at + i].more);
    s->cells[at].more = s->cell_free;
    s->cell_free = at;
}

static void push_reader(struct Shadow *s, Cell *c, Id id, u32 clock) {
    u32 at = s->reader_free;
    if (at) s->reader_free = s->readers[at].next;
    else {
        if (s->reader_count + 1 >= s->reader_room)
            s->readers = realloc(s->readers,
                                 sizeof *s->readers * (s->reader_room = s->reader_room * 2 + 4096));
        at = ++s->reader_count;
    }
    s->readers[at] = (Reader){id, clock, c->more};
    c->more = at;
}

/* Makes room for another reader in the cell; beyond `most` the one before is forgotten. */
static void add_reader(struct Shadow *s, Cell *c, u32 most) {
    u32 length = 0;
    for (u32 i = c->more; i; i = s->readers[i].next) length++;
    if (length < most) push_reader(s, c, c->reader, c->read);
}

/* Empties the list, of all but the ordinary writers when the write that follows is atomic. */
static void clear_readers(struct Shadow *s, Cell *c, bool strong) {
    u32 *link = &c->more;
    while (strong && *link) {
        Reader *r = &s->readers[*link];
        if (r->id & WROTE) { link = &r->next; continue; }
        u32 next = r->next;
        r->next = s->reader_free;
        s->reader_free = *link;
        *link = next;
    }
    if (!strong && c->more) free_readers(s, c->more), c->more = 0;
    if (strong && c->writer && !id_strong(c->writer) && !id_async(c->writer))
        push_reader(s, c, c->writer | WROTE, c->written);
}

/* **** conflicts **** */

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

static const char *deed(Id id, bool wrote) {
    u32 family = id_actor(id) % ACTORS;
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

static void conflict(Machine *m, const Who *who, Id me, Id other, bool wrote, bool write, const Region *r,
                     u64 offset,
                     int kind) {
    char text[256], memory[48] = "", whose[128] = "";
    u32 family = id_actor(other) % ACTORS;
    const Op *op = id_op(m, other);
    const PeerLaunch *launch = id_launch(m, other);
    if (known_finding(m, kind, who->op->line, op->line)) return;
    i32 thread = family < ACTOR_MBARRIER ? (i32)(family % 32) * LANES + id_lane(other) : -1;
    const char *why = kind == PROXY_FENCE ? "has not passed a fence.proxy.async" : "is not ordered before";
    if (launch && !r->cta) {
        snprintf(memory, sizeof memory, " of GPU %d", r->gpu);
        snprintf(whose, sizeof whose, " of kernel %.60s on GPU %d", launch->name, launch->gpu);
    }
    snprintf(text, sizeof text, "%s of %s memory at %#llx%s: %s (line %d, CTA %d%s) %s", deed(me, write),
             r->cta ? "shared" : "global", (unsigned long long)(r->base + offset), memory, deed(other, wrote), op->line,
             id_cta(m, other), whose, why);
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

typedef struct {
    Machine *m;
    const Who *who;
    Region *r;
    Id me;
    u64 from;      /* where the whole access begins */
    bool write, strong;
} Access;

/* Two strong accesses, whose scopes include each other's thread: what the scope is counts between GPUs alone. */
static bool excused(const Access *a, Id other) {
    if (!a->strong || !id_strong(other)) return false;
    const PeerLaunch *launch = id_launch(a->m, other);
    return !launch || launch->gpu == a->m->launch.gpu || (id_system(a->me) && id_system(other));
}

static void check_writer(const Access *a, const Cell *c, u64 offset, u32 bytes) {
    if (!c->writer || excused(a, c->writer)) return;
    if (!ordered(a->who, c->writer, c->written)) {
        if (!(a->write && replicated(a->m, a->me, c->writer, a->r, offset, bytes, a->from)))
            conflict(a->m, a->who, a->me, c->writer, true, a->write, a->r, offset, kind_of(a->me, c->writer));
        return;
    }
    if (a->who->async != 2 || a->write || id_async(c->writer) == 2) return;
    int which = a->r->cta ? FENCED_SHARED : FENCED_GLOBAL;
    if (!knows(a->who->warp, id_cluster(c->writer), id_actor(c->writer), c->written, which))
        conflict(a->m, a->who, a->me, c->writer, true, false, a->r, offset, PROXY_FENCE);
}

static void check_reader(const Access *a, Id reader, u32 clock, u64 offset) {
    if (!reader || excused(a, reader) || ordered(a->who, reader, clock)) return;
    conflict(a->m, a->who, a->me, reader, reader & WROTE, a->write, a->r, offset, kind_of(a->me, reader));
}

static void write_cell(const Access *a, Cell *c, u64 offset, u32 bytes) {
    struct Shadow *s = a->m->shadow;
    check_writer(a, c, offset, bytes);
    check_reader(a, c->reader, c->read, offset);
    for (u32 i = c->more; i; i = s->readers[i].next) check_reader(a, s->readers[i].id, s->readers[i].clock,
                                                                  offset);
    if (c->more || a->strong) clear_readers(s, c, a->strong);
    c->writer = a->me, c->written = a->who->clock;
    c->reader = 0;
}

/* An atomic read, of what an atomic write left, against ordinary writes before that. */
static void check_covered(const Access *a, const Cell *c, u64 offset) {
    const Reader *readers = a->m->shadow->readers;
    for (u32 i = c->more; i; i = readers[i].next)
        if (readers[i].id & WROTE) check_reader(a, readers[i].id, readers[i].clock, offset);
}

static void read_cell(const Access *a, Cell *c, u64 offset, u32 bytes) {
    check_writer(a, c, offset, bytes);
    if (a->strong && c->more) check_covered(a, c, offset);
    Id before = c->reader;
    if (before && before >> 32 == a->me >> 32 && c->read == a->who->clock) {
        if (id_lane(before) != a->who->lane) c->reader |= MANY_LANES;
        return;
    }
    if (before && !ordered(a->who, before, c->read)) add_reader(a->m->shadow, c,
                                                                a->r->cta ? MAX_READERS : MAX_GLOBAL_READERS);
    c->reader = a->me, c->read = a->who->clock;
}

/* One word, or the part of it that [offset, offset + bytes) covers. */
static void access_word(const Access *a, Cell *c, u64 offset, u32 bytes) {
    struct Shadow *s = a->m->shadow;
    if (!c->split && bytes == 4) {
        if (a->write) write_cell(a, c, offset, 4); else read_cell(a, c, offset, 4);
        return;
    }
    if (!c->split) {
        u32 at = new_split(s, c);
        *c = (Cell){.split = at};
    }
    for (u32 i = 0; i < bytes; i++) {
        Cell *part_ = &s->cells[c->split + ((offset + i) & 3)];
        if (a->write) write_cell(a, part_, offset + i, 1); else read_cell(a, part_, offset + i, 1);
    }
    if (a->write && bytes == 4) {
        free_split(s, c->split);
        *c = (Cell){.writer = a->me, .written = a->who->clock};
    }
}

static u64 page_count(u64 nbytes) { return nbytes / 4 / PAGE_WORDS + 2; }

void shadow_access(Machine *m, const Who *who, Region *r, u64 offset, u64 bytes, int kind) {
    if (!m->launch.check || !bytes) return;
    bool strong = who->strong || kind == ATOMIC;
    Access a = {m, who, r, id_of(m, who, strong), offset, kind != READ, strong};
    if (!r->pages) r->pages = calloc(page_count(r->size), sizeof *r->pages);
    /* cells are for words of host memory, whose alignment is that of the address */
    for (u64 at = offset, end = offset + bytes; at < end;) {
        u64 word = at >> 2, next = (word + 1) << 2;
        u32 some = (u32)((next < end ? next : end) - at);
        Page **page = &r->pages[word / PAGE_WORDS];
        if (!*page) *page = calloc(1, sizeof **page);
        access_word(&a, &(*page)->cells[word % PAGE_WORDS], at, some);
        at += some;
    }
}

/* **** lifetimes **** */

void shadow_start(Machine *m) {
    m->shadow = m->launch.peers ? m->launch.peers->shadow : calloc(1, sizeof *m->shadow);
}

static void free_pages(Page **pages, u64 count) {
    for (u64 i = 0; i < count; i++) free(pages[i]);
    free(pages);
}

static void shadow_free(struct Shadow *s);

void shadow_region_free(Machine *m, Region *r) {
    if (r->pages) free_pages(r->pages, page_count(r->size));
    r->pages = NULL;
    /* locations are known by host address, which may be used again */
    for (i32 i = 0; r->cta && i < m->shadow->location_room; i++) {
        Location *at = &m->shadow->locations[i];
        u64 key = at->key & ((1ull << LOCATION_BITS) - 1);
        if (key >= (u64)r->data && key < (u64)(r->data + r->size)) at->clock.count = 0;
    }
}

void shadow_finish(Machine *m) {
    if (m->launch.peers) return;
    for (i32 i = 0; i < m->launch.region_count; i++) shadow_region_free(m, &m->launch.regions[i]);
    shadow_free(m->shadow);
}

static void shadow_free(struct Shadow *s) {
    for (i32 i = 0; i < s->location_room; i++) free(s->locations[i].clock.items);
    free(s->locations), free(s->cells), free(s->readers), free(s);
}

/* A CTA is gone. Others of its cluster that touched its shared memory must be known, by one of its warps, to
 * be done. */
void shadow_exit(Machine *m, Cta *c) {
    if (!m->launch.check || c->cluster->size == 1) return;
    for (i32 a = 0; a < m->actors; a++) {
        bool copies = a / ACTORS == c->rank && a % ACTORS >= ACTOR_MBARRIER;  /* what others copy into it */
        if (!c->remote[a] || (a / ACTORS == c->rank && !copies)) continue;
        u32 most = 0;
        for (i32 i = 0; i < c->warp_count; i++) {
            u32 known = part(c->warps[i].clock, KNOWN)[a];
            if (known > most) most = known;
        }
        if (most >= c->remote[a]) continue;
        if (copies) {
            report(m, ASYNC_HAZARD, m->current, &c->warps[0], 0, "the CTA (rank %d of its cluster) exits "
                   "without having waited on an mbarrier for what another CTA copies into its shared memory",
                   c->rank);
            return;
        }
        report(m, RACE, m->current, &c->warps[0], 0,
               "the CTA (rank %d of its cluster) exits while CTA rank %d may still access "
               "its shared memory: wait for it, or end with barrier.cluster", c->rank, a / ACTORS);
        return;
    }
}
