/* Tensor copies: boxes between global memory and shared memory through a tensor map.
 *
 * A box lies in shared memory densely, dimension 0 fastest, in rows of `pitch` bytes (dimension 0); then the
 * swizzle is applied to absolute shared addresses, 16 bytes at a time. Elements outside the tensor are filled
 * in by loads; an mbarrier always gets the bytes of the whole box. Stores drop them, except that dimension 0
 * ends where a chunk of 16 bytes does: on an H100, a row of 131 bf16 of which a box has 136 is stored as 136.
 *
 * Ops: the shared address in `a` (destination of loads, source of stores), b the map's address (u64), c the
 * mbarrier's (u64), e the multicast mask or -1; the list: `vector` coordinates, then im2col offsets. flags:
 * reduction, IM2COL.
 */

#include "tensormap.c"

/* Part of a row that lies in the tensor, in global memory; region NULL: none does. */
typedef struct {
    Region *region;
    u64 offset;
} BoxRow;

/* One box on its way: bytes low to high of each row are in the tensor, or are stored. */
typedef struct {
    Map map;
    i32 at[5], shift[3];   /* coordinates; im2col offsets */
    u32 rows, low, high;
    Region *shared;
    u64 offset;            /* of the box in it */
    Signal signal;
    u8 *dense;             /* stores: the box as it was read */
    BoxRow row[];
} Box;

static size_t box_size(const Box *b) { return sizeof *b + b->rows * sizeof *b->row; }

/* **** where a box lies **** */

/* Coordinates of row `r` in dimensions 1 and up. */
static void row_tiled(const Box *b, u32 r, i64 *at) {
    for (u32 i = 1; i < b->map.rank; i++) {
        at[i] = (i64)b->at[i] + (i64)(r % b->map.count[i]) * b->map.step[i];
        r /= b->map.count[i];
    }
}

/* im2col: row r is pixel r from the starting coordinates, walking through the bounding box of base pixels,
 * moved by the offsets; the last dimension (images) follows when the box is full. */
static void row_im2col(const Box *b, u32 r, i64 *at) {
    const Map *map = &b->map;
    u32 spatial = map->rank - 2;
    i64 carry = r;
    for (u32 i = 0; i < spatial; i++) {
        i64 first = map->lower[i], span = (i64)map->dim[i + 1] + map->upper[i] - first;
        i64 step = map->step[i + 1];
        i64 places = (span + step - 1) / step, place = (b->at[i + 1] - first) / step + carry;
        places = places < 1 ? 1 : places;
        carry = place / places;
        at[i + 1] = first + place % places * step + b->shift[i];
    }
    at[map->rank - 1] = b->at[map->rank - 1] + carry;
}

/* Finds the row's part in global memory; its findings are the map's fault. */
static void find_row(Machine *m, Warp *w, const Op *op, int lane, Box *b, u32 r, int kind) {
    i64 at[5];
    const Map *map = &b->map;
    BoxRow *row = &b->row[r];
    row->region = NULL;
    if (map->im2col) row_im2col(b, r, at);
    else row_tiled(b, r, at);
    if (b->low >= b->high) return;
    u64 address = map->address + (u64)((i64)b->at[0] * (i64)map->width + (i64)b->low);
    for (u32 i = 1; i < map->rank; i++) {
        if (at[i] < 0 || at[i] >= (i64)map->dim[i]) return;
        address += (u64)at[i] * map->stride[i];
    }
    Place p;
    if (!async_place(m, w, op, lane, GLOBAL, address, b->high - b->low, 1, kind, &p)) return;
    row->region = p.region, row->offset = p.offset;
}

/* Coordinates at which an H100 ends the launch with an illegal instruction: an innermost one that is no
 * multiple of 16 bytes, and any below 0 in a store (of reductions it was not tried). */
static bool coordinates_hold(Machine *m, Warp *w, const Op *op, int lane, const Map *map, int kind) {
    const i32 *list = m->launch.lists + op->list;
    i64 inner = (i64)s32(w, list[0])[lane] * (i64)map->width;
    if (inner % 16) {
        report(m, MISALIGNED, op, w, lane, "an innermost coordinate of %d elements, %lld bytes, which is not a "
               "multiple of 16 bytes", s32(w, list[0])[lane], (long long)inner);
        return false;
    }
    for (u32 i = 0; kind == WRITE && i < map->rank; i++) {
        if (s32(w, list[i])[lane] >= 0) continue;
        report(m, OUT_OF_BOUNDS, op, w, lane, "a store at coordinate %d in dimension %u: tensor stores take no "
               "coordinates below 0", s32(w, list[i])[lane], i);
        return false;
    }
    return true;
}

/* The box at the coordinates; NULL: reported. */
static Box *find_box(Machine *m, Warp *w, const Op *op, int lane, const Map *map, int kind) {
    const i32 *list = m->launch.lists + op->list;
    if (!coordinates_hold(m, w, op, lane, map, kind)) return NULL;
    Box *b = take(sizeof *b + map->rows * sizeof *b->row);
    b->map = *map, b->rows = map->rows, b->dense = NULL, b->signal.cta = NULL;
    for (u32 i = 0; i < map->rank; i++) b->at[i] = s32(w, list[i])[lane];
    for (i32 i = 0; i < 3; i++) {
        i32 at = op->vector + i;
        b->shift[i] = at < op->count ? (i32)(r32(w, list[at])[lane] & 0xffff) : 0;
    }
    i64 width = map->width, begin = -(i64)b->at[0] * width, end = ((i64)map->dim[0] - b->at[0]) * width;
    if (kind == WRITE) end = (end + 15) & ~15ll;
    b->low = (u32)(begin < 0 ? 0 : begin > map->pitch ? map->pitch : begin);
    b->high = (u32)(end < 0 ? 0 : end > map->pitch ? map->pitch : end);
    for (u32 r = 0; r < b->rows; r++) find_row(m, w, op, lane, b, r, kind);
    return b;
}

/* Offset in shared memory of 16 bytes that are `at` bytes into the box. */
static u64 box_chunk(const Box *b, u64 at) {
    u64 address = b->offset + at + SHARED_BASE;
    return (address ^ ((address >> 7 & b->map.swizzle) << 4)) - SHARED_BASE;
}

/* The box's place in shared memory; a swizzle may use all of its last 128 bytes. */
static bool place_box(Machine *m, Warp *w, const Op *op, int lane, u64 address, int kind, const Map *map,
                      Place *p) {
    u64 bytes = map->swizzle ? (map->bytes + 127) & ~127ull : map->bytes;
    int space = kind == WRITE ? SHARED_CLUSTER : SHARED;
    if (!async_place(m, w, op, lane, space, address, bytes, 128, kind, p)) return false;
    if (map->swizzle) p->region->cta->phases |= (u8)(1u << (address >> 7 & map->swizzle));
    return true;
}

static void enter_rows(Machine *m, Who *who, const Box *b, int kind) {
    for (u32 r = 0; r < b->rows; r++) {
        const BoxRow *row = &b->row[r];
        if (!row->region) continue;
        Place p = {row->region, row->offset, row->region->data + row->offset};
        if (kind == WRITE) async_write(m, who, &p, b->high - b->low);
        else enter_access(m, who, p.region, p.offset, b->high - b->low, kind);
    }
}

/* Enters what is touched in shared memory: all of the box by loads, what goes out by stores. */
static void enter_shared(Machine *m, Who *who, const Box *b, int kind) {
    u32 pitch = b->map.pitch;
    Place all = {b->shared, b->offset, b->shared->data + b->offset};
    if (kind == WRITE && !(b->map.swizzle && b->map.bytes % 128)) {
        async_write(m, who, &all, (u32)b->map.bytes);
        return;
    }
    for (u32 r = 0; r < b->rows; r++)
        for (u32 at = 0; at < pitch; at += 16) {
            u64 chunk = box_chunk(b, (u64)r * pitch + at);
            Place p = {b->shared, chunk, b->shared->data + chunk};
            if (kind == WRITE) { async_write(m, who, &p, 16); continue; }
            u32 low = b->low > at ? b->low : at, high = b->high < at + 16 ? b->high : at + 16;
            if (!b->row[r].region || low >= high) continue;
            enter_access(m, who, p.region, p.offset + low - at, high - low, kind);
        }
}

/* The rows in global memory, those that lie evenly as one note. */
static void note_rows(const Warp *w, const Box *b, u32 kind) {
    u64 first = 0, pitch = 0, last = 0, rows = 0;
    if (!w->tape) return;
    for (u32 r = 0; r < b->rows; r++) {
        if (!b->row[r].region) continue;
        u64 at = b->row[r].region->base + b->row[r].offset;
        if (rows == 1) pitch = at - last;
        if (rows && at - last != pitch) tape_note(w, kind, b->high - b->low, first, rows, pitch), rows = 0;
        if (!rows++) first = at;
        last = at;
    }
    if (rows) tape_note(w, kind, b->high - b->low, first, rows, pitch);
}

/* **** loads **** */

/* What elements outside the tensor become, `pitch` bytes of it: 0, or OOB_NAN in each 16 bits. An H100 was
 * seen to do so for f16, bf16 and f32. */
static void fill_row(const Map *map, u8 *row) {
    u16 nan = map->fill ? OOB_NAN : 0;
    for (u32 i = 0; i < map->pitch; i += 2) memcpy(row + i, &nan, 2);
}

static void flush_row(u8 *row, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 4) {
        f32 x;
        memcpy(&x, row + i, 4);
        x = flush(x);
        memcpy(row + i, &x, 4);
    }
}

static void complete_load(Machine *m, Async *a) {
    Box *b = (Box *)a->bytes;
    const Map *map = &b->map;
    u8 row[MAX_PITCH];
    for (u32 r = 0; r < b->rows; r++) {
        const BoxRow *from = &b->row[r];
        fill_row(map, row);
        if (from->region) memcpy(row + b->low, from->region->data + from->offset, b->high - b->low);
        if (map->type == MAP_F32_FTZ || map->type == MAP_TF32_FTZ) flush_row(row, map->pitch);
        for (u32 at = 0; at < map->pitch; at += 16) {
            u64 chunk = box_chunk(b, (u64)r * map->pitch + at);
            memcpy(b->shared->data + chunk, row + at, 16);
            async_written(m, b->shared, chunk, 16);
        }
    }
    send_signal(m, a, &b->signal, map->bytes);
}

/* A box to one CTA. */
static void load_box(Machine *m, Warp *w, const Op *op, int lane, const Box *box, u64 to, u64 barrier) {
    Place p;
    Signal signal;
    if (!place_box(m, w, op, lane, to, WRITE, &box->map, &p)) return;
    if (!find_signal(m, w, op, lane, barrier, p.region->cta, true, &signal)) return;
    note_load(m, w, &signal, box->map.bytes);
    Box *b = take(box_size(box));
    memcpy(b, box, box_size(box));
    b->shared = p.region, b->offset = p.offset, b->signal = signal;
    Who who = {w, op, lane, signal.actor, signal.epoch + 1, 2, 0};
    if (m->launch.check) enter_rows(m, &who, b, READ);
    enter_shared(m, &who, b, WRITE);
    async_add(m, (Async){.complete = complete_load, .warp = w, .op = op, .lane = lane, .bytes = (u8 *)b});
}

/* cp.async.bulk.tensor to shared memory. */
HANDLER(tma_load) {
    u64 to[LANES];
    addresses(w, op, to);
    ACTIVE {
        Map map;
        u64 barrier = r64(w, op->c)[l];
        if (!read_map(m, w, op, l, r64(w, op->b)[l], actor_of(w, ACTOR_MAP), ++w->map_reads, &map)) continue;
        Box *box = find_box(m, w, op, l, &map, READ);
        if (!box) continue;
        note_rows(w, box, READS);
        count_bulk(m, GLOBAL, SHARED, map.bytes);
        if (op->e < 0) load_box(m, w, op, l, box, to[l], barrier);
        else for (u32 left = target_ctas(m, w, op, l, op->e); left; left &= left - 1)
            load_box(m, w, op, l, box, in_cta(to[l], (u32)lowest(left)),
                     in_cta(barrier, (u32)lowest(left)));
        give(box);
    }
    return NEXT;
}

/* **** stores and reductions **** */

static void complete_store(Machine *m, Async *a) {
    Box *b = (Box *)a->bytes;
    for (u32 r = 0; r < b->rows; r++) {
        const BoxRow *to = &b->row[r];
        if (!to->region) continue;
        reduce_bytes(reduction_of(a->op), (int)b->map.type, to->region->data + to->offset,
                     b->dense + (u64)r * b->map.pitch + b->low, b->high - b->low);
        async_written(m, to->region, to->offset, b->high - b->low);
    }
    give(b->dense);
}

/* The box is read; what is written comes later. */
static void complete_store_read(Machine *m, Async *a) {
    Box *b = (Box *)a->bytes;
    b->dense = take(b->map.bytes);
    for (u64 at = 0; at < b->map.bytes; at += 16)
        memcpy(b->dense + at, b->shared->data + box_chunk(b, at), 16);
    Async next = *a;
    a->bytes = NULL;
    next.reading = 0, next.complete = complete_store;
    async_add(m, next);
}

/* cp{.reduce}.async.bulk.tensor to global memory. */
HANDLER(tma_store) {
    u64 from[LANES];
    u32 done = 0, same;
    addresses(w, op, from);
    ACTIVE if (!(done >> l & 1)) {
        Map map;
        Place p;
        u32 group = w->bulk_groups[l] + 1;
        done |= same = twins(m, w, op, mask, l, from);
        if (!read_map(m, w, op, l, r64(w, op->b)[l], actor_of(w, ACTOR_BULK_READ), group, &map)) continue;
        if (!place_box(m, w, op, l, from[l], READ, &map, &p)) continue;
        Box *b = find_box(m, w, op, l, &map, WRITE);
        if (!b) continue;
        b->shared = p.region, b->offset = p.offset;
        note_rows(w, b, reduction_of(op) ? REDUCED : WRITES);
        Who reads = {w, op, l, actor_of(w, ACTOR_BULK_READ), group, 2, 0};
        Who writes = {w, op, l, actor_of(w, ACTOR_BULK), group, 2, 0};
        w->bulk_issued[l] = group, w->bulk_last = op;
        enter_shared(m, &reads, b, READ);
        enter_rows(m, &writes, b, reduction_of(op) ? ATOMIC : WRITE);
        count_bulk(m, SHARED, GLOBAL, map.bytes);
        async_add(m, (Async){.complete = complete_store_read, .warp = w, .op = op, .lane = l, .group = group,
                             .twins = same, .family = BULK, .reading = 1, .bytes = (u8 *)b});
    }
    return NEXT;
}

/* cp.async.bulk.prefetch.tensor: a hint, but the map must be one, and what it names must be there. */
HANDLER(tma_prefetch) {
    ACTIVE {
        Map map;
        if (!read_map(m, w, op, l, r64(w, op->b)[l], actor_of(w, 0), w->now, &map)) continue;
        give(find_box(m, w, op, l, &map, READ));
    }
    return NEXT;
}
