/* Asynchronous copies: what all of them share, and cp.async with its groups.
 *
 * When an operation is issued its addresses are checked, its reads and writes are entered in the shadow as
 * those of the actor that tells of its end (the warp's groups, or an mbarrier), and what it will write is
 * poisoned. The data moves when the machine completes its `Async`, sources being read then. Completing one
 * earlier than it has to be is always allowed.
 */

#include "core.h"

enum { CP_ALL = 1, CP_NOINC = 1 };

/* The mbarrier that an operation signals (cta NULL: none, groups tell), and its phases when it was issued. */
typedef struct {
    Cta *cta;
    u64 offset;
    u32 actor, epoch;
} Signal;

/* A source or destination, as reach_lane does it. Shared memory of other CTAs is not marked as touched by
 * this thread: what an asynchronous operation does there ends with an mbarrier of that CTA. */
static bool async_place(Machine *m, Warp *w, const Op *op, int lane, int space, u64 address, u64 bytes,
                        u32 align, int kind, Place *p) {
    Cluster *k = w->cta->cluster;
    u64 rank = address >> RANK_SHIFT;
    if (space != SHARED_CLUSTER || rank >= (u64)k->size || k->ctas[rank].gone || address & (align - 1))
        return reach_lane(m, w, op, lane, space, address, bytes, align, kind, p);
    if (m->launch.check && (i32)rank != w->cta->rank) check_started(m, w, op, lane, (i32)rank);
    Region *r = &k->ctas[rank].shared;
    if (place_at(p, r, r->data, address - r->base, bytes, r->size) == FOUND) return true;
    report_outside(m, w, op, lane, space, address, bytes, kind);
    return false;
}

/* What an operation will write: entered, and poison until it is complete. */
static void async_write(Machine *m, Who *who, const Place *p, u32 bytes) {
    enter_access(m, who, p->region, p->offset, bytes, WRITE);
    memset(p->host, 0xff, bytes);
    if (m->launch.check && p->region->valid) memset(p->region->valid + p->offset, 0, bytes);
}

/* The bytes are there. */
static void async_written(const Machine *m, Region *r, u64 offset, u32 bytes) {
    if (m->launch.check && r->valid) memset(r->valid + offset, 1, bytes);
}

/* The mbarrier at a shared address that is to be signalled, by the async proxy or not, when data has arrived
 * in `owner`. */
static bool find_signal(Machine *m, Warp *w, const Op *op, int lane, u64 address, Cta *owner, bool proxy,
                        Signal *s) {
    Place p;
    if (!async_place(m, w, op, lane, SHARED_CLUSTER, address, 8, 8, ATOMIC, &p)) return false;
    if (p.region->cta != owner) {
        report(m, BARRIER, op, w, lane,
               "the mbarrier at 0x%llx is in CTA rank %d, the destination in rank %d",
               (unsigned long long)address, p.region->cta->rank, owner->rank);
        return false;
    }
    Mbarrier *b = mbarrier_at(m, w, op, lane, owner, p.offset);
    if (!b) return false;
    if (proxy) check_init_seen(m, w, op, lane, b);
    *s = (Signal){owner, p.offset, b->actor, b->epoch};
    Who who = {w, op, lane, b->actor, b->epoch + 1, 0, 1};
    shadow_access(m, &who, p.region, p.offset, 8, ATOMIC);
    clock_phases(m, w, b->clock[b->phase & 1]);
    if (m->launch.check) {
        Clock *told = b->clock[b->phase & 1];
        u32 *maps = part(told, KNOWN) + actor_of(w, ACTOR_MAP);
        told->started |= 1u << w->cta->rank;
        if (*maps < w->map_reads) *maps = w->map_reads;
    }
    if (m->launch.check && owner != w->cta) owner->remote[b->actor] = b->epoch + 1;
    return true;
}

/* A copy goes on its way. */
static void note_load(const Machine *m, const Warp *w, const Signal *s, u64 bytes) {
    if (w->tape && s->cta)
        tape_note(w, LOADS, (u32)s->cta->rank, barrier_key(m, s->cta, s->offset), s->epoch, bytes);
}

/* complete_tx when the data is there. */
static void send_signal(Machine *m, const Async *a, const Signal *s, u64 bytes) {
    if (!s->cta) return;
    if (s->cta->gone) {
        report(m, ASYNC_HAZARD, a->op, a->warp, a->lane, "the copy was not complete when the CTA whose "
               "shared memory it writes (rank %d) exited: wait on its mbarrier first", s->cta->rank);
        return;
    }
    Mbarrier *b = mbarrier_at(m, a->warp, a->op, a->lane, s->cta, s->offset);
    if (!b) return;
    if (b->epoch != s->epoch)
        report(m, ASYNC_HAZARD, a->op, a->warp, a->lane, "the copy was issued in one phase of its mbarrier "
               "(0x%llx) and completes in a later one: the earlier did not expect all bytes",
               (unsigned long long)(s->cta->shared.base + s->offset));
    mbarrier_complete_tx(m, a->warp, a->op, a->lane, s->cta, s->offset, (i64)bytes);
}

/* An address of each lane, as 64 bits: for operands beyond an op's own address. */
HANDLER(async_address) {
    u64 out[LANES];
    addresses(w, op, out);
    put64(w, op->d, out, mask);
    (void)m;
    return NEXT;
}

/* A cache policy (a) of an asynchronous copy: 1 in the upper 4 bits, and no bits below the upper 12 unless bit 59
 * says that it is of a range (on an H100 createpolicy.range gives 0x1c00002000000000). With another number, the
 * state of an mbarrier, an H100 ended the launch with an illegal instruction. */
HANDLER(check_policy) {
    ACTIVE {
        u64 policy = r64(w, op->a)[l];
        if (policy >> 60 != 1 || (!(policy >> 59 & 1) && policy << 12))
            report(m, OUT_OF_BOUNDS, op, w, l, "0x%llx is no cache policy: it is not of createpolicy",
                   (unsigned long long)policy);
    }
    return NEXT;
}

/* **** other CTAs' shared memory **** */

/* mapa: the address (width 4 or 8 bytes) as it is in the CTA of rank b of the cluster. */
HANDLER(mapa) {
    u32 narrow[LANES];
    u64 wide[LANES];
    (void)m;
    if (op->width == 4) {
        EACH narrow[l] = (r32(w, op->a)[l] & ((1u << RANK_SHIFT) - 1)) | r32(w, op->b)[l] << RANK_SHIFT;
        put32(w, op->d, narrow, mask);
        return NEXT;
    }
    EACH wide[l] = (r64(w, op->a)[l] & ~0xff000000ull) | (u64)(r32(w, op->b)[l] & 255) << RANK_SHIFT;
    put64(w, op->d, wide, mask);
    return NEXT;
}

/* getctarank: the rank of the CTA in whose shared memory an address (width 4 or 8 bytes) is. */
HANDLER(getctarank) {
    u32 rank[LANES];
    (void)m;
    EACH rank[l] = (op->width == 4 ? r32(w, op->a)[l] : (u32)r64(w, op->a)[l]) >> RANK_SHIFT;
    put32(w, op->d, rank, mask);
    return NEXT;
}

/* **** cp.async **** */

/* One lane's copy: `bytes` from `from`, zeros up to the op's width. */
typedef struct {
    Region *region;
    u64 offset;
    const u8 *from;
    u32 bytes;
} CopyPiece;

static void complete_copies(Machine *m, Async *a) {
    CopyPiece *piece = (CopyPiece *)a->bytes;
    for (u64 i = 0; i < a->args[0]; i++, piece++) {
        u8 *to = piece->region->data + piece->offset;
        memcpy(to, piece->from, piece->bytes);
        memset(to + piece->bytes, 0, a->op->width - piece->bytes);
        async_written(m, piece->region, piece->offset, a->op->width);
    }
}

/* Bytes a lane reads: c gives them, the predicate e says none. */
static u32 copied_bytes(Machine *m, Warp *w, const Op *op, int lane) {
    u32 bytes = op->c < 0 ? op->width : r32(w, op->c)[lane];
    if (op->e >= 0 && pred(w, op->e) >> lane & 1) return 0;
    if (bytes <= op->width) return bytes;
    report(m, OUT_OF_BOUNDS, op, w, lane, "src-size is %u, more than the %u bytes of the copy", bytes,
           op->width);
    return op->width;
}

static void count_copies(Machine *m, const Op *op, const u64 *to, const u64 *from, u32 written,
                         u32 read) {
    if (written) count_bank_conflicts(m, op, to, written, op->width);
    u64 bytes = (u64)popcount(read) * op->width;
    m->totals.async += bytes;
    if (!read) return;
    u32 sectors = count_sectors(from, read, op->width);
    Counter *counter = &m->launch.counters[op->source];
    counter->sectors += sectors, counter->requests++;
    m->totals.l2 += 32ull * sectors;
    if (m->running->tape) note_sectors(m->running, from, read, op->width, sectors, 0);
    m->totals.global_read += bytes;
}

/* cp.async: `a` the destination, b the source, width bytes; c (src-size) and e (ignore-src) may be absent. */
HANDLER(cp_async) {
    u64 to[LANES], *from = r64(w, op->b);
    u32 written = 0, read = 0, group = ~0u;
    CopyPiece *pieces = take(sizeof *pieces * LANES), *next = pieces;
    addresses(w, op, to);
    ACTIVE {
        Place d, s = {.host = memory_zeros};
        u32 bytes = copied_bytes(m, w, op, l), mine = w->copy_groups[l] + 1;
        Who who = {w, op, l, actor_of(w, ACTOR_COPY), mine + w->copy_arrivals, 1, 0};
        if (!async_place(m, w, op, l, op->space, to[l], op->width, op->width, WRITE, &d)) continue;
        if (bytes && !async_place(m, w, op, l, GLOBAL, from[l], bytes, op->width, READ, &s)) bytes = 0;
        if (bytes) enter_access(m, &who, s.region, s.offset, bytes, READ), read |= 1u << l;
        async_write(m, &who, &d, op->width);
        *next++ = (CopyPiece){d.region, d.offset, s.host, bytes};
        written |= 1u << l;
        group = mine < group ? mine : group;
    }
    count_copies(m, op, to, from, written, read);
    Async a = {.complete = complete_copies, .warp = w, .op = op, .lane = lowest(mask), .group = group,
               .family = COPY, .args = {(u64)(next - pieces)}, .bytes = (u8 *)pieces};
    if (written) async_add(m, a);
    else give(pieces);
    return NEXT;
}

HANDLER(cp_commit) {
    ACTIVE w->copy_groups[l]++;
    (void)m, (void)op;
    return NEXT;
}

/* The clock up to which cp.asyncs are known to be complete: as far as all lanes that have some waited. */
static u32 copies_complete(const Warp *w) {
    u32 least = ~0u, most = 0;
    EACH {
        if (w->copy_done[l] > most) most = w->copy_done[l];
        if (w->copy_groups[l] > w->copy_done[l] && w->copy_done[l] < least) least = w->copy_done[l];
    }
    return (least < most ? least : most) + w->copy_arrivals;
}

/* cp.async.wait_group imm; with CP_ALL, cp.async.wait_all: commit_group and wait_group 0. */
HANDLER(cp_wait) {
    u32 newest = 0;
    ACTIVE {
        if (op->flags & CP_ALL) w->copy_groups[l]++;
        u32 done = w->copy_groups[l] > (u64)op->imm ? w->copy_groups[l] - (u32)op->imm : 0;
        if (done > w->copy_done[l]) w->copy_done[l] = done;
        if (done > newest) newest = done;
    }
    async_complete_groups(m, w, COPY, -1, newest, false);
    clock_observe(m, w, actor_of(w, ACTOR_COPY), copies_complete(w));
    return NEXT;
}

/* cp.async.mbarrier.arrive when the copies before it are complete; args: CTA, offset, arrivals, group,
 * clock. */
static void complete_arrival(Machine *m, Async *a) {
    Cta *cta = (Cta *)a->args[0];
    async_complete_groups(m, a->warp, COPY, -1, (u32)a->args[3], false);
    if (cta->gone) return;
    Mbarrier *b = mbarrier_at(m, a->warp, a->op, a->lane, cta, a->args[1]);
    if (!b) return;
    /* The async proxy sees the copies too: the cp.async mainloops of CUTLASS and of FlashAttention-3
     * go from this arrival to wgmma, and no fence.proxy.async can be put between the two. */
    for (int which = KNOWN; m->launch.check && which <= FENCED_SHARED; which++) {
        u32 *known = part(b->clock[b->phase & 1], which) + actor_of(a->warp, ACTOR_COPY);
        if (*known < (u32)a->args[4]) *known = (u32)a->args[4];
    }
    b->copies[b->phase & 1] = true;
    mbarrier_arrive_count(m, a->warp, a->op, a->lane, cta, b, (i64)a->args[2]);
}

/* cp.async.mbarrier.arrive{.noinc}: without .noinc the phase expects the arrivals in addition. */
HANDLER(cp_arrive) {
    u64 address[LANES];
    addresses(w, op, address);
    u32 group = 0, left = mask;
    ACTIVE if (w->copy_groups[l] + 1 > group) group = w->copy_groups[l] + 1;
    while (left) {
        int lane = lowest(left);
        u32 same = 0;
        EACH if ((left >> l & 1) && address[l] == address[lane]) same |= 1u << l;
        left &= ~same;
        Place p;
        if (!reach_lane(m, w, op, lane, op->space, address[lane], 8, 8, ATOMIC, &p)) continue;
        if (!p.region || !p.region->cta) {
            report(m, BARRIER, op, w, lane, "an mbarrier at 0x%llx, which is not shared memory",
                   (unsigned long long)address[lane]);
            continue;
        }
        Mbarrier *b = mbarrier_at(m, w, op, lane, p.region->cta, p.offset);
        if (!b) continue;
        clock_phases(m, w, b->clock[b->phase & 1]);
        if (w->tape) tape_note(w, FOLLOWS, (u32)popcount(same), barrier_key(m, p.region->cta, p.offset),
                               b->epoch, 0);
        if (!(op->flags & CP_NOINC)) {
            if (b->pending <= MBARRIER_LIMIT) b->pending += popcount(same);
            mbarrier_changed(m, p.region->cta, b);
        }
        async_add(m, (Async){.complete = complete_arrival, .warp = w, .op = op, .lane = lane,
                             .args = {(u64)p.region->cta, p.offset, (u64)popcount(same), group,
                                      group + w->copy_arrivals}});
    }
    w->copy_arrivals++;
    return NEXT;
}

/* **** bulk groups **** */

HANDLER(bulk_commit) {
    ACTIVE w->bulk_groups[l]++;
    (void)m, (void)op;
    return NEXT;
}

/* cp.async.bulk.wait_group{.read} imm (flags: .read): all but the newest imm groups are complete, or have
 * read their sources. */
HANDLER(bulk_wait) {
    u32 newest = 0;
    ACTIVE {
        u32 done = w->bulk_groups[l] > (u64)op->imm ? w->bulk_groups[l] - (u32)op->imm : 0;
        if (done > w->bulk_read[l]) w->bulk_read[l] = done;
        if (!op->flags && done > w->bulk_done[l]) w->bulk_done[l] = done;
        if (done) async_complete_groups(m, w, BULK, l, done, op->flags);
        if (done > newest) newest = done;
    }
    clock_observe(m, w, actor_of(w, ACTOR_BULK_READ), newest);
    if (!op->flags) clock_observe(m, w, actor_of(w, ACTOR_BULK), newest);
    clock_observe(m, w, actor_of(w, ACTOR_MAP), w->map_reads);  /* CUTLASS's tma_desc_wait_group */
    return NEXT;
}
