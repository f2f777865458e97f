/* Addresses to memory: state spaces, bounds, alignment, initialisation and races, and what accesses cost.
 *
 * An access that fails is reported once for its place in the program, gives zeros or is dropped, and the
 * launch goes on.
 */
#include "core.h"

enum { FOUND, OUTSIDE, REPORTED };

static u8 memory_zeros[64];

/* Where bytes lie. `region` is NULL for local memory and parameters, which are neither shared nor tracked. */
typedef struct {
    Region *region;
    u64 offset;
    u8 *host;
} Place;

/* The same for the lanes of a warp: `good` have a place; lanes outside it point to zeros. */
typedef struct {
    u32 good;
    Region *region[LANES];
    u64 offset[LANES];
    u8 *host[LANES];
} Reach;

typedef unsigned long long ull;   /* for printf */

static const char *space_name(int space) {
    static const char *names[] = {"generic", "global", "shared", "shared::cluster", "local", "const",
                                  "param"};
    return names[space];
}

/* The last global allocation that begins at or below an address, -1: none. */
static i32 region_below(const Machine *m, u64 address) {
    i32 low = 0, high = m->launch.region_count;
    while (low < high) {
        i32 middle = (low + high) / 2;
        if (m->launch.regions[middle].base <= address) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

static bool within(u64 offset, u64 bytes, u64 size) { return offset <= size && bytes <= size - offset; }

static bool in_window(u64 address, u64 window) { return address - window < WINDOW_BYTES; }

/* The shared memory of a CTA is there once the CTA has started. */
static void check_started(Machine *m, Warp *w, const Op *op, int lane, i32 rank) {
    if (w->clock->started >> rank & 1) return;
    const u32 *known = part(w->clock, KNOWN) + rank * ACTORS;
    for (i32 i = 0; i < MAX_WARPS; i++) if (known[i]) { w->clock->started |= 1u << rank; return; }
    report(m, RACE, op, w, lane, "an access to the shared memory of the CTA of rank %d, which is not known to have "
           "started: barrier.cluster before the first", rank);
}

Cta *shared_owner(Machine *m, Warp *w, const Op *op, int lane, u64 address) {
    i32 rank = (i32)((u32)address >> RANK_SHIFT);
    Cluster *cluster = w->cta->cluster;
    if (rank >= cluster->size) {
        report(m, OUT_OF_BOUNDS, op, w, lane,
               "shared address 0x%x names the CTA of rank %d, the cluster has %d", (u32)address, rank,
               cluster->size);
        return NULL;
    }
    Cta *cta = &cluster->ctas[rank];
    if (cta == w->cta) return cta;
    if (cta->gone) {
        report(m, OUT_OF_BOUNDS, op, w, lane,
               "shared address 0x%x lies in the CTA of rank %d, which has exited", (u32)address, rank);
        return NULL;
    }
    if (m->launch.check) check_started(m, w, op, lane, rank);
    if (cta->remote) cta->remote[actor_of(w, 0)] = w->now;
    return cta;
}

/* The place `offset` bytes into memory of `size` bytes. Pointers are made of offsets that are inside alone. */
static int place_at(Place *p, Region *r, u8 *base, u64 offset, u64 bytes, u64 size) {
    if (!within(offset, bytes, size)) return OUTSIDE;
    *p = (Place){r, offset, base + offset};
    return FOUND;
}

/* A place in the shared memory of the warp's CTA, or with `cluster` of any of its cluster. */
static int find_shared(Machine *m, Warp *w, const Op *op, int lane, u32 address, u64 bytes, bool cluster,
                       Place *p) {
    Cta *cta = w->cta;
    if (cluster && (cta = shared_owner(m, w, op, lane, address)) == NULL) return REPORTED;
    Region *r = &cta->shared;  /* an address below is a large offset */
    return place_at(p, r, r->data, address - (u32)r->base, bytes, r->size);
}

/* A place in a lane's local memory or in the parameters. */
static int find_private(Machine *m, Warp *w, int lane, bool local, u64 offset, u64 bytes, Place *p) {
    u64 size = local ? m->launch.local_bytes : (u64)m->launch.parameter_bytes;
    u8 *base = local ? w->local + (size_t)lane * m->launch.local_bytes : (u8 *)m->launch.parameters;
    return place_at(p, NULL, base, offset, bytes, size);
}

static int find_global(Machine *m, u64 address, u64 bytes, Place *p) {
    i32 i = region_below(m, address);
    if (i < 0) return OUTSIDE;
    Region *r = &m->launch.regions[i];
    return place_at(p, r, r->data, address - r->base, bytes, r->size);
}

/* Resolves an address of a state space. A generic one lies in the window of another space, or is global. */
static int find_place(Machine *m, Warp *w, const Op *op, int lane, int space, u64 address, u64 bytes,
                      Place *p) {
    u32 low = (u32)address;
    switch (space) {
    case GENERIC:
        if (in_window(address, SHARED_WINDOW)) return find_shared(m, w, op, lane, low, bytes, true, p);
        if (in_window(address, LOCAL_WINDOW)) return find_private(m, w, lane, true, low, bytes, p);
        if (in_window(address, PARAM_WINDOW)) return find_private(m, w, lane, false, low, bytes, p);
        return find_global(m, address, bytes, p);
    case SHARED:
    case SHARED_CLUSTER:
        return address >> 32 ? OUTSIDE : find_shared(m, w, op, lane, low, bytes, space == SHARED_CLUSTER, p);
    case LOCAL: return find_private(m, w, lane, true, address, bytes, p);
    case PARAM: return find_private(m, w, lane, false, address, bytes, p);
    default: return find_global(m, address, bytes, p);
    }
}

static const char *kind_name(int kind) {
    static const char *names[] = {"read", "write", "atomic access"};
    return names[kind];
}

/* Reports a global address in no allocation, with the nearest one. */
static void report_global(Machine *m, Warp *w, const Op *op, int lane, u64 address, u64 bytes,
                          const char *what) {
    i32 i = region_below(m, address);
    const Region *below = i < 0 ? NULL : &m->launch.regions[i];
    const Region *above = i + 1 < m->launch.region_count ? &m->launch.regions[i + 1] : NULL;
    bool inside = below && address - below->base < below->size;
    u64 past = below ? address + (inside ? bytes : 0) - below->base - below->size : ~0ull;
    if (above && !inside && above->base - address < past)
        report(m, OUT_OF_BOUNDS, op, w, lane,
               "%s of %llu bytes at 0x%llx, %llu bytes before the allocation of %llu bytes at 0x%llx", what,
               (ull)bytes, (ull)address, (ull)(above->base - address), (ull)above->size, (ull)above->base);
    else if (below)
        report(m, OUT_OF_BOUNDS, op, w, lane,
               "%s of %llu bytes at 0x%llx, which %s %llu bytes past the end of the allocation of %llu bytes "
               "at 0x%llx", what, (ull)bytes, (ull)address, inside ? "ends" : "begins", (ull)past,
               (ull)below->size, (ull)below->base);
    else
        report(m, OUT_OF_BOUNDS, op, w, lane, "%s of %llu bytes at 0x%llx, and nothing is allocated", what,
               (ull)bytes, (ull)address);
}

/* Reports a shared address outside the memory of the CTA it names. */
static void report_shared(Machine *m, Warp *w, const Op *op, int lane, bool cluster, u64 address, u64 bytes,
                          const char *what) {
    u64 base = w->cta->shared.base, size = m->launch.shared_bytes, rank = address >> RANK_SHIFT;
    if (!cluster && rank != (u64)w->cta->rank) {
        bool reachable = rank < (u64)w->cta->cluster->size;
        report(m, OUT_OF_BOUNDS, op, w, lane,
               "%s of %llu bytes at shared address 0x%llx, outside this CTA's %llu bytes at 0x%llx%s", what,
               (ull)bytes, (ull)address, (ull)size, (ull)base,
               reachable ? "; .shared::cluster reaches other CTAs" : "");
        return;
    }
    base = SHARED_BASE | rank << RANK_SHIFT;
    bool before = address < base;
    u64 distance = before ? base - address : address + bytes - base - size;
    report(m, OUT_OF_BOUNDS, op, w, lane,
           "%s of %llu bytes at shared address 0x%llx, %llu bytes %s the %llu bytes of shared memory at "
           "0x%llx", what, (ull)bytes, (ull)address, (ull)distance,
           before ? "before" : "past", (ull)size, (ull)base);
}

static void report_outside(Machine *m, Warp *w, const Op *op, int lane, int space, u64 address, u64 bytes,
                           int kind) {
    const char *what = kind_name(kind);
    if (space == GENERIC) {
        space = in_window(address, SHARED_WINDOW) ? SHARED_CLUSTER : in_window(address, LOCAL_WINDOW) ? LOCAL
              : in_window(address, PARAM_WINDOW) ? PARAM : GLOBAL;
        if (space != GLOBAL) address = (u32)address;
    }
    if (space == GLOBAL || space == CONST) { report_global(m, w, op, lane, address, bytes, what); return; }
    if (space == SHARED || space == SHARED_CLUSTER) {
        report_shared(m, w, op, lane, space == SHARED_CLUSTER, address, bytes, what);
        return;
    }
    u64 size = space == LOCAL ? m->launch.local_bytes : (u64)m->launch.parameter_bytes;
    report(m, OUT_OF_BOUNDS, op, w, lane,
           "%s of %llu bytes at offset 0x%llx of the %llu bytes of %s memory", what, (ull)bytes, (ull)address,
           (ull)size, space_name(space));
}

/* One lane's place after checking bounds and alignment, with a finding and false when they fail. */
static bool reach_lane(Machine *m, Warp *w, const Op *op, int lane, int space, u64 address, u64 bytes,
                       u32 align, int kind, Place *p) {
    int found = find_place(m, w, op, lane, space, address, bytes, p);
    if (found == OUTSIDE) report_outside(m, w, op, lane, space, address, bytes, kind);
    if (found != FOUND) return false;
    u64 parameter = (u64)((uintptr_t)p->host - (uintptr_t)m->launch.parameters);
    if (address & (align - 1)) {
        report(m, MISALIGNED, op, w, lane,
               "%s of %llu bytes at %s address 0x%llx, which is not a multiple of %u", kind_name(kind),
               (ull)bytes, space_name(space), (ull)address, align);
        return false;
    }
    if (kind != READ && !p->region && parameter < (u64)m->launch.parameter_bytes) {
        report(m, OUT_OF_BOUNDS, op, w, lane, "%s at offset 0x%llx of the parameters, which can only be read",
               kind_name(kind), (ull)p->offset);
        return false;
    }
    return true;
}

u8 *locate(Machine *m, Warp *w, const Op *op, int lane, int space, u64 address, u32 bytes, u32 align,
           Region **region, u64 *offset) {
    Place p;
    if (!reach_lane(m, w, op, lane, space, address, bytes, align, READ, &p)) return NULL;
    *region = p.region;
    *offset = p.offset;
    return p.host;
}

static void report_uninitialized(Machine *m, const Who *who, const Region *r, u64 offset, u32 bytes, int kind, u32 first) {
    i32 before = m->finding_count;
    report(m, UNINITIALIZED, who->op, who->warp, who->lane,
           "%s of %u bytes at %s address 0x%llx: byte %u of them was never written", kind_name(kind), bytes,
           r->cta ? "shared" : "global", (ull)(r->base + offset), first);
    if (m->finding_count > before) m->findings[before].address = r->base + offset + first;
}

/* Races and initialisation of one lane's access; it may have no region. Bytes that a race is about need not have been
 * written. */
static void enter_access(Machine *m, Who *who, Region *r, u64 offset, u32 bytes, int kind) {
    if (!m->launch.check || r == NULL) return;
    if (!r->cta && (m->launch.footprint || r->flight)) footprint_enter(m, who, r, offset, bytes, kind);
    u32 conflicts = m->conflicts;
    shadow_access(m, who, r, offset, bytes, kind);
    if (!r->valid) return;
    u8 *valid = r->valid + offset, *first;
    if (bytes == 4) {   /* without calls: most are */
        u32 word, written = 0x01010101;
        memcpy(&word, valid, 4);
        if (kind == WRITE || word == written) {
            memcpy(valid, &written, 4);
            return;
        }
    }
    if (kind != WRITE && m->conflicts == conflicts && (first = memchr(valid, 0, bytes)) != NULL)
        report_uninitialized(m, who, r, offset, bytes, kind, (u32)(first - valid));
    if (kind != READ) memset(valid, 1, bytes);
}

static Who thread_of(Warp *w, const Op *op, int lane) {
    return (Who){.warp = w, .op = op, .lane = lane, .actor = actor_of(w, 0), .clock = w->now};
}

u8 *touch(Machine *m, Warp *w, const Op *op, int lane, int space, u64 address, u32 bytes, u32 align,
          int kind) {
    Place p;
    if (!reach_lane(m, w, op, lane, space, address, bytes, align, kind, &p)) return NULL;
    Who who = thread_of(w, op, lane);
    enter_access(m, &who, p.region, p.offset, bytes, kind);
    return p.host;
}

/* Places of all lanes. Whole warps mostly stay within the region of their first lane: one comparison each. */
static void reach_warp(Machine *m, Warp *w, const Op *op, const u64 *address, u32 mask, u32 bytes, u32 align,
                       int kind, Reach *out) {
    Place p;
    out->good = 0;
    EACH out->host[l] = memory_zeros;
    if (!mask) return;
    int lead = lowest(mask);
    if (!reach_lane(m, w, op, lead, op->space, address[lead], bytes, align, kind, &p)) mask &= ~(1u << lead);
    else if (p.region) {
        u64 origin = address[lead] - p.offset, limit = p.region->size - bytes, low = align - 1;
        u32 bad = 0;
        EACH bad |= (u32)((address[l] - origin > limit) | ((address[l] & low) != 0)) << l;
        if (!(bad & mask)) {
            u8 *data = p.region->data;
            EACH out->region[l] = p.region;
            EACH out->offset[l] = address[l] - origin;
            ACTIVE out->host[l] = data + out->offset[l];
            out->good = mask;
            return;
        }
    }
    ACTIVE {
        if (!reach_lane(m, w, op, l, op->space, address[l], bytes, align, kind, &p)) continue;
        out->good |= 1u << l;
        out->region[l] = p.region;
        out->offset[l] = p.offset;
        out->host[l] = p.host;
    }
}

/* **** counters **** */

/* The words that the busiest bank gives lanes [start, stop) of `words` words each. */
static u32 busiest_bank(const u64 *addresses, u32 mask, u32 start, u32 stop, u32 words) {
    u32 word[LANES][LANES], most = 0;
    u8 depth[LANES] = {0};
    for (u32 l = start; l < stop; l++) {
        if (!(mask >> l & 1)) continue;
        for (u32 k = 0; k < words; k++) {
            u32 at = (u32)(addresses[l] >> 2) + k, bank = at % LANES, i = 0;
            while (i < depth[bank] && word[bank][i] != at) i++;
            if (i < depth[bank]) continue;
            word[bank][i] = at;
            depth[bank] = (u8)(i + 1);
            if (i + 1 > most) most = i + 1;
        }
    }
    return most;
}

/* Whether no bank is asked twice by lanes [start, stop): most accesses, and quick to see. */
static bool banks_differ(const u64 *addresses, u32 mask, u32 start, u32 stop, u32 words) {
    u64 seen = 0, run = (1ull << words) - 1;
    for (u32 l = start; l < stop; l++) {
        u64 wanted = mask >> l & 1 ? run << (addresses[l] >> 2) % LANES : 0;
        wanted |= wanted >> LANES;
        if (seen & wanted & ~0u) return false;
        seen |= wanted;
    }
    return true;
}

/* Passes through the 32 banks of 4 bytes that shared memory needs for an access of `bytes` a lane: 8-byte
 * accesses go in two half warps, 16-byte ones in four quarters; in each, a bank gives one word a pass.
 * Returns the passes beyond the least, and counts them. */
u32 count_bank_conflicts(Machine *m, const Op *op, const u64 *addresses, u32 mask, u32 bytes) {
    u32 words = bytes < 4 ? 1 : bytes / 4, step = LANES / words, passes = 0, least = 0;
    for (u32 start = 0; start < LANES; start += step) {
        u32 stop = start + step;
        if (!(mask >> start & (u32)((1ull << step) - 1))) continue;
        least++;
        passes += banks_differ(addresses, mask, start, stop, words)
                ? 1 : busiest_bank(addresses, mask, start, stop, words);
    }
    Counter *counter = &m->launch.counters[op->source];
    counter->passes += passes;
    counter->conflicts += passes - least;
    m->totals.shared += (u64)popcount(mask) * bytes;
    return passes - least;
}

/* 32-byte sectors a warp's request touches. Addresses are multiples of `bytes`, so that a lane of up to 32
 * bytes has one; mostly they ascend, and only neighbours share. */
static u32 count_sectors(const u64 *addresses, u32 mask, u32 bytes) {
    u64 seen[2 * LANES], before = 0;
    u32 count = 0;
    bool ascends = bytes <= 32;
    ACTIVE {
        u64 sector = addresses[l] >> 5;
        ascends &= sector >= before;
        count += sector != before;
        before = sector;
    }
    if (ascends) return count;
    count = 0;
    ACTIVE for (u64 s = addresses[l] >> 5; s <= (addresses[l] + bytes - 1) >> 5; s++) {
        u32 i = count;
        while (i > 0 && seen[i - 1] != s) i--;
        if (i == 0) seen[count++] = s;
    }
    return count;
}

static void note_sectors(const Warp *w, const u64 *addresses, u32 mask, u32 bytes, u32 sectors, u32 writes) {
    u64 low = ~0ull, high = 0;
    ACTIVE {
        if (addresses[l] < low) low = addresses[l];
        if (addresses[l] + bytes > high) high = addresses[l] + bytes;
    }
    tape_note(w, SECTORS, sectors, low, high - low, writes);
}

/* Counts a warp's access to shared memory, and to global memory, by what its lanes reached. */
static void count_access(Machine *m, const Op *op, const u64 *addresses, const Reach *reach, u32 bytes,
                         int kind) {
    u32 shared = 0, global = 0, mask = reach->good;
    ACTIVE {
        if (reach->region[l] == NULL) continue;
        if (reach->region[l]->cta) shared |= 1u << l;
        else global |= 1u << l;
    }
    if (shared) count_bank_conflicts(m, op, addresses, shared, bytes);
    if (!global) return;
    u32 sectors = count_sectors(addresses, global, bytes);
    Counter *counter = &m->launch.counters[op->source];
    counter->sectors += sectors;
    counter->requests++;
    m->totals.l2 += 32ull * sectors;
    u32 writes = kind == READ ? 0 : kind == ATOMIC ? 2 : 1;
    if (m->running->tape) note_sectors(m->running, addresses, global, bytes, sectors, writes);
    u64 asked = (u64)popcount(global) * bytes;
    if (kind != WRITE) m->totals.global_read += asked;
    if (kind != READ) m->totals.global_written += asked;
}
