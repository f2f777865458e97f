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

#include "core.h"
#include "clocks.c"

enum { PAGE_WORDS = 1024, MAX_READERS = 32, MAX_GLOBAL_READERS = 4 };

/* Who, in 64 bits: cluster 20, actor 12, lane 5, several lanes 1, async 2, strong 1, wrote 1, scope 2, op 20; 0: never
 * accessed. */
typedef u64 Id;
/* A list of readers also has ordinary writers that atomic writes came after, marked WROTE: an atomic access
 * conflicts with them, and not with the atomic one that is in Cell.writer. */
typedef struct Reader { Id id; u32 clock, next; } Reader;
/* more, split: pool indices, 0: none */
typedef struct Cell { Id writer, reader; u32 written, read, more, split; } Cell;
/* noncoherent: for each word the op of the last ld.global.nc << 4 | bytes that such have read in a launch; NULL: none */
typedef struct Page { Cell cells[PAGE_WORDS]; u32 *noncoherent, launch; } Page;

#define OP_MASK 0xfffffull

static Id id_of(const Machine *m, const Who *who, bool strong) {
    return (u64)who->warp->cta->cluster->sequence << 44 | (u64)(who->actor & 0xfff) << 32
        | (u64)(who->lane & 31) << 27 | (u64)(who->async & 3) << 24 | (u64)strong << 23
        | (u64)(who->scope - SCOPE_CTA) << 20 | ((u64)(who->op - m->launch.ops) & OP_MASK);
}
static u32 id_cluster(Id id) { return (u32)(id >> 44); }
static u32 id_actor(Id id) { return id >> 32 & 0xfff; }
static i32 id_lane(Id id) { return id >> 27 & 31; }
static bool id_many(Id id) { return id >> 26 & 1; }
static u32 id_async(Id id) { return id >> 24 & 3; }
static bool id_strong(Id id) { return id >> 23 & 1; }
static int id_scope(Id id) { return (int)(id >> 20 & 3) + SCOPE_CTA; }

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
            s->cells = take_more(s->cells, sizeof *s->cells * (s->cell_room = s->cell_room * 2 + 4096));
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
            s->readers = take_more(s->readers,
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

#include "conflicts.c"

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
    if (before && !is_own(a, before) && !ordered(a->who, before, c->read)) add_reader(a->m->shadow, c,
                                                                a->r->cta ? MAX_READERS : MAX_GLOBAL_READERS);
    c->reader = a->me, c->read = a->who->clock;
}

/* The part of a word that [offset, offset + bytes) covers, or a word whose bytes have a cell each. */
__attribute__((noinline)) static void access_bytes(const Access *a, Cell *c, u64 offset, u32 bytes) {
    struct Shadow *s = a->m->shadow;
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

/* **** ld.global.nc, which sees no writes of its launch **** */

/* `bytes` of the word from `offset` on, which is `word` of the page. */
static void read_noncoherent(const Access *a, Page *page, u64 word, u64 offset, u32 bytes) {
    const Cell *c = &page->cells[word];
    Machine *m = a->m;
    if (!page->noncoherent) page->noncoherent = take_zeros(PAGE_WORDS, sizeof *page->noncoherent);
    if (page->launch != m->peer_launch) memset(page->noncoherent, 0, sizeof *page->noncoherent * PAGE_WORDS);
    page->launch = m->peer_launch;
    u32 mask = ((1u << bytes) - 1) << (offset & 3);
    page->noncoherent[word] = (u32)(a->me & OP_MASK) << 4 | (page->noncoherent[word] & 15) | mask;
    for (u32 i = 0; i < (c->split ? bytes : 1); i++) {
        Id writer = c->split ? m->shadow->cells[c->split + ((offset + i) & 3)].writer : c->writer;
        if (!writer || id_launch(m, writer) != id_launch(m, a->me)) continue;
        m->conflicts++;
        if (known_finding(m, RACE, a->who->op->line, id_op(m, writer)->line)) continue;
        char text[256];
        snprintf(text, sizeof text, "a read by ld.global.nc of global memory at %#llx, which the launch has written (line %d, "
                 "CTA %d): such reads need not see it", (unsigned long long)(a->r->base + offset + i),
                 id_op(m, writer)->line, id_cta(m, writer));
        report_pair(m, RACE, a->who->op, a->who->warp, a->who->lane, id_op(m, writer)->line, id_cta(m, writer), -1, text);
    }
}

/* A write of what was read so before: known GPUs read what there was. */
static void write_noncoherent(const Access *a, const Page *page, u64 word, u64 offset, u32 bytes) {
    u32 was = page->noncoherent[word];
    bool read = page->launch == a->m->peer_launch && was & ((1u << bytes) - 1) << (offset & 3);
    if (!read) return;
    int line = a->m->launch.ops[was >> 4].line;
    char text[256];
    if (known_finding(a->m, NOTE, a->who->op->line, line)) return;
    snprintf(text, sizeof text, "a write of global memory at %#llx, which ld.global.nc (line %d) has read: it is for bytes "
             "that the launch does not write", (unsigned long long)(a->r->base + offset), line);
    report_pair(a->m, NOTE, a->who->op, a->who->warp, a->who->lane, line, -1, -1, text);
}

__attribute__((noinline)) static void enter_noncoherent(const Access *a, Page *page, u64 word, u64 offset, u32 bytes) {
    if (a->who->noncoherent) read_noncoherent(a, page, word, offset, bytes);
    else if (a->write && page->noncoherent) write_noncoherent(a, page, word, offset, bytes);
}

static u64 page_count(u64 nbytes) { return nbytes / 4 / PAGE_WORDS + 2; }

void shadow_access(Machine *m, const Who *who, Region *r, u64 offset, u64 bytes, int kind) {
    if (!m->launch.check || !bytes) return;
    bool strong = who->strong || kind == ATOMIC;
    bool asks_more = m->launch.remote || who->async == 2;
    Access a = {m, who, r, id_of(m, who, strong), offset, kind != READ, strong, asks_more,
                !(asks_more || strong || who->async)};
    if (who->noncoherent) m->noncoherent = true;
    bool watched = m->noncoherent && !r->cta;
    if (!r->pages) r->pages = take_zeros(page_count(r->size), sizeof *r->pages);
    /* cells are for words of host memory, whose alignment is that of the address */
    for (u64 at = offset, end = offset + bytes; at < end;) {
        u64 word = at >> 2, next = (word + 1) << 2;
        u32 some = (u32)((next < end ? next : end) - at);
        Page **page = &r->pages[word / PAGE_WORDS];
        if (!*page) *page = take_zeros(1, sizeof **page);
        Cell *c = &(*page)->cells[word % PAGE_WORDS];
        if (c->split || some != 4) access_bytes(&a, c, at, some);
        else if (a.write) write_cell(&a, c, at, 4);
        else read_cell(&a, c, at, 4);
        if (watched) enter_noncoherent(&a, *page, word % PAGE_WORDS, at, some);
        at += some;
    }
}

/* **** lifetimes **** */

void shadow_start(Machine *m) {
    m->shadow = m->launch.peers ? m->launch.peers->shadow : take_zeros(1, sizeof *m->shadow);
}

static void free_pages(Page **pages, u64 count) {
    for (u64 i = 0; i < count; i++) if (pages[i]) give(pages[i]->noncoherent), give(pages[i]);
    give(pages);
}

static void shadow_free(struct Shadow *s);

void shadow_region_free(Machine *m, Region *r) {
    if (r->pages) free_pages(r->pages, page_count(r->size));
    r->pages = NULL;
    /* locations are known by host address, which may be used again */
    for (i32 i = 0; r->cta && i < m->shadow->location_room; i++) {
        Location *at = &m->shadow->locations[i];
        if (at->key >= (u64)r->data && at->key < (u64)(r->data + r->size)) at->clock.count = 0;
    }
}

void shadow_finish(Machine *m) {
    if (m->launch.peers) return;
    for (i32 i = 0; i < m->launch.region_count; i++) shadow_region_free(m, &m->launch.regions[i]);
    shadow_free(m->shadow);
}

static void shadow_free(struct Shadow *s) {
    for (i32 i = 0; i < s->location_room; i++) give(s->locations[i].clock.items);
    give(s->locations), give(s->cells), give(s->readers), give(s);
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
