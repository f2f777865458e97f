/* Bulk copies and reductions without a tensor map, and st.async and red.async.
 *
 * Ops: `a`, `imm`, `wide`, `space` the destination, b the source's address (u64) in space `more`, e the
 * bytes, c the mbarrier's address (u64) or -1, the list the mask of CTAs that a multicast goes to. flags:
 * reduction | type << 4, types by their numbers in tensor maps.
 */

#include "core.h"
#include "formats.h"

enum { REDUCE_NONE, REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_INC, REDUCE_DEC, REDUCE_AND, REDUCE_OR,
       REDUCE_XOR };
enum { MAP_U8, MAP_U16, MAP_U32, MAP_S32, MAP_U64, MAP_S64, MAP_F16, MAP_F32, MAP_F32_FTZ, MAP_F64, MAP_BF16,
       MAP_TF32, MAP_TF32_FTZ, MAP_TYPES };
static const u8 map_width[MAP_TYPES] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};

/* **** reductions **** */

/* min and max: a NaN gives way to a number, and -0 is less than +0. */
static f64 reduce_extreme(int how, f64 x, f64 y) {
    if (x != x) return y;
    if (y != y) return x;
    bool less = x < y || (x == y && signbit(x));
    return less == (how == REDUCE_MIN) ? x : y;
}

static u64 reduce_float(int how, int type, u64 x, u64 y) {
    bool add = how == REDUCE_ADD;
    f32 a, b;
    switch (type) {
    case MAP_F16:
        a = f16_to_f32((u32)x), b = f16_to_f32((u32)y);
        return f32_to_f16(add ? a + b : (f32)reduce_extreme(how, a, b));
    case MAP_BF16:
        a = bf16_to_f32((u32)x), b = bf16_to_f32((u32)y);
        return f32_to_bf16(add ? a + b : (f32)reduce_extreme(how, a, b));
    case MAP_F64: return as_u64(add ? as_f64(x) + as_f64(y) : reduce_extreme(how, as_f64(x), as_f64(y)));
    default:  /* .f32: subnormals are flushed by .add */
        a = as_f32((u32)x), b = as_f32((u32)y);
        return add ? canonical(flush(flush(a) + flush(b))) : as_u32((f32)reduce_extreme(how, a, b));
    }
}

static u64 reduce_value(int how, int type, u64 x, u64 y) {
    bool less = type == MAP_S32 ? (i32)x < (i32)y : type == MAP_S64 ? (i64)x < (i64)y : x < y;
    switch (how) {
    case REDUCE_INC: return x >= y ? 0 : x + 1;
    case REDUCE_DEC: return x == 0 || x > y ? y : x - 1;
    case REDUCE_AND: return x & y;
    case REDUCE_OR: return x | y;
    case REDUCE_XOR: return x ^ y;
    default: break;
    }
    if (type >= MAP_F16) return reduce_float(how, type, x, y);
    return how == REDUCE_ADD ? x + y : less == (how == REDUCE_MIN) ? x : y;
}

/* Copies elements, or reduces them into what is there. */
static void reduce_bytes(int how, int type, u8 *to, const u8 *from, u64 bytes) {
    if (how == REDUCE_NONE) { memcpy(to, from, bytes); return; }
    u32 width = map_width[type];
    for (u64 i = 0; i + width <= bytes; i += width) {
        u64 x = 0, y = 0;
        memcpy(&x, to + i, width), memcpy(&y, from + i, width);
        x = reduce_value(how, type, x, y);
        memcpy(to + i, &x, width);
    }
}

/* **** bulk operations **** */

/* Where the data of one operation comes from and goes to, in Async.args. */
typedef struct {
    Region *region;   /* destination */
    u64 offset;
    const u8 *from;
    u64 bytes;
    Signal signal;
} Transfer;
_Static_assert(sizeof(Transfer) <= sizeof ((Async *)0)->args, "a Transfer is kept in Async.args");

static int reduction_of(const Op *op) { return op->flags & 15; }
static int type_of(const Op *op) { return op->flags >> 4 & 15; }

/* Checks and enters the write of a destination, which poisons it; a reduction's elements must be there. */
static void transfer_write(Machine *m, Who *who, const Place *p, u32 bytes) {
    if (reduction_of(who->op)) enter_access(m, who, p->region, p->offset, bytes, ATOMIC);
    else async_write(m, who, p, bytes);
}

static void complete_transfer(Machine *m, Async *a) {
    Transfer *t = (Transfer *)a->args;
    reduce_bytes(reduction_of(a->op), type_of(a->op), t->region->data + t->offset, t->from, t->bytes);
    async_written(m, t->region, t->offset, (u32)t->bytes);
    send_signal(m, a, &t->signal, t->bytes);
}

/* A store has read its source; the write comes later, from `bytes`. */
static void complete_read(Machine *m, Async *a) {
    Async next = *a;
    Transfer *t = (Transfer *)next.args;
    next.bytes = take(t->bytes + 1);
    memcpy(next.bytes, t->from, t->bytes);
    t->from = next.bytes;
    next.reading = 0, next.complete = complete_transfer;
    async_add(m, next);
}

static bool bulk_size(Machine *m, Warp *w, const Op *op, int lane, u32 bytes) {
    if (bytes % 16 == 0) return true;
    report(m, MISALIGNED, op, w, lane, "a bulk copy of %u bytes, which is not a multiple of 16", bytes);
    return false;
}

/* CTAs that a multicast goes to: a mask by rank. */
static u32 target_ctas(Machine *m, Warp *w, const Op *op, int lane, i32 place) {
    u32 ctas = r32(w, place)[lane] & 0xffff, size = (u32)w->cta->cluster->size;
    if (ctas >> size)
        report(m, OUT_OF_BOUNDS, op, w, lane, "multicast to CTA mask 0x%04x, the cluster has %u CTAs", ctas,
               size);
    return ctas & ((1u << size) - 1);
}

static u64 in_cta(u64 address, u32 rank) {
    return (address & ((1u << RANK_SHIFT) - 1)) | (u64)rank << RANK_SHIFT;
}

static void count_bulk(Machine *m, int from, int to, u64 bytes) {
    m->totals.async += bytes;
    if (from == GLOBAL || to == GLOBAL) m->totals.l2 += bytes;
    if (from == GLOBAL) m->totals.global_read += bytes;
    if (to == GLOBAL) m->totals.global_written += bytes;
}

/* One destination CTA of a copy to shared memory. */
static void load_to(Machine *m, Warp *w, const Op *op, int lane, u64 to, u64 barrier, const Place *source,
                    u32 bytes) {
    Place p;
    Transfer t;
    if (!async_place(m, w, op, lane, SHARED_CLUSTER, to, bytes, 16, WRITE, &p)) return;
    if (!find_signal(m, w, op, lane, barrier, p.region->cta, true, &t.signal)) return;
    note_load(m, w, &t.signal, bytes);
    Who who = {w, op, lane, t.signal.actor, t.signal.epoch + 1, 2, 0};
    enter_access(m, &who, source->region, source->offset, bytes, READ);
    transfer_write(m, &who, &p, bytes);
    t.region = p.region, t.offset = p.offset, t.from = source->host, t.bytes = bytes;
    Async a = {.complete = complete_transfer, .warp = w, .op = op, .lane = lane};
    memcpy(a.args, &t, sizeof t);
    async_add(m, a);
}

/* cp{.reduce}.async.bulk to shared memory, with an mbarrier. */
HANDLER(bulk_load) {
    u64 to[LANES];
    i32 ctas_at = op->count ? m->launch.lists[op->list] : -1;
    addresses(w, op, to);
    ACTIVE {
        Place source;
        u32 bytes = r32(w, op->e)[l];
        u64 barrier = r64(w, op->c)[l];
        if (!bulk_size(m, w, op, l, bytes)) continue;
        if (!async_place(m, w, op, l, op->more, r64(w, op->b)[l], bytes, 16, READ, &source)) continue;
        count_bulk(m, op->more, SHARED, bytes);
        if (op->more == GLOBAL) tape_note(w, READS, bytes, r64(w, op->b)[l], 1, 0);
        if (ctas_at < 0) { load_to(m, w, op, l, to[l], barrier, &source, bytes); continue; }
        for (u32 left = target_ctas(m, w, op, l, ctas_at); left; left &= left - 1) {
            u32 rank = (u32)lowest(left);
            load_to(m, w, op, l, in_cta(to[l], rank), in_cta(barrier, rank), &source, bytes);
        }
    }
    return NEXT;
}

/* Lanes whose store is that of `lane`, in the same group. The same bytes written twice are written once: a
 * warp whose operands are uniform issues one copy on hardware, and CUTLASS's epilogues store from whole
 * warps. Reductions are done for each. */
static u32 twins(const Machine *m, const Warp *w, const Op *op, u32 mask, int lane, const u64 *address) {
    u32 same = 0;
    const i32 *list = m->launch.lists + op->list;
    if (reduction_of(op)) return 1u << lane;
    EACH {
        bool as = address[l] == address[lane] && r64(w, op->b)[l] == r64(w, op->b)[lane]
            && w->bulk_groups[l] == w->bulk_groups[lane];
        if (op->e >= 0) as &= r32(w, op->e)[l] == r32(w, op->e)[lane];
        for (i32 i = 0; i < op->count; i++) as &= r32(w, list[i])[l] == r32(w, list[i])[lane];
        same |= (u32)as << l;
    }
    return same & mask;
}

/* cp{.reduce}.async.bulk from shared to global memory, in a bulk group. */
HANDLER(bulk_store) {
    u64 to[LANES];
    u32 done = 0, same;
    addresses(w, op, to);
    ACTIVE if (!(done >> l & 1)) {
        Place source, p;
        done |= same = twins(m, w, op, mask, l, to);
        u32 bytes = r32(w, op->e)[l], group = w->bulk_groups[l] + 1;
        if (!bulk_size(m, w, op, l, bytes)) continue;
        if (!async_place(m, w, op, l, SHARED, r64(w, op->b)[l], bytes, 16, READ, &source)) continue;
        if (!async_place(m, w, op, l, GLOBAL, to[l], bytes, 16, WRITE, &p)) continue;
        Who reads = {w, op, l, actor_of(w, ACTOR_BULK_READ), group, 2, 0};
        Who writes = {w, op, l, actor_of(w, ACTOR_BULK), group, 2, 0};
        w->bulk_issued[l] = group, w->bulk_last = op;
        enter_access(m, &reads, source.region, source.offset, bytes, READ);
        transfer_write(m, &writes, &p, bytes);
        count_bulk(m, SHARED, GLOBAL, bytes);
        tape_note(w, reduction_of(op) ? REDUCED : WRITES, bytes, to[l], 1, 0);
        Transfer t = {p.region, p.offset, source.host, bytes, {0}};
        Async a = {.complete = complete_read, .warp = w, .op = op, .lane = l, .group = group, .twins = same,
                   .family = BULK, .reading = 1};
        memcpy(a.args, &t, sizeof t);
        async_add(m, a);
    }
    return NEXT;
}

/* cp.async.bulk.prefetch.L2: a hint, but what it names must be there. b: the address, e: the bytes. */
HANDLER(bulk_prefetch) {
    ACTIVE {
        Place p;
        u32 bytes = r32(w, op->e)[l];
        if (!bulk_size(m, w, op, l, bytes)) continue;
        async_place(m, w, op, l, GLOBAL, r64(w, op->b)[l], bytes, 16, READ, &p);
    }
    return NEXT;
}

/* **** st.async, red.async **** */

/* `a`: the destination, c: the mbarrier, list: the values' registers, width bytes each (flags as above). They
 * are of the generic proxy. */
HANDLER(st_async) {
    u64 to[LANES];
    u32 bytes = (u32)op->width * op->vector;
    const i32 *items = m->launch.lists + op->list;
    addresses(w, op, to);
    ACTIVE {
        Place p;
        Transfer t = {.bytes = bytes};
        if (!async_place(m, w, op, l, SHARED_CLUSTER, to[l], bytes, bytes, WRITE, &p)) continue;
        if (!find_signal(m, w, op, l, r64(w, op->c)[l], p.region->cta, false, &t.signal)) continue;
        Who who = {w, op, l, t.signal.actor, t.signal.epoch + 1, 1, reduction_of(op) != 0};
        transfer_write(m, &who, &p, bytes);
        m->totals.async += bytes;
        Async a = {.complete = complete_transfer, .warp = w, .op = op, .lane = l, .bytes = take(bytes)};
        for (u32 i = 0; i < op->vector; i++) {
            u64 value = op->width == 8 ? r64(w, items[i])[l] : r32(w, items[i])[l];
            memcpy(a.bytes + i * op->width, &value, op->width);
        }
        t.region = p.region, t.offset = p.offset, t.from = a.bytes;
        memcpy(a.args, &t, sizeof t);
        async_add(m, a);
    }
    return NEXT;
}
